"""Extent tables come back as they were, and no packed table can name anything that is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import Refused
from casckpt.format.columns import Ints, pack, unpack
from casckpt.format.extents import (
    DIGEST_BYTES,
    ExtentTable,
    Packed,
    PackedExtents,
    PackedWhole,
    StoredCell,
    build,
    byte_ranges,
    join,
    unpacked,
    with_blobs,
)
from casckpt.format.regions import Box, Region, Shape, full_box, intersect
from casckpt.plan.cells import plan_cells
from tests.support.geometry import cells_of, digest, elements, full_shapes, partitions, stored_cell

COLUMNS = ("boxes", "box", "lo", "hi", "blob", "offset")


@dataclass(frozen=True)
class Case:
    """Cells that make up a tensor, each somewhere in a blob."""

    shape: Shape
    itemsize: int
    cell: int
    cells: list[StoredCell]
    blob_sizes: Ints

    @property
    def table(self) -> ExtentTable:
        return build(self.shape, self.itemsize, self.cell, self.cells)

    def unpacked(self, packed: Packed) -> ExtentTable:
        return unpacked(packed, self.shape, self.itemsize, self.cell, self.blob_sizes)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape, cell, itemsize = draw(full_shapes), draw(st.integers(1, 12)), draw(st.sampled_from([1, 2, 4, 8, 16]))
    blobs = draw(st.integers(1, 3))
    ends = [draw(st.integers(4096, 5000)) for _ in range(blobs)]
    cells = []
    for region in draw(partitions(shape)):
        for one in cells_of(plan_cells(region, shape, cell, None)):
            blob, nbytes = draw(st.integers(0, blobs - 1)), one.numel * itemsize
            cells.append(stored_cell(one, blob, ends[blob], nbytes, digest(one), unhashed=draw(st.integers(0, 5)) == 0))
            ends[blob] += nbytes + draw(st.sampled_from([0, 0, 0, 64]))
    return Case(shape, itemsize, cell, cells, np.array(ends, dtype=np.int64))


@given(cases())
def test_a_table_holds_its_cells(case: Case) -> None:
    table = case.table
    found = list(table.stored_cells())
    assert sorted(found, key=repr) == sorted(case.cells, key=repr)
    assert len(table.columns.digests) == len(case.cells) == table.cells.sum()
    assert [next(table.stored_cells([row])).lo for row in range(len(table))] == table.columns.lo.tolist()
    ranges = byte_ranges([table])
    assert (ranges[:, 2] - ranges[:, 1]).sum() == sum(cell.nbytes for cell in case.cells)
    keys = list(zip(table.columns.box.tolist(), table.columns.lo.tolist(), strict=True))
    assert keys == sorted(keys)
    assert table.boxes[0] == full_box(case.shape)


@given(cases())
def test_a_table_comes_back(case: Case) -> None:
    table = case.table
    wire = msgspec.msgpack.encode(table.packed())
    again = case.unpacked(msgspec.msgpack.decode(wire, type=Packed))
    assert again.packed() == table.packed()
    assert again.boxes == table.boxes
    for name in table.columns._fields:
        assert np.array_equal(getattr(again.columns, name), getattr(table.columns, name))


def test_cells_that_follow_each_other_are_one_extent() -> None:
    box = full_box((100,))
    cells = [
        stored_cell(Region(box, lo, lo + 10), 0, 4096 + lo, 10, digest(Region(box, lo, lo + 10)))
        for lo in range(0, 100, 10)
    ]
    table = build((100,), 1, 10, cells[::-1])
    assert len(table) == 1
    assert len(table.packed().digests) == 10 * DIGEST_BYTES
    assert isinstance(table.packed(), PackedWhole)
    assert len(msgspec.msgpack.encode(table.packed())) - 10 * DIGEST_BYTES <= 16


def test_an_extent_takes_at_most_60_bytes_beside_its_digests() -> None:
    shape, rows = (1 << 40, 64), 1000
    cells = []
    for row in range(rows):
        region = Region(Box((row << 20, 7), (1 << 20, 50)), 0, 10)
        cells.append(stored_cell(region, row * 1000, (1 << 30) - 64 * row, 10, digest(region)))
    packed = build(shape, 1, 1 << 20, cells).packed()
    assert len(msgspec.msgpack.encode(packed)) <= rows * (60 + DIGEST_BYTES)


def test_a_boundary_off_the_grid_begins_an_extent() -> None:
    box = full_box((30,))
    ends = [0, 10, 15, 20, 30]
    cells = [
        stored_cell(Region(box, lo, hi), 0, 4096 + lo, hi - lo, digest(Region(box, lo, hi)))
        for lo, hi in pairwise(ends)
    ]
    table = build((30,), 1, 10, cells)
    assert [(row.lo, row.hi) for row in map(table.region, range(len(table)))] == [(0, 15), (15, 30)]
    assert list(table.stored_cells()) == cells


def _check_inside(case: Case, table: ExtentTable) -> None:
    """Nothing in it points outside the tensor, a box, a blob or the digests, and no element of a box stands twice."""
    tensor = full_box(case.shape)
    assert all(box.inside(tensor) for box in table.boxes)
    box, lo, hi, blob, offset, _, unhashed = table.columns
    assert {len(box), len(lo), len(hi), len(blob), len(offset), len(unhashed)} == {len(table)}
    seen: dict[Box, set[int]] = {}
    for row in range(len(table)):
        region = table.region(row)
        inside = set(range(region.lo, region.hi))
        assert inside
        assert not inside & seen.setdefault(region.box, set())
        seen[region.box] |= inside
        assert len(elements(region, case.shape)) == region.numel
        for place in table.stored_cells([row]):
            assert place.offset >= 4096
            assert place.offset + place.nbytes <= case.blob_sizes[place.blob]


def _try(case: Case, packed: Packed) -> None:
    try:
        table = case.unpacked(packed)
    except Refused:
        return
    _check_inside(case, table)


@st.composite
def numbers_near(draw: st.DrawFn) -> int:
    base = draw(st.sampled_from([0, 1, 10, 255, 4096, 2**31, 2**32, 2**61, 2**62]))
    return max(0, min(2**62, base + draw(st.integers(-3, 3))))


@given(cases(), st.data())
def test_a_changed_number_is_refused_or_harmless(case: Case, data: st.DataObject) -> None:
    packed = case.table.packed_columns()
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(COLUMNS))
        values = unpack(getattr(packed, name)).tolist()
        change: Callable[[list[int]], Any] = data.draw(st.sampled_from([_drop, _twice, _swap, _put_one(data)]))
        change(values)
        packed = msgspec.structs.replace(packed, **{name: pack(values)})
    _try(case, packed)


def _put_one(data: st.DataObject) -> Callable[[list[int]], Any]:
    number, where = data.draw(numbers_near()), data.draw(st.integers(0, 50))

    def put(values: list[int]) -> None:
        if values:
            values[where % len(values)] = number

    return put


def _drop(values: list[int]) -> None:
    del values[-1:]


def _twice(values: list[int]) -> None:
    values += values[-1:]


def _swap(values: list[int]) -> None:
    values.reverse()


@given(full_shapes, st.sampled_from([1, 4, 16]), st.data())
def test_a_short_form_is_refused_or_harmless(shape: Shape, itemsize: int, data: st.DataObject) -> None:
    numel = full_box(shape).numel
    count = -(-numel // 10)
    packed = PackedWhole(
        data.draw(st.integers(-1, 3) | numbers_near()),
        data.draw(st.sampled_from([4096, 8192, 8192 - numel * itemsize, 8193 - numel * itemsize]) | numbers_near()),
        bytes(32 * data.draw(st.sampled_from([count, count, count, count - 1, count + 1]))),
    )
    case = Case(shape, itemsize, 10, [], np.array([8192, 4096, 2**30], dtype=np.int64))
    _try(case, packed)


@given(cases(), st.data())
def test_changed_bytes_are_refused_or_harmless(case: Case, data: st.DataObject) -> None:
    packed = case.table.packed_columns()
    name = data.draw(st.sampled_from([*COLUMNS, "digests", "unhashed"]))
    raw = bytearray(getattr(packed, name))
    if raw and data.draw(st.booleans()):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    else:
        raw = bytearray(data.draw(st.binary(max_size=40)))
    _try(case, msgspec.structs.replace(packed, **{name: bytes(raw)}))


def _packed(**columns: list[int]) -> PackedExtents:
    names = dict.fromkeys(COLUMNS, b"") | {name: pack(values) for name, values in columns.items()}
    return PackedExtents(digests=b"", **names)


def _huge(shape: Shape, itemsize: int, cell: int, packed: PackedExtents) -> None:
    with pytest.raises(Refused):
        unpacked(packed, shape, itemsize, cell, np.array([8192], dtype=np.int64))


def test_sums_that_wrap_around_are_refused() -> None:
    rows, top = 1024, 2**62
    columns = {
        "boxes": [],
        "box": [0] * rows,
        "lo": [0] * rows,
        "hi": [top] * rows,
        "blob": [0] * rows,
        "offset": [0] * rows,
    }
    _huge((top,), 16, 256, _packed(**columns))  # 2**66 bytes of each extent, 2**64 cells in all: both 0 in 64 bits
    _huge((top,), 4, 2**20, _packed(**{name: values[:1] for name, values in columns.items()}))
    beyond = {"boxes": [top, top], "box": [1], "lo": [0], "hi": [1], "blob": [0], "offset": [0]}
    _huge((8,), 1, 256, _packed(**beyond))  # a box that ends at 2**63
    _huge((8,), 1, 256, _packed(boxes=[], box=[0], lo=[0], hi=[8], blob=[0], offset=[top]))


def test_a_scalar_has_one_box() -> None:
    one = {"box": [0], "lo": [0], "hi": [1], "blob": [0], "offset": [4096]}
    packed = msgspec.structs.replace(_packed(boxes=[], **one), digests=bytes(32))
    assert len(unpacked(packed, (), 4, 256, np.array([8192], dtype=np.int64))) == 1
    with pytest.raises(Refused, match="differ in length"):
        unpacked(msgspec.structs.replace(packed, boxes=pack([0, 1])), (), 4, 256, np.array([8192], dtype=np.int64))


def test_overlapping_extents_of_one_box_are_refused() -> None:
    columns = {"boxes": [], "box": [0, 0], "lo": [0, 5], "hi": [8, 10], "blob": [0, 0], "offset": [4096, 4104]}
    with pytest.raises(Refused, match="overlap"):
        unpacked(msgspec.structs.replace(_packed(**columns), digests=bytes(64)), (10,), 1, 256, np.array([9000]))


def test_the_extents_of_a_built_table_are_disjoint() -> None:
    box = Box((0, 1), (4, 2))
    cells = [
        stored_cell(region, 0, 4096, region.numel, digest(region))
        for region in (Region(box, 0, 8), Region(full_box((4, 4)), 0, 1))
    ]
    table = build((4, 4), 1, 256, cells)
    assert table.boxes == (full_box((4, 4)), box)
    assert not intersect(table.region(0), table.region(1))


@given(cases())
def test_the_long_form_of_a_whole_tensor_says_the_same(case: Case) -> None:
    short, long = case.unpacked(case.table.packed()), case.unpacked(case.table.packed_columns())
    numel = prod(case.shape)
    assert list(short.extents_in(0, 0, numel)) == list(long.extents_in(0, 0, numel))
    assert list(short.stored_cells()) == list(long.stored_cells())


@pytest.mark.parametrize(
    "packed",
    [
        PackedWhole(1, 4096, bytes(64)),
        PackedWhole(-1, 4096, bytes(64)),
        PackedWhole(0, 4095, bytes(64)),
        PackedWhole(0, -(2**62), bytes(64)),
        PackedWhole(0, 4097, bytes(64)),
        PackedWhole(0, 2**63 - 1, bytes(64)),
        PackedWhole(0, 4096, bytes(32)),
        PackedWhole(0, 4096, b""),
    ],
)
def test_a_short_form_that_does_not_fit_is_refused(packed: PackedWhole) -> None:
    sizes = np.array([4096 + 20])
    assert len(unpacked(PackedWhole(0, 4096, bytes(64)), (20,), 1, 10, sizes)) == 1
    with pytest.raises(Refused):
        unpacked(packed, (20,), 1, 10, sizes)


def test_a_short_form_of_an_empty_tensor_is_refused() -> None:
    with pytest.raises(Refused):
        unpacked(PackedWhole(0, 4096, b""), (0, 3), 1, 10, np.array([8192]))


@given(cases(), st.data())
def test_shares_of_several_ranks_are_joined(case: Case, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    of = [data.draw(st.integers(0, ranks - 1)) for _ in case.cells]
    shares = [[cell for cell, rank in zip(case.cells, of, strict=True) if rank == one] for one in range(ranks)]
    tables = [build(case.shape, case.itemsize, case.cell, share) for share in shares if share]
    if not tables:
        return
    numbers = np.array([7, 5, 6], dtype=np.int64)
    joined = join([with_blobs(table, numbers) for table in tables])
    found = [place._replace(blob=place.blob - 5) for place in joined.stored_cells()]
    want = [place._replace(blob=(2, 0, 1)[place.blob]) for place in case.cells]
    assert sorted(found, key=repr) == sorted(want, key=repr)
    keys = list(zip(joined.columns.box.tolist(), joined.columns.lo.tolist(), strict=True))
    assert keys == sorted(keys)


@pytest.mark.parametrize("missing", [0, 1, 4])
def test_an_extent_ends_where_its_blob_does_and_not_after(missing: int) -> None:
    columns = {"boxes": [], "box": [0, 0], "lo": [0, 4], "hi": [4, 10], "blob": [0, 1], "offset": [4096, 4096]}
    packed = msgspec.structs.replace(_packed(**columns), digests=bytes(64))
    sizes = np.array([4096 + 16, 4096 + 24 - missing])
    if not missing:
        assert len(unpacked(packed, (10,), 4, 256, sizes)) == 2
        return
    with pytest.raises(Refused):
        unpacked(packed, (10,), 4, 256, sizes)
