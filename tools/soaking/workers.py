"""The workers. Each call performs one round."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal

from casckpt.errors import Conflict, Gone, MissingKey, NotFound, Revoked, StorageError
from casckpt.saving.options import SaveArguments
from casckpt.store.store import Store
from soaking.books import KEPT, Books, Wrong
from soaking.states import LONG, RUNS, same, state

TAG = "soak"
TELLS_OF_REVOKED = "casckpt.saving.save"
COMPRESS: tuple[Literal["off", "auto", "always"], ...] = ("off", "auto", "always")
HELD = 1.0  # seconds at most, between a lease and its load
UNDONE = 5  # how many times gcs may forget a tagged checkpoint and be killed during one check


@dataclass
class Worker:
    """The common part of all workers.

    ``copy``: the other store. ``rounds``: the rounds of `live`. ``warm``: the worker has performed all kinds of its
    work once. Resources that it used before that do not count as growth. ``at_night``: requests may fail.
    """

    store: Store
    copy: Store
    books: Books
    random: random.Random
    rounds: int = 0
    warm: bool = False
    at_night: bool = False

    def did(self, what: str, times: int = 1, **more: Any) -> None:
        """Count something."""
        if times:
            self.books.note(f"counts.{os.getpid()}", did=what, times=times, **more)

    def wait(self, most: float) -> None:
        """Let other processes continue for a moment."""
        time.sleep(self.random.uniform(0, most))

    def check(self, ref: Any, found: Mapping[str, Any]) -> None:
        """Compare a checkpoint with the state of its run and step."""
        wanted = {key: value for key, value in state(ref.run, ref.step).items() if key in found}
        if not same(found, wanted) or not {"model", "step"} <= set(found):
            raise Wrong(f"{ref} is not what was saved")

    def load(self, ref: Any) -> None:
        """Load a checkpoint and compare it. If it is thinned, or becomes thinned, compare the rest."""
        try:
            self.check(ref, self.store.read(ref))
        except MissingKey:
            self.check(ref, self.store.read(ref, keys=["model.*", "step"]))

    def read_or_gone(self, ref: Any) -> bool:
        """Load a checkpoint that may be purged or thinned during the load."""
        try:
            self.load(ref)
        except (NotFound, MissingKey):
            return False
        return True

    def collect(self, store: Store, **policy: Any) -> None:
        """Forget by a rule, and delete. Count the results."""
        try:
            result = store.gc(**policy)
        except Conflict:
            self.did("gc in the way of others")
            return
        self.did("gc")
        self.did("blobs deleted by gc", result.deleted_blobs)
        self.did("transactions revoked by gc", len(result.revoked))
        self.warm |= not any(one.reason == "transaction" for one in result.waiting)


class BegunAnew(logging.Handler):
    """Counts saves whose first attempt was revoked by a gc. Only log messages show them."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        """Count one revoked save."""
        if "retries it once" in record.getMessage():
            self.worker.did("save given up on, and begun anew")


def save(worker: Worker, run: str) -> bool:
    """Save the next step in one of several ways. Return whether it exists, because gcs may revoke it twice."""
    try:
        step = worker.store.get(f"{run}@latest").step + 1
    except NotFound:
        step = 0
    told = max(worker.books.newest().get(run, [-1]))
    if step <= told:
        raise Wrong(f"{run}@{told} was saved, and the latest is {step - 1}")
    how = SaveArguments(compress=worker.random.choice(COMPRESS), metrics={"loss": 1 / (step + 1)})
    try:
        if worker.random.random() < 0.3:
            worker.store.save_async(state(run, step), run=run, step=step, **how).result()
        else:
            worker.store.save(state(run, step), run=run, step=step, **how)
    except Revoked:
        if any(one.step == step for one in worker.store.checkpoints(run)):
            raise Wrong(f"{run}@{step} was revoked, but exists") from None
        worker.did("save revoked")
        return False
    worker.books.note("ledger", run=run, step=step)
    worker.did("save")
    return True


def read(worker: Worker) -> None:
    """Read any checkpoint. Under a lease, the read must succeed."""
    there = worker.store.checkpoints()
    if not there:
        return
    chosen = worker.random.choice(there)
    if worker.random.random() < 0.5:
        worker.did("load" if worker.read_or_gone(chosen) else "load of what was gone")
        return
    load_under_lease(worker, chosen)


def load_under_lease(worker: Worker, chosen: Any) -> None:
    """Lease a checkpoint, wait a moment while other workers forget and collect, then load it."""
    with ExitStack() as held:
        try:
            ref = held.enter_context(worker.store.lease(chosen, expires="10m"))
        except (NotFound, Conflict):
            worker.did("lease of what was gone")
            return
        _forget_old(worker, ref)
        worker.wait(HELD)
        try:
            worker.load(ref)
        except NotFound as error:
            raise Wrong(f"{ref} is gone, under a lease: {error}") from error
        worker.did("load under a lease")


def _forget_old(worker: Worker, ref: Any) -> None:
    """In a run without tags, forget a leased checkpoint, so that only its lease protects it."""
    newer = [one for one in worker.store.checkpoints(RUNS[0]) if one.step > ref.step]
    if ref.run == RUNS[0] and len(newer) >= KEPT:
        with suppress(NotFound, Conflict):
            worker.store.forget(ref, tagged=True)
            worker.did("forgotten under a lease")


def follow(worker: Worker) -> None:
    """Watch a run for a while, and update a state from version to version. This process is never killed."""
    run, held, loaded = worker.random.choice(RUNS), None, None
    for told in worker.store.watch(run, latest_only=True, timeout="5s", poll="0.1s"):
        ref = told.checkpoint
        loaded = state(run, 0) if loaded is None else loaded
        try:
            held = worker.store.update(loaded, ref, held=held)
        except (NotFound, MissingKey):
            held = loaded = None
            worker.did("update to what was gone")
            continue
        worker.check(ref, loaded)
        worker.did("update")
        worker.warm = True
        if worker.random.random() < 0.05:
            return


def live(worker: Worker) -> None:
    """Save, load under a lease, list, verify and collect in one process, which is never killed.

    It also collects until one gc completes, because that uses the most memory, which does not count as growth.
    """
    if save(worker, LONG):
        newest = worker.store.get(f"{LONG}@latest")
        worker.store.diff(newest, newest)
    if there := worker.store.checkpoints():
        load_under_lease(worker, worker.random.choice(there))
    worker.store.stats()
    worker.store.verify(mode="exists")
    if not worker.warm or worker.rounds % 20 == 0:
        worker.collect(worker.store, keep_last=3, min_age=0, wait="5s")
    worker.rounds += 1
    worker.did("round of one process")


def collect(worker: Worker) -> None:
    """Forget by a rule, and delete."""
    keep, age = worker.random.choice([KEPT, 3, 5]), worker.random.choice(["0s", "1s"])
    worker.collect(worker.store, keep_last=keep, min_age=age, wait="2s")


def overtake(worker: Worker) -> None:
    """Delete immediately, and revoke saves and copies of a stopped process."""
    for store in (worker.store, worker.copy):
        with suppress(StorageError):  # a worker that only collects counts these errors
            worker.collect(store, min_age=0, wait="2s", revoke_after=0)


def thin(worker: Worker) -> None:
    """Thin checkpoints by dropping the optimizer."""
    try:
        worker.store.thin(drop="optim.*", keep_last=KEPT)
    except (Conflict, NotFound, MissingKey):
        worker.did("thin of what was gone")
    else:
        worker.did("thin")
    time.sleep(2)


def tag(worker: Worker) -> None:
    """Tag a checkpoint, load it by its tag, and move the tag."""
    there = [one for one in worker.store.checkpoints() if one.run != RUNS[0]]  # forgets there also remove tags
    if not there:
        return
    name, chosen = f"{TAG}-{os.getpid()}", worker.random.choice(there)
    try:
        worker.store.tag(name, chosen)
    except (Conflict, NotFound):
        worker.did("tag on what was gone")
        return
    for _ in range(3):
        worker.load(_tagged(worker, name, chosen))
        time.sleep(0.2)
    worker.store.untag(name)
    worker.did("tag")


def _tagged(worker: Worker, name: str, chosen: Any) -> Any:
    """Return the checkpoint that a tag names.

    A gc that did not see the tag may forget the checkpoint, and be killed before it restores it.
    """
    for _ in range(UNDONE):
        try:
            return worker.store.get(f"tag:{name}")
        except NotFound:
            worker.did("tagged and forgotten")
            time.sleep(1)
            with suppress(Conflict):  # it is visible again by now
                worker.store.restore(chosen.id)
    return worker.store.get(f"tag:{name}")


def verify(worker: Worker) -> None:
    """Verify the store, which must never be damaged."""
    found = worker.store.verify(mode=worker.random.choice(["full", "exists"]))
    if found.is_damaged or (found.failed and not worker.at_night):
        raise Wrong(f"verify: {found.damaged} {found.manifests} {found.records} {found.failed}")
    worker.did("verify")
    time.sleep(1)


def copy(worker: Worker) -> None:
    """Copy all visible checkpoints, and rotate the copies."""
    result = worker.store.copy_to(worker.copy, check=False)
    for one in result.failed:
        if not isinstance(one.error, Conflict | Gone):
            raise one.error
    worker.did("copy", checkpoints=len(result.copied))
    worker.collect(worker.copy, keep_last=4, min_age=0, wait="2s")
    time.sleep(1)


ROLES: dict[str, Callable[[Worker], object]] = {
    "save alpha": lambda worker: save(worker, RUNS[0]), "save beta": lambda worker: save(worker, RUNS[1]),
    "read": read, "gc": collect, "other gc": collect, "thin": thin, "tag": tag, "verify": verify, "copy": copy,
    "follow": follow, "live": live,
}  # fmt: skip
LASTING = frozenset({"follow", "live"})
"""These are never killed. Their memory, files and threads are checked."""
REVOCABLE = frozenset({"save alpha", "save beta", "copy"})
"""While one of these is stopped, a gc may give up on it."""
