"""Manifests as objects: written once, verified when read, and known to the catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.errors import Conflict, Damaged, InvalidInput, Refused, StorageError
from casckpt.format.keys import manifest_key
from casckpt.format.manifest import BlobRef
from casckpt.repository import caches, manifests
from casckpt.repository.commits import Commit, forget, list_commits, purge
from casckpt.repository.repository import Repository
from tests.support.faulty import FaultyStore, call_first, corrupt, fail_before, truncate
from tests.support.repositories import blob_hash, body, repository, save


def fresh(tmp_path: Path, repo: Repository) -> Repository:
    """Another process: nothing in memory."""
    return repository(tmp_path, repo.storage)


def key_of(commit: Commit) -> str:
    return manifest_key(commit.committed.uploader, commit.id)


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path, repo: Repository) -> None:
    base = save(repo, "a", 1, texts=["one", "two"])
    (first, *_) = manifests.get(repo, base).blobs
    commit = save(repo, "a", 2, texts=["three"], reused=[first])
    found = manifests.get(fresh(tmp_path, repo), commit)
    assert (found.id, found.body.run, found.body.step) == (commit.id, "a", 2)
    assert [(ref.hash, ref.size, ref.uploader) for ref in found.blobs] == [
        (blob_hash("three"), 5, commit.txid),
        (blob_hash("one"), 3, base.txid),
    ]


def test_a_manifest_is_read_once_and_what_was_just_written_not_at_all(
    tmp_path: Path, repo: Repository, faults: FaultyStore
) -> None:
    commit = save(repo)
    assert manifests.get(repo, commit).id == commit.id
    assert faults.count("get", "objects/*") == 0
    other = fresh(tmp_path, repo)
    assert manifests.get(other, commit) is manifests.get(other, commit)
    assert faults.count("get", "objects/*") == 1


def test_memory_of_manifests_is_bounded(tmp_path: Path, repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "MAX_MANIFESTS", 2)
    one, two, three = (save(repo, "a", step) for step in range(3))
    other = fresh(tmp_path, repo)
    for commit in (one, two, one, three):
        manifests.get(other, commit)
    held = [other.manifests.get(commit.txid, commit.id) is not None for commit in (one, two, three)]
    assert held == [True, False, True]
    monkeypatch.setattr(caches, "MAX_BYTES", 10)
    manifests.get(other, two)
    assert other.manifests.get(two.txid, two.id) is not None
    assert other.manifests.get(one.txid, one.id) is None


def test_a_manifest_that_is_there_already_is_ours(repo: Repository) -> None:
    txid = repo.new_txid("a", 1)
    made = body([BlobRef(blob_hash("x"), 1, txid)])
    assert manifests.put(repo, txid, *made) == manifests.put(repo, txid, *made)


def test_a_manifest_that_is_there_with_another_size_is_not(repo: Repository) -> None:
    txid = repo.new_txid("a", 1)
    made = body([])
    found = manifests.put(repo, txid, *made)
    repo.storage.replace(manifest_key(txid, found), b"short")
    with pytest.raises(StorageError, match="another size"):
        manifests.put(repo, txid, *made)


def test_what_nobody_could_read_is_not_written(repo: Repository) -> None:
    txid = repo.new_txid("a", 1)
    with pytest.raises(InvalidInput):
        manifests.put(repo, txid, *body([], run="not a run"))
    assert list(repo.storage.list("objects/")) == []


@pytest.mark.parametrize("damage", ["flip", "tear", "gone"])
def test_damage_names_the_checkpoint_and_the_object(
    tmp_path: Path, repo: Repository, faults: FaultyStore, damage: str
) -> None:
    commit = save(repo, "sft", 7)
    if damage == "gone":
        repo.storage.delete(key_of(commit))
    else:
        faults.inject((corrupt if damage == "flip" else truncate)("get", key="objects/*", times=9))
    with pytest.raises(Damaged, match=r"checkpoint sft@7 .*repair") as caught:
        manifests.get(fresh(tmp_path, repo), commit)
    assert key_of(commit) in str(caught.value)
    assert caught.value.checkpoints == (commit.id,)
    assert caught.value.key == key_of(commit)


def test_what_is_not_usable_names_the_checkpoint(tmp_path: Path, repo: Repository) -> None:
    commit = save(repo, "sft", 7)
    data = bytearray(repo.storage.get(key_of(commit), limit=1 << 30))
    data[7] = 200  # a version of the future
    repo.storage.replace(key_of(commit), bytes(data))
    with pytest.raises(Refused, match=r"sft@7.*later version"):
        manifests.get(fresh(tmp_path, repo), commit)


def test_a_checkpoint_purged_meanwhile_is_a_conflict_and_no_damage(
    tmp_path: Path, repo: Repository, faults: FaultyStore
) -> None:
    commit = save(repo, "sft", 7)

    def collect(_: object) -> None:
        purge(repo, forget(repo, commit))
        faults.inner.delete(key_of(commit))

    faults.inject(call_first("get", collect, key="objects/*"))
    with pytest.raises(Conflict, match=r"sft@7 .* was purged just now"):
        manifests.get(fresh(tmp_path, repo), commit)


def test_a_failing_storage_is_no_damage(tmp_path: Path, repo: Repository, faults: FaultyStore) -> None:
    commit = save(repo)
    faults.inject(fail_before("get", key="objects/*"))
    with pytest.raises(StorageError):
        manifests.get(fresh(tmp_path, repo), commit)


def test_blobs_are_known_to_the_catalogue(tmp_path: Path, repo: Repository, faults: FaultyStore) -> None:
    base = save(repo, "a", 1, texts=["one", "two"])
    commit = save(repo, "a", 2, texts=["three"], reused=manifests.get(repo, base).blobs)
    wanted = [
        (commit.txid, blob_hash("three"), 5),
        (base.txid, blob_hash("one"), 3),
        (base.txid, blob_hash("two"), 3),
    ]
    assert manifests.blobs_of(repo, commit) == wanted
    assert faults.count("get", "objects/*") == 0
    repo.storage.delete(key_of(commit))
    assert manifests.blobs_of(fresh(tmp_path, repo), commit) == wanted
    summary = manifests.summary(repo, commit)
    assert (summary.tensors, summary.nbytes) == (0, 0)


def test_a_checkpoint_without_blobs_names_none(repo: Repository) -> None:
    assert manifests.blobs_of(repo, save(repo)) == []


def test_places_differ_between_uploaders_of_one_manifest(tmp_path: Path, repo: Repository) -> None:
    one, two = (repo.new_txid("a", 1) for _ in range(2))
    made = [body([BlobRef(blob_hash("x"), 1, txid)]) for txid in (one, two)]
    ids = {manifests.put(repo, txid, *parts) for txid, parts in zip((one, two), made, strict=True)}
    assert len(ids) == 1
    commits = [save(repo) for _ in range(2)]
    records = [
        type(c.committed)(**{f: getattr(c.committed, f) for f in c.committed.__struct_fields__}
                          | {"manifest": next(iter(ids)), "uploader": txid})
        for c, txid in zip(commits, (one, two), strict=True)
    ]  # fmt: skip
    for where in (repo, fresh(tmp_path, repo)):
        for record, txid in zip(records, (one, two), strict=True):
            commit = Commit(record.txid, record, "committed", 0, 0)
            assert [ref.uploader for ref in manifests.get(where, commit).blobs] == [txid]
            assert manifests.blobs_of(where, commit) == [(txid, blob_hash("x"), 1)]


def test_reindex_makes_the_catalogue_anew(tmp_path: Path, repo: Repository, faults: FaultyStore) -> None:
    commits = [save(repo, "a", step, texts=[f"blob {step}"]) for step in range(3)]
    repo.storage.delete(key_of(commits[1]))
    other = fresh(tmp_path, repo)
    assert manifests.reindex(other) == 2
    reads = faults.count("get")
    assert manifests.blobs_of(fresh(tmp_path, repo), commits[0]) == [(commits[0].txid, blob_hash("blob 0"), 6)]
    assert len(list_commits(fresh(tmp_path, repo)).live()) == 3
    assert faults.count("get") == reads + 2  # the marker, by each of the two
