"""What a process remembers of a store: decoded records, and the last few manifests.

Each save lists commits/ twice, and of ten thousand records one is new. It compares with the parent that was just
written, and a load follows a look.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from casckpt.format.names import TxId
from casckpt.storage.base import ListedObject
from casckpt.storage.forking import PerProcess

if TYPE_CHECKING:
    from casckpt.format.manifest import Manifest

Shown: TypeAlias = tuple[int, str]
"""What a listing shows of an object's content: its size in bytes, and its version."""

MAX_RECORDS = 100_000
"""Beyond it all are dropped; the catalogue still has them."""

MAX_MANIFESTS = 8
MAX_BYTES = 256 << 20


def shown(entry: ListedObject) -> Shown:
    """Return what a listing shows of an entry."""
    return entry.size, entry.version


class RecordCache:
    """Records by what a listing shows of them: key, size in bytes, version. Thread-safe.

    Like the rows of the catalogue, one is trusted as long as that is what is listed. ``folded``: see
    `casckpt.repository.commits.Folded`.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Shown, Any]] = {}
        self.folded: tuple[Mapping[str, Shown], Any] | None = None

    def get(self, entry: ListedObject) -> Any | None:
        """Return the record that was listed, if it is held."""
        held, record = self._entries.get(entry.key, (None, None))
        return record if held == shown(entry) else None

    def add(self, entry: ListedObject, record: Any) -> None:
        """Hold a record; it is frozen, and nobody may change what it refers to."""
        if len(self._entries) >= MAX_RECORDS:
            self._entries.clear()
        self._entries[entry.key] = (shown(entry), record)


class ManifestCache:
    """By transaction and head. The least recently used go first; bounded by number and bytes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = PerProcess(threading.Lock)
        self._entries: OrderedDict[tuple[TxId, str], tuple[Manifest, int]] = OrderedDict()

    def get(self, txid: TxId, head: str) -> Manifest | None:
        """Return the manifest, if it is held."""
        with self._lock.get():
            found = self._entries.get((txid, head))
            if found is not None:
                self._entries.move_to_end((txid, head))
        return found[0] if found else None

    def add(self, txid: TxId, manifest: Manifest) -> None:
        """Hold one; the newest stays whatever its size."""
        name = txid, manifest.head.digest
        with self._lock.get():
            self._entries[name] = (manifest, manifest.nbytes)
            self._entries.move_to_end(name)
            while len(self._entries) > 1 and self._is_full():
                self._entries.popitem(last=False)

    def names(self) -> set[tuple[TxId, str]]:
        """Return what those that are held go by."""
        with self._lock.get():
            return set(self._entries)

    def _is_full(self) -> bool:
        return len(self._entries) > MAX_MANIFESTS or sum(size for _, size in self._entries.values()) > MAX_BYTES
