"""A save, and loads by other processes, as in a job that restarts or in evaluations of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from benchmarks.harness import Case
from benchmarks.measure import Measured, together
from benchmarks.peers.base import RESTART, Peer, Setting
from benchmarks.peers.before import Before
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Absent, Bench, Options, described
from benchmarks.teams import Team

_USUAL = 1 << 30
_READERS = 8
FIRST, AGAIN, WARM = "first load", "second load", "warm load"
_LOADS = {FIRST: "", AGAIN: "", WARM: "warm"}
"""The loads in order, and how the page cache is prepared for each of them."""
_WHO = {FIRST: slice(0, 1), AGAIN: slice(1, 2), WARM: slice(1, 2)}
"""Which of the processes loads if only one loads at a time."""


def restart(options: Options) -> ScenarioResult:
    """Before all files are read for the warm load, only the save and the loads fill the page cache.

    Eight processes each load a state of an eighth of the size. All of them load the same bytes.
    """
    whole = options.size_or(_USUAL)
    with Bench(options) as bench, ExitStack() as stack:
        readers = _Readers(bench, stack)
        cases: list[Case] = []
        for count, size in ((1, whole), (_READERS, whole // _READERS)):
            bench.make_state(_state(count), "model", size)
            for peer, setting in bench.peers(RESTART):
                if peer is not Before or not setting:
                    cases += _cases(bench, readers, _Subject(peer, setting, size, count))
        rows = bench.run(cases)
        checks = [check for count in (1, _READERS) for check in _checks(rows, count)]
        return bench.result("restart", "Loads of one checkpoint by other processes than saved it", checks, bytes=whole)


def _group(count: int, load: str) -> str:
    return f"{'one process' if count == 1 else f'{count} processes'}, {load}"


def _checks(rows: Sequence[Row], count: int) -> list[Check]:
    first, again, warm = (_time(rows, _group(count, load), "") for load in _LOADS)
    around = _time(rows, _group(count, FIRST), described({"page_cache": False}))
    told = _time(rows, _group(count, FIRST), described({"page_cache": True}))
    name = _group(count, "")
    return [
        Check(f"{name}second load / warm load", 1.1, False, over(again, warm)),
        Check(f"{name}first load / the same with page_cache=no", 1.05, False, over(first, around)),
        Check(f"{name}first load with page_cache / warm load", 1.1, False, over(told, warm)),
    ]


def _time(rows: Sequence[Row], group: str, what: str) -> float | None:
    found = [row.median("durable") for row in rows if (row.group, row.who, row.what) == (group, OURS, what)]
    return found[0] if found else None


class _Readers:
    """Processes that only load and do not form a process group. They start on demand."""

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        self._bench, self._stack = bench, stack
        self._teams: dict[str, list[Team]] = {}
        self._made: set[tuple[Team, str]] = set()

    def load(self, peer: type[Peer], size: int, which: slice, job: dict[str, Any]) -> Measured:
        """Load once in each of several processes at the same time."""
        teams = self._of(peer)[which]
        for team in teams:
            if (team, job["state"]) not in self._made:
                team.call("states:make", name=job["state"], kind="model", size=size)
                self._made.add((team, job["state"]))
        with ThreadPoolExecutor(len(teams)) as pool:
            return together(list(pool.map(lambda team: team.measure("storing:load", **job), teams)))

    def _of(self, peer: type[Peer]) -> list[Team]:
        options, environment = self._bench.options, peer.environment
        if environment not in self._teams:
            tree = options.before if environment == Before.environment else None
            made = (Team(options.folder, environment, quick=options.quick, tree=tree) for _ in range(_READERS))
            self._teams[environment] = [self._stack.enter_context(team) for team in made]
        return self._teams[environment]


class _Subject(NamedTuple):
    """The peer that saves, and the number of ``processes`` that load ``size`` bytes each."""

    peer: type[Peer]
    setting: Setting
    size: int
    processes: int


def _cases(bench: Bench, readers: _Readers, subject: _Subject) -> list[Case]:
    """Return the loads of a checkpoint. The first case of a round performs all of them in order."""
    peer, setting, size, count = subject
    waiting: dict[str, list[Measured]] = {load: [] for load in _LOADS}

    def run(load: str) -> Measured:
        if not waiting[load]:
            for name, measured in _all_loads(bench, readers, subject).items():
                waiting[name].append(measured)
        return waiting[load].pop()

    return [
        Case(
            Row(_group(count, load), peer.name, described(setting), size * count),
            partial(lambda load, _: run(load), load),
            ours=peer.name == OURS,
        )
        for load in _LOADS
    ]


def _all_loads(bench: Bench, readers: _Readers, subject: _Subject) -> dict[str, Measured]:
    peer, setting, size, count = subject
    writer, place = bench.team(peer.environment), bench.place()
    why = writer.call("storing:absent", peer=peer.name)[0]
    if why:
        raise Absent(why)
    job: dict[str, Any] = {"peer": peer.name, "setting": setting, "state": _state(count), "folder": place}
    writer.call("storing:save", **job)
    try:
        return {
            load: readers.load(peer, size, _WHO[load] if count == 1 else slice(count), job | {"cache": cache})
            for load, cache in _LOADS.items()
        }
    finally:
        writer.call("storing:delete", folder=place)


def _state(count: int) -> str:
    return f"of {count}"
