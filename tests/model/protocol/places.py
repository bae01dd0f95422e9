"""The log of a checkpoint: its state, and the places at which its bytes are.

The records of checkpoint "X" are at ("commits", "X", N). The first one and each `rewritten` name places: the txid under
which a manifest and the blobs that it names are. A blob is (uploader, entry). Every other record changes the state. All
records, `kept` included, take the next number, and a key is never used twice. A process that decides by a log creates
its record at the number right after the last one that it read.

A model reads a log in one step. Readers may do so by key, until a number is free, or by a listing, and read by key what
the listing lacks below the highest number that it shows. Both find the log as it was at one instant: the next record
was created after the listing had begun, or else the listing would show it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from tests.model.protocol.explorer import Op, Store, create, look

FORGOTTEN, RESTORED, PURGED, TRIMMED, REVOKED, KEPT = "forgotten", "restored", "purged", "trimmed", "revoked", "kept"
X = "X"
"""The checkpoint of a model, and the txid of its first places."""
Blobs = frozenset[tuple[str, str]]


class Committed(NamedTuple):
    blobs: Blobs


class Rewritten(NamedTuple):
    by: str
    blobs: Blobs


class Back(NamedTuple):
    """The places ``to`` become the current ones."""

    to: str


class Tagged(NamedTuple):
    """Generation ``number`` of a tag was set."""

    number: int


class Line(NamedTuple):
    """A transaction that is over, in an object `ended`. ``places``: all that its log named.

    ``whole``: whether places with every entry were ever committed.
    """

    txid: str
    whole: bool
    places: frozenset[str]


class Log(NamedTuple):
    """A log as it was read. ``live``: the places that exist, by txid. ``ever``: those that the log has named."""

    records: tuple[Any, ...] = ()
    visible: bool = False
    current: str = ""
    live: tuple[tuple[str, Blobs], ...] = ()
    ever: tuple[tuple[str, Blobs], ...] = ()

    def __str__(self) -> str:
        return ", ".join(map(str, self.records))

    @property
    def next(self) -> int:
        return len(self.records)

    def has(self, txid: str = "") -> frozenset[str]:
        """Return the entries of these places, by default of the current ones."""
        return frozenset(entry for _, entry in dict(self.ever).get(txid or self.current, ()))

    def fullest(self, wanted: frozenset[str] | None = None) -> str:
        """Return the places that exist with the most entries, of those ``wanted``. The current ones go first."""
        found = [txid for txid, _ in self.live]
        among = {entry for txid in found for entry in self.has(txid)} if wanted is None else wanted
        return max(found, key=lambda txid: (len(self.has(txid) & among), txid == self.current, txid), default="")

    def state_before(self, record: Any) -> Log:
        return fold(X, self.records[: self.records.index(record)])


@lru_cache(maxsize=1 << 16)
def fold(txid: str, records: tuple[Any, ...]) -> Log:
    visible, current = False, ""
    live: dict[str, Blobs] = {}
    ever: dict[str, Blobs] = {}
    for record in records:
        if isinstance(record, Committed):
            visible, current = True, txid
            live[txid] = ever[txid] = record.blobs
        elif isinstance(record, Rewritten):
            current = record.by
            live[current] = ever[current] = record.blobs
        elif isinstance(record, Back) and record.to in live:
            current = record.to
        elif record in (FORGOTTEN, RESTORED):
            visible = record == RESTORED
        elif record == TRIMMED:
            live = {current: live[current]}
        elif record == PURGED:
            visible, current, live = False, "", {}
    return Log(records, visible, current, tuple(live.items()), tuple(ever.items()))


def ended(store: Store) -> dict[str, Line]:
    """Return all lines of `ended`, at ("ended", N), by txid."""
    if ("ended", 0) not in store.objects:
        return {}
    return {line.txid: line for lines in store.under("ended").values() for line in lines}


def log(store: Store, txid: str = X) -> Log:
    """Return a log, or an empty one if `ended` lists it. Readers read the log first, and `ended` afterwards."""
    return Log() if txid in ended(store) else own_log(store, txid)


def own_log(store: Store, txid: str) -> Log:
    """Return the log by its records alone, up to the first gap."""
    records: list[Any] = []
    while (record := store.get("commits", txid, len(records))) is not None:
        records.append(record)
    return fold(txid, tuple(records))


def reads_log(txid: str = X) -> Op:
    return look(f"reads the log of {txid}", lambda store: log(store, txid))


def append(seen: Log, record: Any, txid: str = X, *, lost: bool = False) -> Op:
    """Create the record right after the log as read. Return False if another process was first."""
    return create(("commits", txid, seen.next), record, lost=lost)
