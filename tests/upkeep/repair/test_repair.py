"""A repair recovers intact bytes from any source, and never stores damaged bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from casckpt.cli.describe import plain
from casckpt.contents import blobs, manifests
from casckpt.contents.refs import resolve
from casckpt.errors import StorageError
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.keys import commit_key, manifest_key
from casckpt.format.sections.head import decode_head
from casckpt.history import commits, tags
from casckpt.history.commits import list_commits
from casckpt.history.following import newest_reusable
from casckpt.repository.repository import Repository
from casckpt.saving.reuse_offer import make_offer
from casckpt.storage.local.newfile import temporary_name
from casckpt.storage.local.store import LocalStore
from casckpt.upkeep.repair.repair import repair
from casckpt.upkeep.repair.verify import verify
from tests.support.checkpoints import (
    CELL,
    array,
    content,
    flip,
    only_blob,
    read_arrays,
    save_arrays,
)
from tests.support.far import FarStore
from tests.support.faulty import FaultyStore, call_first, fail_before
from tests.support.gcs import collect, run_gc
from tests.support.repairs import STATE, copy_into, damage, with_dead_cells
from tests.support.repositories import meanwhile, memory, repository
from tests.support.saves import blob_keys, cells, reopened, same_state, small
from tests.support.saves import flip as flip_object


def test_repair_does_nothing_without_damage(repo: Repository, faults: FaultyStore) -> None:
    save_arrays(repo, STATE)
    calls = len(faults.calls)
    found = repair(repo)
    assert (found.blobs, found.manifests, found.rewritten, found.lost, found.is_damaged) == ((), (), (), (), False)
    assert {call.method for call in faults.calls[calls:]} <= {"list", "get", "size"}


def test_repair_works_in_a_folder(tmp_path: Path, other: Repository) -> None:
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    one = save_arrays(repo, STATE)
    save_arrays(other, STATE)
    damage(repo, only_blob(repo, one), "flipped")
    assert len(repair(repo, sources=[other]).blobs) == 1
    assert read_arrays(repo, one) == content(STATE)


def test_bytes_that_no_source_has_are_reported_as_lost(repo: Repository) -> None:
    one = save_arrays(repo, STATE)
    damage(repo, only_blob(repo, one), "gone")
    before = {entry.key for entry in repo.storage.list("objects/")}
    found = repair(repo)
    assert found.is_damaged
    assert [(lost.keys, lost.checkpoints, lost.why) for lost in found.lost] == [
        (("a", "b", "c"), (one.id,), "it is gone")
    ]
    assert json.loads(json.dumps(plain(found)))["lost"][0]["checkpoints"] == [one.id]
    assert {entry.key for entry in repo.storage.list("objects/")} == before
    assert len(blobs.damaged_marks(repo)) == 1
    assert [commit.last for commit in list_commits(repo).commits.values() if commit.last != "revoked"] == ["committed"]


def test_a_damaged_manifest_does_not_prevent_other_repairs() -> None:
    """The cells of its blob could be relocated, but the objects that the new manifest would name are unknown."""
    store = small()
    store.save({"a": cells(3, seed=1), "b": cells(1, seed=2)}, step=1)
    first = blob_keys(store)[0]
    ckpt = store.save({"a": cells(3, seed=1), "text": "x" * 3000}, step=2)
    store.forget("default@1")
    store.gc(min_age=0)
    assert first in blob_keys(store)
    flip_object(store, first, DATA_OFFSET + 3 * CELL + 5)  # in b, which no checkpoint uses any more
    key = manifest_key(ckpt.commit.txid, ckpt.commit.id)
    flip_object(store, key, decode_head(store.repository.storage.get(key, limit=1 << 20))["objects"].offset)
    again = reopened(store)
    again.verify()
    found = again.repair()
    assert ([one.id for one in found.lost_manifests], len(found.lost), found.rewritten) == ([ckpt.id], 1, ())
    assert same_state(again.read("default@2", keys=["a"]), {"a": cells(3, seed=1)})


def test_the_mark_on_an_undamaged_blob_is_removed(repo: Repository) -> None:
    one = save_arrays(repo, STATE)
    (ref,) = manifests.get(repo, one).blobs
    blobs.mark_damaged(repo, ref.uploader, ref.hash, "a load saw something")
    found = repair(repo)
    assert (found.blobs, found.is_damaged) == ((), False)
    assert blobs.damaged_marks(repo) == set()


@pytest.mark.parametrize("how", ["flipped", "gone"])
@pytest.mark.parametrize("known", [True, False], ids=["catalogue", "no catalogue"])
def test_a_manifest_is_restored_from_a_different_store(
    tmp_path: Path, repo: Repository, other: Repository, how: str, known: bool
) -> None:
    base = save_arrays(repo, {"a": STATE["a"], "old": array(9)})
    one = save_arrays(repo, STATE, step=1, reuse=base)
    copy_into(other, repo, one)
    if known:
        manifests.blobs_of(repo, one)
    key = manifest_key(one.txid, one.id)
    if how == "gone":
        repo.storage.delete(key)
    else:
        flip(repo, key, 50)
    fresh = repository(tmp_path / ("." if known else "elsewhere"), repo.storage, seed=5)
    assert len(repair(fresh).lost_manifests) == 1
    found = repair(fresh, sources=[other])
    assert found.manifests == (one.id,)
    assert not found.is_damaged
    assert not verify(repository(tmp_path / "third", repo.storage)).is_damaged
    assert read_arrays(fresh, one) == content(STATE)
    assert collect(fresh).deleted_blobs == 0


@pytest.mark.parametrize("known", [True, False], ids=["catalogue", "no catalogue"])
def test_blobs_named_only_by_a_lost_manifest_are_kept(
    tmp_path: Path, repo: Repository, other: Repository, known: bool
) -> None:
    """The catalogue has the locations of these blobs. Without it, repair guesses them, and the manifest confirms the
    guess."""
    base = save_arrays(repo, {"a": STATE["a"], "old": array(9)})
    one = save_arrays(repo, STATE, step=1, reuse=base)
    commits.forget(repo, base)
    collect(repo)
    copy_into(other, repo, one)
    manifests.blobs_of(repo, one)
    repo.storage.delete(manifest_key(one.txid, one.id))
    fresh = repository(tmp_path / ("." if known else "elsewhere"), repo.storage, seed=5)
    assert repair(fresh, sources=[other]).manifests == (one.id,)
    uploaders = {ref.uploader for ref in manifests.get(fresh, one).blobs}
    assert uploaders == {base.txid, one.txid}
    assert collect(fresh).deleted_blobs == 0
    assert read_arrays(fresh, one) == content(STATE)


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_restored_manifest_has_its_original_bytes(tmp_path: Path, other: Repository, kind: str) -> None:
    """Therefore, blob locations and reusable cells in the caches of other hosts remain valid."""
    storage = LocalStore(tmp_path / "store") if kind == "folder" else FarStore(memory())
    repo = repository(tmp_path / "host", storage)
    base = save_arrays(repo, {"a": STATE["a"], "old": array(9)})
    one = save_arrays(repo, STATE, step=1, reuse=base)
    commits.forget(repo, base)
    collect(repo)
    copy_into(other, repo, one)
    saving = repository(tmp_path / "host", storage, seed=3)
    manifests.get(saving, one)
    manifests.learn(repo, [one])
    key = manifest_key(one.txid, one.id)
    before = repo.storage.get(key, limit=1 << 20)
    repo.storage.delete(key)
    fresh = repository(tmp_path / "elsewhere", storage, seed=5)
    assert repair(fresh, sources=[other]).manifests == (one.id,)
    assert repo.storage.get(key, limit=1 << 20) == before
    offer = make_offer(saving, newest_reusable(saving, one.run, anew=True), {}, run=one.run, dedup="run")
    assert offer.for_ranks(saving, {one.txid}).last == one.txid
    looking = repository(tmp_path / "host", storage, seed=4)
    assert collect(looking).deleted_blobs == 0
    assert read_arrays(repository(tmp_path / "new", storage, seed=6), one) == content(STATE)


def test_gc_during_the_repair_of_a_manifest_deletes_none_of_its_objects(tmp_path: Path, other: Repository) -> None:
    """gc knows from its catalogue which objects the manifest names."""
    storage = FarStore(memory())
    repo = repository(tmp_path / "host", storage)
    base = save_arrays(repo, {"a": STATE["a"], "old": array(9)})
    one = save_arrays(repo, STATE, step=1, reuse=base)
    copy_into(other, repo, one)
    manifests.learn(repo, [one])
    flip(repo, manifest_key(one.txid, one.id), 50)
    commits.forget(repo, base)
    run_gc(repo, min_age=0.0)
    looking = repository(tmp_path / "host", storage, seed=4)
    storage.inject(call_first("replace", meanwhile(lambda: collect(looking, wait=0.0)), key="objects/*.manifest"))
    fresh = repository(tmp_path / "elsewhere", storage, seed=5)
    assert repair(fresh, sources=[other]).manifests == (one.id,)
    assert storage.count("replace") == 2  # including the flip
    assert read_arrays(repository(tmp_path / "new", storage, seed=6), one) == content(STATE)


@pytest.mark.parametrize("blob", ["there", "gone"])
def test_a_checkpoint_whose_blob_locations_are_unknown_is_rewritten(
    tmp_path: Path, repo: Repository, other: Repository, blob: str
) -> None:
    """Two uploaders have the reused blob, so the guess is ambiguous. IDs, tags, and reads by ID still work."""
    bases = [save_arrays(repo, {"a": STATE["a"], "old": array(9)}, step=step) for step in range(2)]
    one = save_arrays(repo, STATE, step=2, reuse=bases[1])
    later = save_arrays(repo, {"x": array(20)}, step=3)
    tags.set_tag(repo, "best", one)
    copy_into(other, repo, one)
    repo.storage.delete(manifest_key(one.txid, one.id))
    if blob == "gone":
        repo.storage.delete(only_blob(repo, bases[0]))
    fresh = repository(tmp_path / "elsewhere", repo.storage, seed=5)
    if blob == "gone":  # then only one is left, and the guess is correct
        assert repair(fresh, sources=[other]).manifests == (one.id,)
        assert resolve(fresh, "run@2").txid == one.txid
        return
    found = repair(fresh, sources=[other])
    assert (found.manifests, found.is_damaged) == ((one.id,), False)
    made = resolve(fresh, one.id)
    assert (made.id, made.txid > one.txid, made.visible) == (one.id, True, True)
    assert resolve(fresh, "tag:best").txid == resolve(fresh, "run@2").txid == made.txid
    assert resolve(fresh, "run@latest").txid == later.txid
    assert read_arrays(fresh, made) == content(STATE)
    assert list_commits(fresh).commits[one.txid].last == "replaced"
    assert not verify(fresh).is_damaged
    collect(fresh)
    assert not verify(fresh).is_damaged
    assert read_arrays(fresh, made) == content(STATE)


def test_manifest_and_blobs_are_repaired_together(tmp_path: Path, repo: Repository, other: Repository) -> None:
    one = save_arrays(repo, STATE)
    copy_into(other, repo, one)
    repo.storage.delete(only_blob(repo, one))
    repo.storage.delete(manifest_key(one.txid, one.id))
    fresh = repository(tmp_path / "elsewhere", repo.storage, seed=5)
    found = repair(fresh, sources=[other])
    assert found.manifests == (one.id,)
    assert read_arrays(fresh, one) == content(STATE)
    assert not verify(fresh).is_damaged


def test_a_failed_repair_leaves_no_checkpoint_and_no_open_transaction(
    repo: Repository, faults: FaultyStore, other: Repository
) -> None:
    older, newer = with_dead_cells(repo)
    (ref,) = (ref for ref in manifests.get(repo, newer).blobs if ref.uploader == older.txid)
    damage(repo, f"objects/{ref.uploader}/{ref.hash}.safetensors", "gone")
    save_arrays(other, {"a": STATE["a"], "c": STATE["c"]})
    faults.inject(fail_before("put", key="objects/*.manifest"))
    with pytest.raises(StorageError):
        repair(repo, sources=[other])
    assert [commit.id for commit in list_commits(repo).visible()] == [newer.id]
    faults.heal()
    assert len(repair(repo, sources=[other]).rewritten) == 1


@pytest.mark.parametrize("what", ["blob", "manifest"])
def test_the_next_repair_removes_leftovers_of_a_killed_repair(tmp_path: Path, other: Repository, what: str) -> None:
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    one = save_arrays(repo, STATE)
    copy_into(other, repo, one)
    key = only_blob(repo, one) if what == "blob" else manifest_key(one.txid, one.id)
    flip(repo, key, 50)
    verify(repo)
    left = (tmp_path / "store" / key).with_name(temporary_name("x"))
    left.write_bytes(bytes(1000))  # as if killed before the rename
    assert not repair(repo, sources=[other]).is_damaged
    assert not left.exists()
    assert not verify(repo).is_damaged


def test_unreadable_records_are_reported_and_not_repaired(repo: Repository, other: Repository) -> None:
    commit = save_arrays(repo, STATE)
    save_arrays(repo, STATE, step=1, reuse=commit)
    copy_into(other, repo, commit)
    key = commit_key(commit.txid)
    record = repo.storage.get(key, limit=1 << 20)
    repo.storage.replace(key, record[:100])
    found = repair(repo, sources=[other])
    assert (found.is_damaged, [one.key for one in found.records]) == (True, [key])
    assert found.records == verify(repo).records
    repo.storage.replace(key, record)
    assert not repair(repo, sources=[other]).is_damaged
