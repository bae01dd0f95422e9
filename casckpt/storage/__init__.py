"""Stores bytes by key: the storage contract (`casckpt.storage.base`) and its implementations.

Storage puts, reads, lists and deletes objects. The store relies on three guarantees: a key is created only once, an
object never changes, and a listing shows every object that was put before the listing began. `local` is a folder,
`memory` is for tests, and `remote` covers S3 and every other storage that fsspec supports.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from casckpt.base.text import is_url, local_path
from casckpt.errors import InvalidInput, Unsupported
from casckpt.storage.base import ObjectStore
from casckpt.storage.files import Files, LocalFiles
from casckpt.storage.local.store import LocalStore
from casckpt.storage.memory import MemoryStore

__all__ = ["LocalStore", "MemoryStore", "ObjectStore", "brief", "open_files", "open_storage"]

Options = Mapping[str, Any]
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_HERE = ("", "file", "memory")  # the schemes that need no server; "": a path
_NORMALISED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/[^/]")  # pathlib turns "s3://bucket" into "s3:/bucket"


def open_storage(
    url: str | os.PathLike[str],
    storage_options: Options | None = None,
    *,
    single_writer: bool = False,
    page_cache: bool | None = None,
) -> ObjectStore:
    """Open a path, ``file:///path``, ``memory://name``, ``s3://bucket/prefix`` or any other URL that fsspec supports.

    Creates and reads nothing. Relative paths are made absolute, and ``~`` is expanded. ``single_writer``: see
    `casckpt.storage.remote.store.RemoteStore` and `LocalStore`. ``page_cache``: see `LocalStore`; other storage ignores
    it. Raises
    `InvalidInput` for an invalid name and `Unsupported` for storage that cannot be opened on this machine.
    """
    text: Any = os.fspath(url) if hasattr(url, "__fspath__") else url
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidInput(f"{url!r} does not name a store: pass a path or a URL")
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise InvalidInput("storage_options must be a dict of names and values")  # the values may be secrets
    match = _SCHEME.fullmatch(text) if isinstance(url, str) else None
    scheme, rest = (match[1].lower(), match[2]) if match else ("", text)
    if scheme not in _HERE:
        return _open_remote(scheme, rest, storage_options or {}, single_writer=single_writer)
    if storage_options:
        raise InvalidInput(f"storage_options apply only to remote storage: remove {sorted(storage_options)}")
    if scheme == "memory":
        return MemoryStore(rest)
    path = _path_of_url(rest) if scheme else _path(rest)
    return LocalStore(path, page_cache=page_cache, single_writer=single_writer)


def open_files(path: str | os.PathLike[str]) -> Files:
    """Return the files in a folder or under a URL. Raises Unsupported for a URL that fsspec does not support."""
    if not is_url(path):
        return LocalFiles(local_path(path))
    from casckpt.storage.remote.files import RemoteFiles  # fsspec takes a while to import

    return RemoteFiles(os.fspath(path))


def brief(storage: ObjectStore) -> ObjectStore:
    """Return the same storage for a caller that can do without an answer: no call waits long for a server."""
    make: Callable[[], ObjectStore] | None = getattr(storage, "brief", None)
    return storage if make is None else make()


def _path(rest: str) -> str:
    match = _NORMALISED.match(rest)
    if match and (match[1] in _HERE or _is_known(match[1])):
        raise InvalidInput(
            f"{rest!r} looks like a URL that has lost a slash, as in a pathlib.Path: pass the {match[1]}:// URL as "
            "a string, or put ./ before the name of a folder"
        )
    return os.path.expanduser(rest)


def _path_of_url(rest: str) -> str:
    path = unquote(rest.removeprefix("localhost"))
    if not path.startswith("/") or "\0" in path:
        raise InvalidInput("a file:// URL needs an absolute path: file:///folder/store")
    return path


def _open_remote(scheme: str, rest: str, options: Options, *, single_writer: bool) -> ObjectStore:
    from casckpt.storage.remote.urls import open_remote  # fsspec is slow to import

    if not _is_known(scheme):
        known = ", ".join(f"{name}://" for name in ("file", "memory", "s3", "gs", "az"))
        raise Unsupported(f"casckpt cannot open {scheme}:// URLs: use a path or one of {known}")
    return open_remote(scheme, rest, options, single_writer=single_writer)


def _is_known(scheme: str) -> bool:
    from casckpt.storage.remote.urls import is_known

    return is_known(scheme)
