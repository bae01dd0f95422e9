"""Tables come back as they were, in two parts; and no stored one can name anything that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import Refused
from casckpt.format.columns import pack, unpack
from casckpt.format.extents import DIGEST_BYTES, ExtentTable, build
from casckpt.format.regions import Box, Region, Shape, full_box
from casckpt.format.sections.blobs import DECODE_ERRORS
from casckpt.format.sections.tables import CellColumns, RowColumns, decode_table, encode_cells, encode_rows, frame_of
from tests.support.forging import columns_of, long_form
from tests.support.geometry import Case, cases, digest, elements, full_shapes, stored_cell

SPANS, ROWS = ("boxes", "box", "lo", "hi"), ("cells", "blob", "offset")


def decoded(case: Case, cells: bytes, rows: bytes) -> ExtentTable:
    return decode_table(cells, rows, frame_of(case.shape, case.itemsize, case.cell * case.itemsize), case.blob_sizes)


@given(cases())
def test_a_table_comes_back(case: Case) -> None:
    table = case.table
    again = decoded(case, encode_cells(table), encode_rows(table))
    assert again.boxes == table.boxes
    for name in table.columns._fields:
        assert np.array_equal(getattr(again.columns, name), getattr(table.columns, name))


@given(cases(), st.data())
def test_cells_are_stored_alike_wherever_they_lie(case: Case, data: st.DataObject) -> None:
    blobs = data.draw(st.lists(st.integers(0, 2), min_size=len(case.cells), max_size=len(case.cells)))
    elsewhere = [
        cell._replace(blob=blob, offset=8192 + cell.offset) for cell, blob in zip(case.cells, blobs, strict=True)
    ]
    moved = build(case.shape, case.itemsize, case.cell, elsewhere)
    assert encode_cells(moved) == encode_cells(case.table)
    sizes = np.full(3, 1 << 30, dtype=np.int64)
    frame = frame_of(case.shape, case.itemsize, case.cell * case.itemsize)
    again = decode_table(encode_cells(case.table), encode_rows(moved), frame, sizes)
    assert sorted(again.stored_cells(), key=repr) == sorted(elsewhere, key=repr)


def test_a_tensor_without_elements_has_no_tables() -> None:
    empty = Case((0, 3), 4, 16, [], np.array([], dtype=np.int64))
    assert (encode_cells(empty.table), encode_rows(empty.table)) == (b"", b"")
    assert len(decoded(empty, b"", b"")) == 0
    for cells, rows in ((b"\0", b""), (b"", encode_rows(whole().table)), (b"\0", encode_rows(whole().table))):
        with pytest.raises(Refused):
            decoded(empty, cells, rows)


def whole(count: int = 20) -> Case:
    """Two cells that are a whole tensor, one after the other."""
    box = full_box((count,))
    regions = [Region(box, lo, min(lo + 10, count)) for lo in range(0, count, 10)]
    cells = [stored_cell(one, 0, 4096 + one.lo, one.numel, digest(one)) for one in regions]
    return Case((count,), 1, 10, cells, np.array([4096 + count], dtype=np.int64))


def test_most_tensors_take_ten_bytes_beside_their_digests() -> None:
    case = whole()
    cells, rows = encode_cells(case.table), encode_rows(case.table)
    assert (len(cells), len(rows)) == (1 + 2 * DIGEST_BYTES, 9)
    assert list(decoded(case, cells, rows).stored_cells()) == case.cells


def test_an_extent_takes_at_most_60_bytes_beside_its_digests() -> None:
    shape, rows = (1 << 40, 64), 1000
    cells = []
    for row in range(rows):
        region = Region(Box((row << 20, 7), (1 << 20, 50)), 0, 10)
        cells.append(stored_cell(region, row * 1000, (1 << 30) - 64 * row, 10, digest(region)))
    table = build(shape, 1, 1 << 20, cells)
    assert len(encode_cells(table)) + len(encode_rows(table)) <= rows * (60 + DIGEST_BYTES)


# hostile ones


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


def _try(case: Case, cells: bytes, rows: bytes) -> None:
    try:
        table = decoded(case, cells, rows)
    except (Refused, *DECODE_ERRORS):
        return
    _check_inside(case, table)


@st.composite
def numbers_near(draw: st.DrawFn) -> int:
    base = draw(st.sampled_from([0, 1, 10, 255, 4096, 2**31, 2**32, 2**61, 2**62]))
    return max(0, min(2**62, base + draw(st.integers(-3, 3))))


@given(cases())
def test_the_long_forms_say_the_same(case: Case) -> None:
    again = decoded(case, *long_form(*columns_of(case.table)))
    assert sorted(again.stored_cells(), key=repr) == sorted(case.cells, key=repr)


@given(cases(), st.data())
def test_a_changed_number_is_refused_or_harmless(case: Case, data: st.DataObject) -> None:
    parts: dict[str, Any] = dict(zip(("cells", "rows"), columns_of(case.table), strict=True))
    for _ in range(data.draw(st.integers(1, 3))):
        part, name = data.draw(st.sampled_from([*(("cells", one) for one in SPANS), *(("rows", one) for one in ROWS)]))
        values = unpack(getattr(parts[part], name)).tolist()
        change: Callable[[list[int]], Any] = data.draw(st.sampled_from([_drop, _twice, _swap, _put_one(data)]))
        change(values)
        parts[part] = msgspec.structs.replace(parts[part], **{name: pack(values)})
    _try(case, *long_form(parts["cells"], parts["rows"]))


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
    blob = data.draw(st.integers(0, 3) | numbers_near().map(lambda number: number % 2**32))
    near = [4096, 8192, 8192 - numel * itemsize, 8193 - numel * itemsize]
    offset = data.draw(st.sampled_from(near) | numbers_near().map(lambda number: number % 2**32))
    cells = bytes(1 + 32 * data.draw(st.sampled_from([count, count, count, count - 1, count + 1])))
    rows = b"\0" + blob.to_bytes(4, "little") + offset.to_bytes(4, "little")
    _try(Case(shape, itemsize, 10, [], np.array([8192, 4096, 2**30], dtype=np.int64)), cells, rows)


@given(cases(), st.data())
def test_changed_bytes_are_refused_or_harmless(case: Case, data: st.DataObject) -> None:
    short = data.draw(st.booleans())
    cells, rows = (encode_cells(case.table), encode_rows(case.table)) if short else long_form(*columns_of(case.table))
    parts = [bytearray(cells), bytearray(rows)]
    part = parts[data.draw(st.integers(0, 1))]
    if part and data.draw(st.booleans()):
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    else:
        part[:] = data.draw(st.binary(max_size=40))
    _try(case, bytes(parts[0]), bytes(parts[1]))


def _packed(**columns: list[int]) -> tuple[CellColumns, RowColumns]:
    cells = {name: pack(columns.get(name, [])) for name in SPANS}
    return CellColumns(**cells, digests=b""), RowColumns(*(pack(columns.get(name, [])) for name in ROWS))


def _huge(shape: Shape, itemsize: int, cell: int, packed: tuple[CellColumns, RowColumns]) -> None:
    with pytest.raises(Refused):
        decode_table(*long_form(*packed), frame_of(shape, itemsize, cell * itemsize), np.array([8192], dtype=np.int64))


def test_sums_that_wrap_around_are_refused() -> None:
    rows, top = 1024, 2**62
    columns = {"box": [0] * rows, "lo": [0] * rows, "hi": [top] * rows}
    places = {"cells": [1] * rows, "blob": [0] * rows, "offset": [0] * rows}
    _huge((top,), 16, 256, _packed(**columns, **places))  # 2**64 cells in all: 0 in 64 bits
    _huge((top,), 4, 2**20, _packed(**{name: values[:1] for name, values in (columns | places).items()}))
    one = {"cells": [1], "blob": [0], "offset": [0]}
    _huge((8,), 1, 256, _packed(boxes=[top, top], box=[1], lo=[0], hi=[1], **one))  # a box that ends at 2**63
    _huge((8,), 1, 256, _packed(box=[0], lo=[0], hi=[8], cells=[1], blob=[0], offset=[top]))
    _huge(
        (8,), 1, 256, _packed(box=[0], lo=[0], hi=[8], cells=[top, top, top, top, 1], blob=[0] * 5, offset=[4096] * 5)
    )


def _with_digests(packed: tuple[CellColumns, RowColumns], count: int) -> tuple[bytes, bytes]:
    return long_form(msgspec.structs.replace(packed[0], digests=bytes(32 * count)), packed[1])


def test_a_scalar_has_one_box() -> None:
    frame, sizes = frame_of((), 4, 1024), np.array([8192], dtype=np.int64)
    one = {"box": [0], "lo": [0], "hi": [1], "cells": [1], "blob": [0], "offset": [4096]}
    assert len(decode_table(*_with_digests(_packed(**one), 1), frame, sizes)) == 1
    with pytest.raises(Refused, match="differ in length"):
        decode_table(*_with_digests(_packed(boxes=[0, 1], **one), 1), frame, sizes)


def test_overlapping_spans_of_one_box_are_refused() -> None:
    columns = {"box": [0, 0], "lo": [0, 5], "hi": [8, 10], "cells": [1, 1], "blob": [0, 0], "offset": [4096, 4104]}
    with pytest.raises(Refused, match="overlap"):
        decode_table(*_with_digests(_packed(**columns), 2), frame_of((10,), 1, 256), np.array([9000]))


def test_a_row_of_two_spans_is_refused() -> None:
    columns = {"box": [0, 0], "lo": [0, 5], "hi": [5, 10], "cells": [2], "blob": [0], "offset": [4096]}
    with pytest.raises(Refused, match="two spans"):
        decode_table(*_with_digests(_packed(**columns), 2), frame_of((10,), 1, 256), np.array([9000]))


@pytest.mark.parametrize("missing", [0, 1, 4])
def test_an_extent_ends_where_its_blob_does_and_not_after(missing: int) -> None:
    columns = {"box": [0, 0], "lo": [0, 4], "hi": [4, 10], "cells": [1, 1], "blob": [0, 1], "offset": [4096, 4096]}
    parts, sizes = _with_digests(_packed(**columns), 2), np.array([4096 + 16, 4096 + 24 - missing])
    if not missing:
        assert len(decode_table(*parts, frame_of((10,), 4, 1024), sizes)) == 2
        return
    with pytest.raises(Refused):
        decode_table(*parts, frame_of((10,), 4, 1024), sizes)


@pytest.mark.parametrize(
    ("blob", "offset", "digests"),
    [(1, 4096, 2), (0, 4095, 2), (0, 4097, 2), (2**32 - 1, 4096, 2), (0, 2**32 - 1, 2), (0, 4096, 1), (0, 4096, 0)],
)
def test_a_short_form_that_does_not_fit_is_refused(blob: int, offset: int, digests: int) -> None:
    case = whole()
    rows = b"\0" + blob.to_bytes(4, "little") + offset.to_bytes(4, "little")
    with pytest.raises(Refused):
        decoded(case, bytes(1 + 32 * digests), rows)


@pytest.mark.parametrize(
    ("cells", "rows"), [(b"\x09", None), (None, b"\x09"), (None, b""), (None, b"\0\0\0"), (b"", None)]
)
def test_what_is_not_known_or_left_out_is_refused(cells: bytes | None, rows: bytes | None) -> None:
    case = whole()
    with pytest.raises(Refused):
        decoded(
            case,
            encode_cells(case.table) if cells is None else cells,
            encode_rows(case.table) if rows is None else rows,
        )
