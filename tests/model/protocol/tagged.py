"""A tag protects its checkpoint from rules and thinning, from the instant at which it is set, even if tags/ is lost.

To set a tag, a process creates a generation in tags/. Then it reads the log, puts a forgotten checkpoint or the places
back that it tags, and creates `tagged` right after the log in which all of it is visible. A rule, or thin, reads the
log, then lists tags, and creates its record right after the log as read. So one of the two finds its number taken. No
rule looks again afterwards. If the tagger dies before `tagged`, gc puts back what its generation names.

A user who forgets a checkpoint by name first ends its tags. Therefore, if a tag names a forgotten checkpoint, a rule
has forgotten it, or the two happened at once.

There is a single tag. Its generations are at ("tags", N): the places that the tag was set on, or "" if it was ended. A
process that finds `tagged` N in a log, and then neither N nor a higher generation, concludes that tags/ is lost.
"""

from __future__ import annotations

from collections.abc import Generator
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
    delete,
    goto,
    look,
    network,
    when_quiet,
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
    Tagged,
    X,
    append,
    fold,
    log,
    reads_log,
)

MUTANTS = {
    "tags_first": "a rule lists tags before it reads the log",
    "thins_tags_first": "thin lists tags before it reads the log",
    "later_number": "a rule whose number is taken takes the next one",
    "person_reads_last": "who forgets by name ends the tags before he reads the log",
    "believes_its_tag": "who sets a tag creates no record, and does not read the log",
    "reads_only": "who sets a tag reads the log, and creates no record",
    "takes_what_is_thin": "who sets a tag takes what was thinned meanwhile for what he wanted",
    "records_first": "who sets a tag records it before it exists",
    "numbers_by_listing": "who sets a tag takes its number from tags/ alone",
    "leaves_forgotten": "a gc leaves what is forgotten and tagged as it is",
    "leaves_thin": "a gc leaves what was thinned and is tagged as it is",
    "gc_tags_first": "a gc that restores lists tags before it reads logs",
    "gc_later_number": "a gc that restores takes whatever number comes next",
    "tags_before_records": "a rule that checks for lost tags lists them before it reads the logs",
    "lists_once": "a rule does not list tags again before it takes a generation for lost",
    "cleans_all": "a cleanup deletes the newest generation too",
    "ignores_records": "a rule does not compare tags with their records",
}
WHOLE, THIN = frozenset({(X, "e"), (X, "f")}), frozenset({("V", "e")})


class Rules(NamedTuple):
    """The rules of a model. ``lost``: puts of rules may get no answer, and land later."""

    mutant: str = ""
    lost: bool = False


Newest = tuple[int, str]
"""The number of the newest generation, or -1; and the places that it names, or ""."""


def newest(store: Store) -> Newest:
    return max(((number, txid) for (number,), txid in store.under("tags").items()), default=(-1, ""))


def lists_tags() -> Generator[Op, Any, Newest]:
    """List tags in two pages. The oldest generation is on the second one."""
    later = yield look("lists tags", lambda store: max(newest(store), (0, ""))[0] and newest(store))
    oldest = yield look("lists tags", lambda store: store.get("tags", 0))
    return later or (-1 if oldest is None else 0, oldest or "")


def recorded(seen: Log) -> int:
    return max((record.number for record in seen.records if isinstance(record, Tagged)), default=-1)


# -- taggers


def tagger(rules: Rules) -> Program:
    """Choose the current places, and create the next generation."""
    seen = yield reads_log()
    number, _ = yield from lists_tags()
    if rules.mutant != "numbers_by_listing":
        number = max(number, recorded(seen))
    if not seen.live:
        return None
    if rules.mutant == "records_first":
        yield append(seen, Tagged(number + 1))
    won = yield create(("tags", number + 1), seen.current, _begins)
    return goto(tagger_records, rules, number + 1, seen.current) if won else None


def _begins(store: Store, won: bool) -> Store:
    """Earlier promises are over when another generation exists."""
    return store.without(("ghost", "set")).with_(("ghost", "named")) if won else store


def _ends(store: Store, won: bool) -> Store:
    return store.without(("ghost", "set")) if won else store


def tagger_records(rules: Rules, number: int, places: str) -> Program:
    """Make the checkpoint visible and whole, and record the tag right after that."""
    if rules.mutant == "believes_its_tag":
        return goto(tagger_has_set, number, places)
    seen = yield reads_log()
    wanted = seen.has(places)
    best = seen.fullest(wanted)
    if not best or not wanted <= seen.has(best):
        yield create(("tags", number + 1), "", _ends)
        return None
    if not seen.visible:
        yield append(seen, RESTORED)
    elif not wanted <= seen.has() and rules.mutant != "takes_what_is_thin":
        yield append(seen, Back(best))
    elif rules.mutant in {"reads_only", "records_first"}:
        return goto(tagger_has_set, number, places)
    else:
        won = yield append(seen, Tagged(number))
        if won:
            return goto(tagger_has_set, number, places)
    return goto(tagger_records, rules, number, places)


def tagger_has_set(number: int, places: str) -> Program:
    def promises(store: Store, _: Any) -> Store:
        return store.with_(("ghost", "set"), places) if store.get("ghost", "newest") == number else store

    yield look("has set its tag", lambda store: "", promises)
    return None


def ender(_: Rules) -> Program:
    """End the tag. Its record stays in the log."""
    number, places = yield from lists_tags()
    if places:
        yield create(("tags", number + 1), "", _ends)
    return None


def loser(_: Rules) -> Program:
    """Lose tags/."""
    yield Op(lambda store: [Outcome("LOSES tags", store.without(*(("tags", *key) for key in store.under("tags"))))])
    return None


def cleaner(rules: Rules) -> Program:
    """Delete the old generations of a tag that was ended. The newest one stays, so that no number is reused."""
    numbers = yield look("lists tags", lambda store: () if newest(store)[1] else tuple(range(newest(store)[0] + 1)))
    for number in numbers if rules.mutant == "cleans_all" else numbers[:-1]:
        yield delete(("tags", number))
    return None


# -- removers


def ruler(rules: Rules) -> Program:
    """Act as a gc or rotation whose rule does not keep X."""
    seen, places = yield from looks(rules, first=rules.mutant in {"tags_first", "tags_before_records"})
    if seen.visible and places == "":
        won = yield append(seen, FORGOTTEN, lost=rules.lost)
        if won is False and rules.mutant == "later_number":
            yield append(fold(X, (*seen.records, None)), FORGOTTEN)
    return None


def looks(rules: Rules, *, first: bool = False) -> Generator[Op, Any, tuple[Log, str | None]]:
    """Read the log, then list tags. Return the log, and the places that the tag names, or None if tags/ is lost."""
    early = (yield from lists_tags()) if first else None
    seen = yield reads_log()
    if early is None or rules.mutant == "tags_before_records":
        number, places = early or (yield from lists_tags())
        if recorded(seen) > number and not early and rules.mutant != "lists_once":
            number, places = yield from lists_tags()
    else:
        number, places = early
    if recorded(seen) > number and rules.mutant not in {"ignores_records", "tags_first", "thins_tags_first"}:
        yield create(("ghost", "alarm"), True)
        return seen, None
    return seen, places


def thinner(rules: Rules) -> Program:
    seen, places = yield from looks(rules, first=rules.mutant == "thins_tags_first")
    if seen.visible and places == "" and len(seen.has()) > 1:
        yield append(seen, Rewritten("V", THIN), lost=rules.lost)
    return None


def repacker(_: Rules) -> Program:
    """Move all entries. Whoever takes the number meanwhile makes it fail."""
    seen = yield reads_log()
    if seen.visible:
        yield append(seen, Rewritten("Q", frozenset(("Q", entry) for entry in seen.has())))
    return None


def person(rules: Rules) -> Program:
    """Forget X by name. End its tag first, so that the forget does not look like that of a rule."""
    early = (yield from lists_tags()) if rules.mutant == "person_reads_last" else None
    seen = yield reads_log()
    yield look("begins to list tags", lambda _: "", lambda store, _: store.without(("ghost", "named")))
    number, places = early or (yield from lists_tags())
    if places and not (yield create(("tags", number + 1), "", _ends)):
        return goto(person, rules)
    if not seen.visible:
        return None
    won = yield append(seen, FORGOTTEN)
    if not won:
        return goto(person, rules)
    yield look("has forgotten", lambda _: "", lambda store, _: store.with_(("ghost", seen.next)))
    return None


# -- gc


def gc(rules: Rules, times: int = 1) -> Program:
    """Put back what tags name, trim and purge, each right after the log as read."""
    if not times:
        return None
    early = (yield from lists_tags()) if rules.mutant == "gc_tags_first" else None
    seen = yield reads_log()
    _, places = early or (yield from lists_tags())
    act = gc_act(seen, places, rules.mutant)
    if act is None:
        return None
    won = yield append(seen, act)
    if not won and act == RESTORED and rules.mutant == "gc_later_number":
        again = yield reads_log()
        if again.live and not again.visible:
            yield append(again, act)
    return goto(gc, rules, times - 1)


def gc_act(seen: Log, places: str, mutant: str) -> Any:
    if not seen.live:
        return None
    if places and not seen.visible and mutant != "leaves_forgotten":
        return RESTORED
    wanted = seen.has(places) if places else frozenset[str]()
    best = seen.fullest(wanted)
    if not seen.visible:
        return None if places else PURGED
    if seen.has(best) & wanted > seen.has() & wanted and mutant != "leaves_thin":
        return Back(best)
    return TRIMMED if len(seen.live) > 1 and wanted <= seen.has() else None


def last_gc(rules: Rules) -> Program:
    """Run gc after all other processes have ended."""
    yield when_quiet()
    return goto(gc, rules, 4)


def last_ruler(rules: Rules) -> Program:
    yield when_quiet()
    return goto(ruler, rules)


# -- invariants


def keeps(store: Store, places: str) -> bool:
    seen = log(store)
    return seen.visible and seen.has(places) <= seen.has()


def is_set(store: Store) -> bool:
    places = store.get("ghost", "set")
    return places is None or keeps(store, places)


def is_seen(store: Store) -> bool:
    seen, places = log(store), newest(store)[1]
    return not places or not seen.live or (seen.visible and (places not in dict(seen.live) or keeps(store, places)))


def stays(who: str, before: Store, after: Store) -> bool:
    """Check that gc restored nothing that a person had forgotten, unless a tag was set since he listed tags."""
    if "gc" not in who or after.get("ghost", "named"):
        return True
    old, new = log(before), log(after)
    return new.records[old.next :] != (RESTORED,) or not before.get("ghost", old.next - 1)


SET = Invariant(
    "From the instant at which a tag is set, all that it was set on is visible, until the tag ends.", is_set
)
SEEN = Invariant("In the end, what a tag names is visible, if it lives, with all that it was set on.", is_seen)
STAYS = Invariant("What a person forgets by name, no gc restores.", stays)
QUIET = Invariant(
    "No generation of a tag counts as lost that was never lost.", lambda store: not store.get("ghost", "alarm")
)


def remembers(store: Store) -> Store:
    """Remember the newest generation, which may be lost."""
    number = newest(store)[0]
    return store.with_(("ghost", "newest"), number) if number >= store.get("ghost", "newest") else store


WHO = {one.__name__: one for one in (tagger, ender, loser, cleaner, ruler, thinner, repacker, person, last_ruler)}


def model(
    mutant: str = "",
    *,
    does: tuple[str, ...] = ("ruler",),
    start: tuple[Any, ...] = (),
    tags: tuple[str, ...] = (),
    gcs: int = 0,
    times: int = 2,
    lost: bool = False,
    mortal: bool = True,
) -> Model:
    """Return a model. ``does``: the processes. ``start``: records behind the first. ``tags``: generations at first."""
    rules = Rules(mutant, lost)
    immortal = {"person", "loser"}
    found = [
        Process(f"{name} {i}", goto(WHO[name], rules), mortal and name not in immortal) for i, name in enumerate(does)
    ]
    found += [Process(f"gc {index}", goto(gc, rules, times)) for index in range(gcs)]
    found += [Process("last gc", goto(last_gc, rules))] if "last_ruler" not in does else []
    found += [Process("network", Goto(network), daemon=True)] if lost else []
    records = (Committed(WHOLE), *start)
    first: dict[Any, Any] = {("commits", X, number): record for number, record in enumerate(records)}
    first |= {("tags", number): places for number, places in enumerate(tags)}
    first |= {("ghost", "newest"): len(tags) - 1}
    first |= {("ghost", "set"): X} if start and (tags or "loser" in does) else {}
    always = (SET,) if "loser" in does else (SET, QUIET)
    at_end = () if "loser" in does or lost else (SEEN,)
    return Model(Store(first), found, always=always, steps=(STAYS,), at_end=at_end, watch=remembers)
