"""The proof of a blob: it supports any division into leaves, is verified against the name, and is refused if
changed."""

from __future__ import annotations

import struct

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import Refused
from casckpt.format.blob import DATA_OFFSET, MAX_LEAVES, RECORD_BYTES
from casckpt.format.digest import cell_digest, proof_name
from casckpt.format.names import BlobHash, CellDigest
from casckpt.format.proof import (
    MAX_LEAF_BYTES,
    LeafCheck,
    as_leaves,
    decode_proof,
    encode_proof,
    find_proof,
    read_proof,
)

CUTS = st.lists(st.integers(1, 5000), min_size=1, max_size=60)


def proof_of(lengths: list[int], digest: bytes = b"d" * 32) -> bytes:
    return encode_proof([(nbytes, CellDigest(digest)) for nbytes in (DATA_OFFSET, *lengths)])


def reader(file: bytes, seen: list[tuple[int, int]] | None = None):  # type: ignore[no-untyped-def]  # of a test
    def read(offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= len(file)
        if seen is not None:
            seen.append((offset, nbytes))
        return file[offset : offset + nbytes]

    return read


def test_the_proof_of_a_blob_always_has_the_same_bytes() -> None:
    digests = [cell_digest(b"a"), cell_digest(b"b")]
    made = encode_proof([(DATA_OFFSET, digests[0]), (7, digests[1])])
    assert made == struct.pack("<I", 4096) + digests[0] + struct.pack("<I", 7) + digests[1]
    assert proof_name(made) == blake3(made, derive_key_context="casckpt 2026-11-23 the proof of a blob").hexdigest()
    assert proof_name(made) != blake3(made).hexdigest(), "a cell may hold the bytes of a proof"


@given(CUTS)
def test_a_proof_decodes_for_any_split_into_leaves(lengths: list[int]) -> None:
    leaves = decode_proof(proof_of(lengths))
    assert [leaf.nbytes for leaf in leaves] == [DATA_OFFSET, *lengths]
    assert [leaf.offset for leaf in leaves] == [sum([DATA_OFFSET, *lengths][:i]) for i in range(len(lengths) + 1)]
    assert leaves[-1].end == DATA_OFFSET + sum(lengths)


@given(CUTS, st.integers(0, 3000))
def test_a_proof_is_found_at_the_end_of_a_file_of_known_size(lengths: list[int], less: int) -> None:
    proof = proof_of(lengths)
    file = bytes(DATA_OFFSET + sum(lengths)) + proof
    assert find_proof(file, len(file)) == proof
    assert find_proof(file[-len(proof) :], len(file)) == proof
    short = file[-max(0, len(proof) - 1 - less) :] if len(proof) > 1 + less else b""
    assert find_proof(short, len(file)) is None


@pytest.mark.parametrize("count", [1, 100, 200, MAX_LEAVES - 1])
def test_a_proof_is_read_from_the_end_of_the_file(count: int) -> None:
    proof = proof_of([1] * count)
    file, seen = bytes(DATA_OFFSET + count) + proof, list[tuple[int, int]]()
    assert read_proof(reader(file, seen), len(file), proof_name(proof)) == proof
    assert len(seen) == {1: 1, 100: 1, 200: 2}.get(count, 4)


@given(CUTS, st.data())
def test_any_changed_byte_of_a_proof_is_detected(lengths: list[int], data: st.DataObject) -> None:
    proof = proof_of(lengths)
    file = bytearray(DATA_OFFSET + sum(lengths)) + proof
    at = data.draw(st.integers(len(file) - len(proof), len(file) - 1))
    file[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Refused, match="its proof does not match"):
        read_proof(reader(bytes(file)), len(file), proof_name(proof))


@pytest.mark.parametrize("size", [0, 1, 35, DATA_OFFSET - 1, DATA_OFFSET, DATA_OFFSET + 1, DATA_OFFSET + 72])
def test_a_file_that_is_too_short_has_no_proof(size: int) -> None:
    with pytest.raises(Refused):
        read_proof(reader(bytes(size)), size, BlobHash("0" * 64))


HOSTILE: dict[str, list[int]] = {
    "a leaf of nothing": [5, 0, 5],
    "a leaf that is too long": [MAX_LEAF_BYTES + 1],
    "no data": [],
    "too many leaves": [1] * MAX_LEAVES,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_proof_is_rejected_even_if_its_hash_is_correct(name: str) -> None:
    with pytest.raises(Refused):
        decode_proof(proof_of(HOSTILE[name]))


@pytest.mark.parametrize("cut", [1, RECORD_BYTES - 1])
def test_a_proof_with_an_incomplete_record_is_rejected(cut: int) -> None:
    with pytest.raises(Refused):
        decode_proof(proof_of([5, 5])[:-cut])


def test_the_first_leaf_of_a_blob_is_its_header() -> None:
    with pytest.raises(Refused, match="header"):
        decode_proof(encode_proof([(4095, CellDigest(bytes(32))), (1, CellDigest(bytes(32)))]))


def test_the_lengths_of_leaves_may_add_up_to_more_than_32_bits() -> None:
    proof = proof_of([MAX_LEAF_BYTES] * 5)
    size = DATA_OFFSET + 5 * MAX_LEAF_BYTES + len(proof)
    assert find_proof(proof, size) == proof
    assert find_proof(proof, size - (1 << 32)) is None
    assert as_leaves(proof)[-1].end == size - len(proof)


@given(CUTS, st.integers(1, 9000), st.data())
def test_leaves_can_be_verified_in_pieces_of_any_size(lengths: list[int], piece: int, data: st.DataObject) -> None:
    file = bytearray((17 * i) % 251 for i in range(DATA_OFFSET + sum(lengths)))
    leaves, start = [], 0
    for nbytes in (DATA_OFFSET, *lengths):
        leaves.append((nbytes, cell_digest(file[start : start + nbytes])))
        start += nbytes
    wanted = as_leaves(encode_proof(leaves))
    flips = data.draw(st.sets(st.integers(0, len(file) - 1), max_size=3))
    for flip in flips:
        file[flip] ^= 1
    check = LeafCheck(wanted)
    behind = memoryview(file + b"what lies behind does not count")
    for at in range(0, len(behind), piece):
        check.update(behind[at : at + piece])
    assert check.wrong == [leaf for leaf in wanted if any(leaf.offset <= flip < leaf.end for flip in flips)]
