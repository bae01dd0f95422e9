"""A manifest of a million extents: what rank 0 makes, and what every rank has to read."""

from __future__ import annotations

from benchmarks.harness import Case
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Bench, Options

_SECONDS = 1.0
_BYTES = 60.0  # of an extent, beside the digests of its cells
_DIGEST = 32
_RANKS = 8


def manifest(options: Options) -> ScenarioResult:
    """1,000 tensors that 1,000 ranks wrote; one of 8 ranks reads its part."""
    tensors, shards = (20, 16) if options.quick else (1000, 1000)
    with Bench(options) as bench:
        extents = sum(bench.team().call("manifests:make", tensors=tensors, shards=shards))
        cases = [
            _case(bench, "encode", "manifests:encode"),
            _case(bench, "decode", "manifests:decode"),
            _case(bench, f"plan of one of {_RANKS} ranks", "manifests:plan", ranks=_RANKS),
        ]
        rows = bench.run(cases)
        checks = [Check(f"{row.what}: seconds", _SECONDS, False, row.median("durable")) for row in rows]
        size = over(rows[0].median("written"), extents)
        checks.append(
            Check("bytes of an extent beside its digest", _BYTES, False, None if size is None else size - _DIGEST)
        )
        title = f"A manifest of {extents:,} extents"
        return bench.result("manifest", title, checks, tensors=tensors, extents=extents)


def _case(bench: Bench, what: str, task: str, **options: int) -> Case:
    return Case(Row("", OURS, what), lambda _: bench.team().measure(task, **options), ours=True)
