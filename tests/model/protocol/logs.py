"""The records in commits/ in the next format: which commits are live, valid for their ID, and visible.

A log is a tuple of records, beginning with `Committed`, at the keys ("commits", txid, N). In `replaces`, a rewrite
names the txid of its base and the number N of the base's next record. The rewrite *stands* from the instant at which
record N of the base becomes `replaced` by it, until a later `restored` undoes that. It is *void* once it can never
stand again, because N holds a different record, a `restored` follows N, or its base is void. A void rewrite remains
void, so a reader that has seen this once may rely on it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

from tests.model.protocol.explorer import Op, Outcome, Store, create, look

ID = "X"
"""The ID of the checkpoint that is rewritten. All commits in a model have this ID unless specified otherwise."""


class Committed(NamedTuple):
    """The first record. ``replaces``: (txid of the base, number of its next record). ``has``: one letter per entry."""

    replaces: tuple[str, int] | None = None
    has: str = "ef"
    origin: str = ""
    id: str = ID


class Replaced(NamedTuple):
    by: str


FORGOTTEN, RESTORED, PURGED, REVOKED, KEPT = "forgotten", "restored", "purged", "revoked", "kept"
Log = tuple[Any, ...]


class Logs(NamedTuple):
    """A listing of commits/. ``mutant``: an incorrect way to read it, see the tests."""

    of: tuple[tuple[str, Log], ...]
    mutant: str = ""

    def get(self, txid: str) -> Log:
        return next((log for name, log in self.of if name == txid), ())

    def txids(self, id: str = ID) -> list[str]:
        return [txid for txid, log in self.of if isinstance(log[0], Committed) and log[0].id == id]

    def state(self, txid: str) -> Any:
        """Return the last record that counts. `kept` uses up a number but does not change anything."""
        return next((record for record in reversed(self.get(txid)) if record != KEPT), None)

    def number(self, txid: str) -> int:
        """Return the number of the next record."""
        return len(self.get(txid))

    def lives(self, txid: str) -> bool:
        log = self.get(txid)
        return bool(log) and log[0] != REVOKED and PURGED not in log

    def is_void(self, txid: str) -> bool:
        replaces = self.get(txid)[0].replaces
        if replaces is None:
            return False
        base, number = replaces
        log = self.get(base)
        if len(log) > number and (log[number] != Replaced(txid) or RESTORED in log[number:]):
            return True
        return bool(log) and self.is_void(base)

    def stands(self, txid: str) -> bool:
        replaces = self.get(txid)[0].replaces
        if replaces is None or self.mutant == "committed_is_visible":
            return True
        base, number = replaces
        log = self.get(base)
        if self.mutant == "any_number":
            return Replaced(txid) in log
        if len(log) <= number or log[number] != Replaced(txid):
            return False
        if self.mutant == "restored_does_not_undo":
            return True
        chain = self.mutant == "own_link_only" or self.stands(base)
        return RESTORED not in log[number:] and chain

    def is_visible(self, txid: str) -> bool:
        state = self.state(txid)
        return (isinstance(state, Committed) or state == RESTORED) and self.stands(txid)

    def visible(self, id: str = ID) -> list[str]:
        return [txid for txid in self.txids(id) if self.is_visible(txid)]

    def live(self, id: str = ID) -> list[str]:
        return [txid for txid in self.txids(id) if self.lives(txid)]

    def latest(self) -> str:
        """Return the ID of the visible checkpoint that was saved last, as determined by the txid of its first save."""
        seen = [(txid, log[0]) for txid, log in self.of if isinstance(log[0], Committed) and self.is_visible(txid)]
        by_txid = self.mutant == "latest_by_txid"
        order = sorted((txid if by_txid else first.origin or txid, first.id) for txid, first in seen)
        return order[-1][1] if order else ""


@lru_cache(maxsize=1 << 18)
def logs(store: Store, mutant: str = "", where: str = "commits") -> Logs:
    """Return all of commits/ at one instant."""
    return _gathered(store.under(where), mutant)


def listing(mutant: str = "", *, torn: bool = False) -> Generator[Op, Any, Logs]:
    """List commits/. A ``torn`` listing is not atomic: it contains any subset of concurrent puts.

    If the listing lacks a record that other records name, that record is read by its key. This covers gaps below the
    highest number of a log, and the logs of rewrites that replaced a commit.
    """
    if not torn:
        found: Logs = yield look("lists commits", lambda store: logs(store, mutant))
        return found
    before = yield look("begins to list commits", lambda store: frozenset(store.under("commits")))
    shown = yield Op(lambda store: _torn(store, before))
    while lacks(shown, mutant):
        shown = yield _fill(shown, mutant)
    return _gathered(dict(shown), mutant)


Shown = frozenset[tuple[Any, Any]]


def _torn(store: Store, before: frozenset[Any]) -> Iterable[Outcome]:
    now = store.under("commits")
    late = sorted(now.keys() - before)
    for count in range(len(late) + 1):
        for some in combinations(late, count):
            yield Outcome(f"has listed, and missed {count} of {late}", store, _shown(now, now.keys() - {*some}))


def _shown(records: Mapping[Any, Any], keys: Iterable[Any]) -> Shown:
    return frozenset((key, records[key]) for key in keys)


def lacks(shown: Shown, mutant: str = "") -> set[Any]:
    """Return the keys of missing records that must exist because other records name them."""
    keys = {key for key, _ in shown}
    below = {(txid, lower) for txid, number in keys for lower in range(number)}
    replacing = {(record.by, 0) for _, record in shown if isinstance(record, Replaced)}
    needed = {"trusts_the_listing": below, "leaves_holes": replacing}
    return needed.get(mutant, below | replacing) - keys


def _fill(shown: Shown, mutant: str) -> Op:
    return look("reads what the listing lacks", lambda store: _filled(store, shown, mutant))


def _filled(store: Store, shown: Shown, mutant: str) -> Shown:
    """Return the logs, with gaps filled from the current records."""
    names, now = {txid for txid, _ in lacks(shown, mutant)}, store.under("commits")
    return shown | _shown(now, [key for key in now if key[0] in names])


def _gathered(records: Mapping[Any, Any], mutant: str) -> Logs:
    found: dict[str, list[Any]] = {}
    for (txid, _), record in sorted(records.items(), key=lambda item: item[0]):
        found.setdefault(txid, []).append(record)
    return Logs(tuple((txid, tuple(log)) for txid, log in found.items()), mutant)


def append(txid: str, number: int, record: Any, **more: Any) -> Op:
    """Create the record ``number`` of a log. Return False if another process was first."""
    return create(("commits", txid, number), record, **more)
