"""A folder that behaves like a bucket, and the ranges that ranks read there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from casckpt.repository.repository import Repository
from casckpt.storage.base import Reader
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.far import FarStore


class ReadRange(NamedTuple):
    """A range of a blob that was read from the store."""

    key: str
    start: int
    stop: int


class ReadBucket(FarStore):
    """A folder that reports itself as remote, and records the ranges that are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LocalStore(folder))
        self.ranges: list[ReadRange] = []

    @contextmanager
    def open(self, key: str, *, shared: bool = False) -> Iterator[Reader]:
        with super().open(key, shared=shared) as reader:
            yield _RecordingReader(self, key, reader)


class _RecordingReader:
    def __init__(self, store: ReadBucket, key: str, inner: Reader) -> None:
        self._store, self._key, self._inner = store, key, inner

    @property
    def size(self) -> int:
        return self._inner.size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._store.ranges.append(ReadRange(self._key, offset, offset + sum(map(len, buffers))))
        self._inner.read_into(offset, buffers)


def bucket(folder: Path, **options: Any) -> tuple[Store, ReadBucket]:
    """Open the store in a folder as a bucket, with the options of `Repository`."""
    storage = ReadBucket(folder)
    return Store(Repository(storage, **options)), storage


def nbytes(ranges: Sequence[ReadRange]) -> int:
    """Return the total size of ranges."""
    return sum(stop - start for _, start, stop in ranges)


def union(ranges: Sequence[ReadRange]) -> int:
    """Return the number of different bytes in ranges."""
    total, key, end = 0, "", 0
    for name, start, stop in sorted(ranges):
        if name != key:
            key, end = name, 0
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
