"""Manifests as objects: they are written once, verified when they are read, and recorded in the catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from casckpt.contents import manifests
from casckpt.errors import Damaged, Gone, InvalidInput, Refused, StorageError
from casckpt.format.digest import cell_digest
from casckpt.format.extents import StoredCell, build
from casckpt.format.keys import manifest_key
from casckpt.format.manifest import ObjectEntry
from casckpt.format.names import CellDigest
from casckpt.format.records import changed
from casckpt.format.regions import full_box
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.head import HEAD_BYTES, decode_head
from casckpt.history import commits
from casckpt.history.commits import Commit, forget, just_committed, list_commits, purge
from casckpt.repository.repository import Repository
from tests.support.counting import count_io
from tests.support.faulty import FaultyStore, call_first, corrupt, fail_before, truncate
from tests.support.repositories import blob_hash, committed_draft, draft, repository, save


def fresh(tmp_path: Path, repo: Repository) -> Repository:
    """Return the repository as a new process opens it, with nothing in memory."""
    return repository(tmp_path, repo.storage)


def key_of(commit: Commit) -> str:
    return manifest_key(commit.txid, commit.id)


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


def test_a_manifest_is_read_at_most_once_and_never_if_it_was_just_written(
    tmp_path: Path, repo: Repository, faults: FaultyStore
) -> None:
    commit = save(repo)
    assert manifests.get(repo, commit).id == commit.id
    assert faults.count("get", "objects/*") == 0
    other = fresh(tmp_path, repo)
    assert manifests.get(other, commit) is manifests.get(other, commit)
    assert faults.count("get", "objects/*") == 1


def test_an_existing_manifest_of_the_same_size_counts_as_written(repo: Repository) -> None:
    txid = repo.new_txid("a", 1)
    made = draft([BlobRef(blob_hash("x"), 1, txid)])
    assert manifests.put(repo, txid, made) == manifests.put(repo, txid, made)


def test_an_existing_manifest_of_a_different_size_is_rejected(repo: Repository) -> None:
    txid = repo.new_txid("a", 1)
    made = draft([])
    found = manifests.put(repo, txid, made)
    repo.storage.replace(manifest_key(txid, found.id), b"short")
    with pytest.raises(StorageError, match="a different size"):
        manifests.put(repo, txid, made)


def test_a_record_that_cannot_be_decoded_is_not_written(repo: Repository) -> None:
    txid = repo.new_txid("a", 1)
    with pytest.raises(InvalidInput):
        manifests.put(repo, txid, draft([], run="not a run"))
    assert list(repo.storage.list("objects/")) == []


@pytest.mark.parametrize("damage", ["flip", "tear", "gone"])
def test_the_error_for_damage_names_the_checkpoint_and_the_file(
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


def test_the_error_for_an_invalid_manifest_names_the_checkpoint(tmp_path: Path, repo: Repository) -> None:
    """The head belongs to a later version, and the record confirms it."""
    commit = save(repo, "sft", 7)
    data = bytearray(repo.storage.get(key_of(commit), limit=1 << 30))
    data[7] = 200
    data[HEAD_BYTES - 32 : HEAD_BYTES] = cell_digest(data[: HEAD_BYTES - 32])
    repo.storage.replace(key_of(commit), bytes(data))
    later = just_committed(changed(commit.committed, head=data[HEAD_BYTES - 32 : HEAD_BYTES].hex()))
    for look in (manifests.get, manifests.blob_list):
        with pytest.raises(Refused, match=r"sft@7.*later version"):
            look(fresh(tmp_path, repo), later)
        with pytest.raises(Damaged, match="a different manifest"):
            look(repository(tmp_path / "new", repo.storage), commit)


@pytest.mark.parametrize("fields", [{"run": "other"}, {"step": 8}, {"created_at": 1}, {"parent": "ab" * 32}])
def test_a_record_that_contradicts_its_manifest_is_rejected(
    tmp_path: Path, repo: Repository, fields: dict[str, Any]
) -> None:
    commit = save(repo, "sft", 7)
    other = just_committed(changed(commit.committed, **fields))
    with pytest.raises(Refused, match="does not match its manifest"):
        manifests.get(fresh(tmp_path, repo), other)
    # whatever it contains, a gc knows which objects it needs
    assert len(manifests.blob_list(fresh(tmp_path, repo), other)) == 0


def test_a_checkpoint_purged_in_the_meantime_is_reported_as_gone_and_not_as_damaged(
    tmp_path: Path, repo: Repository, faults: FaultyStore
) -> None:
    commit = save(repo, "sft", 7)

    def collect(_: object) -> None:
        purge(repo, forget(repo, commit))
        faults.inner.delete(key_of(commit))

    faults.inject(call_first("get", collect, key="objects/*"))
    with pytest.raises(Gone, match=r"sft@7 .* was purged just now"):
        manifests.get(fresh(tmp_path, repo), commit)


def test_failing_storage_is_not_reported_as_damage(tmp_path: Path, repo: Repository, faults: FaultyStore) -> None:
    commit = save(repo)
    faults.inject(fail_before("get", key="objects/*"))
    with pytest.raises(StorageError):
        manifests.get(fresh(tmp_path, repo), commit)


def test_the_catalogue_stores_the_list_of_blobs_of_each_manifest(
    tmp_path: Path, repo: Repository, faults: FaultyStore
) -> None:
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


def test_a_checkpoint_without_blobs_has_an_empty_blob_list(repo: Repository) -> None:
    assert manifests.blobs_of(repo, save(repo)) == []


def test_two_commits_with_the_same_manifest_id_can_have_different_blob_locations(
    tmp_path: Path, repo: Repository
) -> None:
    records = []
    for _ in range(2):
        txid = repo.new_txid("a", 1)
        records.append(committed_draft(repo, txid, draft([BlobRef(blob_hash("x"), 1, txid)], "a", 1)))
    assert len({record.manifest for record in records}) == 1
    assert len({record.head for record in records}) == 2
    for where in (repo, fresh(tmp_path, repo)):
        for record in records:
            commit = just_committed(record)
            assert [ref.uploader for ref in manifests.get(where, commit).blobs] == [record.txid]
            assert manifests.blobs_of(where, commit) == [(record.txid, blob_hash("x"), 1)]


# large manifests


def save_large(repo: Repository, count: int = 30_000) -> Commit:
    """Save a manifest of several MiB: many tensors of one cell each, all in one blob."""
    txid = repo.new_txid("a", 1)
    ref = BlobRef(blob_hash("large"), 4096 + 64 * count, txid)
    box = full_box((16,))
    streams = {
        ("tensor", f"w.{n}", 0, None): ("float32", build((16,), 4, 1024, [cell]))
        for n in range(count)
        for cell in [StoredCell(0, 4096 + 64 * n, 64, box, 0, 16, CellDigest(n.to_bytes(32, "little")))]
    }
    made = draft([ref], "a", 1, streams=streams, objects=[ObjectEntry("o", None, b"x" * 1000)])
    record = committed_draft(repo, txid, made)
    commits.commit(repo, record)
    return just_committed(record)


def test_only_the_requested_parts_of_a_large_manifest_are_read(
    tmp_path: Path, repo: Repository, faults: FaultyStore
) -> None:
    commit = save_large(repo)
    total = commit.committed.manifest_bytes
    assert total > manifests.WHOLE_BYTES
    other = fresh(tmp_path, repo)
    found = manifests.get(other, commit)
    assert faults.count("read_into") == 2  # the head, and the front sections
    found.ready([7, 8, 9, 20_000], [])
    assert faults.count("read_into") == 6  # pieces of the cells and rows sections
    for number in (7, 20_000):
        (cell,) = found.extents(found.entries[number]).stored_cells()
        assert cell.digest == number.to_bytes(32, "little")
    assert found.data(found.objects[0]) == b"x" * 1000
    assert faults.count("read_into") == 7
    assert found.nbytes < total
    assert manifests.get(other, commit) is found
    found.ready()
    assert len(found.encoded()) == total
    assert faults.count("get", "objects/*") == 0


def test_gc_reads_only_the_blob_list_of_a_large_manifest(tmp_path: Path, repo: Repository, faults: FaultyStore) -> None:
    commit = save_large(repo)
    counts = count_io(faults.inner)
    assert manifests.learn(fresh(tmp_path, repo), [commit]) == [commit]
    assert manifests.blobs_of(fresh(tmp_path, repo), commit) == [(commit.txid, blob_hash("large"), 4096 + 64 * 30_000)]
    assert counts.bytes_read < 6000  # the marker is also read, and the head takes 4096 bytes
    assert faults.count("get", "objects/*") == 0


def test_a_truncated_large_manifest_is_damaged(tmp_path: Path, repo: Repository) -> None:
    commit = save_large(repo)
    data = repo.storage.get(key_of(commit), limit=1 << 30)
    for size in (len(data) - 1, 4097, 4000, 0):
        repo.storage.replace(key_of(commit), data[:size])
        for look in (manifests.get, manifests.stored_blobs):
            with pytest.raises(Damaged, match=r"a@1 .*is damaged.*repair"):
                look(fresh(tmp_path, repo), commit)
    repo.storage.replace(key_of(commit), data + b"x")
    with pytest.raises(Damaged, match="bytes instead of"):
        manifests.get(fresh(tmp_path, repo), commit)


def test_damage_in_a_large_manifest_affects_only_the_damaged_part(tmp_path: Path, repo: Repository) -> None:
    commit = save_large(repo)
    data = bytearray(repo.storage.get(key_of(commit), limit=1 << 30))
    cells = decode_head(data)["cells"]
    data[cells.offset + 33 * 20_000] ^= 1
    repo.storage.replace(key_of(commit), bytes(data))
    found = manifests.get(fresh(tmp_path, repo), commit)
    found.ready()
    with pytest.raises(Damaged, match=r"w\.20000"):
        found.extents(found.entries[20_000])
    for number in (0, 10_000, 29_999):
        found.extents(found.entries[number])
    (fault,) = found.faults()
    assert "'cells'" in fault
    assert "more" in fault
    assert len(manifests.stored_blobs(fresh(tmp_path, repo), commit)) == 1


def test_reading_a_large_manifest_that_is_purged_in_the_meantime_raises_gone(tmp_path: Path, repo: Repository) -> None:
    commit = save_large(repo)
    found = manifests.get(fresh(tmp_path, repo), commit)
    purge(repo, forget(repo, commit))
    repo.storage.delete(key_of(commit))
    with pytest.raises(Gone, match="was purged just now"):
        found.ready([1])


def test_reindex_rebuilds_the_catalogue(tmp_path: Path, repo: Repository, faults: FaultyStore) -> None:
    commits = [save(repo, "a", step, texts=[f"blob {step}"]) for step in range(3)]
    repo.storage.delete(key_of(commits[1]))
    other = fresh(tmp_path, repo)
    assert manifests.reindex(other) == 2
    reads = faults.count("get")
    assert manifests.blobs_of(fresh(tmp_path, repo), commits[0]) == [(commits[0].txid, blob_hash("blob 0"), 6)]
    assert len(list_commits(fresh(tmp_path, repo)).live()) == 3
    assert faults.count("get") == reads + 2  # each of the two reads the marker
