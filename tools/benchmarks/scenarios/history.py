"""The storage requests of a save do not depend on whether its run has had 100 saves before or 100,000."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Case
from benchmarks.measure import Measured
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Bench, Options
from benchmarks.tasks.history import BUCKET, CLOCKS, COPIES, FOLDER, PLAIN, RESTORE

_FEW, _MANY, _FULL, _QUICK = 100, 10_000, 100_000, 300
_SLOWER = 1.2
_HANDFUL = 8
_COUNTS = ("requests", "names", "nbytes")


def history(options: Options) -> ScenarioResult:
    """Count requests, and the names and bytes in listings. The bucket is a folder that reports itself as remote."""
    many = _QUICK if options.quick else _FULL if options.full else _MANY
    copies = 20 if options.quick else 1000
    with Bench(options) as bench:
        folder = bench.place()
        cases = [
            _case(bench, folder, copies, where=where, case=case, length=length)
            for where in (FOLDER, BUCKET)
            for case in (PLAIN, CLOCKS, COPIES, RESTORE)
            for length in (_FEW, many)
        ]
        cases += [_latest(bench, where, many, folder) for where in (FOLDER, BUCKET)]
        try:
            rows = bench.run(cases)
        finally:
            bench.team().call("history:drop", folder=folder)
        return bench.result("history", f"Save 101, and save {many + 1:,}", _checks(rows), saves=many + 1, copies=copies)


def _case(bench: Bench, folder: str, copies: int, **about: Any) -> Case:
    case, length, built = about["case"], about["length"], list[bool]()

    def run(_: int) -> Measured:
        if not built:
            bench.team().call("history:build", folder=folder, **about)
            built.append(True)
        return bench.team().measure("history:save", copies=copies, **about)

    what = f"save {length + 1:,}" + (f", {case}" if case else "")
    return Case(Row(about["where"], OURS, what), run, ours=True)


def _latest(bench: Bench, where: str, length: int, folder: str) -> Case:
    what = f"latest on a new host, under {length:,} commits of other runs"
    return Case(
        Row(where, OURS, what),
        lambda _: bench.team().measure("history:latest", where=where, length=length, folder=folder),
        ours=True,
    )


def _checks(rows: list[Row]) -> list[Check]:
    """Check for each pair of saves that the counts are equal and the times are similar."""
    checks = []
    saves = [row for row in rows if row.what.startswith("save")]
    for few, many in zip(saves[::2], saves[1::2], strict=True):
        name = f"{many.group}, {many.what}"
        for count in _COUNTS:
            more = (many.median(count) or 0) - (few.median(count) or 0)
            checks.append(Check(f"{name}: {count} more than save 101", 0, False, more))
        ratio = over(many.median("durable"), few.median("durable"))
        checks.append(Check(f"{name}: time / that of save 101", _SLOWER, False, ratio))
    looks = [row for row in rows if row.what.startswith("latest")]
    return [
        *checks,
        *(Check(f"{row.group}, {row.what}: requests", _HANDFUL, False, row.median("requests")) for row in looks),
    ]
