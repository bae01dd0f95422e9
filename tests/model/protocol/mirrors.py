"""A store and its mirror, which it asks by key: nothing is deleted here that the mirror did not have.

Checkpoint X has its log at ("commits", X, N). Copy n of it has its log at ("mirror", n, N); an open transaction of a
copy is at ("open", n), with the places that it copies, and its manifest at ("manifest", n). Blobs of the mirror are
those of saves and rewrites there: `blobs` and the model in the folder above show that places that exist are whole.

The mirror may fold a copy that is over, at ("folded", n): its line says whether it was ever whole.

Places here are *safe* if places of a copy have all their entries and exist or, as long as X was never brought back
(`restored`, `back`), ever did. Before gc or a rotation forgets, purges or trims, it reads the log, asks the mirror,
settles it and asks again, and creates its record right after the log as read. A pass copies the fullest places unless
they are safe. A folded copy is safe like one that ever had all entries, if it was whole.

The ghost ("had",) has the entries that the mirror has had, in places that exist, since X was last brought back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tests.model.protocol.explorer import (
    Goto,
    Invariant,
    Model,
    Op,
    Outcome,
    Process,
    Program,
    Store,
    create,
    goto,
    look,
    when_quiet,
)
from tests.model.protocol.places import (
    FORGOTTEN,
    PURGED,
    RESTORED,
    REVOKED,
    TRIMMED,
    Back,
    Committed,
    Line,
    Log,
    Rewritten,
    X,
    append,
    fold,
    log,
    reads_log,
)

MUTANTS = {
    "ever": "what the mirror ever had is safe, though X was brought back since",
    "ask_first": "a gc asks the mirror before it reads the log",
    "any_entries": "any copy is safe, whatever it has",
    "thin_is_enough": "where thinned copies suffice, a copy with fewer entries than the current places is safe",
    "stops_at_open": "who asks stops at a copy that is open",
    "stops_at_revoked": "who asks stops at a copy that was revoked",
    "copies_current": "a pass copies the current places, though older ones have more",
    "forgets_unasked": "a rule forgets without asking",
    "purges_unasked": "a gc purges without asking",
    "trims_unasked": "a gc trims entries without asking",
    "later_number": "a gc takes the next number if its own is taken",
    "remembers": "a gc remembers the answer of the mirror",
    "no_settle": "a gc does not settle the mirror",
    "settles_last": "a gc that has settled the mirror does not ask again",
    "joins_by_id": "a process joins a copy of other places of the same checkpoint",
    "folded_is_safe": "a folded copy is safe if it was ever committed, whatever it had",
    "folded_is_free": "a pass copies under the txid of a folded copy",
    "replaces_fuller": "a pass makes a copy current that lacks entries of the copy's current places",
}


ENTRIES = ("e", "eg", "ef")
"""The entries that thin keeps, or that a fuller copy from elsewhere brings."""


class Rules(NamedTuple):
    """The rules of a model. ``thinned``: what is thinned here need not be whole in the mirror.

    ``power``: the mirror's last record may be lost until it is settled. ``at_once``: nothing happens between an answer
    of the mirror and the record here.
    """

    mutant: str = ""
    thinned: bool = False
    power: bool = False
    at_once: bool = False


# -- the mirror's logs


def copy_log(store: Store, number: int) -> Log:
    """Return the log of a copy. That of a folded one has only its line, and no places."""
    line = store.get("folded", number)
    if line is not None:
        return Log((line,))
    records: list[Any] = []
    while (record := store.get("mirror", number, len(records))) is not None:
        records.append(record)
    return fold(f"copy {number}", tuple(records))


def copies(store: Store) -> list[Log]:
    """Return the logs of all copies. A log is empty if the copy is open."""
    found: list[Log] = []
    while True:
        seen = copy_log(store, len(found))
        if not seen.records and store.get("open", len(found)) is None:
            return found
        found.append(seen)


def needed(seen: Log, rules: Rules) -> frozenset[str]:
    names = [seen.current] if rules.thinned else [txid for txid, _ in seen.live]
    return frozenset(entry for txid in names for entry in seen.has(txid))


def is_safe(store: Store, seen: Log, rules: Rules) -> bool:
    brought_back = any(record == RESTORED or isinstance(record, Back) for record in seen.records)
    for copy in copies(store):
        if not copy.ever:
            line = copy.records[0] if copy.records else None
            if isinstance(line, Line) and not brought_back and (line.whole or rules.mutant == "folded_is_safe"):
                return True
            if rules.mutant == ("stops_at_revoked" if copy.records else "stops_at_open"):
                return False
            continue
        for txid, _ in copy.live if brought_back and rules.mutant != "ever" else copy.ever:
            enough = rules.mutant == "any_entries" or (rules.mutant == "thin_is_enough" and rules.thinned)
            if enough or needed(seen, rules) <= copy.has(txid):
                return True
    return False


def asks(seen: Log, rules: Rules) -> Op:
    return look("asks the mirror", lambda store: is_safe(store, seen, rules))


def records_there(number: int, seen: Log, record: Any, rules: Rules) -> Op:
    """Create the next record of a copy. A power cut may lose it as long as it is wet."""
    key = ("mirror", number, seen.next)

    def ghost(store: Store, won: bool) -> Store:
        wet = won and rules.power and isinstance(record, (Committed, Rewritten))
        return store.with_(("wet",), key) if wet else store

    return create(key, record, ghost)


# -- passes


def mirror(rules: Rules, times: int) -> Program:
    """Copy X if it is not safe: the fullest places that exist, in one transaction with whoever copies the same."""
    if not times:
        return None
    seen = yield reads_log()
    if not seen.live or (yield asks(seen, rules)):
        return None
    from_ = seen.current if rules.thinned or rules.mutant == "copies_current" else seen.fullest()
    if not (yield look("reads the bytes", lambda store: from_ in dict(log(store).live))):
        return goto(mirror, rules, times - 1)
    return goto(finds_place, rules, times, 0, from_, seen)


def finds_place(rules: Rules, times: int, number: int, from_: str, seen: Log) -> Program:
    """Find the copy to make fuller, or the first number for a new one.

    A forgotten copy is brought back first, and forgotten again if X is forgotten.
    """
    blobs = dict(seen.ever)[from_]
    there = yield look(f"reads copy {number}", lambda store: copy_log(store, number))
    if there.live:
        fuller = there.has() <= seen.has(from_) or rules.mutant == "replaces_fuller"
        if fuller:
            back, gone = () if there.visible else (RESTORED,), () if seen.visible else (FORGOTTEN,)
            wanted = (*back, Rewritten(f"T{there.next}", blobs), *gone)
            return goto(makes_fuller, rules, times, number, there, wanted)
    elif not there.records or (rules.mutant == "folded_is_free" and isinstance(there.records[0], Line)):
        began = yield create(("open", number), from_)
        same = began or rules.mutant == "joins_by_id"
        if same or (yield look("reads its transaction", lambda store: store.get("open", number))) == from_:
            return goto(makes_copy, rules, times, number, from_, seen)
    return goto(finds_place, rules, times, number + 1, from_, seen) if number < 3 else None


def makes_copy(rules: Rules, times: int, number: int, from_: str, seen: Log) -> Program:
    blobs = dict(seen.ever)[from_]
    yield create(("manifest", number), blobs)
    won = yield records_there(number, Log(), Committed(blobs), rules)
    if won and not seen.visible:
        yield records_there(number, fold("", (Committed(blobs),)), FORGOTTEN, rules)
    return goto(mirror, rules, times - 1)


def makes_fuller(rules: Rules, times: int, number: int, there: Log, wanted: tuple[Any, ...]) -> Program:
    """Create these records in a copy's log, as long as nobody else does."""
    for record in wanted[:1]:
        won = yield records_there(number, there, record, rules)
        if won:
            seen = fold(f"copy {number}", (*there.records, record))
            return goto(makes_fuller, rules, times, number, seen, wanted[1:])
    return goto(mirror, rules, times - 1)


# -- what others do


def rules_here(rules: Rules, acts: tuple[str, ...], said: bool | None = None) -> Program:
    """Act as gc and rotation here: read the log, ask, settle, and create the record right after the log as read."""
    for act in acts[:1]:
        if rules.mutant == "ask_first":
            before = yield reads_log()
            said = yield asks(before, rules)
        seen = yield reads_log()
        if not may(seen, act):
            return goto(rules_here, rules, acts[1:], said)
        unasked = {FORGOTTEN: "forgets_unasked", PURGED: "purges_unasked", TRIMMED: "trims_unasked"}[act]
        if rules.mutant == unasked:
            said = True
        elif rules.mutant != "ask_first" and not (rules.mutant == "remembers" and said):
            said = yield asks(seen, rules)
            if rules.power and rules.mutant != "no_settle":
                yield look("settles the mirror", lambda _: "", lambda store, _: store.without(("wet",)))
                said = said and (rules.mutant == "settles_last" or (yield asks(seen, rules)))
        if said:
            won = yield judged(seen, act, rules)
            if not won and rules.mutant == "later_number":
                yield judged(fold(X, (*seen.records, None)), act, rules)
        return goto(rules_here, rules, acts[1:], said if rules.mutant == "remembers" else None)
    return None


def may(seen: Log, act: Any) -> bool:
    if act == FORGOTTEN:
        return seen.visible
    if act in (RESTORED, PURGED):
        return bool(seen.live) and not seen.visible
    return seen.visible and len(seen.live) > 1


def judged(seen: Log, act: str, rules: Rules) -> Op:
    """Create a record of a rule. What it ends, or hides, must have been in the mirror."""

    def ghost(store: Store, won: bool) -> Store:
        if not won:
            return store
        store = store.with_(("ghost", "ruled"))
        before = fold(X, log(store).records[:-1])
        left = log(store)
        kept = {entry for txid, _ in left.live for entry in left.has(txid)} if act != FORGOTTEN else set()
        gone = {entry for txid, _ in before.live for entry in before.has(txid)} - kept
        if rules.thinned:
            gone &= needed(before, rules)
        return store.with_(("ghost", "gone"), bool(gone - store.get("had")))

    made = create(("commits", X, seen.next), act, ghost)
    if not rules.at_once or rules.mutant == "remembers":
        return made
    refused = look("asks the mirror, which says no", lambda _: False)
    return Op(lambda store: (made if is_safe(store, seen, rules) else refused).run(store))


def user(acts: tuple[Any, ...]) -> Program:
    """Forget, restore, thin, undo, or make fuller here."""
    for act in acts[:1]:
        seen = yield reads_log()
        if act in ENTRIES and seen.visible and set(act) != seen.has():
            yield append(seen, Rewritten(f"V{seen.next}", frozenset((X, entry) for entry in act)))
        elif act is Back and may(seen, TRIMMED):
            yield append(seen, Back(seen.fullest()))
        elif act in (FORGOTTEN, RESTORED) and may(seen, act):
            yield append(seen, act)
        return goto(user, acts[1:])
    return None


def mirrors_gc(rules: Rules, acts: tuple[Any, ...]) -> Program:
    """Act by the mirror's own rules on its newest copy: forget, purge, thin, trim, or revoke it while it is open."""
    for act in acts[:1]:
        found = yield look("lists the mirror", lambda store: tuple(copies(store)))
        if found:
            number, seen = len(found) - 1, found[-1]
            if act == "fold" and seen.ever and not seen.live:
                whole = any(seen.has(txid) >= {"e", "f"} for txid, _ in seen.ever)
                yield create(("folded", number), Line("", whole, frozenset()))
                yield _deletes_log(number)
            elif act in ENTRIES and seen.visible and set(act) < seen.has():
                blobs = frozenset((X, entry) for entry in act)
                yield records_there(number, seen, Rewritten(f"V{seen.next}", blobs), rules)
            elif act == REVOKED and not seen.records:
                yield records_there(number, seen, REVOKED, rules)
            elif act in (FORGOTTEN, PURGED, TRIMMED) and may(seen, act):
                yield records_there(number, seen, act, rules)
        return goto(mirrors_gc, rules, acts[1:])
    return None


def _deletes_log(number: int) -> Op:
    def ghost(store: Store, _: Any) -> Store:
        return store.without(*(key for key in store.objects if key[:2] == ("mirror", number)))

    return look(f"deletes copy {number}", lambda _: "", ghost)


def older_snapshot(_: Rules) -> Program:
    """Set the mirror back to a time at which it had no copy."""

    def run(store: Store) -> Iterable[Outcome]:
        gone = [key for key in store.objects if key[0] in {"mirror", "open", "manifest", "had"}]
        yield Outcome("is an older SNAPSHOT", store.without(*gone).with_(("had",), frozenset()))

    yield Op(run)
    return None


def power_cut(_: Rules) -> Program:
    """Lose the record that is wet, if there is one. No rule may have relied on it."""

    def run(store: Store) -> Iterable[Outcome]:
        key = store.get("wet")
        gone = [one for one in store.objects if key and one[:2] == key[:2] and one[2] >= key[2]]
        after = store.without(*gone, ("wet",))
        after = after.with_(("had",), frozenset()).with_(("ghost", "gone"), bool(gone and store.get("ghost", "ruled")))
        yield Outcome("has a POWER cut", after if gone else store)

    yield Op(run)
    return None


def last(rules: Rules) -> Program:
    yield when_quiet()
    return goto(mirror, rules, 3)


# -- invariants


def remembers(store: Store) -> Store:
    """Add what the mirror has to what it has had since X was last brought back."""
    seen = log(store)
    since = max((n for n, one in enumerate(seen.records) if one == RESTORED or isinstance(one, Back)), default=0)
    had = store.get("had") if since == store.get("since") else frozenset()
    now: set[str] = set()
    for number, copy in enumerate(copies(store)):
        for record in copy.records:
            txid = getattr(record, "by", f"copy {number}")
            if isinstance(record, (Committed, Rewritten)) and txid in dict(copy.live):
                now |= copy.has(txid)
    return store.with_(("had",), had | now).with_(("since",), since)


def fits(store: Store) -> bool:
    first = ((number, record) for (number, index), record in store.under("mirror").items() if index == 0)
    return all(record == REVOKED or record.blobs == store.get("manifest", number) for number, record in first)


def keeps_fuller(who: str, before: Store, after: Store) -> bool:
    """Check that no pass takes entries away from what is current in a copy."""
    pairs = zip(copies(before), copies(after), strict=False)
    return not who.startswith("pass") or all(old.has() <= new.has() for old, new in pairs)


HAD = Invariant(
    "What a rule hides or ends here was whole in the mirror since it was last brought back.",
    lambda store: not store.get("ghost", "gone"),
)
FITS = Invariant("The record of a copy, and its manifest, are of the same places.", fits)
FULLER = Invariant("No pass takes entries away from what is current in a copy.", keeps_fuller)


def is_copied(rules: Rules) -> Invariant:
    says = "When all is quiet, some passes make what lives here safe."
    return Invariant(says, lambda store: not log(store).live or is_safe(store, log(store), rules))


COPIED = is_copied(Rules())


def model(
    mutant: str = "",
    *,
    acts: tuple[str, ...] = (),
    users: tuple[Any, ...] = (),
    there: tuple[Any, ...] = (),
    start: tuple[str, ...] = ("ef",),
    passes: int = 1,
    times: int = 2,
    thinned: bool = False,
    accident: str = "",
) -> Model:
    """Return a model. ``acts``: records of rules here; ``users``: those of a user; ``there``: those of the mirror's gc.

    ``start``: the entries of each of X's places. ``accident``: what happens to the mirror.
    """
    rules = Rules(mutant, thinned, accident == "power", accident == "snapshot")
    found = [Process(f"pass {index}", goto(mirror, rules, times), mortal=True) for index in range(passes)]
    found += [Process("gc", goto(rules_here, rules, acts))] if acts else []
    found += [Process("user", goto(user, users))] if users else []
    found += [Process("mirror's gc", goto(mirrors_gc, rules, there))] if there else []
    accidents = {"snapshot": older_snapshot, "power": power_cut}
    found += [Process("mirror", Goto(accidents[accident], (rules,)))] if accident else []
    found += [Process("pass at last", goto(last, rules))]
    blobs = [frozenset((X, entry) for entry in entries) for entries in start]
    first: dict[Any, Any] = {("commits", X, 0): Committed(blobs[0]), ("had",): frozenset(), ("since",): 0}
    first |= {("commits", X, n): Rewritten(f"U{n}", some) for n, some in enumerate(blobs) if n}
    always, at_end = ((HAD,) if accident == "snapshot" else (HAD, FITS)), (is_copied(rules),)
    return Model(Store(first), found, always=always, steps=(FULLER,), at_end=at_end, watch=remembers)
