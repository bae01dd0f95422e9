"""An explicit-state explorer of programs that share a store: it explores every interleaving of their operations.

A program is a generator. It yields one storage operation at a time and receives its result. Between two operations,
any other process may run, or the program may never run again. It ends by returning None, or by returning `Goto` a
different program, with the values that this program needs. All other values are forgotten, so that states coincide.

All values (keys, records, arguments, results) are immutable and compared by value. A process is identified by its
program, its arguments and the results so far, and is replayed from them. Therefore, a program must not depend on
anything else. Stores and processes are numbered, and the effect of one on the other is computed only once.

Partial-order reduction: if a process is about to make a choice that does not involve storage, only that process moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from tests.support.tally import tally

Key: TypeAlias = tuple[Any, ...]
State: TypeAlias = tuple[int, ...]
"""The number of the store, followed by the number of each process's node."""


class Store:
    """The contents of the storage, and ghosts, which are facts that only invariants can read."""

    __slots__ = ("_hash", "objects")

    def __init__(self, objects: Mapping[Key, Any]) -> None:
        self.objects = dict(objects)
        self._hash = hash(frozenset(self.objects.items()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and self.objects == other.objects

    def get(self, *key: Any) -> Any:
        return self.objects.get(key)

    def under(self, *prefix: Any) -> dict[Key, Any]:
        """Return all keys below ``prefix``, with the prefix removed."""
        size = len(prefix)
        return {key[size:]: value for key, value in self.objects.items() if key[:size] == prefix}

    def with_(self, key: Key, value: Any = True) -> Store:
        return self if self.objects.get(key) == value else Store({**self.objects, key: value})

    def without(self, *keys: Key) -> Store:
        return Store({key: value for key, value in self.objects.items() if key not in keys})


class Outcome(NamedTuple):
    """One possible outcome of an operation."""

    label: str
    store: Store
    result: Any = None


class Op(NamedTuple):
    """A storage operation.

    ``private``: it neither reads nor changes the store. ``last``: it runs after all others have ended.
    """

    run: Callable[[Store], Iterable[Outcome]]
    private: bool = False
    last: bool = False


class Goto(NamedTuple):
    program: Callable[..., Program]
    args: tuple[Any, ...] = ()


Program: TypeAlias = Generator[Op, Any, Goto | None]
Ghost: TypeAlias = Callable[[Store, Any], Store]
"""What invariants remember about an operation: (the store after it, its result) to the store with ghosts."""


def goto(program: Callable[..., Program], *args: Any) -> Goto:
    return Goto(program, args)


def create(key: Key, value: Any, ghost: Ghost = lambda store, _: store, *, lost: bool = False) -> Op:
    """An exclusive put. It returns True, or False if the key exists.

    With ``lost``, it may also return None and arrive later or never.
    """

    def run(store: Store) -> Iterable[Outcome]:
        name = "/".join(map(str, key))
        if key in store.objects:
            yield Outcome(f"finds {name} taken", ghost(store, False), False)
        else:
            yield Outcome(f"creates {name} = {value}", ghost(store.with_(key, value), True), True)
        if lost:
            yield Outcome(f"has no answer for {name}", store.with_(("flying", key), value), None)

    return Op(run)


def look(label: str, see: Callable[[Store], Any], ghost: Ghost = lambda store, _: store) -> Op:
    """A get or one page of a listing. ``see`` returns the result for the process."""

    def run(store: Store) -> Iterable[Outcome]:
        found = see(store)
        yield Outcome(f"{label}: {found}", ghost(store, found), found)

    return Op(run)


def delete(key: Key) -> Op:
    return Op(lambda store: [Outcome(f"DELETES {'/'.join(map(str, key))}", store.without(key))])


def replace(key: Key, value: Any) -> Op:
    """An overwrite. Only the model's clock and mutants may use it."""
    return Op(lambda store: [Outcome(f"sets {'/'.join(map(str, key))} to {value}", store.with_(key, value))])


def choose(options: Iterable[Any]) -> Op:
    """Choose any of the options. Other processes cannot observe the choice.

    If there are no options, the process stops permanently.
    """
    made = tuple(options)
    return Op(lambda store: [Outcome(f"chooses {one}", store, one) for one in made], private=True)


def when_quiet() -> Op:
    """Wait until all other processes have ended or died."""
    return Op(lambda store: [Outcome("is alone", store)], last=True)


def network() -> Program:
    """Deliver late puts after their client has given up, as long as the name is unused."""

    def run(store: Store) -> Iterable[Outcome]:
        for (key,), value in store.under("flying").items():
            rest = store.without(("flying", key))
            arrived = rest if key in rest.objects else rest.with_(key, value)
            yield Outcome(f"delivers {'/'.join(map(str, key))} = {value}", arrived)

    yield Op(run)
    return goto(network)


@dataclass(frozen=True)
class Process:
    """A process. ``mortal``: it may die, which matters to processes that wait for its end.

    ``daemon``: it never ends, and no process waits for it. A process that is not mortal may still stop permanently,
    because an invariant of each state must also hold if the process never moves again.
    """

    name: str
    first: Goto
    mortal: bool = False
    daemon: bool = False


class Invariant(NamedTuple):
    """An invariant. ``says``: its description.

    ``holds``: a predicate of a store or, for steps, of (process, store before, store after).
    """

    says: str
    holds: Callable[..., bool]


@dataclass(frozen=True)
class Model:
    """A model. ``always``: invariants of each state. ``steps``: invariants of each step.

    ``at_end``: invariants of states in which all processes have ended or died.
    """

    store: Store
    processes: Sequence[Process]
    always: Sequence[Invariant] = ()
    steps: Sequence[Invariant] = ()
    at_end: Sequence[Invariant] = ()
    watch: Callable[[Store], Store] = lambda store: store  # adds ghosts after each step


TOO_LARGE = "too large"


@dataclass
class Verdict:
    """``broken``: the first invariant that breaks, or "". ``trace``: the steps that lead to it.

    ``done``: all labels seen. The verdict on an incomplete exploration is neither safe nor unsafe.
    """

    broken: str
    states: int
    trace: tuple[str, ...] = ()
    done: frozenset[str] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        tally("states of models", self.states)
        if self.broken != TOO_LARGE:
            tally(f"models that are {'UNSAFE' if self.broken else 'SAFE'}")


def _ended() -> Program:
    yield from ()
    return None


class _Node(NamedTuple):
    """The position of a process. ``op``: its next operation, or None at its end."""

    process: int
    program: Callable[..., Program]
    args: tuple[Any, ...]
    results: tuple[Any, ...]
    op: Op | None


class _Step(NamedTuple):
    label: str
    store: int
    node: int
    broken: str = ""


class _Explorer:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.stores: list[Store] = []
        self.store_numbers: dict[Store, int] = {}
        self.wrong: list[str] = []  # by store number: the invariant that the store breaks
        self.nodes: list[_Node] = []
        self.node_numbers: dict[Any, int] = {}
        self.memo: dict[tuple[int, int], tuple[_Step, ...]] = {}
        self.ended = {self._end(index) for index, _ in enumerate(model.processes)}
        self.daemons = {index for index, process in enumerate(model.processes) if process.daemon}

    def first(self) -> State:
        nodes = (self._enter(index, process.first) for index, process in enumerate(self.model.processes))
        return (self._store(self.model.store), *nodes)

    def steps(self, state: State) -> Iterable[tuple[int, _Step]]:
        """Yield (index of a process in the state, its steps)."""
        found = []
        for index, node in enumerate(state[1:], 1):
            op = self.nodes[node].op
            if op is None or (op.last and not self._is_quiet(state, but=index)):
                continue
            made = self.memo.get((state[0], node))
            if made is None:
                made = self._run(state[0], node)
            if op.private and made:
                return [(index, step) for step in made]
            found += [(index, step) for step in made]
        return found

    def is_over(self, state: State) -> bool:
        return self._is_quiet(state, but=0)

    def _is_quiet(self, state: State, but: int) -> bool:
        others = (node for index, node in enumerate(state) if index not in (0, but) and index - 1 not in self.daemons)
        return all(node in self.ended for node in others)

    def _run(self, store: int, number: int) -> tuple[_Step, ...]:
        node, before = self.nodes[number], self.stores[store]
        process = self.model.processes[node.process]
        steps = []
        for label, made, result in node.op.run(before) if node.op else ():
            after = self.model.watch(made)
            broken = next((one.says for one in self.model.steps if not one.holds(process.name, before, after)), "")
            new = self._store(after)
            follow = self._follow(node, result)
            steps.append(_Step(f"{process.name} {label}", new, follow, broken or self.wrong[new]))
        if process.mortal:
            steps.append(_Step(f"{process.name} dies", store, self._end(node.process)))
        self.memo[store, number] = tuple(steps)
        return self.memo[store, number]

    def _store(self, store: Store) -> int:
        number = self.store_numbers.get(store)
        if number is None:
            number = self.store_numbers[store] = len(self.stores)
            self.stores.append(store)
            self.wrong.append(next((one.says for one in self.model.always if not one.holds(store)), ""))
        return number

    def _node(self, node: _Node) -> int:
        key = node[:4]
        if key not in self.node_numbers:
            self.node_numbers[key] = len(self.nodes)
            self.nodes.append(node)
        return self.node_numbers[key]

    def _end(self, process: int) -> int:
        return self._node(_Node(process, _ended, (), (), None))

    def _enter(self, process: int, to: Goto) -> int:
        return self._at(process, to, ())

    def _follow(self, node: _Node, result: Any) -> int:
        return self._at(node.process, Goto(node.program, node.args), (*node.results, result))

    def _at(self, process: int, to: Goto, results: tuple[Any, ...]) -> int:
        """Return the node of a process that has run ``to`` and received ``results``."""
        known = self.node_numbers.get((process, to.program, to.args, results))
        if known is not None:
            return known
        running = to.program(*to.args)
        try:
            op = next(running)
            for result in results:
                op = running.send(result)
        except StopIteration as end:
            where: Goto | None = end.value
            return self._end(process) if where is None else self._enter(process, where)
        return self._node(_Node(process, to.program, to.args, results, op))


def explore(model: Model, *, limit: int = 1_000_000, deep: bool = False) -> Verdict:
    """Explore all states, breadth first unless ``deep``, until an invariant breaks. "too large" counts as broken."""
    walker = _Explorer(model)
    first = walker.first()
    came_from: dict[State, tuple[State | None, str]] = {first: (None, "")}
    todo, done = deque([first]), set[str]()
    if walker.wrong[first[0]]:
        return Verdict(walker.wrong[first[0]], 1)
    while todo:
        state = todo.pop() if deep else todo.popleft()
        if model.at_end and walker.is_over(state):
            store = walker.stores[state[0]]
            late = next((one.says for one in model.at_end if not one.holds(store)), "")
            if late:
                return Verdict(late, len(came_from), _trace(came_from, state), frozenset(done))
        for index, step in walker.steps(state):
            new = (step.store, *state[1:index], step.node, *state[index + 1 :])
            done.add(step.label)
            if step.broken:
                trace = (*_trace(came_from, state), step.label)
                return Verdict(step.broken, len(came_from), trace, frozenset(done))
            if new not in came_from:
                came_from[new] = (state, step.label)
                todo.append(new)
        if len(came_from) > limit:
            return Verdict(TOO_LARGE, len(came_from), (), frozenset(done))
    return Verdict("", len(came_from), (), frozenset(done))


def _trace(came_from: Mapping[State, tuple[State | None, str]], state: State) -> tuple[str, ...]:
    path = []
    cursor: State | None = state
    while cursor is not None:
        cursor, label = came_from[cursor]
        path.append(label)
    return tuple(path[-2::-1])


def clock(until: int) -> Program:
    """Advance the time at any instant."""

    def tick(store: Store) -> Iterable[Outcome]:
        now = store.get("clock")
        if now < until:
            yield Outcome(f"strikes {now + 1}", store.with_(("clock",), now + 1))

    yield Op(tick)
    return goto(clock, until)
