"""A load under a lease reads all that was promised, while others thin, repack, forget, trim, purge and delete.

The load, and the read of an update, names in its lease the places that it means to read. It may follow to other places.
Blobs vanish as soon as no places that exist name them, which is the worst case. Thin and repack do not ask for leases.
Whoever trims reads the log, then the clock, then lists leases, and creates its record right after the log as read. A
lease bars a trim if its places have entries that the current ones lack. It bars every purge.

The generations of the lease are at ("leases", N): (places, the last instant at which it counts). Time is a number that
increases at any instant. `leases` models their keys.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

from tests.model.protocol.explorer import (
    Goto,
    Invariant,
    Model,
    Op,
    Process,
    Program,
    Store,
    choose,
    clock,
    create,
    delete,
    goto,
    look,
    network,
)
from tests.model.protocol.places import (
    FORGOTTEN,
    PURGED,
    RESTORED,
    TRIMMED,
    Back,
    Committed,
    Log,
    Rewritten,
    X,
    append,
    reads_log,
)

MUTANTS = {
    "no_lease": "a load sets no lease",
    "no_look": "a load does not read the log after it has set its lease",
    "promises_more": "a load reads what is current by then, though its lease is on places that have less",
    "no_follow": "a load does not follow to other places",
    "current_only": "a load follows to the current places, whatever they lack",
    "leases_free": "who trims or purges does not ask for leases",
    "leases_first": "who trims lists leases before it reads the log",
    "later_number": "who trims takes the next number if its own is taken",
    "clock_last": "who trims reads the clock after it has listed leases",
    "late_renewal": "a lease is renewed when it is over already, and the load does not look whether it is granted",
    "grants_older": "a lease that was renewed late is granted again for older places that still exist",
    "first_generation": "only the first generation of a lease counts",
}


class Rules(NamedTuple):
    """The rules of a model. ``renewals``: how often the load may renew its lease. ``lost``: trims may land late."""

    mutant: str = ""
    renewals: int = 0
    lost: bool = False


class Lease(NamedTuple):
    """A lease in use. ``places``: those that it names; ``at``: those that the load reads now."""

    number: int
    expires: int
    places: str
    at: str
    renewals: int


def reads_clock() -> Op:
    return look("reads the clock", lambda store: store.get("clock"))


# -- the load


def load(rules: Rules) -> Program:
    seen = yield reads_log()
    return goto(sets_lease, rules, 0, seen) if seen.visible else None


def sets_lease(rules: Rules, number: int, seen: Log) -> Program:
    """Name the current places, and read the log again. Begin again if the current places have more by then."""
    places, now = seen.current, 0
    if rules.mutant != "no_lease":
        now = yield reads_clock()
        yield create(("leases", number), (places, now + 1))
    if rules.mutant != "no_look":
        seen = yield reads_log()
    if not seen.visible:
        return goto(ends, number)
    if not seen.has() <= seen.has(places) and rules.mutant != "promises_more":
        return goto(sets_lease, rules, number + 1, seen)
    lease = Lease(number, now + 1, places, seen.current, rules.renewals)
    return goto(reads, rules, lease, seen.has(), seen)


def reads(rules: Rules, lease: Lease, left: frozenset[str], seen: Log) -> Program:
    """Read the blobs of the places, one after the other, and renew the lease at any time."""
    if not left:
        return goto(ends, lease.number)
    if lease.renewals and (yield choose((True, False))):
        return goto(renews, rules, lease._replace(renewals=lease.renewals - 1), left, seen)
    entry = min(left)
    blob = next((one for one in dict(seen.ever)[lease.at] if one[1] == entry), None)
    there = yield look(f"reads {blob}", lambda store: blob is not None and ("objects", *blob) in store.objects)
    if there:
        return goto(reads, rules, lease, left - {entry}, seen)
    return goto(follows, rules, lease, left)


def follows(rules: Rules, lease: Lease, left: frozenset[str]) -> Program:
    """Read the log again, and go on with the places that have the most of what is left. Fail if they lack any of it."""
    seen = yield reads_log()
    at = seen.current if rules.mutant == "current_only" else seen.fullest(left)
    if rules.mutant == "no_follow" or at == lease.at or not at or not left <= seen.has(at):
        return goto(fails, lease)
    return goto(reads, rules, lease._replace(at=at), left, seen)


def fails(lease: Lease) -> Program:
    def is_bad(store: Store, _: Any) -> Store:
        return store.with_(("ghost", "failed"), store.get("clock") <= lease.expires)

    yield look("FAILS to load", lambda store: "", is_bad)
    return goto(ends, lease.number)


def renews(rules: Rules, lease: Lease, left: frozenset[str], seen: Log) -> Program:
    """Create the next generation. If the one before was over by then, only what is current and visible is promised."""
    before = yield reads_clock()
    new = lease._replace(number=lease.number + 1, expires=before + 1)
    yield create(("leases", new.number), (lease.places, new.expires))
    if rules.mutant == "late_renewal" or (yield reads_clock()) <= lease.expires:
        return goto(reads, rules, new, left, seen)
    now = yield reads_log()
    there = now.has(now.fullest(left)) if rules.mutant == "grants_older" else now.has()
    is_granted = now.visible and left <= there
    return goto(reads, rules, new if is_granted else new._replace(expires=-1), left, seen)


def ends(number: int) -> Program:
    for one in range(number + 1):
        yield delete(("leases", one))
    return None


# -- others


def thinner(name: str) -> Program:
    seen = yield reads_log()
    if seen.visible and "f" in seen.has():
        yield append(seen, Rewritten(name, frozenset(one for one in dict(seen.live)[seen.current] if one[1] != "f")))
    return None


def repacker(name: str) -> Program:
    seen = yield reads_log()
    if seen.visible:
        for entry in sorted(seen.has()):
            yield create(("objects", name, entry), True)
        yield append(seen, Rewritten(name, frozenset((name, entry) for entry in seen.has())))
    return None


def user(acts: tuple[Any, ...]) -> Program:
    for act in acts[:1]:
        seen = yield reads_log()
        older = seen.fullest()
        if act is Back and seen.visible and older != seen.current:
            yield append(seen, Back(older))
        if (act == FORGOTTEN and seen.visible) or (act == RESTORED and seen.live and not seen.visible):
            yield append(seen, act)
        return goto(user, acts[1:])
    return None


def trimmer(rules: Rules, times: int) -> Program:
    """Trim or purge, and delete the blobs that no places name any more."""
    if not times:
        return None
    early = (yield from counting(rules)) if rules.mutant == "leases_first" else None
    seen = yield reads_log()
    record = TRIMMED if seen.visible else PURGED
    if len(seen.live) > seen.visible:
        on = early if early is not None else (yield from counting(rules))
        if rules.mutant == "leases_free" or not any(bars(seen, places) for places in on):
            won = yield append(seen, record, lost=rules.lost)
            if not won and rules.mutant == "later_number":
                yield create(("commits", X, seen.next + 1), record)
    return goto(deletes, rules, times)


def bars(seen: Log, places: str) -> bool:
    return not seen.visible or not seen.has(places) <= seen.has()


def counting(rules: Rules) -> Generator[Op, Any, tuple[str, ...]]:
    """Read the clock, then list leases. Return the places of the lease that counts, if there is one."""
    now = (yield reads_clock()) if rules.mutant != "clock_last" else None
    generations = yield look("lists leases", lambda store: tuple(sorted(store.under("leases").items())))
    if now is None:
        now = yield reads_clock()
    newest = generations[:1] if rules.mutant == "first_generation" else generations[-1:]
    return tuple(places for _, (places, expires) in newest if expires >= now)


def deletes(rules: Rules, times: int) -> Program:
    seen = yield reads_log()
    named = {blob for _, blobs in seen.live for blob in blobs}
    for blob in sorted({blob for _, blobs in seen.ever for blob in blobs} - named):
        yield delete(("objects", *blob))
    return goto(trimmer, rules, times - 1)


READ = Invariant(
    "A load reads all that it was promised, until its lease is over.", lambda s: not s.get("ghost", "failed")
)


def model(
    mutant: str = "",
    *,
    does: tuple[str, ...] = ("thinner",),
    acts: tuple[Any, ...] = (),
    thinned: bool = False,
    until: int = 0,
    renewals: int = 0,
    times: int = 2,
    lost: bool = False,
) -> Model:
    """Return a model. ``acts``: records of a user. ``thinned``: X was thinned before, and not trimmed.

    ``until``: the last instant. ``times``: how often somebody trims, purges and deletes.
    """
    rules = Rules(mutant, renewals, lost)
    first: dict[Any, Any] = {("objects", X, entry): True for entry in "ef"} | {("clock",): 0}
    first |= {("commits", X, 0): Committed(frozenset({(X, "e"), (X, "f")}))}
    first |= {("commits", X, 1): Rewritten("U", frozenset({(X, "e")}))} if thinned else {}
    who = {"thinner": goto(thinner, "V"), "thinner 2": goto(thinner, "W"), "repacker": goto(repacker, "Q")}
    found = [Process("load", goto(load, rules)), Process("trimmer", goto(trimmer, rules, times))]
    found += [Process(name, who[name], mortal=True) for name in does]
    found += [Process("user", goto(user, acts))] if acts else []
    found += [Process("clock", Goto(clock, (until,)), daemon=True)] if until else []
    found += [Process("network", Goto(network), daemon=True)] if lost else []
    return Model(Store(first), found, always=(READ,))
