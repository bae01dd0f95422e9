"""``casckpt settings`` and ``init``, for a store, and ``casckpt cache`` and ``reindex``, for this host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from casckpt.base.units import format_duration
from casckpt.cli.describe import plain
from casckpt.cli.session import Output, Session, plain_command, store_command
from casckpt.cli.text import Column, count, facts, printable, say, size, table
from casckpt.cli.types import SIZE, TEXT_SETTING
from casckpt.errors import Conflict

_DEFAULTS = {
    "min_age": "24h",
    "min_age_ephemeral": "15m",
    "revoke_after": "1h",
    "mirror": "none",
    "mirror_thinned": "no",
    "compress": "off",
}


@store_command("settings")
@click.option("--set", "changes", type=TEXT_SETTING, multiple=True, help="Change a setting. May be repeated.")
@click.option("--unset", multiple=True, metavar="NAME", help="Restore a setting's default. May be repeated.")
def command(session: Session, changes: tuple[tuple[str, str], ...], unset: tuple[str, ...]) -> None:
    """Show or change the settings of the store.

    The settings apply to all users of the store. min_age: how long a forgotten checkpoint can be restored.
    min_age_ephemeral: the same for ephemeral checkpoints. revoke_after: how long a save may show no sign of life
    before a gc revokes it. All three are durations, such as 90s, 15m, 12h, 7d or 2w. mirror: the store that receives
    copies of this one, or none. gc keeps data that is not yet safe there. mirror_thinned, yes or no: whether to thin
    the mirror too. compress, off, auto or always: the default for saves.
    """
    fields: Any = dict(changes)
    if both := fields.keys() & set(unset):
        raise click.UsageError(f"--set and --unset both name {', '.join(sorted(both))}: pass only one of them")
    if "mirror_thinned" in fields:
        fields["mirror_thinned"] = click.BOOL.convert(fields["mirror_thinned"], None, click.get_current_context())
    if fields.get("mirror") == _DEFAULTS["mirror"]:
        fields["mirror"] = None
    fields |= dict.fromkeys(unset)
    session.give(plain(session.store.change_settings(**fields) if fields else session.store.settings), _text)


def _text(result: dict[str, Any]) -> None:
    facts((name, _value(name, value)) for name, value in result.items())


def _value(name: str, value: Any) -> str:
    if value is None:
        return f"{_DEFAULTS[name]} (default)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_duration(value) if isinstance(value, float) else str(value)


@store_command("init")
@click.option("--cell-size", type=SIZE, default="1MiB", show_default=True, help="The size of cells.")
@click.option("--blob-size", type=SIZE, default="32MiB", show_default=True, help="The approximate size of blobs.")
def init(session: Session, cell_size: int, blob_size: int) -> None:
    """Create an empty store.

    This is optional: the first save also creates the store. The sizes can never be changed.
    """
    if not session.store.create(cell_bytes=cell_size, blob_bytes=blob_size):
        raise Conflict(f"{session.store.url} is already a store, so nothing was changed. Use the store directly")
    names, marker = ("store_id", "format", "cell_bytes", "blob_bytes"), session.store.marker
    session.give({"url": session.store.url} | {name: getattr(marker, name) for name in names}, _made)


def _made(result: dict[str, Any]) -> None:
    cells, blobs = size(result["cell_bytes"]), size(result["blob_bytes"])
    facts([("made", result["url"]), ("id", result["store_id"]), ("cells", cells), ("blobs", blobs)])


@store_command("reindex")
def reindex(session: Session) -> None:
    """Rebuild this host's catalogue of the store.

    The catalogue is a cache that casckpt checks at each read. The store itself does not change.
    """
    known, path = session.store.reindex(), str(session.store.repository.catalogue.path)
    line = f"{printable(path)} lists {count(known, 'checkpoint')}"
    session.give({"checkpoints": known, "path": path}, lambda result: say(line))


_CACHES = (Column("FOLDER"), Column("BLOBS", "right"), Column("SIZE", "right"))


@plain_command("cache")
@click.argument("folder", required=False, type=click.Path(path_type=Path, file_okay=False), envvar="CASCKPT_CACHE_DIR")
@click.option("--clear", is_flag=True, help="Remove all blobs.")
def cache(output: Output, folder: Path | None, *, clear: bool) -> None:
    """Show the blob caches of this host.

    The first one is in FOLDER, which is the user's cache folder by default. The second one is in this host's memory.
    With --clear, the command shows what it has removed. Running jobs read the removed blobs from the store.
    """
    from casckpt.store.opening import host_caches

    rows = []
    for found in host_caches(folder):
        blobs, nbytes = found.clear() if clear else found.contents
        rows.append({"folder": str(found.root), "blobs": blobs, "bytes": nbytes})
    output.give(rows, _caches)


def _caches(rows: list[dict[str, Any]]) -> None:
    table(_CACHES, ([printable(row["folder"]), str(row["blobs"]), size(row["bytes"])] for row in rows))
