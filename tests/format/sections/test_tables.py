"""Tables are decoded as they were encoded, in two parts. No stored table can name a location that does not exist."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import InvalidInput, Refused
from casckpt.format.extents import DIGEST_BYTES, MAX_LINKS, ExtentTable, build
from casckpt.format.regions import Box, Region, Shape, full_box
from casckpt.format.sections.blobs import DECODE_ERRORS
from casckpt.format.sections.tables import (
    CELL_BYTES,
    ROW_BYTES,
    WHOLE,
    Extents,
    WholeCells,
    decode_table,
    decode_whole_cells,
    encode_cells,
    encode_rows,
)
from tests.support.forging import COLUMNS, Table
from tests.support.geometry import Case, cases, digest, elements, full_shapes, only_cell, stored_cell


def decoded(case: Case, cells: bytes, rows: bytes) -> ExtentTable:
    return decode_table(cells, rows, case.blob_sizes, shape=case.shape, itemsize=case.itemsize, cell=case.cell)


@given(cases())
def test_a_table_decodes_as_encoded(case: Case) -> None:
    assert decoded(case, encode_cells(case.table), encode_rows(case.table)) == case.table


@given(cases(), st.data())
def test_the_cell_table_does_not_depend_on_locations(case: Case, data: st.DataObject) -> None:
    blobs = data.draw(st.lists(st.integers(0, 2), min_size=len(case.cells), max_size=len(case.cells)))
    elsewhere = [
        cell._replace(blob=blob, offset=8192 + cell.offset, frame=None)
        for cell, blob in zip(case.cells, blobs, strict=True)
    ]
    moved = build(case.shape, case.itemsize, case.cell, elsewhere)
    assert encode_cells(moved) == encode_cells(case.table)
    again = decoded(replace(case, blob_sizes=[1 << 30] * 3), encode_cells(case.table), encode_rows(moved))
    assert sorted(again.stored_cells(), key=repr) == sorted(elsewhere, key=repr)


def test_a_tensor_without_elements_has_no_tables() -> None:
    empty = Case((0, 3), 4, 16, [], [])
    assert (encode_cells(empty.table), encode_rows(empty.table)) == (b"", b"")
    assert decoded(empty, b"", b"") == empty.table
    for cells, rows in (
        (b"\0", b""),
        (b"", b"\0"),
        (b"", encode_rows(whole().table)),
        (b"\0", encode_rows(whole().table)),
    ):
        with pytest.raises(Refused):
            decoded(empty, cells, rows)


@given(cases(), st.data())
def test_single_cells_decode_to_the_same_values_together_and_one_by_one(case: Case, data: st.DataObject) -> None:
    """If bytes are changed, either the table is invalid, or both functions return the same changed result."""
    stored = bytearray(encode_cells(case.table)), bytearray(encode_rows(case.table))
    changed = data.draw(st.sampled_from(stored))
    if changed and data.draw(st.booleans()):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    only = None
    with suppress(*DECODE_ERRORS, InvalidInput):
        only = only_cell(decoded(case, bytes(stored[0]), bytes(stored[1])))
    if (len(stored[0]), len(stored[1])) != (CELL_BYTES, ROW_BYTES):
        assert only is None or stored[0][:1] != WHOLE
        return
    cells, rows = (np.frombuffer(bytes(one) * 2, np.uint8).reshape(2, -1) for one in stored)
    nbytes = np.full(2, full_box(case.shape).numel * case.itemsize)
    found = decode_whole_cells(cells, rows, case.blob_sizes, nbytes, case.cell * case.itemsize)
    assert found.is_whole.tolist() == [only is not None] * 2
    if only is not None:
        assert (found.blob[1], found.offset[1], found.nbytes[1]) == only[:3]
        assert found.digest[1].tobytes() == only.digest


def whole(count: int = 20) -> Case:
    """Return two consecutive cells of a whole tensor."""
    box = full_box((count,))
    regions = [Region(box, lo, min(lo + 10, count)) for lo in range(0, count, 10)]
    cells = [stored_cell(one, 0, 4096 + one.lo, one.numel, digest(one)) for one in regions]
    return Case((count,), 1, 10, cells, [4096 + count])


def test_most_tensors_need_14_bytes_in_addition_to_their_digests() -> None:
    case = whole()
    cells, rows = encode_cells(case.table), encode_rows(case.table)
    assert (len(cells), len(rows)) == (1 + 2 * DIGEST_BYTES, 13)
    assert list(decoded(case, cells, rows).stored_cells()) == case.cells


def test_an_extent_needs_at_most_60_bytes_in_addition_to_its_digests() -> None:
    shape, rows = (1 << 40, 64), 1000
    cells = []
    for row in range(rows):
        region = Region(Box((row << 20, 7), (1 << 20, 50)), 0, 10)
        cells.append(stored_cell(region, row * 1000, (1 << 30) - 64 * row, 10, digest(region)))
    table = build(shape, 1, 1 << 20, cells)
    assert len(encode_cells(table)) + len(encode_rows(table)) <= rows * (60 + DIGEST_BYTES)


# hostile tables


def _check_inside(case: Case, table: ExtentTable) -> None:
    """Check that every part lies inside the tensor, its box, a blob and the digests, and that no element of a box
    occurs twice."""
    tensor = full_box(case.shape)
    assert all(box.inside(tensor) for box in table.boxes)
    seen: dict[Box, set[int]] = {}
    for one in table.extents:
        region = table.region(one)
        inside = set(range(region.lo, region.hi))
        assert inside
        assert not inside & seen.setdefault(region.box, set())
        seen[region.box] |= inside
        assert len(elements(region, case.shape)) == region.numel
        for place in table.stored_cells([one]):
            assert len(place.digest) == DIGEST_BYTES
            chain = list(place.chain)
            assert len(chain) <= 1 + MAX_LINKS
            assert all(4096 <= one.offset <= case.blob_sizes[one.blob] - one.stored for one in chain)
            assert all(0 < one.stored <= one.nbytes == place.nbytes for one in chain)


def _try(case: Case, cells: bytes, rows: bytes) -> None:
    try:
        table = decoded(case, cells, rows)
    except (InvalidInput, *DECODE_ERRORS):
        return
    _check_inside(case, table)


@st.composite
def numbers_near(draw: st.DrawFn) -> int:
    base = draw(st.sampled_from([0, 1, 10, 255, 4096, 2**31, 2**32, 2**61, 2**62]))
    return max(0, min(2**62, base + draw(st.integers(-3, 3))))


@given(cases(coded=False))
def test_long_and_short_encodings_decode_to_the_same_values(case: Case) -> None:
    again = decoded(case, *Table.of(case.table).stored())
    assert sorted(again.stored_cells(), key=repr) == sorted(case.cells, key=repr)


@given(cases(coded=False), st.data())
def test_a_changed_number_is_rejected_or_harmless(case: Case, data: st.DataObject) -> None:
    table = Table.of(case.table)
    for _ in range(data.draw(st.integers(1, 3))):
        change: Callable[[list[int]], list[int]] = data.draw(st.sampled_from([_drop, _twice, _swap, _put_one(data)]))
        if table.boxes and data.draw(st.integers(0, 3)) == 0:
            number, part = data.draw(st.integers(0, len(table.boxes) - 1)), data.draw(st.integers(0, 1))
            box = [list(numbers) for numbers in table.boxes[number]]
            box[part] = change(box[part])
            table.boxes[number] = (tuple(box[0]), tuple(box[1]))
        else:
            table.change(data.draw(st.sampled_from(list(COLUMNS))), change)
    _try(case, *table.stored())


def _put_one(data: st.DataObject) -> Callable[[list[int]], list[int]]:
    number, where = data.draw(numbers_near()), data.draw(st.integers(0, 50))

    def put(values: list[int]) -> list[int]:
        if values:
            values[where % len(values)] = number
        return values

    return put


def _drop(values: list[int]) -> list[int]:
    return values[:-1]


def _twice(values: list[int]) -> list[int]:
    return values + values[-1:]


def _swap(values: list[int]) -> list[int]:
    return values[::-1]


@given(full_shapes, st.sampled_from([1, 4, 16]), st.data())
def test_any_short_encoding_is_rejected_or_harmless(shape: Shape, itemsize: int, data: st.DataObject) -> None:
    numel = full_box(shape).numel
    count = -(-numel // 10)
    blob = data.draw(st.integers(0, 3) | numbers_near().map(lambda number: number % 2**32))
    near = [4096, 8192, *(max(0, end - numel * itemsize) for end in (8192, 8193))]
    offset = data.draw(st.sampled_from(near) | numbers_near().map(lambda number: number % 2**32))
    cells = bytes(1 + 32 * data.draw(st.sampled_from([count, count, count, count - 1, count + 1])))
    rows = b"\0" + b"".join(number.to_bytes(4, "little") for number in (count, blob, offset))
    _try(Case(shape, itemsize, 10, [], [8192, 4096, 2**30]), cells, rows)


@given(cases(), st.data())
def test_changed_bytes_are_rejected_or_harmless(case: Case, data: st.DataObject) -> None:
    short = data.draw(st.booleans())
    cells, rows = (encode_cells(case.table), encode_rows(case.table)) if short else Table.of(case.table).stored()
    parts = [bytearray(cells), bytearray(rows)]
    part = parts[data.draw(st.integers(0, 1))]
    if part and data.draw(st.booleans()):
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    else:
        part[:] = data.draw(st.binary(max_size=40))
    _try(case, bytes(parts[0]), bytes(parts[1]))


def _table(spans: list[tuple[int, int, int]], rows: list[tuple[int, int, int]], digests: int, *boxes: Any) -> Table:
    return Table(list(boxes), spans, rows, bytes(DIGEST_BYTES * digests))


def _refuse(table: Table, shape: Shape, itemsize: int = 1, cell: int = 256, match: str = ".") -> None:
    with pytest.raises(InvalidInput, match=match):
        decode_table(*table.stored(), [9000, 9000], shape=shape, itemsize=itemsize, cell=cell)


def test_a_table_with_huge_numbers_is_rejected() -> None:
    rows, top = 1024, 2**62
    _refuse(_table([(0, 0, top)] * rows, [(1, 0, 0)] * rows, 0), (top,), 16)
    _refuse(_table([(0, 0, top)], [(1, 0, 4096)], 1), (top,), 4, 2**20)
    _refuse(_table([(1, 0, 1)], [(1, 0, 4096)], 1, ((top,), (top,))), (8,))  # a box that ends at 2**63
    _refuse(_table([(0, 0, 8)], [(2**32 - 1, 0, 4096)] * 5, 5), (8,))
    _refuse(_table([(0, 0, 2**64 - 1)], [(1, 0, 4096)], 1), (8,))


@pytest.mark.parametrize("box", [((2,), (0,)), ((1,), (8,)), ((), ()), ((0, 0), (8, 1)), ((0,), ()), ((-1,), (4,))])
def test_a_box_that_is_empty_or_outside_its_tensor_is_rejected(box: Any) -> None:
    _refuse(_table([(0, 0, 8)], [(1, 0, 4096)], 1, box), (8,))


@pytest.mark.parametrize("span", [(0, 3, 3), (0, 4, 3), (1, 0, 8), (-1, 0, 8), (0, -1, 7), (0, 0, 9), (0, 0, 7)])
def test_a_span_that_is_empty_or_outside_its_box_is_rejected(span: tuple[int, int, int]) -> None:
    _refuse(_table([span], [(1, 0, 4096)], 1), (8,))


def test_a_table_of_a_scalar_has_exactly_one_box() -> None:
    one = _table([(0, 0, 1)], [(1, 0, 4096)], 1)
    assert len(decode_table(*one.stored(), [8192], shape=(), itemsize=4, cell=256).extents) == 1
    _refuse(_table(one.spans, one.rows, 1, ((0,), (1,))), ())


def test_overlapping_spans_in_the_same_box_are_rejected() -> None:
    _refuse(_table([(0, 0, 8), (0, 5, 7)], [(1, 0, 4096), (1, 0, 4104)], 2), (10,), match="overlap")
    _refuse(_table([(0, 5, 10), (0, 0, 5)], [(1, 0, 4096), (1, 0, 4104)], 2), (10,), match="out of order")


@pytest.mark.parametrize("rows", [[2], [2, 1], [0, 1, 1], [1], [1, 1, 1], [1, 0, 1], []])
def test_rows_that_do_not_match_their_cells_are_rejected(rows: list[int]) -> None:
    """There are two spans and a matching number of digests, but a row has no cells, too few, or too many."""
    _refuse(_table([(0, 0, 5), (0, 5, 10)], [(cells, 0, 4096) for cells in rows], sum(rows)), (10,))


@pytest.mark.parametrize("digests", [0, 1, 3])
def test_a_wrong_number_of_digests_is_rejected(digests: int) -> None:
    _refuse(_table([(0, 0, 5), (0, 5, 10)], [(1, 0, 4096)] * 2, digests), (10,), match="digests")


@pytest.mark.parametrize("missing", [0, 1, 4])
def test_an_extent_beyond_the_end_of_its_blob_is_rejected(missing: int) -> None:
    table = _table([(0, 0, 4), (0, 4, 10)], [(1, 0, 4096), (1, 1, 4096)], 2)
    sizes = [4096 + 16, 4096 + 24 - missing]
    if not missing:
        assert len(decode_table(*table.stored(), sizes, shape=(10,), itemsize=4, cell=256).extents) == 2
        return
    with pytest.raises(Refused):
        decode_table(*table.stored(), sizes, shape=(10,), itemsize=4, cell=256)


@pytest.mark.parametrize(
    ("blob", "offset", "digests"),
    [(1, 4096, 2), (0, 4095, 2), (0, 4097, 2), (2**32 - 1, 4096, 2), (0, 2**32 - 1, 2), (0, 4096, 1), (0, 4096, 0)],
)
def test_a_short_encoding_that_does_not_match_its_tensor_is_rejected(blob: int, offset: int, digests: int) -> None:
    case = whole()
    rows = b"\0" + b"".join(number.to_bytes(4, "little") for number in (2, blob, offset))
    with pytest.raises(Refused):
        decoded(case, bytes(1 + 32 * digests), rows)


@pytest.mark.parametrize(
    ("cells", "rows"),
    [(b"\x09", None), (None, b"\x09"), (None, b""), (None, b"\0" * 3), (None, b"\0" * 12), (b"", None)],
)
def test_unknown_or_incomplete_encodings_are_rejected(cells: bytes | None, rows: bytes | None) -> None:
    case = whole()
    with pytest.raises(Refused):
        decoded(
            case,
            encode_cells(case.table) if cells is None else cells,
            encode_rows(case.table) if rows is None else rows,
        )


@given(st.lists(full_shapes, max_size=6), st.data())
def test_single_cells_stored_in_columns_decode_to_the_same_tables(shapes: list[Shape], data: st.DataObject) -> None:
    tables = []
    for shape in shapes:
        numel = full_box(shape).numel
        cuts = [Region(full_box(shape), 0, numel)] if numel else []
        if numel > 1 and data.draw(st.booleans()):
            cuts = [Region(full_box(shape), 0, 1), Region(full_box(shape), 1, numel)]
        version = data.draw(st.integers(0, 1))
        placed = [stored_cell(one, 2, 4096 + 8 * one.lo, 4 * one.numel, digest(one, version)) for one in cuts]
        tables.append(build(shape, 4, 1 << 10, placed))
    plain = Extents.of({("tensor", f"k{n}", 0, None): ("float32", table) for n, table in enumerate(tables)})
    only = [only_cell(table) for table in tables]
    cells, others = WholeCells.none(len(tables)), {}
    for number, cell in enumerate(only):
        if cell is None:
            others[number] = tables[number]
        else:
            cells.is_whole[number], cells.blob[number], cells.offset[number] = True, cell.blob, cell.offset
            cells.nbytes[number], cells.digest[number] = cell.nbytes, np.frombuffer(cell.digest, np.uint8)
    columns = Extents(plain.streams, 4 << 10, cells, others)
    assert dict(columns) == dict(plain)
    assert columns.encoded() == plain.encoded()
    rows = np.flatnonzero(cells.is_whole).tolist()
    assert [cells.cell(row, shapes[row]) for row in rows] == [cell for cell in only if cell]
    streams = plain.streams
    wanted = {name: streams[name] for name in data.draw(st.permutations(plain.names))} | {
        ("tensor", "x", 0, None): ("int8", (1,))
    }
    found = columns.find(wanted, 4 << 10)
    assert found.is_whole.tolist() == [name in columns and only_cell(columns[name][1]) is not None for name in wanted]
    singles = [only_cell(columns[name][1]) for name in wanted if name in columns]
    assert found.offset[found.is_whole].tolist() == [cell.offset for cell in singles if cell is not None]
    assert not columns.find(
        {name: ("float32", (*shape, 1)) for name, (_, shape) in streams.items()}, 4 << 10
    ).is_whole.any()
    assert not columns.find(wanted, 8 << 10).is_whole.any()
    assert columns.has_only(streams)
    assert not columns.has_only(wanted)
