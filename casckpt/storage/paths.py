"""Opens files that other programs wrote, by path or URL."""

from __future__ import annotations

import os

from casckpt.base.text import is_url, local_path
from casckpt.storage.files import Files, LocalFiles


def open_files(path: str | os.PathLike[str]) -> Files:
    """Return the files in a folder or under a URL. Raises Unsupported for a URL that fsspec does not support."""
    if not is_url(path):
        return LocalFiles(local_path(path))
    from casckpt.storage.remote.files import RemoteFiles  # fsspec takes a while to import

    return RemoteFiles(os.fspath(path))
