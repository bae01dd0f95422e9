"""Invariants of a save. See "A save" in docs/design.md."""

from __future__ import annotations

import pytest
import torch

from casckpt.format.keys import commit_key
from casckpt.tensors.memory import TensorMemory
from tests.support.faulty import FaultyStore
from tests.support.repositories import memory
from tests.support.saves import cells, same_state, small


def test_the_parents_log_is_read_after_the_transaction_begins_and_before_the_first_upload() -> None:
    """The parent is live at that time, and every gc that could purge it sees the transaction."""
    storage = FaultyStore(memory(near=False))
    store = small(storage)
    parent = store.save({"w": cells(3)}, step=1)
    before = len(storage.calls)
    store.save({"w": cells(3)}, step=2)
    calls = [(call.method, call.key) for call in storage.calls[before:]]
    begun = next(i for i, (method, key) in enumerate(calls) if method == "put" and key.startswith("transactions/"))
    uploaded = next(i for i, (method, key) in enumerate(calls) if method == "put" and key.startswith("objects/"))
    assert begun < uploaded
    log = [("get", commit_key(parent.commit.txid, number)) for number in range(2)]
    assert [call for call in calls if "commits/" in call[1] and call[0] != "put"] == log
    assert [call for call in calls[begun:uploaded] if call in log] == log


def test_a_save_never_lists_all_commits() -> None:
    storage = FaultyStore(memory(near=False))
    store = small(storage)
    # the first save checks whether announcements were lost
    store.save({"w": cells(3), "kept": cells(2, seed=0)}, step=0)
    storage.calls.clear()
    for step in range(1, 4):
        store.save({"w": cells(3), "kept": cells(2, seed=0)}, step=step)
    store.save({"w": cells(3), "kept": cells(2, seed=0), "other": cells(1)}, run="another", step=0)
    assert store.get("another@latest").stats.blobs_reused
    assert ("list", "commits/") not in {(call.method, call.key) for call in storage.calls}


def test_written_bytes_match_the_hashed_bytes_even_if_the_tensor_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a program continues training too early, it mixes two steps, but every cell remains readable."""
    copy_out = TensorMemory.copy_out

    def then_train(self: TensorMemory, lo: int, hi: int, buffer: memoryview) -> None:
        copy_out(self, lo, hi, buffer)
        self.data.add_(1)

    store = small(memory(near=False))
    state = {"w": torch.zeros(4096)}
    with monkeypatch.context() as patch:
        patch.setattr(TensorMemory, "copy_out", then_train)
        store.save(state, step=1, threads=1)
    found = store.read("default@1")["w"].reshape(-1, 1024)
    assert [row.unique().tolist() for row in found] == [[0], [1], [2], [3]]
    assert not store.verify().is_damaged


@pytest.mark.parametrize("newest", [False, True])
def test_cells_of_a_purged_checkpoint_are_not_reused(newest: bool) -> None:
    """The blobs of the checkpoint may be deleted before the commit."""
    store = small(memory(near=False))
    state = {"w": cells(3)}
    if newest:
        store.save({"w": cells(3)}, step=1)
    old = store.save(state, step=2)
    if not newest:
        store.save({"w": cells(3)}, step=1)
    store.forget(old)
    storage = store.repository.storage
    kept = {entry.key: storage.get(entry.key, limit=1 << 20) for entry in storage.list("objects/")}
    store.gc(min_age=0)
    for key, data in kept.items():  # a gc that was killed before it had deleted everything
        if storage.size(key) is None:
            storage.put(key, data)
    again = store.save(state, step=3)
    assert again.stats.blobs_reused == 0
    assert store.gc(min_age=0).deleted_blobs > 0
    assert same_state(store.read("default@3"), state)
