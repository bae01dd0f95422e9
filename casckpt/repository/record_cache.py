"""Decoded records, in memory: each save lists commits/ twice, and of ten thousand records one is new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from casckpt.storage.base import Entry

Shown: TypeAlias = tuple[int, str]
"""What a listing shows of an object's content: its size in bytes, and its version."""

MAX_RECORDS = 100_000
"""Beyond it all are dropped; the catalogue still has them."""


def shown(entry: Entry) -> Shown:
    """Of an entry."""
    return entry.size, entry.version


class RecordCache:
    """Records by what a listing shows of them: key, size in bytes, version. Thread-safe.

    Like the rows of the catalogue, one is trusted as long as that is what is listed. ``folded``: see
    `casckpt.repository.commits.Folded`.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Shown, Any]] = {}
        self.folded: tuple[Mapping[str, Shown], Any] | None = None

    def get(self, entry: Entry) -> Any | None:
        """The record that was listed, if it is held."""
        held, record = self._entries.get(entry.key, (None, None))
        return record if held == shown(entry) else None

    def add(self, entry: Entry, record: Any) -> None:
        """Hold a record; it is frozen, and nobody may change what it refers to."""
        if len(self._entries) >= MAX_RECORDS:
            self._entries.clear()
        self._entries[entry.key] = (shown(entry), record)
