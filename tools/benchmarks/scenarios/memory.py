"""The additional memory of saves and loads at several sizes, with a new process for each size."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Case
from benchmarks.measure import Measured
from benchmarks.peers.base import LOAD, SAVE, Peer, Setting
from benchmarks.results import OURS, Check, Row, ScenarioResult, best, median_of, over
from benchmarks.scenarios.base import BLOB, Absent, Bench, Options, described
from benchmarks.teams import Team

_USUAL = 2 << 30
_ROUNDS = 2  # the peak hardly varies


def memory(options: Options) -> ScenarioResult:
    """Use states of a quarter, half and all of the size.

    Loads read from the page cache. The settings of saves also apply to loads.
    """
    whole = options.size_or(_USUAL)
    sizes = (whole // 4, whole // 2, whole)
    options.rounds = min(options.rounds, _ROUNDS)
    with Bench(options) as bench:
        pairs = [(peer, setting) for peer, setting in bench.peers(SAVE) if LOAD in peer.best]
        cases = [case for size in sizes for peer, setting in pairs for case in _cases(bench, peer, setting, size)]
        rows = bench.run(cases, warm_up=0)
        checks = [
            Check(f"{_group(work, size)}: peak extra memory / blob buffers of all workers", 4.0, False,
                  _buffers(rows, _group(work, size), options.threads))
            for work in (SAVE, LOAD) for size in sizes
        ]  # fmt: skip
        title = "Peak extra memory of a save and of a load"
        return bench.result("memory", title, checks, "peak", bytes=whole)


def _group(work: str, size: int) -> str:
    return f"{work} {size / (1 << 30):.2g} GiB"


def _buffers(rows: list[Row], group: str, threads: int) -> float | None:
    row = best(rows, OURS, "peak", group=group)
    return over(median_of(row, "peak"), BLOB * threads)


def _cases(bench: Bench, peer: type[Peer], setting: Setting, size: int) -> list[Case]:
    """Return a save and a later load in the same process. The first case of a round performs both."""
    waiting: dict[str, list[Measured]] = {SAVE: [], LOAD: []}

    def run(work: str) -> Measured:
        if not waiting[work]:
            for name, measured in _both(bench, peer, setting, size).items():
                waiting[name].append(measured)
        return waiting[work].pop()

    what, ours = described(setting), peer.name == OURS
    return [
        Case(Row(_group(SAVE, size), peer.name, what, size), lambda _: run(SAVE), ours),
        Case(Row(_group(LOAD, size), peer.name, what, size), lambda _: run(LOAD), ours),
    ]


def _both(bench: Bench, peer: type[Peer], setting: Setting, size: int) -> dict[str, Measured]:
    place = bench.place()
    with Team(bench.options.folder, peer.environment) as team:
        why = team.call("storing:absent", peer=peer.name)[0]  # this imports the peer's libraries
        if why:
            raise Absent(why)
        team.call("states:make", name="state", kind="model", size=size)
        job: dict[str, Any] = {"peer": peer.name, "setting": setting, "state": "state", "folder": place}
        try:
            return {
                SAVE: team.measure("storing:save", **job),
                LOAD: team.measure("storing:load", **job, cache="warm"),
            }
        finally:
            team.call("storing:delete", folder=place)
