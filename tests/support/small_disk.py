"""Storage on a disk that is full at some time: it has room for so many bytes, some of which other programs take."""

from __future__ import annotations

import threading
from typing import Any

from casckpt.errors import StorageError
from casckpt.storage.base import ObjectStore


class SmallDisk:
    """``inner`` on a disk of ``bytes`` bytes, of which ``foreign`` are files of others.

    Only objects take up room, because records find some in prepared files. ``refused``: how many puts found no room.
    """

    def __init__(self, inner: ObjectStore, bytes: int, foreign: int = 0) -> None:
        self.inner, self.bytes, self.foreign, self.refused = inner, bytes, foreign, 0
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not yet set while the object is being unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def used(self) -> int:
        """The bytes of all objects, needed or not."""
        return sum(one.size for one in self.inner.list("objects/"))

    def bytes_free(self) -> int:
        return max(0, self.bytes - self.used - self.foreign)

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        with self._lock:
            size = memoryview(data).nbytes
            if key.startswith("objects/") and size > self.bytes_free():
                self.refused += 1
                raise StorageError(f"cannot write {key}: the disk is full", full=True)
            self.inner.put(key, data, settle=settle)
