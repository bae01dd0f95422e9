"""Paths and URLs of files that other programs wrote."""

from __future__ import annotations

import os

from casckpt.base.text import is_url, local_path
from casckpt.storage.files import Files, LocalFiles


def open_files(path: str | os.PathLike[str]) -> Files:
    """Return the files of a folder or below a URL. Raises Unsupported for a URL that fsspec does not know."""
    if not is_url(path):
        return LocalFiles(local_path(path))
    from casckpt.storage.remote.files import RemoteFiles  # fsspec takes a while to import

    return RemoteFiles(os.fspath(path))
