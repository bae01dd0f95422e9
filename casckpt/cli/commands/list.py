"""``casckpt list``, and ``casckpt transactions``, which lists the saves in progress."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from casckpt.base.names import is_txid
from casckpt.cli.describe import plain, summary
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import (
    SHORT_ID,
    Column,
    count,
    moment,
    printable,
    say,
    shortened,
    size,
    states,
    table,
    unusual,
)

if TYPE_CHECKING:
    from casckpt.store.listing import Listing

_COLUMNS = (
    Column("ID"),
    Column("RUN"),
    Column("STEP", "right"),
    Column("CREATED (UTC)"),
    Column("WHO"),
    Column("SIZE", "right"),
    Column("NEW", "right"),
    Column("NOTES"),
)
log = logging.getLogger(__name__)


@store_command("list")
@click.option("--run", help="List only checkpoints of this run.")
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Also list forgotten checkpoints and the old locations of rewritten ones, until a gc purges them.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="List only the N newest checkpoints.")
@click.option(
    "--show", multiple=True, metavar="NAME", help="Add a column for this metric or metadata. May be repeated."
)
def command(session: Session, *, run: str | None, everything: bool, limit: int | None, show: tuple[str, ...]) -> None:
    """List the checkpoints, oldest first.

    NEW is the size of the data that the save wrote. The rest of SIZE was already in the store. "superseded" means that
    RUN@STEP refers to another checkpoint. "replaced" marks the old locations of a rewritten checkpoint. `casckpt ls` is
    the same command.
    """
    listing = session.store.listing()
    rows = checkpoint_rows(listing, run, everything=everything)
    if run is not None and not rows:
        log.warning("%s", listing.about_run(run))
    _warn_of_unknown(rows, show)
    rows = rows[-limit:] if limit else rows
    session.give(rows, lambda rows: text(rows, show))
    if not session.as_json and run is None and listing.forgotten:
        lists = "" if everything else " (--all lists them)"
        forgotten = count(len(listing.forgotten), "checkpoint")
        say(f"{forgotten} forgotten{lists}: `casckpt stats` shows what a gc frees", err=True)  # stdout has only rows


def _warn_of_unknown(rows: list[dict[str, Any]], show: Sequence[str]) -> None:
    """Warn about empty columns, because their names may be mistyped."""
    known = sorted({key for row in rows for key in _user_values(row)})
    for name in show:
        if rows and name not in known:
            there = f"; the known names are {', '.join(shortened(known))}" if known else ""
            log.warning("no listed checkpoint has %r in its metrics or metadata%s", name, there)


def _user_values(row: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's metadata and metrics, by name."""
    return {**(row["metadata"] or {}), **row["metrics"]}


def checkpoint_rows(listing: Listing, run: str | None = None, *, everything: bool = False) -> list[dict[str, Any]]:
    """Return the checkpoints as plain data. A damaged record affects only its own row."""
    for name in (*listing.damaged_records, *listing.damaged_tags):
        log.warning("the record of %s cannot be read; run `casckpt verify` for details", name)
    rows = []
    for checkpoint in listing.standing if everything else listing.visible:
        if run is None or checkpoint.run == run:
            record = checkpoint.commit.committed
            row = summary(checkpoint) | {
                "bytes_total": record.bytes_total,
                "bytes_held": checkpoint.commit.bytes_held,
                "tensors": record.tensors,
                "superseded": checkpoint in listing.superseded,
                "tags": listing.tags_of(checkpoint),
                "metadata": record.metadata,
            }
            rows.append(row)
    return rows


def text(rows: list[dict[str, Any]], shown: Sequence[str] = ()) -> None:
    """Print the table, with a column for each metric or metadata name in ``shown``."""
    if not rows:
        say("no checkpoints")
        return
    columns = (*_COLUMNS[:-1], *(Column(printable(name).upper(), "right") for name in shown), _COLUMNS[-1])
    table(columns, (_cells(row, shown) for row in rows))


def _cells(row: dict[str, Any], shown: Sequence[str]) -> tuple[str, ...]:
    notes = [*row["tags"], *states(row, "ephemeral", "forgotten", "replaced", "superseded")]
    notes += ["thin"] * bool(row["dropped"])
    notes += ["unhealthy"] * (row["healthy"] is False) + unusual(row["health"])
    written = size(row["stats"]["bytes_written"])
    return (
        row["id"][:SHORT_ID],
        row["run"],
        str(row["step"]),
        moment(row["created_at"]),
        row["who"],
        size(row["bytes_held"]),
        written,
        *(_value(row, name) for name in shown),
        ", ".join(notes),
    )


def _value(row: dict[str, Any], name: str) -> str:
    """Format a metric or metadata value: strings unchanged, floats with 4 digits, other values as JSON.

    Return "" if it is missing.
    """
    found = _user_values(row).get(name, "")
    if isinstance(found, float):
        return f"{found:.4g}"
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


_ALIVE = {True: "alive", False: "dead", None: "on a different host, or unknown"}


@store_command("transactions")
@click.option("--revoke", metavar="TXID", help="End this save. No part of it will become visible.")
@click.option(
    "--give-up",
    metavar="TXID",
    help="End a transaction whose record is lost or unreadable. Its checkpoint is lost, unless another store has it.",
)
def transactions(session: Session, revoke: str | None, give_up: str | None) -> None:
    """List the saves in progress.

    gc waits for these saves. --revoke is safe: at worst, a live save fails, and casckpt retries it. Use --give-up if a
    lost or irreparable record blocks gc.
    """
    if give_up is not None and revoke is not None:
        raise click.UsageError(
            "--revoke is for a save in progress, and --give-up for a damaged one: pass only one of them"
        )
    if give_up is not None:
        session.store.give_up(_txid(give_up, "--give-up"))
        session.give({"given_up": give_up}, lambda result: say(f"gave up {give_up}"))
    elif revoke is None:
        session.give(plain(session.store.transactions()), _transactions_text)
    else:
        session.store.revoke(_txid(revoke, "--revoke"))
        session.give({"revoked": revoke}, lambda result: say(f"revoked {revoke}"))


def _txid(name: str, option: str) -> str:
    if not is_txid(name):
        raise click.BadParameter(
            f"not a transaction id: {name[:120]!r}; `casckpt transactions STORE` lists the ids", param_hint=option
        )
    return name


def _transactions_text(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        say(row["txid"])
        run = f"{row['run']}@{row['step']}" if row["run"] else f"step {row['step']}"
        process = (
            f"process {row['pid']} on {row['host']} ({_ALIVE[row['alive']]})" if row["host"] else "unknown process"
        )
        say(f"  {printable(run)}, since {moment(row['since'])} UTC, {printable(process)}")
    if not rows:
        say("no save is in progress")
