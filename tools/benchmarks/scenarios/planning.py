"""Write plans for simulated ranks with 1,000 tensors each."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.harness import Case, Enough
from benchmarks.measure import Measured
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Bench, Options
from benchmarks.scenarios.saving import time_of

_RANKS = (4, 256, 1024, 4096)
_KINDS = ("replicas", "shards", "hsdp")
_TENSORS = 1000
_MANY = 4096  # the number of ranks for which DCP has only one round, because creating its input takes minutes
_ROUNDS = 3


def plan(options: Options) -> ScenarioResult:
    """Measure the first plan that rank 0 computes from the messages of all ranks.

    Both libraries keep the plan as long as nothing changes. "replicas": all ranks hold the same tensors; "shards":
    each rank holds its rows; "hsdp": rows over 8 ranks, identical in each group of 8. For 4,096 ranks, DCP has only
    one round.
    """
    ranks, tensors = ((4, 16), 50) if options.quick else (_RANKS, _TENSORS)
    options.rounds = min(options.rounds, _ROUNDS)
    with Bench(options) as bench:
        rows = bench.run([case for kind in _KINDS for case in _cases(bench, kind, ranks, tensors)], warm_up=0)
        return bench.result("plan", f"Planning for {tensors:,} tensors", _checks(rows, ranks), tensors=tensors)


def _cases(bench: Bench, kind: str, ranks: tuple[int, ...], tensors: int) -> list[Case]:
    def run(task: str, count: int, rounds: int) -> Callable[[int], Measured]:
        def runner(number: int) -> Measured:
            if number >= rounds:
                raise Enough
            return bench.team().measure(task, kind=kind, ranks=count, tensors=tensors)

        return runner

    found = []
    for count in ranks:
        group, once = _group(kind, count), count >= _MANY
        found.append(Case(Row(group, OURS, ""), run("planning:ours", count, _ROUNDS), ours=True))
        row = Row(group, "dcp", "one round" if once else "")
        found.append(Case(row, run("planning:dcp", count, 1 if once else _ROUNDS)))
    return found


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
