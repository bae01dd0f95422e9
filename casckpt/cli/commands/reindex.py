"""``casckpt reindex``."""

from __future__ import annotations

from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, printable, say


@store_command("reindex")
def command(session: Session) -> None:
    """Rebuild this host's catalogue of the store.

    The catalogue is a cache: it saves time, and is checked when it is read. Nothing in the store changes.
    """
    known, path = session.store.reindex(), str(session.store.repository.catalogue.path)
    line = f"{printable(path)} knows {count(known, 'checkpoint')}"
    session.give({"checkpoints": known, "path": path}, lambda result: say(line))
