"""Means of checkpoints, beside the limit: reading them once and writing one."""

from __future__ import annotations

from benchmarks.harness import Case
from benchmarks.measure import Measured
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Bench, Options
from benchmarks.scenarios.loading import COLD, WARM

_USUAL = 1 << 30
_COUNT = 8
_LIMIT = "read, BLAKE3, and write"
_MOST = {COLD: 1.3, WARM: 1.7}
_MEMORY = 300 << 20


def merge(options: Options) -> ScenarioResult:
    """Save the mean of 8 checkpoints that differ everywhere. `--size` is the size of each. Compare it with torch's."""
    with Bench(options) as bench:
        rows = [row for dtype in ("float32", "bfloat16") for row in _measured(bench, dtype)]
        medians = {(row.group, row.who): row.median("durable") for row in rows}
        groups = dict.fromkeys(row.group for row in rows)
        checks = [
            Check(f"{group}: casckpt / limit", _MOST[group.split(", ")[1]], False,
                  over(medians[group, OURS], medians[group, _LIMIT]))
            for group in groups
        ]  # fmt: skip
        peaks = [peak for row in rows if row.who == OURS and (peak := row.median("peak")) is not None]
        checks.append(Check("peak extra memory, MiB", _MEMORY >> 20, False, over(max(peaks, default=None), 1 << 20)))
        title = f"The mean of {_COUNT} checkpoints"
        return bench.result("merge", title, checks, bytes=options.size_or(_USUAL), checkpoints=_COUNT)


def _measured(bench: Bench, dtype: str) -> list[Row]:
    folder, team, usual = bench.place(), bench.team(), bench.options.size_or(_USUAL)
    nbytes = team.call("merging:make", folder=folder, dtype=dtype, nbytes=usual, count=_COUNT)[0]
    try:
        return bench.run([case for cache in (WARM, COLD) for case in _cases(bench, folder, dtype, cache, nbytes)])
    finally:
        team.call("storing:delete", folder=folder)


def _cases(bench: Bench, folder: str, dtype: str, cache: str, nbytes: int) -> list[Case]:
    def mean(_: int) -> Measured:
        return bench.team().measure("merging:mean", folder=folder, cache=cache)

    group, files = f"{dtype}, {cache}", {"folder": folder, "cache": cache, "size": nbytes}
    return [
        Case(Row(group, OURS, "", nbytes), mean, ours=True),
        bench.limit(_LIMIT, "", "limits:read_and_write", group=group, nbytes=nbytes, **files),
    ]
