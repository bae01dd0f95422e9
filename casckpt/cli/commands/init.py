"""``casckpt init``."""

from __future__ import annotations

from typing import Any

import click

from casckpt.cli.session import Session, store_command
from casckpt.cli.text import facts, size
from casckpt.cli.types import SIZE
from casckpt.errors import Conflict


@store_command("init")
@click.option("--cell-size", type=SIZE, default="1MiB", show_default=True, help="At most so much is compared at once.")
@click.option("--blob-size", type=SIZE, default="32MiB", show_default=True, help="About so large are stored files.")
def command(session: Session, cell_size: int, blob_size: int) -> None:
    """Make an empty store.

    The first save does that too. The sizes never change: what is cut alike is stored once.
    """
    if not session.store.create(cell_bytes=cell_size, blob_bytes=blob_size):
        raise Conflict(f"there is a store at {session.store.url} already; nothing was changed, use it as it is")
    names, marker = ("store_id", "format", "cell_bytes", "blob_bytes"), session.repository.marker
    session.give({"url": session.store.url} | {name: getattr(marker, name) for name in names}, _text)


def _text(result: dict[str, Any]) -> None:
    cells, blobs = size(result["cell_bytes"]), size(result["blob_bytes"])
    facts([("made", result["url"]), ("id", result["store_id"]), ("cells", cells), ("blobs", blobs)])
