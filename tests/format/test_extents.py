"""Extent tables hold the cells that they were made of, and are joined without a loss."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from casckpt.format.extents import DIGEST_BYTES, Whole, build, byte_ranges, join, with_blobs
from casckpt.format.regions import Box, Region, full_box, intersect
from casckpt.format.sections.tables import encode_cells
from tests.support.geometry import Case, cases, digest, stored_cell


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


def test_cells_that_follow_each_other_are_one_extent() -> None:
    box = full_box((100,))
    cells = [
        stored_cell(Region(box, lo, lo + 10), 0, 4096 + lo, 10, digest(Region(box, lo, lo + 10)))
        for lo in range(0, 100, 10)
    ]
    table = build((100,), 1, 10, cells[::-1])
    assert len(table) == 1
    assert isinstance(table.form, Whole)
    assert len(table.form.digests) == 10 * DIGEST_BYTES


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


def test_the_extents_of_a_built_table_are_disjoint() -> None:
    box = Box((0, 1), (4, 2))
    cells = [
        stored_cell(region, 0, 4096, region.numel, digest(region))
        for region in (Region(box, 0, 8), Region(full_box((4, 4)), 0, 1))
    ]
    table = build((4, 4), 1, 256, cells)
    assert table.boxes == (full_box((4, 4)), box)
    assert not intersect(table.region(0), table.region(1))


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
    assert encode_cells(joined) == encode_cells(case.table), "whichever rank held which of them"
