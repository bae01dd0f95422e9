"""Saves that are killed, and saves during a gc, in processes forked from a process that has imported torch.

For each point, ``python -m tests.support.killed_saves sweep FOLDER POINTS SEED`` copies a store with one checkpoint
and kills the save of a second checkpoint: at storage calls, at system calls, or at random times. ``... race FOLDER
SAVES`` runs two processes that save and one that collects garbage, all in one store.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from casckpt.contents import manifests
from casckpt.errors import NotFound
from casckpt.format.keys import blob_key, manifest_key
from casckpt.history.commits import list_commits
from casckpt.repository.repository import Repository
from casckpt.storage.base import ObjectStore
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.announced import undecided
from tests.support.crash import CALLS
from tests.support.faulty import FaultyStore, Kind
from tests.support.saves import CELL, cells, same_state, trained
from tests.support.tally import tally

WAYS = ("calls", "syscalls", "timed")


def state(step: int) -> dict[str, Any]:
    """Return a state of several blobs. From step to step, tensors are identical, encoded against the old ones,
    or new."""
    return {
        "kept": cells(30, seed=1),
        "new": cells(30, seed=step),
        "told": trained(20, step),
        "part": {"x": torch.arange(step), "o": b"x" * 5000},
    }


def open_folder(folder: Path, storage: Any = None) -> Store:
    """Open the store of a point. The catalogue is next to the store."""
    store = Store(Repository(storage or LocalStore(folder / "store"), folder / "cache"))
    store.create(cell_bytes=CELL, blob_bytes=64 << 10)
    return store


class Strike:
    """Sends a signal to its own process at step number ``at``. 0 means never.

    ``of``: the kind of steps, for the tally.
    """

    def __init__(self, at: int, sends: signal.Signals = signal.SIGKILL, of: str = "the storage") -> None:
        self.at, self.sends, self.of, self.count = at, sends, of, 0
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            self.count += 1
            is_now = self.count == self.at
        if is_now:
            tally(f"{self.sends.name} at a call of {self.of}")
            os.kill(os.getpid(), self.sends)


class KillingStore(FaultyStore):
    """Kills or stops its process right before or right after a call. Both of these points are steps of ``strike``."""

    def __init__(self, inner: ObjectStore, strike: Strike) -> None:
        super().__init__(inner)
        self.strike = strike

    @contextmanager
    def faults(self, method: str, key: str) -> Iterator[set[Kind]]:
        self.strike.step()
        yield set()
        self.strike.step()


def _save(folder: Path, way: str, at: float) -> int:
    """Save the second step. Kill the save at step ``at`` unless ``at`` is 0. Return the number of steps."""
    strike = Strike(int(at) if way == "calls" else 0)
    store = open_folder(folder, KillingStore(LocalStore(folder / "store"), strike))
    counted = wrap_system_calls(int(at)) if way == "syscalls" else None
    if way == "timed" and at:
        signal.setitimer(signal.ITIMER_REAL, at)  # there is no handler, so the signal ends the process
    store.save(state(2), step=2, threads=2, compress="auto")
    return counted() if counted else strike.count


def wrap_system_calls(step: int) -> Callable[[], int]:
    """Kill this process right before or right after a system call. The returned function counts such points."""
    steps = itertools.count(1)

    def die() -> None:
        if next(steps) == step:
            tally("SIGKILL at a system call")
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            die()
            try:
                return call(*args, **kwargs)
            finally:
                die()

        return wrapped

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))
    return lambda: next(steps) - 1


def forked(call: Callable[[], object]) -> int:
    """Run ``call`` in a child. Return the child's wait status."""
    child = os.fork()
    if not child:
        run_and_exit(call)
    return os.waitpid(child, 0)[1]


def side_by_side(calls: Sequence[Callable[[], object]], at_once: int) -> bool:
    """Divide the calls among ``at_once`` concurrent children. Report whether all succeeded.

    One worker does not need a child.
    """
    if at_once == 1:
        for call in calls:
            call()
        return True

    def some(first: int) -> None:
        for call in calls[first::at_once]:
            call()

    children = []
    for first in range(at_once):
        children.append(os.fork())
        if not children[-1]:
            run_and_exit(partial(some, first))
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return not any(statuses)


def run_and_exit(call: Callable[[], object]) -> NoReturn:
    """Run ``call`` and end the forked child. This never returns to the parent's code."""
    try:
        call()
    except BaseException:  # noqa: BLE001 - whatever it was, the child must end here
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _total(folder: Path, way: str) -> int:
    """Return the number of steps of the save, or 0 if the save is killed at random times."""
    shutil.copytree(folder / "base", folder / "count", dirs_exist_ok=True)
    found = folder / "steps"
    status = forked(lambda: found.write_text(str(_save(folder / "count", way, 0))))
    if status:
        raise SystemExit(f"the save that was to be counted failed: {status}")
    shutil.rmtree(folder / "count")
    return int(found.read_text())


def sweep(folder: Path, points: int, seed: int) -> None:
    """Kill a save at about ``points`` steps in each way, including the last steps. 0 means all steps."""
    rng = random.Random(seed)
    base = open_folder(folder / "base")
    if forked(lambda: base.save(state(1), step=1)):
        raise SystemExit("the first save failed")
    started = time.monotonic()
    _total(folder, "timed")
    seconds = time.monotonic() - started
    for way in WAYS:
        every = [float(n) for n in range(1, _total(folder, way) + 1)]
        chosen = every if not points else sorted({*rng.sample(every[:-3], min(points, len(every[:-3]))), *every[-3:]})
        if way == "timed":
            chosen = [rng.uniform(0.001, seconds) for _ in range(points or 50)]
        for number, at in enumerate(chosen):
            point = folder / f"{way}-{number}-{at:g}"
            shutil.copytree(folder / "base", point)
            status = forked(partial(_save, point, way, at))
            if os.WIFEXITED(status) and os.WEXITSTATUS(status):
                raise SystemExit(f"the save at {point.name} failed by itself")


# saves during a gc


def _write(folder: Path, run: str, saves: int) -> None:
    store = open_folder(folder)
    try:
        for step in range(saves):
            want = state(step) | {"run": run}
            ckpt = store.save(want, run=run, step=step, compress="auto")
            if not same_state(store.read(ckpt), want):
                raise SystemExit(f"{run}@{step} did not come back")
    finally:
        (folder / f"done-{run}").touch()  # now the gc may end


def _collect(folder: Path, runs: list[str]) -> None:
    store, deleted = open_folder(folder), 0
    while True:
        last = all((folder / f"done-{run}").exists() for run in runs)
        deleted += store.gc(keep_last=2, wait="0.2s", min_age=0).deleted_blobs
        if last:
            break
    (folder / "deleted").write_text(str(deleted))


def race(folder: Path, saves: int) -> None:
    """Run two processes that save and one that collects garbage at the same time."""
    runs = ["a", "b"]
    open_folder(folder)
    calls = [partial(_write, folder, run, saves) for run in runs]
    children = []
    for call in (*calls, partial(_collect, folder, runs)):
        child = os.fork()
        if not child:
            run_and_exit(call)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise SystemExit(f"a process failed: {statuses}")


def needed(store: Store) -> set[str]:
    """Return the keys of all objects that live checkpoints name."""
    found = set()
    for commit in list_commits(store.repository).placed():
        manifest = manifests.get(store.repository, commit)
        found.add(manifest_key(commit.places.txid, commit.id))
        found |= {blob_key(ref.uploader, ref.hash) for ref in manifest.blobs}
    return found


def check_clean(store: Store) -> None:
    """Check that the store contains only objects that are needed."""
    keys = {entry.key for entry in store.repository.storage.list("")}
    assert undecided(store.repository) == []
    assert {key for key in keys if key.startswith("objects/")} == needed(store)
    assert not {key for key in keys if key.startswith("transactions/")}
    folder = Path(store.url)
    assert not [path for path in folder.rglob("*") if path.name.startswith(".") and path != folder / ".spare"]


def check_all(store: Store, states: dict[tuple[str, int], Any]) -> None:
    """Check that all visible checkpoints load in full."""
    for ckpt in store.checkpoints():
        want = states[ckpt.run, ckpt.step]
        if not same_state(store.read(ckpt), want):
            raise NotFound(f"{ckpt} is not what was saved")


if __name__ == "__main__":
    torch.set_num_threads(1)  # no threads before forking
    command, folder, *numbers = sys.argv[1:]
    if command == "sweep":
        sweep(Path(folder), *map(int, numbers))
    else:
        race(Path(folder), int(numbers[0]))
