"""Copies from one repository to another, without tensors."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from casckpt.contents import manifests
from casckpt.format.keys import blob_key, manifest_key
from casckpt.history.commits import Commit, list_commits
from casckpt.repository.repository import Repository
from casckpt.storage.base import ObjectStore
from casckpt.upkeep.copies.copy import CopyResult, execute, plan_copy
from casckpt.upkeep.copies.replication import Work
from casckpt.upkeep.repair.verify import verify
from tests.support.checkpoints import CELL, array, read_arrays, save_arrays
from tests.support.faulty import FaultyStore
from tests.support.gcs import collect
from tests.support.repositories import START, Ticks, memory

ONE_BY_ONE = Work(jobs=1)
_HOURS = itertools.count(1)


def chain(repo: Repository, count: int = 4) -> Repository:
    """Commit run@0 and its successors. Each has its own blob and the blobs of its predecessors."""
    arrays, last = {}, None
    for step in range(count):
        arrays[f"t{step}"] = array(step)
        last = save_arrays(repo, arrays, step=step, reuse=last, bytes_total=2 * CELL * (step + 1), metadata={"n": step})
    return repo


def elsewhere(tmp_path: Path, storage: ObjectStore | None = None, seed: int = 2) -> Repository:
    """Return a view of a second store, which may be empty. The clocks of two views are at least an hour apart."""
    clock = Ticks(START + next(_HOURS) * 3_600_000_000)
    return Repository(storage or memory(), tmp_path / "cache", clock=clock, entropy=random.Random(seed).randbytes)


def copy(source: Repository, target: Repository, *refs: str | Commit, **options: object) -> CopyResult:
    """Copy everything, or the checkpoints in ``refs``."""
    planned = {name: options.pop(name, None) for name in ("run", "compress")}
    return execute(source, target, plan_copy(source, target, refs, **planned), **options)  # type: ignore[arg-type]  # any of their arguments


def contents(repo: Repository) -> dict[str, dict[str, bytes]]:
    """Return the arrays of all visible checkpoints."""
    return {f"{one.run}@{one.step}": read_arrays(repo, one) for one in list_commits(repo).current()}


def blob_puts(storage: FaultyStore) -> list[str]:
    """Return the keys of the blobs that were put."""
    return [key for key in storage.keys("put") if key.endswith(".safetensors")]


def check_clean(repo: Repository) -> None:
    """Check that gc leaves exactly the objects of live checkpoints, and that verify finds no damage."""
    assert collect(repo, wait=0.0, revoke_after=0.0).waiting == ()
    named = {key for one in list_commits(repo).placed() for key in _named(repo, one)}
    assert {entry.key for entry in repo.storage.list("objects/")} == named
    assert not list(repo.storage.list("transactions/"))
    assert not verify(repo).is_damaged


def _named(repo: Repository, commit: Commit) -> list[str]:
    refs = manifests.get(repo, commit).blobs
    return [manifest_key(commit.places.txid, commit.id), *(blob_key(ref.uploader, ref.hash) for ref in refs)]
