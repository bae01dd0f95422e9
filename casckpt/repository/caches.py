"""A process's caches: decoded records, announcements of runs, and the last few manifests.

A listing of ten thousand records usually has only one new record. A save compares the state with its parent's
manifest, which was just written. A load often follows a call that has already read the manifest.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from casckpt.format.keys import parse_txid
from casckpt.format.names import TxId
from casckpt.format.records import Announced
from casckpt.storage.base import ListedObject
from casckpt.storage.forking import PerProcess

if TYPE_CHECKING:
    from casckpt.format.manifest import Manifest

Shown: TypeAlias = tuple[int, str]
"""What a listing shows about an object's content: its size in bytes and its version."""

MAX_RECORDS = 100_000
"""The maximum number of records. A full cache drops all of its records; the catalogue still has them."""

MAX_MANIFESTS = 8
MAX_BYTES = 256 << 20


def shown(entry: ListedObject) -> Shown:
    """Return the size and version that a listing shows for an object."""
    return entry.size, entry.version


class RecordCache:
    """Records by what a listing shows about them: key, size in bytes, and version. Thread-safe.

    The cache trusts a record, like a row of the catalogue, as long as the listing shows the same properties.
    ``folded``: see `casckpt.history.commits.Folded`.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Shown, Any]] = {}
        self.folded: tuple[Mapping[str, Shown], Any] | None = None

    def get(self, entry: ListedObject) -> Any | None:
        """Return the record of a listed object, or None if the cache does not have it."""
        held, record = self._entries.get(entry.key, (None, None))
        return record if held == shown(entry) else None

    def add(self, entry: ListedObject, record: Any) -> None:
        """Add a record. It must be frozen, and the objects that it refers to must not change."""
        if len(self._entries) >= MAX_RECORDS:
            self._entries.clear()
        self._entries[entry.key] = (shown(entry), record)


class RunCache:
    """The announcements of one run that this process has read (see `casckpt.history.announcements`).

    ``head``: the highest number in use, or -1 if there is none. ``records``: the records by number, None for
    ``unreadable`` ones. ``announced``: the highest announced record number of each transaction. ``at``: transactions by
    step. ``newest``: the latest transaction. ``low``: gc has deleted all announcements below this number. ``floor``:
    ``at`` has all transactions that are announced below this number, so these announcements need not be read.
    ``ended``: transactions that will never be live again. Hold ``lock`` while you continue reading from ``head``.
    """

    def __init__(self) -> None:
        self.lock = PerProcess(threading.RLock)
        self.is_loaded = False
        self.head = -1
        self.records: dict[int, Announced | None] = {}
        self.unreadable: set[int] = set()
        self.announced: dict[TxId, int] = {}
        self.at: dict[int, set[TxId]] = {}
        self.newest: TxId | None = None
        self.low = self.floor = 0
        self.ended: set[TxId] = set()

    def add(self, number: int, record: Announced | None) -> None:
        """Add an announcement that has been read, or None if it is unreadable."""
        if record is None:
            self.unreadable.add(number)
        else:
            self.unreadable.discard(number)
        for txid, of_log in () if record is None else record.announced:
            if txid not in self.announced:
                self._know(txid)
            self.announced[txid] = max(self.announced.get(txid, 0), of_log)
        self.head = max(self.head, number)
        # last, so that the announcement is reread if a fork or an interrupt happens before this line
        self.records[number] = record

    def add_names(self, txids: Iterable[TxId], head: int) -> None:
        """Add transactions, among them all that were announced up to ``head``."""
        for txid in txids:
            self._know(txid)
        self.floor = max(self.floor, head + 1)  # last, as above

    def _know(self, txid: TxId) -> None:
        self.at.setdefault(parse_txid(txid).step, set()).add(txid)
        self.newest = max(self.newest or txid, txid)

    def unread(self, low: int = 0) -> list[int]:
        """Return the unread numbers that are at least ``low``, highest first."""
        if len(self.records) == self.head + 1:
            return []
        return [number for number in range(self.head, max(low, self.low) - 1, -1) if number not in self.records]


class RunCaches(dict[str, RunCache]):
    """The caches of runs, by run hash. Concurrent threads get the same cache."""

    def __missing__(self, run: str) -> RunCache:
        return self.setdefault(run, RunCache())


class ManifestCache:
    """Manifests by transaction and head, limited in number and size. The least recently used are dropped first.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = PerProcess(threading.Lock)
        self._entries: OrderedDict[tuple[TxId, str], tuple[Manifest, int]] = OrderedDict()

    def get(self, txid: TxId, head: str) -> Manifest | None:
        """Return the manifest, or None if the cache does not have it."""
        with self._lock.get():
            entry = self._entries.get((txid, head))
            if entry is not None:
                self._entries.move_to_end((txid, head))
        return entry[0] if entry else None

    def add(self, txid: TxId, manifest: Manifest) -> None:
        """Add a manifest. The cache keeps the newest one regardless of its size."""
        name = txid, manifest.head.digest
        with self._lock.get():
            self._entries[name] = (manifest, manifest.nbytes)
            self._entries.move_to_end(name)
            while len(self._entries) > 1 and self._is_full():
                self._entries.popitem(last=False)

    def names(self) -> set[tuple[TxId, str]]:
        """Return the transaction and head of each cached manifest."""
        with self._lock.get():
            return set(self._entries)

    def _is_full(self) -> bool:
        return len(self._entries) > MAX_MANIFESTS or sum(size for _, size in self._entries.values()) > MAX_BYTES
