"""Thinning and the gc that follows it, killed at storage calls and at system calls, in separate processes.

For each point, ``python -m tests.support.killed_thins FOLDER POINTS SEED`` copies a store with some checkpoints, and
kills the process that thins them.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from casckpt.storage.local.store import LocalStore
from tests.support.killed_saves import KillingStore, Strike, forked, open_folder, wrap_system_calls
from tests.support.saves import cells

WAYS = ("calls", "syscalls")
COUNT = 3
DROP = "optim.*"


class Act(Protocol):
    """What is killed, at step ``at`` unless that is 0. ``counted``: a file that receives the number of steps."""

    def __call__(self, folder: Path, way: str, at: int, counted: Path | None = None) -> None: ...


def state(step: int) -> dict[str, Any]:
    """Return a state whose optimizer is large enough to have its own blobs."""
    return {
        "model": {"emb": cells(20, seed=1), "head": cells(9, seed=step)},
        "optim": {"m": cells(260, seed=50 + step)},
    }


def _thin(folder: Path, way: str, at: int, counted: Path | None = None) -> None:
    """Thin all but the last checkpoint, and collect. Kill the process at step ``at`` unless ``at`` is 0."""
    strike = Strike(at if way == "calls" else 0)
    store = open_folder(folder, KillingStore(LocalStore(folder / "store"), strike))
    count = wrap_system_calls(at) if way == "syscalls" else lambda: strike.count
    store.thin(drop=DROP, keep_last=1)
    store.gc(min_age=0, wait=0)
    if counted is not None:
        counted.write_text(str(count()))


def _total(folder: Path, act: Act, way: str) -> int:
    shutil.copytree(folder / "base", folder / "count")
    if forked(partial(act, folder / "count", way, 0, folder / "steps")):
        raise SystemExit("what was to be counted failed")
    shutil.rmtree(folder / "count")
    return int((folder / "steps").read_text())


def _fill(folder: Path) -> None:
    store = open_folder(folder)
    for step in range(COUNT):
        store.save(state(step), step=step)


def sweep(folder: Path, points: int, seed: int, *, fill: Callable[[Path], None] = _fill, act: Act = _thin) -> None:
    """Kill at ``points`` steps in each way, or at all of them if there are fewer."""
    draw = random.Random(seed)
    if forked(partial(fill, folder / "base")):
        raise SystemExit("the saves failed")
    for way in WAYS:
        every = range(1, _total(folder, act, way) + 1)
        for at in draw.sample(every, min(points, len(every))):
            point = folder / f"{way}-{at}"
            shutil.copytree(folder / "base", point)
            status = forked(partial(act, point, way, at))
            if os.WIFEXITED(status) and os.WEXITSTATUS(status):
                raise SystemExit(f"{point.name} failed by itself")


if __name__ == "__main__":
    torch.set_num_threads(1)  # no threads before forking
    sweep(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
