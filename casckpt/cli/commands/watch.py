"""``casckpt watch``, and ``casckpt follow``, which updates a folder to each new checkpoint."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import click

from casckpt.base.text import is_url, local_path
from casckpt.cli.describe import brief, summary
from casckpt.cli.session import Session, finite, store_command
from casckpt.cli.text import moment, name, printable, say
from casckpt.cli.types import DURATION
from casckpt.errors import InvalidInput


@store_command("watch")
@click.argument("run")
@click.option("--after", metavar="REF", help='Begin after this checkpoint. "start" begins with the first one.')
@click.option("--latest-only", is_flag=True, help="If there are several new checkpoints, print only the latest one.")
@click.option(
    "--timeout", type=DURATION, help="Exit after this long without a new checkpoint (10m, 0).  [default: never]"
)
@click.option("--poll", type=DURATION, default="1s", show_default=True, help="How often to look for a new checkpoint.")
def command(session: Session, *, run: str, **options: Any) -> None:
    """Print the new checkpoints of a run.

    Prints a line for each checkpoint as soon as it can be loaded, in the order of the announcements. With --json, each
    line is a JSON object. "late" means that the command has already printed a checkpoint whose save began later. The
    store and the run need not exist yet.
    """
    for one in session.store.watch(run, **options):
        row = summary(one.checkpoint) | {"late": one.late}
        say(json.dumps(finite(row), allow_nan=False) if session.as_json else _line(row))


def _line(row: dict[str, Any]) -> str:
    return f"{moment(row['created_at'])}  {name(row)}{'  late' if row['late'] else ''}"


@store_command("follow", loads=True)
@click.argument("run")
@click.option("--to", "folder", required=True, help="The folder to keep up to date.")
@click.option(
    "--keys", multiple=True, metavar="PATTERN", help="Export only tensors whose key matches. May be repeated."
)
@click.option("--exec", "command", metavar="CMD", help="Run this command in a shell after each switch.")
@click.option("--once", is_flag=True, help="Exit once the folder holds the newest checkpoint.")
@click.option(
    "--keep", type=click.IntRange(min=0), default=1, show_default=True, help="The number of older versions to keep."
)
@click.option("--merge", metavar="ema:DECAY", help="Write the moving average of all checkpoints, as merge --ema does.")
@click.option("--poll", type=DURATION, default="1s", show_default=True, help="How often to look for a new checkpoint.")
def follow(session: Session, *, run: str, folder: str, once: bool, poll: timedelta, **options: object) -> int | None:
    """Update a folder to the newest checkpoint of a run.

    The folder is for from_pretrained and for engines that map files. The link "current" in it points to a folder like
    those that export writes. Each version is a new folder, and the link is switched atomically. CMD receives
    CASCKPT_FOLDER, CASCKPT_RUN, CASCKPT_STEP and CASCKPT_ID in its environment. If follow is killed, CMD may run twice
    for a version. Once CMD has returned 0, follow removes older versions, but keeps as many of them as --keep sets. If
    the store fails, follow retries. With --once, the exit status is 1 if CMD failed, and 3 if there is no store or no
    checkpoint of the run. Without --once, follow waits for the first checkpoint.
    """
    from casckpt.frontends.follow import Follower

    if is_url(folder):
        raise InvalidInput(f"{folder} is a URL, but follow switches a link: pass a local folder")
    status = 0
    for made in Follower(session.store, run, local_path(folder), **options).follow(once=once, poll=poll):  # type: ignore[arg-type]
        status = 1 if made.status else 0
        row = brief(made.checkpoint) | {"folder": str(made.folder), "status": made.status}
        say(json.dumps(row) if session.as_json else f"{name(row)}  {printable(row['folder'])}")
    return status
