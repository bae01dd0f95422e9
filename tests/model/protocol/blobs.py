"""The bytes of rewrites: no process deletes a blob that current, older, or later places need, whoever dies.

Checkpoint X has places of its own (uploader "X", blobs "e" and "f"). Rewrites move "e" into a blob of their own, or add
"g", as a fuller copy does. Saves name blobs of places of X that exist, and so do the processes that join one copy "K".
An object is at ("objects", uploader, entry); a manifest is the entry "m". A transaction is at ("transactions", txid):
the number of the slot in the log of X that a rewrite commits in, or `SAVE`. A save commits at ("commits", txid, 0),
where a rewrite can only be revoked.

gc follows docs/format.md. It may rest for any time between its steps, and goes on with what it has recorded: the
candidates, P, and the txids that were open. It lists a folder of objects per step, and leaves out folders that have a
guard: places that exist, and name exactly what an earlier listing of the folder has shown.
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
    create,
    delete,
    goto,
    look,
    network,
    when_quiet,
)
from tests.model.protocol.places import (
    FORGOTTEN,
    KEPT,
    PURGED,
    RESTORED,
    REVOKED,
    TRIMMED,
    Back,
    Blobs,
    Committed,
    Log,
    Rewritten,
    X,
    append,
    ended,
    log,
    reads_log,
)

MUTANTS = {
    "save_reads_first": "a save reads the log of what it reuses before its transaction has begun",
    "rewrite_reads_first": "a rewrite reads the log of another checkpoint before its transaction has begun",
    "rows_of_checkpoint": "a save takes the rows that its host remembers of the checkpoint for those of its places",
    "joins_late": "who copies reads the log of what it reuses before it joins the transaction",
    "own_names": "who finds a manifest commits a record of its own names",
    "no_wait": "a gc does not wait for open transactions",
    "open_first": "a gc lists transactions before commits",
    "roots_live": "places that ended since the candidates were made are no roots",
    "own_key": "a gc revokes a rewrite under its own txid, and leaves its slot free",
    "own_first": "a gc revokes a rewrite under its own txid before it takes the slot",
    "own_always": "a gc revokes a rewrite under its own txid, whoever has the slot",
    "gone_is_revoked": "a gc that finds the file of an open transaction gone revokes it under its own txid",
    "gives_up": "a rewrite without an answer revokes itself, and leaves its slot free",
    "file_first": "a rewrite that has failed removes its file before its record exists",
    "slot_is_enough": "nobody revokes a rewrite under its own txid once something else has its slot",
    "later_number": "whoever finds a number taken takes the next one",
    "unread_root": "a root whose manifest is gone is left out",
    "unread_slot": "a gc that cannot read which slot a rewrite has revokes it under its own txid at once",
    "guard_by_checkpoint": "a folder is guarded while the checkpoint lives whose places named it",
}
SAVE = -1


class Rules(NamedTuple):
    """The rules of a model. ``lost``: puts of rewrites and of gc may get no answer, and land later.

    ``reads``: gc reads the manifests of its roots one step after it has listed commits. ``unreadable``: gc cannot read
    files in transactions/, so it does not know slots.
    """

    mutant: str = ""
    lost: bool = False
    reads: bool = False
    guards: bool = False
    unreadable: bool = False


# -- writers


def save(rules: Rules, me: str) -> Program:
    early = (yield reads_log()) if rules.mutant == "save_reads_first" else None
    yield create(("transactions", me), SAVE)
    return goto(save_plans, rules, me, early)


def save_plans(rules: Rules, me: str, early: Log | None) -> Program:
    seen = early or (yield reads_log())
    known = {blobs for _, blobs in seen.live}
    if rules.mutant == "rows_of_checkpoint" and seen.live:
        known = {seen.ever[0][1]}
    return goto(save_commits, me, tuple(sorted(known, key=sorted)))


def save_commits(me: str, known: tuple[Blobs, ...]) -> Program:
    named = (yield choose(known)) if known else frozenset()
    yield create(("objects", me, "m"), True)
    yield create(("commits", me, 0), Committed(named))
    yield delete(("transactions", me))
    return None


def copy(rules: Rules) -> Program:
    """Copy a checkpoint in one transaction with all that copy the same. The first manifest counts."""
    early = (yield reads_log()) if rules.mutant == "joins_late" else None
    if (yield look("reads the log of K", lambda store: store.get("commits", "K", 0))) is not None:
        return None
    yield create(("transactions", "K"), SAVE)
    seen = early or (yield reads_log())
    known = [blob for _, blobs in seen.live for blob in sorted(blobs) if blob[1] == "e"]
    return goto(copy_commits, rules, (yield choose((*known, ("K", "e")))))


def copy_commits(rules: Rules, blob: tuple[str, str]) -> Program:
    if blob[0] == "K":
        yield create(("objects", *blob), True)
    names = frozenset({blob})
    first = yield create(("objects", "K", "m"), names)
    if not first and rules.mutant != "own_names":
        names = yield look("reads the manifest", lambda store: store.get("objects", "K", "m"))
    if names is not None:
        yield create(("commits", "K", 0), Committed(names))
    yield delete(("transactions", "K"))
    return None


def rewrite(rules: Rules, me: str, how: str) -> Program:
    """Rewrite X. ``how``: move "e"; add "g", as a fuller copy does; or name the blob "e" of Y."""
    early = (yield reads_log("Y")) if rules.mutant == "rewrite_reads_first" else None
    seen = yield reads_log()
    if not seen.visible:
        return None
    began = yield create(("transactions", me), seen.next, lost=rules.lost)
    if began is None and not (yield look("reads its file", lambda store: ("transactions", me) in store.objects)):
        return None
    return goto(rewrite_plans, rules, me, how, seen.next, early)


def rewrite_plans(rules: Rules, me: str, how: str, slot: int, early: Log | None) -> Program:
    """Read the logs after the transaction has begun. Go on only if the slot is still the next number."""
    other = (early or (yield reads_log("Y"))) if how == "names" else None
    seen = yield reads_log()
    if seen.next != slot or not seen.visible or (other and not other.live):
        return goto(rewrite_ends, rules, me, slot)
    old, moved = dict(seen.live)[seen.current], "g" if how == "adds" else "e"
    blobs = frozenset(blob for blob in old if blob[1] != moved) | {("Y" if other else me, moved)}
    for entry in sorted(entry for uploader, entry in blobs if uploader == me):
        yield create(("objects", me, entry), True)
    yield create(("objects", me, "m"), True)
    return goto(rewrite_commits, rules, me, slot, blobs)


def rewrite_commits(rules: Rules, me: str, slot: int, blobs: Blobs) -> Program:
    won = yield create(("commits", X, slot), Rewritten(me, blobs), lost=rules.lost)
    if won:
        yield delete(("transactions", me))
        return None
    return goto(rewrite_ends, rules, me, slot)


def rewrite_ends(rules: Rules, me: str, slot: int) -> Program:
    """Take the slot, and then look who has it. While it is free, nothing is decided, and the transaction stays open."""
    if rules.mutant == "file_first":
        yield delete(("transactions", me))
    if rules.mutant != "gives_up":
        yield create(("commits", X, slot), KEPT, lost=rules.lost)
        found = yield look("reads its slot", lambda store: store.get("commits", X, slot))
        if found is None:
            return None
        if isinstance(found, Rewritten) and found.by == me:
            yield delete(("transactions", me))
            return None
    if rules.mutant != "slot_is_enough" and (yield create(("commits", me, 0), REVOKED, lost=rules.lost)) is None:
        return None
    yield delete(("transactions", me))
    return None


# -- users, and the first step of gc


def user(rules: Rules, acts: tuple[Any, ...], txid: str = X) -> Program:
    """Create these records, each where a log as read allows it. Anybody may trim or purge: a gc, or a rotation."""
    for act in acts[:1]:
        seen = yield reads_log(txid)
        if may(seen, act):
            older = next((name for name, _ in seen.live if name != seen.current), "")
            record = Back(older) if act is Back else act
            won = yield append(seen, record, txid)
            if not won and rules.mutant == "later_number":
                yield create(("commits", txid, seen.next + 1), record)
        return goto(user, rules, acts[1:], txid)
    return None


def may(seen: Log, act: Any) -> bool:
    if act == FORGOTTEN:
        return seen.visible
    if act in (RESTORED, PURGED):
        return bool(seen.live) and not seen.visible
    return len(seen.live) > 1


# -- gc

Objects = frozenset[tuple[str, str]]


class Place(NamedTuple):
    """Places that a log names, or (without blobs) a transaction that never had any, or is folded."""

    txid: str
    blobs: Blobs | None
    lives: bool


class Listing(NamedTuple):
    """A listing of commits/: all places that logs ever named, and all other transactions that are over."""

    places: tuple[Place, ...] = ()

    def names(self, *, all_but: frozenset[str] | None = None) -> dict[str, Blobs]:
        """Return the blobs of all places that exist or, with ``all_but``, that ever did and are not in this set."""
        found = (one for one in self.places if (one.lives if all_but is None else one.txid not in all_but))
        return {one.txid: one.blobs for one in found if one.blobs is not None}

    def ended(self) -> frozenset[str]:
        """Return P: the places that have ended, and the transactions that are over."""
        return frozenset(one.txid for one in self.places if not one.lives)

    def recorded(self) -> set[str]:
        return {one.txid for one in self.places}


def objects_of(names: dict[str, Blobs]) -> Objects:
    """Return the blobs, and the manifests that name them."""
    return frozenset(blob for blobs in names.values() for blob in blobs) | {(txid, "m") for txid in names}


def _places(seen: Log) -> list[Place]:
    return [Place(txid, blobs, txid in dict(seen.live)) for txid, blobs in seen.ever]


def _others(store: Store) -> tuple[Place, ...]:
    found: list[Place] = []
    for txid in sorted({txid for txid, _ in store.under("commits")} - {X}):
        found += _places(log(store, txid)) or [Place(txid, None, lives=False)]
    for line in ended(store).values():
        found += [Place(txid, None, lives=False) for txid in sorted({line.txid, *line.places})]
    return tuple(found)


def lists_commits() -> Generator[Op, Any, Listing]:
    """List commits/ in two pages."""
    x = yield reads_log()
    others = yield look("lists other commits", _others)
    return Listing((*_places(x), *others))


Guards = frozenset[tuple[str, str]]
"""The folders that have a guard: (uploader, txid of the places)."""


class Turn(NamedTuple):
    """What is left of a gc: ``runs`` beside the others and, when they have ended, ``last`` more.

    ``trims``: a run begins with its first step. ``then``: what the process does next.
    """

    runs: int
    last: int = 0
    trims: bool = False
    guards: Guards = frozenset()
    then: Goto | None = None


class Plan(NamedTuple):
    """What a gc records: the candidates, P, the manifests that it has read, and the txids that were open."""

    candidates: Objects
    ended: frozenset[str]
    read: frozenset[str]
    opened: frozenset[str] = frozenset()


def gc(rules: Rules, turn: Turn) -> Program:
    if not turn.runs:
        if not turn.last:
            return turn.then
        yield when_quiet()
        return goto(gc, rules, turn._replace(runs=turn.last, last=0, trims=True))
    if turn.trims:
        seen = yield reads_log()
        act = TRIMMED if seen.visible else PURGED
        if may(seen, act):
            yield append(seen, act)
    known = (yield from lists_commits()) if rules.guards else Listing()
    return goto(gc_lists_objects, rules, turn._replace(runs=turn.runs - 1), known)


def gc_lists_objects(rules: Rules, turn: Turn, known: Listing) -> Program:
    """List the folders that have no guard, one per step, and find their guards."""
    names = known.names()
    guards = {(folder, txid) for folder, txid in turn.guards if txid in names}
    if rules.mutant == "guard_by_checkpoint":
        guards = {(folder, txid) for folder, txid in turn.guards if any(one.lives for one in known.places)}
    found: set[tuple[str, str]] = set()
    pages = yield look("lists folders", lambda store: _folders(store, guards, apart=rules.guards))
    for folders in pages:
        found |= yield _lists(folders)
    for folder in {folder for folder, _ in found}:
        for txid in names:
            inside = {one for one in objects_of({txid: names[txid]}) if one[0] == folder}
            if inside == {one for one in found if one[0] == folder}:
                by = X if rules.mutant == "guard_by_checkpoint" else txid
                guards.add((folder, by))
    closed = {folder for folder, _ in guards}
    loose = frozenset(one for one in found if one[0] not in closed)
    opened = None
    if rules.mutant == "open_first":
        opened = yield look("lists transactions", _open)
    return goto(gc_lists_commits, rules, turn._replace(guards=frozenset(guards)), loose, opened)


def _folders(store: Store, guards: set[tuple[str, str]], *, apart: bool) -> tuple[frozenset[str], ...]:
    names = sorted({folder for folder, _ in store.under("objects")} - {folder for folder, _ in guards})
    return tuple(frozenset({name}) for name in names) if apart else (frozenset(names),)


def _lists(folders: frozenset[str]) -> Op:
    def objects(store: Store) -> Objects:
        return frozenset((folder, name) for folder, name in store.under("objects") if folder in folders)

    return look(f"lists {sorted(folders)}", objects)


def _open(store: Store) -> frozenset[str]:
    return frozenset(txid for (txid,) in store.under("transactions"))


def gc_lists_commits(rules: Rules, turn: Turn, found: Objects, opened: frozenset[str] | None) -> Program:
    seen = yield from lists_commits()
    names = seen.names()
    plan = Plan(found - objects_of(names), seen.ended(), frozenset(names))
    if opened is None:
        opened = yield look("lists transactions", _open)
    if not plan.candidates and not opened:
        return goto(gc, rules, turn)
    return goto(gc_waits, rules, turn, plan._replace(opened=opened))


def gc_waits(rules: Rules, turn: Turn, plan: Plan) -> Program:
    """End what is open, whether its process is dead or not."""
    for txid in sorted(plan.opened) if rules.mutant != "no_wait" else ():
        slot = yield _reads_file(txid)
        if slot is not None or rules.mutant == "gone_is_revoked":
            yield from (ends_unreadable(rules, txid) if rules.unreadable else ends(rules, txid, slot))
    return goto(gc_reads_roots, rules, turn, plan)


def _reads_file(txid: str) -> Op:
    return look(f"reads the file of {txid}", lambda store: store.get("transactions", txid))


def ends(rules: Rules, txid: str, slot: int | None) -> Generator[Op, Any, None]:
    if slot not in (SAVE, None):
        if rules.mutant == "own_first":
            yield create(("commits", txid, 0), REVOKED)
        if rules.mutant != "own_key":
            yield create(("commits", X, slot), KEPT)
        found = yield look("reads the slot", lambda store: store.get("commits", X, slot))
        if isinstance(found, Rewritten) and found.by == txid and rules.mutant != "own_always":
            return
        if rules.mutant == "slot_is_enough":
            return
    yield create(("commits", txid, 0), REVOKED)


def ends_unreadable(rules: Rules, txid: str) -> Generator[Op, Any, None]:
    """End a rewrite whose slot is unknown: at most the next number of the log. No other log has its run and step."""
    if rules.mutant != "unread_slot":
        seen = yield reads_log()
        yield append(seen, KEPT)
        if txid in dict((yield reads_log()).ever):
            return
    yield create(("commits", txid, 0), REVOKED)


def gc_reads_roots(rules: Rules, turn: Turn, plan: Plan) -> Program:
    seen = yield from lists_commits()
    roots = seen.names(all_but=plan.ended)
    if rules.mutant == "roots_live":
        roots = seen.names()
    if rules.reads:
        there = yield look("reads manifests", lambda store: frozenset(t for t in roots if store.get("objects", t, "m")))
        if not there | plan.read >= roots.keys():
            if rules.mutant != "unread_root":
                return goto(gc, rules, turn)
            roots = {txid: blobs for txid, blobs in roots.items() if txid in there | plan.read}
    lost = {txid for txid, name in plan.candidates if name == "m"} - seen.recorded()
    if lost:
        return goto(gc, rules, turn._replace(runs=0, last=0))
    return goto(gc_deletes, rules, turn, plan.candidates - objects_of(roots), plan.opened)


def gc_deletes(rules: Rules, turn: Turn, found: Objects, opened: frozenset[str]) -> Program:
    """Delete blobs, then manifests, and then the files of the transactions that have ended."""
    for one in sorted(found, key=lambda one: (one[1] == "m", one)):
        yield delete(("objects", *one))
        return goto(gc_deletes, rules, turn, found - {one}, opened)
    for txid in sorted(opened):
        yield delete(("transactions", txid))
        return goto(gc_deletes, rules, turn, found, opened - {txid})
    return goto(gc, rules, turn)


# -- invariants


def _lacking(store: Store) -> Objects:
    return objects_of(Listing((*_places(log(store)), *_others(store))).names()) - store.under("objects").keys()


def is_purged_forgotten(store: Store) -> bool:
    seen = log(store)
    return PURGED not in seen.records or not seen.state_before(PURGED).visible


def fits(store: Store) -> bool:
    record, manifest = store.get("commits", "K", 0), store.get("objects", "K", "m")
    return record in {None, REVOKED} or manifest is None or record.blobs == manifest


def is_tidy(store: Store) -> bool:
    wanted = objects_of(Listing((*_places(log(store)), *_others(store))).names())
    return store.under("objects").keys() <= wanted and not store.under("transactions")


WHOLE = Invariant(
    "The manifest of all places that exist, and every blob that it names, is there.", lambda s: not _lacking(s)
)
FITS = Invariant("The record of a copy names what its manifest names.", fits)
PURGED_FORGOTTEN = Invariant("Only what is forgotten is purged.", is_purged_forgotten)
TIDY = Invariant("When all is quiet, a gc leaves nothing open, and no object that nothing names.", is_tidy)


def model(
    mutant: str = "",
    *,
    saves: int = 0,
    copies: int = 0,
    rewrites: tuple[str, ...] = ("moves",),
    users: tuple[tuple[Any, ...], ...] = (),
    other: tuple[Any, ...] = (),
    gcs: tuple[Turn, ...] = (Turn(1),),
    lost: bool = False,
    reads: bool = False,
    guards: bool = False,
    unreadable: bool = False,
    resumes: bool = False,
    begun: bool = False,
    mortal: bool = False,
) -> Model:
    """Return a model. ``users``: the records of each user of X. ``other``: those of a user of a checkpoint Y.

    ``begun``: T and S have begun. ``resumes``: T has committed, and a gc goes on that recorded its plan before.
    """
    rules = Rules(mutant, lost, reads, guards, unreadable)
    first: dict[Any, Any] = {("commits", X, 0): Committed(frozenset({(X, "e"), (X, "f")}))}
    first |= {("objects", X, name): True for name in "efm"}
    if "names" in rewrites:
        first |= {("commits", "Y", 0): Committed(frozenset({("Y", "e")}))}
        first |= {("objects", "Y", name): True for name in "em"}
    found = [Process(name, goto(rewrite, rules, name, how), mortal) for name, how in zip("TU", rewrites, strict=False)]
    if begun:
        first |= {("transactions", "T"): 1, ("transactions", "S"): SAVE}
        found = [Process("T", goto(rewrite_plans, rules, "T", "moves", 1, None), mortal)]
        found += [Process("S", goto(save_plans, rules, "S", None), mortal)]
    if resumes:
        blobs = frozenset({("T", "e"), (X, "f")})
        first |= {("commits", X, 1): Rewritten("T", blobs), ("objects", "T", "e"): True, ("objects", "T", "m"): True}
        plan = Plan(frozenset({("T", "e"), ("T", "m")}), frozenset(), frozenset({X}), frozenset({"T"}))
        found = [Process("gc that resumes", goto(gc_waits, rules, Turn(0), plan))]
    found += [Process(name, goto(save, rules, name), mortal) for name in ("S", "R")[:saves]]
    found += [Process(f"copy {index}", goto(copy, rules), mortal) for index in range(copies)]
    found += [Process(f"user {index}", goto(user, rules, acts)) for index, acts in enumerate(users)]
    found += [Process("user of Y", goto(user, rules, other, "Y"))] if other else []
    found += [Process(f"gc {index}", goto(gc, rules, turn)) for index, turn in enumerate(gcs)]
    found += [Process("network", Goto(network), daemon=True)] if lost else []
    settles = any(turn.last for turn in gcs)
    return Model(Store(first), found, always=(WHOLE, FITS, PURGED_FORGOTTEN), at_end=(TIDY,) if settles else ())
