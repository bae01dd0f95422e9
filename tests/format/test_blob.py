"""The header of a blob: any safetensors reader accepts it, it is canonical, and all other bytes are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from casckpt.errors import InvalidInput, Refused
from casckpt.format.blob import (
    DATA_OFFSET,
    MAX_LEAVES,
    MAX_RUNS,
    RECORD_BYTES,
    decode_header,
    encode_header,
    most_data,
    order,
)
from casckpt.format.dtypes import DTYPES, stored_itemsize, stored_name

RUNS = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(1, 1 << 12)), max_size=30).map(
    lambda runs: [
        (dtype, count * stored_itemsize(dtype)) for dtype, count in sorted(runs, key=lambda run: order(run[0]))
    ]
)


PROOF = bytes(2 * RECORD_BYTES)


def size_of(runs: list[tuple[str, int]], leaves: int = 2) -> int:
    return DATA_OFFSET + sum(nbytes for _, nbytes in runs) + RECORD_BYTES * leaves


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_safetensors_opens_every_dtype(tmp_path: Path, dtype: str) -> None:
    data = bytes(range(2, 18)) * 2 if dtype != "bool" else bytes([0, 1]) * 16
    path = tmp_path / "blob.safetensors"
    path.write_bytes(encode_header([(dtype, 32)], 2) + data + PROOF)
    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor("0")
        assert file.get_tensor("proof").numpy().tobytes() == PROOF
    name = dtype if stored_name(dtype) != "U8" else "uint8"
    assert str(tensor.dtype) == f"torch.{name}"
    assert tensor.view(torch.uint8).numpy().tobytes() == data


def test_safetensors_reads_the_data_from_byte_4096(tmp_path: Path) -> None:
    first, second = torch.arange(8, dtype=torch.float64), torch.arange(7, dtype=torch.int8)
    header = encode_header([("float64", 64), ("int8", 7)], 2)
    path = tmp_path / "blob.safetensors"
    path.write_bytes(header + first.numpy().tobytes() + second.numpy().tobytes() + PROOF)
    assert len(header) == DATA_OFFSET == 4096
    with safe_open(path, framework="pt") as file:
        assert file.keys() == ["0", "1", "proof"]
        assert torch.equal(file.get_tensor("0"), first)
        assert torch.equal(file.get_tensor("1"), second)


def test_the_header_of_a_blob_always_has_the_same_bytes() -> None:
    header = encode_header([("bfloat16", 4), ("uint8", 3)], 2)
    assert header[:8] == (4088).to_bytes(8, "little")
    assert header[8:].rstrip(b" ") == (
        b'{"0":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"1":{"dtype":"U8","shape":[3],"data_offsets":[4,7]},'
        b'"proof":{"dtype":"U8","shape":[72],"data_offsets":[7,79]}}'
    )


def test_adjacent_cells_of_the_same_stored_dtype_form_one_tensor_of_a_blob() -> None:
    assert encode_header([("complex128", 16), ("uint8", 0), ("float8_e8m0fnu", 3)], 5) == encode_header(
        [("uint8", 19)], 5
    )


@given(RUNS, st.integers(2, MAX_LEAVES))
def test_a_header_decodes_to_one_tensor_for_each_run_of_cells_of_the_same_dtype(
    runs: list[tuple[str, int]], leaves: int
) -> None:
    header = encode_header(runs, leaves)
    decoded = decode_header(header, size_of(runs, leaves))
    assert sum(nbytes for _, nbytes in decoded) == sum(nbytes for _, nbytes in runs)
    assert [name for name, _ in decoded] == list(dict.fromkeys(stored_name(dtype) for dtype, _ in runs))


@given(RUNS, st.integers(0, DATA_OFFSET - 1), st.integers(1, 255))
def test_any_changed_byte_is_rejected(runs: list[tuple[str, int]], position: int, flip: int) -> None:
    header = bytearray(encode_header(runs, 2))
    header[position] ^= flip
    try:
        changed = decode_header(bytes(header), size_of(runs))
    except Refused:
        return
    assert changed != decode_header(encode_header(runs, 2), size_of(runs))  # a canonical header of another blob


@pytest.mark.parametrize("header", [b"", b"\0" * DATA_OFFSET, b"\xff" * DATA_OFFSET])
def test_bytes_without_a_header_are_rejected(header: bytes) -> None:
    with pytest.raises(Refused):
        decode_header(header, DATA_OFFSET)


def test_a_header_that_does_not_match_its_data_is_rejected() -> None:
    with pytest.raises(Refused, match="header does not match its data"):
        decode_header(encode_header([("int8", 5)], 2), size_of([("int8", 4)]))


@pytest.mark.parametrize("leaves", [0, 1, MAX_LEAVES + 1])
def test_a_proof_with_an_invalid_number_of_leaves_is_rejected(leaves: int) -> None:
    with pytest.raises(InvalidInput, match="leaves"):
        encode_header([("int8", 5)], leaves)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"proof"', b'"prooF"'),
        (b'"dtype":"U8","shape":[72]', b'"dtype":"I8","shape":[72]'),
        (b"[72],", b"[73],"),
        (b"[4,76]", b"[4,75]"),
    ],
)
def test_a_proof_that_contradicts_the_header_is_rejected(before: bytes, after: bytes) -> None:
    header = encode_header([("int16", 4)], 2)
    assert before in header
    with pytest.raises(Refused):
        decode_header(header.replace(before, after), size_of([("int16", 4)]))


def test_the_size_of_a_blob_limits_the_size_of_its_data() -> None:
    assert most_data(size_of([("int8", 5)])) == 5


def test_a_header_with_holes_or_overlaps_is_rejected() -> None:
    header = encode_header([("int16", 4), ("int8", 4)], 2)
    for offsets in (b"[5,9]", b"[3,7]"):
        with pytest.raises(Refused):
            decode_header(header.replace(b"[4,8]", offsets), size_of([("int8", 8)]))


@pytest.mark.parametrize("runs", [[("float32", 6)], [("int8", 1), ("int16", 2)], [("int8", -1)]])
def test_a_header_with_an_impossible_layout_is_rejected(runs: list[tuple[str, int]]) -> None:
    with pytest.raises(InvalidInput):
        encode_header(runs, 2)


def test_an_unknown_dtype_is_rejected() -> None:
    with pytest.raises(Refused, match="float7"):
        encode_header([("float7", 8)], 2)


def test_the_maximum_number_of_tensors_fits_into_the_header_of_a_blob() -> None:
    longest = 1 << 30
    runs = [("float8_e4m3fn" if i % 2 else "float8_e5m2", longest) for i in range(MAX_RUNS)]
    assert len(encode_header(runs, MAX_LEAVES)) == DATA_OFFSET
    with pytest.raises(InvalidInput, match="runs"):
        encode_header(runs * 2, 2)
