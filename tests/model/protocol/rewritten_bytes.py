"""The bytes of rewrites: live commits keep their manifests and blobs while gc runs beside rewrites and saves.

gc and saves follow docs/format.md, but listings are atomic and include manifests. `tests.model.commit_gc_model`
explores pages, reads, retries, pauses and several gcs. In addition, this model has commits that are replaced (and then
restored or purged), commits that are live and hidden, and pairs of live commits with the same ID.

A checkpoint has a blob "a" and a manifest "m", at ("objects", uploader, name). The value of a manifest is the names in
it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.model.protocol import rewrites
from tests.model.protocol.explorer import (
    Invariant,
    Model,
    Process,
    Program,
    Store,
    choose,
    create,
    delete,
    goto,
    look,
    replace,
)
from tests.model.protocol.logs import FORGOTTEN, RESTORED, REVOKED, Committed, Logs, Replaced, append, logs

MUTANTS = {
    "rows_of_id": "a save takes the rows that its host remembers of another commit of the same id for known",
    "replaced_is_dead": "a gc deletes what only replaced commits name",
    "unnamed_is_dead": "a gc deletes what only rewrites name that do not stand yet",
    "lists_first": "a rewriter lists commits before its transaction has begun",
    "repair_moves_places": "a repair puts a manifest back that names other places",
}
Names = frozenset[tuple[str, str]]


class Rules(NamedTuple):
    mutant: str = ""


def names_of(store: Store, txid: str) -> Names:
    """Return the objects that a commit's manifest names, or only the manifest if it is gone."""
    found: Names = store.get("objects", txid, "m") or frozenset()
    return found | {(txid, "m")}


# -- writers


def writer(rules: Rules, me: str, rewrites_x: bool) -> Program:
    """Save a different checkpoint, or rewrite X: begin, list commits, reuse or upload, write the manifest, and
    commit."""

    def plan(store: Store) -> tuple[Any, Names]:
        """Return (commit to rewrite, known blobs). A blob is known if a live commit names it in its own rows."""
        now = logs(store)
        base = next(((txid, now.number(txid)) for txid in now.visible()), None) if rewrites_x else None
        known = {name for txid in now.live() for name in names_of(store, txid) if name[1] == "a"}
        if rules.mutant == "rows_of_id" and now.live():
            known |= {("T", "a")}
        return base, frozenset(known)

    if not (rewrites_x and rules.mutant == "lists_first"):
        yield create(("transactions", me), True)
    base, known = yield look("lists commits", plan)
    if rewrites_x and rules.mutant == "lists_first":
        yield create(("transactions", me), True)
    if rewrites_x and base is None:
        yield append(me, 0, REVOKED)
        return goto(closes, me)
    blob = yield choose((*sorted(known), None))
    return goto(uploads, me, base, blob)


def uploads(me: str, base: Any, blob: tuple[str, str] | None) -> Program:
    if blob is None:
        blob = (me, "a")
        yield create(("objects", *blob), True)
    yield create(("objects", me, "m"), frozenset({blob}))
    committed = yield append(me, 0, Committed(replaces=base) if base else Committed(id="Z"))
    if committed and base:
        return goto(stands, me, *base)
    return goto(closes, me)


def stands(me: str, base: str, number: int) -> Program:
    won = yield append(base, number, Replaced(me))
    if not won:
        yield append(me, 1, FORGOTTEN)
    return goto(closes, me)


def closes(me: str) -> Program:
    yield delete(("transactions", me))
    return None


def repair(rules: Rules, me: str) -> Program:
    """Write the manifest of T again. In the worst case, it was never gone."""
    yield create(("transactions", me), True)
    base = yield look("lists commits", lambda store: "T" if logs(store).lives("T") else "")
    if base and rules.mutant == "repair_moves_places":
        yield create(("objects", me, "a"), True)
        yield replace(("objects", "T", "m"), frozenset({(me, "a")}))
    elif base:
        yield replace(("objects", "T", "m"), frozenset({("T", "a")}))
    yield append(me, 0, REVOKED)
    return goto(closes, me)


# -- a gc, without its first step, which `rewrites` models


def gc(rules: Rules) -> Program:
    """Run steps 2 to 4: list objects, then commits, then open transactions."""

    def spare(store: Store) -> tuple[Names, frozenset[str], frozenset[Any]]:
        now = logs(store)
        live = [txid for txid in txids(now) if is_live(now, txid, rules.mutant)]
        named = {name for txid in live for name in names_of(store, txid)}
        cached = frozenset((txid, names_of(store, txid)) for txid in live)
        return listed - named, frozenset(txid for txid, _ in now.of if not now.lives(txid)), cached

    listed: Names = yield look("lists objects", lambda store: frozenset(store.under("objects")))
    candidates, ended, cached = yield look("lists commits", spare)
    if not candidates:
        return None
    closed = yield look("lists transactions", lambda store: frozenset(txid for (txid,) in store.under("transactions")))
    return goto(gc_waits, rules, candidates, ended, cached, closed)


def gc_waits(rules: Rules, candidates: Names, ended: frozenset[str], cached: frozenset[Any], waits: Any) -> Program:
    """Run steps 5 and 6: revoke open transactions, and list commits again. Manifests are not reread."""

    def doomed(store: Store) -> Names:
        now, known = logs(store), dict(cached)
        roots = [txid for txid in txids(now) if txid not in ended]
        if rules.mutant in {"replaced_is_dead", "unnamed_is_dead"}:
            roots = [txid for txid in roots if is_live(now, txid, rules.mutant)]
        return candidates - {name for txid in roots for name in known.get(txid) or names_of(store, txid)}

    for txid in sorted(waits):
        yield append(txid, 0, REVOKED)
    found = yield look("lists commits again", doomed)
    return goto(gc_deletes, found)


def gc_deletes(found: Names) -> Program:
    for name in sorted(found):
        yield delete(("objects", *name))
        return goto(gc_deletes, found - {name})
    return None


def txids(now: Logs) -> list[str]:
    return [*now.txids(), *now.txids("Z")]


def is_live(now: Logs, txid: str, mutant: str) -> bool:
    if mutant == "replaced_is_dead" and isinstance(now.state(txid), Replaced):
        return False
    return now.lives(txid) and not (mutant == "unnamed_is_dead" and not now.stands(txid))


# -- invariants


def is_whole(store: Store) -> bool:
    now, objects = logs(store), store.under("objects")
    return all(names_of(store, txid) <= objects.keys() for txid in txids(now) if now.lives(txid))


WHOLE = Invariant("The manifest of every live commit, and every blob that it names, is there.", is_whole)


def model(
    mutant: str = "", *, saves: bool = False, users: int = 0, puts: int = 2, repairs: bool = False, gcs: int = 1
) -> Model:
    """Return a model. ``puts``: records of the first steps of gcs, which run at any time."""
    rules = Rules(mutant)
    first = {
        ("commits", "T", 0): Committed(),
        ("objects", "T", "a"): True,
        ("objects", "T", "m"): frozenset({("T", "a")}),
    }
    plain = rewrites.Rules()
    found = [Process("rewriter", goto(writer, rules, "V", True))]
    found += [Process("save", goto(writer, rules, "W", False))] if saves else []
    found += [Process("repair", goto(repair, rules, "R"))] if repairs else []
    allowed = (FORGOTTEN, RESTORED)
    found += [Process(f"user {index}", goto(rewrites.user, plain, 1, allowed)) for index in range(users)]
    found += [Process("purger", goto(rewrites.gc, plain, puts))] if puts else []
    found += [Process(f"gc {index}", goto(gc, rules)) for index in range(gcs)]
    return Model(Store(first), found, always=(WHOLE,))
