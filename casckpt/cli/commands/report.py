"""``casckpt report``, and ``casckpt stats``, its short form."""

from __future__ import annotations

from typing import Any

import click

from casckpt.base.units import time_of
from casckpt.cli.describe import doubt, plain
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import Column, coded, count, facts, freed, moment, say, size, table


def _run_cells(one: dict[str, Any]) -> tuple[str, ...]:
    sizes = (size(one[f"bytes_{what}"]) for what in ("logical", "used", "alone"))
    return one["run"], str(one["checkpoints"]), str(one["newest_step"]), moment(one["newest_at"]), *sizes


def _right(*titles: str) -> tuple[Column, ...]:
    return tuple(Column(title, "right") for title in titles)


_RUNS = (Column("RUN"), *_right("CKPTS", "NEWEST"), Column("SAVED (UTC)"), *_right("SIZE", "STORED", "ALONE"))


@store_command("report")
def command(session: Session) -> None:
    """Show which runs hold the bytes of the store.

    SIZE is the size of a run's checkpoints without sharing. STORED is their size in the store. ALONE is the part that
    no other run uses, which a gc would free if you dropped the run.
    """
    found = plain(session.store.report())
    session.give(found | {"runs": _dated(found["runs"])}, text)


def _dated(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run | {"newest_at": time_of(run["newest_at"]).isoformat()} for run in runs]


@store_command("stats")
@click.option("--plan", is_flag=True, help="Show how fast the store grows, and when the disk is full.")
@click.option("--run", metavar="PATTERN", help="With --plan: include only matching runs.")
def stats(session: Session, *, plan: bool, run: str | None) -> None:
    """Show the size of the store.

    Also shows the size that the checkpoints would have without sharing. --plan shows by how much the checkpoints that
    remain grow per day, at the interval of the saves so far.
    """
    if run is not None and not plan:
        raise click.UsageError("--run applies to --plan")
    sizes = session.store.sizes()
    result = plain(sizes.stats())
    if plan:
        doubt(session.store, run)
        result |= plain(sizes.forecast(run))
    session.give(result, stats_text)


def text(result: dict[str, Any]) -> None:
    """Print the table, and the number of bytes that several runs share."""
    if result["runs"]:
        table(_RUNS, map(_run_cells, result["runs"]))
        say()
    facts([
        ("blobs", size(result["bytes_blobs"])),
        ("shared by runs", size(result["bytes_shared"])),
        ("not in checkpoints", size(result["bytes_unneeded"])),
        ("a gc frees", freed(result["freed"]["now"], result["freed"]["later"])),
    ])  # fmt: skip
    if ids := result["unreadable"]:
        say(f"{count(len(ids), 'checkpoint')} could not be read; run `casckpt verify` for details")


def _plan(result: dict[str, Any]) -> str:
    """Format the forecast."""
    free = "free space unknown" if result["bytes_free"] is None else f"{size(result['bytes_free'])} free"
    full = "" if result["full_at"] is None else f", full at {moment(result['full_at'])}"
    return f"grows by {size(result['bytes_per_day'])} per day, {free}{full}"


def stats_text(result: dict[str, Any]) -> None:
    """Print the figures."""
    stored, logical = result["bytes_stored"], result["bytes_logical"]
    saving = f" ({logical / stored:.1f} times the stored size)" if stored and logical else ""
    facts([
        ("checkpoints", f"{result['checkpoints']} of {count(result['runs'], 'run')}, {result['forgotten']} forgotten"),
        ("their size", f"{size(logical)}{saving}"),
        *coded(result),
        ("stored", f"{size(stored)} in {count(result['blobs'], 'blob')}, {size(result['bytes_manifests'])} manifests"),
        ("a gc frees", freed(result["bytes_freed_now"], result["bytes_freed_later"])),
        *([("plan", _plan(result))] if "full_at" in result else []),
    ])  # fmt: skip
