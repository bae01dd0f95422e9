"""A repair restores whole blobs and manifests from any intact copy, and never stores damaged bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from casckpt.base.progress import silent
from casckpt.cli.describe import plain
from casckpt.contents import blobs, manifests
from casckpt.errors import NotFound
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.keys import blob_key, commit_key, manifest_key
from casckpt.format.manifest import placed
from casckpt.format.sections.blobs import BlobRef, encode_blobs
from casckpt.history import commits
from casckpt.history.commits import Commit, list_commits
from casckpt.repository.repository import Repository
from casckpt.storage.local.newfile import temporary_name
from casckpt.storage.local.store import LocalStore
from casckpt.upkeep.repair.repair import repair
from casckpt.upkeep.repair.verify import verify
from tests.support.checkpoints import Arrays, array, content, flip, only_blob, read_arrays, save_arrays
from tests.support.copies import copy
from tests.support.far import FarStore
from tests.support.faulty import FaultyStore, call_first
from tests.support.gcs import collect, run_gc
from tests.support.repositories import committed_encoded, meanwhile, memory, objects_of, repository

STATE: Arrays = {"a": array(1, 3), "b": array(2, dtype="int64"), "c": array(3, 0.5, dtype="uint8")}
KINDS = ["flipped", "header", "short", "gone"]
"""The kinds of `damage`."""


def copy_into(other: Repository, repo: Repository, commit: Commit) -> None:
    """Copy the checkpoint into a different store, with a new uploader."""
    manifest = manifests.get(repo, commit)
    txid = other.new_txid(commit.run, commit.step)
    refs = []
    for ref in manifest.blobs:
        data = repo.storage.get(blob_key(ref.uploader, ref.hash), limit=ref.size)
        blobs.put(other, txid, ref.hash, data)
        refs.append(BlobRef(ref.hash, ref.size, txid))
    made = manifests.put_encoded(other, txid, placed(manifest, encode_blobs(refs)))
    assert made.id == commit.id
    created = commit.committed.created_at
    commits.commit(other, committed_encoded(other, txid, made, commit.run, commit.step, created_at=created))


def damage(repo: Repository, key: str, how: str) -> None:
    """Damage a blob, and let verify find it."""
    if how == "flipped":
        flip(repo, key, DATA_OFFSET + 17)
    elif how == "header":
        flip(repo, key, 20)
    elif how == "short":
        repo.storage.replace(key, repo.storage.get(key, limit=1 << 30)[: DATA_OFFSET + 100])
    else:
        repo.storage.delete(key)
    verify(repo)


def test_repair_does_nothing_without_damage(repo: Repository, faults: FaultyStore) -> None:
    save_arrays(repo, STATE)
    calls = len(faults.calls)
    found = repair(repo)
    assert (found.blobs, found.manifests, found.lost, found.is_damaged) == ((), (), (), False)
    assert {call.method for call in faults.calls[calls:]} <= {"list", "get", "size"}


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


def test_the_mark_on_an_undamaged_blob_is_removed(repo: Repository) -> None:
    one = save_arrays(repo, STATE)
    (ref,) = manifests.get(repo, one).blobs
    blobs.mark_damaged(repo, ref.uploader, ref.hash, "a load saw something")
    found = repair(repo)
    assert (found.blobs, found.is_damaged) == ((), False)
    assert blobs.damaged_marks(repo) == set()


# blobs


@pytest.mark.parametrize("how", KINDS)
def test_a_blob_is_restored_from_a_different_uploader(repo: Repository, how: str) -> None:
    one, _ = (save_arrays(repo, STATE, step=step) for step in range(2))
    damage(repo, only_blob(repo, one), how)
    found = repair(repo)
    assert (len(found.blobs), found.is_damaged) == (1, False)
    assert read_arrays(repo, one) == content(STATE)
    assert not verify(repo).is_damaged
    assert blobs.damaged_marks(repo) == set()


@pytest.mark.parametrize("how", KINDS)
def test_a_blob_is_restored_from_a_different_store(tmp_path: Path, other: Repository, how: str) -> None:
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    one = save_arrays(repo, STATE)
    save_arrays(other, STATE, "somewhere", 9)
    before = objects_of(other.storage)
    damage(repo, only_blob(repo, one), how)
    assert len(repair(repo, sources=[other]).blobs) == 1
    assert read_arrays(repo, one) == content(STATE)
    assert objects_of(other.storage) == before, "a source is only read"


def test_a_blob_is_restored_from_the_host_cache(repo: Repository) -> None:
    one = save_arrays(repo, STATE)
    repo.blob_cache.fill(repo.storage, list(manifests.get(repo, one).blobs), 1, silent)
    damage(repo, only_blob(repo, one), "gone")
    assert len(repair(repo).blobs) == 1
    assert read_arrays(repo, one) == content(STATE)


@pytest.mark.parametrize("position", [20, DATA_OFFSET + 5, -5], ids=["header", "cell", "proof"])
def test_a_damaged_copy_is_not_used(repo: Repository, other: Repository, position: int) -> None:
    one, two = (save_arrays(repo, STATE, step=step) for step in range(2))
    copy = save_arrays(other, STATE)
    before = repo.storage.get(only_blob(repo, two), limit=1 << 20)
    for store, commit in ((repo, one), (repo, two), (other, copy)):
        flip(store, only_blob(store, commit), position)
    verify(repo)
    found = repair(repo, sources=[other])
    assert (found.blobs, len(blobs.damaged_marks(repo))) == ((), 2)
    repo.storage.replace(only_blob(repo, two), before)
    assert len(repair(repo, sources=[other]).blobs) == 1
    assert not verify(repo).is_damaged


def test_nothing_is_written_for_checkpoints_with_lost_bytes(repo: Repository, faults: FaultyStore) -> None:
    first = last = save_arrays(repo, {"a": array(1)})
    for step in range(1, 6):
        last = save_arrays(repo, {"a": array(1), "b": array(step + 1)}, step=step, reuse=last)
    damage(repo, only_blob(repo, first), "flipped")
    faults.calls.clear()
    (lost,) = repair(repo).lost
    assert [one.step for one in lost.needed_by] == [0, 1, 2, 3, 4, 5]
    assert faults.keys("put") == []


def test_a_missing_source_raises_an_error_even_without_damage(repo: Repository, tmp_path: Path) -> None:
    save_arrays(repo, STATE)
    with pytest.raises(NotFound, match="there is no store at"):
        repair(repo, sources=[Repository(LocalStore(tmp_path / "nope"), tmp_path)])


# manifests


@pytest.mark.parametrize("how", ["flipped", "gone"])
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_manifest_is_restored_from_a_copy(tmp_path: Path, other: Repository, kind: str, how: str) -> None:
    """The copies have the same places, so the manifests of both stores are equal."""
    storage = LocalStore(tmp_path / "store") if kind == "folder" else FarStore(memory())
    repo = repository(tmp_path / "host", storage)
    base = save_arrays(repo, {"a": STATE["a"], "old": array(9)})
    one = save_arrays(repo, STATE, step=1, reuse=base)
    copy(repo, other)
    before = objects_of(storage)
    damage_manifest(repo, one, how)
    fresh = repository(tmp_path / "elsewhere", storage, seed=5)
    assert [lost.id for lost in repair(fresh).lost_manifests] == [one.id]
    found = repair(fresh, sources=[other])
    assert (found.manifests, found.is_damaged) == ((one.id,), False)
    assert objects_of(storage) == before
    assert collect(fresh).deleted_blobs == 0
    assert read_arrays(repository(tmp_path / "new", storage, seed=6), one) == content(STATE)


@pytest.mark.parametrize("known", [True, False], ids=["catalogue", "no catalogue"])
def test_a_manifest_is_restored_from_a_copy_with_different_places_if_this_host_knows_its_places(
    tmp_path: Path, repo: Repository, other: Repository, known: bool
) -> None:
    base = save_arrays(repo, {"a": STATE["a"], "old": array(9)})
    one = save_arrays(repo, STATE, step=1, reuse=base)
    copy_into(other, repo, one)
    manifests.learn(repo, [one])
    before = objects_of(repo.storage)
    damage_manifest(repo, one, "gone")
    fresh = repository(tmp_path / ("." if known else "elsewhere"), repo.storage, seed=5)
    found = repair(fresh, sources=[other])
    if known:
        assert (found.manifests, found.is_damaged) == ((one.id,), False)
        assert objects_of(repo.storage) == before
    else:
        assert [lost.id for lost in found.lost_manifests] == [one.id]


def test_gc_during_the_repair_of_a_manifest_deletes_none_of_its_objects(tmp_path: Path, other: Repository) -> None:
    """gc knows from its catalogue which objects the manifest names."""
    storage = FarStore(memory())
    repo = repository(tmp_path / "host", storage)
    base = save_arrays(repo, {"a": STATE["a"], "old": array(9)})
    one = save_arrays(repo, STATE, step=1, reuse=base)
    copy(repo, other)
    manifests.learn(repo, [one])
    damage_manifest(repo, one, "flipped")
    commits.forget(repo, base)
    run_gc(repo, min_age=0.0)
    looking = repository(tmp_path / "host", storage, seed=4)
    storage.inject(call_first("replace", meanwhile(lambda: collect(looking, wait=0.0)), key="objects/*.manifest"))
    fresh = repository(tmp_path / "elsewhere", storage, seed=5)
    assert repair(fresh, sources=[other]).manifests == (one.id,)
    assert storage.count("replace") == 2  # including the flip
    assert read_arrays(repository(tmp_path / "new", storage, seed=6), one) == content(STATE)


def test_manifest_and_blobs_are_repaired_together(tmp_path: Path, repo: Repository, other: Repository) -> None:
    one, two = (save_arrays(repo, {"a": array(step)}, step=step) for step in range(2))
    copy(repo, other)
    before = objects_of(repo.storage)
    repo.storage.delete(only_blob(repo, one))
    repo.storage.delete(only_blob(repo, two))
    damage_manifest(repo, one, "gone")
    fresh = repository(tmp_path / "elsewhere", repo.storage, seed=5)
    found = repair(fresh, sources=[other])
    assert (found.manifests, len(found.blobs), found.is_damaged) == ((one.id,), 2, False)
    assert objects_of(repo.storage) == before


def test_a_damaged_manifest_in_a_source_is_not_used(tmp_path: Path, repo: Repository, other: Repository) -> None:
    one, two = (save_arrays(repo, {"a": array(step)}, step=step) for step in range(2))
    copy(repo, other)
    damage_manifest(other, one, "flipped")
    for commit in (one, two):
        damage_manifest(repo, commit, "gone")
    fresh = repository(tmp_path / "elsewhere", repo.storage, seed=5)
    found = repair(fresh, sources=[other])
    assert (found.manifests, [lost.id for lost in found.lost_manifests]) == ((two.id,), [one.id])


def damage_manifest(repo: Repository, commit: Commit, how: str) -> None:
    key = manifest_key(commit.txid, commit.id)
    if how == "gone":
        repo.storage.delete(key)
    else:
        flip(repo, key, 50)


@pytest.mark.parametrize("what", ["blob", "manifest"])
def test_the_next_repair_removes_leftovers_of_a_killed_repair(tmp_path: Path, other: Repository, what: str) -> None:
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    one = save_arrays(repo, STATE)
    copy(repo, other)
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
    copy(repo, other)
    key = commit_key(commit.txid)
    record = repo.storage.get(key, limit=1 << 20)
    repo.storage.replace(key, record[:100])
    found = repair(repo, sources=[other])
    assert (found.is_damaged, [one.key for one in found.records]) == (True, [key])
    assert found.records == verify(repo).records
    repo.storage.replace(key, record)
    assert not repair(repo, sources=[other]).is_damaged
