"""Chains of cells: decoded from their key on, and refused at the first link that is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import Refused
from casckpt.format.digest import cell_digest
from casckpt.format.encodings.chains import decode_chain
from casckpt.format.encodings.frames import encode, encode_planes
from casckpt.format.extents import MAX_LINKS, Frame, StoredCell
from casckpt.format.regions import full_box

CELL = 4096


def version(number: int) -> bytes:
    data = bytearray(bytes(range(1, 9)) * (CELL // 8))
    for later in range(number + 1):
        data[later::64] = bytes([later]) * len(data[later::64])
    return bytes(data)


def chain(links: int, *, coded_key: bool) -> tuple[StoredCell, list[bytes]]:
    """A cell with so many bases, and what is stored of each, the key first: its blob is its place in there."""
    stored, made = list[bytes](), None
    for number in range(links + 1):
        plain, base = memoryview(version(number)), memoryview(version(number - 1)) if number else None
        frame = encode(plain, 2, base) if number else encode_planes(plain, 2) if coded_key else None
        stored.append(bytes(plain) if frame is None else frame)
        how = None if frame is None else Frame(len(frame), made)
        made = StoredCell(number, 4096, CELL, full_box((CELL,)), 0, CELL, cell_digest(plain), how)
    assert made is not None
    return made, stored


@given(st.integers(0, MAX_LINKS), st.booleans())
def test_a_chain_of_frames_is_decoded_through_all_links(links: int, coded_key: bool) -> None:
    cell, stored = chain(links, coded_key=coded_key)
    assert len([*cell.chain]) == links + 1
    assert decode_chain(cell, lambda one: bytearray(stored[one.blob])) == version(links)


@given(st.data(), st.integers(0, 5), st.booleans())
def test_a_wrong_byte_anywhere_is_refused_or_harmless(data: st.DataObject, links: int, coded_key: bool) -> None:
    cell, stored = chain(links, coded_key=coded_key)
    number = data.draw(st.integers(0, links))
    wrong = bytearray(stored[number])
    wrong[data.draw(st.integers(0, len(wrong) - 1))] ^= data.draw(st.integers(1, 255))
    stored[number] = bytes(wrong)
    try:
        found = decode_chain(cell, lambda one: bytearray(stored[one.blob]))
    except Refused:
        return
    assert found == version(links)  # some bits of a frame mean nothing


def test_frames_of_differences_without_a_base_are_refused() -> None:
    cell, stored = chain(1, coded_key=False)
    with pytest.raises(Refused, match="base"):
        decode_chain(cell._replace(frame=Frame(cell.stored)), lambda one: bytearray(stored[one.blob]))
