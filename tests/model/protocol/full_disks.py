"""A full disk: saves that remove what they uploaded, and records that are written over prepared files.

*Removal*: a save S uploads a blob and a manifest, and then fails or commits; the answer of its commit may get lost. It
is revoked, by its process or by a gc, with a record that competes for the same name. Its process then deletes its
objects. If there is no room to revoke it, the process deletes first, which is safe if it has not tried to commit, and
if no other process can. A copy can be joined: any process may commit what others have uploaded. gc lists objects and
commits, waits for the transaction, lists commits again, and deletes what no commit names.

*Prepared files*: a name leads to an inode, and an inode has content. A process takes a prepared file by renaming it,
writes over it in two halves, and then names it with link and unlink.
Whoever prepares removes the names that processes use at this moment, and makes missing files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tests.model.protocol.explorer import (
    Invariant,
    Model,
    Op,
    Outcome,
    Process,
    Program,
    Store,
    choose,
    create,
    delete,
    goto,
    look,
    network,
)

MUTANTS = {
    "deletes_after_try": "a save deletes first, though it has tried to commit and got no answer",
    "deletes_copy": "a copy deletes first, though other processes may have joined it",
    "unread_revoke": "a save deletes when its `revoked` record was refused, and does not read which record exists",
    "takes_no_name": "a process writes to a prepared file that others may take",
    "writes_second_name": "a process writes to a file that has a second name",
    "trusts_count": "a process whose file has one name does not look whether it is the one that the process gave it",
    "prepares_in_place": "a file has the name of a prepared one before it is written",
    "names_first": "a record is named before it is written whole",
}
OBJECTS = ("blob", "manifest")
COMMITTED, REVOKED = "committed", "revoked"


class Rules(NamedTuple):
    """The rules of a model. ``full``: no record can be put before objects are deleted. ``copy``: it can be joined."""

    mutant: str = ""
    full: bool = False
    copy: bool = False


# -- removal


def save(rules: Rules) -> Program:
    yield create(("transactions", "S"), True)
    for name in OBJECTS:
        yield create(("objects", name), True)
        if not (yield choose((True, False))):
            return goto(abort, rules, False)
    if (yield create(("commits", "S"), COMMITTED, lost=True)) is None:
        return goto(abort, rules, True)
    yield delete(("transactions", "S"))
    return None


def abort(rules: Rules, tried: bool) -> Program:
    if rules.full:
        may_delete = rules.mutant == "deletes_after_try" or not tried
        if not may_delete or (rules.copy and rules.mutant != "deletes_copy"):
            return None
        return goto(removes, OBJECTS, True)
    won = yield create(("commits", "S"), REVOKED)
    found = yield look("reads its record", lambda store: store.get("commits", "S"))
    yield delete(("transactions", "S"))
    if found == REVOKED or (not won and rules.mutant == "unread_revoke"):
        return goto(removes, OBJECTS, False)
    return None


def removes(names: tuple[str, ...], revokes: bool) -> Program:
    if names:
        yield delete(("objects", names[0]))
        return goto(removes, names[1:], revokes)
    if revokes:
        yield create(("commits", "S"), REVOKED)
        yield delete(("transactions", "S"))
    return None


def join(rules: Rules) -> Program:
    """Work in the transaction of a copy, and commit it if all its objects are there."""
    if not (yield look("joins", lambda store: ("transactions", "S") in store.objects)):
        return None
    for name in OBJECTS:
        yield create(("objects", name), True)
    yield create(("commits", "S"), COMMITTED)
    return None


def gc(rules: Rules) -> Program:
    listed = yield look("lists objects", lambda store: tuple(sorted(store.under("objects"))))
    record = yield look("lists commits", lambda store: store.get("commits", "S"))
    if not listed or record == COMMITTED:
        return None
    open_ = yield look("lists transactions", lambda store: ("transactions", "S") in store.objects)
    if open_ and record is None:
        yield create(("commits", "S"), REVOKED)  # silence, or a dead process
    return goto(gc_deletes, rules, tuple(name for (name,) in listed), record)


def gc_deletes(rules: Rules, names: tuple[str, ...], ended: str | None) -> Program:
    if ended is None:
        now = yield look("lists commits again", lambda store: store.get("commits", "S"))
        if now != REVOKED:
            return None
    if names:
        yield delete(("objects", names[0]))
        return goto(gc_deletes, rules, names[1:], REVOKED)
    return None


def is_whole(store: Store) -> bool:
    return store.get("commits", "S") != COMMITTED or all(("objects", name) in store.objects for name in OBJECTS)


WHOLE = Invariant("a committed checkpoint has its objects", is_whole)


def removal(*, gcs: int = 1, **given: object) -> Model:
    rules = Rules(**given)  # type: ignore[arg-type]
    processes = [Process("save", goto(save, rules)), Process("net", goto(network), daemon=True)]
    processes += [Process(f"gc {number}", goto(gc, rules)) for number in range(gcs)]
    processes += [Process("other", goto(join, rules))] * rules.copy
    return Model(Store({}), processes, always=[WHOLE])


# -- prepared files


def _names_of(store: Store, inode: str) -> list[str]:
    return [name for (name,), found in store.under("names").items() if found == inode]


def rename(old: str, new: str) -> Op:
    """Rename a file. The result is its inode, or None if there is no such name."""

    def run(store: Store) -> Iterable[Outcome]:
        inode = store.get("names", old)
        if inode is None:
            yield Outcome(f"does not find {old}", store, None)
        else:
            yield Outcome(f"renames {old} to {new}", store.without(("names", old)).with_(("names", new), inode), inode)

    return Op(run)


def write(inode: str, content: str) -> Op:
    return Op(lambda store: [Outcome(f"writes {content} to {inode}", store.with_(("inodes", inode), content))])


def taker(rules: Rules, me: str) -> Program:
    """Write a record of this process over the first prepared file, under the name that all want."""
    own = "spare" if rules.mutant == "takes_no_name" else f"temporary {me}"
    if own == "spare":
        inode = yield look("opens spare", lambda store: store.get("names", "spare"))
    else:
        inode = yield rename("spare", own)
    if inode is None:
        return None
    return goto(taken, rules, me, own, inode)


def taken(rules: Rules, me: str, own: str, inode: str) -> Program:
    names = yield look("counts names", lambda store: len(_names_of(store, inode)))
    if names > 1 and rules.mutant != "writes_second_name":
        yield delete(("names", own))
        return None
    still = rules.mutant == "trusts_count" or (yield look("looks at its name", lambda store: store.get("names", own)))
    if not still:
        return None
    if rules.mutant != "names_first":
        yield write(inode, f"half of {me}")
        yield write(inode, me)
    return goto(named, rules, me, own, inode)


def named(rules: Rules, me: str, own: str, inode: str) -> Program:
    now = yield look("looks at its name", lambda store: store.get("names", own))
    made = now == inode and (yield create(("names", f"record {me}"), inode))
    if made:
        yield delete(("names", own))
    if rules.mutant == "names_first" and made:
        yield write(inode, f"half of {me}")
        yield write(inode, me)
    if made is False:
        yield rename(own, "spare")
    return None


def preparer(rules: Rules) -> Program:
    found = yield look("lists names", lambda store: tuple(sorted(name for (name,) in store.under("names"))))
    for name in found:
        if name.startswith("temporary"):
            yield delete(("names", name))
    return goto(makes, rules)


def makes(rules: Rules) -> Program:
    inode = yield look("looks at spare", lambda store: store.get("names", "spare"))
    names = yield look("counts names", lambda store: len(_names_of(store, inode)) if inode else 0)
    if names == 1:
        return None
    if rules.mutant == "prepares_in_place":
        yield create(("names", "spare"), "new")
        yield write("new", "prepared")
        return None
    yield write("new", "prepared")
    yield create(("names", "temporary new"), "new")
    yield rename("temporary new", "spare")
    return None


def holds_records(store: Store) -> bool:
    found = {name: store.get("inodes", inode) for (name,), inode in store.under("names").items()}
    return all(content == name.partition(" ")[2] for name, content in found.items() if name.startswith("record"))


RECORDS = Invariant("a record is whole, and its own", holds_records)


def prepared(*, takers: int = 2, linked: bool = False, **given: object) -> Model:
    """``linked``: a process was killed between link and unlink, so that the prepared file is also a record."""
    rules = Rules(**given)  # type: ignore[arg-type]
    objects = {("names", "spare"): "old", ("inodes", "old"): "prepared"}
    if linked:
        objects = {("names", "spare"): "old", ("names", "record Z"): "old", ("inodes", "old"): "Z"}
    processes = [Process(me, goto(taker, rules, me), mortal=True) for me in "AB"[:takers]]
    processes.append(Process("preparer", goto(preparer, rules), mortal=True))
    return Model(Store(objects), processes, always=[RECORDS])
