"""Loads of damaged, forgotten and purged checkpoints raise the right error."""

from __future__ import annotations

import pytest

from casckpt.errors import Damaged, Gone
from casckpt.history.commits import forget, list_commits
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore, call_first
from tests.support.gcs import collect
from tests.support.loads import elsewhere, state, zeros
from tests.support.repositories import meanwhile
from tests.support.rewrites import move
from tests.support.saves import blob_keys, flip, same_state


def test_a_load_follows_a_repair_of_a_damaged_blob(remote_store: Store, faults: FaultyStore) -> None:
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


def test_damage_in_all_copies_raises_an_error(remote_store: Store) -> None:
    repo = elsewhere(remote_store)
    commit = remote_store.get("default@1").commit
    made = move(repo, commit)
    for key in blob_keys(remote_store):
        flip(remote_store, key, 4100)
    with pytest.raises(Damaged, match="is damaged") as caught:
        remote_store.read("default@1")
    assert caught.value.checkpoints == (made.id,)
