"""Puts that are killed at any system call, or by a parent that reads their output.

``python -m tests.support.crash STRIDE FOLDER`` forks one child for each combination of a way to create a file, a
size, and a system call (or every STRIDE-th call). The child kills itself right before or right after that call.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from casckpt.storage.buffers import AlignedBuffer
from casckpt.storage.local.newfile import Naming
from casckpt.storage.local.store import LocalStore
from tests.support.local import supports
from tests.support.tally import tally

KEY = "objects/x/a"
SIZES = (5, (2 << 20) + 17)  # a buffered write, and a direct write with a tail
CALLS = ("open", "close", "mkdir", "pwrite", "ftruncate", "fsync", "link", "unlink", "stat")


def content(size: int, seed: int) -> bytes:
    """Return the bytes that the killed put writes."""
    return np.random.default_rng(seed).bytes(size)


def put(store: LocalStore, key: str, data: bytes) -> None:
    """Put ``data`` from an aligned buffer."""
    with AlignedBuffer(len(data)) as buffer:
        buffer.view[:] = data
        store.put(key, buffer.view)


def _kill_at(step: int) -> None:
    steps = itertools.count(1)

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if next(steps) == step:
                tally("SIGKILL at a system call")
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*args, **kwargs)
            finally:
                if next(steps) == step:
                    tally("SIGKILL at a system call")
                    os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))


def _survives(folder: Path, way: Naming, size: int, step: int) -> bool:
    """Report whether a put that should be killed at ``step`` completed before that step."""
    data = content(size, step)
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    store = LocalStore(folder / f"{way.name}-{size}-{step}")
    store._files.way = way
    _kill_at(step)
    put(store, KEY, data)
    os._exit(0)


def steps(folder: Path, stride: int) -> None:
    """Kill a put at each of its steps, or at every ``stride``-th step. The steps differ for each way and size."""
    ways = [way for way in Naming if supports(way, folder)]
    for number, (way, size) in enumerate(itertools.product(ways, SIZES)):
        for step in itertools.count(1 + number % stride, stride):
            if _survives(folder, way, size, step):
                break


def endless(folder: Path, tell: Connection) -> None:
    """Put objects until this process is killed. Tell the parent the number of each put before it begins."""
    store = LocalStore(folder)
    for number in itertools.count():
        data = content((3 << 20) + number, number)
        tell.send(number)
        put(store, f"objects/x/{number}", data)


if __name__ == "__main__":
    steps(Path(sys.argv[2]), int(sys.argv[1]))
