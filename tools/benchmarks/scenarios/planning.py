"""Who writes what, planned for simulated ranks with 1,000 tensors each."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.harness import Case
from benchmarks.measure import Measured
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Absent, Bench, Options
from benchmarks.scenarios.saving import time_of

_RANKS = (4, 256, 1024, 4096)
_KINDS = ("replicas", "shards", "hsdp")
_TENSORS = 1000
_PATIENCE = 60.0  # seconds that a round may be expected to take, with the making of what is planned
_TELLING = 1.0  # seconds: less may be anything
_ROUNDS = 3


def plan(options: Options) -> ScenarioResult:
    """What rank 0 does with what all ranks told it, the first time; both keep the plan while nothing changes.

    "replicas": all ranks hold the same; "shards": each holds its rows; "hsdp": rows over 8 ranks, the same in each
    group of 8. DCP is spared where its last round, grown in proportion, would take more than a minute.
    """
    ranks, tensors = ((4, 16), 50) if options.quick else (_RANKS, _TENSORS)
    options.rounds = min(options.rounds, _ROUNDS)
    with Bench(options) as bench:
        rows = bench.run([case for kind in _KINDS for case in _cases(bench, kind, ranks, tensors)], warm_up=0)
        return bench.result("plan", f"Planning for {tensors:,} tensors", _checks(rows, ranks), tensors=tensors)


def _cases(bench: Bench, kind: str, ranks: tuple[int, ...], tensors: int) -> list[Case]:
    found = []
    last: dict[str, tuple[int, float]] = {}
    for count in ranks:
        for who, task in ((OURS, "planning:ours"), ("dcp", "planning:dcp")):
            row = Row(_group(kind, count), who, "")
            run = _runner(bench, task, kind, ranks=count, tensors=tensors, last=last if who != OURS else {})
            found.append(Case(row, run, ours=who == OURS))
    return found


def _runner(
    bench: Bench, task: str, kind: str, *, ranks: int, tensors: int, last: dict[str, tuple[int, float]]
) -> Callable[[int], Measured]:
    """``last``: (ranks, seconds) of the largest plan so far, by task."""

    def run(_: int) -> Measured:
        known = last.get(task)
        if known and known[1] > _TELLING and known[1] * ranks / known[0] > _PATIENCE:
            raise Absent(f"{known[1]:.0f} s a round for {known[0]} ranks; not tried")
        measured = bench.team().measure(task, kind=kind, ranks=ranks, tensors=tensors)
        if not known or known[0] <= ranks:
            last[task] = (ranks, measured.durable + measured.extra.get("making", 0.0))
        return measured

    return run


def _group(kind: str, ranks: int) -> str:
    return f"{kind}, {ranks} ranks"


def _checks(rows: list[Row], ranks: tuple[int, ...]) -> list[Check]:
    checks = []
    for kind in _KINDS:
        if 256 in ranks:
            seconds = time_of(rows, OURS, group=_group(kind, 256))
            checks.append(Check(f"{kind}: seconds for 256 ranks", 2.0, False, seconds))
        times = {n: (time_of(rows, "dcp", group=_group(kind, n)), time_of(rows, OURS, group=_group(kind, n)))
                 for n in ranks}  # fmt: skip
        most = max((n for n, (dcp, _) in times.items() if dcp is not None), default=None)
        ratio = over(*times[most]) if most else None
        checks.append(Check(f"{kind}: DCP / casckpt, {most or 'any'} ranks", 1.0, True, ratio))
    return checks
