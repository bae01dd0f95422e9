"""An explicit-state model of the commit and gc protocol. It explores every interleaving of writers, gcs and a user.

A checkpoint consists of "a" and "b". Each is stored in a blob, and a manifest object names the blobs. Objects are
called ``<uploader>/a``, ``<uploader>/b`` and ``<uploader>/manifest``. The store begins with one commit, M0. Each
storage call is one transition. A process that pauses or dies is simply not scheduled. Each of the two pages of a
listing is a separate transition, and so is every manifest that is read. `Model.check` explores all reachable states.

In every state, the manifest and the blobs of every live commit must exist. A model in which gc never deletes anything
does not pass either, because it proves nothing.

The switches in `Setup` make the model larger. `MUTANTS` are small changes to the protocol, each of which must lose
data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import product
from typing import Generic, TypeAlias, TypeVar

from tests.model.state import (
    NOTHING,
    Gc,
    Kept,
    Log,
    Logs,
    Names,
    Setup,
    State,
    Step,
    Verdict,
    Writer,
    of,
    with_item,
    with_log,
)

MUTANTS = {
    "list_first": "a writer lists commits before its transaction has begun",
    "upload_first": "a writer uploads before its transaction has begun",
    "reuse_orphans": "a writer reuses whatever object it finds",
    "no_wait": "a gc does not wait for open transactions",
    "roots_early": "a gc reads the roots before it waits",
    "roots_without_purged_since": "what was purged since the candidates were made is no root",
    "give_up_without_race": "a gc gives up on a transaction without a record in commits/",
    "hash_names": "objects are called by their content alone",
    "drop_revoked": "the record of a revoked transaction is dropped",
    "drop_file_early": "a writer removes its transaction file before there is a record",
    "restore_purged": "what is purged can be restored",
    "retry_keeps_known": "a retry reuses what the first attempt knew",
    "retry_keeps_uploads": "a retry reuses what the first attempt uploaded",
}
OWN_MUTANTS = {
    "open_before_commits": "a gc lists open transactions before commits",
    "resume_without_waiting": "a resumed gc does not wait for the transactions that stood in its way",
    "resume_with_new_purged": "a resumed gc takes what is purged by now for what was purged then",
    "trusts_announcements": "a writer reuses what lived when it learned of it, and does not read its log",
    "reads_logs_early": "a writer reads the log of what it reuses before its transaction has begun",
    "unreadable_root_ignored": "a root whose manifest cannot be read is left out",
}


Numbers: TypeAlias = tuple[int, ...]
"""A state: the number of the state of the storage, and the number of each writer and each gc."""
_Step: TypeAlias = tuple[str, int, int]
"""A label, and the new numbers of the storage and of the process."""
T = TypeVar("T")


class _Numbers(Generic[T]):
    """Numbers equal values alike."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def of(self, value: T) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Model:
    """Returns all steps that can follow a state."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.mutant = setup.mutant
        self.contents = ("a", "b")[: setup.contents]
        self.programs = _programs(setup)
        self.shared = _Numbers[State]()  # states of the storage, without processes
        self.processes = _Numbers[Writer | Gc]()
        self.lost: dict[int, str] = {}  # by the number of a state of the storage: what is missing
        self.memo: dict[tuple[int, int, int], list[_Step]] = {}

    def first(self) -> State:
        tx = "w0" if self.setup.late_start else "M0"
        names = frozenset(of(tx, what) for what in (*self.contents, "manifest"))
        writers, gcs = (Writer(),) * self.setup.writers, (Gc(),) * self.setup.gcs
        if self.setup.late_start:
            ready = Writer(pc=self.programs[0].index("commit"), refs=names)
            return State(names, (), frozenset({tx}), (ready, *writers[1:]), gcs)
        return State(names, ((tx, Log("live", names)),), NOTHING, writers, gcs)

    def loss(self, state: State) -> str:
        """Return a missing object of a live commit, or "" if there is none."""
        for tx, log in state.logs:
            if log.live and not log.names <= state.objects:
                return f"{tx} lacks {sorted(log.names - state.objects)}"
        return ""

    def steps(self, numbers: Numbers) -> Iterator[tuple[str, Numbers]]:
        """Yield what can follow a state. What a process does depends only on itself and on the storage."""
        for place in range(len(numbers)):
            key = (place, numbers[0], numbers[place])
            if key not in self.memo:
                self.memo[key] = list(self.steps_of(*key))
            for label, shared, process in self.memo[key]:
                new = (shared, *numbers[1:place], process, *numbers[place + 1 :]) if place else (shared, *numbers[1:])
                yield label, self.in_order(new)

    def steps_of(self, place: int, shared: int, process: int) -> Iterator[_Step]:
        """Yield the steps of the process at a place of `Numbers`, or of the user."""
        state, writers = self.shared.values[shared], self.setup.writers
        if not place:
            for label, found in self.user_steps(state):
                yield label, self.stored(found), 0
            return
        one, index = self.processes.values[process], place - 1
        if isinstance(one, Writer):
            for label, found in self.writer_steps(state._replace(writers=(one,) * writers), index):
                yield label, self.stored(found), self.processes.of(found.writers[index])
        else:
            index -= writers
            for label, found in self.gc_steps(state._replace(gcs=(one,) * self.setup.gcs), index):
                yield label, self.stored(found), self.processes.of(found.gcs[index])

    def numbers(self, state: State) -> Numbers:
        return self.stored(state), *map(self.processes.of, state.writers), *map(self.processes.of, state.gcs)

    def stored(self, state: State) -> int:
        """Return the number of the state of the storage."""
        alone = state._replace(writers=(), gcs=())
        number = self.shared.of(alone)
        if number not in self.lost:
            self.lost[number] = self.loss(alone)
        return number

    def in_order(self, numbers: Numbers) -> Numbers:
        """Normalize states that differ only in the order of the gcs, because gcs are interchangeable."""
        if self.setup.gcs == 1:
            return numbers
        first = 1 + self.setup.writers
        return (*numbers[:first], *sorted(numbers[first:]))

    # -- the user

    def user_steps(self, state: State) -> Iterator[Step]:
        for tx, log in state.logs:
            if log.state == "forgotten" and self.setup.purger:
                logs = with_log(state.logs, tx, Log("purged", log.names))
                yield Step(f"somebody purges {tx}", state._replace(logs=logs))
            if log.state == "revoked" and self.mutant == "drop_revoked":
                logs = tuple(item for item in state.logs if item[0] != tx)
                yield Step(f"drop the record of {tx}", state._replace(logs=logs, files=state.files - {tx}))
            if state.toggles < self.setup.toggles:
                yield from self.toggles(state, tx, log)

    def toggles(self, state: State, tx: str, log: Log) -> Iterator[Step]:
        purged = log.state == "purged" and self.mutant == "restore_purged" and log.names <= state.objects
        if log.state == "live":
            yield self.toggled(state, tx, log, "forgotten")
        elif log.state == "forgotten" or purged:
            yield self.toggled(state, tx, log, "live")

    def toggled(self, state: State, tx: str, log: Log, new: str) -> Step:
        logs = with_log(state.logs, tx, Log(new, log.names))
        return Step(f"user makes {tx} {new}", state._replace(logs=logs, toggles=state.toggles + 1))

    # -- listings

    def page(self, logs: Logs, number: int) -> Logs:
        """Return page 1 or 2 of commits/, or both for 0."""
        return tuple(item for item in logs if number == 0 or (number == 1) == (item[0] <= "w0"))

    def object_page(self, objects: Names, number: int) -> Names:
        return frozenset(name for name in objects if number == 0 or (number == 1) == (name <= "w0/a"))

    # -- a writer

    def writer_steps(self, state: State, index: int) -> Iterator[Step]:
        writer = state.writers[index]
        tx = f"w{0 if self.setup.shared else index}" + "r" * writer.attempt
        for name in sorted(writer.sent - state.objects):
            yield Step(f"late duplicate PUT of {name}", state._replace(objects=state.objects | {name}))
        program = self.programs[writer.attempt]
        if writer.pc < len(program):
            action = program[writer.pc]
            next_one = writer._replace(pc=writer.pc + 1)
            for label, new, after in self.action(state, action, tx, writer, next_one):
                yield Step(f"{tx} {label}", after._replace(writers=with_item(after.writers, index, new)))

    def action(
        self, state: State, action: str, tx: str, writer: Writer, after: Writer
    ) -> Iterator[tuple[str, Writer, State]]:
        if action == "begin":
            begun = state._replace(files=state.files | {tx})
            if self.setup.shared and tx in dict(state.logs):
                yield from self.refused(begun, tx, writer)
            else:
                yield "begins", after, begun
        elif action.startswith("list"):
            seen = writer.listed + self.page(state.logs, int(action[-1]))
            if action in ("list0", "list2"):
                yield from self.choices(state, after, seen)
            else:
                yield "lists page 1", after._replace(listed=seen), state
        elif action in ("read", "learn", "pick", "log"):
            yield from getattr(self, f"writer_{action}")(state, writer, after)
        elif action.startswith("put:"):
            yield from self.put(state, action[4:], tx, after)
        elif action == "drop":
            yield "drops its file", after, state._replace(files=state.files - {tx})
        elif action == "commit":
            yield from self.commit(state, tx, writer, after)

    def choices(self, state: State, after: Writer, seen: Logs) -> Iterator[tuple[str, Writer, State]]:
        """Each blob may come from any live commit. A manifest that is not used does not have to be read."""
        named = {name for _, log in seen if log.live for name in log.names}
        if self.mutant == "reuse_orphans":
            named = set(state.objects)
        sources = [("", *sorted(name for name in named if name.endswith("/" + what))) for what in self.contents]
        for picks in product(*sources):
            refs = frozenset(picks) - {""}
            used = {tx for tx, log in seen if log.live and log.names & refs}
            unread = frozenset(of(tx, "manifest") for tx in used) if self.setup.reads else NOTHING
            yield f"will reuse {sorted(refs)}", after._replace(refs=refs, unread=unread, listed=()), state

    def writer_learn(self, state: State, writer: Writer, after: Writer) -> Iterator[tuple[str, Writer, State]]:
        yield "learns what there is", after._replace(listed=state.logs), state

    def writer_pick(self, state: State, writer: Writer, after: Writer) -> Iterator[tuple[str, Writer, State]]:
        """Each blob may come from a checkpoint that was live when the writer read its log."""
        yield "will reuse nothing", after._replace(listed=()), state
        for tx, log in writer.listed:
            for picks in product(*[("", of(tx, what)) for what in self.contents]) if log.live else ():
                if refs := frozenset(picks) & log.names:
                    yield (
                        f"will reuse {sorted(refs)}",
                        after._replace(refs=refs, unread=frozenset({tx}), listed=()),
                        state,
                    )

    def writer_log(self, state: State, writer: Writer, after: Writer) -> Iterator[tuple[str, Writer, State]]:
        lives = all(dict(state.logs)[tx].live for tx in writer.unread)
        refs = writer.refs if lives else NOTHING
        yield f"reads the log of {sorted(writer.unread)}", after._replace(refs=refs, unread=NOTHING), state

    def writer_read(self, state: State, writer: Writer, after: Writer) -> Iterator[tuple[str, Writer, State]]:
        if not writer.unread:
            yield "has read all", after, state
            return
        name = min(writer.unread)
        if name in state.objects:
            yield f"reads {name}", writer._replace(unread=writer.unread - {name}), state
        else:
            yield f"cannot read {name}", after._replace(refs=NOTHING, unread=NOTHING), state

    def put(self, state: State, what: str, tx: str, after: Writer) -> Iterator[tuple[str, Writer, State]]:
        if any(name.endswith("/" + what) for name in after.refs):
            yield f"reuses {what}", after, state
            return
        name = of("M0" if self.mutant == "hash_names" and what != "manifest" else tx, what)
        sent = after.sent | {name} if self.setup.duplicates else NOTHING
        if self.setup.shared and what == "manifest":
            yield from self.put_shared_manifest(state, tx, after)
            return
        new = after._replace(refs=after.refs | {name}, sent=sent)
        yield f"uploads {name}", new, state._replace(objects=state.objects | {name})

    def put_shared_manifest(self, state: State, tx: str, after: Writer) -> Iterator[tuple[str, Writer, State]]:
        """Put the shared manifest. Only the first one counts.

        A later writer uses the names in the first manifest if all of these objects exist, and otherwise gives up
        ``tx``.
        """
        name, stored = of(tx, "manifest"), dict(state.manifests)
        if name not in state.objects:
            refs = after.refs | {name}
            manifests = tuple(sorted({**stored, name: refs}.items()))
            new = state._replace(objects=state.objects | {name}, manifests=manifests)
            yield f"uploads {name}", after._replace(refs=refs), new
        elif stored[name] <= state.objects:
            yield f"finds {name}", after._replace(refs=stored[name]), state
        else:
            logs = state.logs if tx in dict(state.logs) else with_log(state.logs, tx, Log("revoked", NOTHING))
            yield from self.refused(state._replace(logs=logs), tx, after)

    def commit(self, state: State, tx: str, writer: Writer, after: Writer) -> Iterator[tuple[str, Writer, State]]:
        if tx not in dict(state.logs):
            yield "COMMITS", after, state._replace(logs=with_log(state.logs, tx, Log("live", writer.refs)))
        else:
            yield from self.refused(state, tx, writer)

    def refused(self, state: State, tx: str, writer: Writer) -> Iterator[tuple[str, Writer, State]]:
        done = Writer(pc=99, attempt=writer.attempt, sent=writer.sent)
        if self.setup.shared and dict(state.logs)[tx].committed:
            yield "finds it committed", done, state
        elif self.setup.retry and writer.attempt == 0:
            yield (
                "is refused and tries again",
                Writer(attempt=1, refs=self.kept_by_retry(tx, writer), sent=writer.sent),
                state,
            )
        else:
            yield "is refused", done, state

    def kept_by_retry(self, tx: str, writer: Writer) -> Names:
        blobs = frozenset(name for name in writer.refs if not name.endswith("/manifest"))
        own = frozenset(name for name in blobs if name.startswith(tx))
        return {"retry_keeps_known": blobs - own, "retry_keeps_uploads": own}.get(self.mutant, NOTHING)

    # -- a gc

    def gc_steps(self, state: State, index: int) -> Iterator[Step]:
        gc = state.gcs[index]
        for label, new, after in getattr(self, f"gc_{gc.pc}")(state, gc):
            yield Step(f"g{index} {label}", after._replace(gcs=with_item(after.gcs, index, new)))

    def gc_idle(self, state: State, gc: Gc) -> Iterator[tuple[str, Gc, State]]:
        if gc.runs < self.setup.runs:
            yield "starts", Gc("purge", gc.runs + 1), state

    def gc_purge(self, state: State, gc: Gc) -> Iterator[tuple[str, Gc, State]]:
        for tx, log in state.logs:
            if log.state == "forgotten":
                logs = with_log(state.logs, tx, Log("purged", log.names))
                yield f"purges {tx}", gc, state._replace(logs=logs)
        yield from self.gc_objects(state, gc)
        if state.kept is None:
            return
        candidates, purged, waits = state.kept
        if self.mutant == "resume_without_waiting":
            waits = NOTHING
        if self.mutant == "resume_with_new_purged":
            purged = frozenset(tx for tx, log in state.logs if not log.live)
        yield "resumes", gc._replace(pc="wait", candidates=candidates, purged=purged, waits=waits), state

    def gc_objects(self, state: State, gc: Gc) -> Iterator[tuple[str, Gc, State]]:
        page = 1 if self.setup.pages else 0
        found = self.object_page(state.objects, page)
        follow = "objects2" if page else "files" if self.mutant == "open_before_commits" else "commits"
        yield f"lists {len(found)} objects", gc._replace(pc=follow, candidates=found, seen=()), state

    def gc_objects2(self, state: State, gc: Gc) -> Iterator[tuple[str, Gc, State]]:
        found = gc.candidates | self.object_page(state.objects, 2)
        follow = "files" if self.mutant == "open_before_commits" else "commits"
        yield f"lists {len(found)} objects", gc._replace(pc=follow, candidates=found), state

    def gc_commits(self, state: State, gc: Gc) -> Iterator[tuple[str, Gc, State]]:
        yield from self.list_commits(state, gc, "commits2", "mark")

    def gc_commits2(self, state: State, gc: Gc) -> Iterator[tuple[str, Gc, State]]:
        yield from self.list_commits(state, gc, "", "mark")

    def list_commits(self, state: State, gc: Gc, second: str, follow: str) -> Iterator[tuple[str, Gc, State]]:
        """List commits. ``second``: the step for page 2, or "" on page 2. ``follow``: the step after the listing."""
        if self.setup.pages and second:
            yield "lists commits, page 1", gc._replace(pc=second, seen=self.page(state.logs, 1)), state
            return
        seen = gc.seen + self.page(state.logs, 2 if self.setup.pages else 0)
        wanted = self.wanted(seen, gc, follow)
        unread = frozenset(of(tx, "manifest") for tx in wanted) if self.setup.reads else NOTHING
        new = gc._replace(pc=follow, seen=seen, unread=unread)
        if unread:
            yield "lists commits", new, state
        else:
            yield from getattr(self, f"gc_{follow}")(state, new)

    def wanted(self, seen: Logs, gc: Gc, follow: str) -> list[str]:
        if follow == "mark" or self.mutant == "roots_without_purged_since":
            return [tx for tx, log in seen if log.live]
        return [tx for tx, log in seen if log.committed and tx not in gc.purged]

    def unread(self, state: State, gc: Gc) -> tuple[str, Gc | None]:
        """Read one manifest. If it is unreadable, the gc ends. Call this only while there are unread manifests."""
        name = min(gc.unread)
        if name in state.objects or self.mutant == "unreadable_root_ignored":
            return f"reads {name}", gc._replace(unread=gc.unread - {name})
        return f"cannot read {name}", None

    def gc_mark(self, state: State, gc: Gc) -> Iterator[tuple[str, Gc, State]]:
        if gc.unread:
            label, new = self.unread(state, gc)
            yield label, new or Gc("idle", gc.runs), state
            return
        named = frozenset(name for _, log in gc.seen if log.live for name in log.names)
        purged = frozenset(tx for tx, log in gc.seen if not log.live)
        candidates = gc.candidates - named
        follow = "files"
        if self.mutant == "open_before_commits":
            follow = "wait"
        new = gc._replace(pc=follow, candidates=candidates, purged=purged)
        yield f"has candidates {sorted(candidates)}", new if candidates else Gc("idle", gc.runs), state

    def gc_files(self, state: State, gc: Gc) -> Iterator[tuple[str, Gc, State]]:
        closed = dict(gc.seen)  # were closed when commits were listed; gc sees the rest while it waits
        waits = frozenset(tx for tx in state.files if tx not in closed)
        follow = {"no_wait": "roots", "roots_early": "early", "open_before_commits": "commits"}.get(self.mutant, "wait")
        seen = gc.seen if follow == "early" else ()
        yield f"finds open {sorted(waits)}", gc._replace(pc=follow, waits=waits, seen=seen), state

    def gc_early(self, state: State, gc: Gc) -> Iterator[tuple[str, Gc, State]]:
        named = frozenset(name for _, log in state.logs if log.live for name in log.names)
        yield "reads the roots early", gc._replace(pc="wait", candidates=gc.candidates - named, seen=()), state

    def gc_wait(self, state: State, gc: Gc) -> Iterator[tuple[str, Gc, State]]:
        closed = dict(state.logs)
        still = sorted(tx for tx in gc.waits if tx not in closed)
        if not still:
            follow = "delete" if self.mutant == "roots_early" else "roots"
            yield "finds all closed", gc._replace(pc=follow, waits=NOTHING), state
            return
        for tx in still:
            if self.mutant == "give_up_without_race":
                yield f"gives up on {tx}", gc._replace(waits=gc.waits - {tx}), state
            else:
                yield f"revokes {tx}", gc, state._replace(logs=with_log(state.logs, tx, Log("revoked", NOTHING)))
        if self.setup.resume and state.kept is None:
            kept = Kept(gc.candidates, gc.purged, gc.waits)
            yield "runs out of time", Gc("idle", gc.runs), state._replace(kept=kept)

    def gc_roots(self, state: State, gc: Gc) -> Iterator[tuple[str, Gc, State]]:
        yield from self.list_commits(state, gc, "roots2", "sweep")

    def gc_roots2(self, state: State, gc: Gc) -> Iterator[tuple[str, Gc, State]]:
        yield from self.list_commits(state, gc, "", "sweep")

    def gc_sweep(self, state: State, gc: Gc) -> Iterator[tuple[str, Gc, State]]:
        if gc.unread:
            label, new = self.unread(state, gc)
            follow = Gc("idle", gc.runs) if gc.again else Gc("objects", gc.runs, again=True)
            yield label, new or follow, state
            return
        wanted = set(self.wanted(gc.seen, gc, "sweep"))
        if self.mutant == "unreadable_root_ignored":
            wanted = {tx for tx in wanted if of(tx, "manifest") in state.objects}
        roots = frozenset(name for tx, log in gc.seen if tx in wanted for name in log.names)
        new = Gc("delete", gc.runs, gc.candidates - roots)
        yield f"deletes {sorted(new.candidates)}", new, state

    def gc_delete(self, state: State, gc: Gc) -> Iterator[tuple[str, Gc, State]]:
        doomed = NOTHING if self.mutant == "never_deletes" else gc.candidates
        for name in sorted(doomed):
            new = gc._replace(candidates=gc.candidates - {name})
            yield f"DELETES {name}", new, state._replace(objects=state.objects - {name})
        if not doomed:
            yield "ends", Gc("idle", gc.runs), state

    # -- exploration

    def check(self, limit: int = 3_000_000, *, deep: bool = False) -> Verdict:
        """Explore all states, breadth first unless ``deep``, until a live commit lacks an object."""
        first = self.numbers(self.first())
        came_from: dict[Numbers, tuple[str, Numbers | None]] = {first: ("", None)}
        todo, deleted = deque([first]), set[str]()
        while todo:
            state = todo.pop() if deep else todo.popleft()
            for label, new in self.steps(state):
                if " DELETES " in label:
                    deleted.add(label.split()[-1])
                if new in came_from:
                    continue
                came_from[new] = (label, state)
                if lost := self.lost[new[0]]:
                    return Verdict("UNSAFE", len(came_from), deleted, (*_path(came_from, new), lost))
                todo.append(new)
            if len(came_from) > limit:
                return Verdict("LIMIT", len(came_from), deleted)
        return Verdict("SAFE" if deleted else "VACUOUS", len(came_from), deleted)


def _path(came_from: dict[Numbers, tuple[str, Numbers | None]], state: Numbers) -> list[str]:
    path: list[str] = []
    cursor: Numbers | None = state
    while cursor is not None:
        label, cursor = came_from[cursor]
        path.append(label)
    return path[-2::-1]


def _programs(setup: Setup) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the programs of a writer: its first attempt and its retry."""
    pages = ("list1", "list2") if setup.pages else ("list0",)
    lists = (*pages, "read") if setup.reads else pages
    if setup.logs:
        lists = ("pick",) if setup.mutant == "trusts_announcements" else ("pick", "log")
    puts = tuple(f"put:{what}" for what in ("a", "b")[: setup.contents])
    end = ("put:manifest", "commit", "drop")
    first = {
        "list_first": (*lists, "begin", *puts, *end),
        "upload_first": (*puts, "begin", *end),
        "drop_file_early": ("begin", *lists, *puts, "put:manifest", "drop", "commit"),
    }.get(setup.mutant, ("begin", *lists, *puts, *end))
    if setup.logs:
        early = setup.mutant == "reads_logs_early"
        first = ("learn", *(lists if early else ()), "begin", *(() if early else lists), *puts, *end)
    keeps = ("begin", *puts, *end)
    return first, keeps if setup.mutant.startswith("retry_keeps") else first
