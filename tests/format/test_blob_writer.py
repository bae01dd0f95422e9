"""The blob writer: each blob can be verified against its name, and no large cell is hashed twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from casckpt.base.digest import Buffer
from casckpt.errors import InvalidInput
from casckpt.format import blob_writer
from casckpt.format.blob import DATA_OFFSET, decode_header, order
from casckpt.format.blob_writer import LEAF_BYTES, BlobWriter, buffer_bytes, padded
from casckpt.format.digest import cell_digest
from casckpt.format.dtypes import stored_itemsize
from casckpt.format.names import BlobHash, CellDigest
from casckpt.format.proof import Leaf, LeafCheck, decode_proof, read_proof

DTYPES = ("float64", "float32", "bfloat16", "uint8", "complex128", "float8_e5m2")
LENGTHS = st.one_of(
    st.integers(1, 300), st.integers(LEAF_BYTES - 20, LEAF_BYTES + 20), st.integers(4000, 3 * LEAF_BYTES)
)


@st.composite
def cells(draw: st.DrawFn) -> list[tuple[str, bytes]]:
    """Draw cells in the order of a blob: by dtype, with large and small cells in any order."""
    found = []
    for number in range(draw(st.integers(1, 25))):
        dtype = draw(st.sampled_from(DTYPES))
        size = stored_itemsize(dtype)
        found.append((dtype, bytes([number + 1]) * (max(1, draw(LENGTHS) // size) * size)))
    return sorted(found, key=lambda cell: order(cell[0]))


def written(given: list[tuple[str, bytes]]) -> tuple[BlobHash, bytes, list[int]]:
    """Return the name, the bytes, and the offset of each cell. The buffer contains bytes of an earlier blob."""
    total = sum(len(data) for _, data in given)
    buffer = memoryview(bytearray(b"\xaa" * buffer_bytes(padded(total))))
    writer, places = BlobWriter(buffer), []
    for dtype, data in given:
        at = writer.place(len(data))
        buffer[at : at + len(data)] = data
        writer.add(dtype, len(data), cell_digest(data))
        places.append(at)
    name, size = writer.finish()
    return name, bytes(buffer[:size]), places


def leaves_of(name: BlobHash, file: bytes) -> list[Leaf]:
    return decode_proof(read_proof(lambda offset, nbytes: file[offset : offset + nbytes], len(file), name))


@settings(deadline=None)
@given(cells())
def test_the_contents_of_a_blob_are_verified_against_its_name(given: list[tuple[str, bytes]]) -> None:
    name, file, places = written(given)
    leaves = leaves_of(name, file)
    check = LeafCheck(leaves)
    check.update(memoryview(file))
    assert check.wrong == []
    runs = decode_header(file, len(file))
    assert DATA_OFFSET + sum(nbytes for _, nbytes in runs) == leaves[-1].end
    covered = bytearray(file[DATA_OFFSET : leaves[-1].end])
    for (dtype, data), at in zip(given, places, strict=True):
        assert file[at : at + len(data)] == data
        assert at % stored_itemsize(dtype) == 0
        covered[at - DATA_OFFSET : at - DATA_OFFSET + len(data)] = bytes(len(data))
    assert not any(covered), "what is between cells is zeros"


@settings(deadline=None)
@given(cells())
def test_large_cells_are_separate_page_aligned_leaves_and_small_cells_share_leaves(
    given: list[tuple[str, bytes]],
) -> None:
    name, file, places = written(given)
    by_offset = {leaf.offset: leaf for leaf in leaves_of(name, file)}
    large = {at: data for (_, data), at in zip(given, places, strict=True) if len(data) >= LEAF_BYTES}
    for at, data in large.items():
        assert at % 4096 == 0
        assert by_offset[at][1:] == (len(data), cell_digest(data))
    ends = [leaf.end for leaf in by_offset.values()]
    for leaf in by_offset.values():
        if leaf.offset and leaf.offset not in large:
            assert leaf.nbytes < 2 * LEAF_BYTES
            assert leaf.nbytes >= LEAF_BYTES or leaf.end in large or leaf.end == max(ends)
    lost = len(file) - DATA_OFFSET - sum(len(data) for _, data in given) - 36 * len(by_offset)
    assert lost < 4096 * len(large) + 1


@settings(deadline=None)
@given(cells())
def test_the_blob_writer_does_not_hash_large_cells_again(given: list[tuple[str, bytes]]) -> None:
    hashed = []

    def digest(data: Buffer) -> CellDigest:
        hashed.append(len(data))
        return cell_digest(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blob_writer, "cell_digest", digest)
        _, file, _ = written(given)
    small = sum(len(data) for _, data in given if len(data) < LEAF_BYTES)
    assert sum(hashed) <= DATA_OFFSET + small + 4096 * sum(len(data) >= LEAF_BYTES for _, data in given)
    assert hashed.count(DATA_OFFSET) >= 1
    assert len(file) <= buffer_bytes(padded(sum(len(data) for _, data in given)))


@settings(deadline=None)
@given(cells(), st.lists(LENGTHS, min_size=1, max_size=8))
def test_frames_are_placed_after_the_cells_and_large_frames_are_separate_leaves(
    given: list[tuple[str, bytes]], lengths: list[int]
) -> None:
    frames = [bytes([200 + number]) * nbytes for number, nbytes in enumerate(lengths)]
    buffer = memoryview(bytearray(b"\xaa" * buffer_bytes(padded(sum(len(data) for _, data in given)) + sum(lengths))))
    writer = BlobWriter(buffer)
    for dtype, data in given:
        buffer[writer.place(len(data)) :][: len(data)] = data
        writer.add(dtype, len(data), cell_digest(data))
    begin = writer.end
    for frame in frames:
        buffer[writer.end :][: len(frame)] = frame
        writer.add_frame(len(frame))
    name, size = writer.finish()
    file = bytes(buffer[:size])
    assert file[begin : begin + sum(lengths)] == b"".join(frames), "nothing between them"
    assert decode_header(file, size)[-1][0] == "U8"
    leaves, check = leaves_of(name, file), LeafCheck(leaves_of(name, file))
    check.update(memoryview(file))
    assert not check.wrong
    at = begin
    for frame in frames:
        assert len(frame) < LEAF_BYTES or Leaf(at, len(frame), cell_digest(frame)) in leaves
        at += len(frame)
    assert all(
        leaf.nbytes < 2 * LEAF_BYTES or leaf.nbytes in [*lengths, *(len(data) for _, data in given)] for leaf in leaves
    )


def test_a_small_blob_needs_little_space_beyond_its_cells() -> None:
    _, file, places = written([("float32", b"1234")])
    assert (len(file), places) == (DATA_OFFSET + 4 + 2 * 36, [DATA_OFFSET])


def test_safetensors_readers_see_padding_as_part_of_the_preceding_tensor(tmp_path: Path) -> None:
    given = [("float32", bytes(LEAF_BYTES + 4)), ("float32", b"1234"), ("uint8", bytes(LEAF_BYTES))]
    _, file, places = written(given)
    (tmp_path / "blob.safetensors").write_bytes(file)
    assert places == [4096, 4096 + LEAF_BYTES + 4, 8192 + LEAF_BYTES]
    with safe_open(tmp_path / "blob.safetensors", framework="np") as opened:
        assert opened.keys() == ["0", "1", "proof"]
        assert opened.get_tensor("0").nbytes == LEAF_BYTES + 4096
        assert opened.get_tensor("1").nbytes == LEAF_BYTES


def test_cells_that_are_not_added_do_not_affect_the_blob() -> None:
    buffer = memoryview(bytearray(buffer_bytes(padded(3 * LEAF_BYTES))))
    writer = BlobWriter(buffer)
    for _ in range(3):
        buffer[writer.place(10) :][:10] = b"0123456789"
        buffer[writer.place(LEAF_BYTES) :][:5] = b"01234"
    assert writer.is_empty
    buffer[writer.place(4) :][:4] = b"abcd"
    writer.add("int32", 4, cell_digest(b"abcd"))
    name, size = writer.finish()
    assert (name, bytes(buffer[:size])) == written([("int32", b"abcd")])[:2]


def test_cells_that_are_out_of_order_are_rejected() -> None:
    with pytest.raises(InvalidInput, match="sort"):
        written([("uint8", b"1"), ("float32", b"1234")])
    with pytest.raises(InvalidInput, match="leaves"):
        BlobWriter(memoryview(bytearray(buffer_bytes(10)))).finish()
