"""Paths and URLs of files that other programs wrote."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

from casckpt.errors import InvalidInput
from casckpt.storage.files import Files
from casckpt.storage.local.files import LocalFiles

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Tell whether ``path`` is a URL other than file://."""
    match = _SCHEME.match(path) if isinstance(path, str) else None
    return match is not None and match[1].lower() != "file"


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a local file or folder, given as a path or a file:// URL. Raises InvalidInput for ""."""
    text = os.fspath(path)
    if not text:
        raise InvalidInput("'' names no file or folder; give a path or a URL")
    return Path(unquote(text.removeprefix("file://")) if text.startswith("file://") else text).expanduser()


def open_files(path: str | os.PathLike[str]) -> Files:
    """Return the files of a folder or below a URL. Raises Unsupported for a URL that fsspec does not know."""
    if not is_url(path):
        return LocalFiles(local_path(path))
    from casckpt.storage.remote.files import RemoteFiles  # fsspec takes a while to import

    return RemoteFiles(os.fspath(path))
