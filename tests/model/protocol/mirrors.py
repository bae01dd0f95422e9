"""A store and its mirror, with rewrites and forgets in both: a commit that is noted as safe was complete in the mirror.

The store's records are at ("commits", txid, N), the mirror's records at ("mirror", txid, N), and the notes at
("mirrored", txid, number of restores). A copy is committed under the txid of the original commit. If that transaction
has ended in the mirror, the copy uses the next txid of a fixed sequence. A copy does not name a base: it is a plain
commit even if a thinned one with the same ID exists.

A commit is *safe* if the mirror has a visible commit of the same ID with all of its entries. For a forgotten commit, a
live one is sufficient. This is checked each time and never derived from earlier copies. A commit that was replaced by
one that drops nothing is *covered*: it is not copied, and may be purged once the replacement is noted.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.model.protocol import rewrites
from tests.model.protocol.explorer import (
    Invariant,
    Model,
    Process,
    Program,
    Store,
    choose,
    create,
    goto,
    look,
    when_quiet,
)
from tests.model.protocol.logs import FORGOTTEN, PURGED, RESTORED, REVOKED, Committed, Logs, Replaced, append, logs

MUTANTS = {
    "very_txid": "what the mirror has ever committed under this txid counts as safe",
    "any_commit": "what the mirror has ever committed of this id counts as safe",
    "thin_is_enough": "a visible commit of the id counts, whatever it has dropped",
    "noted_first": "a note is put before the copy is committed",
    "copies_base": "a copy keeps the name of the base that it replaces",
    "each_its_own_note": "what was replaced by one that drops nothing needs a note of its own to be purged",
    "void_needs_note": "a gc keeps a rewrite that is void until it is noted",
    "notes_last": "a note counts although the checkpoint was forgotten and restored since",
    "purges_unnoted": "a gc purges what is not noted",
    "live_is_enough": "one that lives in the mirror, and is not visible there, makes a visible commit safe",
    "noted_by_source": "what is forgotten in the store is noted without a look at the mirror",
}


class Rules(NamedTuple):
    """The rules of a model. ``damaged``: T is unreadable, so it cannot be copied."""

    mutant: str = ""
    damaged: bool = False


def here(store: Store) -> Logs:
    return logs(store)


def there(store: Store) -> Logs:
    return logs(store, where="mirror")


# -- mirror passes


class Wanted(NamedTuple):
    """A commit's properties before the mirror is listed. ``since``: the number of its restores at that time."""

    txid: str
    first: Committed
    forgotten: bool
    since: int


def wanted(now: Logs, txid: str) -> Wanted:
    return Wanted(txid, now.get(txid)[0], now.state(txid) == FORGOTTEN, now.get(txid).count(RESTORED))


def is_safe(other: Logs, one: Wanted, mutant: str = "") -> bool:
    """Report whether a commit is safe according to a listing of the mirror."""
    if mutant == "very_txid" and isinstance(next(iter(other.get(one.txid)), None), Committed):
        return True
    if mutant == "any_commit" and other.txids(one.first.id):
        return True
    if mutant == "noted_by_source" and one.forgotten:
        return True
    enough = one.forgotten or mutant == "live_is_enough"
    found = other.live(one.first.id) if enough else other.visible(one.first.id)
    return any(set(one.first.has) <= set(other.get(t)[0].has) or mutant == "thin_is_enough" for t in found)


def covered_by(now: Logs, txid: str, mutant: str = "") -> str:
    """Return the commit's replacement if it dropped nothing, or "". The mirror must hold it in place of the commit."""
    state = now.state(txid)
    if not isinstance(state, Replaced) or mutant == "each_its_own_note":
        return ""
    return state.by if set(now.get(txid)[0].has) <= set(now.get(state.by)[0].has) else ""


Notes = frozenset[tuple[str, int]]


def notes(store: Store) -> Notes:
    """Return all records under mirrored/ as (txid, number of restores)."""
    return frozenset((txid, since) for txid, since in store.under("mirrored"))


def is_noted(now: Logs, noted: Notes, txid: str, mutant: str = "") -> bool:
    """Report whether a valid note exists.

    A note made before a `restored` is not valid, since the mirror may have forgotten the commit.
    """
    by = covered_by(now, txid, mutant)
    since = now.get(txid).count(RESTORED)
    fits = any(one == txid and (of == since or mutant == "notes_last") for one, of in noted)
    return fits or (bool(by) and is_noted(now, noted, by, mutant))


def waiting(now: Logs, noted: Notes, mutant: str = "") -> tuple[str, ...]:
    """Return the commits that a pass copies, oldest first: live ones that are neither noted nor covered.

    Rewrites must stand.
    """
    found = (txid for txid in now.live() if now.stands(txid) and not covered_by(now, txid, mutant))
    return tuple(txid for txid in found if not is_noted(now, noted, txid, mutant))


def mirror(rules: Rules, passes: int) -> Program:
    """List commits, then notes. A missed note causes only an unnecessary check."""
    if not passes:
        return None
    now = yield look("lists commits", here)
    todo = yield look("lists notes", lambda store: waiting(now, notes(store), rules.mutant))
    return goto(mirror_each, rules, passes, todo)


def mirror_each(rules: Rules, passes: int, todo: tuple[str, ...]) -> Program:
    """List the mirror, note safe commits, and copy the others."""
    if not todo:
        return goto(mirror, rules, passes - 1)
    txid = todo[0]
    one = yield look("reads the log", lambda store: here(store).lives(txid) and wanted(here(store), txid))
    if not one:
        return goto(mirror_each, rules, passes, todo[1:])
    safe = yield look(f"looks for {txid} in the mirror", lambda store: is_safe(there(store), one, rules.mutant))
    if safe or rules.mutant == "noted_first":
        yield create(("mirrored", txid, one.since), True)
    if safe:
        return goto(mirror_each, rules, passes, todo[1:])
    return goto(copies, rules, passes, todo, one, txid)


def copies(rules: Rules, passes: int, todo: tuple[str, ...], one: Wanted, name: str) -> Program:
    """Read the bytes, then commit. If two copies share a transaction, the first one wins."""
    readable = yield look(f"reads {one.txid}", lambda store: here(store).lives(one.txid))
    if not readable or (rules.damaged and one.txid == "T"):
        return goto(mirror_each, rules, passes, todo[1:])
    base = one.first.replaces if rules.mutant == "copies_base" else None
    won = yield create(("mirror", name, 0), Committed(replaces=base, has=one.first.has, id=one.first.id))
    if not won:
        return goto(finds_copy, rules, passes, todo, one, name)
    if one.forgotten:
        yield create(("mirror", name, 1), FORGOTTEN)
    yield create(("mirrored", one.txid, one.since), True)
    return goto(mirror_each, rules, passes, todo[1:])


def finds_copy(rules: Rules, passes: int, todo: tuple[str, ...], one: Wanted, name: str) -> Program:
    """The transaction with this name has ended. If its commit is forgotten in the mirror, restore it.

    Otherwise, try the next name.
    """
    other = yield look("reads the log of the copy", there)
    state = other.state(name)
    if state == FORGOTTEN and not one.forgotten:
        yield create(("mirror", name, other.number(name)), RESTORED)
    elif isinstance(state, Committed):  # by a different process, which will note it, or else a later pass will
        return goto(mirror_each, rules, passes, todo[1:])
    elif len(name) < 3:
        return goto(copies, rules, passes, todo, one, f"{name}'")
    return goto(mirror_each, rules, passes, todo[1:])


# -- gc of both stores


def gc(rules: Rules, puts: int) -> Program:
    """Run the first step of a gc of the store: list commits, then notes. It purges only noted commits."""
    if not puts:
        return None
    now = yield look("lists commits", here)
    found = yield look("lists notes", lambda store: allowed(now, notes(store), rules))
    return goto(gc_acts, rules, puts, found)


def gc_acts(rules: Rules, puts: int, found: tuple[rewrites.Action, ...]) -> Program:
    if not found:
        return None
    txid, number, record = yield choose(found)
    yield append(txid, number, record)
    return goto(gc, rules, puts - 1)


def allowed(now: Logs, noted: Notes, rules: Rules) -> tuple[rewrites.Action, ...]:
    def may(txid: str, record: str) -> bool:
        void = now.is_void(txid) and rules.mutant != "void_needs_note"
        free = record != PURGED or rules.mutant == "purges_unnoted"
        return free or void or is_noted(now, noted, txid, rules.mutant)

    return tuple(action for action in rewrites.actions(now) if may(action[0], action[2]))


def mirrors_gc(puts: int, thins: bool) -> Program:
    """Run the mirror's own gc, which forgets, purges, revokes copies in progress, and thins."""
    if not puts:
        return None

    def options(store: Store) -> tuple[tuple[str, int, object], ...]:
        now = there(store)
        found: list[tuple[str, int, object]] = list(rewrites.actions(now))
        found += [(txid, now.number(txid), FORGOTTEN) for txid in now.visible()]
        found += [(txid, 0, REVOKED) for txid in waiting(here(store), notes(store)) if not now.get(txid)]
        if thins and not now.get("M"):
            found += [("M", 0, Committed(replaces=(txid, now.number(txid)), has="e")) for txid in now.visible()]
        if now.get("M"):
            base, number = now.get("M")[0].replaces
            found += [(base, number, Replaced("M"))] if len(now.get(base)) == number else []
        return tuple(found)

    found = yield look("lists commits", options)
    if not found:
        return None
    txid, number, record = yield choose(found)
    yield create(("mirror", txid, number), record)
    return goto(mirrors_gc, puts - 1, thins)


def copies_back() -> Program:
    """Copy T from the mirror into the store, which has lost it."""
    first = yield look("reads T in the mirror", lambda store: there(store).lives("T") and there(store).get("T")[0])
    if first:
        yield append("T", 0, first)
    return None


def last(rules: Rules) -> Program:
    """After all other processes have ended, alternate passes and gcs until nothing changes."""
    yield when_quiet()
    return goto(last_pass, rules, 3)


def last_pass(rules: Rules, left: int) -> Program:
    if not left:
        return None
    todo = yield look("lists what waits", lambda store: waiting(here(store), notes(store), rules.mutant))
    return goto(last_copies, rules, left, todo)


def last_copies(rules: Rules, left: int, todo: tuple[str, ...]) -> Program:
    if not todo:
        return goto(last_gc, rules, left)
    one = yield look("reads the log", lambda store: wanted(here(store), todo[0]))
    safe = yield look("looks", lambda store: is_safe(there(store), one, rules.mutant))
    if not safe and not (rules.damaged and one.txid == "T"):
        base = one.first.replaces if rules.mutant == "copies_base" else None
        copy = Committed(replaces=base, has=one.first.has, id=one.first.id)
        safe = yield create(("mirror", f"{one.txid}+{left}", 0), copy)
    if safe:
        yield create(("mirrored", one.txid, one.since), True)
    return goto(last_copies, rules, left, todo[1:])


def last_gc(rules: Rules, left: int) -> Program:
    found = yield look("lists commits and notes", lambda store: allowed(here(store), notes(store), rules)[:1])
    for txid, number, record in found:
        yield append(txid, number, record)
        return goto(last_gc, rules, left)
    return goto(last_pass, rules, left - 1)


# -- invariants


def remembers_safety(store: Store) -> Store:
    """Record as ghosts the store's commits that have been safe since they were created or last restored."""
    now, other = here(store), there(store)
    for txid in now.live():
        one = wanted(now, txid)
        key = ("ghost", "safe", txid, one.since)
        if key not in store.objects and is_safe(other, one):
            store = store.with_(key)
    return store


def noted_is_safe(store: Store) -> bool:
    """Check that every commit with a valid note has been safe."""
    now, safe = here(store), store.under("ghost", "safe")
    return all(key in safe for key in notes(store) if now.get(key[0]).count(RESTORED) == key[1])


def purged_is_safe(store: Store) -> bool:
    now, safe = here(store), store.under("ghost", "safe")
    purged = [txid for txid, log in now.of if PURGED in log and not now.is_void(txid)]
    return all((txid, now.get(txid).count(RESTORED)) in safe for txid in purged)


QUIET_SAYS = "When all is quiet, a pass and a gc leave nothing behind: what is visible is noted, and the rest purged."
NOTED = Invariant(
    "What is noted as safe was whole in the mirror, while it was committed here and since it was last restored.",
    noted_is_safe,
)
PURGED_IS_SAFE = Invariant(
    "What is purged was safe in the mirror before, but for rewrites that are void.", purged_is_safe
)


def nothing_waits(store: Store, damaged: bool) -> bool:
    """Check that no commit is waiting, except a damaged T whose entries no other commit has."""
    now, noted = here(store), notes(store)
    whole = [txid for txid in now.visible() if txid != "T" and now.get(txid)[0].has == "ef"]
    rest = [txid for txid in now.live() if txid != "T" or whole or not damaged]
    return all(now.is_visible(txid) and is_noted(now, noted, txid) for txid in rest)


QUIET, QUIET_BUT_DAMAGED = (
    Invariant(QUIET_SAYS, lambda store, damaged=damaged: nothing_waits(store, damaged)) for damaged in (False, True)
)


def model(
    mutant: str = "",
    *,
    rewrite: str = "",
    damaged: bool = False,
    forgets: int = 0,
    mirrors: int = 1,
    passes: int = 1,
    puts: int = 2,
    there: int = 2,
    thins: bool = False,
    lost: bool = False,
) -> Model:
    """Return a model. ``rewrite``: the entries that a rewrite of T keeps. ``there``: records of the mirror's own gc.

    ``lost``: T exists only in the mirror, and is copied back.
    """
    rules = Rules(mutant, damaged)
    plain = rewrites.Rules()
    found = [Process(f"mirror {index}", goto(mirror, rules, passes), mortal=not lost) for index in range(mirrors)]
    found += [Process("rewriter", goto(thinner, rewrite), mortal=True)] if rewrite else []
    found += [Process("user", goto(rewrites.user, plain, forgets, (FORGOTTEN, RESTORED)))] if forgets else []
    found += [Process("gc", goto(gc, rules, puts))] if puts else []
    found += [Process("gc of the mirror", goto(mirrors_gc, there, thins))] if there else []
    found += [Process("copy back", goto(copies_back))] if lost else []
    found += [Process("last", goto(last, rules))]
    first = {("mirror" if lost else "commits", "T", 0): Committed()}
    at_end = () if lost else (QUIET_BUT_DAMAGED if damaged else QUIET,)
    return Model(Store(first), found, always=(NOTED, PURGED_IS_SAFE), at_end=at_end, watch=remembers_safety)


def thinner(has: str) -> Program:
    seen = yield look("lists commits", lambda s: next(((t, here(s).number(t)) for t in here(s).visible()), None))
    if seen is not None:
        base, number = seen
        yield append("V", 0, Committed(replaces=(base, number), has=has))
        won = yield append(base, number, Replaced("V"))
        if not won:
            yield append("V", 1, FORGOTTEN)
    return None
