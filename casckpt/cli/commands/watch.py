"""``casckpt watch``, and ``casckpt follow``, which keeps a folder at what comes."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from casckpt.cli.completion import REF, RUN
from casckpt.cli.describe import brief, summary
from casckpt.cli.session import Session, finite, store_command
from casckpt.cli.text import moment, name, printable, say
from casckpt.cli.types import DURATION


@store_command("watch")
@click.argument("run", type=RUN)
@click.option("--after", type=REF, metavar="REF", help='Begin behind this one; "start": with all that there are.')
@click.option("--latest-only", is_flag=True, help="Of several new ones, print only the one saved last.")
@click.option("--timeout", type=DURATION, help="End after this long without a new one (10m, 0).  [default: never]")
@click.option("--poll", type=DURATION, default="1s", show_default=True, help="How often to ask.")
def command(
    session: Session, *, run: str, after: str | None, latest_only: bool, timeout: timedelta | None, poll: timedelta
) -> None:
    """Print the new checkpoints of a run as they come.

    One line each, once it can be loaded, in the order of their announcements. "late" means that a checkpoint that began
    later was printed before. With --json each line is an object. Neither the store nor the run has to exist yet.
    """
    arrivals = session.store.watch(run, after=after, latest_only=latest_only, timeout=timeout, poll=poll)
    for one in arrivals:
        row = summary(one.checkpoint) | {"late": one.late}
        say(json.dumps(finite(row), allow_nan=False) if session.as_json else _line(row))


def _line(row: dict[str, Any]) -> str:
    return f"{moment(row['created_at'])}  {name(row)}{'  late' if row['late'] else ''}"


@store_command("follow", loads=True)
@click.argument("run", type=RUN)
@click.option("--to", "folder", required=True, type=click.Path(path_type=Path), help="The folder.")
@click.option("--keys", multiple=True, metavar="PATTERN", help="Only tensors whose key matches. May be repeated.")
@click.option("--exec", "command", metavar="CMD", help="Run this in a shell after each switch.")
@click.option("--once", is_flag=True, help="End once the newest version is current.")
@click.option("--keep", type=click.IntRange(min=0), default=1, show_default=True, help="How many older versions stay.")
@click.option("--reuse", is_flag=True, help="Keep one more, and turn its files into those of the next.")
@click.option("--poll", type=DURATION, default="1s", show_default=True, help="How often to ask.")
def follow(
    session: Session, *, run: str, folder: Path, once: bool, poll: timedelta, **options: object
) -> int | None:  # fmt: skip
    """Keep a folder at the newest version of a run.

    For from_pretrained, and for engines that map files. In the folder, the link current leads to a folder as export
    makes it. Each version is a new one, and current switches to it in one instant. No byte of a file that was ever
    current changes, except with --reuse, which writes the next version into the files of an old one. follow retries if
    the store fails. CMD gets CASCKPT_FOLDER, CASCKPT_RUN, CASCKPT_STEP and CASCKPT_ID. After a kill it may run twice
    with the same id. Once it has returned 0, older versions are removed, except --keep of them. With --once the exit
    status is 1 if CMD failed, and 3 if nothing is current, because there is no store or no checkpoint of the run.
    Without --once, it waits for the first one.
    """
    from casckpt.frontends.follow import Follower

    status = 0
    for made in Follower(session.store, run, folder, **options).follow(once=once, poll=poll):  # type: ignore[arg-type]
        status = 1 if made.status else 0
        row = brief(made.checkpoint) | {"folder": str(made.folder), "status": made.status}
        say(json.dumps(row) if session.as_json else f"{name(row)}  {printable(row['folder'])}")
    return status
