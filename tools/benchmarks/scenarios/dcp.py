"""Saves and loads through torch.distributed.checkpoint: casckpt's storage writer and reader compared with DCP's."""

from __future__ import annotations

from benchmarks.peers.base import DCP_LOAD, DCP_PART, DCP_SAVE
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Bench, Options
from benchmarks.scenarios.loading import COLD, WARM, excess, loads, our_row, our_time, read_factor
from benchmarks.scenarios.saving import full_saves, time_of

_USUAL = 3 << 29  # 1.5 GiB
_SAVE, _LOAD, _PART = "save", "load", "1/8"


def through_dcp(options: Options) -> ScenarioResult:
    """Measure a full durable save, full loads, and loads of an eighth of every tensor along its first dimension."""
    with Bench(options) as bench:
        size = bench.make_state("state", "model", options.size_or(_USUAL))
        cases = full_saves(bench, size, work=DCP_SAVE)
        for case in cases:
            case.row.group = _SAVE
        for work, name, nbytes in ((DCP_LOAD, _LOAD, size), (DCP_PART, _PART, size // 8)):
            for case in loads(bench, work, nbytes):
                case.row.group = f"{name}, {case.row.group}"
                cases.append(case)
        rows = bench.run(cases)
        return bench.result("dcp", "Through torch.distributed.checkpoint", _checks(rows), bytes=size)


def _checks(rows: list[Row]) -> list[Check]:
    def dcp(group: str) -> float | None:
        return time_of(rows, "dcp", group=group)

    warm, cold, part = f"{_LOAD}, {WARM}", f"{_LOAD}, {COLD}", f"{_PART}, {WARM}"
    saves = over(dcp(_SAVE), time_of(rows, OURS, group=_SAVE))
    plain, checked = (our_row(rows, part, verify=verify) for verify in (False, True))
    return [
        Check("save: FileSystemWriter / casckpt", 1.7, True, saves),
        Check("warm load: FileSystemReader / casckpt, verified", 1.8, True,
              over(dcp(warm), our_time(rows, warm, verify=True))),
        Check("cold load: FileSystemReader / casckpt, verified", 1.7, True,
              over(dcp(cold), our_time(rows, cold, verify=True))),
        Check("1/8: bytes read / bytes wanted, not verified", 1.05, False, read_factor(plain)),
        Check("1/8: cells of 1 MiB read beyond what is wanted, for each tensor, verified", 2.0, False, excess(checked)),
    ]  # fmt: skip
