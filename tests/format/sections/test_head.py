"""A head is decoded as it was encoded, any flipped byte is detected, and inconsistent content is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import Damaged, Refused
from casckpt.format.digest import cell_digest
from casckpt.format.sections.head import (
    COPIED,
    HEAD_BYTES,
    KNOWN,
    NEEDED,
    Head,
    Section,
    assemble,
    check_section,
    check_size,
    decode_head,
)

PARTS = [(name, name.encode() * (number + 1)) for number, name in enumerate(KNOWN)]


def made() -> tuple[Head, bytes]:
    return assemble(PARTS)


def forged(rows: list[tuple[bytes, int, int, int, bytes]], magic: bytes = b"CASCKPT\x01", count: int = -1) -> bytes:
    """Return a head with a correct hash."""
    text = magic + (len(rows) if count < 0 else count).to_bytes(8, "little")
    text = (text + b"".join(struct.pack("<16sQQQ32s", *row) for row in rows)).ljust(HEAD_BYTES - 32, b"\0")
    return text + cell_digest(text)


def rows_of(head: Head) -> list[tuple[bytes, int, int, int, bytes]]:
    return [(one.name.encode(), one.flags, one.offset, one.length, one.digest) for one in head.sections]


def test_a_head_decodes_as_encoded() -> None:
    head, data = made()
    again = decode_head(data, head.digest)
    assert again == head
    assert [section.name for section in again.sections] == list(KNOWN)
    assert again.size == len(data)
    for name, part in PARTS:
        section = again[name]
        assert data[section.offset : section.end] == part
        check_section(section, part)
    assert [section.name for section in again.sections if section.flags & COPIED] == ["index", "objects", "cells"]
    check_size(again, len(data))


@given(st.integers(0, HEAD_BYTES - 1), st.integers(1, 255))
def test_any_flipped_byte_is_reported_as_damage(position: int, change: int) -> None:
    head, data = made()
    raw = bytearray(data)
    raw[position] ^= change
    for wanted in (None, head.digest):
        with pytest.raises(Damaged):
            decode_head(raw, wanted)


def test_a_head_that_differs_from_the_record_is_reported_as_damage() -> None:
    head, data = made()
    with pytest.raises(Damaged, match="a different manifest"):
        decode_head(data, "0" * 64)
    for size in (head.size - 1, head.size + 1):
        with pytest.raises(Damaged, match="bytes instead of"):
            check_size(head, size)
    with pytest.raises(Damaged, match="hash"):
        decode_head(data[:4000], head.digest)


@pytest.mark.parametrize("part", [b"", b"indeX", b"index "])
def test_bytes_that_differ_from_the_head_are_not_a_valid_section(part: bytes) -> None:
    with pytest.raises(Damaged, match="'index' does not match its hash"):
        check_section(made()[0]["index"], part)


def test_the_error_for_a_later_version_names_the_version() -> None:
    with pytest.raises(Refused, match="later version"):
        decode_head(forged(rows_of(made()[0]), b"CASCKPT\x02"))
    with pytest.raises(Refused, match="like a manifest"):
        decode_head(forged(rows_of(made()[0]), b"SOMETHIN"))


def _changed(number: int, **fields: object) -> list[tuple[bytes, int, int, int, bytes]]:
    sections = list(made()[0].sections)
    sections[number] = sections[number]._replace(**fields)  # type: ignore[arg-type]
    return rows_of(Head("", sections, b""))


HOSTILE = {
    "gap": _changed(2, offset=made()[0]["blobs"].offset + 1),
    "overlap": _changed(2, offset=made()[0]["blobs"].offset - 1),
    "in the head": _changed(0, offset=0),
    "huge": _changed(5, length=2**63),
    "all but too large": _changed(5, length=2**32),
    "wraps around": _changed(0, offset=2**64 - 1),
    "twice": _changed(1, name="index"),
    "swapped": _changed(1, name="blobs")[:2] + _changed(2, name="places")[2:],
    "missing": rows_of(made()[0])[:-1],
    "none": [],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_head_with_inconsistent_sections_is_rejected(name: str) -> None:
    with pytest.raises(Refused):
        decode_head(forged(HOSTILE[name]))


@pytest.mark.parametrize("count", [0, 5, 7, 57, 2**64 - 1])
def test_a_wrong_number_of_sections_is_rejected(count: int) -> None:
    with pytest.raises(Refused):
        decode_head(forged(rows_of(made()[0]), count=count))


@pytest.mark.parametrize("name", [b"\xff", b"a\nb", b"a\0b"])
def test_an_invalid_section_name_is_rejected(name: bytes) -> None:
    head = made()[0]
    with pytest.raises(Refused):
        decode_head(forged([*rows_of(head), (name, 0, head.size, 0, cell_digest(b""))]))


def test_an_unknown_section_is_skipped_unless_it_is_required() -> None:
    extra = Section("hints", 0, 0, 0, b""), b"something"
    head = decode_head(assemble(PARTS, [extra])[1])
    assert [section.name for section in head.foreign] == ["hints"]
    head.check_known()
    needed = decode_head(assemble(PARTS, [(extra[0]._replace(flags=NEEDED), b"")])[1])
    with pytest.raises(Refused, match=r"requires the section 'hints'.*upgrade"):
        needed.check_known()
