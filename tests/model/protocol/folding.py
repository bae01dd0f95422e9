"""History that is over is folded: gc lists it in an object `ended`, and deletes its logs.

`ended` wins over any log, whole, partial or late: a process that slept may create a record at a key that is free again.
Readers read logs first and `ended` afterwards, which `places.log` does in one step, at the instant of the first: if a
log ends between the two, a later step finds that. `reader` takes all steps apart.

Folded is a log that ends itself, if no file in transactions/ names its txid or a slot in it, and nothing is left in
the folders of its places, so that a whole gc has run since it ended. No rule needs a minimum age: it only bounds how
long a process may sleep that does not look into `ended` before it says that it is done.

`eraser`, the gc of an earlier version, folds at once what is purged, even if others share its cells: it only looks
whether the manifests are gone, the last that a gc deletes. Until a month has passed, at ("young", txid), it deletes
only the first record, which has the names and metadata; that of `purged` stays, because who reads or writes a young log
by keys does not look into `ended`.

The checkpoint X has a rewrite T. C0, C1 are copies of one checkpoint under the txids of a fixed sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from tests.model.protocol import blobs
from tests.model.protocol.blobs import SAVE, TIDY, WHOLE, Plan, Turn, gc, gc_waits
from tests.model.protocol.explorer import (
    Ghost,
    Goto,
    Invariant,
    Model,
    Op,
    Outcome,
    Process,
    Program,
    Store,
    choose,
    create,
    delete,
    goto,
    look,
    when_quiet,
)
from tests.model.protocol.places import (
    FORGOTTEN,
    PURGED,
    RESTORED,
    REVOKED,
    Blobs,
    Committed,
    Line,
    Log,
    Rewritten,
    X,
    ended,
    fold,
    log,
    own_log,
    reads_log,
)

MUTANTS = {
    "folds_open": "a log is folded though a file in transactions/ has its txid",
    "folds_slots": "a log is folded though a file in transactions/ names a slot in it",
    "folds_with_objects": "a log is folded though objects are left in the folders of its places",
    "deletes_first": "a gc deletes logs before it creates `ended`",
    "no_places": "a line does not list the places of rewrites",
    "leaves_late": "a gc leaves a log that does not end itself, though `ended` lists it",
    "no_reread": "a rewrite does not read the log again after it has begun",
    "believes_its_put": "who created a record says so, though the log may have been folded before",
    "looks_once": "a copier that has begun does not look again whether its txid is over",
    "knows_late": "a save does not look into `ended` after it has read a log",
    "ended_first": "a reader reads `ended` before logs",
    "says_lost": "a reader that finds a listed record gone does not read `ended` again",
    "erases_all": "erase deletes all records of a young log",
    "erases_hidden": "erase takes what is forgotten, and not purged",
    "erases_nothing": "erase leaves the first record while the log is young",
    "erases_with_manifests": "erase does not look for manifests",
    "clock_first": "a reader looks how old a log is, and then reads it",
}


class Rules(NamedTuple):
    mutant: str = ""


OLD = blobs.Rules()


# -- the gc that folds


def folder(rules: Rules, then: Goto | None = None, erased: str = "") -> Program:
    """List commits/, then transactions/, then objects. Create `ended`, and then delete logs. Leave what is young.

    ``erased``: a checkpoint that is folded though it is young, if it is purged.
    """
    hidden = (FORGOTTEN,) if erased and rules.mutant == "erases_hidden" else ()
    over, late = yield look("lists what is over", lambda store: _over(store, erased, hidden))
    files = yield look("lists transactions", lambda store: frozenset(store.under("transactions").items()))
    left = yield look(
        "lists objects",
        lambda store: frozenset(one for one, name in store.under("objects") if name == "m" or not erased),
    )
    blind = erased and rules.mutant == "erases_with_manifests"
    due = [line for line in over if not _is_named(line, files, rules) and (blind or _is_gone(line, left, rules))]
    logs = tuple(sorted({line.txid for line in due} | late))
    lines = frozenset(line._replace(places=frozenset()) if rules.mutant == "no_places" else line for line in due)
    if rules.mutant == "deletes_first":
        return goto(deletes, rules, logs, goto(folds, rules, lines, then))
    return goto(folds, rules, lines, goto(deletes, rules, logs, then))


def _over(store: Store, erased: str, hidden: tuple[str, ...]) -> tuple[tuple[Line, ...], frozenset[str]]:
    """Return the logs that end themselves, as lines, and the txids of `ended` that have records."""
    folded, found = ended(store), list[Line]()
    names = {txid for txid, _ in store.under("commits")}
    for txid in sorted(names - folded.keys()):
        seen = own_log(store, txid)
        is_due = not is_young(store, txid) or (txid == erased and REVOKED not in seen.records)
        if is_due and (ends_itself(seen.records) or (txid == erased and seen.records[-1:] == hidden)):
            whole = any(seen.has(one) >= {"e", "f"} for one, _ in seen.ever)
            found.append(Line(txid, whole, frozenset(one for one, _ in seen.ever)))
    return tuple(found), frozenset(names & folded.keys())


def is_young(store: Store, txid: str) -> bool:
    return ("young", txid) in store.objects


def by_key(txid: str = X) -> Op:
    """Read a log by keys, and then `ended`, unless the log is young."""

    def log_of_key(store: Store) -> Log:
        return own_log(store, txid) if is_young(store, txid) else log(store, txid)

    return look(f"reads the log of {txid} by keys", log_of_key)


def ends_itself(records: tuple[Any, ...]) -> bool:
    return PURGED in records or REVOKED in records


def _is_named(line: Line, files: frozenset[Any], rules: Rules) -> bool:
    own = any(txid == line.txid for (txid,), _ in files) and rules.mutant != "folds_open"
    slot = line.txid == X and any(slot != SAVE for _, slot in files) and rules.mutant != "folds_slots"
    return own or slot


def _is_gone(line: Line, left: frozenset[str], rules: Rules) -> bool:
    return rules.mutant == "folds_with_objects" or not left & {line.txid, *line.places}


def folds(rules: Rules, lines: frozenset[Line], then: Goto | None) -> Program:
    if lines:
        number = yield look("lists ended", lambda store: len(store.under("ended")))
        if not (yield create(("ended", number), lines)):
            return goto(folds, rules, lines, then)
    return then


def deletes(rules: Rules, txids: tuple[str, ...], then: Goto | None) -> Program:
    """Delete all records of these txids, in any order: whole logs, what another gc has left, and what came late.

    Of a young log, delete only the first record.
    """
    for txid in txids:
        found = yield _own(txid)
        numbers = [number for number, record in enumerate(found) if record is not None]
        if rules.mutant != "erases_all" and (yield look("looks how old it is", _looks_young(txid))):
            numbers = [] if rules.mutant == "erases_nothing" else [number for number in numbers if number == 0]
        if rules.mutant != "leaves_late" or ends_itself(found):
            for number in numbers:
                yield delete(("commits", txid, number))
    return then


def _looks_young(txid: str) -> Callable[[Store], bool]:
    return lambda store: is_young(store, txid)


def _own(txid: str) -> Op:
    """Read all records of a log, with None for gaps."""

    def records(store: Store) -> tuple[Any, ...]:
        found = {number: record for (name, number), record in store.under("commits").items() if name == txid}
        return tuple(found.get(number) for number in range(max(found, default=-1) + 1))

    return look(f"reads {txid}", records)


def settles(rules: Rules) -> Program:
    """After all others have ended, run gc and fold in turn."""
    yield when_quiet()
    then = goto(folder, rules, goto(folder, rules, goto(folder, rules)))
    then = goto(gc, OLD, Turn(1, trims=True, then=then))
    return goto(gc, OLD, Turn(1, trims=True, then=goto(folder, rules, then)))


# -- processes that may sleep at any step


def writes(key: tuple[str, str, int], record: Any) -> Op:
    """Create a record. It is a zombie if its log was folded before.

    The first record of a young log is none. It is there because the checkpoint was committed, and purged since.
    """

    def ghost(store: Store, won: bool) -> Store:
        was_committed = key[2] == 0 and is_young(store, key[1])
        return store.with_(("ghost", "zombie", *key)) if won and key[1] in ended(store) and not was_committed else store

    return create(key, record, ghost)


def says(rules: Rules, me: str, key: tuple[str, str, int], *, file: bool = True) -> Generator[Op, Any, bool]:
    """Say that a record was created. If the transaction's file is gone, look into `ended` before."""
    there = (yield look("reads its file", lambda store: ("transactions", me) in store.objects)) if file else False
    if (
        not there
        and rules.mutant != "believes_its_put"
        and (yield look("reads ended", lambda store: key[1] in ended(store) and not is_young(store, key[1])))
    ):
        return False
    zombie = ("ghost", "zombie", *key)
    yield look("SAYS that it is done", lambda _: "", _lies(zombie))
    return True


def _lies(zombie: tuple[Any, ...]) -> Ghost:
    return lambda store, _: store.with_(("ghost", "lied")) if zombie in store.objects else store


def save(rules: Rules, me: str) -> Program:
    """Name the blobs of X, upload a manifest, and commit."""
    yield create(("transactions", me), SAVE)
    if rules.mutant == "knows_late":
        seen = yield look("reads the log of Z alone", lambda store: own_log(store, "Z"))
    else:
        seen = yield reads_log("Z")
    if not seen.live:
        seen = yield by_key()
    return goto(save_uploads, rules, me, dict(seen.live).get(seen.current, frozenset()))


def save_uploads(rules: Rules, me: str, named: Blobs) -> Program:
    yield create(("objects", me, "m"), True)
    won = yield writes(("commits", me, 0), Committed(named))
    if won:
        yield from says(rules, me, ("commits", me, 0))
    yield delete(("transactions", me))
    return None


def rewrite(rules: Rules, me: str) -> Program:
    seen = yield by_key()
    if not seen.visible:
        return None
    yield create(("transactions", me), seen.next)
    return goto(rewrite_uploads, rules, me, seen.next, seen.live[0][1])


def rewrite_uploads(rules: Rules, me: str, slot: int, old: Blobs) -> Program:
    if rules.mutant != "no_reread":
        seen = yield by_key()
        if seen.next != slot or not seen.visible:
            return goto(blobs.rewrite_ends, OLD, me, slot)
    return goto(rewrite_commits, rules, me, slot, old)


def rewrite_commits(rules: Rules, me: str, slot: int, old: Blobs) -> Program:
    yield create(("objects", me, "e"), True)
    yield create(("objects", me, "m"), True)
    moved = frozenset(one for one in old if one[1] != "e") | {(me, "e")}
    won = yield writes(("commits", X, slot), Rewritten(me, moved))
    if not won:
        return goto(blobs.rewrite_ends, OLD, me, slot)
    yield from says(rules, me, ("commits", X, slot))
    yield delete(("transactions", me))
    return None


def restorer(rules: Rules) -> Program:
    seen = yield by_key()
    if seen.live and not seen.visible:
        key = ("commits", X, seen.next)
        if (yield writes(key, RESTORED)):
            yield from says(rules, "", key, file=False)
    return None


def user(acts: tuple[str, ...], txid: str = X) -> Program:
    for act in acts[:1]:
        seen = yield by_key(txid)
        if blobs.may(seen, act):
            yield create(("commits", txid, seen.next), act)
        return goto(user, acts[1:], txid)
    return None


def copier(rules: Rules, number: int = 0) -> Program:
    """Copy under the first txid of the sequence that is not over. Look again after it began."""
    me = f"C{number}"
    if number > 1:
        return None
    if (yield look(f"looks for {me}", lambda store: _is_known(store, me))):
        return goto(copier, rules, number + 1)
    yield create(("transactions", me), SAVE)
    if rules.mutant != "looks_once" and (yield look(f"looks for {me}", lambda store: _is_known(store, me))):
        yield delete(("transactions", me))
        return goto(copier, rules, number + 1)
    return goto(copier_uploads, rules, me)


def _is_known(store: Store, txid: str) -> bool:
    return txid in ended(store) or ("commits", txid, 0) in store.objects


def copier_uploads(rules: Rules, me: str) -> Program:
    for entry in "em":
        yield create(("objects", me, entry), True)
    key = ("commits", me, 0)
    won = yield writes(key, Committed(frozenset({(me, "e")})))
    if won or own_is_committed((yield _own(me))):
        yield from says(rules, me, key)
    yield delete(("transactions", me))
    return None


def own_is_committed(records: tuple[Any, ...]) -> bool:
    return bool(records) and isinstance(records[0], Committed)


# -- a reader, step by step


def reader(rules: Rules) -> Program:
    """List X, read `ended`, and read the records in any order. Say whether X is visible, or lost."""
    early = (yield look("reads ended", lambda store: X in ended(store))) if rules.mutant == "ended_first" else None
    listed = yield look("lists X", lambda store: tuple(n for name, n in store.under("commits") if name == X))
    over = early if early is not None else (yield look("reads ended", lambda store: X in ended(store)))
    return goto(reads_records, rules, listed, over, ())


def reads_records(rules: Rules, left: tuple[int, ...], over: bool, found: tuple[tuple[int, Any], ...]) -> Program:
    if over:
        return None
    if left:
        number = yield choose(left)
        record = yield look(f"reads record {number}", lambda store: store.get("commits", X, number))
        rest = tuple(one for one in left if one != number)
        return goto(reads_records, rules, rest, over, tuple(sorted((*found, (number, record)), key=lambda one: one[0])))
    numbers = [number for number, _ in found]
    if None in dict(found).values() or numbers != list(range(len(numbers))):
        if rules.mutant != "says_lost" and (yield look("reads ended again", lambda store: X in ended(store))):
            return None
        yield look("SAYS that records are lost", lambda _: "", lambda store, _: store.with_(("ghost", "lost")))
    elif fold(X, tuple(record for _, record in found)).visible:
        yield look("SAYS that X is visible", lambda _: "", lambda store, _: store.with_(("ghost", "visible")))
    return None


def key_reader(rules: Rules, found: tuple[Any, ...] = (), early: bool | None = None) -> Program:
    """Read X by keys, until a number is free, then look how old it is, and then into `ended`."""
    if rules.mutant == "clock_first" and early is None:
        early = yield look("looks how old it is", _looks_young(X))
    record = yield look(f"reads record {len(found)}", lambda store: store.get("commits", X, len(found)))
    if record is not None:
        return goto(key_reader, rules, (*found, record), early)
    young = early if early is not None else (yield look("looks how old it is", _looks_young(X)))
    over = not young and (yield look("reads ended", lambda store: X in ended(store)))
    if fold(X, found).visible and not over:
        yield look("SAYS that X is visible", lambda _: "", lambda store, _: store.with_(("ghost", "visible")))
    return None


# -- invariants

HONEST = Invariant(
    "Who says that it is done has created a record that counts.", lambda store: not store.get("ghost", "lied")
)
OVER = Invariant(
    "What is purged is not visible again, for any reader.", lambda store: not store.get("ghost", "visible")
)
FOUND = Invariant("No reader reports records as lost that were folded.", lambda store: not store.get("ghost", "lost"))


def is_folded(store: Store) -> bool:
    left = ((txid, number) for txid, number in store.under("commits") if txid in ended(store))
    return all(number and is_young(store, txid) for txid, number in left)


FOLDED = Invariant(
    "When all is quiet, no log is left of what is folded, and no first record of what is erased.", is_folded
)


def month() -> Program:
    yield Op(lambda store: [Outcome("has passed", store.without(*(key for key in store.objects if key[0] == "young")))])
    return None


def late(key: tuple[str, str, int], record: Any) -> Program:
    """Create a record, after any time."""
    yield writes(key, record)
    return None


def lands(key: tuple[str, str, str]) -> Program:
    yield create(key, True)
    return None


def comes_back(records: tuple[Any, ...]) -> Program:
    """Put any old record back, as a backup does that is copied over the store."""
    number = yield choose(range(len(records)))
    return goto(late, ("commits", X, number), records[number])


def late_save(me: str) -> Program:
    """Act as a save that gc has revoked, and that knows nothing of it."""
    for entry in "em":
        yield create(("objects", me, entry), True)
    return goto(late, ("commits", me, 0), Committed(frozenset({(me, "e")})))


def meanwhile(records: tuple[tuple[Any, Any], ...]) -> Program:
    """Create all these objects at once."""
    yield Op(lambda store: [Outcome("does all of it", Store({**dict(records), **store.objects}))])
    return None


def log_of(txid: str, *records: Any) -> dict[Any, Any]:
    return {("commits", txid, number): record for number, record in enumerate(records)}


def makes(rules: Rules, name: str) -> Goto:
    """Return the program of a process."""
    plan = Plan(frozenset({("T", "e"), ("T", "m")}), frozenset(), frozenset({X}), frozenset())
    found = {
        "gc": goto(gc, OLD, Turn(1)),
        "gc that resumes": goto(gc_waits, OLD, Turn(0), plan),
        "folder": goto(folder, rules),
        "eraser": goto(folder, rules, None, X),
        "eraser of a copy": goto(folder, rules, None, "C0"),
        "month": goto(month),
        "reader by key": goto(key_reader, rules),
        "user": goto(user, (FORGOTTEN, PURGED)),
        "purger": goto(user, (PURGED,)),
        "restorer": goto(restorer, rules),
        "save": goto(save, rules, "S"),
        "save that slept": goto(save_uploads, rules, "S", PAIR),
        "save Z that slept": goto(late_save, "Z"),
        "rewrite": goto(rewrite, rules, "T"),
        "rewrite that slept": goto(rewrite_commits, rules, "T", 1, PAIR),
        "copier": goto(copier, rules),
        "copier that slept": goto(copier_uploads, rules, "C0"),
        "other copier": goto(meanwhile, COPY),
        "late put": goto(lands, ("objects", "T", "m")),
        "joiner": goto(late, ("commits", X, 0), Committed(PAIR)),
        "rsync": goto(comes_back, OVER_X),
        "reader": goto(reader, rules),
    }
    return found[name.rstrip(" 2")]


PAIR = frozenset({(X, "e"), (X, "f")})
MOVED = frozenset({("T", "e"), (X, "f")})
OVER_X = (Committed(PAIR), FORGOTTEN, PURGED)
COPY = tuple(log_of("C0", Committed(frozenset({("C0", "e")})), FORGOTTEN, PURGED).items())
OBJECTS = {("objects", X, name): True for name in "efm"}
LIVES = log_of(X, Committed(PAIR)) | OBJECTS
MOVES = log_of(X, Committed(PAIR), Rewritten("T", MOVED)) | OBJECTS
SAFE: dict[str, tuple[dict[Any, Any], tuple[str, ...]]] = {
    "a save": (LIVES | {("transactions", "S"): SAVE}, ("save that slept", "gc", "folder")),
    "two that fold": (LIVES | {("transactions", "S"): SAVE}, ("save that slept", "gc", "folder", "folder 2")),
    "a rewrite": (LIVES, ("rewrite", "user", "gc", "folder")),
    "a rewrite that slept": (
        log_of(X, *OVER_X) | OBJECTS | {("transactions", "T"): 1},
        ("rewrite that slept", "gc", "folder"),
    ),
    "a restore": (log_of(X, Committed(PAIR), FORGOTTEN), ("restorer", "purger", "folder")),
    "a copy": ({}, ("copier", "other copier", "folder")),
    "a joined copy": (dict(COPY), ("copier", "copier that slept", "folder")),
    "a save of what is late": (
        LIVES | {("ended", 0): frozenset({Line("Z", False, frozenset())})},
        ("save", "save Z that slept", "gc"),
    ),
    "a gc that resumes": (
        MOVES | {("objects", "T", name): True for name in "em"},
        ("save", "gc that resumes", "user", "folder"),
    ),
    "a late put": (log_of(X, Committed(PAIR), Rewritten("T", MOVED), FORGOTTEN, PURGED), ("late put", "folder")),
    "files that come back": (log_of(X, *OVER_X), ("reader", "rsync", "folder")),
    "a reader": (log_of(X, *OVER_X), ("reader", "joiner", "folder")),
}
YOUNG = {("young", txid): True for txid in (X, "C0")}
ERASED: dict[str, tuple[dict[Any, Any], tuple[str, ...]]] = {
    "erased, a save": (LIVES | YOUNG, ("save", "user", "gc", "eraser")),
    "erased, a restore": (log_of(X, Committed(PAIR), FORGOTTEN) | YOUNG, ("restorer", "purger", "eraser", "month")),
    "erased, a copy": (dict(COPY) | YOUNG, ("copier", "copier that slept", "eraser of a copy", "month")),
    "erased, a reader": (log_of(X, *OVER_X) | YOUNG, ("reader", "joiner", "eraser", "folder", "month")),
    "erased, a reader by key": (log_of(X, *OVER_X) | YOUNG, ("reader by key", "joiner", "eraser", "folder", "month")),
    "erased, a gc that resumes": (
        MOVES | {("objects", "T", name): True for name in "em"} | YOUNG,
        ("save", "gc that resumes", "user", "eraser"),
    ),
}
SAFE |= ERASED
LARGE: dict[str, tuple[dict[Any, Any], tuple[str, ...]]] = {
    "files that come back, two that fold": (log_of(X, *OVER_X), ("reader", "rsync", "folder", "folder 2")),
    "erased, a rewrite": (LIVES | YOUNG, ("rewrite", "user", "gc", "eraser")),
    "a save and a rewrite": (LIVES, ("save", "rewrite", "user", "gc", "folder")),
    "erased, a save and a rewrite": (LIVES | YOUNG, ("save", "rewrite", "user", "gc", "eraser")),
    "two that fold, a rewrite": (LIVES, ("rewrite", "user", "gc", "folder", "folder 2")),
    "copies": ({}, ("copier", "copier 2", "other copier", "folder", "folder 2")),
}


def model(mutant: str = "", *, start: str = "a save") -> Model:
    rules = Rules(mutant)
    objects, names = {**SAFE, **LARGE}[start]
    found = [Process(name, makes(rules, name), mortal=True) for name in names]
    found += [Process("last", goto(settles, rules))]
    whole = () if "a restore" in start else (WHOLE,)  # its objects are gone from the start
    return Model(Store(objects), found, always=(*whole, HONEST, OVER, FOUND), at_end=(TIDY, FOLDED))
