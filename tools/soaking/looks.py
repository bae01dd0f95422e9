"""The checks during a pause. While no process is working, the store and its copy must be correct."""

from __future__ import annotations

import casckpt
from casckpt.contents import manifests
from casckpt.format.keys import blob_key, manifest_key
from casckpt.history.commits import list_commits
from casckpt.store.store import Store
from soaking.books import KEPT, Wrong
from soaking.states import CELL
from soaking.workers import Worker


def make(worker: Worker) -> None:
    """Create both stores, with small cells and blobs."""
    for store in (worker.store, worker.copy):
        store.create(cell_bytes=CELL, blob_bytes=16 * CELL)


def look(worker: Worker) -> None:
    """End open transactions, and check everything."""
    for save_in_progress in worker.store.transactions():
        worker.store.revoke(save_in_progress.txid)
    for name in worker.store.tags():
        worker.store.untag(name)  # leases of killed readers would expire, and no process is reading now
    for store in (worker.store, worker.copy):
        store.gc(min_age=0, wait="5s", revoke_after=0)
    _check_copy(worker)
    for store in (worker.store, worker.copy):
        found = store.verify(decode=True)
        if found.is_damaged or found.failed:
            raise Wrong(f"verify in a pause: {found}")
        for one in store.checkpoints():
            worker.check(one, store.read(one, keys=None if one.dropped is None else ["model.*", "step"]))
        check_objects(store)
    _check_saved(worker)
    worker.did("pause", checkpoints=len(worker.store.checkpoints()))


def _check_copy(worker: Worker) -> None:
    """Copy again. Check that the newest checkpoints of each run exist, and all others that the copy names."""
    here = worker.store.checkpoints()
    worker.store.copy_to(worker.copy)
    there = {one.id for one in worker.copy.checkpoints()}
    newest = [one for run in worker.store.runs() for one in worker.store.checkpoints(run)[-KEPT:]]
    _check_ids(worker.copy, newest, there)
    rotated = [one for one in here if one.id not in there]
    if rotated:
        worker.store.copy_to(worker.copy, *rotated)
        _check_ids(worker.copy, here, {one.id for one in worker.copy.checkpoints()})


def _check_ids(copied: Store, wanted: list[casckpt.Checkpoint], there: set[str]) -> None:
    lacking = [str(one) for one in wanted if one.id not in there]
    if lacking:
        raise Wrong(f"{copied.url}: not there after a copy: {', '.join(lacking)}")


def _check_saved(worker: Worker) -> None:
    """Check that the newest saved checkpoints exist, unless there are newer ones whose save was killed late."""
    for run, steps in worker.books.newest().items():
        there = {one.step for one in worker.store.checkpoints(run)}
        for step in steps:
            if step not in there and sum(one > step for one in there) < KEPT:
                raise Wrong(f"{run}@{step} was saved, but does not exist: {sorted(there)}")


def check_objects(store: Store) -> None:
    """Check that the store has the objects that its checkpoints need, and no others."""
    repo, named = store.repository, set[str]()
    for one in list_commits(repo).live():
        named.add(manifest_key(one.places.txid, one.id))
        named.update(blob_key(uploader, blob) for uploader, blob, _ in manifests.blobs_of(repo, one))
    there = {entry.key for entry in repo.storage.list("objects/")}
    if there != named:
        raise Wrong(f"{store.url}: needed and gone {named - there}, there and not needed {there - named}")
