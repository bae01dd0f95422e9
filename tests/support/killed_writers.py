"""A process that saves, copies, or collects garbage in one run, and is killed again and again.

``python -m tests.support.killed_writers FOLDER ROLE KILLS``, where the role is 0 to 3 (a writer, whose clock is ten
minutes ahead of the one before), "copy" (from FOLDER/source) or "gc".
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from casckpt.errors import Conflict, NotFound, Revoked
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from tests.support.saves import cells

APART = 600 * 10**6
RUN = "run"


def write(store: Store, host: int, draw: random.Random) -> None:
    """Save a step of one's own, and sometimes forget or restore one."""
    step = 4 * (time.time_ns() // 10**6 % 10**10) + host
    store.save({"w": cells(1, seed=step % 10**6)}, run=RUN, step=step)
    ours = [one for one in store.checkpoints(RUN, forgotten=True) if one.step % 4 == host]
    chosen = draw.choice(ours or [None])
    if chosen is not None and draw.random() < 0.3:
        store.restore(chosen) if chosen.forgotten else store.forget(chosen)


def copy(store: Store, source: Store, draw: random.Random) -> None:
    """Copy some checkpoints. They keep the times at which they were saved."""
    there = {one.id for one in store.checkpoints(RUN, forgotten=True)}
    left = [one for one in source.checkpoints(RUN) if one.id not in there]
    source.copy_to(store, *draw.sample(left, min(5, len(left))))


def collect(store: Store, draw: random.Random) -> None:
    """Revoke what seems dead, and delete. Live writers are hit, too."""
    store.gc(min_age=0, wait="1s", revoke_after=draw.choice(["0s", "1s", "1h"]))


def work(folder: Path, role: str) -> None:
    """Do the same until killed."""
    store, draw = open_store(folder / "store"), random.Random(os.getpid())
    act: Callable[[], None]
    if role == "copy":
        act = partial(copy, store, open_store(folder / "source"), draw)
    elif role == "gc":
        act = partial(collect, store, draw)
    else:
        store.repository.clock = lambda: time.time_ns() // 1000 + int(role) * APART
        act = partial(write, store, int(role), draw)
    while True:
        with suppress(Conflict, Revoked, NotFound):  # others end the same transactions and checkpoints
            act()


def main(folder: Path, role: str, kills: int) -> None:
    """Start the worker, and kill it after a random time."""
    draw = random.Random(role)
    for _ in range(kills):
        pid = os.fork()
        if pid == 0:
            work(folder, role)
        time.sleep(draw.uniform(0.05, 0.6))
        os.kill(pid, signal.SIGKILL)
        if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
            raise SystemExit(f"{role} ended by itself")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
