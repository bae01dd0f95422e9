"""Decoded records, in memory: each save lists commits/ twice, and of ten thousand records one is new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_RECORDS = 100_000
"""Beyond it all are dropped; the catalogue still has them."""


class RecordCache:
    """Records by their key and the size of their bytes, which is what a listing shows. Thread-safe.

    Like the rows of the catalogue, one is trusted as long as its size is the one that was listed. ``folded``: see
    `casckpt.repository.commits.Folded`.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[int, Any]] = {}
        self.folded: tuple[Mapping[str, int], Any] | None = None

    def get(self, key: str, size: int) -> Any | None:
        """The record of so many bytes under ``key``, if it is held."""
        held, record = self._entries.get(key, (-1, None))
        return record if held == size else None

    def add(self, key: str, size: int, record: Any) -> None:
        """Hold a record; it is frozen, and nobody may change what it refers to."""
        if len(self._entries) >= MAX_RECORDS:
            self._entries.clear()
        self._entries[key] = (size, record)
