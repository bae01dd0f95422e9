"""The common parts of all scenarios: options, teams of workers, and cases for peers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environments import Absent, program, version_of, versions_of
from benchmarks.harness import Case, Tell, run_rounds
from benchmarks.measure import Measured
from benchmarks.peers.base import DCP_LOAD, DCP_PART, FROM_BUCKET, LOAD, MAPPED, PART, RESTART, Peer, Setting
from benchmarks.peers.before import Before
from benchmarks.peers.ours import Casckpt
from benchmarks.results import OURS, Check, Row, ScenarioResult, ratios
from benchmarks.teams import CallFailed, Team

_NUMBERS = itertools.count()
BLOB = 32 << 20
WAY = "copy"
DISK = "fio"
_FIO = ((1, 16, 1), (1, 32, 1), (2, 4, 4), (4, 1, 32))  # jobs, blocks in flight for each, MiB of a block
WRITERS = (2, 4)
READERS = (2, 4)
_LOADS = (LOAD, MAPPED, PART, RESTART, DCP_LOAD, DCP_PART, FROM_BUCKET)


@dataclass
class Options:
    """The options of a run. ``size``: the bytes of a state, or None for the scenario's default. ``quick``: a smoke run.

    ``before``: the tree of the peer of that name. ``full``: include sizes that take a long time. ``traces``: the
    folder of traces. ``device``: torch's name for the device that holds the states.
    """

    folder: Path
    peers: Sequence[type[Peer]]
    rounds: int
    threads: int
    device: str = "cpu"
    size: int | None = None
    before: Path | None = None
    traces: Path = Path()
    quick: bool = False
    full: bool = False
    tell: Tell = lambda text: None

    def size_or(self, usual: int, *, quick: int = 4 << 20) -> int:
        """Return the requested size of a state, or the default."""
        return self.size or (quick if self.quick else usual)


@dataclass
class Bench:
    """A scenario in progress: its options, and its workers, which end with it."""

    options: Options
    rows: list[Row] = field(default_factory=list)
    _teams: dict[tuple[str, int], Team] = field(default_factory=dict)
    _made: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def team(self, environment: str = "", ranks: int = 1) -> Team:
        """Return the workers of an environment. They start on demand, and restart after one of them has died.

        They receive all states. Raises `Absent`.
        """
        key = (environment, ranks)
        if key in self._teams and self._teams[key].broken:
            self._teams.pop(key).close()
        if key not in self._teams:
            tree = self.options.before if environment == Before.environment else None
            team = Team(self.options.folder, environment, ranks, quick=self.options.quick, tree=tree)
            self._stack.enter_context(team)
            for of, task, arguments in self._made:
                if of == ranks:
                    team.call(task, **arguments)
            self._teams[key] = team
        return self._teams[key]

    def make_state(self, name: str, kind: str, size: int, *, ranks: int = 1, **more: Any) -> int:
        """Create a state in the workers of every environment. Return its size in bytes."""
        arguments = {"name": name, "kind": kind, "size": size, **more}
        if self.options.device != "cpu":  # the tasks of an earlier tree do not have this argument
            arguments["device"] = self.options.device
        first = self.team(ranks=ranks)
        self.in_new_teams("states:make", ranks=ranks, **arguments)
        found: int = first.call("states:make", **arguments)[0]
        return found

    def in_new_teams(self, task: str, *, ranks: int = 1, **arguments: Any) -> None:
        """Call a task in each team that starts from now on."""
        self._made.append((ranks, task, arguments))

    def change_state(self, name: str, prefix: str = "") -> int:
        """Change a state in all workers that have it. Return the number of changed bytes."""
        self.in_new_teams("states:change", name=name, prefix=prefix)
        teams = [team for (_, ranks), team in self._teams.items() if ranks == 1]
        return [int(team.call("states:change", name=name, prefix=prefix)[0]) for team in teams][-1]

    def place(self) -> str:
        """Return a new location for a checkpoint: a missing folder inside a new one."""
        return str(self.options.folder / f"{next(_NUMBERS):05}" / "checkpoint")

    def run(self, cases: Sequence[Case], *, warm_up: int = 1) -> list[Row]:
        """Run rounds of these cases. Return their rows by group, and add them to the scenario's rows."""
        found = run_rounds(cases, self.options.rounds, self.options.tell, warm_up=warm_up)
        groups = list(dict.fromkeys(row.group for row in found))
        rows = sorted(found, key=lambda row: groups.index(row.group))
        self.rows += rows
        return rows

    def ours(self) -> list[type[Peer]]:
        """Return casckpt, and with ``--before`` the earlier tree, for work that no other peer does."""
        return [Casckpt, *([Before] if self.options.before else [])]

    def peers(self, work: str, *, ours: type[Peer] = Casckpt) -> Iterator[tuple[type[Peer], Setting]]:
        """Return casckpt and every peer that supports ``work``, with each setting to try."""
        for peer in (ours, *self.options.peers):
            settings = [self._widened(setting) for setting in peer.best.get(work, ())]
            for_gpu = [setting for setting in settings if setting.get("pinned") or setting.get("gpu")]
            plain = [setting for setting in settings if setting not in for_gpu]
            for setting in for_gpu if for_gpu and self.options.device != "cpu" else plain:
                yield peer, setting

    def _widened(self, setting: Setting) -> Setting:
        """Replace 2 threads in a setting by the number of cores, up to 8."""
        many = max(2, min(8, self.options.threads))
        return setting | {"threads": many} if setting.get("threads") == 2 else setting

    def cases(
        self,
        work: str,
        run: Callable[[type[Peer], Setting, Team, int], Measured],
        *,
        group: str = "",
        nbytes: int = 0,
        ranks: int = 1,
        prepare: Callable[[type[Peer], Setting, Team], None] | None = None,
        only: Callable[[type[Peer], Setting], bool] = lambda peer, setting: True,
    ) -> list[Case]:
        """Return a case for each peer and setting. If a peer is absent, its row states the reason."""
        found = []
        for peer, setting in self.peers(work):
            if only(peer, setting):
                verified = peer.verifies(setting) if work in _LOADS else None
                row = Row(group, peer.name, described(setting), nbytes, verified=verified)
                found.append(Case(row, self._runner(peer, setting, ranks, run, prepare), ours=peer.name == OURS))
        return found

    def _runner(
        self,
        peer: type[Peer],
        setting: Setting,
        ranks: int,
        run: Callable[[type[Peer], Setting, Team, int], Measured],
        prepare: Callable[[type[Peer], Setting, Team], None] | None,
    ) -> Callable[[int], Measured]:
        ready: list[bool] = []

        def runner(number: int) -> Measured:
            team = self.team(peer.environment, ranks)
            if not ready:
                why = team.call("storing:absent", peer=peer.name)[0]
                if why:
                    raise Absent(why)
                if prepare is not None:
                    prepare(peer, setting, team)
                ready.append(True)
            return run(peer, setting, team, number)

        return runner

    def limit(self, who: str, what: str, task: str, *, group: str = "", nbytes: int = 0, **arguments: Any) -> Case:
        """Return a case that measures a limit of the machine.

        ``folder="new"``: in a new location, which is removed afterward.
        """

        def run(_: int) -> Measured:
            if arguments.get("folder") != "new":
                return self.team().measure(task, **arguments)
            place = self.place()
            try:
                return self.team().measure(task, **arguments | {"folder": place})
            finally:
                self.team().call("storing:delete", folder=place)

        return Case(Row(group, who, what, nbytes, limit=True), run)

    def disk(self, work: str, size: int, group: str = "") -> list[Case]:
        """Return the limits of the disk for sequential reads or writes, as fio measures them in several ways."""
        return [
            self.limit(DISK, f"jobs={jobs} depth={depth} block={block}M", "limits:fio", group=group, nbytes=size,
                       folder="new" if work == "write" else self.place(), size=size, work=work, jobs=jobs, depth=depth,
                       block=block << 20)
            for jobs, depth, block in _FIO
        ]  # fmt: skip

    def ways(self, state: str, size: int, group: str = "", *, to_gpu: bool) -> list[Case]:
        """Return the limit of copies between a GPU and pinned host memory, for a state on a GPU."""
        if self.options.device == "cpu":
            return []
        what = "pinned memory to the GPU" if to_gpu else "GPU to pinned memory"
        return [self.limit(WAY, what, "limits:across", group=group, nbytes=size, state=state, to_gpu=to_gpu)]

    def several(self, counts: Sequence[int]) -> Sequence[int]:
        """Return the thread counts with which to measure a limit of the machine.

        These are ``counts`` or, on a machine with many cores, half and all of the cores.
        """
        cores = self.options.threads
        return counts if cores <= max(counts) else (cores // 2, cores)

    def result(
        self, name: str, title: str, checks: list[Check], metric: str = "durable", **parameters: str | int | float
    ) -> ScenarioResult:
        """Return the results of the scenario."""
        measured = {row.who for row in self.rows if row.summary}
        versions = versions_of(dict.fromkeys(one.environment for one in self.options.peers if one.name in measured))
        if DISK in measured:
            versions[DISK] = version_of(program(DISK, create=False))
        parameters = {"rounds": self.options.rounds, "threads": self.options.threads, **parameters, **versions}
        return ScenarioResult(name, title, metric, parameters, self.rows, ratios(self.rows, metric), checks)


def described(setting: Setting) -> str:
    """Describe a setting in words: "threads=2 hf"."""
    return " ".join(_word(name, value) for name, value in setting.items())


def _word(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"{name}=no"
    return f"{name}={value}"


__all__ = ["BLOB", "DISK", "READERS", "WRITERS", "Absent", "Bench", "CallFailed", "Options", "described"]
