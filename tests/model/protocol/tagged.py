"""A checkpoint with a permanent tag is visible and complete in the end, even if the process that removed it was killed.

A gc that forgets by a rule lists tags before and after it forgets, and so does thin. Both restore checkpoints that
were tagged in the meantime. If they are killed in between, no process knows this. However, a user who forgets a
checkpoint by name ends its tags first. Therefore, if a tag names a forgotten checkpoint, a later gc knows that a rule
forgot it, and restores it. It also restores a thinned checkpoint whose tag was set on the complete one.

There is a single tag. Its generations are at ("tags", N): the txid that the tag was set on, or "" if it was deleted.

With ``records``, a record in commits/ says that generation N was set: ("recorded", N). A gc that lists such a record,
and then does not find this generation or a later one, concludes that tags/ is lost. It must be right.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

from tests.model.protocol.explorer import (
    Invariant,
    Model,
    Op,
    Process,
    Program,
    Store,
    create,
    delete,
    goto,
    look,
    when_quiet,
)
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
    "records_first": "who sets a tag records it before it exists",
    "tags_before_records": "a gc lists tags before the records of tags",
    "lists_once": "a gc does not list tags again before it takes a generation for lost",
    "cleans_all": "a cleanup deletes the newest generation too",
    "ignores_records": "a gc does not compare tags with their records",
}


class Rules(NamedTuple):
    mutant: str = ""
    torn: bool = False
    records: bool = False


def tagged(store: Store) -> str:
    """Return the txid that the tag names, or "" if there is none."""
    newest = max(store.under("tags").items(), default=((), ""))
    return str(newest[1])


def _next(store: Store) -> int:
    return max((number for (number,) in store.under("tags")), default=-1) + 1


def _entries(now: Logs) -> set[str]:
    """Return the entries of the visible commit of X."""
    return set().union(*(now.get(txid)[0].has for txid in now.visible()[:1]))


# -- taggers


def tagger(rules: Rules) -> Program:
    txid = yield look("lists commits", lambda store: next(iter((*logs(store).visible(), *logs(store).live())), ""))
    number = yield look("lists generations", _next)
    if rules.mutant == "records_first":
        yield create(("recorded", number), True)
    won = yield create(("tags", number), txid)
    return goto(tagger_looks, rules, txid, number) if won and rules.mutant != "believes_its_tag" else None


def tagger_looks(rules: Rules, txid: str, number: int) -> Program:
    """Read the logs after tagging. Either the remover sees the tag, or the tagger sees the new state."""
    seen = yield from listing(torn=rules.torn)
    is_less = rules.mutant != "takes_what_is_thin" and bool(_lacking(seen, txid))
    for one in _forgotten(seen) or ([txid] if is_less else []):
        yield append(one, seen.number(one), RESTORED)
        break
    if rules.records:
        yield create(("recorded", number), True)
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
    if rules.records and (yield from _misses_tags(rules)):
        yield create(("ghost", "alarm"), True)
        return None
    if (yield look("lists tags", tagged)):
        return None
    seen = yield from listing(torn=rules.torn)
    found = seen.visible()
    return goto(ruler_forgets, rules, found[0], seen.number(found[0])) if found else None


def _misses_tags(rules: Rules) -> Generator[Op, Any, bool]:
    """List commits, then tags. Report whether a generation that commits/ records is lost."""
    newest = -1
    if rules.mutant == "tags_before_records":
        newest = yield from _newest()
    recorded = yield look("lists commits", lambda store: max((n for (n,) in store.under("recorded")), default=-1))
    if rules.mutant != "tags_before_records":
        newest = yield from _newest()
        if recorded > newest and rules.mutant != "lists_once":
            newest = yield from _newest()
    return bool(recorded > newest) and rules.mutant != "ignores_records"


def _newest() -> Generator[Op, Any, int]:
    """List tags. The listing is not atomic, and sees the oldest generation last."""
    later = yield look("lists tags", lambda store: max((n for (n,) in store.under("tags") if n), default=-1))
    oldest = yield look("lists tags", lambda store: -1 if store.get("tags", 0) is None else 0)
    return max(int(later), int(oldest))


def cleaner(rules: Rules) -> Program:
    """Delete the old generations of a tag that was deleted. The newest one stays, so that no number is reused."""
    numbers = yield look("lists tags", lambda store: () if tagged(store) else tuple(range(_next(store))))
    for number in numbers if rules.mutant == "cleans_all" else numbers[:-1]:
        yield delete(("tags", number))
    return None


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
QUIET = "No generation of a tag that was never lost counts as lost."
KEPT = "If tags/ is lost, no rule forgets what was tagged."


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


def is_quiet(store: Store) -> bool:
    return not store.get("ghost", "alarm")


def is_kept(store: Store) -> bool:
    return bool(logs(store).state("T") != FORGOTTEN)


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
    records: bool = False,
    lost: bool = False,
) -> Model:
    """Return a model. ``takes``: the processes that remove X. ``gcs``: gcs that restore, concurrently with all others.

    ``settles``: one more gc runs at the end. ``records``: tags are recorded, and old generations are deleted. ``lost``:
    a tag is recorded, but tags/ was left out when the store was restored.
    """
    rules = Rules(mutant, torn, records)
    who = {"ruler": ruler, "thinner": thinner, "person": person}
    found = [Process(name, goto(who[name], rules), mortal and name != "person") for name in takes]
    found += [Process("tagger", goto(tagger, rules))] if tags else []
    found += [Process(f"gc {index}", goto(gc, rules, repeats)) for index in range(gcs)]
    found += [Process("last gc", goto(last_gc, rules))] if settles else []
    found += [Process("cleaner", goto(cleaner, rules))] if records else []
    first: dict[Any, Any] = {("commits", "T", 0): Committed()}
    first |= {("tags", 0): "T"} if is_tagged else {}
    first |= {("recorded", 0): True} if lost or (records and is_tagged) else {}
    at_end = (Invariant(KEPT, is_kept) if lost else Invariant(SEEN, is_seen),)
    always = (Invariant(QUIET, is_quiet),) if records and not lost else ()
    return Model(Store(first), found, always=always, steps=(Invariant(STAYS, stays),), at_end=at_end)
