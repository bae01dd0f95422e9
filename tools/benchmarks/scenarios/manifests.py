"""A manifest with a million extents, which rank 0 creates and every rank reads."""

from __future__ import annotations

from benchmarks.harness import Case
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Bench, Options

_SECONDS = 1.0
_BYTES = 60.0  # per extent, in addition to the digests of its cells
_DIGEST = 32
_RANKS = 8
_MANY, _PART_SECONDS, _PART = 1000, 0.1, 1 / 100


def manifest(options: Options) -> ScenarioResult:
    """Use 10,000 tensors that 100 ranks wrote.

    One of 8 ranks reads part of each tensor, and one of 1,000 ranks reads a few tensors.
    """
    tensors, shards, many = (40, 16, 20) if options.quick else (10_000, 100, _MANY)
    with Bench(options) as bench:
        extents = sum(bench.team().call("manifests:make", tensors=tensors, shards=shards, ranks=many))
        cases = [
            _case(bench, "encode", "manifests:encode"),
            _case(bench, "decode", "manifests:decode"),
            _case(bench, f"plan of one of {_RANKS} ranks", "manifests:plan", ranks=_RANKS),
            _case(bench, f"a part for one of {many:,} ranks", "manifests:reach", ranks=many),
        ]
        rows = bench.run(cases)
        checks = [Check(f"{row.what}: seconds", _SECONDS, False, row.median("durable")) for row in rows[:-1]]
        size = rows[0].median("written")
        each = over(size, extents)
        checks += [
            Check(f"{rows[-1].what}: seconds", _PART_SECONDS, False, rows[-1].median("durable")),
            Check("share of the manifest that reaches it", _PART, False, over(rows[-1].median("read"), size)),
            Check("bytes of an extent beside its digest", _BYTES, False, None if each is None else each - _DIGEST),
        ]
        title = f"A manifest of {extents:,} extents"
        return bench.result("manifest", title, checks, tensors=tensors, extents=extents)


def _case(bench: Bench, what: str, task: str, **options: int) -> Case:
    return Case(Row("", OURS, what), lambda _: bench.team().measure(task, **options), ours=True)
