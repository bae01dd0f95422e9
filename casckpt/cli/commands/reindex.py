"""``casckpt reindex``."""

from __future__ import annotations

from typing import Any

from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, printable, say


@store_command("reindex")
def command(session: Session) -> None:
    """Make the catalogue of a store anew.

    This host has one for each store. It only saves time, and is checked when it is read; nothing in the store is
    changed.
    """
    session.give({"checkpoints": session.store.reindex(), "path": str(session.repository.catalogue.path)}, _text)


def _text(result: dict[str, Any]) -> None:
    say(f"{printable(result['path'])} knows {count(result['checkpoints'], 'checkpoint')}")
