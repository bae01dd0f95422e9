"""Blobs as objects in a store, and the marks for damaged blobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
import torch

import casckpt
from casckpt.contents import blobs
from casckpt.errors import StorageError
from casckpt.format.keys import blob_key, damaged_key
from casckpt.format.names import TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.repository.blob_cache import BlobCache
from casckpt.repository.repository import Repository
from casckpt.storage.base import Traits
from casckpt.storage.memory import MemoryStore
from tests.support.faulty import FaultyStore, call_first, fail_after, fail_before
from tests.support.repositories import blob_hash, meanwhile, put_blob, repository

HASH = blob_hash("x")


@pytest.fixture
def txid(repo: Repository) -> TxId:
    return repo.new_txid("a", 1)


def test_an_existing_blob_of_the_same_size_counts_as_written(repo: Repository, txid: TxId) -> None:
    blobs.put(repo, txid, HASH, memoryview(b"data"))
    blobs.put(repo, txid, HASH, b"data")
    assert repo.storage.get(blob_key(txid, HASH), limit=10) == b"data"


def test_an_existing_blob_of_a_different_size_is_rejected(repo: Repository, txid: TxId) -> None:
    blobs.put(repo, txid, HASH, b"dat")
    with pytest.raises(StorageError, match="3 bytes instead of 4") as caught:
        blobs.put(repo, txid, HASH, b"data")
    assert caught.value.blob == HASH


def test_a_blob_that_a_gc_deletes_between_two_calls_is_put_again(
    repo: Repository, txid: TxId, faults: FaultyStore
) -> None:
    key = blob_key(txid, HASH)
    blobs.put(repo, txid, HASH, b"data")
    faults.inject(call_first("size", meanwhile(lambda: repo.storage.delete(key)), key="objects/*"))
    blobs.put(repo, txid, HASH, b"data")
    assert repo.storage.get(key, limit=10) == b"data"


def test_the_sizes_of_blobs_are_counted_in_bytes(repo: Repository, txid: TxId) -> None:
    wide = memoryview(bytes(8)).cast("d")
    blobs.put(repo, txid, HASH, wide.cast("B"))
    blobs.put(repo, txid, HASH, bytes(8))


def test_a_put_whose_response_was_lost_can_be_repeated(repo: Repository, txid: TxId, faults: FaultyStore) -> None:
    faults.inject(fail_after("put", key="objects/*"))
    with pytest.raises(StorageError):
        blobs.put(repo, txid, HASH, b"data")
    blobs.put(repo, txid, HASH, b"data")


def test_missing_and_truncated_blobs_are_found(repo: Repository, txid: TxId, faults: FaultyStore) -> None:
    whole, short, gone = (put_blob(repo, txid, text) for text in ("one", "two", "three"))
    repo.storage.replace(blob_key(txid, short.hash), b"t")
    repo.storage.delete(blob_key(txid, gone.hash))
    before = faults.count("size")
    assert blobs.check(repo, [whole, short, gone, whole]) == [short, gone]
    assert faults.count("size") == before + 3
    assert blobs.check(repo, []) == []


def test_failing_storage_does_not_mean_that_a_blob_is_missing(
    repo: Repository, txid: TxId, faults: FaultyStore
) -> None:
    one = put_blob(repo, txid, "one")
    faults.inject(fail_before("size"))
    with pytest.raises(StorageError):
        blobs.check(repo, [one])


def test_the_newest_mark_determines_whether_a_blob_counts_as_damaged(repo: Repository, txid: TxId) -> None:
    assert blobs.damaged_marks(repo) == set()
    for _ in range(6):
        blobs.mark_damaged(repo, txid, HASH, "flipped")
        assert blobs.damaged_marks(repo) == {(txid, HASH)}
        blobs.mark_repaired(repo, txid, HASH, "copied")
        assert blobs.damaged_marks(repo) == set()
    (mark,) = blobs.marks(repo)
    assert (mark.number, mark.state, mark.why) == (11, "repaired", "copied")


def test_a_mark_that_changes_nothing_is_not_written(repo: Repository, txid: TxId) -> None:
    blobs.mark_repaired(repo, txid, HASH, "never was damaged")
    assert list(repo.storage.list("damaged/")) == []
    blobs.mark_damaged(repo, txid, HASH, "x")
    blobs.mark_damaged(repo, txid, HASH, "y")
    assert [entry.key for entry in repo.storage.list("damaged/")] == [damaged_key(txid, HASH, 0)]


def test_blobs_of_different_uploaders_with_equal_hashes_have_separate_marks(repo: Repository, txid: TxId) -> None:
    other = repo.new_txid("a", 2)
    blobs.mark_damaged(repo, txid, HASH, "x")
    blobs.mark_damaged(repo, other, HASH, "x")
    blobs.mark_repaired(repo, txid, HASH, "x")
    assert blobs.damaged_marks(repo) == {(other, HASH)}


def test_an_unreadable_mark_counts_as_damaged(repo: Repository, txid: TxId) -> None:
    blobs.mark_damaged(repo, txid, HASH, "x")
    blobs.mark_repaired(repo, txid, HASH, "x")
    repo.storage.replace(damaged_key(txid, HASH, 1), b"torn")
    assert blobs.damaged_marks(repo) == {(txid, HASH)}
    blobs.mark_repaired(repo, txid, HASH, "again")
    assert blobs.damaged_marks(repo) == set()


def test_a_mark_of_a_different_blob_does_not_count_as_repaired(repo: Repository, txid: TxId) -> None:
    other = blob_hash("other")
    for blob in (HASH, other):
        blobs.mark_damaged(repo, txid, blob, "x")
    blobs.mark_repaired(repo, txid, other, "x")
    repo.storage.put(damaged_key(txid, HASH, 1), repo.storage.get(damaged_key(txid, other, 1), limit=1 << 20))
    assert blobs.damaged_marks(repo) == {(txid, HASH)}


@pytest.mark.parametrize("repaired", [False, True])
def test_two_processes_that_mark_a_blob_concurrently_agree(
    tmp_path: Path, repo: Repository, faults: FaultyStore, repaired: bool
) -> None:
    txid = repo.new_txid("a", 1)
    other = repository(tmp_path, faults.inner, seed=5)

    def first() -> None:
        blobs.mark_damaged(other, txid, HASH, "theirs")
        if repaired:
            blobs.mark_repaired(other, txid, HASH, "theirs")

    faults.inject(call_first("put", meanwhile(first), key="damaged/*"))
    blobs.mark_damaged(repo, txid, HASH, "ours")
    assert blobs.damaged_marks(repo) == {(txid, HASH)}
    assert len(list(repo.storage.list("damaged/"))) == (3 if repaired else 1)


def test_files_with_other_names_are_ignored(repo: Repository, txid: TxId) -> None:
    repo.storage.put("damaged/README", b"x")
    repo.storage.put(f"damaged/{txid}/{HASH}/01", b"x")
    assert blobs.damaged_marks(repo) == set()


def test_the_reason_in_a_mark_of_damage_is_truncated_if_it_is_long(repo: Repository, txid: TxId) -> None:
    blobs.mark_damaged(repo, txid, HASH, "x" * 10_000_000)
    (mark,) = blobs.marks(repo)
    assert len(mark.why) == 500
    assert mark == replace(mark, state="damaged", number=0)


class Far(MemoryStore):
    """A storage that reports itself as remote."""

    @property
    def traits(self) -> Traits:
        return Traits(remote=True, read_gap=0, parallel=4, exclusive=True)


def test_known_blobs_on_remote_storage_are_spot_checked(tmp_path: Path) -> None:
    far = FaultyStore(Far(uuid4().hex))
    repo, other = repository(tmp_path, far), repository(tmp_path, far, seed=2)
    txid = repo.new_txid("a", 1)
    refs = [put_blob(repo, txid, str(number)) for number in range(100)]
    assert blobs.check(repo, refs) == []
    assert far.count("size", "objects/*") == 16, "it has put all of them itself"
    assert blobs.check(other, refs) == []
    assert far.count("size", "objects/*") == 116
    gone = put_blob(repo, txid, "gone")
    far.delete(blob_key(txid, gone.hash))
    assert blobs.check(other, [*refs, gone]) == [gone]
    assert blobs.check(other, [gone]) == [gone], "what was missing is looked for again"


def test_a_save_marks_the_cached_blobs_that_it_reuses_as_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[BlobRef] = []
    monkeypatch.setattr(BlobCache, "touch", lambda self, ref: used.append(ref))
    store = casckpt.open(tmp_path / "store", cache_saves=True)
    state = {"w": torch.arange(1000)}
    store.save(state, step=1)
    (written,) = used
    store.save(state, step=2)
    assert used == [written, written]
