"""Processes that use a store and are killed or stopped at a storage call while other processes continue.

``python -m tests.support.struck FOLDER POINTS SEED`` copies a store for each point. One process runs up to a call, and
is killed or stopped there. Then a second process forgets, saves, and collects garbage without waiting, and treats
silent processes as dead. Finally, the stopped process continues. In addition, a save runs together with a patient gc,
each of them stopped at one of its calls. POINTS is the number of points of each kind, or 0 for all. If ``PLACE
ENDPOINT`` follow, the stores are in a test bucket. All other files are in the folder.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import casckpt.storage.remote.s3.client  # otherwise, each fork would import it # noqa: F401
from casckpt.contents import manifests
from casckpt.errors import CasckptError, Revoked, StorageError
from casckpt.format.keys import blob_key
from casckpt.frontends.follow import Follower
from casckpt.repository.repository import Repository
from casckpt.storage.base import ObjectStore
from casckpt.storage.local.store import LocalStore
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation
from casckpt.store.store import Store
from tests.support.faulty import Call, FaultyStore, call_first
from tests.support.killed_saves import KillingStore, Strike, forked, open_folder, run_and_exit, side_by_side
from tests.support.repositories import wait_for_clean_up
from tests.support.saves import cells, trained
from tests.support.servers import KEY, SECRET

DROP = "optim.*"
KEPT, NEW, LATER = (2, 3), 9, 20
"""Steps: the ones that nobody forgets, the step of the save that is struck, and a later step of a different process."""
WEIGHTS = (0.25, 0.75)
"""The weights of the two checkpoints that are merged. An equal cell is the result."""
AT_ONCE = 3
PATIENCE = 120  # seconds before a hanging process is killed


def state(step: int) -> dict[str, Any]:
    """Return a state whose tensors, from step to step, are identical, encoded against the old ones, or new.

    Tensors of different kinds are in separate blobs.
    """
    model = {"kept": cells(9, seed=1), "new": cells(40, seed=step), "told": trained(8, step)}
    return {"model": model, "optim": {"m": cells(9, seed=50 + step)}}


@dataclass(frozen=True)
class Point:
    """A folder for the stores of a point.

    If ``bucket`` (a location and an endpoint) is set, the stores are in that bucket, below the point's name.
    """

    folder: Path
    bucket: tuple[str, str] | None = None

    @property
    def at_once(self) -> int:
        """Return how many points to process at the same time.

        In a bucket, it is more, because a bucket responds slowly.
        """
        return 1 if self.bucket is None else AT_ONCE

    def storage(self, name: str = "store") -> ObjectStore:
        """Return the storage of one of the stores."""
        if self.bucket is None:
            return LocalStore(self.folder / name)
        place, endpoint = self.bucket
        options = {"key": KEY, "secret": SECRET, "endpoint_url": endpoint}
        return RemoteStore(RemoteLocation("s3", f"{place}/{self.folder.name}/{name}".replace(" ", "-"), options))

    def store(self) -> Store:
        """Open the store without faults."""
        return open_folder(self.folder, self.storage())

    def away(self) -> Store:
        """Open the copy."""
        return Store(Repository(self.storage("away"), self.folder / "cache"))

    def beside(self, name: str) -> Point:
        """Return a different point."""
        return Point(self.folder.parent / name, self.bucket)

    def copied(self, name: str) -> Point:
        """Return a different point with the same contents."""
        other = self.beside(name)
        shutil.copytree(self.folder, other.folder)
        if self.bucket is not None:
            _check(other.folder, forked(lambda: _put_all(self.storage(), other.storage())))
        return other


def _put_all(source: ObjectStore, target: ObjectStore) -> None:
    for entry in source.list(""):
        target.put(entry.key, source.get(entry.key, limit=entry.size))


class Scene:
    """A store, its future copy, and a folder that mirrors it. All storage calls are steps of the same strike."""

    def __init__(self, point: Point, at: int = 0, sends: signal.Signals = signal.SIGKILL) -> None:
        self.point, self.folder = point, point.folder
        self.strike = Strike(at, sends, "a bucket" if point.bucket else "the storage")
        self.store = open_folder(self.folder, KillingStore(point.storage(), self.strike))

    def away(self) -> Repository:
        return Repository(KillingStore(self.point.storage("away"), self.strike), self.folder / "cache")


class StoppingStore(FaultyStore):
    """Stops its process right before its first call of ``method`` with a matching key."""

    def __init__(self, inner: ObjectStore, method: str, key: str) -> None:
        super().__init__(inner, [call_first(method, self._stop, key=key)])

    def _stop(self, _: Call) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


def _save(scene: Scene) -> None:
    scene.store.save(state(NEW), step=NEW, threads=2, compress="auto")


class NoManifests(KillingStore):
    """Also refuses manifests."""

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        if key.endswith(".manifest"):
            raise StorageError(f"{key} is refused")
        super().put(key, data, settle=settle)


def _fail(scene: Scene) -> None:
    """Save, but fail, and remove what was uploaded."""
    store = open_folder(scene.folder, NoManifests(scene.point.storage(), scene.strike))
    try:
        store.save(state(NEW), step=NEW, threads=2, compress="auto")
    except (Revoked, StorageError):
        wait_for_clean_up()
    else:
        raise SystemExit("the save did not fail")


def _gc(scene: Scene) -> None:
    scene.store.gc(min_age=0, wait=0)


def _verify(scene: Scene) -> None:
    found = scene.store.verify()
    if found.is_damaged or found.failed:
        raise SystemExit(f"verify: {found}")


def _copy(scene: Scene) -> None:
    for one in scene.store.copy_to(Store(scene.away()), check=False).failed:
        raise one.error


def _mirror(scene: Scene) -> None:
    Store(scene.store.repository, scene.away()).wait_for_mirror(PATIENCE / 2)


def _repair(scene: Scene) -> None:
    scene.store.repair(scene.point.beside("base").store())


def _thin(scene: Scene) -> None:
    scene.store.thin(drop=DROP, keep_last=1)


def _follow(scene: Scene) -> None:
    list(Follower(scene.store, "default", scene.folder / "to").follow(once=True))


def _merge(scene: Scene) -> None:
    refs = [f"default@{step}" for step in KEPT]
    scene.store.merge(*refs, run="merged", step=NEW, weights=WEIGHTS, keep=[DROP])


def merged() -> dict[str, Any]:
    """Return the state that a merge stores."""
    old, new = (state(step) for step in KEPT)
    model = {key: torch.zeros_like(value) for key, value in new["model"].items()}
    for key, value in model.items():
        total = old["model"][key].float() * WEIGHTS[0]
        value.copy_(total.add_(new["model"][key].float() * WEIGHTS[1]))
    return {**new, "model": model}


RUNS: dict[str, Callable[[Scene], None]] = {
    "save": _save, "gc": _gc, "verify": _verify, "copy": _copy, "mirror": _mirror, "repair": _repair, "thin": _thin,
    "follow": _follow, "merge": _merge, "fail": _fail,
}  # fmt: skip
MEET = ("save before a gc", "gc before a save")
"""Two concurrent operations. The first is stopped at any of its calls, the second at its decisive call."""
KILLED = ("gc", "verify", "copy", "mirror", "repair", "merge", "fail")
"""The operations for which no separate sweep covers kills."""


def _fill(point: Point) -> None:
    store = point.store()
    for step in (0, 1, *KEPT):
        store.save(state(step), step=step, compress="auto")


def _prepare(point: Point, name: str) -> None:
    """Prepare work: forgotten checkpoints to collect, or damage to repair."""
    store = point.store()
    store.forget("default@0" if name not in MEET else f"default@0..{KEPT[-1]}")
    if name == "repair":
        *_, ref = manifests.get(store.repository, store.get(f"default@{KEPT[0]}").commit).blobs
        store.repository.storage.delete(blob_key(ref.uploader, ref.hash))
        store.verify()


def _act(point: Point, name: str, at: int, sends: signal.Signals, counted: Path | None = None) -> None:
    """Run one of `RUNS`. If it finishes, write its outcome to a file."""
    scene, ended = Scene(point, at, sends), "well"
    try:
        RUNS[name](scene)
    except CasckptError as error:
        ended = type(error).__name__
    (point.folder / "ended").write_text(ended)
    if counted is not None:
        counted.write_text(str(scene.strike.count))


def others(point: Point, name: str) -> None:
    """Act as a different process: purge all forgotten checkpoints immediately, and revoke uncommitted transactions.

    This keeps nothing that a save may want to reuse.
    """
    signal.alarm(PATIENCE)
    store = point.store()
    store.forget("default@1" if name != "save" else f"default@1..{KEPT[-1]}")
    store.save(state(LATER), step=LATER, compress="auto")
    deleted = store.gc(min_age=0, wait=0, revoke_after=0).deleted_blobs
    if not deleted and name != "mirror":  # with a mirror, gc keeps everything that is not yet safe there
        raise SystemExit(f"{point.folder.name}: nothing was deleted")
    if point.storage("away").size("casckpt.json") is not None:
        point.away().gc(min_age=0, wait=0, revoke_after=0)


def _strike(ready: Point, name: str, at: int, *, sends: signal.Signals) -> None:
    point = ready.copied(f"{name}-{sends.name}-{at}")
    folder, child = point.folder, os.fork()
    if not child:
        signal.alarm(PATIENCE)
        run_and_exit(partial(_act, point, name, at, sends))
    status = os.waitpid(child, os.WUNTRACED)[1]
    if os.WIFEXITED(status):  # it made different steps than when they were counted
        _check(folder, status)
    _check(folder, forked(partial(others, point, name)))
    if os.WIFSTOPPED(status):
        os.kill(child, signal.SIGCONT)
        _check(folder, os.waitpid(child, 0)[1])


def _meet(ready: Point, name: str, at: int) -> None:
    """Stop a save, run a gc until it also stops, then finish the save, and finally the gc.

    One of the two stops at an arbitrary call. The other stops at a fixed point: the gc after it has chosen what to
    delete, the save right before its commit, when everything else is stored.
    """
    point, stopped = ready.copied(f"{name}-SIGSTOP-{at}"), list[tuple[int, int]]()
    for one, method, key in (("save", "put", "commits/*"), ("gc", "delete", "objects/*.safetensors")):
        child = os.fork()
        if not child:
            signal.alarm(PATIENCE)
            is_struck = name.startswith(one)
            scene = Scene(point, at if is_struck else 0, signal.SIGSTOP)
            if not is_struck:
                scene.store = open_folder(point.folder, StoppingStore(point.storage(), method, key))
            run_and_exit(partial(RUNS[one], scene))
        stopped.append((child, os.waitpid(child, os.WUNTRACED)[1]))
    for child, status in stopped:
        if os.WIFSTOPPED(status):
            os.kill(child, signal.SIGCONT)
        _check(point.folder, os.waitpid(child, os.WUNTRACED)[1] if os.WIFSTOPPED(status) else status)
    (point.folder / "ended").write_text("well")


def _check(folder: Path, status: int) -> None:
    if status:
        raise SystemExit(f"{folder.name}: a process ended with {status}")


def sweep(base: Point, points: int, seed: int) -> None:
    """Strike each operation in each way at ``points`` of its steps, or at all of them."""
    draw, counted = random.Random(seed), base.folder.parent / "steps"
    base.folder.mkdir()
    _check(base.folder, forked(partial(_fill, base)))
    for name in (*RUNS, *MEET):
        ready = base.copied(f"ready {name}")
        _check(ready.folder, forked(partial(_prepare, ready, name)))
        count = ready.copied(f"count {name}")
        _check(count.folder, forked(partial(_act, count, name.split()[0], 0, signal.SIGKILL, counted)))
        every = range(1, int(counted.read_text()) + 1)
        ways: list[Callable[[int], None]] = [partial(_meet, ready, name)]
        if name in RUNS:
            sent = (signal.SIGSTOP, *([signal.SIGKILL] if name in KILLED else []))
            ways = [partial(_strike, ready, name, sends=sends) for sends in sent]
        strikes = [partial(way, at) for way in ways for at in draw.sample(every, min(points or len(every), len(every)))]
        if not side_by_side(strikes, base.at_once):
            raise SystemExit(f"{name}: a strike went wrong; see above")


if __name__ == "__main__":
    torch.set_num_threads(1)  # no threads before forking
    place, endpoint = (*sys.argv[4:], "", "")[:2]
    base = Point(Path(sys.argv[1], "base"), (place, endpoint) if place else None)
    sweep(base, int(sys.argv[2]), int(sys.argv[3]))
