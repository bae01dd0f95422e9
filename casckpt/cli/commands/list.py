"""``casckpt list``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import click

from casckpt.cli.session import Session, store_command
from casckpt.cli.text import SHORT_ID, Column, count, freed, moment, say, size, table

if TYPE_CHECKING:
    from casckpt.repository.commits import CommitList
    from casckpt.repository.repository import Repository

_COLUMNS = (
    Column("ID", fixed=True),
    Column("RUN"),
    Column("STEP", "right", fixed=True),
    Column("CREATED (UTC)", fixed=True),
    Column("SIZE", "right", fixed=True),
    Column("NEW", "right", fixed=True),
    Column("NOTES"),
)
log = logging.getLogger(__name__)


@store_command("list")
@click.option("--run", help="Only those of this run.")
@click.option("--all", "everything", is_flag=True, help="Forgotten ones too, until they are purged.")
def command(session: Session, run: str | None, everything: bool) -> None:
    """List the checkpoints, oldest first.

    NEW is what the save of it wrote; the rest of SIZE was in the store already. A "superseded" one has a later twin of
    the same run and step, which answers to that name.
    """
    from casckpt.repository.commits import list_commits

    commits = list_commits(session.repository)
    rows = listing(session.repository, commits, run, everything=everything)
    if run is not None and not rows:
        from casckpt.repository.refs import about_run

        log.warning("%s", about_run(session.repository, commits, run))
    session.give(rows, text)
    if not session.as_json and run is None:
        _say_forgotten(session.repository, commits)


def listing(
    repo: Repository, commits: CommitList, run: str | None = None, *, everything: bool = False
) -> list[dict[str, Any]]:
    """The checkpoints as plain data. A damaged record spoils its own line alone."""
    from casckpt.checkpoint.handle import Checkpoint
    from casckpt.cli.describe import summary
    from casckpt.repository.tags import list_tags, tags_of

    tags = list_tags(repo)
    superseded = {commit.txid for commit in commits.superseded()}
    for name in (*commits.damaged, *tags.damaged):
        log.warning("the record of %s cannot be read; `casckpt verify` says more", name)
    rows = []
    for commit in commits.live() if everything else commits.visible():
        if run is None or commit.run == run:
            row = summary(Checkpoint(repo, commit)) | {
                "bytes_total": commit.committed.bytes_total,
                "tensors": commit.committed.tensors,
                "superseded": commit.txid in superseded,
                "tags": tags_of(tags.tags, commit.txid),
                "metadata": commit.committed.metadata,
            }
            rows.append(row)
    return rows


def _say_forgotten(repo: Repository, commits: CommitList) -> None:
    """What is not in the list, and takes space."""
    forgotten = sum(not commit.visible for commit in commits.live())
    if not forgotten:
        return
    frees = "`casckpt stats` says what a gc frees"  # to read what many forgotten ones hold may take long there
    if not repo.storage.traits.remote:
        from casckpt.repository.usage import freed_by_gc

        found = freed_by_gc(repo, commits)
        frees = f"a gc frees {freed(found.now, found.later)}"
    say(f"{count(forgotten, 'checkpoint')} forgotten: {frees}")


def text(rows: list[dict[str, Any]]) -> None:
    """The table."""
    if not rows:
        say("no checkpoints")
        return
    table(_COLUMNS, map(_cells, rows))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    notes = [*row["tags"], *(what for what in ("ephemeral", "forgotten", "superseded") if row[what])]
    written = size(row["stats"]["bytes_written"])
    created = moment(row["created_at"])
    return (
        row["id"][:SHORT_ID],
        row["run"],
        str(row["step"]),
        created,
        size(row["bytes_total"]),
        written,
        ", ".join(notes),
    )
