"""Storage in the memory of this process, for tests, examples and notebooks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from typing_extensions import override

from casckpt.errors import NotFound, Refused, Unsupported
from casckpt.storage.base import (
    AlreadyExists,
    FolderListing,
    Known,
    ListedObject,
    ObjectStore,
    Reader,
    ShortObject,
    Traits,
    split_folder,
    split_key,
)
from casckpt.storage.buffers import plain_bytes

_SPACES: dict[str, dict[str, bytes]] = {}  # name -> objects, so that all stores opened under the same name share them
_HOME = os.urandom(16)  # identifies this process and its forked children, which have a copy
_LOCK = threading.Lock()
# otherwise a child could inherit a lock that another thread holds
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


class MemoryReader(Reader, AbstractContextManager["MemoryReader"]):
    """An open object of a `MemoryStore`. Like an open file, it remains readable after the object is deleted."""

    def __init__(self, key: str, data: bytes) -> None:
        self._key = key
        self._data = memoryview(data)

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self._data.nbytes

    @override
    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        wanted = sum(buffer.nbytes for buffer in buffers)
        if offset + wanted > self.size:
            raise ShortObject(self._key, self.size)
        for buffer in buffers:
            buffer[:] = self._data[offset : offset + buffer.nbytes]
            offset += buffer.nbytes

    def __exit__(self, *_: object) -> None:
        """Do nothing, because there is nothing to close."""


class MemoryStore(ObjectStore):
    """`casckpt.storage.base.ObjectStore` in a dict. All stores with the same name in this process share their objects.

    The objects exist until the process ends. A copy unpickled in another process raises Unsupported when it is used.
    """

    def __init__(self, name: str, home: bytes = _HOME) -> None:
        self.name = name
        self._home = home
        with _LOCK:
            self._here = _SPACES.setdefault(name, {})

    def __reduce__(self) -> tuple[type[MemoryStore], tuple[str, bytes]]:
        return MemoryStore, (self.name, self._home)

    @property
    def _objects(self) -> dict[str, bytes]:
        """The objects. Raises Unsupported in another process, where the store would appear empty."""
        if self._home != _HOME:
            raise Unsupported(
                f"{self.url} is in the memory of another process: its contents cannot be read here, and a save here "
                "would be lost when this process ends; use a folder or a bucket"
            )
        return self._here

    def __repr__(self) -> str:
        return f"MemoryStore({self.name!r})"

    @property
    def url(self) -> str:
        """``memory://name``."""
        return f"memory://{self.name}"

    @property
    def traits(self) -> Traits:
        """The traits of this storage. Its read gap is 0, because merging reads gains nothing."""
        return Traits(remote=False, read_gap=0, parallel=4, exclusive=True)

    @override
    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        split_key(key)
        content = bytes(plain_bytes(data))
        with _LOCK:
            if key in self._objects:
                raise AlreadyExists(key)
            self._objects[key] = content

    def settle(self, folder: str) -> None:
        """Do nothing, because names are as durable as the bytes."""
        split_folder(folder)

    @override
    def get(self, key: str, *, limit: int) -> bytes:
        data = self._find(key)
        if len(data) > limit:
            raise Refused(f"object {key} in {self.url} has {len(data)} bytes, but at most {limit} are allowed")
        return data

    @override
    def open(self, key: str, *, shared: bool = False) -> MemoryReader:
        return MemoryReader(key, self._find(key))

    @override
    def size(self, key: str) -> int | None:
        split_key(key)
        data = self._objects.get(key)
        return None if data is None else len(data)

    @override
    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        with _LOCK:
            entries = [
                ListedObject(key, len(data), f"{hash(data):x}")
                for key, data in self._objects.items()
                if key.startswith(prefix)
            ]
        return iter(entries)

    @override
    def list_folder(self, folder: str) -> FolderListing:
        split_folder(folder)
        start = f"{folder}/"
        below = [(entry, entry.key[len(start) :].split("/")) for entry in self.list(start)]
        folders = {start + parts[0] for _, parts in below if len(parts) > 1}
        return [entry for entry, parts in below if len(parts) == 1], list(folders)

    @override
    def delete(self, key: str) -> None:
        split_key(key)
        with _LOCK:
            self._objects.pop(key, None)

    @override
    def replace(self, key: str, data: memoryview | bytes) -> None:
        split_key(key)
        content = bytes(plain_bytes(data))
        with _LOCK:
            self._objects[key] = content

    def sweep(self, folder: str, *, below: bool = False) -> int:
        """Do nothing, because puts never leave anything behind."""
        split_folder(folder)
        return 0

    def _find(self, key: str) -> bytes:
        split_key(key)
        data = self._objects.get(key)
        if data is None:
            raise NotFound(f"object {key} is not in {self.url}: it was deleted or never written")
        return data
