"""A checkpoint that has lost a blob is rewritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.contents import manifests
from casckpt.contents.refs import resolve
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.keys import blob_key, manifest_key
from casckpt.format.sections.blobs import BlobRef
from casckpt.history import commits, tags
from casckpt.history.commits import list_commits
from casckpt.repository.repository import Repository
from casckpt.upkeep.repair.repair import Rewritten, repair
from casckpt.upkeep.repair.verify import verify
from tests.support.checkpoints import (
    array,
    content,
    flip,
    only_blob,
    read_arrays,
    save_arrays,
)
from tests.support.faulty import FaultyStore, call_first, fail_after, fail_before
from tests.support.gcs import collect
from tests.support.repairs import LARGE, LEAF, STATE, B, copy_into, damage, with_dead_cells
from tests.support.repositories import memory, repository


@pytest.mark.parametrize("how", ["short", "gone"])
def test_lost_dead_cells_do_not_prevent_a_rewrite(repo: Repository, other: Repository, how: str) -> None:
    older, newer = with_dead_cells(repo)
    later = save_arrays(repo, {"x": array(20)}, step=2)
    tags.set_tag(repo, "best", newer)
    save_arrays(other, {"a": STATE["a"], "c": STATE["c"]})
    expected = content({"a": STATE["a"], "c": STATE["c"], "new": array(7)})
    (ref,) = (ref for ref in manifests.get(repo, newer).blobs if ref.uploader == older.txid)
    damage(repo, f"objects/{ref.uploader}/{ref.hash}.safetensors", how)
    assert len(repair(repo).lost) == 1, "without the other store it cannot be had"
    assert [commit.last for commit in list_commits(repo).live()] == ["committed"] * 2
    found = repair(repo, sources=[other])
    assert found.rewritten == (Rewritten("run", 1, newer.id),)
    made = resolve(repo, "run@1")
    assert (made.id, made.origin, made.txid != newer.txid) == (newer.id, newer.txid, True)
    assert read_arrays(repo, made) == expected
    assert (made.committed.ephemeral, made.committed.created_at) == (True, newer.committed.created_at)
    assert resolve(repo, "run@latest").id == later.id, "it must not become the newest"
    assert resolve(repo, "tag:best").id == made.id
    assert found.lost[0].checkpoints == (newer.id,) if found.lost else True
    collect(repo)
    assert not verify(repo).is_damaged
    assert read_arrays(repo, made) == expected
    assert list(repo.storage.list("transactions/")) == []


def test_live_cells_next_to_lost_dead_cells_are_moved_to_a_new_blob(repo: Repository) -> None:
    older = save_arrays(repo, LARGE, cell=LEAF)
    kept = {"a": LARGE["a"], "d": LARGE["d"]}
    save_arrays(repo, kept, step=1, reuse=older, cell=LEAF)
    commits.forget(repo, older)
    collect(repo)
    key = only_blob(repo, older)
    flip(repo, key, B + 7)
    verify(repo)
    assert len(repair(repo).rewritten) == 1
    made = resolve(repo, "run@1")
    assert read_arrays(repo, made) == content(kept)
    collect(repo)
    assert not verify(repo).is_damaged


def test_a_rewrite_whose_response_was_lost_is_found(repo: Repository, faults: FaultyStore, other: Repository) -> None:
    older, newer = with_dead_cells(repo)
    tags.set_tag(repo, "best", newer)
    (ref,) = (ref for ref in manifests.get(repo, newer).blobs if ref.uploader == older.txid)
    damage(repo, f"objects/{ref.uploader}/{ref.hash}.safetensors", "gone")
    save_arrays(other, {"a": STATE["a"], "c": STATE["c"]})
    faults.inject(fail_after("put", key="commits/*-1"), fail_before("get", key="commits/*-1"))
    assert len(repair(repo, sources=[other]).rewritten) == 1
    (made,) = list_commits(repo).visible()
    assert (made.id, made.origin) == (newer.id, newer.txid)
    assert resolve(repo, "tag:best") == made
    assert list(repo.storage.list("transactions/")) == []


def test_a_checkpoint_forgotten_during_a_repair_is_not_rewritten(
    repo: Repository, faults: FaultyStore, other: Repository
) -> None:
    older, newer = with_dead_cells(repo)
    (ref,) = (ref for ref in manifests.get(repo, newer).blobs if ref.uploader == older.txid)
    damage(repo, f"objects/{ref.uploader}/{ref.hash}.safetensors", "gone")
    save_arrays(other, {"a": STATE["a"], "c": STATE["c"]})

    def forget(call: object) -> None:
        faults.heal()
        commits.forget(repo, newer)

    faults.inject(call_first("put", forget, key="transactions/*"))
    found = repair(repo, sources=[other])
    assert found.rewritten == ()
    assert list_commits(repo).visible() == []
    assert list(repo.storage.list("transactions/")) == []


def test_all_checkpoints_that_share_a_lost_blob_are_rewritten(repo: Repository, other: Repository) -> None:
    older = save_arrays(repo, STATE, step=0)
    users = [
        save_arrays(repo, {"a": STATE["a"], "new": array(30 + step)}, step=step, reuse=older) for step in range(1, 4)
    ]
    commits.forget(repo, older)
    collect(repo)
    save_arrays(other, {"a": STATE["a"]})
    damage(repo, f"objects/{older.txid}/{manifests.get(repo, users[0]).blob(0).hash}.safetensors", "gone")
    found = repair(repo, sources=[other])
    assert [one.id for one in found.rewritten] == [commit.id for commit in users]
    for step in range(1, 4):
        assert read_arrays(repo, resolve(repo, f"run@{step}")) == content({"a": STATE["a"], "new": array(30 + step)})


def test_shared_cells_are_stored_once_at_their_new_locations(repo: Repository, other: Repository) -> None:
    """This holds even if each checkpoint needs different cells of the blob.

    Otherwise, a hundred checkpoints would get a hundred copies.
    """
    older = save_arrays(repo, STATE, step=0)
    parts = [{"a": STATE["a"], "b": STATE["b"]}, {"a": STATE["a"]}, {"a": STATE["a"], "b": STATE["b"]}]
    states = [{**part, "new": array(30 + step)} for step, part in enumerate(parts)]
    for step, state in enumerate(states, 1):
        save_arrays(repo, state, step=step, reuse=older)
    commits.forget(repo, older)
    collect(repo)
    save_arrays(other, {"a": STATE["a"]})
    save_arrays(other, {"b": STATE["b"]})
    (shared,) = {ref for step in (1, 2, 3) for ref in _blobs(repo, step) if ref.uploader == older.txid}
    damage(repo, blob_key(shared.uploader, shared.hash), "gone")
    assert len(repair(repo, sources=[other]).rewritten) == 3
    collect(repo)
    assert len({ref for step in (1, 2, 3) for ref in _blobs(repo, step)}) == 3 + 1
    for step, state in enumerate(states, 1):
        assert read_arrays(repo, resolve(repo, f"run@{step}")) == content(state)
    assert not verify(repo).is_damaged


def test_damage_to_one_checkpoint_does_not_prevent_the_repair_of_others(repo: Repository, other: Repository) -> None:
    older = save_arrays(repo, STATE, step=0)
    save_arrays(repo, {"a": STATE["a"], "b": STATE["b"]}, step=1, reuse=older)
    save_arrays(repo, {"a": STATE["a"], "c": STATE["c"]}, step=2, reuse=older)
    commits.forget(repo, older)
    collect(repo)
    save_arrays(other, {"a": STATE["a"]})
    save_arrays(other, {"c": STATE["c"]})
    damage(repo, only_blob(repo, older), "gone")
    found = repair(repo, sources=[other])
    assert [one.step for one in found.rewritten] == [2]
    assert [(one.keys, len(one.checkpoints)) for one in found.lost] == [(("a", "b"), 1)]
    assert read_arrays(repo, resolve(repo, "run@2")) == content({"a": STATE["a"], "c": STATE["c"]})


def _blobs(repo: Repository, step: int) -> list[BlobRef]:
    return list(manifests.get(repo, resolve(repo, f"run@{step}")).blobs)


@pytest.mark.parametrize("what", ["blob", "manifest"])
def test_a_checkpoint_rewritten_by_a_concurrent_repair_is_not_lost(
    tmp_path: Path, repo: Repository, faults: FaultyStore, other: Repository, what: str
) -> None:
    older, twin, state = *(save_arrays(repo, STATE, step=step) for step in range(2)), {"a": STATE["a"]}
    newer = save_arrays(repo, state, step=2, reuse=older)
    if what == "blob":
        for one in (older, twin):
            commits.forget(repo, one)
        collect(repo)
        damage(repo, only_blob(repo, older), "gone")
        save_arrays(other, state)
    else:
        newer = save_arrays(repo, state, step=3, reuse=twin)
        copy_into(other, repo, newer)
        damage(repo, manifest_key(newer.txid, newer.id), "gone")
    first, second = (repository(tmp_path / name, faults, seed=seed) for seed, name in enumerate(["one", "two"], 5))

    def meanwhile(call: object) -> None:
        faults.heal()
        assert not repair(second, sources=[other]).is_damaged

    faults.inject(call_first("put", meanwhile, key="transactions/*"))
    found = repair(first, sources=[other])
    assert (found.rewritten, found.lost, found.lost_manifests) == ((), (), ())
    assert read_arrays(first, resolve(first, newer.id)) == content(state)


def test_nothing_is_written_for_checkpoints_with_lost_bytes(tmp_path: Path) -> None:
    """A transaction and a listing for each of thousands of such checkpoints would take minutes, for nothing."""
    storage = FaultyStore(memory())
    repo = repository(tmp_path, storage)
    first = last = save_arrays(repo, {"a": array(1)})
    for step in range(1, 6):
        last = save_arrays(repo, {"a": array(1), "b": array(step + 1)}, step=step, reuse=last)
    flip(repo, only_blob(repo, first), DATA_OFFSET)
    verify(repo)
    storage.calls.clear()
    (lost,) = repair(repo).lost
    assert [one.step for one in lost.needed_by] == [0, 1, 2, 3, 4, 5]
    assert storage.keys("put") == []
