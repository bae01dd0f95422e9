"""Loads by replicas on two hosts, which are network namespaces behind one slow bucket."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from tempfile import mkdtemp

from benchmarks.harness import Case
from benchmarks.measure import Measured
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Absent, Bench, Options
from benchmarks.teams import Team

_HOSTS, _REPLICAS = 2, (2, 4)
_USUAL = 512 << 20
_BUCKET, _LINK = 800, 2000  # Mbit/s of the bucket to all hosts, and of each host in each direction
_NET, _BRIDGE = "10.213.7", "casckpt-br"
_MEMORY = "/dev/shm"  # noqa: S108 - a new folder below it
SHARED, ALONE = "", "each host reads for itself"


def hosts(options: Options) -> ScenarioResult:
    """Only root can create namespaces, so for other users, the rows state this reason."""
    with Bench(options) as bench, _network() as why:
        rows = _measured(bench, why)
        checks = [
            check
            for count in _REPLICAS
            for shared, alone in [(_row(rows, count, SHARED), _row(rows, count, ALONE))]
            for check in (
                Check(f"{_group(count)}: time / the same if each host reads for itself", 0.6, False,
                      over(shared.median("durable"), alone.median("durable"))),
                Check(f"{_group(count)}: bytes read / bytes of the state", 1.01, False,
                      over(shared.median("asked"), shared.nbytes)),
            )
        ]  # fmt: skip
        return bench.result("hosts", "Replicas on two hosts behind a slow bucket", checks,
                            bytes=options.size_or(_USUAL), bucket_mbit=_BUCKET, link_mbit=_LINK)  # fmt: skip


def _measured(bench: Bench, why: str) -> list[Row]:
    size = bench.options.size_or(_USUAL)
    if why:
        return bench.run([Case(Row(_group(n), OURS, what, size), _absent(why), ours=True) for n, what in _rows()])
    memory = mkdtemp(prefix="bench-", dir=_MEMORY)
    teams = {count: _team(bench.options, count) for count in _REPLICAS}
    try:
        [place] = bench.team().call("hosts:start", folder=bench.place(), size=size, address=f"{_NET}.1")
        for team in teams.values():
            team.call("hosts:prepare", memory=memory, hosts=_HOSTS, size=size, **place)

        def run(count: int, what: str) -> Callable[[int], Measured]:
            return lambda _: teams[count].measure("hosts:load", shared=what == SHARED)

        return bench.run([Case(Row(_group(n), OURS, what, size), run(n, what), ours=True) for n, what in _rows()])
    finally:
        bench.team().call("hosts:stop")
        for team in teams.values():
            team.close()
        shutil.rmtree(memory)


def _rows() -> Iterator[tuple[int, str]]:
    return ((count, what) for count in _REPLICAS for what in (SHARED, ALONE))


def _group(count: int) -> str:
    return f"{count} replicas on {_HOSTS} hosts"


def _row(rows: Sequence[Row], count: int, what: str) -> Row:
    return next(row for row in rows if (row.group, row.what) == (_group(count), what))


def _absent(why: str) -> Callable[[int], Measured]:
    def run(_: int) -> Measured:
        raise Absent(why)

    return run


def _team(options: Options, count: int) -> Team:
    """Start a team whose ranks are in the namespaces in turn."""

    def inside(rank: int) -> Sequence[str]:
        return ("ip", "netns", "exec", _name(rank % _HOSTS), "env", "GLOO_SOCKET_IFNAME=eth0")

    return Team(options.folder, ranks=count, quick=options.quick, inside=inside)


def _name(host: int) -> str:
    return f"casckpt-{host}"


@contextmanager
def _network() -> Iterator[str]:
    """Create the namespaces and shape their links. Yield the reason if this is not possible."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        yield "only root can create network namespaces, with ip and tc"
        return
    try:
        _create()
        yield ""
    finally:
        for host in range(_HOSTS):
            _call("ip", "netns", "delete", _name(host), check=False)
        _call("ip", "link", "delete", _BRIDGE, check=False)


def _create() -> None:
    _call("ip", "link", "add", _BRIDGE, "type", "bridge")
    _call("ip", "address", "add", f"{_NET}.1/24", "dev", _BRIDGE)
    _call("ip", "link", "set", _BRIDGE, "up")
    _shape(_BRIDGE, _BUCKET)  # bytes between hosts do not pass through the bridge's own device
    for host in range(_HOSTS):
        name, near = _name(host), f"casckpt-v{host}"
        inside = ("ip", "netns", "exec", name)
        _call("ip", "netns", "add", name)
        _call("ip", "link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", name)
        _call("ip", "link", "set", near, "master", _BRIDGE, "up")
        _call(*inside, "ip", "address", "add", f"{_NET}.{host + 2}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _call(*inside, "ip", "link", "set", device, "up")
        _shape(near, _LINK)
        _shape("eth0", _LINK, inside)


def _shape(device: str, rate: int, inside: Sequence[str] = ()) -> None:
    _call(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf",
          "rate", f"{rate}mbit", "burst", "512kb", "latency", "50ms")  # fmt: skip


def _call(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=not check)
