"""Paths and URLs of files that other programs wrote: which of the two is given, and the files that are there."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

from casckpt.base.text import is_url
from casckpt.errors import InvalidInput
from casckpt.storage.files import Files
from casckpt.storage.local.files import LocalFiles


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a local file or folder, also of a file:// URL. Raises InvalidInput for an empty one."""
    text = os.fspath(path)
    if not text:
        raise InvalidInput("'' names no file or folder; give a path or a URL")
    return Path(unquote(text.removeprefix("file://")) if text.startswith("file://") else text).expanduser()


def open_files(path: str | os.PathLike[str]) -> Files:
    """Return the files of a folder, or below a URL that fsspec knows. Raises Unsupported for another one."""
    if not is_url(path):
        return LocalFiles(local_path(path))
    from casckpt.storage.remote.files import RemoteFiles  # fsspec takes a while to import

    return RemoteFiles(os.fspath(path))
