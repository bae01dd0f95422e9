"""A checkpoint with a permanent tag is visible and complete in the end, even if the process that removed it was killed.

A gc that forgets by a rule lists tags before and after it forgets, and so does thin. Both restore checkpoints that
were tagged in the meantime. If they are killed in between, no process knows this. However, a user who forgets a
checkpoint by name ends its tags first. Therefore, if a tag names a forgotten checkpoint, a later gc knows that a rule
forgot it, and restores it. It also restores a thinned checkpoint whose tag was set on the complete one.

There is a single tag. Its generations are at ("tags", N): the txid that the tag was set on, or "" if it was deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tests.model.protocol.explorer import Invariant, Model, Process, Program, Store, create, goto, look, when_quiet
from tests.model.protocol.logs import FORGOTTEN, RESTORED, Committed, Logs, Replaced, append, listing, logs

MUTANTS = {
    "looks_once": "a gc that has forgotten by a rule does not list tags again",
    "thins_and_goes": "thin does not list tags again",
    "believes_its_tag": "who sets a tag does not read the log behind that",
    "takes_what_is_thin": "who sets a tag takes what was thinned meanwhile for what he wanted",
    "leaves_forgotten": "a gc leaves what is forgotten and tagged as it is",
    "leaves_thin": "a gc leaves what was thinned and is claimed as it is",
    "tags_first": "a gc that restores lists tags before it reads logs",
    "later_number": "a gc that restores takes whatever number comes next",
}


class Rules(NamedTuple):
    mutant: str = ""
    torn: bool = False


def tagged(store: Store) -> str:
    """Return the txid that the tag names, or "" if there is none."""
    newest = max(store.under("tags").items(), default=((), ""))
    return str(newest[1])


def _next(store: Store) -> int:
    return len(store.under("tags"))


def _entries(now: Logs) -> set[str]:
    """Return the entries of the visible commit of X."""
    return set().union(*(now.get(txid)[0].has for txid in now.visible()[:1]))


# -- taggers


def tagger(rules: Rules) -> Program:
    txid = yield look("lists commits", lambda store: next(iter((*logs(store).visible(), *logs(store).live())), ""))
    number = yield look("lists generations", _next)
    won = yield create(("tags", number), txid)
    return goto(tagger_looks, rules, txid) if won and rules.mutant != "believes_its_tag" else None


def tagger_looks(rules: Rules, txid: str) -> Program:
    """Read the logs after tagging. Either the remover sees the tag, or the tagger sees the new state."""
    seen = yield from listing(torn=rules.torn)
    is_less = rules.mutant != "takes_what_is_thin" and bool(_lacking(seen, txid))
    for one in _forgotten(seen) or ([txid] if is_less else []):
        yield append(one, seen.number(one), RESTORED)
        return None
    return None


def _forgotten(now: Logs) -> list[str]:
    """Return the valid forgotten commit of X if none is visible."""
    gone = [txid for txid in now.live() if now.state(txid) == FORGOTTEN and now.stands(txid)]
    return [] if now.visible() else gone[:1]


def _lacking(now: Logs, txid: str) -> set[str]:
    """Return the entries of the replaced commit that the visible one lacks."""
    if not now.visible() or not now.lives(txid) or not isinstance(now.state(txid), Replaced):
        return set()
    return set(now.get(txid)[0].has) - _entries(now)


# -- removers


def ruler(rules: Rules) -> Program:
    """Act as a gc whose rule does not keep X. A forgotten checkpoint is kept for a day. `leases` models purges."""
    if (yield look("lists tags", tagged)):
        return None
    seen = yield from listing(torn=rules.torn)
    found = seen.visible()
    return goto(ruler_forgets, rules, found[0], seen.number(found[0])) if found else None


def ruler_forgets(rules: Rules, txid: str, number: int) -> Program:
    if not (yield append(txid, number, FORGOTTEN)):
        return None
    if rules.mutant != "looks_once" and (yield look("lists tags", tagged)):
        yield append(txid, number + 1, RESTORED)
    return None


def thinner(rules: Rules) -> Program:
    if (yield look("lists tags", tagged)):
        return None
    seen = yield from listing(torn=rules.torn)
    found = seen.visible()
    return goto(thinner_rewrites, rules, found[0], seen.number(found[0])) if found else None


def thinner_rewrites(rules: Rules, base: str, number: int) -> Program:
    yield append("V", 0, Committed(replaces=(base, number), has="e"))
    if not (yield append(base, number, Replaced("V"))):
        return None
    if rules.mutant != "thins_and_goes" and (yield look("lists tags", tagged)):
        yield append(base, number + 1, RESTORED)
    return None


def person(rules: Rules) -> Program:
    """Forget X by name. Delete its tag first, so that the forget does not look like that of a rule."""
    number = yield look("lists generations", lambda store: _next(store) if tagged(store) else -1)
    ended = number < 0 or (yield create(("tags", number), ""))
    seen = yield from listing(torn=rules.torn)
    found = seen.visible()
    return goto(person_forgets, found[0], seen.number(found[0])) if ended and found else None


def person_forgets(txid: str, number: int) -> Program:
    yield append(txid, number, FORGOTTEN, ghost=lambda store, won: store.with_(("ghost", txid, number), won))
    return None


# -- restores


def gc(rules: Rules, times: int = 1) -> Program:
    """Read the logs, list the tags, and then take the number right after the last record."""
    if not times:
        return None
    named = ""
    if rules.mutant == "tags_first":
        named = yield look("lists tags", tagged)
    seen = yield from listing(torn=rules.torn)
    if rules.mutant != "tags_first":
        named = yield look("lists tags", tagged)
    found = tuple(_to_restore(seen, named, rules))
    return goto(gc_restores, rules, times, *found[0]) if found else None


def _to_restore(now: Logs, named: str, rules: Rules) -> Iterable[tuple[str, int]]:
    if named and rules.mutant != "leaves_forgotten":
        yield from ((txid, now.number(txid)) for txid in _forgotten(now))
    if named and rules.mutant != "leaves_thin" and _lacking(now, named):
        yield named, now.number(named)


def gc_restores(rules: Rules, times: int, txid: str, number: int) -> Program:
    won = yield append(txid, number, RESTORED)
    if not won and rules.mutant == "later_number":
        again = yield look("reads the log", lambda s: logs(s).state(txid) == FORGOTTEN and logs(s).number(txid))
        if again:
            yield append(txid, again, RESTORED)
    return goto(gc, rules, times - 1)


def last_gc(rules: Rules) -> Program:
    """Run gc after all other processes have ended."""
    yield when_quiet()
    return goto(gc, Rules(rules.mutant), 3)


# -- invariants

SEEN = "In the end, what a tag names is visible, if it lives, with all that it had where the tag was set."
STAYS = "What a person forgets by name, no gc restores."


def is_seen(store: Store) -> bool:
    now, txid = logs(store), tagged(store)
    if not txid or not now.live():
        return True
    has = set(now.get(txid)[0].has) if now.lives(txid) else set()
    return bool(now.visible()) and has <= _entries(now)


def stays(who: str, before: Store, after: Store) -> bool:
    """Check that, if gc restored something, either no user had forgotten it or it has a new tag."""
    if "gc" not in who or tagged(after):
        return True
    new = [key for key, record in after.under("commits").items() if record == RESTORED]
    behind = [(txid, n - 1) for txid, n in new if before.get("commits", txid, n) is None]
    return not any(after.get("ghost", *key) for key in behind)


def model(
    mutant: str = "",
    *,
    takes: tuple[str, ...] = ("ruler",),
    tags: bool = True,
    is_tagged: bool = False,
    gcs: int = 0,
    repeats: int = 1,
    settles: bool = True,
    mortal: bool = True,
    torn: bool = False,
) -> Model:
    """Return a model. ``takes``: the processes that remove X. ``gcs``: gcs that restore, concurrently with all others.

    ``settles``: one more gc runs at the end.
    """
    rules = Rules(mutant, torn)
    who = {"ruler": ruler, "thinner": thinner, "person": person}
    found = [Process(name, goto(who[name], rules), mortal and name != "person") for name in takes]
    found += [Process("tagger", goto(tagger, rules))] if tags else []
    found += [Process(f"gc {index}", goto(gc, rules, repeats)) for index in range(gcs)]
    found += [Process("last gc", goto(last_gc, rules))] if settles else []
    first: dict[Any, Any] = {("commits", "T", 0): Committed()}
    first |= {("tags", 0): "T"} if is_tagged else {}
    at_end = (Invariant(SEEN, is_seen),)
    return Model(Store(first), found, steps=(Invariant(STAYS, stays),), at_end=at_end)
