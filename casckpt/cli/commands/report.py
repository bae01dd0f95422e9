"""``casckpt report``, and ``casckpt stats``, its short form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from casckpt.cli.describe import plain
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import Column, coded, count, facts, freed, moment, say, size, table
from casckpt.format.records import time_of

_COLUMNS = (
    Column("RUN"),
    Column("CKPTS", "right", fixed=True),
    Column("NEWEST", "right", fixed=True),
    Column("SAVED (UTC)", fixed=True, spare=1),
    Column("SIZE", "right", fixed=True, spare=2),
    Column("STORED", "right", fixed=True),
    Column("ALONE", "right", fixed=True),
)


@store_command("report")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write a page of HTML with charts to FILE.",
)  # fmt: skip
def command(session: Session, output: Path | None) -> None:
    """Show where the bytes of the store are, run by run.

    SIZE is what the checkpoints of a run would take one by one, STORED what they take, ALONE what of that no other run
    uses: so much a gc would free if the run were given up. The page that -o writes shows more: growth, what each
    checkpoint added and why, which layers changed when, damage. It needs casckpt[report].
    """
    if output is not None:
        _write(session, output)
        return
    found = plain(session.store.report())
    for run in found["runs"]:
        run["newest_at"] = time_of(run["newest_at"]).isoformat()
    session.give(found, text)


def _write(session: Session, output: Path) -> None:
    from casckpt.frontends.report import write_report

    nbytes = write_report(session.store, output)
    session.give(
        {"path": str(output), "bytes": nbytes}, lambda result: say(f"wrote {result['path']}, {size(result['bytes'])}")
    )


@store_command("stats")
def stats(session: Session) -> None:
    """Show how much the store holds.

    And what its checkpoints would take without sharing.
    """
    session.give(plain(session.store.stats()), stats_text)


def text(result: dict[str, Any]) -> None:
    """The table, and what belongs to no run alone."""
    if result["runs"]:
        table(_COLUMNS, map(_cells, result["runs"]))
        say()
    facts([
        ("blobs", size(result["bytes_blobs"])),
        ("of several runs", size(result["bytes_shared"])),
        ("of no checkpoint", size(result["bytes_unneeded"])),
        ("a gc frees", freed(result["freed"]["now"], result["freed"]["later"])),
    ])  # fmt: skip
    if result["unreadable"]:
        say(f"{count(len(result['unreadable']), 'checkpoint')} could not be read; `casckpt verify` says more")


def _cells(run: dict[str, Any]) -> tuple[str, ...]:
    return (
        run["run"],
        str(run["checkpoints"]),
        str(run["newest_step"]),
        moment(run["newest_at"]),
        size(run["bytes_logical"]),
        size(run["bytes_used"]),
        size(run["bytes_alone"]),
    )


def stats_text(result: dict[str, Any]) -> None:
    """The numbers."""
    stored, logical = result["bytes_stored"], result["bytes_logical"]
    saving = f" ({logical / stored:.1f} times what is stored)" if stored and logical else ""
    unmirrored = result["unmirrored"]
    state = f"{count(unmirrored, 'checkpoint')} behind" if unmirrored else "up to date"
    mirror = [] if result["mirror"] is None else [("mirror", f"{result['mirror']}, {state}")]
    facts([
        ("checkpoints", f"{result['checkpoints']} of {count(result['runs'], 'run')}, {result['forgotten']} forgotten"),
        ("their size", f"{size(logical)}{saving}"),
        *coded(result),
        ("stored", f"{size(stored)} in {count(result['blobs'], 'blob')}, {size(result['bytes_manifests'])} manifests"),
        ("a gc frees", freed(result["bytes_freed_now"], result["bytes_freed_later"])),
        *mirror,
    ])  # fmt: skip
