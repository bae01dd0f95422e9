"""Cells in blobs: each once, in order, as many as have room, branches of the state apart."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from casckpt.format.blob_writer import LEAF_BYTES, place_behind
from casckpt.plan.packing import Queue, branch_of, branches_of, by_branch


class Cell(NamedTuple):
    branch: str
    nbytes: int


CELLS = st.lists(st.builds(Cell, st.sampled_from("abcde"), st.integers(1, 2 * LEAF_BYTES) | st.just(700_000)))


@given(CELLS)
def test_branches_have_separate_blobs_unless_small(cells: list[Cell]) -> None:
    parts = by_branch(cells, lambda cell: cell.branch, branches_of(cell.branch for cell in cells))
    assert sorted(cell for part in parts for cell in part) == sorted(cells)
    total = {name: sum(cell.nbytes for cell in cells if cell.branch == name) for name in "abcde"}
    for part in parts:
        assert part == [cell for cell in cells if cell in part]
        names = {cell.branch for cell in part}
        assert len(names) == 1 or sum(total[name] for name in names) <= 1 << 20


@given(CELLS, st.integers(700_000, 3_000_000))
def test_a_queue_returns_items_that_fit_in_order(cells: list[Cell], room: int) -> None:
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


def test_branches_follow_from_keys() -> None:
    assert [branch_of("tensor", "model.w.0"), branch_of("part", "x"), branch_of("attachment", "a.b")] == [
        "model",
        "x",
        "",
    ]
    assert branches_of(map(str, range(16))) == frozenset(map(str, range(16)))
    assert branches_of(map(str, range(17))) == {""}
