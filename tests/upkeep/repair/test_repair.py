"""repair: right bytes come back from wherever they are, and nothing wrong is ever put in their place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from casckpt.base.progress import silent
from casckpt.cli.describe import plain
from casckpt.contents import blobs, manifests
from casckpt.contents.refs import resolve
from casckpt.errors import NotFound, StorageError
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.digest import cell_digest, proof_name
from casckpt.format.draft import placed
from casckpt.format.keys import blob_key, commit_key, manifest_key
from casckpt.format.proof import encode_proof
from casckpt.format.sections.blobs import BlobRef, encode_blobs
from casckpt.format.sections.head import decode_head
from casckpt.history import commits, tags
from casckpt.history.commits import Commit, list_commits
from casckpt.history.following import newest_reusable
from casckpt.repository.repository import Repository
from casckpt.saving.reuse_offer import reusable
from casckpt.storage.local.newfile import temporary_name
from casckpt.storage.local.store import LocalStore
from casckpt.upkeep.repair.repair import Rewritten, repair
from casckpt.upkeep.repair.verify import verify
from tests.support.checkpoints import (
    CELL,
    Arrays,
    array,
    content,
    flip,
    known_cells,
    only_blob,
    read_arrays,
    save_arrays,
)
from tests.support.far import FarStore
from tests.support.faulty import FaultyStore, call_first, fail_after, fail_before
from tests.support.gcs import collect, run_gc
from tests.support.repositories import committed_encoded, meanwhile, memory, repository
from tests.support.saves import blob_keys, cells, reopened, same_state, small
from tests.support.saves import flip as flip_object

STATE: Arrays = {"a": array(1, 3), "b": array(2, dtype="int64"), "c": array(3, 0.5, dtype="uint8")}


@pytest.fixture
def other(tmp_path: Path) -> Repository:
    """Another store."""
    return repository(tmp_path / "other", seed=2)


def copy_into(other: Repository, repo: Repository, commit: Commit) -> None:
    """The same checkpoint in another store, under uploaders of its own."""
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
    if how == "flipped":
        flip(repo, key, DATA_OFFSET + 17)
    elif how == "header":
        flip(repo, key, 20)
    elif how == "short":
        repo.storage.replace(key, repo.storage.get(key, limit=1 << 30)[: DATA_OFFSET + 100])
    else:
        repo.storage.delete(key)
    verify(repo)


KINDS = ["flipped", "header", "short", "gone"]


def test_nothing_damaged_nothing_done(repo: Repository, faults: FaultyStore) -> None:
    save_arrays(repo, STATE)
    calls = len(faults.calls)
    found = repair(repo)
    assert (found.blobs, found.manifests, found.rewritten, found.lost, found.is_damaged) == ((), (), (), (), False)
    assert {call.method for call in faults.calls[calls:]} <= {"list", "get", "size"}


@pytest.mark.parametrize("how", KINDS)
def test_from_the_same_blob_of_another_uploader(repo: Repository, how: str) -> None:
    one, _ = (save_arrays(repo, STATE, step=step) for step in range(2))
    damage(repo, only_blob(repo, one), how)
    found = repair(repo)
    assert len(found.blobs) == 1
    assert not found.is_damaged
    assert read_arrays(repo, one) == content(STATE)
    assert not verify(repo).is_damaged
    assert blobs.damaged_marks(repo) == set()


@pytest.mark.parametrize("how", KINDS)
def test_from_another_store(repo: Repository, other: Repository, how: str) -> None:
    one = save_arrays(repo, STATE)
    save_arrays(other, STATE, "somewhere", 9)
    damage(repo, only_blob(repo, one), how)
    before = {entry.key for entry in other.storage.list("")}
    found = repair(repo, sources=[other])
    assert len(found.blobs) == 1
    assert read_arrays(repo, one) == content(STATE)
    assert {entry.key for entry in other.storage.list("")} == before, "a source is only read"


def test_in_a_folder(tmp_path: Path, other: Repository) -> None:
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    one = save_arrays(repo, STATE)
    save_arrays(other, STATE)
    damage(repo, only_blob(repo, one), "flipped")
    assert len(repair(repo, sources=[other]).blobs) == 1
    assert read_arrays(repo, one) == content(STATE)


@pytest.mark.parametrize("how", KINDS)
def test_rebuilt_from_equal_cells(repo: Repository, other: Repository, how: str) -> None:
    """No blob anywhere has the same hash, but every cell lies in some blob."""
    one = save_arrays(repo, STATE)
    save_arrays(other, {"a": STATE["a"], "more": array(8)}, step=1)
    save_arrays(other, {"b": STATE["b"], "c": STATE["c"], "more": array(9)}, step=2)
    damage(repo, only_blob(repo, one), how)
    found = repair(repo, sources=[other])
    assert (len(found.blobs), found.rewritten) == (1, ())
    assert read_arrays(repo, one) == content(STATE)
    assert not verify(repo).is_damaged


def test_one_bad_cell_comes_from_another_checkpoint_of_this_store(repo: Repository) -> None:
    one = save_arrays(repo, STATE)
    save_arrays(repo, {"z": STATE["a"]}, step=1)
    damage(repo, only_blob(repo, one), "flipped")
    repaired = repair(repo)
    # the byte is in a cell of b (int64 lies first), of which there is no other copy
    assert [one.keys for one in repaired.lost] == [("b",)]
    flip(repo, only_blob(repo, one), DATA_OFFSET + 17)
    flip(repo, only_blob(repo, one), DATA_OFFSET + 2 * CELL + 17)
    assert len(repair(repo).blobs) == 1
    assert read_arrays(repo, one) == content(STATE)


def with_dead_cells(repo: Repository) -> tuple[Commit, Commit]:
    """(older, newer): the newer one uses a part of the older one's blob, of which the rest is dead."""
    older = save_arrays(repo, STATE, step=0)
    newer = save_arrays(repo, {"a": STATE["a"], "c": STATE["c"], "new": array(7)}, step=1, reuse=older, ephemeral=True)
    commits.forget(repo, older)
    collect(repo)
    return older, newer


@pytest.mark.parametrize("how", ["short", "gone"])
def test_dead_cells_that_cannot_be_had_let_it_be_rewritten(repo: Repository, other: Repository, how: str) -> None:
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


def test_what_no_source_has_is_reported_as_lost(repo: Repository) -> None:
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


def test_a_copy_that_is_damaged_itself_is_not_used(repo: Repository, other: Repository) -> None:
    one, two = (save_arrays(repo, STATE, step=step) for step in range(2))
    copy = save_arrays(other, STATE)
    for store, commit in ((repo, one), (repo, two), (other, copy)):
        flip(store, only_blob(store, commit), DATA_OFFSET + 5)
    verify(repo)
    found = repair(repo, sources=[other])
    assert (found.blobs, len(found.lost)) == ((), 2)


LEAF = 64 << 10
LARGE: Arrays = {
    "a": np.concatenate([array(1, 32), array(2, 0.5)]),
    "b": array(3, 16),
    "c": array(4, 0.125),
    "d": array(5, 0.125, "uint8"),
}
A1, TAIL, PADDING, B = (DATA_OFFSET + at for at in (LEAF, 2 * LEAF, 2 * LEAF + 3000, 2 * LEAF + 4096))
SMALL = B + LEAF + 5


def flip_each(repo: Repository, commit: Commit, *positions: int) -> None:
    for position in positions:
        flip(repo, only_blob(repo, commit), position)


def test_damaged_copies_mend_each_other(repo: Repository, other: Repository) -> None:
    """Each is wrong somewhere else: in its header, a large cell, padding, small cells, its proof."""
    one, two = (save_arrays(repo, LARGE, step=step, cell=LEAF) for step in range(2))
    three = save_arrays(other, LARGE, cell=LEAF)
    flip_each(repo, one, 100, A1, -3)
    flip_each(repo, two, B, PADDING)
    flip_each(other, three, SMALL, DATA_OFFSET, -40)
    verify(repo)
    found = repair(repo, sources=[other])
    assert (len(found.blobs), found.is_damaged) == (2, False)
    for commit in (one, two):
        assert read_arrays(repo, commit) == content(LARGE)
    assert not verify(repo).is_damaged


def test_what_is_wrong_in_all_copies_is_lost_and_nothing_else(repo: Repository, other: Repository) -> None:
    one, two = save_arrays(repo, LARGE, cell=LEAF), save_arrays(other, LARGE, cell=LEAF)
    flip_each(repo, one, A1, B)
    flip_each(other, two, TAIL, B + 9)
    verify(repo)
    assert [lost.keys for lost in repair(repo, sources=[other]).lost] == [("a", "b")]


def test_the_cache_of_this_host_is_a_copy(repo: Repository) -> None:
    one = save_arrays(repo, LARGE, cell=LEAF)
    repo.blob_cache.fill(repo.storage, list(manifests.get(repo, one).blobs), 1, silent)
    damage(repo, only_blob(repo, one), "gone")
    assert len(repair(repo).blobs) == 1
    assert read_arrays(repo, one) == content(LARGE)


@pytest.mark.parametrize("position", [4, 100, PADDING, -1, -36, -35, -6 * 36, -6 * 36 + 3, -6 * 36 + 4])
def test_what_no_checkpoint_needs_is_made_anew(repo: Repository, position: int) -> None:
    """Header, padding and proof, from the live cells alone."""
    one = save_arrays(repo, LARGE, cell=LEAF)
    before = repo.storage.get(only_blob(repo, one), limit=1 << 20)
    flip_each(repo, one, position)
    assert [damaged.keys for damaged in verify(repo).damaged] == [()]
    found = repair(repo)
    assert (len(found.blobs), found.rewritten, found.is_damaged) == (1, (), False)
    assert repo.storage.get(only_blob(repo, one), limit=1 << 20) == before


def test_header_padding_and_proof_together(repo: Repository) -> None:
    one = save_arrays(repo, LARGE, cell=LEAF)
    flip_each(repo, one, 100, PADDING, -1, -36, -100, -180)
    verify(repo)
    assert len(repair(repo).blobs) == 1
    assert read_arrays(repo, one) == content(LARGE)


@pytest.mark.parametrize("position", [4, 100, PADDING, -1, -36, -35, -72, -6 * 36, -6 * 36 + 3, -6 * 36 + 4])
def test_so_it_is_beside_dead_cells(repo: Repository, position: int) -> None:
    """What is between live cells is right, though nobody knows what it is."""
    older = save_arrays(repo, LARGE, cell=LEAF)
    kept = {name: LARGE[name] for name in "abd"}
    newer = save_arrays(repo, kept, step=1, reuse=older, cell=LEAF)
    key = only_blob(repo, older)
    before = repo.storage.get(key, limit=1 << 20)
    commits.forget(repo, older)
    collect(repo)
    flip(repo, key, position)
    verify(repo)
    found = repair(repo)
    assert (len(found.blobs), found.rewritten) == (1, ())
    assert repo.storage.get(key, limit=1 << 20) == before
    assert read_arrays(repo, newer) == content(kept)


def test_a_torn_proof_beside_a_dead_cell_that_is_wrong_cannot_be_made_anew(repo: Repository) -> None:
    """And what was made of it is not taken for the blob."""
    older = save_arrays(repo, LARGE, cell=LEAF)
    kept = {name: LARGE[name] for name in "abd"}
    save_arrays(repo, kept, step=1, reuse=older, cell=LEAF)
    commits.forget(repo, older)
    collect(repo)
    key = only_blob(repo, older)
    flip(repo, key, SMALL)
    flip(repo, key, -1)
    verify(repo)
    found = repair(repo)
    assert (found.blobs, len(found.rewritten)) == ((), 1)
    assert read_arrays(repo, resolve(repo, "run@1")) == content(kept)


@pytest.mark.parametrize("position", [100, -1])
def test_a_blob_that_was_cut_otherwise_stays_as_it_was_cut(repo: Repository, position: int) -> None:
    """With as many leaves as casckpt would make: two large cells in one, two small ones apart."""
    arrays: Arrays = {"a": array(1, 32), "c": array(4, 0.125), "d": array(5, 0.125)}
    one = save_arrays(repo, arrays, cell=LEAF)
    (ref,) = manifests.get(repo, one).blobs
    data = bytearray(repo.storage.get(blob_key(ref.uploader, ref.hash), limit=1 << 20))
    cut, start = [], 0
    for nbytes in (DATA_OFFSET, 2 * LEAF, 512, 512):
        cut.append((nbytes, cell_digest(data[start : start + nbytes])))
        start += nbytes
    data[start:] = proof = encode_proof(cut)
    other = replace(ref, hash=proof_name(proof))
    assert (len(data), other.hash != ref.hash) == (ref.size, True)
    blobs.put(repo, other.uploader, other.hash, bytes(data))
    known = {digest: (other, offset) for digest, (_, offset) in known_cells(repo, one).items()}
    two = save_arrays(repo, arrays, step=1, known=known, cell=LEAF)
    flip(repo, blob_key(other.uploader, other.hash), position)
    verify(repo)
    assert repair(repo).blobs == (other.hash,)
    assert repo.storage.get(blob_key(other.uploader, other.hash), limit=1 << 20) == data
    assert read_arrays(repo, two) == content(arrays)


def test_a_dead_cell_comes_back_from_where_it_lives(repo: Repository, other: Repository) -> None:
    older = save_arrays(repo, LARGE, cell=LEAF)
    newer = save_arrays(repo, {"a": LARGE["a"]}, step=1, reuse=older, cell=LEAF)
    commits.forget(repo, older)
    collect(repo)
    save_arrays(other, {"b": LARGE["b"], "more": array(9)}, cell=LEAF)
    flip(repo, f"objects/{older.txid}/{manifests.get(repo, newer).blob(0).hash}.safetensors", B + 7)
    assert [damaged.keys for damaged in verify(repo).damaged] == [()]
    assert len(repair(repo, sources=[other]).blobs) == 1
    assert not verify(repo).is_damaged


def test_dead_cells_that_cannot_be_had_do_not_keep_the_live_ones_from_a_new_blob(repo: Repository) -> None:
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


def test_a_manifest_that_is_damaged_elsewhere_keeps_no_other_repair_from_being_made() -> None:
    """Its blob could be left behind, but nobody knows the objects that the new manifest would hold."""
    store = small()
    store.save({"a": cells(3, seed=1), "b": cells(1, seed=2)}, step=1)
    first = blob_keys(store)[0]
    ckpt = store.save({"a": cells(3, seed=1), "text": "x" * 3000}, step=2)
    store.forget("default@1")
    store.gc(min_age=0)
    assert first in blob_keys(store)
    flip_object(store, first, DATA_OFFSET + 3 * CELL + 5)  # of b, which no checkpoint has any more
    key = manifest_key(ckpt.commit.txid, ckpt.commit.id)
    flip_object(store, key, decode_head(store.repository.storage.get(key, limit=1 << 20))["objects"].offset)
    again = reopened(store)
    again.verify()
    found = again.repair()
    assert ([one.id for one in found.lost_manifests], len(found.lost), found.rewritten) == ([ckpt.id], 1, ())
    assert same_state(again.read("default@2", keys=["a"]), {"a": cells(3, seed=1)})


def test_a_damaged_source_does_not_spoil_what_is_right(repo: Repository) -> None:
    """A leaf of a live cell and a dead one that is wrong; where a cell has the same bytes, the other is."""
    a, b = array(1, 0.25), array(2, 0.25)
    older = save_arrays(repo, {"a": a, "b": b})
    both = save_arrays(repo, {"c": np.concatenate([a, b])}, "other", 1)
    save_arrays(repo, {"a": a}, step=1, reuse=older)
    commits.forget(repo, older)
    collect(repo)
    flip(repo, only_blob(repo, older), DATA_OFFSET + b.nbytes + 5)
    flip(repo, only_blob(repo, both), DATA_OFFSET + 5)
    verify(repo)
    found = repair(repo)
    assert (len(found.rewritten), [lost.keys for lost in found.lost]) == (1, [("c",)])
    assert read_arrays(repo, resolve(repo, "run@1")) == content({"a": a})


def test_a_marked_blob_that_is_right_loses_its_mark(repo: Repository) -> None:
    one = save_arrays(repo, STATE)
    (ref,) = manifests.get(repo, one).blobs
    blobs.mark_damaged(repo, ref.uploader, ref.hash, "a load saw something")
    found = repair(repo)
    assert (found.blobs, found.is_damaged) == ((), False)
    assert blobs.damaged_marks(repo) == set()


@pytest.mark.parametrize("how", ["flipped", "gone"])
@pytest.mark.parametrize("known", [True, False], ids=["catalogue", "no catalogue"])
def test_a_manifest_comes_back_from_another_store(
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
def test_blobs_that_only_the_lost_manifest_named(
    tmp_path: Path, repo: Repository, other: Repository, known: bool
) -> None:
    """The catalogue knows where they lie; without it that is guessed, and the head tells that it is right."""
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
def test_a_manifest_that_is_put_back_has_every_byte_of_before(tmp_path: Path, other: Repository, kind: str) -> None:
    """So what other hosts know of it still holds: where its blobs lie, and what they may reuse."""
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
    known = reusable(saving, newest_reusable(saving, one.run, anew=True), {}, run=one.run, dedup="run")
    assert known.to_tell(saving, {one.txid}).commits is None
    looking = repository(tmp_path / "host", storage, seed=4)
    assert collect(looking).deleted_blobs == 0
    assert read_arrays(repository(tmp_path / "new", storage, seed=6), one) == content(STATE)


def test_a_gc_beside_the_repair_of_a_manifest_deletes_nothing_of_it(tmp_path: Path, other: Repository) -> None:
    """It knows from its catalogue what the manifest named, and will name again."""
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
    assert storage.count("replace") == 2  # the flip, too
    assert read_arrays(repository(tmp_path / "new", storage, seed=6), one) == content(STATE)


@pytest.mark.parametrize("blob", ["there", "gone"])
def test_where_nobody_knows_the_places_the_checkpoint_is_rewritten(
    tmp_path: Path, repo: Repository, other: Repository, blob: str
) -> None:
    """Two uploaders have the blob that was reused, so a guess goes wrong. Ids, tags and reads by id stay."""
    bases = [save_arrays(repo, {"a": STATE["a"], "old": array(9)}, step=step) for step in range(2)]
    one = save_arrays(repo, STATE, step=2, reuse=bases[1])
    later = save_arrays(repo, {"x": array(20)}, step=3)
    tags.set_tag(repo, "best", one)
    copy_into(other, repo, one)
    repo.storage.delete(manifest_key(one.txid, one.id))
    if blob == "gone":
        repo.storage.delete(only_blob(repo, bases[0]))
    fresh = repository(tmp_path / "elsewhere", repo.storage, seed=5)
    if blob == "gone":  # then there is one left, and the guess is right
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


def test_manifest_and_blobs_together(tmp_path: Path, repo: Repository, other: Repository) -> None:
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


def test_a_commit_whose_answer_got_lost_is_a_rewrite_all_the_same(
    repo: Repository, faults: FaultyStore, other: Repository
) -> None:
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


def test_a_checkpoint_that_is_forgotten_meanwhile_is_left_alone(
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


def test_several_checkpoints_that_share_a_lost_blob(repo: Repository, other: Repository) -> None:
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


def test_what_they_share_lies_once_in_their_new_places(repo: Repository, other: Repository) -> None:
    """Also where each needs other cells of it. Else a hundred checkpoints would have a hundred copies."""
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


def test_one_that_lacks_more_keeps_no_other_from_what_they_share(repo: Repository, other: Repository) -> None:
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
def test_what_another_repair_rewrote_meanwhile_is_not_lost(
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


@pytest.mark.parametrize("what", ["blob", "manifest"])
def test_what_a_killed_repair_left_goes_with_the_next(tmp_path: Path, other: Repository, what: str) -> None:
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    one = save_arrays(repo, STATE)
    copy_into(other, repo, one)
    key = only_blob(repo, one) if what == "blob" else manifest_key(one.txid, one.id)
    flip(repo, key, 50)
    verify(repo)
    left = (tmp_path / "store" / key).with_name(temporary_name("x"))
    left.write_bytes(bytes(1000))  # as killed before the rename
    assert not repair(repo, sources=[other]).is_damaged
    assert not left.exists()
    assert not verify(repo).is_damaged


def test_nothing_is_written_for_checkpoints_whose_bytes_are_nowhere(tmp_path: Path) -> None:
    """A transaction and a listing for each of the thousands that share a blob would take minutes, and bring nothing."""
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


def test_a_missing_source_raises_even_if_nothing_is_damaged(repo: Repository, tmp_path: Path) -> None:
    save_arrays(repo, STATE)
    with pytest.raises(NotFound, match="there is no store at"):
        repair(repo, sources=[Repository(LocalStore(tmp_path / "nope"), tmp_path)])
