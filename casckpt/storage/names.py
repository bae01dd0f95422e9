"""Check of keys before they become paths: no key may lead out of the store."""

from __future__ import annotations

from casckpt.errors import Refused


def split_folder(folder: str) -> list[str]:
    """Return the parts of a folder ("" is the store itself). Raises `Refused` for an unusable name."""
    parts = folder.split("/") if folder else []
    if any(not part or part.startswith(".") or "\0" in part for part in parts):
        raise Refused(f"not a key of a store: {folder[:300]!r}; only names without a leading dot are used")
    return parts


def split_key(key: str) -> tuple[str, str]:
    """Return (folder, name) of an object. Raises `Refused` for an unusable key."""
    parts = split_folder(key)
    if not parts:
        raise Refused("the empty string is not a key of a store")
    return "/".join(parts[:-1]), parts[-1]
