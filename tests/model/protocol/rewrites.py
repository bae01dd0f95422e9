"""Rewrites that replace a commit, and their visibility during concurrent rewrites, forgets, restores and purges.

A checkpoint "X" is committed as "T", and a later one of its run, "Y", as "U". `rewritten_bytes` models bytes. This
module assumes the worst case: bytes vanish at the instant of the purge.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.model.protocol.explorer import (
    Goto,
    Invariant,
    Model,
    Process,
    Program,
    Store,
    choose,
    goto,
    look,
    network,
    when_quiet,
)
from tests.model.protocol.logs import (
    FORGOTTEN,
    KEPT,
    PURGED,
    RESTORED,
    Committed,
    Log,
    Logs,
    Replaced,
    append,
    listing,
    logs,
)

MUTANTS = {
    "committed_is_visible": "a rewrite is visible as soon as it is committed",
    "any_number": "a rewriter whose number is taken uses the next one",
    "own_link_only": "a rewrite stands on a rewrite that does not stand",
    "restored_does_not_undo": "a rewrite stands although its base was restored",
    "forgets_unsettled": "a gc forgets a rewrite whose number is still free",
    "gives_up_unsettled": "a rewriter without an answer finds its number free and forgets its rewrite",
    "rewrites_forgotten": "a rewriter rewrites a forgotten checkpoint",
    "follows_only_replaced": "a load whose bytes are gone only follows `replaced`",
    "looks_once": "a load fails if gc deleted its blobs",
    "believes_listings": "a listing is trusted although a `restored` was put while it ran",
    "collects_once": "a reader that finds nothing visible trusts one more read of the logs",
    "trusts_the_listing": "a replacement that the listing lacks is not read",
    "leaves_holes": "a gap in a listed log is not read",
    "latest_by_txid": "latest is the greatest txid, not the latest origin",
    "no_kept": "only the rewriter ever takes the number that it announced",
    "purges_visible_base": "a gc purges the base of every committed rewrite",
}


class Rules(NamedTuple):
    """The rules of a model. ``lost``: puts of `replaced` may get no response.

    ``torn``: listings are not atomic, see `listing`.
    """

    mutant: str = ""
    lost: bool = False
    torn: bool = False

    def now(self, store: Store) -> Logs:
        return logs(store, self.mutant)


# -- rewriters


def rewriter(rules: Rules, names: tuple[str, ...]) -> Program:
    """Rewrite the visible commit of X, and then rewrite the result, under ``names``."""

    def target(now: Logs) -> tuple[str, int, str] | None:
        found = now.live() if rules.mutant == "rewrites_forgotten" else now.visible()
        return (found[0], now.number(found[0]), now.get(found[0])[0].origin or found[0]) if found else None

    if not names:
        return None
    seen = target((yield from listing(rules.mutant, torn=rules.torn)))
    return goto(commits_rewrite, rules, names, *seen) if seen else None


def commits_rewrite(rules: Rules, names: tuple[str, ...], base: str, number: int, origin: str) -> Program:
    yield append(names[0], 0, Committed(replaces=(base, number), origin=origin))
    return goto(takes_its_number, rules, names, base, number)


def takes_its_number(rules: Rules, names: tuple[str, ...], base: str, number: int) -> Program:
    """Take the number, which is the instant at which a rewrite becomes visible.

    A writer that gets no response determines who has the number before it gives up.
    """
    won = yield append(base, number, Replaced(names[0]), lost=rules.lost)
    if won is False and rules.mutant == "any_number" and number < 3:
        return goto(takes_its_number, rules, names, base, number + 1)
    if won is None and rules.mutant != "gives_up_unsettled":
        yield append(base, number, KEPT)
    found = yield look("reads its number", lambda store: store.get("commits", base, number))
    if found == Replaced(names[0]):
        return goto(rewriter, rules, names[1:])
    yield append(names[0], 1, FORGOTTEN)
    return None


# -- gc

Action = tuple[str, int, str]


def actions(now: Logs, mutant: str = "") -> list[Action]:
    """Return all actions that gc may perform on X, each with the number right after the record that allows it."""
    found = []
    for txid in now.live():
        state, number = now.state(txid), now.number(txid)
        replaces = now.get(txid)[0].replaces
        if mutant == "purges_visible_base" and replaces and now.lives(replaces[0]):
            found.append((replaces[0], now.number(replaces[0]), PURGED))
        if state == FORGOTTEN or isinstance(state, Replaced):
            found.append((txid, number, PURGED))
        elif (now.is_void(txid) or mutant == "forgets_unsettled") and not now.stands(txid):
            found.append((txid, number, FORGOTTEN))
        elif not now.stands(txid) and mutant != "no_kept" and len(now.get(replaces[0])) <= replaces[1]:
            found.append((*replaces, KEPT))
    return found


def gc(rules: Rules, puts: int) -> Program:
    """Create ``puts`` records, each after a new listing."""
    if not puts:
        return None
    seen = yield from listing(rules.mutant, torn=rules.torn)
    return goto(gc_acts, rules, puts, tuple(actions(seen, rules.mutant)))


def gc_acts(rules: Rules, puts: int, found: tuple[Action, ...]) -> Program:
    if not found:
        return None
    txid, number, record = yield choose(found)
    yield append(txid, number, record)
    return goto(gc, rules, puts - 1)


def last_gc(rules: Rules) -> Program:
    """Run gc after all other processes have ended, until nothing is left to do."""
    yield when_quiet()
    return goto(last_gc_acts, rules)


def last_gc_acts(rules: Rules) -> Program:
    found = yield look("lists commits", lambda store: tuple(actions(rules.now(store), rules.mutant)[:1]))
    for txid, number, record in found:
        yield append(txid, number, record)
        return goto(last_gc_acts, rules)
    return None


# -- users


def user(rules: Rules, times: int, allowed: tuple[str, ...]) -> Program:
    """Forget the visible commit, or restore a different one. Restoring the base of a rewrite undoes the rewrite."""

    def options(now: Logs) -> tuple[Action, ...]:
        forget = [(txid, now.number(txid), FORGOTTEN) for txid in now.visible()]
        back = [txid for txid in now.live() if not now.is_visible(txid) and not now.is_void(txid)]
        gone = [txid for txid in back if now.state(txid) == FORGOTTEN or isinstance(now.state(txid), Replaced)]
        restore = [(txid, now.number(txid), RESTORED) for txid in gone]
        return tuple(one for one in (*forget, *restore) if one[2] in allowed)

    if not times:
        return None
    seen = yield from listing(rules.mutant, torn=rules.torn)
    return goto(user_acts, rules, times, allowed, options(seen))


def user_acts(rules: Rules, times: int, allowed: tuple[str, ...], found: tuple[Action, ...]) -> Program:
    picked = yield choose((*found, None))
    if picked is None:
        return None
    txid, number, record = picked
    yield append(txid, number, record)
    return goto(user, rules, times - 1, allowed)


def load(rules: Rules, tries: int = 5) -> Program:
    """Load X: plan, then read twice. If bytes are gone, look up the ID again, preferring visible commits."""

    def find(now: Logs) -> str:
        return next(iter((*now.visible(), *(txid for txid in now.live() if now.stands(txid)))), "")

    seen = yield from listing(rules.mutant, torn=rules.torn)
    return goto(load_bytes, rules, tries, find(seen))


def load_bytes(rules: Rules, tries: int, found: str) -> Program:
    for _ in range(2):
        there = yield look("reads bytes of " + found, lambda store: bool(found) and rules.now(store).lives(found))
        if not there:
            return goto(load_fails_over, rules, tries - 1, found)
    return None


def load_fails_over(rules: Rules, tries: int, found: str) -> Program:
    def replacement(store: Store) -> str:
        return next((record.by for record in rules.now(store).get(found) if isinstance(record, Replaced)), "")

    follow = ""
    if rules.mutant == "follows_only_replaced" and found:
        follow = yield look("reads the log", replacement)
    elif tries and found and rules.mutant != "looks_once":
        return goto(load, rules, tries)
    if follow and tries:
        return goto(load_bytes, rules, tries, follow)
    yield look("FAILS to load", lambda store: "", lambda store, _: store.with_(("ghost", "failed")))
    return None


def lists(rules: Rules) -> Program:
    """Report whether X is visible. If the non-atomic listing contains no visible commit of X, read its logs."""
    seen = yield from listing(rules.mutant, torn=True)
    if seen.visible():
        return None
    txids = tuple(seen.txids())
    return goto(says_gone) if rules.mutant == "believes_listings" else goto(collects, rules, txids, Logs(()))


def collects(rules: Rules, txids: tuple[str, ...], before: Logs, found: tuple[tuple[str, Log], ...] = ()) -> Program:
    """Read all logs of an ID until two rounds agree, which proves that this was the state at the instant
    between them."""
    if len(found) < len(txids):
        txid = txids[len(found)]
        log = yield look(f"reads the log of {txid}", lambda store: rules.now(store).get(txid))
        return goto(collects, rules, txids, before, (*found, (txid, log)))
    now = Logs(found, rules.mutant)
    if now.visible():
        return None
    if now == before or rules.mutant == "collects_once":
        return goto(says_gone)
    replacing = {record.by for _, log in found for record in log if isinstance(record, Replaced)}
    return goto(collects, rules, tuple(sorted({*txids, *replacing})), now)


def says_gone() -> Program:
    yield look("SAYS that it is gone", lambda store: "", lambda store, _: store.with_(("ghost", "gone")))
    return None


# -- invariants

ONE = "Of all commits of an id at most one is visible."
THERE = "What nobody forgets is visible at every instant."
LISTED = "No listing reports a checkpoint as gone that was never forgotten."
LOADED = "A load by id ends well where nobody forgets it."
SETTLED = "Only users make an id visible or invisible."
LATEST = "Only users change what the latest of a run is."
TIDY = "When all is quiet and a gc has run, what lives is visible: no rewrite stays in between."


def invariants(mutant: str, *, forgets: bool) -> dict[str, Any]:
    """Return the invariants by when they hold. If no process forgets, X is always visible, and every load finds it."""

    def seen(store: Store) -> list[str]:
        return logs(store, mutant).visible()

    def same(who: str, before: Store, after: Store) -> bool:
        return who.startswith("user") or bool(seen(before)) == bool(seen(after))

    def same_latest(who: str, before: Store, after: Store) -> bool:
        return who.startswith("user") or logs(before, mutant).latest() == logs(after, mutant).latest()

    one = Invariant(ONE, lambda store: len(seen(store)) <= 1)
    there = Invariant(THERE, lambda store: bool(seen(store)))
    loaded = Invariant(LOADED, lambda store: not store.get("ghost", "failed"))
    listed = Invariant(LISTED, lambda store: not store.get("ghost", "gone"))
    tidy = Invariant(TIDY, lambda store: logs(store, mutant).live() == seen(store))
    steps = (Invariant(SETTLED, same), Invariant(LATEST, same_latest))
    return {"always": (one,) if forgets else (one, there, loaded, listed), "steps": steps, "at_end": (tidy,)}


# -- models


def model(
    mutant: str = "",
    *,
    rewriters: tuple[tuple[str, ...], ...] = (("V",),),
    toggles: int = 1,
    users: int = 1,
    allowed: tuple[str, ...] = (FORGOTTEN, RESTORED),
    puts: int = 2,
    loads: bool = False,
    lists_too: bool = False,
    lost: bool = False,
    torn: bool = False,
    mortal: bool = True,
) -> Model:
    """Return a model. ``rewriters``: the txids of each, in order.

    ``puts``: records that gc may create before the others end.
    """
    rules = Rules(mutant, lost, torn)
    first = {("commits", "T", 0): Committed(), ("commits", "U", 0): Committed(id="Y")}
    found = [Process(f"rewriter {'+'.join(names)}", goto(rewriter, rules, names), mortal) for names in rewriters]
    found += [Process(f"user {index}", goto(user, rules, toggles, allowed)) for index in range(users) if toggles]
    found += [Process("gc", goto(gc, rules, puts))] if puts else []
    found += [Process("load", goto(load, rules))] if loads else []
    found += [Process("list", goto(lists, rules))] if lists_too else []
    found += [Process("network", Goto(network), daemon=True)] if lost else []
    found += [Process("last gc", goto(last_gc, rules))]
    return Model(Store(first), found, **invariants(mutant, forgets=FORGOTTEN in allowed and bool(toggles)))
