"""``casckpt watch``."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import click

from casckpt.cli.completion import REF, RUN
from casckpt.cli.describe import summary
from casckpt.cli.session import Session, finite, store_command
from casckpt.cli.text import moment, name, say
from casckpt.cli.types import DURATION


@store_command("watch")
@click.argument("run", type=RUN)
@click.option("--after", type=REF, metavar="REF", help='Those behind this one, too; "start": all that there are.')
@click.option("--latest-only", is_flag=True, help="Of several new ones only the one that was saved last.")
@click.option("--timeout", type=DURATION, help="End once nothing has come for so long (10m, 0); else never.")
@click.option("--poll", type=DURATION, default="1s", show_default=True, help="How often to ask.")
def command(
    session: Session, *, run: str, after: str | None, latest_only: bool, timeout: timedelta | None, poll: timedelta
) -> None:
    """Print the new checkpoints of a run as they come.

    A line each, once it can be loaded, in the order in which they were announced. "late" is one that began earlier than
    one that was told before. With --json each line is an object. There need be neither store nor run yet.
    """
    told = session.store.watch(run, after=after, latest_only=latest_only, timeout=timeout, poll=poll)
    for one in told:
        row = summary(one.checkpoint) | {"late": one.late}
        say(json.dumps(finite(row), allow_nan=False) if session.as_json else _line(row))


def _line(row: dict[str, Any]) -> str:
    return f"{moment(row['created_at'])}  {name(row)}{'  late' if row['late'] else ''}"
