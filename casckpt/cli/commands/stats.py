"""``casckpt stats``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, facts, freed, size


@store_command("stats")
def command(session: Session) -> None:
    """Show how much the store holds.

    And what its checkpoints would take without sharing.
    """
    session.give(asdict(session.store.stats()), text)


def text(result: dict[str, Any]) -> None:
    """The numbers."""
    stored, logical = result["bytes_stored"], result["bytes_logical"]
    saving = f" ({logical / stored:.1f} times what is stored)" if stored and logical else ""
    mirror = [] if result["mirror"] is None else [("mirror", f"{result['mirror']}, {_behind(result['unmirrored'])}")]
    facts([
        ("checkpoints", f"{result['checkpoints']} of {count(result['runs'], 'run')}, {result['forgotten']} forgotten"),
        ("their size", f"{size(logical)}{saving}"),
        ("stored", f"{size(stored)} in {count(result['blobs'], 'blob')}, {size(result['bytes_manifests'])} manifests"),
        ("a gc frees", freed(result["bytes_freed_now"], result["bytes_freed_later"])),
        *mirror,
    ])  # fmt: skip


def _behind(unmirrored: int) -> str:
    return f"{count(unmirrored, 'checkpoint')} behind" if unmirrored else "up to date"
