"""Saves and loads in a bucket, compared with raw clients and with other libraries on the same server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.environments import Absent
from benchmarks.harness import Case
from benchmarks.measure import Measured
from benchmarks.peers.base import FROM_BUCKET, TO_BUCKET, Peer, Setting
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Bench, Options
from benchmarks.scenarios.loading import loads
from benchmarks.scenarios.saving import time_of
from benchmarks.teams import Team

_STATE = "state"
_USUAL = 1 << 29
_SAVE, _LOAD = "save", "load"
_PUTS, _GETS = (4, 8), (16, 32)
_CLIENTS = ("s3fs", "obstore")


def s3(options: Options) -> ScenarioResult:
    """Use one process and one server (SeaweedFS), which share the cores of the same machine."""
    with Bench(options) as bench:
        size = bench.make_state(_STATE, "model", options.size_or(_USUAL))
        server = bench.team().call("buckets:start", folder=bench.place(), state=_STATE)[0]
        bench.in_new_teams("buckets:reach", **server)
        try:
            loaded = loads(bench, FROM_BUCKET, size, groups=(_LOAD,))
            rows = bench.run([*_ours(bench, size), *_saves(bench, size), *loaded, *_raw(bench, size)])
        finally:
            bench.team().call("buckets:stop")
        return bench.result("s3", "A bucket on a server of this machine", _checks(rows), bytes=size)


def _checks(rows: list[Row]) -> list[Check]:
    plain = next(row for row in rows if row.group == _LOAD and row.who == OURS and row.what)
    verified = next(row for row in rows if row.group == _LOAD and row.who == OURS and not row.what)
    return [
        Check("save: s3fs / casckpt", 0.9, True,
              over(time_of(rows, "s3fs", group=_SAVE), time_of(rows, OURS, group=_SAVE))),
        Check("load, verified: s3fs / casckpt", 0.9, True,
              over(time_of(rows, "s3fs", group=_LOAD), verified.median("durable"))),
        Check("load, not verified: s3fs / casckpt", 0.9, True,
              over(time_of(rows, "s3fs", group=_LOAD), plain.median("durable"))),
        Check("bytes read / bytes of the state", 1.01, False, over(plain.median("asked"), plain.nbytes)),
    ]  # fmt: skip


def _ours(bench: Bench, size: int) -> Sequence[Case]:
    def run(task: str, **arguments: object) -> Callable[[int], Measured]:
        return lambda _: bench.team().measure(task, state=_STATE, **arguments)

    return [
        Case(Row(_SAVE, OURS, "", size), run("buckets:save"), ours=True),
        Case(Row(_LOAD, OURS, "", size, verified=True), run("buckets:load", verify=True), ours=True),
        Case(Row(_LOAD, OURS, "verify=no", size, verified=False), run("buckets:load", verify=False), ours=True),
    ]


def _saves(bench: Bench, size: int) -> Sequence[Case]:
    """Save with other libraries. Each save is checked by a load and then removed."""

    def run(peer: type[Peer], setting: Setting, team: Team, _: int) -> Measured:
        job: dict[str, Any] = {"peer": peer.name, "setting": setting, "state": _STATE, "folder": bench.place()}
        measured = team.measure("storing:save", **job)
        team.call("storing:load", **job)
        bench.team().call("buckets:remove", folder=job["folder"])
        return measured

    return bench.cases(TO_BUCKET, run, group=_SAVE, nbytes=size)


def _raw(bench: Bench, size: int) -> Sequence[Case]:
    def run(task: str, client: str, parallel: int) -> Callable[[int], Measured]:
        def runner(_: int) -> Measured:
            if not bench.team().call("buckets:has", client=client)[0]:
                raise Absent(f"{client} is not installed")
            return bench.team().measure(task, state=_STATE, client=client, parallel=parallel)

        return runner

    return [
        Case(Row(group, client, f"{parallel} {what} in flight", size, limit=True), run(task, client, parallel))
        for group, task, what, choices in (
            (_SAVE, "buckets:raw_put", "puts", _PUTS),
            (_LOAD, "buckets:raw_get", "ranges", _GETS),
        )
        for client in _CLIENTS
        for parallel in choices
    ]
