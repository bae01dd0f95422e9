"""``casckpt restore``."""

from __future__ import annotations

from typing import Any

import click

from casckpt.cli.completion import FORGOTTEN
from casckpt.cli.describe import brief
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import name, say


@store_command("restore")
@click.argument("refs", type=FORGOTTEN, nargs=-1, required=True, metavar="ID...")
def command(session: Session, refs: tuple[str, ...]) -> None:
    """Make forgotten checkpoints visible again.

    By their ids (`casckpt list --all`). Those that were purged are not found; a conflict if another one is visible
    under its run and step.
    """
    found = [session.store.get(ref) for ref in refs]
    restored = [session.store.restore(one) for one in found]
    session.give({"restored": list(map(brief, restored))}, _text)


def _text(result: dict[str, Any]) -> None:
    for one in result["restored"]:
        say(f"restored {name(one)}")
