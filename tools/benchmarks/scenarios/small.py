"""10,000 tensors of 1 KiB."""

from __future__ import annotations

from benchmarks.peers.base import LOAD
from benchmarks.results import OURS, Check, Row, ScenarioResult, best, median_of, over
from benchmarks.scenarios.base import Bench, Options
from benchmarks.scenarios.loading import WARM, loads
from benchmarks.scenarios.saving import full_saves, time_of

_STATE = "state"
SAVES = "save"


def small(options: Options) -> ScenarioResult:
    """Measure saves and warm loads of many small tensors. `--size` has no effect."""
    count = 500 if options.quick else 10_000
    with Bench(options) as bench:
        size = bench.make_state(_STATE, "small", count << 10)
        saves = full_saves(bench, size)
        for case in saves:
            case.row.group = SAVES
        reads = loads(bench, LOAD, size, groups=(WARM,))
        for case in reads:
            case.row.group = LOAD
        rows = bench.run([*saves, *reads])
        ours = best(rows, OURS, "durable", group=SAVES)
        checks = [
            Check("save: DCP / casckpt", 10.0, True, _ratio(rows, "dcp", SAVES)),
            Check("load: DCP / casckpt", 10.0, True, _ratio(rows, "dcp", LOAD)),
            Check("blobs", 8.0, False, median_of(ours, "blobs")),
        ]
        title = f"{count:,} tensors of 1 KiB"
        return bench.result("small", title, checks, tensors=count, bytes=size)


def _ratio(rows: list[Row], who: str, group: str) -> float | None:
    return over(time_of(rows, who, group=group), time_of(rows, OURS, group=group))
