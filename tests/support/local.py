"""Storage in a folder, and file systems with missing or failing features."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from casckpt.errors import Unsupported
from casckpt.storage.base import ObjectStore
from casckpt.storage.buffers import AlignedBuffer
from casckpt.storage.local import syscalls
from casckpt.storage.local.newfile import Naming
from casckpt.storage.local.store import LocalStore

KEY = "objects/x/a"


def lacking(*args: object, **kwargs: object) -> Any:
    """Stand in for a system call that the platform does not support."""
    raise syscalls.Lacking


def only(way: Naming, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system whose best way of naming files is ``way``."""
    if way > Naming.UNNAMED:
        monkeypatch.setattr(syscalls, "open_unnamed", lacking)
    if way > Naming.LINK:
        monkeypatch.setattr(syscalls, "link_named", lacking)
    if way > Naming.RENAME:
        monkeypatch.setattr(syscalls, "rename_new", lacking)


def without_links(monkeypatch: pytest.MonkeyPatch, code: int = errno.EPERM) -> None:
    """Simulate a mount such as Google Drive's or gcsfuse: links fail with ``code``, and renames always replace."""
    monkeypatch.setattr(os, "link", failing(os.link, code, times=10**6))
    monkeypatch.setattr(syscalls, "rename_new", lacking)


def supports(way: Naming, folder: Path) -> bool:
    """Report whether the file system of ``folder`` supports this way of naming files."""
    with TemporaryDirectory(dir=folder) as inside, suppress(Unsupported):
        store = LocalStore(inside)
        store._files.way = way
        store.put("a", b"")
        return store._files.way is way
    return False


def require(way: Naming, folder: Path) -> None:
    """Skip the test if the file system of ``folder`` does not support this way of naming files."""
    if not supports(way, folder):
        pytest.skip(f"this file system does not support {way.name}")


def failing(call: Callable[..., Any], code: int, *, times: int = 1, after: int = 0) -> Callable[..., Any]:
    """Return ``call``, except that it fails ``times`` times, starting with call number ``after``."""
    calls = iter(range(10**6))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if after <= next(calls) < after + times:
            raise OSError(code, os.strerror(code))
        return call(*args, **kwargs)

    return wrapped


def put_aligned(store: ObjectStore, key: str, data: bytes) -> None:
    """Put from page-aligned memory."""
    with AlignedBuffer(len(data)) as buffer:
        buffer.view[:] = data
        store.put(key, buffer.view)


def files(store: LocalStore) -> list[str]:
    """Return all files in the folder, including hidden ones."""
    return sorted(str(path.relative_to(store.path)) for path in store.path.rglob("*") if not path.is_dir())
