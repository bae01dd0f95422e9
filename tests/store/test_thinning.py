"""Thinned checkpoints: weights are unchanged under every name, and dropped entries are reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from casckpt.base.names import run_hash
from casckpt.errors import Conflict, InvalidInput, MissingKey, NotFound
from casckpt.history.commits import list_commits
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from casckpt.upkeep.thin import execute, plan_thin
from tests.support.faulty import FaultyStore, call_first
from tests.support.repositories import meanwhile, memory
from tests.support.saves import CELL, blob_keys, cells, content, same_state, small, steps

DROP = ["optim.*"]


def state(step: int) -> dict[str, Any]:
    model = {"emb": cells(20, seed=1), "head": cells(4, seed=step)}
    sizes = {"emb": 260, "head": 4}  # branches of more than 1 MiB do not share blobs with others
    moments = {
        name: {"exp_avg": cells(size, seed=100 * size + step), "step": torch.tensor(float(step))}
        for name, size in sizes.items()
    }
    return {"model": model, "optim": {"state": moments, "groups": [{"lr": 1e-4}]}}


def fresh() -> dict[str, Any]:
    return {"model": {"emb": torch.zeros_like(cells(20)), "head": torch.zeros_like(cells(4))}}


@pytest.fixture
def store() -> Store:
    """A store with run@1 to run@5."""
    made = small()
    for step in range(1, 6):
        made.save(state(step), run="run", step=step, metadata={"n": step}, metrics={"loss": 1 / step})
    return made


def test_weights_of_thinned_checkpoints_are_unchanged(store: Store) -> None:
    before = {one.step: (one.id, one.created_at, one.metrics) for one in store.checkpoints()}
    blobs = {key: content(store, key) for key in blob_keys(store)}
    store.tag("best", "run@2")
    result = store.thin(drop=DROP, keep_last=2)
    assert [one.step for one in result.thinned] == [1, 3]  # tagged checkpoints are not thinned
    assert {one.step: (one.id, one.created_at, one.metrics) for one in store.checkpoints()} == before
    assert {key: content(store, key) for key in blob_keys(store)} == blobs
    store.gc(min_age=0)
    assert steps(store) == [("run", step) for step in range(1, 6)]
    for step in range(1, 6):
        loaded = fresh()
        store.load(loaded, f"run@{step}", unread="ignore")
        assert same_state(loaded["model"], state(step)["model"])
    for step in (2, 4, 5):
        assert same_state(store.read(f"run@{step}"), state(step))
    assert not store.verify().is_damaged
    assert store.get("run@3").commit.dropped is not None
    assert (store.thin(drop=DROP, keep_last=2).thinned, store.gc(min_age=0).deleted_blobs) == ((), 0)


def test_gc_frees_the_reported_bytes(store: Store) -> None:
    said = store.thin(drop=DROP, keep_last=2, dry_run=True)
    assert (said.dry_run, said.entries, len(said.thinned)) == (True, 12, 3)
    assert store.get("run@1").commit.dropped is None
    assert said.until is not None
    done = store.thin(drop=DROP, keep_last=2)
    assert (done.entries, done.nbytes, done.freed_bytes) == (said.entries, said.nbytes, said.freed_bytes)
    assert store.gc().deleted_bytes == 0
    assert store.gc(dry_run=True).later_bytes == said.freed_bytes
    assert store.gc(min_age=0).deleted_bytes == said.freed_bytes >= 0.95 * said.nbytes


def test_thinned_entries_are_reported(store: Store) -> None:
    store.thin("run@1", drop=DROP)
    whole = state(1)
    for load in (
        lambda: store.read("run@1"),
        lambda: store.load(whole, "run@1"),
        lambda: store.read("run@1", keys=DROP),
    ):
        with pytest.raises(MissingKey, match=r"(?s)optim\.state.*thinned by --drop 'optim\.\*' \(20"):
            load()
    loaded = store.load(whole, "run@1", strict=False)
    assert sorted(loaded.missing_keys)[:2] == ["optim.state.emb.exp_avg", "optim.state.emb.step"]
    assert same_state(store.read("run@1", keys=["model.*"])["model"], state(1)["model"])
    assert store.diff("run@1", "run@2").changed == store.diff("run@1", "run@2").changed
    assert "model.emb" in store.diff("run@1", "run@2").unchanged


def test_a_thinned_checkpoint_can_be_restored_until_the_purge(store: Store) -> None:
    store.thin("run@1", "run@2", drop=DROP)
    store.restore("run@1", whole=True)
    assert same_state(store.read("run@1"), state(1))
    store.gc(min_age=0)
    assert same_state(store.read("run@1"), state(1))
    with pytest.raises(NotFound, match="purged"):
        store.restore("run@2", whole=True)
    with pytest.raises(NotFound, match="was never thinned"):
        store.restore("run@3", whole=True)
    store.thin("run@1", drop=DROP)
    store.gc(min_age=0)
    assert [one.commit.dropped is not None for one in store.checkpoints()] == [True, True, False, False, False]


def test_thinned_checkpoints_in_a_range_are_restored(store: Store) -> None:
    store.thin("run@1", "run@2", drop=DROP)
    assert [one.step for one in store.restore_many("run@..3", whole=True).restored] == [1, 2]
    assert same_state(store.read("run@2"), state(2))
    with pytest.raises(NotFound, match="was never thinned"):
        store.restore_many("run@..3", whole=True)
    with pytest.raises(InvalidInput, match="use restore_many for ranges"):
        store.restore("run@..3", whole=True)
    store.forget("run@1")
    assert store.restore("run@1") == store.get("run@1")


def test_tags_move_to_the_thinned_commit_and_protect_only_its_entries(store: Store) -> None:
    store.tag("best", "run@1")
    with pytest.raises(Conflict, match="tagged best"):
        store.thin("run@1", drop=DROP)
    said = store.thin("run@1", drop=DROP, tagged=True)
    assert store.tags()["best"].id == store.get("run@1").id
    assert store.gc(min_age=0).deleted_bytes == said.freed_bytes > 0
    assert same_state(store.read("tag:best", keys=["model.*"])["model"], state(1)["model"])


def test_a_lease_protects_entries_that_are_thinned_later(store: Store) -> None:
    with store.lease("run@1") as held:
        with pytest.raises(Conflict, match="have expired"):
            store.thin("run@1", drop=DROP, tagged=True)
        assert [one.step for one in store.thin(drop=DROP, keep_last=1, tagged=True).thinned] == [2, 3, 4]
        assert same_state(store.read(held), state(1))


def test_a_lease_acquired_after_thinning_was_planned_keeps_all_entries(store: Store) -> None:
    plan = plan_thin(store.repository, ["run@1"], drop=DROP)
    with store.lease("run@1"):
        assert len(execute(store.repository, plan)) == 1
        assert store.gc(min_age=0).deleted_bytes == 0
    assert same_state(store.read(store.restore("run@1", whole=True)), state(1))


def test_a_tag_set_on_a_complete_checkpoint_keeps_it_complete(store: Store) -> None:
    store.thin("run@1", drop=DROP)
    store.restore("run@1", whole=True)
    store.tag("best", "run@1")
    store.thin("run@1", drop=["optim.state.emb.*"], tagged=True)
    (tag,) = store.tags().values()
    assert tag.commit.dropped is not None
    store.gc(min_age=0)
    assert store.read("run@1", keys=["optim.state.head.*"])


def test_thinning_in_two_steps_has_the_same_result_as_in_one(store: Store) -> None:
    store.thin("run@1", drop=["optim.state.emb.*"])
    store.thin("run@1", drop=["optim.state.head.*"])
    store.thin("run@2", drop=["optim.state.head.*", "optim.state.emb.*"])
    assert store.get("run@1").commit.dropped == store.get("run@2").commit.dropped
    store.gc(min_age=0)
    assert same_state(store.read("run@1", keys=["model.*"])["model"], state(1)["model"])


def test_a_later_save_reuses_the_entries_that_remain_after_thinning(store: Store) -> None:
    store.thin("run@5", drop=DROP)
    store.gc(min_age=0)
    saved = store.save(state(5), run="run", step=6)
    assert saved.stats.blobs_reused >= 2
    assert saved.stats.bytes_written < 264 * CELL * 1.1
    assert same_state(store.read("run@6"), state(5))
    assert same_state(store.read("run@5", keys=["model.*"])["model"], state(5)["model"])


def test_a_rule_that_keeps_everything_complete_changes_nothing(store: Store) -> None:
    for drop in (DROP, "nothing.*"):
        assert store.thin(drop=drop, keep_last=100).thinned == ()
    empty = small()
    empty.create()
    assert empty.thin(drop=DROP, keep_last=1).thinned == ()


def test_contradictory_arguments_are_rejected(store: Store) -> None:
    for arguments in ({"drop": DROP}, {"drop": [], "keep_last": 1}, {"drop": [1], "keep_last": 1}):
        with pytest.raises(InvalidInput):
            store.thin(**arguments)
    with pytest.raises(InvalidInput, match="specify either the checkpoints to thin"):
        store.thin("run@1", drop=DROP, keep_last=1)
    with pytest.raises(InvalidInput, match="would drop every tensor"):
        store.thin("run@1", drop="*")
    with pytest.raises(MissingKey, match="opt"):
        store.thin("run@1", drop="opt.*")
    with pytest.raises(TypeError, match="keep_first"):
        store.thin(drop=DROP, keep_first=1)  # type: ignore[call-arg]
    assert all(one.commit.dropped is None for one in store.checkpoints())
    assert len(list_commits(store.repository).commits) == 5
    assert all(run_hash("run") in one.commit.txid for one in store.checkpoints())


@pytest.mark.parametrize("keys", [None, ["model.*"]])
def test_a_load_during_thinning_continues_or_raises_an_error(keys: list[str] | None) -> None:
    storage = FaultyStore(memory(near=False))
    reading = small(storage)
    for step in (1, 2):
        reading.save(state(step), run="run", step=step)
    other = Store(Repository(storage.inner))

    def overtake() -> None:
        other.thin("run@1", drop=DROP)
        other.gc(min_age=0)

    storage.inject(call_first("open", meanwhile(overtake), key="*.safetensors"))
    if keys is None:
        with pytest.raises(MissingKey, match="thinned by --drop"):
            reading.read("run@1")
    else:
        assert same_state(reading.read("run@1", keys=keys)["model"], state(1)["model"])
