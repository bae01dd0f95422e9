"""Loads of damaged, forgotten and purged checkpoints raise the right error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from casckpt.errors import Damaged, Gone
from casckpt.history.commits import forget, list_commits
from casckpt.store.store import Store
from tests.loading.test_rewritten import elsewhere, state
from tests.support.faulty import FaultyStore, call_first
from tests.support.gcs import collect
from tests.support.repositories import meanwhile, memory
from tests.support.rewrites import move
from tests.support.saves import blob_keys, flip, same_state, small

KEYS = 6


def zeros() -> dict[str, Any]:
    return {key: torch.zeros_like(one) if isinstance(one, torch.Tensor) else None for key, one in state().items()}


@pytest.fixture
def faults() -> FaultyStore:
    return FaultyStore(memory(near=False))


@pytest.fixture
def store(faults: FaultyStore) -> Store:
    made = small(faults)
    made.save(state(), step=1)
    return made


def test_a_load_follows_a_repair_of_a_damaged_blob(store: Store, faults: FaultyStore) -> None:
    def change() -> None:
        repo = elsewhere(store)
        commit = store.get("default@1").commit
        keys = [key for key in blob_keys(store) if commit.txid in key]
        move(repo, commit)
        for key in keys:
            flip(store, key, 4100)

    faults.inject(call_first("read_into", meanwhile(change), key="objects/*"))
    assert same_state(store.read("default@1"), state())


def test_loading_a_purged_checkpoint_raises_gone(store: Store, faults: FaultyStore) -> None:
    def change() -> None:
        repo = elsewhere(store)
        forget(repo, list_commits(repo).visible()[0])
        collect(repo)

    faults.inject(call_first("read_into", meanwhile(change), key="objects/*"))
    with pytest.raises(Gone, match="was purged while it was read"):
        store.load(zeros(), "default@1")


def test_damage_in_all_copies_raises_an_error(store: Store) -> None:
    repo = elsewhere(store)
    commit = store.get("default@1").commit
    made = move(repo, commit)
    for key in blob_keys(store):
        flip(store, key, 4100)
    with pytest.raises(Damaged, match="is damaged") as caught:
        store.read("default@1")
    assert caught.value.checkpoints == (made.id,)
