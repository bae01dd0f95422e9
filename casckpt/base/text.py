"""Formatting for messages: lists of names and one-line errors. It also recognizes URLs."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from casckpt.errors import InvalidInput

known: Final[set[tuple[Hashable, ...]]] = set()
"""What this process has logged and does not log again."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def listed(names: Sequence[object], most: int = 5) -> str:
    """Format the first few names or numbers for a message."""
    return few(list(map(repr, names)), most)


def few(names: Sequence[object], most: int) -> str:
    """Format the first few names or numbers, and the number of the others, without quotes."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def is_news(*what: Hashable) -> bool:
    """Return whether this is the first call with these values in this process."""
    is_new = what not in known
    known.add(what)
    return is_new


def warn_once(log: logging.Logger, text: str, *values: Hashable) -> None:
    """Log a warning unless this process has logged it with the same values."""
    if is_news(text, *values):
        log.warning(f"{text}. This is logged once", *values)  # noqa: G004 - `text` is a constant of the caller


def lineage_text(lineage: Mapping[str, Any] | None, most: int = 3) -> str:
    """Format where a checkpoint came from, such as "resumed from sft@100 (0123456789ab)". The text may be hostile."""

    def named(value: Any) -> str:
        if value is None:
            return "(too long for the listing)"
        if isinstance(value, list):
            return few(list(map(named, value)), most)
        if isinstance(value, dict) and "run" in value and "step" in value:
            return f"{value['run']}@{value['step']} ({str(value.get('id'))[:12]})"
        return str(value.get("path", value) if isinstance(value, dict) else value)

    text = "; ".join(f"{name.replace('_', ' ')} {named(value):.300}" for name, value in (lineage or {}).items())
    return f"{text:.1000}"


def in_one_line(error: BaseException) -> str:
    """Return the type and message of another library's error on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a URL other than file://."""
    match = _SCHEME.match(path) if isinstance(path, str) else None
    return match is not None and match[1].lower() != "file"


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the local path that a path or a file:// URL names. Raises InvalidInput for an empty string."""
    text = os.fspath(path)
    if not text:
        raise InvalidInput("'' does not name a file or folder; pass a path or a URL")
    return Path(unquote(text.removeprefix("file://")) if text.startswith("file://") else text).expanduser()


def check_outside(store: str, path: str | os.PathLike[str]) -> None:
    """Raise InvalidInput for a path inside the store's folder, where new files could damage the store."""
    if is_url(path) or is_url(store):
        is_inside = f"{os.fspath(path).rstrip('/')}/".startswith(f"{store.rstrip('/')}/")
    else:
        is_inside = local_path(path).resolve().is_relative_to(Path(store).resolve())
    if is_inside:
        raise InvalidInput(f"{os.fspath(path)} is inside the store's own folder, {store}; choose a different path")
