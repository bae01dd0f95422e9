"""Processes on a full disk that are killed while they free space, at storage calls and at system calls.

For each point, ``python -m tests.support.killed_when_full SCENE FOLDER POINTS SEED`` copies a store with some
checkpoints, on a disk that has no inode left, and kills the process that runs the scene there.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from casckpt.errors import StorageError
from casckpt.storage.local import store as local_store
from casckpt.storage.local import syscalls
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.killed_saves import KillingStore, Strike, open_folder, wrap_system_calls
from tests.support.killed_thins import COUNT, DROP, sweep
from tests.support.repositories import wait_for_clean_up
from tests.support.saves import cells

ROOM = 5
"""Inodes for a save: of its transaction, its announcement, their folders, and one object. It needs more."""


def state(step: int) -> dict[str, Any]:
    """Return a state whose manifest is larger than a prepared file."""
    few = {f"{number:03}": torch.full((3,), step + number) for number in range(60)}
    return {
        "model": {"emb": cells(20, seed=1), "head": cells(9, seed=step), **few},
        "optim": {"m": cells(200, seed=step)},
    }


def _used(folder: Path) -> int:
    found = set[int]()
    for above, folders, files in os.walk(folder):
        for name in (*folders, *files):
            try:
                found.add(os.lstat(os.path.join(above, name)).st_ino)
            except FileNotFoundError:
                continue
    return len(found)


def limit(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Put the store of a point on a disk with as many inodes as the file "inodes" says."""
    capacity = int((folder / "inodes").read_text())

    def free() -> int:
        return max(0, capacity - _used(folder / "store"))

    def limited(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not free():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **kwargs)

        return wrapped

    for name in ("open_unnamed", "open_named"):
        patch.setattr(syscalls, name, limited(getattr(syscalls, name)))
    patch.setattr(os, "mkdir", limited(os.mkdir))
    patch.setattr(local_store, "_FREEING_SMALL", 0.0)
    patch.setattr(local_store, "_FREEING", 0.0)  # here, space is available as soon as it is free


def _save(store: Store) -> None:
    try:
        store.save(state(COUNT), step=COUNT, threads=2)
    except StorageError as error:
        if not error.full:
            raise
    else:
        raise SystemExit("there was room")
    wait_for_clean_up()


def _gc(store: Store) -> None:
    store.gc(keep_last=1, min_age=0, wait=0)


def _thin(store: Store) -> None:
    store.thin(drop=DROP, keep_last=1)
    store.gc(min_age=0, wait=0)


SCENES: dict[str, Callable[[Store], None]] = {"save": _save, "unprepared save": _save, "gc": _gc, "thin": _thin}


def _act(folder: Path, way: str, at: int, counted: Path | None = None, *, scene: str) -> None:
    strike = Strike(at if way == "calls" else 0)
    limit(folder, pytest.MonkeyPatch())  # of this process only
    store = open_folder(folder, KillingStore(LocalStore(folder / "store"), strike))
    count = wrap_system_calls(at) if way == "syscalls" else lambda: strike.count
    SCENES[scene](store)
    if counted is not None:
        counted.write_text(str(count()))


def _fill(folder: Path, *, scene: str) -> None:
    store = open_folder(folder)
    for step in range(COUNT):
        store.save(state(step), step=step)
    if scene == "unprepared save":
        for path in (folder / "store" / ".spare").iterdir():
            path.unlink()
    room = ROOM if scene in ("save", "unprepared save") else 0
    (folder / "inodes").write_text(str(_used(folder / "store") + room))


if __name__ == "__main__":
    torch.set_num_threads(1)  # no threads before forking
    scene, folder, points, seed = sys.argv[1:]
    sweep(Path(folder), int(points), int(seed), fill=partial(_fill, scene=scene), act=partial(_act, scene=scene))
