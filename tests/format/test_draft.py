"""Manifests with other places: every copied section keeps its bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from casckpt.errors import Damaged, InvalidInput, Refused
from casckpt.format.draft import encode, placed
from casckpt.format.extents import build
from casckpt.format.manifest import decode
from casckpt.format.names import BlobHash
from casckpt.format.sections.blobs import BlobRef, encode_blobs
from casckpt.format.sections.head import COPIED, KNOWN, Section, assemble, decode_head
from casckpt.format.sections.index import MAX_KEY_CHARACTERS
from tests.format.test_manifest import BLOBS, UPLOADERS, drawn


def section(data: bytes, name: str) -> bytes:
    found = decode_head(data)[name]
    return data[found.offset : found.end]


def test_a_copy_has_its_own_places() -> None:
    made = encode(drawn())
    refs = [replace(ref, uploader=UPLOADERS[0]) for ref in BLOBS]
    copy = placed(decode(made.data, made.id), encode_blobs(refs))
    assert copy.id == made.id
    assert copy.head != made.head
    same = [name for name in KNOWN if section(copy.data, name) == section(made.data, name)]
    assert same == [name for name in KNOWN if name != "blobs"]
    assert list(decode(copy.data, made.id, copy.head).blobs) == refs
    assert placed(decode(copy.data, made.id), encode_blobs(BLOBS)) == made


def test_moved_cells_keep_their_digests() -> None:
    made = encode(drawn())
    before = decode(made.data, made.id)
    table = before.extents(before.entries[0])
    cells = [cell._replace(blob=3, offset=4096 + cell.offset + 64 * n) for n, cell in enumerate(table.stored_cells())]
    refs = [*BLOBS, BlobRef(BlobHash("f" * 64), 1 << 20, UPLOADERS[1])]
    moved = placed(before, encode_blobs(refs), {0: build(table.shape, table.itemsize, table.cell, cells)})
    assert moved.id == made.id
    after = decode(moved.data, made.id, moved.head)
    assert list(after.extents(after.entries[0]).stored_cells()) == cells
    for old, new in zip(before.entries[1:], after.entries[1:], strict=True):
        assert list(before.extents(old).stored_cells()) == list(after.extents(new).stored_cells())
    for name in ("index", "objects", "cells"):
        assert section(moved.data, name) == section(made.data, name)


def test_the_flag_of_an_unknown_section_decides_whether_it_is_copied() -> None:
    made = encode(drawn())
    parts = [(name, section(made.data, name)) for name in KNOWN]
    extra = [(Section("taken", COPIED, 0, 0, b""), b"one"), (Section("left", 0, 0, 0, b""), b"two")]
    head, data = assemble(parts, extra)
    copy = placed(decode(data, made.id, head.digest), encode_blobs(BLOBS))
    assert [one.name for one in decode_head(copy.data).sections] == [*KNOWN, "taken"]
    assert section(copy.data, "taken") == b"one"


@pytest.mark.parametrize("name", ["objects", "cells", "rows"])
def test_nothing_damaged_is_copied(name: str) -> None:
    made = encode(drawn())
    raw = bytearray(made.data)
    raw[decode_head(made.data)[name].offset] ^= 1
    with pytest.raises(Damaged, match=f"'{name}'"):
        placed(decode(raw, made.id), encode_blobs(BLOBS))


def test_a_manifest_that_readers_would_refuse_is_not_encoded() -> None:
    table = drawn().streams[("tensor", "b", 0, 3)][1]
    for fields in (
        {"run": "../x"},
        {"streams": {("tensor", "k" * (MAX_KEY_CHARACTERS + 1), 0, None): ("int8", table)}},
    ):
        with pytest.raises(InvalidInput):
            encode(drawn(**fields))
    with pytest.raises(Refused):
        encode(drawn(streams={("tensor", "k", 0, None): ("int9000", table)}))
