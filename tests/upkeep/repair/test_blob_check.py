"""Checks of individual blobs."""

from __future__ import annotations

import pytest

from casckpt.format.blob import DATA_OFFSET
from casckpt.repository.repository import Repository
from casckpt.upkeep.repair.blob_check import PIECE
from casckpt.upkeep.repair.verify import Mode, verify
from tests.support.checkpoints import CELL, array, flip, only_blob, save_arrays
from tests.support.faulty import FaultyStore
from tests.upkeep.repair.conftest import hash_in, marks


@pytest.mark.parametrize("position", [-1, -72, PIECE - 1, PIECE, DATA_OFFSET])
def test_every_byte_of_a_large_blob_is_checked(repo: Repository, position: int) -> None:
    commit = save_arrays(repo, {"a": array(1, PIECE / CELL + 1)})
    flip(repo, only_blob(repo, commit), position)
    assert len(verify(repo).damaged) == 1


@pytest.mark.parametrize("mode", ["full", "exists"])
def test_missing_and_truncated_blobs_are_found_in_both_modes(repo: Repository, mode: Mode) -> None:
    saved = [save_arrays(repo, {"a": array(step)}, step=step) for step in range(3)]
    gone, short = only_blob(repo, saved[0]), only_blob(repo, saved[1])
    size = repo.storage.size(short) or 0
    repo.storage.delete(gone)
    repo.storage.replace(short, repo.storage.get(short, limit=1 << 20)[:-1])
    found = verify(repo, mode=mode)
    assert {one.blob: one.why for one in found.damaged} == {
        hash_in(gone): "it is gone",
        hash_in(short): f"it has {size - 1} bytes instead of {size}",
    }
    assert [one.keys for one in found.damaged] == [("a",)] * 2
    assert marks(repo) == {hash_in(gone), hash_in(short)}
    assert found.checked_blobs == 3


def test_exists_mode_does_not_read_blobs(repo: Repository, faults: FaultyStore) -> None:
    commit = save_arrays(repo, {"a": array(1)})
    flip(repo, only_blob(repo, commit), DATA_OFFSET)
    found = verify(repo, mode="exists")
    assert (found.damaged, found.checked_bytes, faults.count("open")) == ((), 0, 0)


def test_a_blob_that_is_not_a_safetensors_file_is_damaged(repo: Repository) -> None:
    from tests.support.repositories import save

    save(repo, texts=["these bytes have the right hash"])
    (damaged,) = verify(repo).damaged
    assert "proof" in damaged.why
