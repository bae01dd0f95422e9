"""The gloo group of many ranks: processes on this machine, and simulated ranks with which rank 0 exchanges messages."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from threading import Lock
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Measured, Meter
from benchmarks.tasks.storing import Skipped
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    from benchmarks.worker import Here

_EXCHANGES = 20
_MESSAGE = b"m" * 900  # bytes; more than a rank sends when a save begins
_TIMEOUT = timedelta(seconds=300)
_BYTES_OF_A_PROCESS = 40 << 20  # beyond those that it shares with its parent


def processes(here: Here, ranks: int) -> Measured:
    """Fork ``ranks`` processes, which create a group and exchange messages. Return the time of the slowest process.

    ``exchange``: the time of a later exchange on rank 0. ``sockets``: of all processes, including those that listen.
    """
    import psutil
    import torch  # noqa: F401 - before the fork, so that its memory is shared
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - makes the backend "fake", which never talks

    import casckpt.ranks.ranks  # noqa: F401 - likewise

    if ranks * _BYTES_OF_A_PROCESS > psutil.virtual_memory().available:
        raise Skipped("the processes would not fit into memory")
    port, children = _free_port(), list[tuple[int, int]]()
    for rank in range(ranks):
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            _run(rank, ranks, port, write)
        os.close(write)
        children.append((pid, read))
    found = [_outcome(*child) for child in children]
    seconds = max(one["seconds"] for one in found)
    extra = {"exchange": found[0]["exchange"], "sockets": float(sum(one["sockets"] for one in found))}
    return Measured(seconds, seconds, sum(one["cpu"] for one in found), extra=extra)


def _run(rank: int, ranks: int, port: int, write: int) -> None:
    """Work as one rank, and end this process."""
    status = 1
    try:
        os.write(write, json.dumps(_rank(rank, ranks, port)).encode())
        status = 0
    finally:
        os._exit(status)


def _outcome(pid: int, read: int) -> dict[str, float]:
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    if not text:
        raise WrongBytes("a rank failed")
    found: dict[str, float] = json.loads(text)
    return found


def _rank(rank: int, ranks: int, port: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, though not in its __all__

    from casckpt.ranks.ranks import open_ranks

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, timeout=_TIMEOUT)
    dist.init_process_group("fake", store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    if store.add("here", 1) == ranks:
        store.set("all here", "")
    store.wait(["all here"], _TIMEOUT)
    sockets, begun, cpu = _sockets(), time.perf_counter(), time.process_time()
    group = open_ranks()

    def exchange() -> float:
        start = time.perf_counter()
        if group.exchange(lambda: _MESSAGE, lambda messages: [len(messages)] * ranks) != ranks:
            raise WrongBytes("a message is missing")
        return time.perf_counter() - start

    exchange()
    found = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
    found |= {"sockets": float(_sockets() - sockets), "exchange": median(exchange() for _ in range(_EXCHANGES))}
    store.set(f"done {rank}", "")
    if rank == 0:  # it hosts the store
        store.wait([f"done {other}" for other in range(ranks)], _TIMEOUT)
    return found


def _sockets() -> int:
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread closed it
            found += "socket:" in os.readlink(one)
    return found


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def simulated(here: Here, ranks: int) -> Measured:
    """Exchange messages as rank 0 of ``ranks`` ranks, over a group without a network.

    ``read`` and ``written``: the bytes of the messages.
    """
    from torch.distributed import HashStore  # type: ignore[attr-defined] # public, though not in its __all__

    from casckpt.ranks.messages import Message
    from casckpt.ranks.ranks import GroupRanks
    from casckpt.ranks.wire import Wire, pack, to_frames

    def decide(messages: list[bytes]) -> list[int]:
        return [sum(map(len, messages))] * ranks

    step = f"{decide.__module__}.{decide.__qualname__}"
    group = _Memory([to_frames(pack(Message(_MESSAGE, rank=rank, step=step)))[0] for rank in range(ranks)])
    leader = GroupRanks.__new__(GroupRanks)
    leader.rank, leader.size, leader.exchanges, leader._dead, leader._lock = 0, ranks, 0, None, Lock()
    leader._wire = Wire(group, HashStore(), 0, ranks, timeout=_TIMEOUT, patience=_TIMEOUT)
    meter = Meter()
    if leader.exchange(lambda: _MESSAGE, decide) != ranks * len(_MESSAGE):
        raise WrongBytes("a message is missing")
    measured = meter.stop()
    measured.read, measured.written = group.received, group.sent
    measured.extra = {"messages": float(group.messages)}
    return measured


class _Memory:
    """The counterpart of a gloo group. It holds the messages of all ranks, and is its own work."""

    def __init__(self, frames: list[Any]) -> None:
        self._frames = frames
        self.received = self.sent = self.messages = 0

    def recv(self, tensors: list[Any], rank: int, tag: int) -> _Memory:
        """Fill the tensor with the rank's message."""
        tensors[0].copy_(self._frames[rank])
        self.received, self.messages = self.received + tensors[0].nbytes, self.messages + 1
        return self

    def send(self, tensors: list[Any], rank: int, tag: int) -> _Memory:
        """Count the bytes."""
        self.sent, self.messages = self.sent + tensors[0].nbytes, self.messages + 1
        return self

    def wait(self, timeout: timedelta) -> None:
        """Return, because the work is done."""
