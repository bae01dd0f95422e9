"""The cells of a shard tile it exactly, and a cell that is found in the parent is exactly that cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.format.blob_writer import LEAF_BYTES, place_behind
from casckpt.format.extents import ExtentTable, StoredCell, build
from casckpt.format.regions import Box, Region, Shape, normalise, whole
from casckpt.plan.cells import Group, NewCell, Queue, branch_numbers, branch_of, by_branch, plan_cells
from tests.support.geometry import (
    cells_of,
    columns,
    digest,
    elements,
    flat,
    full_shapes,
    normal,
    partitions,
    regions,
    rows,
    stored_cell,
    table_of,
)


def _check_tiling(region: Region, shape: Shape, cell: int, groups: Sequence[Group]) -> None:
    mine = elements(region, shape)
    held: list[int] = []
    for group in groups:
        data = mine if group.part == region.box else elements(Region(group.part, 0, group.part.numel), shape)
        position = group.lo
        for cut in group.cuts:
            assert cut.lo == position
            position = cut.hi
            assert 0 < cut.hi - cut.lo <= cell
            assert cut.lo // cell == (cut.hi - 1) // cell
            found = elements(Region(group.box, cut.lo, cut.hi), shape)
            assert data[cut.lo - group.lo : cut.hi - group.lo] == found
            held += found
        assert position == group.hi
        assert group.hi - group.lo == len(data)
    assert sorted(held) == sorted(mine)


def _check_known(groups: Sequence[Group], parent: ExtentTable) -> None:
    places = {(p.region, p.blob, p.offset): p.digest for p in parent.stored_cells()}
    for group in groups:
        for cut in group.cuts:
            if isinstance(cut, StoredCell):
                assert cut.box == group.box
                assert places[cut.region, cut.blob, cut.offset] == cut.digest


@st.composite
def parents(draw: st.DrawFn, shape: Shape, cell: int) -> ExtentTable:
    """Draw the cells of a save from any topology."""
    cells = [one for region in draw(partitions(shape)) for one in cells_of(plan_cells(region, shape, cell, None))]
    return table_of(shape, cell, cells, per_blob=draw(st.integers(1, 9)))


@given(full_shapes, st.integers(1, 20), st.data())
def test_cells_tile_a_region_exactly(shape: Shape, cell: int, data: st.DataObject) -> None:
    region = data.draw(regions(shape))
    _check_tiling(region, shape, cell, plan_cells(region, shape, cell, None))


@given(full_shapes, st.integers(1, 20), st.data())
def test_cells_aligned_with_any_parent_tile_a_region_exactly(shape: Shape, cell: int, data: st.DataObject) -> None:
    region, parent = data.draw(regions(shape)), data.draw(parents(shape, cell))
    groups = plan_cells(region, shape, cell, parent)
    _check_tiling(region, shape, cell, groups)
    _check_known(groups, parent)


@given(st.integers(1, 12), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 20))
def test_a_whole_tensor_shares_every_cell_with_uneven_column_shards(height: int, widths: list[int], cell: int) -> None:
    """Some columns are so wide that each of their rows is cut like the whole tensor."""
    shape = (height, sum(widths))
    starts = [sum(widths[:i]) for i in range(len(widths))]
    parts = [Box((0, start), (height, width)) for start, width in zip(starts, widths, strict=True)]
    saves = Saves(shape, cell)
    saves.save([Region(box, 0, box.numel) for box in parts])
    assert saves.save([whole(shape)]) == 0


@given(full_shapes, st.integers(1, 20), st.data())
def test_a_save_of_the_same_shards_reuses_every_cell(shape: Shape, cell: int, data: st.DataObject) -> None:
    parts = data.draw(partitions(shape))
    table = table_of(shape, cell, [c for part in parts for c in cells_of(plan_cells(part, shape, cell, None))])
    for part in parts:
        again = plan_cells(part, shape, cell, table)
        assert all(isinstance(cut, StoredCell) for group in again for cut in group.cuts)


class Saves:
    """One tensor, saved repeatedly from different topologies. The bytes never change. ``written`` counts cells."""

    def __init__(self, shape: Shape, cell: int) -> None:
        self.shape, self.cell = shape, cell
        self.table: ExtentTable | None = None
        self.digests: dict[Region, bytes] = {}

    def save(self, parts: Sequence[Region]) -> int:
        """Return the elements of the unknown cells."""
        written, places = 0, []
        for part in parts:
            for group in plan_cells(part, self.shape, self.cell, self.table):
                for cut in group.cuts:
                    region = Region(group.box, cut.lo, cut.hi)
                    if isinstance(cut, StoredCell):
                        assert cut.digest == digest(region)
                    else:
                        written += region.numel
                    places.append(stored_cell(region, 0, 4096, region.numel, digest(region)))
        self.table = build(self.shape, 1, self.cell, places)
        assert sum(p.region.numel for p in places) == whole(self.shape).numel
        return written


@pytest.mark.parametrize("shape", [(64, 16), (60, 7), (1000,), (8, 4, 3)])
@pytest.mark.parametrize("cell", [4, 16, 100, 10_000])
def test_a_save_from_fewer_ranks_shares_every_cell_with_one_from_more_ranks(shape: Shape, cell: int) -> None:
    saves = Saves(shape, cell)
    assert saves.save(rows(shape, 4)) == whole(shape).numel
    assert [saves.save(rows(shape, ranks)) for ranks in (4, 2, 1, 4, 1, 2, 4)] == [0] * 7


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("cell", [4, 16, 100])
def test_a_save_from_one_rank_shares_every_cell_of_uneven_shards(ranks: int, cell: int) -> None:
    shape = (61, 7)
    saves = Saves(shape, cell)
    saves.save(rows(shape, ranks))
    assert [saves.save(rows(shape, n)) for n in (1, ranks, 1)] == [0, 0, 0]


@pytest.mark.parametrize("cell", [4, 16, 100])
def test_a_save_from_more_ranks_shares_the_cells_that_new_boundaries_do_not_split(cell: int) -> None:
    shape = (60, 7)
    saves = Saves(shape, cell)
    saves.save([whole(shape)])
    written = saves.save(rows(shape, 4))
    assert written <= 3 * cell  # only the cells that three boundaries cut
    assert [saves.save(rows(shape, ranks)) for ranks in (1, 2, 4)] == [0, 0, 0]
    assert saves.save(rows(shape, 3)) <= 2 * cell


@pytest.mark.parametrize("cell", [4, 16, 100])
def test_a_save_with_fewer_column_shards_shares_every_cell_with_one_with_more(cell: int) -> None:
    shape = (12, 64)
    saves = Saves(shape, cell)
    saves.save(columns(shape, 4))
    assert [saves.save(columns(shape, ranks)) for ranks in (4, 2, 1, 1, 4)] == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("cell", [4, 16, 100])
def test_flat_shards_share_cells_with_rows_and_with_the_whole_tensor(cell: int) -> None:
    shape = (60, 7)
    saves = Saves(shape, cell)
    saves.save(flat(shape, [101, 217, 330, 420]))
    assert saves.save([whole(shape)]) == 0
    assert saves.save(flat(shape, [217, 420])) == 0
    assert saves.save(rows(shape, 2)) <= cell
    assert saves.save(flat(shape, [101, 217, 330, 420])) == 0


def test_wide_column_shards_share_cells_with_the_whole_tensor() -> None:
    shape, cell = (6, 256), 8
    saves = Saves(shape, cell)
    saves.save([whole(shape)])
    assert saves.save(columns(shape, 4)) == 0
    assert saves.save([whole(shape)]) == 0


def test_cells_remain_whole_across_many_topologies() -> None:
    shape, cell = (96, 5), 16
    saves = Saves(shape, cell)
    for _ in range(4):
        for ranks in (1, 2, 3, 4, 6, 8):
            saves.save(rows(shape, ranks))
    assert saves.table is not None
    boundaries = {96 * 5 * i // n for n in (2, 3, 4, 6, 8) for i in range(1, n)}
    assert len(list(saves.table.stored_cells())) <= -(-96 * 5 // cell) + len(boundaries)


def test_a_parent_may_have_overlapping_boxes() -> None:
    """Boxes can overlap even if their flat parts are disjoint."""
    shape = (4, 4)
    parts = [
        Region(Box((0, 0), (4, 2)), 0, 4),
        Region(Box((0, 0), (4, 3)), 6, 12),
        Region(Box((0, 2), (2, 2)), 0, 4),
        Region(Box((2, 3), (2, 1)), 0, 2),
    ]
    saves = Saves(shape, 100)
    saves.save(parts)
    saves.save([whole(shape)])
    assert saves.table is not None
    _check_tiling(whole(shape), shape, 100, plan_cells(whole(shape), shape, 100, saves.table))


def test_a_parent_with_a_different_cell_size_is_ignored() -> None:
    shape = (100,)
    parent = table_of(shape, 20, cells_of(plan_cells(whole(shape), shape, 20, None)))
    groups = plan_cells(whole(shape), shape, 10, parent)
    _check_tiling(whole(shape), shape, 10, groups)
    assert all(isinstance(cut, NewCell) for group in groups for cut in group.cuts)


def test_small_and_empty_tensors_are_divided_into_cells() -> None:
    assert plan_cells(whole((3, 0)), (3, 0), 16, None) == []
    (group,) = plan_cells(whole(()), (), 16, None)
    assert [(cut.lo, cut.hi) for cut in group.cuts] == [(0, 1)]


@given(full_shapes, st.integers(1, 20), st.data())
def test_cells_with_equal_elements_have_equal_regions(shape: Shape, cell: int, data: st.DataObject) -> None:
    groups = plan_cells(data.draw(regions(shape)), shape, cell, None)
    assert normal(cells_of(groups), shape) == set(cells_of(groups))
    assert all(normalise(Region(g.box, g.lo, g.hi), shape).box == g.box for g in groups)


class Cell(NamedTuple):
    branch: int
    nbytes: int


CELLS = st.lists(st.builds(Cell, st.integers(0, 4), st.integers(1, 2 * LEAF_BYTES) | st.just(700_000)))


@given(CELLS)
def test_branches_are_stored_in_separate_blobs_unless_they_are_small(cells: list[Cell]) -> None:
    parts = by_branch(cells, lambda cell: cell.branch)
    assert sorted(cell for part in parts for cell in part) == sorted(cells)
    total = [sum(cell.nbytes for cell in cells if cell.branch == number) for number in range(5)]
    for part in parts:
        assert part == [cell for cell in cells if cell in part]
        numbers = {cell.branch for cell in part}
        assert len(numbers) == 1 or sum(total[number] for number in numbers) <= 1 << 20


@given(CELLS, st.integers(700_000, 3_000_000))
def test_a_queue_returns_items_in_order_as_long_as_they_fit(cells: list[Cell], room: int) -> None:
    queue, found = Queue(cells), list[Cell]()
    while not queue.is_empty:
        first, lot = queue.take(4096, 4096 + room)
        assert first == len(found)
        end = 4096
        for cell in lot:
            end = place_behind(end, cell.nbytes) + cell.nbytes
        rest = cells[len(found) + len(lot) :]
        assert end <= 4096 + room
        assert not rest or place_behind(end, rest[0].nbytes) + rest[0].nbytes > 4096 + room
        found += lot
    assert found == cells


def test_the_branch_of_an_entry_is_derived_from_its_key() -> None:
    assert [branch_of("tensor", "model.w.0"), branch_of("part", "x"), branch_of("attachment", "a.b")] == [
        "model",
        "x",
        "",
    ]
    assert branch_numbers("abcab") == [0, 1, 2, 0, 1]
    assert branch_numbers(map(str, range(16))) == list(range(16))
    assert branch_numbers(map(str, range(17))) == [0] * 17
