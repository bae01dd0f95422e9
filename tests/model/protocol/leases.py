"""Permanent tags and leases, combined with forgets, restores, purges and rewrites.

A tag or lease is a name with numbered generations, the highest of which counts. Each generation names the ID "X". Those
of leases expire. A process that sets a tag, or takes a lease, writes it and then reads the logs. It is *granted* if X
is visible then. gc reads the record that allows a purge, reads the clock, lists the tags and leases, and then takes the
number right after that record.

No two leases have the same name. A lease that is over is not renewed: its holder takes a new one. The holder counts the
generations of its lease itself, and deletes them when it ends the lease. Anyone else ends a lease with one more
generation, which names nothing, for whose number the next renewal competes. A cleaner reads the clock, lists the
leases, and deletes all generations of those whose newest one is over.

Time is an increasing number. A lease is over when its `expires` is less than the clock. The clocks of gcs and cleaners
are ahead of the holder's by as much as they may be: the hour for which they honor a lease longer. Therefore, the model
has neither. With a larger error, a lease is lost ("clock_ahead").
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from itertools import combinations
from typing import Any, NamedTuple

from tests.model.protocol import rewrites
from tests.model.protocol.explorer import (
    Goto,
    Invariant,
    Model,
    Op,
    Outcome,
    Process,
    Program,
    Store,
    choose,
    clock,
    create,
    delete,
    goto,
    look,
)
from tests.model.protocol.logs import FORGOTTEN, PURGED, RESTORED, Committed, Logs, Replaced, append, listing, logs

MUTANTS = {
    "tags_first": "a gc lists tags before it reads the record that allows the purge",
    "purges_later_number": "a gc whose number is taken takes the next one, if it reads `forgotten` again",
    "grants_forgotten": "a lease is granted on a checkpoint that is live, and forgotten",
    "log_first": "whoever sets a tag reads the log before he puts it",
    "bars_own_txid": "a tag bars only the purge of the txid that it was set on, and of what replaced that",
    "replaced_is_free": "what was replaced is purged whatever names it, though the rewrite dropped entries",
    "void_claims_less": "a tag that was set on a thin rewrite bars nothing of its base, though that was undone since",
    "adds_entries": "a rewrite has an entry that its base lacks, and is purged like any other when it is void",
    "clock_last": "a gc reads the clock after it has listed tags",
    "clock_ahead": "the clock of a gc is ahead by more than the time for which it honors a lease longer",
    "drops_old_generations": "a generation that is over is deleted, though a newer one counts",
    "cleaner_clock_last": "a cleaner reads the clock after it has listed leases",
    "reuses_name": "a lease has the name of the one before it, and numbers from 0 again if that was deleted",
    "drops_ended": "the generations of a lease that another process has ended are deleted at once",
    "late_renewal": "a lease is renewed when it is over already, and nobody looks whether it is granted",
    "late_keeps_name": "a lease that is over already is granted again under its name",
    "renewal_not_counted": "of a lease only the first generation counts",
}
NEVER = 99


class Tag(NamedTuple):
    """A generation. ``txid``: the commit that it was set on, or "" if it ends a lease.

    ``expires``: the last instant at which it counts.
    """

    txid: str
    expires: int = NEVER


class Rules(NamedTuple):
    """The rules of a model. ``torn``: listings of tags are not atomic."""

    mutant: str = ""
    torn: bool = False

    def clock(self, store: Store) -> int:
        """Return the time by the clock of a gc or a cleaner."""
        return int(store.get("clock")) + (self.mutant == "clock_ahead")


# -- holders


def entries(now: Logs) -> str:
    """Return the entries of the visible commit of X."""
    found = now.visible()
    return now.get(found[0])[0].has if found else ""


def _named(store: Store) -> str:
    """Return the txid that a new tag on X names."""
    now = logs(store)
    return next(iter((*now.visible(), *now.live())), "")


class Lease(NamedTuple):
    """A lease in progress. ``left``: the expiry times of its next generations, then of later leases. ``has``:
    entries."""

    name: str
    txid: str
    number: int
    left: tuple[tuple[int, ...], ...]
    has: str = ""

    def generation(self) -> tuple[Any, Tag]:
        return ("tags", self.name, self.number), Tag(self.txid, self.left[0][0])


def holder(rules: Rules, leases: tuple[tuple[int, ...], ...]) -> Program:
    """Hold leases one after the other. Renew each of them once for each `expires` after its first."""
    if not leases:
        return None
    txid = yield look("lists commits", _named)
    lease = Lease(f"lease {len(leases)}", txid, 0, leases)
    if rules.mutant == "reuses_name":
        number = yield look("lists generations", lambda store: 1 + max(_generations(store, "lease"), default=-1))
        lease = lease._replace(name="lease", number=number)
    return goto(sets_lease, rules, lease)


def sets_lease(rules: Rules, lease: Lease) -> Program:
    """Write the lease, then read the logs. The holder has the lease only if X is visible."""
    if rules.mutant == "log_first":
        seen = yield from listing(torn=rules.torn)
        yield create(*lease.generation())
    else:
        yield create(*lease.generation())
        seen = yield from listing(torn=rules.torn)
    return goto(is_granted, rules, lease._replace(has=_entries_for(seen, rules)))


def is_granted(rules: Rules, lease: Lease) -> Program:
    expires, *later = lease.left[0]
    if lease.has:
        yield look("is granted the lease", lambda _: lease.has, lambda store, _: _granted(store, lease, expires))
    if not later or not lease.has:
        return goto(ends_lease, rules, lease)
    left = (tuple(later), *lease.left[1:])
    return goto(renews, rules, lease._replace(number=lease.number + 1, left=left), expires)


def renews(rules: Rules, lease: Lease, before: int) -> Program:
    """Write the next generation. If the previous one was over by then, take a new lease."""
    won = yield create(*lease.generation())
    if not won:  # another process has ended the lease
        return goto(holder, rules, lease.left[1:])
    in_time = True
    if rules.mutant != "late_renewal":
        in_time = yield look("reads the clock", lambda store: store.get("clock") <= before)
    if in_time:
        return goto(is_granted, rules, lease)
    if rules.mutant == "late_keeps_name":
        return goto(is_granted, rules, lease._replace(has=entries((yield from listing(torn=rules.torn)))))
    return goto(sets_lease, rules, lease._replace(name=f"{lease.name}'", number=0))


def ends_lease(rules: Rules, lease: Lease) -> Program:
    """Delete the generations of a lease, the newest one last."""
    yield look("ends the lease", lambda _: lease.name, _given_up)
    return goto(cleans, tuple((lease.name, number) for number in range(lease.number + 1)), (rules, lease.left[1:]))


def ender() -> Program:
    """End another process's lease with a generation that names nothing."""

    def newest(store: Store) -> tuple[tuple[str, int, int], ...]:
        return tuple((name, all_[-1][0] + 1, all_[-1][1].expires) for name, all_ in _leases(store))

    def remember(store: Store, won: bool) -> Store:
        return _given_up(store.with_(("ghost", "ended", name, number)), name) if won else store

    found = yield look("lists leases", newest)
    if found:
        name, number, expires = yield choose(found)
        yield create(("tags", name, number), Tag("", expires), remember)
    return None


def _leases(store: Store) -> tuple[tuple[str, tuple[tuple[int, Tag], ...]], ...]:
    """Return the generations of all leases, by name."""
    found: dict[str, list[tuple[int, Tag]]] = {}
    for (name, number), tag in sorted(store.under("tags").items()):
        if name.startswith("lease"):
            found.setdefault(name, []).append((number, tag))
    return tuple((name, tuple(all_)) for name, all_ in found.items())


def _given_up(store: Store, name: str) -> Store:
    return store.without(*(("ghost", "held", *key) for key in store.under("ghost", "held") if key[0] == name))


def _entries_for(seen: Logs, rules: Rules) -> str:
    """Return the entries of X if the lease can be granted."""
    if rules.mutant == "grants_forgotten" and seen.live():
        return str(seen.get(seen.live()[0])[0].has)
    return entries(seen)


def _generations(store: Store, name: str) -> list[int]:
    return [number for key, number in store.under("tags") if key == name]


def _granted(store: Store, lease: Lease, expires: int) -> Store:
    """Promise protection, unless another process has ended the lease: the next renewal notices that."""
    if store.get("ghost", "ended", lease.name, lease.number + 1):
        return store
    return store.with_(("ghost", "held", lease.name, lease.number), (lease.has, expires))


def tagger(rules: Rules, name: str) -> Program:
    """Set a permanent tag. A tag on a forgotten checkpoint restores it. A purged checkpoint cannot be tagged."""
    txid = yield look("lists commits", _named)
    tag = Lease(name, txid, 0, ((NEVER,),))
    if rules.mutant == "log_first":
        seen = yield from listing(torn=rules.torn)
        yield create(*tag.generation())
    else:
        yield create(*tag.generation())
        seen = yield from listing(torn=rules.torn)
    return goto(tagger_restores, tag._replace(has=entries(seen)), _restorable(seen))


def tagger_restores(tag: Lease, found: tuple[str, int] | None) -> Program:
    if found and not tag.has:
        won = yield append(*found, RESTORED)
        tag = tag._replace(has="e" if won else "")
    if tag.has:
        yield look("has its tag", lambda _: tag.has, lambda store, _: _granted(store, tag, NEVER))
    return None


def _restorable(now: Logs) -> tuple[str, int] | None:
    gone = [txid for txid in now.live() if now.state(txid) == FORGOTTEN and now.stands(txid)]
    return (gone[-1], now.number(gone[-1])) if gone else None


# -- purges


def gc(rules: Rules, records: int = 1) -> Program:
    """Run step 1, once for each record that it creates."""
    if not records:
        return None
    if rules.mutant == "tags_first":
        now = yield look("reads the clock", rules.clock)
        named = yield from _tags(rules, now)
        return goto(gc_reads_logs, rules, records, named)
    return goto(gc_reads_logs, rules, records, None)


def gc_reads_logs(rules: Rules, records: int, named: Any) -> Program:
    seen = yield from listing(torn=rules.torn)
    return goto(gc_picks, rules, records, named, tuple(_due(seen, rules)))


def _due(now: Logs, rules: Rules) -> Iterable[tuple[str, int, str, bool]]:
    """Return (txid, number, record, whether tags protect it).

    If a commit is void, a different commit is valid for its ID.
    """
    for txid, number, record in rewrites.actions(now):
        yield txid, number, record, record == PURGED and not now.is_void(txid) and _needs(now, txid, rules)


def _needs(now: Logs, txid: str, rules: Rules) -> bool:
    """Report whether purging a forgotten or replaced commit would remove anything that a tag may rely on."""
    state = now.state(txid)
    if isinstance(state, Replaced):
        first = now.get(state.by)[0]
        return set(now.get(txid)[0].has) > set(first.has) and rules.mutant != "replaced_is_free"
    return True


def gc_picks(rules: Rules, records: int, named: Any, found: Any) -> Program:
    if not found:
        return None
    txid, number, record, may_bar = yield choose(found)
    if not may_bar:
        yield append(txid, number, record)
        return goto(gc, rules, records - 1)
    if named is None:
        return goto(gc_lists_tags, rules, records, txid, number)
    return goto(gc_purges, rules, records, txid, number, named)


def gc_lists_tags(rules: Rules, records: int, txid: str, number: int) -> Program:
    now = None
    if rules.mutant != "clock_last":
        now = yield look("reads the clock", rules.clock)
    named = yield from _tags(rules, now)
    return goto(gc_purges, rules, records, txid, number, named)


def _tags(rules: Rules, now: int | None) -> Generator[Op, Any, frozenset[str]]:
    """Return the txids of the tags that count at ``now``. None means the time after the listing."""
    before: frozenset[Any] = frozenset()
    if rules.torn:
        before = yield look("begins to list tags", lambda store: frozenset(store.under("tags")))
    shown = yield Op(lambda store: _listed(store, before if rules.torn else None))
    if now is None:
        now = yield look("reads the clock", rules.clock)
    newest = list(dict(sorted(shown)).items())
    if rules.mutant == "renewal_not_counted":
        newest = [key for key in shown if key[1] == 0]
    counting: frozenset[str] = yield look("reads tags", lambda store: _counting(store, newest, now))
    return counting


def _counting(store: Store, newest: list[Any], now: int) -> frozenset[str]:
    """Return the txids of tags that count at ``now``. If a tag has vanished since the listing, it was over."""
    found = [tag for key in newest if (tag := store.get("tags", *key))]
    return frozenset(tag.txid for tag in found if tag.txid and tag.expires >= now)


def _listed(store: Store, before: frozenset[Any] | None) -> Iterable[Outcome]:
    """Return a listing. It may or may not contain changes that are made while it runs.

    For deletions, use the worst case.
    """
    now = store.under("tags").keys()
    late = sorted(now - before) if before is not None else []
    for count in range(len(late) + 1):
        for some in combinations(late, count):
            keys = frozenset(now - {*some})
            yield Outcome(f"has listed tags {sorted(keys)}", store, keys)


def gc_purges(rules: Rules, records: int, txid: str, number: int, named: frozenset[str]) -> Program:
    """Purge. Tags protect by ID, and all tags in a model name X, so any tag protects whose entries this commit has."""
    barred: Any = yield look("judges the tags", lambda store: _claimed(logs(store), txid, named, rules))
    if rules.mutant == "bars_own_txid":
        barred = yield look("follows the tags", lambda store: txid in _followed(logs(store), named))
    if barred:
        return goto(gc, rules, records - 1)
    won = yield append(txid, number, PURGED)
    if not won and rules.mutant == "purges_later_number":
        again = yield look("reads the log", lambda s: logs(s).state(txid) == FORGOTTEN and logs(s).number(txid))
        if again:
            yield append(txid, again, PURGED)
    return goto(gc, rules, records - 1)


def _claimed(now: Logs, txid: str, named: frozenset[str], rules: Rules) -> bool:
    """Report whether a tag was set on a commit that this one no longer replaces."""
    behind = _followed(now, frozenset([txid])) - {txid} if isinstance(now.state(txid), Replaced) else frozenset()
    return any(not (tag in behind and (now.stands(tag) or rules.mutant == "void_claims_less")) for tag in named)


def _followed(now: Logs, named: frozenset[str]) -> frozenset[str]:
    """Return these txids, their replacements, the replacements of these, and so on."""
    new = {record.by for txid in named for record in now.get(txid) if isinstance(record, Replaced)}
    return named if new <= named else _followed(now, named | new)


def cleaner(rules: Rules) -> Program:
    """Delete all generations of each lease whose newest generation is over, the newest one last."""
    now = None
    if rules.mutant != "cleaner_clock_last":
        now = yield look("reads the clock", rules.clock)
    found = yield look("lists leases", _leases)
    if now is None:
        now = yield look("reads the clock", rules.clock)
    over = ((name, number) for name, all_ in found for number, tag in all_ if _is_over(rules, tag, all_[-1][1], now))
    return goto(cleans, tuple(over), None)


def _is_over(rules: Rules, tag: Tag, newest: Tag, now: int) -> bool:
    if rules.mutant == "drops_ended" and not newest.txid:
        return True
    return (tag if rules.mutant == "drops_old_generations" else newest).expires < now


def cleans(found: tuple[tuple[str, int], ...], then: Any) -> Program:
    for key in found:
        yield delete(("tags", *key))
        return goto(cleans, found[1:], then)
    return goto(holder, *then) if then else None


# -- invariants


def holds_what_was_granted(store: Store) -> bool:
    """Check that each granted lease or tag is respected until it is over or has been ended."""
    now = logs(store)
    there = [set(now.get(txid)[0].has) for txid in now.live()]
    held = store.under("ghost", "held").values()
    return all(any(set(has) <= one for one in there) for has, expires in held if expires >= store.get("clock"))


HELD = Invariant(
    "Until a lease is over, a live commit of its id has every entry that was visible when it was granted.",
    holds_what_was_granted,
)


def user(times: tuple[str, ...]) -> Program:
    """Forget and restore, in the order of ``times``, any commit of X that allows it."""
    if not times:
        return None

    def options(store: Store) -> tuple[tuple[str, int], ...]:
        now = logs(store)
        if times[0] == FORGOTTEN:
            found = now.visible()
        else:
            gone = [txid for txid in now.live() if not now.is_visible(txid) and not now.is_void(txid)]
            found = [one for one in gone if now.state(one) == FORGOTTEN or isinstance(now.state(one), Replaced)]
        return tuple((txid, now.number(txid)) for txid in found)

    found = yield look("lists commits", options)
    return goto(user_acts, times, found)


def user_acts(times: tuple[str, ...], found: tuple[tuple[str, int], ...]) -> Program:
    if found:
        txid, number = yield choose(found)
        yield append(txid, number, times[0])
    return goto(user, times[1:])


def rewriter(kept: tuple[str, ...], names: str = "VW") -> Program:
    """Thin or repair X once for each item of ``kept``, which are the remaining entries."""
    if not kept:
        return None
    adds = "g" in kept[0]  # as a mutant does

    def base(store: Store) -> tuple[str, int] | None:
        now = logs(store)
        found = (txid for txid in now.visible() if adds or set(kept[0]) <= set(now.get(txid)[0].has))
        return next(((txid, now.number(txid)) for txid in found), None)

    seen = yield look("lists commits", base)
    return goto(rewrites_x, kept, names, *seen) if seen else None


def rewrites_x(kept: tuple[str, ...], names: str, base: str, number: int) -> Program:
    yield append(names[0], 0, Committed(replaces=(base, number), has=kept[0]))
    won = yield append(base, number, Replaced(names[0]))
    if won:
        return goto(rewriter, kept[1:], names[1:])
    yield append(names[0], 1, FORGOTTEN)
    return None


def model(
    mutant: str = "",
    *,
    leases: tuple[tuple[int, ...], ...] = (),
    tag: bool = False,
    does: tuple[str, ...] = (FORGOTTEN,),
    rewrite: tuple[str, ...] = (),
    until: int = 0,
    cleaners: int = 0,
    ended: bool = False,
    torn: bool = False,
    records: int = 1,
) -> Model:
    """Return a model. ``leases``: the expiry times of each lease's generations. ``does``: the actions of a user.

    ``rewrite``: the entries that each rewrite keeps. ``ended``: whether another process ends a lease. ``records``: the
    records that gc may create.
    """
    rules = Rules(mutant, torn)
    found = [Process("gc", goto(gc, rules, records))]
    found += [Process("holder", goto(holder, rules, leases))] if leases else []
    found += [Process("tagger", goto(tagger, rules, "tag"))] if tag else []
    found += [Process("user", goto(user, does))] if does else []
    found += [Process("rewriter", goto(rewriter, ("efg",) if mutant == "adds_entries" else rewrite))] if rewrite else []
    found += [Process(f"cleaner {index}", goto(cleaner, rules)) for index in range(cleaners)]
    found += [Process("ender", goto(ender))] if ended else []
    found += [Process("clock", Goto(clock, (until,)), daemon=True)] if until else []
    first: dict[Any, Any] = {("commits", "T", 0): Committed(), ("clock",): 0}
    return Model(Store(first), found, always=(HELD,))
