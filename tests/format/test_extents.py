"""Extent tables return the cells that they were built from, and nothing is lost when tables are joined."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from casckpt.format.extents import DIGEST_BYTES, ExtentTable, StoredCell, build, join
from casckpt.format.regions import Box, Region, full_box, intersect
from casckpt.format.sections.tables import encode_cells
from tests.support.geometry import Case, cases, digest, stored_cell


def _check_order(table: ExtentTable) -> None:
    keys = [(one.box, one.lo) for one in table.extents]
    assert keys == sorted(keys)


@given(cases())
def test_a_table_contains_exactly_the_cells_that_it_was_built_from(case: Case) -> None:
    table = case.table
    assert sorted(table.stored_cells(), key=repr) == sorted(case.cells, key=repr)
    assert sum(len(one.digests) for one in table.extents) == DIGEST_BYTES * len(case.cells)
    for one in table.extents:
        mine = list(table.stored_cells([one]))
        assert (mine[0].lo, mine[-1].hi) == (one.lo, one.hi)
        assert mine == [table.cell_at(one, number) for number in range(len(mine))]
        assert sum(cell.stored for cell in mine) == table.stored_bytes(one)
    _check_order(table)
    assert table.boxes[0] == full_box(case.shape)


@given(cases(), st.data())
def test_a_search_by_range_finds_the_cells_that_overlap_the_range(case: Case, data: st.DataObject) -> None:
    table = case.table
    box = data.draw(st.integers(0, len(table.boxes) - 1))
    lo, hi = sorted(data.draw(st.tuples(*[st.integers(0, table.boxes[box].numel)] * 2)))
    mine = [cell for cell in table.stored_cells() if cell.box == table.boxes[box]]
    assert list(table.cells_in(box, lo, hi)) == [cell for cell in mine if max(cell.lo, lo) < min(cell.hi, hi)]


@given(cases(), st.data())
def test_tables_of_moved_cells_compare_equal(case: Case, data: st.DataObject) -> None:
    """The first part of a table does not depend on the locations of its cells."""
    places, end = {}, 4096
    every = [one for cell in case.table.stored_cells() for one in cell.chain]
    for cell in data.draw(st.permutations(every)):
        places[cell] = data.draw(st.sampled_from([(0, end), (1, end)]))
        end += cell.stored

    def place(cell: StoredCell) -> tuple[int, int]:
        return places[cell]

    expected = [cell.moved(place) for cell in case.table.stored_cells()]
    table = build(case.table.shape, case.table.itemsize, case.table.cell, expected)
    assert list(table.stored_cells()) == expected
    assert encode_cells(table) == encode_cells(case.table)


def test_consecutive_cells_in_a_blob_form_an_extent() -> None:
    box = full_box((100,))
    cells = [
        stored_cell(Region(box, lo, lo + 10), 0, 4096 + lo, 10, digest(Region(box, lo, lo + 10)))
        for lo in range(0, 100, 10)
    ]
    table = build((100,), 1, 10, cells[::-1])
    assert table.is_whole
    assert len(table.extents[0].digests) == 10 * DIGEST_BYTES


def test_a_cell_that_does_not_begin_on_the_grid_begins_a_new_extent() -> None:
    box = full_box((30,))
    ends = [0, 10, 15, 20, 30]
    cells = [
        stored_cell(Region(box, lo, hi), 0, 4096 + lo, hi - lo, digest(Region(box, lo, hi)))
        for lo, hi in pairwise(ends)
    ]
    table = build((30,), 1, 10, cells)
    assert [(one.lo, one.hi) for one in table.extents] == [(0, 15), (15, 30)]
    assert list(table.stored_cells()) == cells


def test_the_extents_of_a_built_table_are_disjoint() -> None:
    box = Box((0, 1), (4, 2))
    cells = [
        stored_cell(region, 0, 4096, region.numel, digest(region))
        for region in (Region(box, 0, 8), Region(full_box((4, 4)), 0, 1))
    ]
    table = build((4, 4), 1, 256, cells)
    assert table.boxes == (full_box((4, 4)), box)
    assert not intersect(*map(table.region, table.extents))


@given(cases(), st.data())
def test_tables_from_several_ranks_are_joined_into_one_table(case: Case, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    of = [data.draw(st.integers(0, ranks - 1)) for _ in case.cells]
    shares = [[cell for cell, rank in zip(case.cells, of, strict=True) if rank == one] for one in range(ranks)]
    tables = [build(case.shape, case.itemsize, case.cell, share) for share in shares if share]
    if not tables:
        return
    joined = join([(table, [7, 5, 6]) for table in tables])
    want = [place.moved(lambda one: ([7, 5, 6][one.blob], one.offset)) for place in case.cells]
    found = list(joined.stored_cells())
    assert sorted(found, key=repr) == sorted(want, key=repr)
    _check_order(joined)
    assert encode_cells(joined) == encode_cells(case.table), "whichever rank held which of them"
