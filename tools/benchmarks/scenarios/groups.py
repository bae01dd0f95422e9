"""The exchanges of many ranks, without any data."""

from __future__ import annotations

from benchmarks.harness import Case
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Bench, Options

_PROCESSES = (4, 32, 256)
_SIMULATED = (1_000, 4_000, 10_000)
_ROUNDS = 3
_CREATED, _EXCHANGE = 10.0, 2.0  # seconds
_SOCKETS = 3.0  # per rank: one that listens, and two for its connection to rank 0


def ranks(options: Options) -> ScenarioResult:
    """Let processes create a group and exchange messages, and let rank 0 exchange messages with simulated ranks."""
    processes, simulated = ((3,), (50,)) if options.quick else (_PROCESSES, _SIMULATED)
    options.rounds = min(options.rounds, _ROUNDS)
    with Bench(options) as bench:

        def case(group: str, what: str, task: str, count: int) -> Case:
            return Case(Row(group, OURS, what), lambda _: bench.team().measure(task, ranks=count), ours=True)

        cases = [case(f"{n:,} processes", "group and first exchange", "groups:processes", n) for n in processes]
        cases += [case(f"{n:,} simulated ranks", "exchange on rank 0", "groups:simulated", n) for n in simulated]
        rows = bench.run(cases)
        real, last = rows[len(processes) - 1], rows[-1]
        sockets = over(real.median("sockets"), processes[-1])
        checks = [
            Check(f"{real.group}: seconds", _CREATED, False, real.median("durable")),
            Check(f"{real.group}: seconds of a later exchange", _EXCHANGE, False, real.median("exchange")),
            Check(f"{real.group}: sockets per rank", _SOCKETS, False, sockets),
            Check(f"{last.group}: seconds", _EXCHANGE, False, last.median("durable")),
        ]  # fmt: skip
        return bench.result("ranks", "Exchanges of many ranks", checks)
