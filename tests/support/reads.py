"""Counts the bytes that are read from blobs."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from casckpt.storage.local.syscalls import cached_pages
from casckpt.store.store import Store


@contextmanager
def blob_bytes(store: Store) -> Iterator[list[int]]:
    """Count the bytes that the block reads from blobs."""
    storage: Any = store.repository.storage
    found: list[int] = []
    real = storage.open

    @contextmanager
    def opened(key: str, *, shared: bool = False) -> Iterator[Any]:
        with real(key, shared=shared) as reader:
            yield _Counting(reader, found) if key.endswith(".safetensors") else reader

    storage.open = opened
    yield found
    del storage.open


class _Counting:
    def __init__(self, inner: Any, found: list[int]) -> None:
        self.inner, self.found = inner, found

    @property
    def size(self) -> int:
        size: int = self.inner.size
        return size

    def read_into(self, offset: int, buffers: Any) -> None:
        self.found.extend(buffer.nbytes for buffer in buffers)
        self.inner.read_into(offset, buffers)


def pages(store: Store, *, drop: bool = False) -> tuple[int, int]:
    """Return how many of the blobs' pages are in the page cache, and their total number.

    Both numbers exclude pages that cannot be dropped.
    """
    held = total = 0
    for path in Path(store.url, "objects").rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 20:
            with path.open("rb") as file:
                if drop:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                held += cached_pages(file.fileno(), 0, path.stat().st_size)
                total += -(-path.stat().st_size // mmap.PAGESIZE)
    return held, total
