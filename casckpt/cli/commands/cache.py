"""``casckpt cache``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from casckpt.cli.session import CACHE_DIR, Output, plain_command
from casckpt.cli.text import Column, printable, size, table
from casckpt.repository.repository import host_caches

_COLUMNS = (Column("FOLDER"), Column("BLOBS", "right", fixed=True), Column("SIZE", "right", fixed=True))


@plain_command("cache")
@click.option("--clear", is_flag=True, help="Remove all blobs.")
def command(output: Output, *, cache_dir: Path | None, clear: bool) -> None:
    """Show the blob caches of this host.

    The first one is in the cache folder, and the second one in this host's memory. With --clear, the command shows
    what it has removed. Running jobs continue, and read the removed blobs from the store.
    """
    rows = []
    for cache in host_caches(cache_dir):
        blobs, nbytes = cache.clear() if clear else cache.contents
        rows.append({"folder": str(cache.root), "blobs": blobs, "bytes": nbytes})
    output.give(rows, _text)


command.params.insert(1, CACHE_DIR)


def _text(rows: list[dict[str, Any]]) -> None:
    table(_COLUMNS, ([printable(row["folder"]), str(row["blobs"]), size(row["bytes"])] for row in rows))
