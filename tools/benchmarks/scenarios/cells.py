"""The cost of a cell in addition to that of its bytes, and the resulting limit for a process."""

from __future__ import annotations

from benchmarks.harness import Case
from benchmarks.measure import Measured
from benchmarks.peers.base import LOAD, SAVE, Peer, Setting
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Bench, Options
from benchmarks.scenarios.saving import saved_once
from benchmarks.teams import Team

_STATE = "state"
_USUAL = 512 << 20
_SMALL, _LARGE = 64 << 10, 1 << 20
_WANTED = 100.0  # GB/s


def cells(options: Options) -> ScenarioResult:
    """Measure the CPU time that additional cells take.

    This is an upper bound for the time during which each cell blocks the interpreter.
    """
    with Bench(options) as bench:
        size = bench.make_state(_STATE, "model", options.size_or(_USUAL))
        cases = [case for cell in (_SMALL, _LARGE) for case in _cases(bench, cell, size)]
        rows = bench.run(cases)
        checks = [Check(f"{group}: GB/s of one process, by its cells", _WANTED, True, _ceiling(rows, group, size))
                  for group in dict.fromkeys(row.group for row in rows)]  # fmt: skip
        return bench.result("cells", "Cells of 64 KiB and of 1 MiB", checks, "cpu", bytes=size)


def _cases(bench: Bench, cell: int, size: int) -> list[Case]:
    place, setting = bench.place(), {"cell_bytes": cell}
    saved: list[bool] = []

    def save(_: type[Peer], __: Setting, team: Team, ___: int) -> Measured:
        return saved_once(bench, team, {"peer": OURS, "setting": setting, "state": _STATE})

    def load(_: type[Peer], __: Setting, team: Team, ___: int) -> Measured:
        job = {"peer": OURS, "setting": setting, "state": _STATE, "folder": place}
        if not saved:
            team.call("storing:save", **job)
            saved.append(True)
        return team.measure("storing:load", **job, cache="warm")

    found = []
    for group, run in ((SAVE, save), (LOAD, load)):
        one = bench.cases(group, run, group=group, nbytes=size, only=_is_ours)
        one[0].row.what = f"cells of {cell >> 10} KiB"
        found += one
    return found


def _is_ours(peer: type[Peer], setting: Setting) -> bool:
    return peer.name == OURS and not setting


def _ceiling(rows: list[Row], group: str, size: int) -> float | None:
    """Return the size of a large cell divided by the cost of a cell in seconds, if it is measurable."""
    small, large = (row.median("cpu") for row in rows if row.group == group)
    if small is None or large is None or small <= large:
        return None
    each = (small - large) / (size // _SMALL - size // _LARGE)
    return over(_LARGE / 1e9, each)
