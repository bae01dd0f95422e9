"""A load reads a blob from this host's cache, or from the storage after the cached copy was found to be damaged."""

from __future__ import annotations

from unittest.mock import MagicMock, patch

import pytest

from casckpt.errors import Damaged, Gone
from casckpt.history.commits import forget, list_commits
from casckpt.loading.blob_readers import BlobReader
from casckpt.store.store import Store
from tests.loading.conftest import elsewhere, state, zeros
from tests.support.faulty import FaultyStore, call_first
from tests.support.gcs import collect
from tests.support.repositories import meanwhile
from tests.support.rewrites import move
from tests.support.saves import blob_keys, flip, same_state


def test_a_damaged_cached_blob_is_dropped_once_and_read_from_the_store() -> None:
    repo, ref = MagicMock(), MagicMock()
    one = BlobReader(repo, ref, shared=False, keep=False)
    with patch.object(one, "_lock", MagicMock()) as lock:
        copy = one.reader()
        assert copy is one.reader()
        assert one.distrust(copy)
        repo.blob_cache.drop.assert_called_once_with(ref)
        source = one.reader()
        assert source is repo.storage.open.return_value.__enter__.return_value
        assert one.distrust(copy), "what another thread has seen, too"
        assert not one.distrust(source)
        assert not one.distrust(None)
        assert lock.__enter__.call_count == 7
    assert repo.blob_cache.drop.call_count == 1


def test_all_readers_are_closed_after_the_last_batch() -> None:
    repo = MagicMock()
    one = BlobReader(repo, MagicMock(), shared=False, keep=False)
    one.left = 2
    copy, source = repo.blob_cache.open.return_value, repo.storage.open.return_value
    one.distrust(one.reader())
    one.reader()
    with patch.object(one, "_lock", MagicMock()) as lock:
        one.done()
        assert not source.__exit__.called
        one.done()
        assert lock.__enter__.call_count == 2
    assert copy.__exit__.call_count == source.__exit__.call_count == 1


KEYS = 6


def test_a_load_continues_with_a_blob_that_was_repaired_in_the_meantime(
    remote_store: Store, faults: FaultyStore
) -> None:
    def change() -> None:
        repo = elsewhere(remote_store)
        commit = remote_store.get("default@1").commit
        keys = [key for key in blob_keys(remote_store) if commit.txid in key]
        move(repo, commit)
        for key in keys:
            flip(remote_store, key, 4100)

    faults.inject(call_first("read_into", meanwhile(change), key="objects/*"))
    assert same_state(remote_store.read("default@1"), state())


def test_loading_a_purged_checkpoint_raises_gone(remote_store: Store, faults: FaultyStore) -> None:
    def change() -> None:
        repo = elsewhere(remote_store)
        forget(repo, list_commits(repo).visible()[0])
        collect(repo)

    faults.inject(call_first("read_into", meanwhile(change), key="objects/*"))
    with pytest.raises(Gone, match="was purged while it was read"):
        remote_store.load(zeros(), "default@1")


def test_a_load_raises_an_error_if_every_copy_of_a_blob_is_damaged(remote_store: Store) -> None:
    repo = elsewhere(remote_store)
    commit = remote_store.get("default@1").commit
    made = move(repo, commit)
    for key in blob_keys(remote_store):
        flip(remote_store, key, 4100)
    with pytest.raises(Damaged, match="is damaged") as caught:
        remote_store.read("default@1")
    assert caught.value.checkpoints == (made.id,)
