"""If ranks name different checkpoints or different stores, all of them raise Conflict, and nothing changes."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import Conflict
from casckpt.history.transactions import begin
from casckpt.ranks.agreement import StoreIdentity, check_same
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from tests.support.ranks import Pool, outcome_of


def stored(path: Path) -> casckpt.Store:
    store = casckpt.open(path)
    for step in (1, 2):
        store.save({"a": torch.full((3,), float(step))}, run="r", step=step, no_dist=True)
    return store


def test_the_error_lists_the_checkpoint_named_by_each_rank() -> None:
    with pytest.raises(Conflict, match=r"r@1 on ranks 0, 2; r@2 on rank 1; latest on rank 3\."):
        check_same(["r@1", "r@2", "r@1", "latest"])
    check_same(["latest"] * 3)


def loads(rank: int, size: int, path: Path) -> list[Any]:
    """Try different strings, a string and a checkpoint, two checkpoints, and different stores; then equal arguments."""
    store, other = casckpt.open(path / "one"), casckpt.open(path / "two")
    one, two = store.get("r@1"), store.get("r@2")
    first = rank == 0
    calls: list[tuple[casckpt.Store, Any]] = [
        (store, "r@1" if first else "r@2"),
        (store, one if first else "r@1"),
        (store, one if first else two),
        (store if first else other, "r@1"),
        (store, "r@1"),
        (store, store.get("r@1")),
    ]
    found: list[Any] = []
    for where, ref in calls:
        state = {"a": torch.zeros(3)}
        outcome = outcome_of(lambda: where.load(state, ref))  # noqa: B023
        told = str(outcome) if isinstance(outcome, Conflict) else type(outcome).__name__
        found.append((re.sub(r"^rank \d: ", "", told), state["a"].tolist()))
    return found


def test_loading_different_checkpoints_is_a_conflict(tmp_path: Path, ranks: Pool) -> None:
    stored(tmp_path / "one")
    stored(tmp_path / "two")
    found = ranks.run(3, loads, tmp_path)
    assert found[1:] == found[:1] * 2
    texts, values = zip(*found[0], strict=True)
    assert values == ([0, 0, 0],) * 4 + ([1, 1, 1],) * 2
    assert "r@1 on rank 0; r@2 on ranks 1, 2" in texts[0]
    assert "<Checkpoint r@1 " in texts[1]
    assert "> on rank 0; r@1 on ranks 1, 2" in texts[1]
    assert texts[2].count("<Checkpoint r@") == 2
    assert "this rank uses the store at" in texts[3]
    assert texts[4:] == ("Checkpoint", "Checkpoint")


def saves(rank: int, size: int, path: Path) -> str:
    store = casckpt.open(path / ("one" if rank == 0 else "two"))
    return repr(outcome_of(lambda: store.save({"a": torch.ones(3), rank: torch.ones(3)}, run="r", step=3)))


@pytest.mark.parametrize("there", ["one two", "one", ""])
def test_a_save_into_different_stores_is_rejected_and_stays_invisible(tmp_path: Path, ranks: Pool, there: str) -> None:
    for name in there.split():
        stored(tmp_path / name)
    found = ranks.run(2, saves, tmp_path)
    told = "this rank uses the store"
    assert all(told in text for text in found), found
    for name in there.split():
        assert [one.step for one in casckpt.open(tmp_path / name).checkpoints()] == [1, 2]


def test_two_copies_of_a_store_count_as_different_stores(tmp_path: Path, ranks: Pool) -> None:
    """For example, they have the same ID but are on the disks of two hosts."""
    stored(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for text in ranks.run(2, saves, tmp_path):
        assert "all ranks must share one store" in text
    for name in ("one", "two"):
        assert [one.step for one in casckpt.open(tmp_path / name).checkpoints()] == [1, 2]


def save_after_the_store_was_made_anew(rank: int, size: int, path: Path) -> Any:
    store = casckpt.open(path)
    state = {"a": torch.full((3,), 1.0), rank: torch.ones(3)}
    store.save(state, run="r", step=1)
    if rank == 0:
        shutil.rmtree(path)
    store.save(state, run="r", step=2)
    found = {"a": torch.zeros(3)}
    return store.load(found, "r@2").step, found["a"].tolist()


def test_all_ranks_agree_on_a_recreated_store(tmp_path: Path, ranks: Pool) -> None:
    found = ranks.run(2, save_after_the_store_was_made_anew, tmp_path / "s")
    assert found == [(2, [1, 1, 1])] * 2


class Late(LocalStore):
    """A mount that reports a new name as missing for a while."""

    traits = replace(LocalStore("/").traits, stale="it is said to lag behind")
    asked = 0

    def size(self, key: str) -> int | None:
        self.asked += 1
        return super().size(key) if self.asked > 5 else None


def test_a_store_created_by_a_different_host_may_appear_late(tmp_path: Path) -> None:
    store, slept = casckpt.open(tmp_path), list[float]()
    store.create()
    transaction = begin(store.repository, "r", 1)
    late = Repository(Late(tmp_path))
    StoreIdentity.of(store.repository).check_shared(late, transaction.txid, slept.append)
    assert slept
    transaction.leave()
    slept.clear()
    elsewhere = late.new_txid("r", 2)
    with pytest.raises(Conflict, match="all ranks must share one store"):
        StoreIdentity.of(store.repository).check_shared(late, elsewhere, slept.append)
    assert sum(slept) > 60
    slept.clear()
    with pytest.raises(Conflict, match="all ranks must share one store"):
        StoreIdentity.of(store.repository).check_shared(store.repository, elsewhere, slept.append)
    assert not slept
