"""A damaged blob is rebuilt from copies and from equal cells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from casckpt.contents import blobs, manifests
from casckpt.contents.refs import resolve
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.digest import cell_digest, proof_name
from casckpt.format.keys import blob_key
from casckpt.format.proof import encode_proof
from casckpt.history import commits
from casckpt.history.commits import Commit
from casckpt.repository.repository import Repository
from casckpt.upkeep.repair.repair import repair
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
from tests.support.gcs import collect
from tests.support.repairs import A1, KINDS, LARGE, LEAF, PADDING, SMALL, STATE, TAIL, B, damage


@pytest.mark.parametrize("how", KINDS)
def test_a_blob_is_rebuilt_from_equal_cells(repo: Repository, other: Repository, how: str) -> None:
    """No other blob has the same hash, but every cell is stored in some other blob."""
    one = save_arrays(repo, STATE)
    save_arrays(other, {"a": STATE["a"], "more": array(8)}, step=1)
    save_arrays(other, {"b": STATE["b"], "c": STATE["c"], "more": array(9)}, step=2)
    damage(repo, only_blob(repo, one), how)
    found = repair(repo, sources=[other])
    assert (len(found.blobs), found.rewritten) == (1, ())
    assert read_arrays(repo, one) == content(STATE)
    assert not verify(repo).is_damaged


def test_a_damaged_cell_is_recovered_from_a_different_checkpoint(repo: Repository) -> None:
    one = save_arrays(repo, STATE)
    save_arrays(repo, {"z": STATE["a"]}, step=1)
    damage(repo, only_blob(repo, one), "flipped")
    repaired = repair(repo)
    # The flipped byte is in a cell of b (int64 is stored first), which has no other copy.
    assert [one.keys for one in repaired.lost] == [("b",)]
    flip(repo, only_blob(repo, one), DATA_OFFSET + 17)
    flip(repo, only_blob(repo, one), DATA_OFFSET + 2 * CELL + 17)
    assert len(repair(repo).blobs) == 1
    assert read_arrays(repo, one) == content(STATE)


def flip_each(repo: Repository, commit: Commit, *positions: int) -> None:
    for position in positions:
        flip(repo, only_blob(repo, commit), position)


def test_damaged_copies_repair_each_other(repo: Repository, other: Repository) -> None:
    """Each copy is damaged in a different part: in its header, a large cell, padding, small cells, or its proof."""
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


def test_only_cells_damaged_in_all_copies_are_lost(repo: Repository, other: Repository) -> None:
    one, two = save_arrays(repo, LARGE, cell=LEAF), save_arrays(other, LARGE, cell=LEAF)
    flip_each(repo, one, A1, B)
    flip_each(other, two, TAIL, B + 9)
    verify(repo)
    assert [lost.keys for lost in repair(repo, sources=[other]).lost] == [("a", "b")]


@pytest.mark.parametrize("position", [4, 100, PADDING, -1, -36, -35, -6 * 36, -6 * 36 + 3, -6 * 36 + 4])
def test_unused_bytes_of_a_blob_are_reconstructed(repo: Repository, position: int) -> None:
    """Header, padding and proof are reconstructed from the live cells alone."""
    one = save_arrays(repo, LARGE, cell=LEAF)
    before = repo.storage.get(only_blob(repo, one), limit=1 << 20)
    flip_each(repo, one, position)
    assert [damaged.keys for damaged in verify(repo).damaged] == [()]
    found = repair(repo)
    assert (len(found.blobs), found.rewritten, found.is_damaged) == (1, (), False)
    assert repo.storage.get(only_blob(repo, one), limit=1 << 20) == before


def test_header_padding_and_proof_are_reconstructed_together(repo: Repository) -> None:
    one = save_arrays(repo, LARGE, cell=LEAF)
    flip_each(repo, one, 100, PADDING, -1, -36, -100, -180)
    verify(repo)
    assert len(repair(repo).blobs) == 1
    assert read_arrays(repo, one) == content(LARGE)


@pytest.mark.parametrize("position", [4, 100, PADDING, -1, -36, -35, -72, -6 * 36, -6 * 36 + 3, -6 * 36 + 4])
def test_header_padding_and_proof_are_reconstructed_next_to_dead_cells(repo: Repository, position: int) -> None:
    """The bytes between live cells are intact, but their meaning is unknown."""
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


def test_a_damaged_proof_beside_a_damaged_dead_cell_is_lost(repo: Repository) -> None:
    """The rebuilt bytes do not match the hash of the blob, so they are rejected."""
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
def test_a_rebuilt_blob_keeps_its_leaves(repo: Repository, position: int) -> None:
    """Its leaves differ from those that casckpt would choose: one leaf has two large cells, and two leaves have one
    small cell each."""
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


def test_a_dead_cell_is_recovered_from_a_live_copy(repo: Repository, other: Repository) -> None:
    older = save_arrays(repo, LARGE, cell=LEAF)
    newer = save_arrays(repo, {"a": LARGE["a"]}, step=1, reuse=older, cell=LEAF)
    commits.forget(repo, older)
    collect(repo)
    save_arrays(other, {"b": LARGE["b"], "more": array(9)}, cell=LEAF)
    flip(repo, f"objects/{older.txid}/{manifests.get(repo, newer).blob(0).hash}.safetensors", B + 7)
    assert [damaged.keys for damaged in verify(repo).damaged] == [()]
    assert len(repair(repo, sources=[other]).blobs) == 1
    assert not verify(repo).is_damaged
