"""Known cells are found by key and by digest, and only in blobs that may be reused."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.format.extents import ExtentTable, StoredCell, build
from casckpt.format.manifest import Manifest
from casckpt.format.names import BlobHash, CellDigest, TxId
from casckpt.format.regions import Region, Shape, full_box
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.index import Name
from casckpt.format.sections.tables import Extents, WholeCells
from casckpt.plan.cells import plan_cells
from casckpt.plan.reuse import CellSource, ReusableCells, bytes_in, coded_bytes, used_bytes
from tests.support.geometry import (
    CELL,
    Case,
    cases,
    cells_of,
    flat_cells,
    full_shapes,
    manifest,
    partitions,
    stored_cell,
    table_of,
)

UPLOADER = TxId(f"20260102T030405000000Z-{'0' * 16}-{'0' * 16}-0")


def d(text: str) -> CellDigest:
    return CellDigest(hashlib.sha256(text.encode()).digest())


def _two_cells(name: str, first: str, second: str, *, worn: bool = False) -> Manifest:
    shape = (CELL + 10,)
    cells = zip(flat_cells(shape, [CELL, CELL + 10]), (d(first), d(second)), strict=True)
    return manifest({name: ("uint8", 1, shape, list(cells))}, worn=worn)


def _known(*manifests: Manifest, has_parent: bool = True) -> ReusableCells:
    sources = [CellSource.of(manifest, manifest.held) for manifest in manifests]
    parent = sources.pop(0) if has_parent else None
    return ReusableCells(parent, sources, lambda ref: ref.worn)


def _place(known: ReusableCells, digest: CellDigest) -> tuple[int, int] | None:
    """Return the blob and offset of a known cell."""
    found = known.find(digest)
    return found and (found.blob, found.offset)


def test_cells_are_found_by_digest_in_every_manifest() -> None:
    manifests = [_two_cells("w", "a", "b"), _two_cells("x", "c", "d")]
    known = _known(*manifests)
    assert known.any
    assert _place(known, d("a")) == (0, CELL)
    assert _place(known, d("b")) == (0, 2 * CELL)
    assert _place(known, d("d")) == (1, 2 * CELL)
    assert known.find(d("e")) is None
    assert known.blobs == [manifest.blob(0) for manifest in manifests]


def test_an_empty_index_finds_no_cells() -> None:
    known = _known(has_parent=False)
    assert not known.any
    assert known.find(d("a")) is None
    assert known.parent.table(("tensor", "w", 0, None), "uint8", (1,)) is None


def test_only_the_parent_is_found_by_key() -> None:
    parent, base = _two_cells("w", "a", "b"), _two_cells("x", "c", "d")
    known, shape = _known(parent, base), (CELL + 10,)
    found = known.parent.table(("tensor", "w", 0, None), "uint8", shape)
    assert found is not None
    assert [cell.digest for cell in found.stored_cells()] == [d("a"), d("b")]
    assert known.parent.table(("tensor", "x", 0, None), "uint8", shape) is None
    assert known.parent.table(("tensor", "w", 0, None), "int8", shape) is None
    assert known.parent.table(("tensor", "w", 0, None), "uint8", (*shape, 1)) is None
    assert known.parent.table(("part", "w", 0, None), "uint8", shape) is None
    assert known.parent.table(("tensor", "w", 0, 1), "uint8", shape) is None
    without = _known(parent, base, has_parent=False)
    assert without.parent.table(("tensor", "w", 0, None), "uint8", shape) is None
    assert _place(without, d("a")) == (0, CELL)


def test_cells_of_a_worn_blob_are_reused_from_a_different_blob() -> None:
    known = _known(_two_cells("w", "a", "b", worn=True), _two_cells("x", "b", "c"))
    assert not known.usable(0)
    assert known.usable(1)
    assert known.find(d("a")) is None
    assert _place(known, d("b")) == (1, CELL)


def test_equal_cells_that_may_not_be_reused_are_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, saves of large tensors that are mostly zeros take quadratic time."""
    count, examined = 50, list[StoredCell]()
    regions = flat_cells((count * CELL,), [CELL * number for number in range(1, count + 1)])
    cells = [(region, d("zeros")) for region in regions]
    worn = manifest({"w": ("uint8", 1, (count * CELL,), cells)}, worn=True)
    known = _known(worn, _two_cells("x", "zeros", "b"))
    usable = known.usable_cell

    def examine(cell: StoredCell) -> bool:
        examined.append(cell)
        return usable(cell)

    monkeypatch.setattr(known, "usable_cell", examine)
    assert [_place(known, d("zeros")) for _ in range(count)] == [(1, CELL)] * count
    assert len(examined) == 2 * count


def test_a_missing_blob_is_removed_from_the_index() -> None:
    known = _known(_two_cells("w", "a", "b"), _two_cells("x", "b", "c"))
    assert _place(known, d("b")) == (0, 2 * CELL)
    known.exclude([known.blobs[0]])
    assert _place(known, d("b")) == (1, CELL)
    assert known.find(d("a")) is None
    known.exclude([known.blobs[1]])
    assert not known.any


def test_an_invalid_blob_number_of_the_parent_is_not_used() -> None:
    known = _known(_two_cells("w", "a", "b"))
    cells = WholeCells.none(3)._replace(is_whole=np.array([True, False, False]), blob=np.array([0, 1, 2**32 - 1]))
    assert known.usable_cells(cells).tolist() == [True, False, False]


def test_digests_with_a_common_prefix_are_distinct() -> None:
    shape = (3 * CELL,)
    digests = [CellDigest(bytes(8) + bytes([i]) * 24) for i in (1, 2, 3)]
    one = manifest(
        {"w": ("uint8", 1, shape, list(zip(flat_cells(shape, [CELL, 2 * CELL, 3 * CELL]), digests, strict=True)))}
    )
    known = _known(one)
    assert [_place(known, digest) for digest in digests] == [(0, CELL), (0, 2 * CELL), (0, 3 * CELL)]
    assert known.find(CellDigest(bytes(32))) is None
    assert known.find(CellDigest(b"\xff" * 32)) is None


@given(full_shapes, st.integers(1, 20), st.data())
def test_the_blob_and_offset_of_each_cell_are_found(shape: Shape, cell: int, data: st.DataObject) -> None:
    cells = [one for region in data.draw(partitions(shape)) for one in cells_of(plan_cells(region, shape, cell, None))]
    table = table_of(shape, cell, cells)
    refs = [BlobRef(BlobHash(f"{n:064x}"), 1 << 20, UPLOADER) for n in range(len(cells))]
    known = ReusableCells(
        None, [CellSource(Extents.of({("tensor", "w", 0, None): ("int16", table)}), refs)], lambda _: False
    )
    for place in table.stored_cells():
        assert _place(known, place.digest) == (place.blob, place.offset)


@given(cases(), st.integers(0, 2), st.data())
def test_an_encoded_cell_is_found_together_with_its_bases(case: Case, before: int, data: st.DataObject) -> None:
    """Another source, with its own blobs, precedes the cells. A cell is not found if a blob of one of its bases is
    excluded."""
    sizes = len(case.blob_sizes)
    refs = [BlobRef(BlobHash(f"{n:064x}"), 1 << 20, UPLOADER) for n in range(before + sizes)]
    bases = [one.blob + before for cell in case.cells for one in cell.chain]
    worn = data.draw(st.integers(0, before + sizes) | st.sampled_from(bases or [0]))
    share = CellSource(Extents.of({("tensor", "w", 0, None): ("int16", case.table)}), refs[before:])
    known = ReusableCells(
        None, [CellSource(Extents.of({}), refs[:before]), share], lambda ref: ref in refs[worn : worn + 1]
    )
    for cell in case.cells:
        want = cell.moved(lambda one: (one.blob + before, one.offset))
        assert known.find(cell.digest) == (None if worn in {one.blob for one in want.chain} else want)


ranges = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 200), st.integers(1, 40)), max_size=12)


def _table(rows: list[tuple[int, int, int]]) -> ExtentTable:
    shape, start, cells = (1000,), 0, []
    for blob, offset, nbytes in rows:
        cells.append(stored_cell(Region(full_box(shape), start, start + nbytes), blob, offset, nbytes, d("x")))
        start += nbytes
    return build(shape, 1, 1 << 20, cells)


def _name(number: int) -> Name:
    return "tensor", f"w{number}", 0, None


def _extents(tables: list[ExtentTable]) -> Extents:
    return Extents.of({_name(number): ("uint8", table) for number, table in enumerate(tables)})


@given(st.lists(ranges, max_size=3))
def test_used_bytes_include_each_byte_once(tables: list[list[tuple[int, int, int]]]) -> None:
    used = used_bytes(_extents([_table(rows) for rows in tables]), 3)
    bytes_ = {(blob, i) for rows in tables for blob, offset, n in rows for i in range(offset, offset + n)}
    assert used == [sum(blob == number for blob, _ in bytes_) for number in range(3)]


@given(st.lists(ranges, max_size=2), ranges)
def test_used_bytes_include_single_cells(
    tables: list[list[tuple[int, int, int]]], rows: list[tuple[int, int, int]]
) -> None:
    count = len(rows)
    columns = WholeCells.none(count + len(tables))  # the last rows are not single cells
    columns.is_whole[:count] = True
    for column, values in zip((columns.blob, columns.offset, columns.nbytes), zip(*rows, strict=True), strict=False):
        column[:count] = values
    split = [*map(_table, tables)]
    streams = {_name(number): ("uint8", (1000,)) for number in range(count + len(split))}
    both = Extents(streams, 1 << 20, columns, {count + number: table for number, table in enumerate(split)})
    plain = _extents([*split, _table(rows)])
    assert used_bytes(both, 3) == used_bytes(plain, 3)
    distinct = [*{(blob, offset): (blob, offset, nbytes) for blob, offset, nbytes in rows}.values()]
    if len(distinct) == len(rows):
        assert bytes_in(both, {0, 2}) == bytes_in(plain, {0, 2})


@given(cases())
def test_used_bytes_include_bases(case: Case) -> None:
    stored = [one for cell in case.cells for one in cell.chain]
    every = {(one.blob, at) for one in stored for at in range(one.offset, one.offset + one.stored)}
    blobs = len(case.blob_sizes)
    assert used_bytes(_extents([case.table]), blobs) == [
        sum(blob == number for blob, _ in every) for number in range(blobs)
    ]


@pytest.mark.sweep
@given(cases())
def test_the_used_bytes_of_an_encoded_cell_are_those_of_its_frame(case: Case) -> None:
    coded = [cell for cell in case.cells if cell.frame is not None]
    assert coded_bytes([case.table, case.table]) == (
        2 * sum(cell.nbytes for cell in coded),
        2 * sum(cell.stored for cell in coded),
        2 * sum(cell.stored for cell in coded if cell.base is not None),
    )


def test_no_bytes_count_as_used_without_manifests() -> None:
    assert used_bytes(Extents.of({}), 2) == [0, 0]
    assert used_bytes(Extents.of({}), 0) == []


@pytest.mark.parametrize("has_parent", [True, False])
def test_the_function_excluded_is_called_for_every_blob(has_parent: bool) -> None:
    asked: list[BlobRef] = []

    def excluded(ref: BlobRef) -> bool:
        asked.append(ref)
        return True

    manifests = [_two_cells("w", "a", "b"), _two_cells("x", "c", "d")]
    sources = [CellSource.of(manifest, manifest.held) for manifest in manifests]
    known = ReusableCells(sources[0], sources[1:], excluded) if has_parent else ReusableCells(None, sources, excluded)
    assert asked == [manifest.blob(0) for manifest in manifests]
    assert not known.any
