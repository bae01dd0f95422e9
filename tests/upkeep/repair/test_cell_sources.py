"""Repairs recover bytes from other blobs, stores and caches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from casckpt.base.progress import silent
from casckpt.contents import blobs, manifests
from casckpt.contents.refs import resolve
from casckpt.errors import NotFound
from casckpt.format.blob import DATA_OFFSET
from casckpt.history import commits
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.upkeep.repair.repair import repair
from casckpt.upkeep.repair.verify import verify
from tests.support.checkpoints import (
    array,
    content,
    flip,
    only_blob,
    read_arrays,
    save_arrays,
)
from tests.support.gcs import collect
from tests.support.repairs import KINDS, LARGE, LEAF, STATE, damage


@pytest.mark.parametrize("how", KINDS)
def test_cells_are_recovered_from_the_same_blob_of_a_different_uploader(repo: Repository, how: str) -> None:
    one, _ = (save_arrays(repo, STATE, step=step) for step in range(2))
    damage(repo, only_blob(repo, one), how)
    found = repair(repo)
    assert len(found.blobs) == 1
    assert not found.is_damaged
    assert read_arrays(repo, one) == content(STATE)
    assert not verify(repo).is_damaged
    assert blobs.damaged_marks(repo) == set()


@pytest.mark.parametrize("how", KINDS)
def test_cells_are_recovered_from_a_different_store(repo: Repository, other: Repository, how: str) -> None:
    one = save_arrays(repo, STATE)
    save_arrays(other, STATE, "somewhere", 9)
    damage(repo, only_blob(repo, one), how)
    before = {entry.key for entry in other.storage.list("")}
    found = repair(repo, sources=[other])
    assert len(found.blobs) == 1
    assert read_arrays(repo, one) == content(STATE)
    assert {entry.key for entry in other.storage.list("")} == before, "a source is only read"


def test_a_damaged_copy_is_not_used(repo: Repository, other: Repository) -> None:
    one, two = (save_arrays(repo, STATE, step=step) for step in range(2))
    copy = save_arrays(other, STATE)
    for store, commit in ((repo, one), (repo, two), (other, copy)):
        flip(store, only_blob(store, commit), DATA_OFFSET + 5)
    verify(repo)
    found = repair(repo, sources=[other])
    assert (found.blobs, len(found.lost)) == ((), 2)


def test_cells_are_recovered_from_the_host_cache(repo: Repository) -> None:
    one = save_arrays(repo, LARGE, cell=LEAF)
    repo.blob_cache.fill(repo.storage, list(manifests.get(repo, one).blobs), 1, silent)
    damage(repo, only_blob(repo, one), "gone")
    assert len(repair(repo).blobs) == 1
    assert read_arrays(repo, one) == content(LARGE)


def test_a_damaged_source_does_not_change_correct_bytes(repo: Repository) -> None:
    """A leaf contains a live cell and a damaged dead cell.

    A different blob has the same live bytes, but its live cell is damaged.
    """
    a, b = array(1, 0.25), array(2, 0.25)
    older = save_arrays(repo, {"a": a, "b": b})
    both = save_arrays(repo, {"c": np.concatenate([a, b])}, "other", 1)
    save_arrays(repo, {"a": a}, step=1, reuse=older)
    commits.forget(repo, older)
    collect(repo)
    flip(repo, only_blob(repo, older), DATA_OFFSET + b.nbytes + 5)
    flip(repo, only_blob(repo, both), DATA_OFFSET + 5)
    verify(repo)
    found = repair(repo)
    assert (len(found.rewritten), [lost.keys for lost in found.lost]) == (1, [("c",)])
    assert read_arrays(repo, resolve(repo, "run@1")) == content({"a": a})


def test_a_repair_source_that_is_missing_raises_an_error_even_without_damage(repo: Repository, tmp_path: Path) -> None:
    save_arrays(repo, STATE)
    with pytest.raises(NotFound, match="there is no store at"):
        repair(repo, sources=[Repository(LocalStore(tmp_path / "nope"), tmp_path)])
