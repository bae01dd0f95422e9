"""The cost of in-memory updates from one RL version to the next, compared with complete loads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.harness import Case, Enough
from benchmarks.measure import Measured
from benchmarks.peers.base import Peer
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Bench, Options

_PLACES = {"a folder": 0.0, "a bucket, 300 MB/s": 300e6}
_STEPS, _FEW, _GIB = 24, 6, 1 << 30
_ONE, _ALL, _LEAST = "by one step", "a load of all", "hash and decode"
_MOVES = (_ONE, _ALL, _LEAST, "5 forward", "10 back")


def update(options: Options) -> ScenarioResult:
    """Save each version with ``compress="auto"``, update to it by one step, and load it. Compare all bytes."""
    with Bench(options) as bench:
        name = "quick" if options.quick else "rl"
        for peer in bench.ours():
            bench.team(peer.environment).call("deltas:make", folder=str(options.traces), name=name)
        steps, nbytes = _FEW if options.quick else _STEPS, options.size_or(_GIB)
        rows = bench.run(
            [case for where, rate in _PLACES.items() for peer in bench.ours()
             for case in _cases(bench, peer, where, name=name, nbytes=nbytes, steps=steps, rate=rate)],
            warm_up=0,
        )  # fmt: skip
        return bench.result("update", "From one version of RL to the next", list(_checks(rows)), "durable", steps=steps)


def _cases(bench: Bench, peer: type[Peer], where: str, *, nbytes: int, **arguments: Any) -> Iterator[Case]:
    """Return the cases. The first case performs all the work, and the others report its results."""
    team = bench.team(peer.environment)

    def run(what: str, number: int) -> Measured:
        if number:
            raise Enough
        if what != _ONE:
            return team.measure("updates:found", what=what)
        traces = str(bench.options.traces)
        return team.measure("updates:follow", folder=traces, place=bench.place(), nbytes=nbytes, **arguments)

    for what in _MOVES:
        yield Case(Row(where, peer.name, what, nbytes), partial(run, what), ours=peer.name == OURS)


def _checks(rows: list[Row]) -> Iterator[Check]:
    found = {(row.group, row.what): row for row in rows if row.who == OURS}
    for where, rate in _PLACES.items():
        one, whole, least = (found[where, what] for what in (_ONE, _ALL, _LEAST))
        if rate:  # a folder does not distinguish blobs
            yield Check(f"{where}: read / written by the save, worst", 1.1, False, one.median("worst/delta"))
        yield Check(
            f"{where}: time / that of a load", 0.05, False, over(one.median("durable"), whole.median("durable"))
        )
        yield Check(f"{where}: CPU / hash and decode", 1.0, False, over(one.median("cpu"), least.median("cpu")))
