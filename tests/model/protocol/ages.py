"""Ages by the storage's clock: gcs of different ages, and a writer that puts any record at any number of a log.

A record is at ("commits", N): its kind, the time in it, which its writer chooses, and the storage's time of the object.
The checkpoint has a blob and a manifest, at ("objects", "b") and ("objects", "m").

A record counts since it and all before it exist, because who reads a log by its keys stops at a gap. gc learns the
storage's time from an object that it puts, lists the times of all records, and only then decides by listings. A record
that has no time there is new. What another process has purged is young for as long as gc itself would have waited:
since the `forgotten` right before the `purged`, or else, or after a gap, since the `purged`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tests.model.protocol.explorer import (
    Invariant,
    Model,
    Op,
    Outcome,
    Process,
    Program,
    Store,
    choose,
    clock,
    delete,
    goto,
    look,
)
from tests.model.protocol.places import FORGOTTEN, KEPT, PURGED, RESTORED

COMMITTED = "committed"
MUTANTS = {
    "record_time": "ages count by the times in records",
    "any_purge": "what is purged is old",
    "by_forgotten": "a purge counts from the last `forgotten`, wherever it is",
    "own_time": "a record counts since it exists, whatever is before it",
    "ignores_gaps": "a purge counts from the `forgotten` right before it, even if one before that is missing",
    "unknown_old": "a record that was not among those whose times were listed is old",
    "other_age": "a gc that finds a purged checkpoint relies on the age of the gc that purged it",
    "late_time": "a gc learns the time when it deletes, by its own clock, which is fast",
}


class Rules(NamedTuple):
    mutant: str = ""


class Record(NamedTuple):
    kind: str
    claims: int
    time: int


Log = tuple[tuple[int, Record], ...]


def log(store: Store) -> Log:
    return tuple(sorted((number, record) for (number,), record in store.under("commits").items()))


def is_purged(records: Log) -> bool:
    return any(record.kind == PURGED for _, record in records)


def is_in_doubt(records: Log) -> bool:
    return not is_purged(records) and [number for number, _ in records] != list(range(len(records)))


def last_state(records: Log) -> tuple[int, str]:
    """Return the number and the kind of the record that says whether the checkpoint is visible."""
    until = next((index for index, (_, record) in enumerate(records) if record.kind == PURGED), len(records) - 1)
    return next((number, one.kind) for number, one in reversed(records[: until + 1]) if one.kind != KEPT)


def is_visible(store: Store) -> bool:
    """Whether who reads the log by its keys, up to a gap, finds the checkpoint visible. A purge ends this for all."""
    records = log(store)
    by_keys = tuple(one for index, one in enumerate(records) if one[0] == index)
    return not is_purged(records) and last_state(by_keys)[1] in (COMMITTED, RESTORED)


def put(number: int, kind: str, claims: int | None = None) -> Op:
    def run(store: Store) -> Iterable[Outcome]:
        now, key = store.get("clock"), ("commits", number)
        if key in store.objects:
            yield Outcome(f"finds {number} taken", store, False)
        else:
            record = Record(kind, now if claims is None else claims, now)
            yield Outcome(f"puts {kind} at {number}", store.with_(key, record), True)

    return Op(run)


def writer(left: int) -> Program:
    """Put any records, with times long ago."""
    if left:
        kind = yield choose((FORGOTTEN, RESTORED, PURGED, KEPT))
        number = yield choose((1, 2, 3))
        yield put(number, kind, -9)
        return goto(writer, left - 1)
    return None


def gc(rules: Rules, age: int) -> Program:
    now = yield look("puts an object", lambda store: store.get("clock"))
    times = yield look("lists times", log)
    records = yield look("lists commits", log)
    if is_in_doubt(records):
        return None
    number, kind = last_state(records)
    if kind == FORGOTTEN and now - since(rules, times, records, number, now) >= age:
        yield put(records[-1][0] + 1, PURGED)
    return goto(deletes, rules, age, now, times)


def deletes(rules: Rules, age: int, now: int, times: Log) -> Program:
    stock = yield look("lists objects", lambda store: tuple(name for (name,) in store.under("objects")))
    records = yield look("lists commits again", log)
    if is_in_doubt(records) or not is_purged(records):
        return None
    if rules.mutant == "late_time":
        now = 1 + (yield look("reads its clock", lambda store: store.get("clock")))
    number = hidden_by(rules, records)
    if rules.mutant != "ignores_gaps" and not {*range(number)} <= dict(times).keys():
        number = next(number for number, record in records if record.kind == PURGED)
    young = now - since(rules, times, records, number, now) < (1 if rules.mutant == "other_age" else age)
    if young and "m" in stock and rules.mutant != "any_purge":
        return None
    for name in ("b", "m"):
        if name in stock:
            yield delete(("objects", name))
    return None


def hidden_by(rules: Rules, records: Log) -> int:
    """Return the number of the record that hid the checkpoint, which was purged."""
    ended = next(number for number, record in records if record.kind == PURGED)
    forgotten = [number for number, record in records if record.kind == FORGOTTEN and number < ended]
    if rules.mutant == "by_forgotten":
        return max(forgotten, default=ended)
    before = tuple((number, record) for number, record in records if number < ended)
    return ended - 1 if last_state(before) == (ended - 1, FORGOTTEN) else ended


def since(rules: Rules, times: Log, records: Log, number: int, now: int) -> int:
    """Return since when a record counts."""
    known = dict(times)
    if number not in known:
        return -9 if rules.mutant == "unknown_old" else now
    if rules.mutant == "record_time":
        return known[number].claims
    if rules.mutant == "own_time":
        return known[number].time
    return max(record.time for each, record in known.items() if each <= number)


def note(store: Store) -> Store:
    """Remember when the checkpoint was visible for the last time."""
    return store.with_(("ghost", "seen"), store.get("clock")) if is_visible(store) else store


def _is_old_enough(process: str, before: Store, after: Store) -> bool:
    """A blob without a manifest is left from a gc that deleted rightly."""
    gone = before.under("objects").keys() - after.under("objects").keys()
    is_left = ("objects", "m") not in before.objects
    return not gone or is_left or before.get("clock") - before.get("ghost", "seen") >= AGES[process]


AGES = {"gc 1": 1, "gc 2": 2}
TOO_YOUNG = Invariant("a gc deletes what was visible more recently than its age", _is_old_enough)


def model(
    mutant: str = "",
    *,
    before: tuple[str, ...] = (),
    puts: int = 2,
    until: int = 2,
    gcs: tuple[str, ...] = ("gc 1", "gc 2"),
) -> Model:
    """``before``: the kinds of the records after the first one. ``puts``, ``until``: how much the others do."""
    objects: dict[Any, Any] = {("objects", "b"): True, ("objects", "m"): True, ("clock",): 0, ("ghost", "seen"): 0}
    objects |= {("commits", number): Record(kind, 0, 0) for number, kind in enumerate((COMMITTED, *before))}
    others = [Process(name, goto(gc, Rules(mutant), AGES[name])) for name in gcs]
    return Model(
        Store(objects),
        [Process("writer", goto(writer, puts)), *others, Process("clock", goto(clock, until), daemon=True)],
        steps=[TOO_YOUNG],
        watch=note,
    )
