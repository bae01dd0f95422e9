"""``casckpt cache``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from casckpt.cli.session import Output, plain_command
from casckpt.cli.text import Column, printable, size, table

_COLUMNS = (Column("FOLDER"), Column("BLOBS", "right", fixed=True), Column("SIZE", "right", fixed=True))


@plain_command("cache")
@click.argument("folder", required=False, type=click.Path(path_type=Path, file_okay=False), envvar="CASCKPT_CACHE_DIR")
@click.option("--clear", is_flag=True, help="Remove all blobs.")
def command(output: Output, folder: Path | None, *, clear: bool) -> None:
    """Show the blob caches of this host.

    The first one is in FOLDER, which is the user's cache folder by default. The second one is in this host's memory.
    With --clear, the command shows what it has removed. Running jobs read the removed blobs from the store.
    """
    from casckpt.store.opening import host_caches

    rows = []
    for cache in host_caches(folder):
        blobs, nbytes = cache.clear() if clear else cache.contents
        rows.append({"folder": str(cache.root), "blobs": blobs, "bytes": nbytes})
    output.give(rows, _text)


def _text(rows: list[dict[str, Any]]) -> None:
    table(_COLUMNS, ([printable(row["folder"]), str(row["blobs"]), size(row["bytes"])] for row in rows))
