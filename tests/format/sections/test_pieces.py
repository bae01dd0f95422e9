"""Pieces are decoded one by one, a flipped byte damages only its group, and an incorrect table is refused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import Damaged, Refused
from casckpt.format.digest import cell_digest
from casckpt.format.sections.columns import pack, unpack
from casckpt.format.sections.head import Section
from casckpt.format.sections.pieces import PieceReader, Pieces, cut

START = 5000
Pieced = Sequence[bytes]
pieces = st.lists(st.binary(max_size=40) | st.just(b""), max_size=60)
large = [bytes([number % 251]) * (number % 7 * 100) for number in range(40_000)]


class Store:
    """Serves bytes by range, and records the ranges."""

    def __init__(self, data: bytes) -> None:
        self.data, self.reads = data, [(0, 0)]
        self.reads.clear()

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.reads += ranges
        return [self.data[offset - START : offset - START + length] for offset, length in ranges]


def section(data: bytes) -> Section:
    return Section("cells", 0, START, len(data), cell_digest(data))


def opened(table: Pieces, data: bytes, count: int) -> tuple[PieceReader, Store]:
    store = Store(data)
    return PieceReader(table, count, section(data), store.read), store


@given(pieces)
def test_pieces_decode_as_encoded(given_: list[bytes]) -> None:
    table, data = cut(given_)
    reader, _ = opened(table, data, len(given_))
    assert data == b"".join(given_)
    assert len(reader) == len(given_)
    assert [bytes(reader.get(number)) for number in range(len(given_))] == given_
    assert [reader.length(number) for number in range(len(given_))] == list(map(len, given_))


def test_groups_have_one_piece_in_small_sections_and_16_kib_in_large_ones() -> None:
    few, _ = cut([bytes(33)] * 200)
    assert (few.each, len(few.hashes)) == (1, 32 * 200)
    table, data = cut(large)
    assert len(data) > 10 << 20
    assert len(table.hashes) <= 32 * (len(data) // (15 << 10) + 1)


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=2, max_size=60), st.data())
def test_a_flipped_byte_damages_only_its_piece(given_: list[bytes], data_: st.DataObject) -> None:
    table, good = cut(given_)
    position = data_.draw(st.integers(0, len(good) - 1))
    raw = bytearray(good)
    raw[position] ^= 1
    hit = next(number for number, end in enumerate(accumulate(map(len, given_))) if position < end)
    store = Store(bytes(raw))
    reader = PieceReader(table, len(given_), section(good), store.read)
    reader.ready(range(len(given_)))
    if len(good) < 512:
        assert [number for number in range(len(given_)) if not reader.is_right(number)] == [hit]
    with pytest.raises(Damaged, match="'cells' does not match its hash"):
        reader.get(hit)


@given(st.lists(st.binary(min_size=1, max_size=3), min_size=1, max_size=60), st.data())
def test_undamaged_pieces_of_equal_length_are_returned_as_rows_of_an_array(
    given_: list[bytes], data_: st.DataObject
) -> None:
    table, good = cut(given_)
    raw = bytearray(good)
    raw[data_.draw(st.integers(0, len(good) - 1))] ^= data_.draw(st.integers(0, 1))
    reader = PieceReader(table, len(given_), section(good), Store(bytes(raw)).read)
    numbers, length = data_.draw(st.lists(st.integers(0, len(given_) - 1))), data_.draw(st.integers(1, 3))
    fits, rows = reader.rows(np.array(numbers, np.int64), length)
    assert fits.tolist() == [reader.is_right(n) and len(given_[n]) == length for n in numbers]
    assert [row.tobytes() for row in rows] == [
        given_[n] if fit else bytes(length) for n, fit in zip(numbers, fits, strict=True)
    ]


def test_each_requested_piece_is_read_once_and_no_others_are_read() -> None:
    table, data = cut(large)
    reader, store = opened(table, data, len(large))
    assert bytes(reader.get(20_000)) == large[20_000]
    ((_, length),) = store.reads
    assert length <= 18 << 10
    reader.get(20_000)
    assert len(store.reads) == 1
    store.reads.clear()
    reader.ready([*range(3000, 3200), 39_999])
    assert len(store.reads) == 2
    for number in (3000, 3199, 39_999):
        assert bytes(reader.get(number)) == large[number]
    assert len(store.reads) == 2


@given(st.data())
def test_a_forged_table_is_rejected_or_does_not_verify_any_other_bytes(data_: st.DataObject) -> None:
    given_ = [b"one", b"", b"three", b"four"]
    table, data = cut(given_)
    lengths, each = unpack(table.lengths), data_.draw(st.sampled_from([table.each, 0, 2, 3, 2**62]))
    change = data_.draw(st.sampled_from(["drop", "add", "set"]))
    if change == "drop":
        del lengths[-1:]
    elif change == "add":
        lengths.append(data_.draw(st.integers(0, 5)))
    else:
        lengths[data_.draw(st.integers(0, 3))] = data_.draw(st.integers(0, 9) | st.sampled_from([2**31, 2**61, 2**62]))
    forged = Pieces(pack(lengths), each, table.hashes)
    try:
        reader, _ = opened(forged, data, len(given_))
    except Refused:
        return
    for number in range(len(given_)):
        if reader.is_right(number):
            assert len(reader.get(number)) <= len(data)


def test_a_table_that_lacks_hashes_is_rejected() -> None:
    table, data = cut([b"one", b"two"])
    for hashes in (b"", table.hashes[:-1], table.hashes + bytes(32)):
        with pytest.raises(Refused):
            opened(Pieces(table.lengths, table.each, hashes), data, 2)
    with pytest.raises(Refused):
        opened(table, data + b"x", 2)
    with pytest.raises(Refused):
        opened(table, data, 3)
