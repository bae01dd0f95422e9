"""Bytes that are read of blobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from casckpt.store.store import Store


@contextmanager
def blob_bytes(store: Store) -> Iterator[list[int]]:
    """Bytes of blobs that are read inside the block."""
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
