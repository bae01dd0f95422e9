"""Many small tensors."""

from __future__ import annotations

from benchmarks.harness import Case
from benchmarks.peers.base import LOAD
from benchmarks.results import OURS, Check, Row, ScenarioResult, best, median_of, over
from benchmarks.scenarios.base import Bench, Options
from benchmarks.scenarios.loading import WARM, loads
from benchmarks.scenarios.saving import full_saves, steps, time_of
from benchmarks.values import specs

_STATE = "state"
SAVES = "save"
_AGAIN = "save again"
_EXPERTS = {"experts": 300 << 20, "large experts": 1600 << 20}


def small(options: Options) -> ScenarioResult:
    """Measure saves and warm loads of many small tensors. `--size` has no effect."""
    count = 500 if options.quick else 10_000
    with Bench(options) as bench:
        size = bench.make_state(_STATE, "small", count << 10)
        saves = _packed(full_saves(bench, size))
        for case in saves:
            case.row.group = SAVES
        reads = _packed(loads(bench, LOAD, size, groups=(WARM,)))
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


def experts(options: Options) -> ScenarioResult:
    """Measure the names of a mixture of experts: 300,000 tensors of 1 KiB, and 100,000 of 16 KiB with ``full``.

    Without ``full``, a tenth of these numbers. A peer runs with one setting only: `small` measures all of them.
    `--size` has no effect.
    """
    share = 1000 if options.quick else 1 if options.full else 10
    checks, total = list[Check](), 0
    with Bench(options) as bench:
        for kind, nbytes in _EXPERTS.items():
            size = bench.make_state(kind, kind, nbytes // share)
            name, tensors = f"{kind}, ", len(specs(kind, nbytes // share))
            parts = {
                SAVES: _one_of_each(full_saves(bench, size, state=kind)),
                _AGAIN: steps(bench, size, state=kind),
                LOAD: _one_of_each(loads(bench, LOAD, size, state=kind, groups=(WARM,))),
            }
            for part, cases in parts.items():
                for case in cases:
                    case.row.group = name + part
            rows = bench.run([case for cases in parts.values() for case in cases])
            again = time_of(rows, OURS, "cpu", group=name + _AGAIN)
            each = None if again is None else again / tensors * 1e6
            checks += [
                Check(f"{name}save: DCP / casckpt", 8.0, True, _ratio(rows, "dcp", name + SAVES)),
                Check(f"{name}load: DCP / casckpt", 8.0, True, _ratio(rows, "dcp", name + LOAD)),
                Check(f"{name}CPU of an unchanged save, microseconds for each tensor", 8.0, False, each),
            ]
            total += size
        title = "The tensors of a mixture of experts"
        return bench.result("experts", title, checks, bytes=total)


def _packed(cases: list[Case]) -> list[Case]:
    """Leave out Orbax with a folder for each tensor, which its documentation advises only for few tensors."""
    return [case for case in cases if "ocdbt=no" not in case.row.what]


def _one_of_each(cases: list[Case]) -> list[Case]:
    first = {case.row.who: case for case in reversed(cases)}
    return [case for case in cases if case.ours or case is first[case.row.who]]


def _ratio(rows: list[Row], who: str, group: str) -> float | None:
    return over(time_of(rows, who, group=group), time_of(rows, OURS, group=group))
