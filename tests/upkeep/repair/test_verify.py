"""verify finds, names and marks every kind of damage, and reports nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from casckpt.base.progress import Progress
from casckpt.contents import blobs, manifests
from casckpt.errors import CasckptError, InvalidInput, NotFound, StorageError, Unsupported
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.digest import cell_digest, proof_name
from casckpt.format.keys import blob_key, manifest_key
from casckpt.format.names import BlobHash
from casckpt.format.proof import encode_proof
from casckpt.history import commits, tags
from casckpt.repository.repository import Repository
from casckpt.upkeep.repair.verify import verify
from tests.support.checkpoints import CELL, array, flip, known_cells, only_blob, put_cells, save_arrays
from tests.support.faulty import FaultyStore, call_first, corrupt, fail_before
from tests.support.gcs import collect
from tests.support.progress_calls import ProgressCalls
from tests.support.repositories import commit_draft, draft, repository
from tests.support.rewrites import move
from tests.upkeep.repair.conftest import hash_in, marks


def test_verify_reads_each_byte_once(repo: Repository) -> None:
    one = save_arrays(repo, {"a": array(1), "b": array(2, dtype="int64")})
    save_arrays(repo, {"a": array(1), "c": array(3, 600)}, step=1, reuse=one)
    seen = ProgressCalls()
    found = verify(repo, progress=Progress(seen))
    sizes = [entry.size for entry in repo.storage.list("objects/") if entry.key.endswith(".safetensors")]
    assert not found.is_damaged
    assert (found.checked_blobs, found.checked_bytes, found.checked_checkpoints) == (2, sum(sizes), 2)
    assert seen.total == seen.done == sum(sizes)
    assert marks(repo) == set()


HEADER, PROOF = "its header is not what was written", "its proof does not match the hash in its name"


DATA = f"its bytes {DATA_OFFSET} to {DATA_OFFSET + 3 * CELL} are not what was written"


@pytest.mark.parametrize(
    ("position", "why"),
    [
        *((position, HEADER) for position in (0, 7, 8, DATA_OFFSET - 1)),
        *((DATA_OFFSET + position, DATA) for position in (0, 3 * CELL - 1)),
        *((DATA_OFFSET + 3 * CELL + position, PROOF) for position in (0, 4, 35, 36, 71)),
    ],
)
def test_any_flipped_byte_is_detected(repo: Repository, position: int, why: str) -> None:
    commit = save_arrays(repo, {"a": array(1, 3)})
    flip(repo, only_blob(repo, commit), position)
    (damaged,) = verify(repo).damaged
    assert (damaged.why, damaged.keys, damaged.checkpoints) == (why, ("a",), (commit.id,))


def test_a_blob_with_a_wrong_header_is_reported_as_damaged_but_loads(repo: Repository) -> None:
    """All hashes are correct, but no writer produces such a header."""
    commit = save_arrays(repo, {"a": array(1)})
    (ref,) = manifests.get(repo, commit).blobs
    data = bytearray(repo.storage.get(blob_key(ref.uploader, ref.hash), limit=1 << 20))
    data[DATA_OFFSET - 1] = 0x09
    proof = encode_proof(
        [(DATA_OFFSET, cell_digest(data[:DATA_OFFSET])), (2 * CELL, cell_digest(data[DATA_OFFSET:-72]))]
    )
    data[-72:] = proof
    other = replace(ref, hash=proof_name(proof))
    blobs.put(repo, other.uploader, other.hash, bytes(data))
    known = {digest: (other, offset) for digest, (_, offset) in known_cells(repo, commit).items()}
    save_arrays(repo, {"a": array(1)}, step=1, known=known)
    (damaged,) = verify(repo).damaged
    assert (damaged.blob, damaged.keys) == (other.hash, ("a",))
    assert "header" in damaged.why


def test_a_full_check_unmarks_an_undamaged_blob(repo: Repository) -> None:
    commit = save_arrays(repo, {"a": array(1)})
    key = only_blob(repo, commit)
    flip(repo, key, DATA_OFFSET)
    verify(repo)
    flip(repo, key, DATA_OFFSET)
    assert verify(repo, mode="exists").repaired == verify(repo, refs=[commit]).repaired == ()
    assert marks(repo) == {hash_in(key)}
    found = verify(repo)
    assert found.repaired == (hash_in(key),)
    assert not found.is_damaged
    assert marks(repo) == set()


def test_verify_reads_only_the_named_checkpoints(repo: Repository) -> None:
    saved = [save_arrays(repo, {"a": array(step)}, step=step) for step in range(3)]
    for commit in saved:
        repo.storage.delete(only_blob(repo, commit))
    found = verify(repo, refs=["run@0", saved[2].id])
    assert {one.checkpoints for one in found.damaged} == {(saved[0].id,), (saved[2].id,)}
    with pytest.raises(NotFound):
        verify(repo, refs=["run@9"])


def test_parts_cover_each_blob_once_even_if_others_are_saved_in_between(repo: Repository, faults: FaultyStore) -> None:
    before = {only_blob(repo, save_arrays(repo, {"a": array(step)}, step=step)) for step in range(12)}
    read = []
    for number in range(3):
        faults.calls.clear()
        verify(repo, part=(number, 3))
        read += sorted(before & set(faults.keys("open")))
        save_arrays(repo, {"a": array(20 + number)}, step=20 + number)
    assert sorted(read) == sorted(before)


@pytest.mark.parametrize("options", [{"mode": "quick"}, {"part": (3, 3)}, {"part": (-1, 3)}])
def test_invalid_arguments_are_rejected(repo: Repository, options: Any) -> None:
    with pytest.raises(InvalidInput):
        verify(repo, **options)


def test_forgotten_checkpoints_are_verified_and_purged_ones_are_not(repo: Repository) -> None:
    one, two = (save_arrays(repo, {"a": array(step)}, step=step) for step in range(2))
    commits.forget(repo, one)
    repo.storage.delete(only_blob(repo, one))
    assert [damaged.checkpoints for damaged in verify(repo).damaged] == [(one.id,)]
    commits.purge(repo, commits.list_commits(repo).commits[one.txid])
    found = verify(repo)
    assert (found.checked_checkpoints, found.damaged) == (1, ())
    assert two.live


@pytest.mark.parametrize("what", ["the checkpoint", "its old places"])
def test_what_is_purged_during_verify_is_neither_reported_nor_marked(
    repo: Repository, faults: FaultyStore, what: str
) -> None:
    one = save_arrays(repo, {"a": array(1)})
    save_arrays(repo, {"a": array(2)}, step=1)

    def purge(call: object) -> None:
        faults.heal()
        if what == "the checkpoint":
            commits.forget(repo, one)
        else:
            move(repo, one)
        assert collect(repo).deleted_blobs == 1

    faults.inject(call_first("open", purge, key=only_blob(repo, one)))
    found = verify(repo)
    assert (found.damaged, found.manifests) == ((), ())
    assert marks(repo) == set()


def test_a_checkpoint_purged_during_the_report_is_neither_reported_nor_marked(
    tmp_path: Path, repo: Repository, faults: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large manifest is read in parts. The checkpoint is purged between two of these reads."""
    monkeypatch.setattr(manifests, "WHOLE_BYTES", 0)
    one = save_arrays(repo, {"a": array(1)})
    save_arrays(repo, {"a": array(2)}, step=1)
    flip(repo, only_blob(repo, one), DATA_OFFSET)

    def purge(call: object) -> None:
        faults.heal()
        commits.forget(repo, one)
        assert collect(repo).deleted_blobs == 1

    faults.inject(call_first("open", purge, key=manifest_key(one.txid, one.id), at=5))
    found = verify(repository(tmp_path / "other", faults, seed=3))
    assert (found.damaged, found.manifests) == ((), ())
    assert len(commits.list_commits(repo).live()) == 1
    assert marks(repo) == set()


def test_manifests_and_records_that_cannot_be_read_are_reported(repo: Repository) -> None:
    saved = [save_arrays(repo, {"a": array(step)}, step=step) for step in range(4)]
    for commit in saved:
        manifests.blobs_of(repo, commit)  # the catalogue contains them, which must not hide damage
    repo.storage.delete(manifest_key(saved[0].txid, saved[0].id))
    flip(repo, manifest_key(saved[1].txid, saved[1].id), 40)
    tags.set_tag(repo, "best", saved[3])
    repo.storage.replace("tags/best/0", b"torn")
    repo.storage.replace(f"commits/{saved[2].txid}", b"torn")
    found = verify(repo)
    assert {(one.id, one.step) for one in found.manifests} == {(saved[0].id, 0), (saved[1].id, 1)}
    assert [key for key, _ in found.records] == [f"commits/{saved[2].txid}", "tags/best"]
    assert found.is_damaged
    assert found.damaged == ()


def test_extents_that_lie_outside_their_blob_are_reported(repo: Repository) -> None:
    from tests.support import checkpoints

    txid = repo.new_txid("run", 0)
    data = {"a": array(1)}
    known = {}
    ref, places = put_cells(repo, txid, checkpoints._new_cells(data, {}))
    known = {digest: (ref, offset + CELL) for digest, offset in places.items()}
    streams = {("tensor", "a", 0, None): checkpoints._stream("a", data["a"], known, [ref])}
    commit_draft(repo, txid, draft([ref], cell_bytes=CELL, streams=streams))
    (broken,) = verify(repo).manifests
    assert "outside its blob" in broken.why


def test_a_read_of_incorrect_bytes_is_retried(repo: Repository, faults: FaultyStore) -> None:
    save_arrays(repo, {"a": array(1)})
    faults.inject(fail_before("read_into"))
    assert not verify(repo).is_damaged


def test_a_tag_whose_record_changes_without_a_trace_is_reported(repo: Repository, faults: FaultyStore) -> None:
    tags.set_tag(repo, "best", save_arrays(repo, {"a": array(1)}))
    assert verify(repo).records == ()
    faults.inject(corrupt("get", key="tags/best/0"))
    assert [record.key for record in verify(repo).records] == ["tags/best"]


def test_unreadable_objects_are_reported_and_not_marked(repo: Repository, faults: FaultyStore) -> None:
    bad, _ = save_arrays(repo, {"a": array(1)}), save_arrays(repo, {"a": array(2)}, step=1)
    faults.inject(fail_before("read_into", times=99, key=only_blob(repo, bad)))
    found = verify(repo)
    assert [blob for blob, _ in found.failed] == [hash_in(only_blob(repo, bad))]
    assert (found.damaged, found.checked_blobs) == ((), 2)
    assert marks(repo) == set()


@pytest.mark.parametrize("error", [StorageError("the disk is full"), Unsupported("can only be read")])
def test_damage_that_cannot_be_marked_is_reported(
    repo: Repository, faults: FaultyStore, caplog: pytest.LogCaptureFixture, error: CasckptError
) -> None:
    flip(repo, only_blob(repo, save_arrays(repo, {"a": array(1)})), DATA_OFFSET)
    faults.inject(fail_before("put", times=99, error=error))
    assert len(verify(repo).damaged) == 1
    assert f"saves may reuse damaged blobs: {error}" in caplog.text
    assert marks(repo) == set()


def test_a_store_with_unknown_requirements_is_verified_and_not_marked(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    flip(repo, only_blob(repo, save_arrays(repo, {"a": array(1)})), DATA_OFFSET)
    repo.change_settings(requires=["rewrites"])
    assert len(verify(repo).damaged) == 1
    assert "know rewrites" in caplog.text
    assert marks(repo) == set()


def test_a_disk_that_returns_wrong_bytes_is_detected(repo: Repository, faults: FaultyStore) -> None:
    save_arrays(repo, {"a": array(1)})
    faults.inject(corrupt("read_into"))
    assert len(verify(repo).damaged) == 1


def test_equal_objects_of_different_uploaders_are_different_blobs(repo: Repository) -> None:
    one, two = (save_arrays(repo, {"a": array(1)}, step=step) for step in range(2))
    flip(repo, only_blob(repo, one), DATA_OFFSET)
    (damaged,) = verify(repo).damaged
    assert damaged.checkpoints == (one.id,)
    (ref,) = manifests.get(repo, two).blobs
    assert blob_key(ref.uploader, ref.hash) == only_blob(repo, two)


# cached results


def test_marked_blobs_count_as_damaged_without_a_full_read(repo: Repository, faults: FaultyStore) -> None:
    commits = [save_arrays(repo, {"a": array(step)}, step=step) for step in range(3)]
    key = only_blob(repo, commits[1])
    blob = BlobHash(hash_in(key))
    flip(repo, key, DATA_OFFSET)
    blobs.mark_damaged(repo, commits[1].txid, blob, "seen before")
    faults.calls.clear()
    (found,) = verify(repo, mode="exists").damaged
    assert (found.blob, found.keys, found.checkpoints) == (blob, ("a",), (commits[1].id,))
    assert found.why == "it was marked as damaged before: seen before"
    assert set(faults.keys("open")) <= {key}
    assert faults.keys("put") == [], "what is marked needs no mark, and keeps the one that it has"
    assert verify(repo, refs=["run@2"], mode="exists").damaged == ()
    blobs.mark_repaired(repo, commits[1].txid, blob, "put back")
    assert verify(repo, mode="exists").damaged == ()


def test_every_part_includes_marked_blobs(repo: Repository) -> None:
    commits = [save_arrays(repo, {"a": array(step)}, step=step) for step in range(9)]
    key = only_blob(repo, commits[4])
    blob = BlobHash(hash_in(key))
    flip(repo, key, DATA_OFFSET)
    blobs.mark_damaged(repo, commits[4].txid, blob, "seen before")
    for number in range(3):
        found = verify(repo, part=(number, 3))
        assert [one.blob for one in found.damaged] == [blob]
        assert found.blobs == 9
