"""Means of checkpoints, beside the limit: reading them once and writing one."""

from __future__ import annotations

from functools import partial

from benchmarks.harness import Case
from benchmarks.measure import Measured
from benchmarks.peers.base import Peer
from benchmarks.peers.ours import Casckpt
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
    usual, folders = bench.options.size_or(_USUAL), {peer: bench.place() for peer in bench.ours()}
    job = {"dtype": dtype, "nbytes": usual, "count": _COUNT}
    try:
        made = [bench.team(peer.environment).call("merging:make", folder=at, **job) for peer, at in folders.items()]
        caches = (WARM, COLD)
        return bench.run([case for cache in caches for case in _cases(bench, folders, dtype, cache, made[0][0])])
    finally:
        for folder in folders.values():
            bench.team().call("storing:delete", folder=folder)


def _cases(bench: Bench, folders: dict[type[Peer], str], dtype: str, cache: str, nbytes: int) -> list[Case]:
    def mean(peer: type[Peer], _: int) -> Measured:
        return bench.team(peer.environment).measure("merging:mean", folder=folders[peer], cache=cache)

    group, files = f"{dtype}, {cache}", {"folder": folders[Casckpt], "cache": cache, "size": nbytes}
    return [
        *(Case(Row(group, peer.name, "", nbytes), partial(mean, peer), ours=peer is Casckpt) for peer in folders),
        bench.limit(_LIMIT, "", "limits:read_and_write", group=group, nbytes=nbytes, **files),
    ]
