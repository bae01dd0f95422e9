from __future__ import annotations

from pathlib import Path

import pytest
import torch

from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import Conflict, Damaged, Gone, NotFound, StorageError
from casckpt.format.keys import commit_key, copied_txid, manifest_key
from casckpt.format.records import Purged
from casckpt.history.commits import Commit, forget, list_commits, purge
from casckpt.history.tags import delete_tag, set_tag
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from casckpt.upkeep.gc.forgetting import plan_forget, plan_restore, restore
from tests.support.faulty import Call, FaultyStore, call_first, fail_before
from tests.support.repositories import Ticks, commit_bare, memory, repository
from tests.support.rewrites import move
from tests.support.saves import cells, small
from tests.support.timed import TimedStore


def test_references_and_ranges_select_each_checkpoint_only_once(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    made = [commit_bare(repo, "a", step) for step in (1, 2, 3)]
    assert plan_forget(repo, ["a@2..", "a@3", made[1]]) == made[1:]
    assert len(list_commits(repo).visible()) == 3, "a plan writes nothing"


def test_forget_changes_nothing_if_one_of_the_named_checkpoints_is_tagged(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    made = [commit_bare(repo, "a", step) for step in (1, 2, 3)]
    set_tag(repo, "best", made[1])
    made = list_commits(repo).live()
    with pytest.raises(Conflict, match=r"a@2 .* by best.*--tagged") as caught:
        plan_forget(repo, ["a@1..3"])
    assert caught.value.checkpoints == (made[1].id,)
    assert plan_forget(repo, ["a@1..3"], tagged=True) == made
    delete_tag(repo, "best")
    assert plan_forget(repo, ["a@1..3"]) == made


def test_forget_uses_the_current_status_of_a_commit(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    old = commit_bare(repo, "a", 1)
    now = forget(repo, old)
    assert plan_forget(repo, [old]) == [now]


def test_forgetting_a_missing_checkpoint_raises_not_found(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    commit_bare(repo, "a", 1)
    with pytest.raises(NotFound):
        plan_forget(repo, ["a@1", "a@7"])


# restoring


def forgotten(repo: Repository, *at: int) -> list[Commit]:
    return [forget(repo, commit_bare(repo, "a", step)) for step in at]


def visible(repo: Repository) -> list[int]:
    return [commit.step for commit in list_commits(repo).visible()]


def test_restoring_many_checkpoints_needs_one_listing(tmp_path: Path) -> None:
    storage = FaultyStore(memory())
    repo = repository(tmp_path, storage)
    gone = forgotten(repo, 1, 2, 3, 4)
    storage.calls.clear()
    result = restore(repo, *plan_restore(repo, ["a@..3", gone[3].id, "a@2"]))
    assert [commit.last for commit in result.restored] == ["restored"] * 4
    assert storage.keys("list") == ["commits/", "settings/"]
    assert storage.count("put", "runs/*") == 1
    assert visible(repo) == [1, 2, 3, 4]


def test_nothing_is_restored_if_one_checkpoint_cannot_be_restored(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    gone = forgotten(repo, 1, 2, 3)
    twin = commit_bare(repo, "a", 2)
    with pytest.raises(Conflict, match=f"{twin.id[:12]}.* is visible under the same run and step"):
        plan_restore(repo, [one.id for one in gone])
    purge(repo, gone[2])
    with pytest.raises(NotFound, match="purged"):
        plan_restore(repo, [gone[0].id, gone[2].id])
    forget(repo, twin)
    with pytest.raises(Conflict, match="have the same run and step"):
        plan_restore(repo, [gone[0].id, gone[1].id, twin.id])
    assert visible(repo) == []


def test_if_a_commit_changes_during_a_restore_the_others_are_still_restored(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    gone = forgotten(repo, 1, 2, 3)
    plan = plan_restore(repo, ["a@.."])
    purge(repo, gone[1])
    result = restore(repo, *plan)
    assert [commit.step for commit in result.restored] == [1, 3] == visible(repo)
    assert [(one.commit.step, type(one.error)) for one in result.failed] == [(2, Conflict)]
    with pytest.raises(Conflict, match=r"2 of 3 were restored"):
        result.raise_failure()


def test_a_storage_error_reports_restored_and_remaining_checkpoints(tmp_path: Path) -> None:
    storage = FaultyStore(memory())
    repo = repository(tmp_path, storage)
    gone = forgotten(repo, 1, 2, 3)
    plan = plan_restore(repo, ["a@.."])
    storage.inject(fail_before("put", key=f"commits/{gone[1].txid}*"))
    result = restore(repo, *plan)
    assert [commit.step for commit in result.restored] == [1] == visible(repo)
    assert [one.commit.step for one in result.failed] == [2]
    assert [commit.step for commit in result.left] == [3]
    with pytest.raises(StorageError, match=r"1 of 3 were restored"):
        result.raise_failure()


def test_an_interrupted_restore_reports_restored_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = FaultyStore(memory())
    repo = repository(tmp_path, storage)
    gone = forgotten(repo, 1, 2)

    def interrupt(_: Call) -> None:
        raise KeyboardInterrupt

    plan = plan_restore(repo, ["a@.."])
    storage.inject(call_first("put", interrupt, key=f"commits/{gone[1].txid}*"))
    with pytest.raises(KeyboardInterrupt):
        restore(repo, *plan)
    assert "restored 1 of 2: a@1" in caplog.text


# what was purged, and still stored


@pytest.fixture
def purged() -> tuple[Store, Checkpoint, TimedStore]:
    """A store that keeps bytes for a week, a checkpoint in it that a writer purged, and its storage."""
    storage = TimedStore(memory(), Ticks())
    store = small(storage)
    store.change_settings(min_age="7d")
    saved = [store.save({"w": cells(3, seed=step)}, run="run", step=step) for step in range(2)]
    record = Purged(txid=saved[0].commit.txid, time=5, who="w")
    store.repository.put_record(commit_key(record.txid, 1), record)
    store.gc()
    return store, saved[0], storage


@pytest.mark.parametrize("how", ["id", "prefix", "step", "object"])
def test_restore_copies_a_purged_checkpoint_whose_bytes_are_left(
    purged: tuple[Store, Checkpoint, TimedStore], how: str
) -> None:
    store, gone, storage = purged
    refs: dict[str, str | Checkpoint] = {"id": gone.id, "prefix": gone.id[:8], "step": "run@0", "object": gone}
    ref = refs[how]
    with pytest.raises(Gone):
        store.get(gone.id)
    assert [one.step for one in store.restore_many(ref, dry_run=True).restored] == [0]
    assert store.restore(ref).id == gone.id
    assert store.get("run@0").commit.txid == copied_txid(gone.commit.txid, 1)
    assert store.restore(ref).id == gone.id  # it is visible
    storage.clock.advance(8 * 86400)
    assert store.gc().deleted_blobs == 1
    assert torch.equal(store.read("run@0")["w"], cells(3, seed=0))
    assert not store.verify().is_damaged
    assert [one.step for one in store.checkpoints()] == [0, 1]


def test_restore_refuses_a_purged_checkpoint_that_is_damaged_deleted_or_replaced(
    purged: tuple[Store, Checkpoint, TimedStore],
) -> None:
    store, gone, storage = purged
    other = store.save({"w": cells(1)}, run="run", step=0)
    with pytest.raises(Conflict, match="has a different checkpoint with that run and step"):
        store.restore(gone.id)
    store.forget(other)
    key = next(entry.key for entry in storage.list(f"objects/{gone.commit.txid}/") if entry.key.endswith("safetensors"))
    data = storage.get(key, limit=1 << 20)
    storage.replace(key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises((Damaged, Gone)):
        store.restore(gone.id)
    assert [one.step for one in store.checkpoints()] == [1]
    storage.replace(key, data)
    storage.clock.advance(8 * 86400)
    store.gc()
    with pytest.raises(Gone, match="it is gone for good"):
        store.restore(gone.id)


def test_restore_takes_the_places_of_a_purged_checkpoint_that_can_be_read() -> None:
    storage = TimedStore(memory(), Ticks())
    store = small(storage)
    store.change_settings(min_age="7d")
    saved = store.save({"w": cells(3, seed=0)}, run="run", step=0)
    txid = saved.commit.txid
    move(store.repository, saved.commit)
    storage.delete(manifest_key(txid, saved.commit.id))
    store.repository.put_record(commit_key(txid, 2), Purged(txid=txid, time=5, who="w"))
    store.restore(saved.id)
    assert torch.equal(store.read("run@0")["w"], cells(3, seed=0))
