"""Planned reads cover exactly the requested elements, or their whole cells if verified, and read each byte once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from unittest import mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from casckpt.format.extents import ExtentTable, StoredCell
from casckpt.format.regions import Box, Region, Shape, full_box, normalise, whole
from casckpt.plan import reads
from casckpt.plan.cells import plan_cells
from casckpt.plan.reads import Unit, affordable_gap, covers, plan_batches, plan_units, steps
from tests.support.geometry import (
    Case,
    cases,
    cells_of,
    columns,
    elements,
    full_shapes,
    partitions,
    regions,
    rows,
    table_of,
)

ITEM = 2  # bytes of an element


@st.composite
def tables(draw: st.DrawFn, shape: Shape) -> ExtentTable:
    """Draw the extents of a whole tensor, saved from any topology."""
    cell = draw(st.integers(1, 20))
    cells = [one for region in draw(partitions(shape)) for one in cells_of(plan_cells(region, shape, cell, None))]
    return table_of(shape, cell, cells, itemsize=ITEM, per_blob=draw(st.integers(1, 9)))


def _all_elements(units: Sequence[Unit], shape: Shape) -> list[int]:
    return [i for unit in units for i in elements(unit.region, shape)]


@given(full_shapes, st.data())
def test_verified_reads_cover_the_cells_of_wanted_elements(shape: Shape, data: st.DataObject) -> None:
    table, wanted = data.draw(tables(shape)), data.draw(regions(shape))
    cells = {(p.region, p.blob, p.offset, p.nbytes): p.digest for p in table.stored_cells()}
    units = list(plan_units(table, wanted, verify=True))
    for unit in units:
        assert cells[unit.region, unit.blob, unit.offset, unit.nbytes] == unit.digest
    mine = set(elements(wanted, shape))
    needed = {key for key in cells if mine & set(elements(key[0], shape))}
    assert len(units) == len(needed)
    assert {(unit.region, unit.blob, unit.offset, unit.nbytes) for unit in units} == needed


@given(full_shapes, st.data())
def test_unverified_reads_cover_only_wanted_elements(shape: Shape, data: st.DataObject) -> None:
    table, wanted = data.draw(tables(shape)), data.draw(regions(shape))
    with mock.patch.object(reads, "_SMALL_GAP", 0):  # otherwise a small tensor has no large gap
        units = list(plan_units(table, wanted, verify=False))
    assert sorted(_all_elements(units, shape)) == sorted(elements(wanted, shape))
    _check_places(table, units)


@given(full_shapes, st.data())
def test_unverified_reads_can_span_small_gaps(shape: Shape, data: st.DataObject) -> None:
    table, wanted = data.draw(tables(shape)), data.draw(regions(shape))
    units = list(plan_units(table, wanted, verify=False))
    held = _all_elements(units, shape)
    assert len(held) == len(set(held))
    assert set(held) >= set(elements(wanted, shape))
    _check_places(table, units)


@given(cases(), st.data())
def test_encoded_cells_are_read_completely_and_once(case: Case, data: st.DataObject) -> None:
    assume(any(cell.frame is not None for cell in case.cells))
    wanted = data.draw(regions(case.shape))
    with mock.patch.object(reads, "_SMALL_GAP", 0):
        units = list(plan_units(case.table, wanted, verify=False))
    assert units == list(plan_units(case.table, wanted, verify=True))
    assert len({unit.region for unit in units}) == len(units)


@given(full_shapes, st.data())
def test_a_long_read_joins_the_units_of_a_short_one(shape: Shape, data: st.DataObject) -> None:
    table, wanted = data.draw(tables(shape)), data.draw(regions(shape))
    most = data.draw(st.integers(3, 60)) * ITEM
    with mock.patch.multiple(reads, _PIECE_BYTES=3 * ITEM, _LONG_BYTES=most):
        for verify in (True, False):
            units = list(plan_units(table, wanted, verify=verify, long=True))
            assert _steps(units) == _steps(plan_units(table, wanted, verify=verify))
            if normalise(wanted, shape).box == full_box(shape):  # otherwise, no units are joined
                assert all(unit.nbytes <= max(most, table.cell * ITEM) for unit in units)


def _steps(units: Iterable[Unit]) -> list[StoredCell]:
    return [one for unit in units for one in steps(unit)]


def _check_places(table: ExtentTable, units: Sequence[Unit]) -> None:
    """Check that each unit lies inside one extent, at the correct offset."""
    for unit in units:
        assert unit.digest is None
        assert unit.nbytes == (unit.hi - unit.lo) * ITEM
        (one,) = (
            extent
            for extent in table.extents
            if table.boxes[extent.box] == unit.box and extent.lo <= unit.lo and unit.hi <= extent.hi
        )
        assert (unit.blob, unit.offset) == (one.blob, one.offset + (unit.lo - one.lo) * ITEM)


def test_reading_a_column_of_wide_rows_skips_the_bytes_in_between() -> None:
    shape, cell = (10, 100_000), 1000
    table = table_of(shape, cell, cells_of(plan_cells(whole(shape), shape, cell, None)), per_blob=10_000)
    wanted = Region(Box((0, 500), (10, 10)), 0, 100)
    assert len(list(plan_units(table, wanted, verify=True))) == 10
    units = list(plan_units(table, wanted, verify=False))
    assert [unit.nbytes for unit in units] == [10 * ITEM] * 10


def test_many_short_ranges_are_read_together() -> None:
    shape = (100_000, 8)
    table = table_of(shape, 1 << 20, cells_of(plan_cells(whole(shape), shape, 1 << 20, None)))
    wanted = Region(Box((0, 2), (100_000, 3)), 0, 300_000)
    (unit,) = plan_units(table, wanted, verify=False)
    assert (unit.lo, unit.hi) == (2, 800_000 - 3)


def test_nothing_is_read_if_no_elements_are_wanted() -> None:
    table = table_of((10,), 4, cells_of(plan_cells(whole((10,)), (10,), 4, None)))
    assert not list(plan_units(table, Region(full_box((10,)), 3, 3), verify=True))
    none = table_of((0,), 4, [])
    assert not list(plan_units(none, whole((0,)), verify=True))


@given(full_shapes, st.data())
def test_covers_reports_whether_a_table_contains_a_region(shape: Shape, data: st.DataObject) -> None:
    cells = [one for region in data.draw(partitions(shape)) for one in cells_of(plan_cells(region, shape, 8, None))]
    kept = data.draw(st.lists(st.sampled_from(cells), unique=True)) if cells else []
    wanted = data.draw(regions(shape))
    held = {i for one in kept for i in elements(one, shape)}
    assert covers(table_of(shape, 8, kept), wanted) == (set(elements(wanted, shape)) <= held)


items = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300), st.integers(1, 60)), max_size=30)


@given(items, st.integers(0, 40), st.integers(1, 200))
def test_batches_contain_every_item_and_every_byte_once(found: list[tuple[int, int, int]], gap: int, most: int) -> None:
    batches = plan_batches([(*row, i) for i, row in enumerate(found)], gap=gap, most=most)
    assert sorted(item for batch in batches for *_, item in batch.items) == list(range(len(found)))
    taken: set[tuple[int, int]] = set()
    for batch in batches:
        mine = {(batch.blob, byte) for byte in range(batch.offset, batch.offset + batch.nbytes)}
        assert not mine & taken
        taken |= mine
        _check_batch(found, batch.items, batch.blob, gap)
        assert (batch.offset, batch.nbytes) == _extent(batch.items)
        separate = all(a[0] + a[1] <= b[0] for a, b in zip(batch.items, batch.items[1:], strict=False))
        assert len(batch.items) == 1 or batch.nbytes <= most or not separate


def _extent(rows_: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    start = min(offset for offset, _, _ in rows_)
    return start, max(offset + nbytes for offset, nbytes, _ in rows_) - start


def _check_batch(
    found: Sequence[tuple[int, int, int]], rows_: Sequence[tuple[int, int, int]], blob: int, gap: int
) -> None:
    end = rows_[0][0]
    for offset, nbytes, item in rows_:
        assert found[item] == (blob, offset, nbytes)
        assert offset - end <= gap
        end = max(end, offset + nbytes)


@given(items)
def test_batches_without_gaps_read_only_wanted_bytes(found: list[tuple[int, int, int]]) -> None:
    batches = plan_batches([(*row, None) for row in found], gap=0, most=1 << 30)
    wanted = {(blob, byte) for blob, offset, nbytes in found for byte in range(offset, offset + nbytes)}
    assert sum(batch.nbytes for batch in batches) == len(wanted)


@given(items, st.integers(0, 40), st.integers(0, 200))
def test_batches_span_gaps_up_to_the_limit_of_wasted_bytes(
    found: list[tuple[int, int, int]], most: int, spare: int
) -> None:
    def in_vain(gap: int) -> int:
        return sum(b.nbytes for b in plan_batches([(*row, None) for row in found], gap=gap, most=1 << 30)) - len(wanted)

    wanted = {(blob, byte) for blob, offset, nbytes in found for byte in range(offset, offset + nbytes)}
    gap = affordable_gap(found, most=most, spare=spare)
    assert gap <= most
    assert in_vain(gap) <= spare
    assert all(in_vain(wider) == in_vain(gap) or in_vain(wider) > spare for wider in range(gap, most + 1))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("saved", [1, 3, 4])
@pytest.mark.parametrize("loaded", [1, 2, 5])
def test_the_reads_of_all_ranks_together_cover_the_whole_tensor(verify: bool, saved: int, loaded: int) -> None:
    shape, cell = (60, 7), 16
    table = table_of(
        shape, cell, [c for part in rows(shape, saved) for c in cells_of(plan_cells(part, shape, cell, None))]
    )
    for split in (rows, columns):
        held = [list(plan_units(table, part, verify=verify)) for part in split(shape, loaded)]
        assert {i for units in held for i in _all_elements(units, shape)} == set(range(420))
        if split is rows and verify:  # at most one additional cell at each end
            assert sum(unit.hi - unit.lo for units in held for unit in units) <= 420 + 2 * cell * loaded


@given(full_shapes, st.data())
def test_a_read_of_a_single_element_needs_one_unit(shape: Shape, data: st.DataObject) -> None:
    table, region = data.draw(tables(shape)), data.draw(regions(shape))
    assume(region.numel)
    one = Region(region.box, region.lo, region.lo + 1)
    (unit,) = plan_units(table, one, verify=True)
    assert elements(one, shape)[0] in elements(unit.region, shape)
    (unit,) = plan_units(table, one, verify=False)
    assert elements(one, shape) == elements(unit.region, shape)
