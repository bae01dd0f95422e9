"""A watch beside gcs that fold history: it yields each checkpoint once, although gc deletes what the watch follows.

A run's announcements are at ("runs", N): (txid, number of a record), or () for one that gc has filled in. gc lists what
is over at ("ended", N), and deletes these logs. Then it deletes the run's announcements below the first that names
anything else, one after the other, lowest first. Therefore, an announcement that exists was not deleted together with
the next one.

A watch, and every other reader of a run, reads on until a number is free. Then it looks whether what it read last still
exists. If not, gc has deleted it, maybe with later ones, and the watch lists the run. A writer that uses a free number
looks whether the announcement before exists. If not, gc may have deleted this number, and no reader will ask for it.

No rule needs ages, which only spare requests: casckpt deletes no young announcement, so it need not look for one.

The id of a checkpoint is the first letter of its txid, so that D1 is a copy of D. Letters sort by time.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from tests.model.protocol.announcements import COMMITTED
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
    when_quiet,
)
from tests.model.protocol.logs import FORGOTTEN, KEPT, PURGED, RESTORED, REVOKED, append

MUTANTS = {
    "any_order": "a gc deletes announcements in any order",
    "deletes_open": "a gc deletes announcements of transactions that have no record yet",
    "deletes_live": "a gc deletes announcements of what is over, also above the first that names something else",
    "deletes_newest": "a gc deletes the newest announcement too",
    "announces_nothing": "a gc does not announce what nobody has announced",
    "fills_nothing": "a gc does not fill in an announcement that is missing",
    "believes_its_number": "who announces does not look whether the announcement before is gone",
    "begins_anew": "a watch whose last announcement is gone takes only later saves for new",
    "head_first": "a watch looks whether its last announcement is gone before it reads on",
    "goes_on": "a watch does not look whether its last announcement is gone",
    "after_begins_anew": "a watch behind a folded checkpoint takes only later saves for new",
    "after_all": "a watch behind a checkpoint takes everything for new that was announced",
    "ended_first": "a watch reads `ended` before the log",
    "ignores_ended": "a watch does not read `ended`",
    "drops_hidden": "a watch drops a checkpoint that is hidden when it reads the log",
    "believes_hidden": "a watch that sees a checkpoint hidden does not wait for the restore that was announced",
    "by_txid": "a watch tells the transactions apart, not the checkpoints",
    "reads_once": "a watch reads the log of what was announced once",
    "ignores_open": "a watch does not wait for saves that have begun",
}


class Rules(NamedTuple):
    mutant: str = ""


def over(store: Store) -> frozenset[str]:
    """Return all transactions that `ended` lists."""
    return frozenset(txid for some in store.under("ended").values() for txid in some)


def own_log(store: Store, txid: str) -> tuple[str, ...]:
    """Return the records of a log, up to the first gap."""
    found: list[str] = []
    while (record := store.get("commits", txid, len(found))) is not None:
        found.append(record)
    return tuple(found)


def state_of(log: tuple[str, ...]) -> str:
    """Return "" without a record, or else "visible", "hidden" or "over"."""
    if PURGED in log or REVOKED in log:
        return "over"
    states = [record for record in log if record != KEPT]
    return ("hidden" if states[-1] == FORGOTTEN else "visible") if states else ""


def logs(store: Store) -> dict[str, tuple[str, ...]]:
    """Return the logs in a listing, without those of `ended`."""
    names = sorted({txid for txid, _ in store.under("commits")} - over(store))
    return {txid: own_log(store, txid) for txid in names}


def visible(store: Store) -> frozenset[str]:
    return frozenset(txid for txid, log in logs(store).items() if state_of(log) == "visible")


def numbers(store: Store) -> tuple[int, ...]:
    return tuple(sorted(number for (number,) in store.under("runs")))


def _is_open(txid: str, store: Store) -> bool:
    return ("transactions", txid) in store.objects


def _first_record(txid: str, store: Store) -> str | None:
    found: str | None = store.get("commits", txid, 0)
    return found


def _highest(store: Store) -> int:
    return max(numbers(store), default=-1)


# -- writers

New = tuple[str, int, str]
"""A record that is about to be created: txid, number, kind."""


def save(rules: Rules, me: str) -> Program:
    """Act as a save, or as a copy under an old txid."""
    yield create(("transactions", me), True)
    head = yield look("finds the head", _highest)
    return goto(announces, rules, (me, 0, COMMITTED), head + 1)


def announces(rules: Rules, new: New, n: int, then: Goto | None = None) -> Program:
    """Announce a record at the next free number, and create it.

    If the announcement before is gone, gc may have deleted this number too, which was used before. Announce again.
    """
    if not (yield create(("runs", n), new[:2])):
        return goto(announces, rules, new, n + 1, then)
    if n and rules.mutant != "believes_its_number" and not (yield _exists(n - 1)):
        head = yield look("finds the head", _highest)
        return goto(announces, rules, new, head + 1, then)
    return goto(records, rules, new, then)


def records(rules: Rules, new: New, then: Goto | None = None) -> Program:
    txid, number, kind = new
    yield append(txid, number, kind)
    if kind == COMMITTED:
        yield delete(("transactions", txid))
    return then


def user(rules: Rules, txid: str, acts: tuple[str, ...]) -> Program:
    """Forget, restore and purge, where the log allows it."""
    for act in acts[:1]:
        log = yield look("reads the log", lambda store: logs(store).get(txid, ()))
        then = goto(user, rules, txid, acts[1:])
        wanted = "visible" if act == FORGOTTEN else "hidden"
        if state_of(log) != wanted:
            return then
        if act == RESTORED:
            head = yield look("finds the head", _highest)
            return goto(announces, rules, (txid, len(log), act), head + 1, then)
        yield append(txid, len(log), act)
        return then
    return None


# -- gc


class Turn(NamedTuple):
    """What is left of a gc. ``ends``: it ends what is open, dead or not. ``then``: what the process does next."""

    times: int = 1
    ends: bool = True
    then: Goto | None = None


def gc(rules: Rules, turn: Turn) -> Program:
    """End what is open, and list what is over."""
    if not turn.times:
        return turn.then
    if turn.ends:
        opened = yield look("lists transactions", lambda s: tuple(sorted(txid for (txid,) in s.under("transactions"))))
        for txid in opened:
            yield append(txid, 0, REVOKED)
            yield delete(("transactions", txid))
    listed = yield look("lists commits", lambda store: (tuple(logs(store).items()), over(store)))
    return goto(folds, rules, turn, *listed)


Listed = tuple[tuple[str, tuple[str, ...]], ...]


def folds(rules: Rules, turn: Turn, listed: Listed, lines: frozenset[str]) -> Program:
    """Create `ended`, and delete logs: first records first, and the others in any order."""
    files = yield look("lists transactions", lambda store: frozenset(txid for (txid,) in store.under("transactions")))
    newest = max((txid for txid, _ in listed), default="")
    due = frozenset(txid for txid, log in listed if state_of(log) == "over" and txid not in files and txid != newest)
    if due:
        number = yield look("lists ended", lambda store: len(store.under("ended")))
        while not (yield create(("ended", number), due)):
            number += 1
    return goto(deletes, rules, turn, listed, lines | due)


def deletes(rules: Rules, turn: Turn, listed: Listed, lines: frozenset[str]) -> Program:
    late = yield look(
        "lists late records", lambda s: tuple(sorted(one for one in s.under("commits") if one[0] in lines))
    )
    for key in sorted(late, key=lambda one: (one[1], one[0])):
        yield delete(("commits", *key))
    return goto(announced, rules, turn, listed, lines)


def announced(rules: Rules, turn: Turn, listed: Listed, lines: frozenset[str]) -> Program:
    """Fill in what is missing, end what was never created, announce what was not, and delete what is over."""
    known = yield look("reads the run", lambda store: tuple(sorted(store.under("runs").items())))
    told = {number: one for (number,), one in known}
    head = max(told, default=-1)
    for number in range(min(told, default=0), head):
        if number not in told and rules.mutant != "fills_nothing":
            yield create(("runs", number), ())
    for txid, number in sorted({one for one in told.values() if one} - {(one, 0) for one in lines}):
        length = len(dict(listed).get(txid, ()))
        if txid in lines or number != length:
            continue
        if number or not (yield look(f"looks for {txid}", partial(_is_open, txid))):
            yield append(txid, number, KEPT if number else REVOKED)
    named = {one[0] for one in told.values() if one}
    for txid, log in listed:
        if txid not in named and log[0] != REVOKED and rules.mutant != "announces_nothing":
            head += 1
            while not (yield create(("runs", head), (txid, 0))):
                head += 1
            told[head] = (txid, 0)
    recorded = lines | ({one for one in named if one not in dict(listed)} if rules.mutant == "deletes_open" else set())
    return removes(rules, turn, told, recorded)


def removes(rules: Rules, turn: Turn, told: dict[int, Any], lines: frozenset[str]) -> Goto:
    """Delete announcements below the first that names something else, but never the newest one."""
    head = max(told, default=0)
    first = min((number for number, one in told.items() if one and one[0] not in lines), default=head)
    if rules.mutant == "deletes_newest" and all(not one or one[0] in lines for one in told.values()):
        first = head + 1
    gone = [number for number in sorted(told) if number < first]
    if rules.mutant == "deletes_live":
        gone = [number for number, one in sorted(told.items()) if number < head and (not one or one[0] in lines)]
    return goto(removes_one, rules, turn, tuple(gone))


def removes_one(rules: Rules, turn: Turn, gone: tuple[int, ...]) -> Program:
    if not gone:
        return goto(gc, rules, turn._replace(times=turn.times - 1))
    number = (yield choose(gone)) if rules.mutant == "any_order" else gone[0]
    yield delete(("runs", number))
    return goto(removes_one, rules, turn, tuple(one for one in gone if one != number))


# -- the watch


class Memory(NamedTuple):
    """What a watch remembers.

    ``head``: the newest announcement that it has seen. ``next``: the first one that it has not read. ``new``: what was
    announced and is not yielded yet. ``awaited``: in the order of announcements, the (txid, number) to read. ``told``:
    what was yielded. ``floor``: only later transactions are new. ``newest``: the latest one that was yielded.
    """

    head: int = -1
    next: int = 0
    new: frozenset[str] = frozenset()
    awaited: tuple[tuple[str, int], ...] = ()
    told: frozenset[str] = frozenset()
    floor: str = ""
    newest: str = ""

    def note(self, txid: str, number: int = 0) -> Memory:
        new = self.new | ({txid} if number == 0 and txid > self.floor else set())
        if txid not in new:
            return self
        held = dict(self.awaited)
        awaited = tuple({**held, txid: max(number, held.get(txid, 0))}.items())
        return self._replace(new=new, awaited=awaited)

    def without(self, txid: str) -> Memory:
        return self._replace(awaited=tuple(one for one in self.awaited if one[0] != txid))

    def drop(self, txid: str) -> Memory:
        return self.without(txid)._replace(new=self.new - {txid})

    def anew(self) -> Memory:
        return self._replace(floor=self.newest)


def spared(store: Store) -> frozenset[str]:
    """Return the ids that the watch need not yield."""
    found: frozenset[str] = store.get("before") | (store.get("may") or frozenset())
    return found


Todo = tuple[tuple[str, int], ...]


def id_of(txid: str) -> str:
    return txid[0]


def begins(rules: Rules, after: str, polls: int) -> Program:
    """Begin behind a checkpoint: find its announcement, and note the saves in progress."""
    told = frozenset({after if rules.mutant == "by_txid" else id_of(after)})
    found = yield look("lists the run", lambda store: tuple(sorted(store.under("runs").items())))
    at = [number for (number,), one in found if one == (after, 0)]
    head = max((number for (number,), _ in found), default=-1)
    memory = Memory(head, at[0] + 1 if at else 0, told=told, newest=after)
    if rules.mutant == "after_all":
        memory = memory._replace(next=0)
    if not at:
        is_over = yield look("reads ended", lambda store: after in over(store))
        memory = memory.anew() if not is_over or rules.mutant == "after_begins_anew" else memory
    opened = yield look(
        "lists transactions", lambda store: tuple(sorted(txid for (txid,) in store.under("transactions")))
    )
    for txid in opened if rules.mutant != "ignores_open" else ():
        if (yield look(f"looks for {txid}", partial(_first_record, txid))) is None:
            memory = memory.note(txid)
    yield look("HAS BEGUN", lambda _: "", lambda store, _: store.with_(("may",), _passed(store, at)))
    return goto(reads_back, rules, memory, polls, memory.next)


def _passed(store: Store, at: list[int]) -> frozenset[str]:
    """Return the ids of what was announced earlier, and committed before the watch has begun. It may yield them."""
    earlier = {one[0] for (number,), one in store.under("runs").items() if one and number < max(at, default=0)}
    return frozenset(id_of(txid) for txid in earlier & visible(store))


def polls_on(rules: Rules, memory: Memory, polls: int) -> Program:
    """Poll. Before the last polls, all others have ended, and gc runs."""
    if not polls:
        return None
    if polls == LAST:
        yield when_quiet()
        return goto(gc, rules, Turn(2, then=goto(poll, rules, memory, polls)))
    return (yield from poll(rules, memory, polls))


def poll(rules: Rules, memory: Memory, polls: int) -> Program:
    yield look("BEGINS to poll", lambda _: "", lambda store, _: store.with_(("ghost", "shown"), visible(store)))
    if memory.head < 0:
        return goto(lists_run, rules, memory, polls)
    if rules.mutant == "head_first" and not (yield _exists(memory.head)):
        return goto(lists_run, rules, memory, polls)
    return goto(reads_on, rules, memory, polls)


def _exists(number: int) -> Op:
    return look(f"looks for runs/{number}", lambda store: ("runs", number) in store.objects)


LAST = 2


def lists_run(rules: Rules, memory: Memory, polls: int) -> Program:
    head = yield look("lists the run", _highest)
    return goto(reads_back, rules, memory._replace(head=head), polls, memory.next)


def reads_on(rules: Rules, memory: Memory, polls: int) -> Program:
    """Read on until a number is free, and then check that gc has not deleted what was read last."""
    if (yield _exists(memory.head + 1)):
        return goto(reads_on, rules, memory._replace(head=memory.head + 1), polls)
    if rules.mutant not in {"head_first", "goes_on"} and not (yield _exists(memory.head)):
        if rules.mutant == "begins_anew":
            memory = memory.anew()._replace(next=0)
        return goto(lists_run, rules, memory, polls)
    return goto(reads_back, rules, memory, polls, memory.next)


def reads_back(rules: Rules, memory: Memory, polls: int, number: int) -> Program:
    """Read the announcements that are new. If one is missing, gc has deleted it, or lists commits/ instead."""
    if number > memory.head:
        memory = memory._replace(next=memory.head + 1)
        yield look("HAS LOOKED", lambda _: "", _missed(memory))
        return goto(reads_logs, rules, memory, polls, memory.awaited)
    found = yield look(f"reads runs/{number}", lambda store: store.get("runs", number))
    if found is None:
        lowest = yield look("lists the run", lambda store: min(numbers(store), default=0))
        if lowest > number:
            return goto(reads_back, rules, memory, polls, lowest)
        hidden = yield look("lists names", lambda store: tuple(sorted({txid for txid, _ in store.under("commits")})))
        for txid in hidden:
            memory = memory.note(txid) if txid > memory.newest else memory
    elif found:
        memory = memory.note(*found)
    return goto(reads_back, rules, memory, polls, number + 1)


def _missed(memory: Memory) -> Any:
    """A look finds all that was visible when it began, and was announced behind the start of the watch."""

    def ghost(store: Store, _: Any) -> Store:
        shown, done = store.get("ghost", "shown") or frozenset(), store.without(("ghost", "shown"))
        known = {id_of(txid) for txid in memory.new} | {txid[0] for txid in memory.told}
        lost = {txid for txid in shown if id_of(txid) not in known | spared(store)}
        return done.with_(("ghost", "hidden")) if lost else done

    return ghost


def reads_logs(rules: Rules, memory: Memory, polls: int, todo: Todo) -> Program:
    if not todo:
        return goto(polls_on, rules, memory, polls - 1)
    txid, _ = todo[0]
    if rules.mutant == "ended_first" and (yield look("reads ended", lambda store: txid in over(store))):
        return goto(reads_logs, rules, memory.drop(txid), polls, todo[1:])
    yield look("BEGINS to read a log", lambda _: "", lambda s, _: s.with_(("ghost", "over"), _is_over(s, txid)))
    return goto(reads_log, rules, memory, polls, todo, ())


def _is_over(store: Store, txid: str) -> bool:
    return txid in over(store) or state_of(own_log(store, txid)) == "over"


def reads_log(rules: Rules, memory: Memory, polls: int, todo: Todo, log: tuple[str, ...]) -> Program:
    """Read a log by keys, and then `ended`, unless the log itself is over. Yield the checkpoint if it is visible."""
    txid, number = todo[0]
    found = yield look(f"reads {txid}.{len(log)}", lambda store: store.get("commits", txid, len(log)))
    if found is not None:
        return goto(reads_log, rules, memory, polls, todo, (*log, found))
    state = state_of(log)
    if state != "over" and rules.mutant not in {"ignores_ended", "ended_first"}:
        state = "over" if (yield look("reads ended", lambda store: txid in over(store))) else state
    name = txid if rules.mutant == "by_txid" else id_of(txid)
    if state == "over" or (state and name in memory.told):
        memory = memory.drop(txid)
    elif state == "visible":
        yield look(f"YIELDS {txid}", lambda _: "", lambda store, _: _yields(store, txid))
        memory = memory.drop(txid)._replace(told=memory.told | {name}, newest=max(memory.newest, txid))
    elif rules.mutant == "reads_once":
        memory = memory.drop(txid)
    elif state == "hidden" and (len(log) > number or rules.mutant == "believes_hidden"):
        memory = memory.drop(txid) if rules.mutant == "drops_hidden" else memory.without(txid)
    return goto(reads_logs, rules, memory, polls, todo[1:])


def _yields(store: Store, txid: str) -> Store:
    key = ("told", id_of(txid))
    store = store.with_(key, (store.get(*key) or 0) + 1)
    return store.with_(("ghost", "stale")) if store.get("ghost", "over") else store


# -- invariants


def is_told(store: Store) -> bool:
    return all(store.get("told", id) for id in {id_of(txid) for txid in visible(store)} - spared(store))


ONCE = Invariant("No checkpoint is yielded twice.", lambda s: all(count == 1 for count in s.under("told").values()))
NEW = Invariant(
    "Nothing is yielded that the watch begins behind.",
    lambda store: not any(store.get("told", id) for id in store.get("before")),
)
STATED = Invariant(
    "Nothing is yielded that was over before its log was read.", lambda store: not store.get("ghost", "stale")
)
SHOWN = Invariant("A look finds all that was visible when it began.", lambda store: not store.get("ghost", "hidden"))
TOLD = Invariant("When all is quiet, and gc has run, all that is visible has been yielded.", is_told)


def log_of(txid: str, *kinds: str) -> dict[Any, Any]:
    return {("commits", txid, number): kind for number, kind in enumerate(kinds)}


def run_of(*txids: str, first: int = 0) -> dict[Any, Any]:
    return {("runs", number): (txid, 0) for number, txid in enumerate(txids, first)}


def folded(*txids: str) -> dict[Any, Any]:
    return {("ended", 0): frozenset(txids)}


OVER = (COMMITTED, FORGOTTEN, PURGED)
"""The log of what is over."""


class Setup(NamedTuple):
    """A store and its processes.

    ``memory``: what the watch remembers, or the txid behind which it begins. ``saves``: txids. ``opened``: a save that
    has announced its record. ``late``: the number that a save G found free long ago. ``users``: (txid, records).
    ``before``: the ids of what was announced before the watch begins. ``ends``: gc ends what is open. ``lossy``:
    announcements are lost.
    """

    store: dict[Any, Any]
    memory: Memory | str = Memory()
    saves: tuple[str, ...] = ()
    opened: str = ""
    late: int | None = None
    users: tuple[tuple[str, tuple[str, ...]], ...] = ()
    gcs: int = 1
    before: str = ""
    polls: int = 1
    ends: bool = False
    lossy: bool = False


PAST = log_of("D", *OVER) | run_of("D")
NEXT = PAST | log_of("E", COMMITTED) | run_of("D", "E")
SLEPT = Memory(0, 1, told=frozenset("D"), newest="D")
OPEN = {("transactions", "C"): True} | PAST | log_of("E", COMMITTED) | run_of("D", "C", "E")
SAFE: dict[str, Setup] = {
    "from the start": Setup(PAST, saves=("E",), users=(("E", (FORGOTTEN, PURGED)),)),
    "a watch that slept": Setup(PAST, SLEPT, saves=("E",)),
    "an old copy": Setup(folded("D") | run_of("D"), SLEPT, saves=("A",)),
    "a copy of what was yielded": Setup(folded("D") | run_of("D"), SLEPT, saves=("D1",)),
    "two gcs": Setup(PAST | log_of("E", *OVER) | log_of("F", COMMITTED) | run_of("D", "E", "F"), SLEPT, gcs=2, polls=2),
    "forgotten, and restored": Setup(NEXT, SLEPT, users=(("E", (FORGOTTEN, RESTORED)),), polls=2),
    "forgotten, restored and purged": Setup(NEXT, SLEPT, users=(("E", (FORGOTTEN, RESTORED, FORGOTTEN, PURGED)),)),
    "a killed save": Setup(PAST, SLEPT, saves=("E",), ends=True, polls=2),
    "a save in progress": Setup(OPEN, SLEPT, opened="C"),
    "behind a save in progress": Setup(OPEN, "E", opened="C", before="DE"),
    "behind a folded one": Setup(
        folded("D") | log_of("A", COMMITTED) | run_of("A", first=1), "D", saves=("E",), before="D"
    ),
    "behind what is folded meanwhile": Setup(
        log_of("C", COMMITTED) | log_of("D", *OVER) | log_of("A", COMMITTED) | run_of("C", "D", "A"),
        "D",
        saves=("E",),
        users=(("C", (FORGOTTEN, PURGED)),),
        before="CD",
    ),
    "all is over": Setup(folded("D", "E") | run_of("D", "E"), SLEPT._replace(head=1, next=2), saves=("F",)),
    "a save that slept": Setup(
        folded("D", "E") | log_of("F", COMMITTED) | run_of("F", first=2) | {("transactions", "G"): True},
        Memory(2, 3, told=frozenset("DEF"), newest="F"),
        late=1,
    ),
    "announcements that were lost": Setup(
        log_of("D", COMMITTED) | log_of("E", COMMITTED) | log_of("F", COMMITTED) | run_of("D") | run_of("F", first=2),
        SLEPT,
        lossy=True,
    ),
    "over between live ones": Setup(
        log_of("A", COMMITTED) | log_of("D", *OVER) | log_of("E", COMMITTED) | run_of("A", "D", "E"),
        Memory(0, 1, told=frozenset("A"), newest="A"),
    ),
}
LARGE: dict[str, Setup] = {
    "a save and an old copy": Setup(PAST, SLEPT, saves=("E", "A")),
    "restored, and a save": Setup(NEXT, SLEPT, saves=("F",), users=(("E", (FORGOTTEN, RESTORED)),)),
    "behind what two gcs fold": Setup(
        log_of("C", COMMITTED) | log_of("D", *OVER) | log_of("A", COMMITTED) | run_of("C", "D", "A"),
        "D",
        users=(("C", (FORGOTTEN, PURGED)),),
        before="CD",
        gcs=2,
    ),
}


def model(mutant: str = "", *, start: str = "from the start") -> Model:
    rules, setup = Rules(mutant), {**SAFE, **LARGE}[start]
    memory, polls = setup.memory, setup.polls + LAST
    first = goto(begins, rules, memory, polls) if isinstance(memory, str) else goto(polls_on, rules, memory, polls)
    late = [(setup.opened, goto(records, rules, (setup.opened, 0, COMMITTED)))] if setup.opened else []
    late += [("G", goto(announces, rules, ("G", 0, COMMITTED), setup.late))] if setup.late is not None else []
    saves = [(me, goto(save, rules, me)) for me in setup.saves]
    found = [Process("watch", first)]
    found += [Process(f"save {me}", program, mortal=True) for me, program in (*saves, *late)]
    found += [Process(f"user of {txid}", goto(user, rules, txid, acts), mortal=True) for txid, acts in setup.users]
    found += [Process(f"gc {number}", goto(gc, rules, Turn(1, setup.ends)), mortal=True) for number in range(setup.gcs)]
    objects = {**setup.store, ("before",): frozenset(setup.before)}
    if isinstance(memory, Memory):
        objects |= {("told", id): 1 for id in memory.told}
    always = (ONCE, NEW, STATED) if setup.lossy else (ONCE, NEW, STATED, SHOWN)
    return Model(Store(objects), found, always=always, at_end=(TOLD,))
