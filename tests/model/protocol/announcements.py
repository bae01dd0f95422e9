"""Announcements: the log of a run, from which a save learns about changes without listing commits/.

Before a process creates record N of a transaction, it announces (txid, N) at the next free number of the run's log. A
host remembers the last number that it has read, the known records of each transaction, and the undecided
announcements, whose records it has not found yet. To follow a run, the host reads the run's log to its end, and then
the logs of all undecided announcements.

A fresh host may skip the announcements that exist: it finds the last one, and then lists the names in transactions/ and
in commits/. It reads the logs of these names at each look, and its save claims to be later than what was announced.

Following must return the same result as a listing that begins at the same time. If it does, the results of
`tests.model.commit_gc_model` for saves that list commits also apply to saves that follow. `revoked` and `kept` are not
announced: they do not change anything that was visible or known, and they decide what was announced.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from tests.model.protocol.explorer import (
    Goto,
    Invariant,
    Model,
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
from tests.model.protocol.logs import FORGOTTEN, KEPT, PURGED, RESTORED, REVOKED, append

MUTANTS = {
    "announced_after": "a record is announced after it exists",
    "txid_cursor": "a host lists commits behind the greatest txid that it has seen",
    "not_numbered": "a kind is announced and no number, and a record of that kind decides it",
    "reads_once": "what was announced is read once, and counts as decided then",
    "logs_first": "a look reads undecided logs first, and then what is announced",
    "forgets_undecided": "a host keeps over a restart how far it has read, and not what is undecided",
    "skips_number": "who has no answer for a number of the run's log goes on with the next one",
    "joins_silently": "a process that joins a transaction relies on the announcement of who began it",
    "purges_silently": "a gc does not announce what it purges",
    "announces_once": "who finds the number of a record taken creates the next one without announcing that",
    "nobody_settles": "a gc leaves alone what was announced by somebody who died",
    "stops_at_undecided": "a look ends at the first announcement that it finds undecided",
    "lists_commits_first": "a fresh host lists commits/, and then transactions/",
    "lists_commits_only": "a fresh host does not list transactions/",
    "lists_first": "a fresh host lists names, and then finds the last announcement",
}
COMMITTED = "committed"
_NEVER = 99  # the number of a record that never exists, so that a log is read at each look


class Rules(NamedTuple):
    """The rules of a model.

    ``lost``: a put into the run's log may get no response, and arrive later or never. ``lists``: the host is a fresh
    one that lists names, and transactions have files in transactions/.
    """

    mutant: str = ""
    lost: bool = False
    lists: bool = False


# -- writers


def changes(rules: Rules, plan: tuple[tuple[str, str], ...], *, joined: bool = False) -> Program:
    """Create the records of these (txid, kind) in order. ``joined``: other processes create the same records."""
    if not plan:
        return None
    (txid, kind), *_ = plan
    number = 0
    if kind != COMMITTED:
        number = yield look("reads the log", lambda store: len(store.under("commits", txid)))
    elif rules.lists:
        yield create(("transactions", txid), True)
    silent = (joined, rules.mutant) == (True, "joins_silently") or (kind, rules.mutant) == (PURGED, "purges_silently")
    if silent or rules.mutant == "announced_after":
        return goto(records, rules, plan, number)
    return goto(announces, rules, plan, number, 1, False)


def announces(rules: Rules, plan: tuple[tuple[str, str], ...], record: int, number: int, after: bool) -> Program:
    """Use the next free number of the run's log. If the put of a number gets no response, first find its owner."""
    txid, kind = plan[0]
    mine = (txid, record, kind)
    follow = goto(changes, rules, plan[1:]) if after else goto(records, rules, plan, record)
    found = yield look(f"reads runs/{number}", lambda store: store.get("runs", number))
    if found is not None:
        return follow if found == mine else goto(announces, rules, plan, record, number + 1, after)
    won = yield create(("runs", number), mine, lost=rules.lost)
    if won is None and rules.mutant == "skips_number":
        won = yield create(("runs", number + 1), mine)
    return follow if won else goto(announces, rules, plan, record, number, after)  # until some process owns it


def records(rules: Rules, plan: tuple[tuple[str, str], ...], number: int) -> Program:
    """Create an announced record.

    A process that finds the record's number taken has lost, and announces the next number before it retries.
    """
    txid, kind = plan[0]
    won = yield append(txid, number, kind)
    if won and rules.mutant == "announced_after":
        return goto(announces, rules, plan, number, 1, True)
    if not won and number and number < 4:
        return goto(records if rules.mutant == "announces_once" else retries, rules, plan, number + 1)
    if rules.lists and kind == COMMITTED:
        yield delete(("transactions", txid))
    return goto(changes, rules, plan[1:])


def retries(rules: Rules, plan: tuple[tuple[str, str], ...], number: int) -> Program:
    yield from ()
    return goto(announces, rules, plan, number, 1, False)


def revokes(rules: Rules, txid: str) -> Program:
    """Act as a gc that revokes a transaction, without an announcement."""
    yield append(txid, 0, REVOKED)
    if rules.lists:
        yield delete(("transactions", txid))
    return None


def settles() -> Program:
    """Act as a gc after all other processes have ended or died.

    For each announced record that was never created, it creates a record that changes nothing.
    """
    yield when_quiet()
    return goto(settles_one)


def settles_one() -> Program:
    def undecided(store: Store) -> tuple[str, int] | None:
        found = sorted((txid, number) for txid, number, _ in store.under("runs").values())
        return next((one for one in found if store.get("commits", *one) is None), None)

    found = yield look("looks for what is undecided", undecided)
    if found is None:
        return None
    txid, number = found
    yield append(txid, number, KEPT if number else REVOKED)
    return goto(settles_one)


# -- followers


class Memory(NamedTuple):
    """What a host remembers. ``read``: numbers of the run's log. ``logs``: records by txid. ``open``:
    undecided ones."""

    read: int
    logs: tuple[tuple[str, tuple[str, ...]], ...]
    open: frozenset[tuple[str, int, str]] = frozenset()

    def log(self, txid: str) -> tuple[str, ...]:
        return dict(self.logs).get(txid, ())

    def with_log(self, txid: str, log: tuple[str, ...]) -> Memory:
        return self._replace(logs=tuple(sorted({**dict(self.logs), txid: log}.items())))


def host(rules: Rules, memory: Memory, looks: int) -> Program:
    """Follow the run ``looks`` times in succession."""
    if not looks:
        return None
    yield look("BEGINS to look", lambda store: None, lambda store, _: store.with_(("ghost", "shown"), _shown(store)))
    if rules.mutant == "forgets_undecided":
        memory = memory._replace(open=frozenset())
    if rules.mutant == "txid_cursor":
        return goto(lists_behind, rules, memory, looks)
    if rules.mutant == "logs_first":
        return goto(reads_logs, rules, memory, looks, tuple(sorted(memory.open)), True)
    return goto(reads_run, rules, memory, looks)


def _shown(store: Store) -> frozenset[Any]:
    """Return the listing at this instant, without details that followers do not have to know."""
    return frozenset(key for key, kind in store.under("commits").items() if kind not in {REVOKED, KEPT})


def reads_run(rules: Rules, memory: Memory, looks: int) -> Program:
    found = yield look(f"reads runs/{memory.read}", lambda store: store.get("runs", memory.read))
    new = memory._replace(read=memory.read + 1, open=memory.open | {found})
    if found is not None:
        if rules.mutant == "stops_at_undecided" and (
            (yield look("reads the record", lambda store: store.get("commits", *found[:2]))) is None
        ):
            return goto(reads_logs, rules, memory, looks, tuple(sorted(memory.open)), False)
        return goto(reads_run, rules, new, looks)
    if rules.mutant == "logs_first":
        return goto(has_looked, rules, memory, looks)
    return goto(reads_logs, rules, memory, looks, tuple(sorted(memory.open)), False)


def reads_logs(rules: Rules, memory: Memory, looks: int, todo: tuple[Any, ...], first: bool) -> Program:
    """Continue reading each log, record by record, to its end."""
    if not todo:
        return goto(reads_run if first else has_looked, rules, memory, looks)
    txid, number, kind = todo[0]
    log = memory.log(txid)
    found = yield look("reads the log", lambda store: store.get("commits", txid, len(log)))
    if found is not None:
        return goto(reads_logs, rules, memory.with_log(txid, (*log, found)), looks, todo, first)
    decided = kind in log if rules.mutant == "not_numbered" else len(log) > number
    if decided or rules.mutant == "reads_once":
        memory = memory._replace(open=memory.open - {todo[0]})
    return goto(reads_logs, rules, memory, looks, todo[1:], first)


def lists_names(rules: Rules, looks: int) -> Program:
    """Begin as a fresh host, and choose the txid of a save."""
    yield look("BEGINS to look", lambda store: None, lambda store, _: store.with_(("ghost", "shown"), _shown(store)))
    folders = {
        "lists_commits_first": ("runs", "commits", "transactions"),
        "lists_commits_only": ("runs", "commits"),
        "lists_first": ("transactions", "commits", "runs"),
    }.get(rules.mutant, ("runs", "transactions", "commits"))
    listed = dict[str, frozenset[Any]]()
    for folder in folders:
        listed[folder] = yield look(f"lists {folder}", partial(_names, folder))
    head, names = max(listed["runs"]), listed["commits"] | listed.get("transactions", frozenset())
    yield look("CHOOSES a txid", lambda store: None, lambda s, _: s.with_(("ghost", "claim"), (head, max(names))))
    memory = Memory(head + 1, (), frozenset((name, _NEVER, "") for name in names))
    return goto(reads_logs, rules, memory, looks, tuple(sorted(memory.open)), False)


def _names(folder: str, store: Store) -> frozenset[Any]:
    return frozenset(name for name, *_ in store.under(folder))


def lists_behind(rules: Rules, memory: Memory, looks: int) -> Program:
    cursor = max(txid for txid, _ in memory.logs)
    found = yield look("lists commits behind " + cursor, lambda s: frozenset(t for t, _ in _shown(s) if t > cursor))
    for txid in sorted(found):
        memory = memory.with_log(txid, (COMMITTED,))
    return goto(has_looked, rules, memory, looks)


def has_looked(rules: Rules, memory: Memory, looks: int) -> Program:
    def missed(store: Store, _: Any) -> Store:
        known = {(txid, number) for txid, log in memory.logs for number in range(len(log))}
        late = frozenset(store.get("ghost", "shown") - known)
        done = store.without(("ghost", "shown"))
        return done.with_(("ghost", "missed"), late) if late else done

    yield look("HAS LOOKED", lambda store: None, missed)
    return goto(host, rules, memory, looks - 1)


# -- invariants

AS_A_LISTING = Invariant(
    "A look knows every record that was there when it began.", lambda store: not store.get("ghost", "missed")
)
LATER = Invariant(
    "Everything announced up to the head that a save has read is earlier than the save.",
    lambda store: all(
        number > head or txid <= latest
        for head, latest in store.under("ghost", "claim").values()
        for (number,), (txid, *_) in store.under("runs").items()
    ),
)
DENSE = Invariant(
    "The run's log has no hole.", lambda store: all(n == 0 or store.get("runs", n - 1) for (n,) in store.under("runs"))
)
DECIDED = Invariant(
    "When all is quiet and a gc has run, what was announced is decided: no host reads it for ever.",
    lambda store: all(store.get("commits", *one[:2]) is not None for one in store.under("runs").values()),
)


def model(
    mutant: str = "",
    *,
    plans: tuple[tuple[tuple[str, str], ...], ...] = (),
    joined: tuple[str, ...] = (),
    revoked: str = "",
    looks: int = 2,
    lost: bool = False,
    quiet: bool = False,
    lists: bool = False,
) -> Model:
    """Return a model. ``plans``: the plan of each process. ``joined``: txids that two processes work on.

    ``lists``: the host is a fresh one. ``quiet``: processes may die, a gc settles their announcements, and no process
    follows the run.
    """
    rules = Rules(mutant, lost, lists)
    memory = Memory(1, (("T", (COMMITTED,)),))
    first = goto(lists_names, rules, looks) if lists else goto(host, rules, memory, looks)
    found = [] if quiet else [Process("host", first)]
    for index, plan in enumerate(plans):
        found.append(Process(f"changer {index}", goto(changes, rules, plan), mortal=quiet))
    for index, txid in enumerate(joined * 2):
        one = goto(joins, rules, txid) if index % 2 else goto(changes, rules, ((txid, COMMITTED),))
        found.append(Process(f"copy {index}", one, mortal=quiet))
    found += [Process("gc", goto(revokes, rules, revoked))] if revoked else []
    found += [Process("last gc", goto(settles))] if quiet and mutant != "nobody_settles" else []
    found += [Process("network", Goto(network), daemon=True)] if lost else []
    there: dict[Any, Any] = {("commits", "T", 0): COMMITTED, ("runs", 0): ("T", 0, COMMITTED)}
    return Model(Store(there), found, always=(AS_A_LISTING, LATER, DENSE), at_end=(DECIDED,) if quiet else ())


def joins(rules: Rules, txid: str) -> Program:
    yield from ()
    return (yield from changes(rules, ((txid, COMMITTED),), joined=True))


# a save, and a copy of an old checkpoint or a transaction that began long ago
LATE = (
    (("W", COMMITTED),),
    (("A", COMMITTED),),
)
TOGGLES = ((("T", FORGOTTEN), ("T", RESTORED), ("T", FORGOTTEN)),)
RACES = ((("T", FORGOTTEN),), (("T", FORGOTTEN), ("T", PURGED)))
