"""A store served as a hub: throughput, latency and memory, compared with static files."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Case
from benchmarks.measure import Measured
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Bench, Options
from benchmarks.tasks.serving import CODED, RAW, STATIC

_USUAL = 1 << 30
_CLIENTS = (1, 8)


def serve(options: Options) -> ScenarioResult:
    """Serve one weight file from the page cache.

    The same ASGI server and framework serve the exported folder as static files.
    """
    with Bench(options) as bench:
        folder, size = bench.place(), options.size_or(_USUAL)
        try:
            nbytes = bench.team().call("serving:make", folder=folder, size=size)[0]
            cases = [
                _case(bench, who, what, folder=folder, nbytes=nbytes, clients=clients)
                for clients in _CLIENTS
                for who, what in ((OURS, RAW), (OURS, CODED), (STATIC, ""))
            ]
            rows = bench.run(cases, warm_up=0)
        finally:
            bench.team().call("storing:delete", folder=folder)
        return bench.result("serve", "Files that are made while they are sent", _checks(rows), bytes=nbytes)


def _case(bench: Bench, who: str, what: str, **job: Any) -> Case:
    def run(_: int) -> Measured:
        return bench.team().measure("serving:fetch", who=what or who, **job)

    clients = job["clients"]
    return Case(Row(_group(clients), who, what, job["nbytes"] * clients), run, ours=who == OURS)


def _group(clients: int) -> str:
    return f"{clients} client{'s' if clients > 1 else ''}"


def _checks(rows: list[Row]) -> list[Check]:
    found = {(row.group, row.what or row.who): row for row in rows}
    checks = []
    for clients in _CLIENTS:
        group = _group(clients)
        static = found[group, STATIC]
        for what in (RAW, CODED):
            ours = found[group, what]
            speed = over(static.median("durable"), ours.median("durable"))
            checks.append(Check(f"{group}, {what}: of the speed of static files", 0.8, True, speed))
            memory = over(ours.median("memory"), 1 << 20)
            checks.append(Check(f"{group}, {what}: MiB of the server at its peak", 286.0, False, memory))
            checks.append(Check(f"{group}, {what}: seconds to the first byte", 0.1, False, ours.median("first byte")))
    return checks
