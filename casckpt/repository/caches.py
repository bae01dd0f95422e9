"""What a process remembers of a store: decoded records, what was announced of runs, and the last few manifests.

Of ten thousand records that are listed one is new. A save compares with the parent that was just written, and a load
follows a look.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from casckpt.format.keys import parse_txid
from casckpt.format.names import TxId
from casckpt.format.records import Announced
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
    `casckpt.history.commits.Folded`.
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


class RunCache:
    """What was announced of one run, as far as this process has read it: see `casckpt.history.announcements`.

    ``head``: the highest number that is taken, -1 for none. ``records``: by number, None for those ``unreadable``.
    ``announced``: of each transaction in them the highest number of a record. ``at``: transactions by their step.
    ``newest``: the greatest of them. ``ended``: those that never live again. Hold ``lock`` to go on from ``head``.
    """

    def __init__(self) -> None:
        self.lock = PerProcess(threading.RLock)
        self.is_loaded = False
        self.head = -1
        self.records: dict[int, Announced | None] = {}
        self.unreadable: set[int] = set()
        self.announced: dict[TxId, int] = {}
        self.at: dict[int, list[TxId]] = {}
        self.newest: TxId | None = None
        self.ended: set[TxId] = set()

    def add(self, number: int, record: Announced | None) -> None:
        """Take note of what was read."""
        if record is None:
            self.unreadable.add(number)
        else:
            self.unreadable.discard(number)
        for txid, of_log in () if record is None else record.announced:
            if txid not in self.announced:
                self.at.setdefault(parse_txid(txid).step, []).append(txid)
                self.newest = max(self.newest or txid, txid)
            self.announced[txid] = max(self.announced.get(txid, 0), of_log)
        self.head = max(self.head, number)
        self.records[number] = record  # last: of what a fork or an interrupt cut off the announcement is read again

    def unread(self, low: int = 0) -> list[int]:
        """Return the numbers from ``low`` on that nobody has read yet, the highest first."""
        if len(self.records) == self.head + 1:
            return []
        return [number for number in range(self.head, low - 1, -1) if number not in self.records]


class RunCaches(dict[str, RunCache]):
    """By the hash of the run; of threads that ask for one at once all get the same."""

    def __missing__(self, run: str) -> RunCache:
        return self.setdefault(run, RunCache())


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
