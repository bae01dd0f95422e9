"""Exactly one rank writes each element of every region, ranks share replicas evenly, and the plan is deterministic."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from casckpt.plan.writers import HeldRegions, WriteRanges, plan_writers


@dataclass(frozen=True)
class Row:
    """Equal rows of some ranks. ``shared``: by rank, whether that rank declares them shared."""

    name: int
    region: int
    lo: int
    hi: int
    cell: int
    itemsize: int
    shared: dict[int, bool]

    @property
    def pooled(self) -> bool:
        return len(self.shared) > 1 and all(self.shared.values())

    @property
    def cell_bytes(self) -> int:
        return self.cell * self.itemsize


def held(rows: list[Row], ranks: int, order: list[int] | None = None) -> list[HeldRegions]:
    """Return the rows of each rank, in the order of ``order``."""
    ordered = [rows[i] for i in order] if order else rows
    found = []
    for rank in range(ranks):
        mine = [row for row in ordered if rank in row.shared]
        found.append(
            HeldRegions(
                np.array([row.name for row in mine], dtype=np.uint64),
                np.array([row.region for row in mine], dtype=np.uint64),
                np.array([row.lo for row in mine], dtype=np.int64),
                np.array([row.hi for row in mine], dtype=np.int64),
                np.array([row.cell for row in mine], dtype=np.int64),
                np.array([row.itemsize for row in mine], dtype=np.int64),
                np.array([row.shared[rank] for row in mine], dtype=bool),
            )
        )
    return found


def duties(rows: list[Row], ranks: int, order: list[int] | None = None) -> dict[tuple[int, int], dict[int, range]]:
    """Return the elements of each region that each rank writes."""
    ordered = [rows[i] for i in order] if order else rows
    found: dict[tuple[int, int], dict[int, range]] = defaultdict(dict)
    plan = plan_writers(held(rows, ranks, order))
    assert len(plan) == ranks
    for rank, duty in enumerate(plan):
        mine = [row for row in ordered if rank in row.shared]
        assert len(duty.lo) == len(duty.hi) == len(mine)
        for row, lo, hi in zip(mine, duty.lo.tolist(), duty.hi.tolist(), strict=True):
            found[row.name, row.region][rank] = range(lo, hi)
    return found


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Row], int]:
    """Draw tensors with a few regions each. Some of the ranks hold each region."""
    ranks = draw(st.integers(1, 6))
    rows = []
    for name in range(draw(st.integers(0, 6))):
        itemsize, cell = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 9))
        for region in range(draw(st.integers(1, 3))):
            lo = draw(st.integers(0, 40))
            hi = lo + draw(st.integers(0, 80))
            holders = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
            alike = draw(st.sampled_from([True, True, False, None]))
            shared = {rank: draw(st.booleans()) if alike is None else alike for rank in sorted(holders)}
            rows.append(Row(name, region, lo, hi, cell, itemsize, shared))
    return rows, ranks


@given(worlds())
def test_every_element_of_every_region_is_written_once(world: tuple[list[Row], int]) -> None:
    rows, ranks = world
    found = duties(rows, ranks)
    for row in rows:
        written = sorted(element for part in found[row.name, row.region].values() for element in part)
        assert written == list(range(row.lo, row.hi))


@given(worlds())
def test_regions_that_may_differ_between_ranks_are_written_by_the_lowest_rank(world: tuple[list[Row], int]) -> None:
    rows, ranks = world
    found = duties(rows, ranks)
    for row in rows:
        if not row.pooled:
            parts = found[row.name, row.region]
            assert {rank for rank, part in parts.items() if len(part)} <= {min(row.shared)}


@given(worlds())
def test_replicas_are_split_between_cells_in_rank_order(world: tuple[list[Row], int]) -> None:
    rows, ranks = world
    found = duties(rows, ranks)
    for row in rows:
        parts = [part for _, part in sorted(found[row.name, row.region].items()) if len(part)]
        assert parts == sorted(parts, key=lambda part: part.start)
        assert all(part.start % row.cell == 0 for part in parts[1:])


@given(worlds(), st.randoms())
def test_the_write_plan_does_not_depend_on_the_order_of_rows(world: tuple[list[Row], int], random: Random) -> None:
    rows, ranks = world
    order = list(range(len(rows)))
    random.shuffle(order)
    assert duties(rows, ranks, order) == duties(rows, ranks)


@given(worlds())
@example(([Row(0, 0, 0, 67, 6, 1, {0: True, 1: True})], 3))  # 24, 18 and 25 bytes
def test_replicas_balance_the_load_of_ranks_as_far_as_possible(world: tuple[list[Row], int]) -> None:
    """If all replicas are on the same ranks, a rank with replicas to write has at most two cells more than any other.

    Each boundary is at most half a cell from an even split, so that loads differ by at most one cell. A rank that
    already has more gets nothing.
    """
    rows, ranks = world
    everywhere = dict.fromkeys(range(ranks), True)
    rows = [Row(r.name, r.region, r.lo, r.hi, r.cell, r.itemsize, everywhere if r.pooled else r.shared) for r in rows]
    found = duties(rows, ranks)
    load, given = [0] * ranks, [0] * ranks
    for row in rows:
        for rank, part in found[row.name, row.region].items():
            load[rank] += len(part) * row.itemsize
            given[rank] += len(part) * row.itemsize if row.pooled else 0
    largest = max((row.cell_bytes for row in rows if row.pooled), default=0)
    assert all(load[rank] <= min(load) + 2 * largest for rank in range(ranks) if given[rank])


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_single_huge_replica_is_split_evenly(ranks: int) -> None:
    row = Row(0, 0, 0, 1_000_003, 256, 4, dict.fromkeys(range(ranks), True))
    sizes = [len(part) for part in duties([row], ranks)[0, 0].values()]
    assert max(sizes) - min(sizes) <= 256 + 3


def test_a_rank_that_has_many_bytes_of_its_own_writes_fewer_replicas() -> None:
    own = Row(0, 0, 0, 3000, 10, 1, {0: True})
    shared = Row(1, 0, 0, 3000, 10, 1, {0: True, 1: True, 2: True})
    parts = duties([own, shared], 3)[1, 0]
    assert [len(parts[rank]) for rank in range(3)] == [0, 1500, 1500]


@pytest.mark.parametrize("much", [0, 1])
def test_a_rank_that_has_enough_bytes_is_not_assigned_a_part_of_a_cell(much: int) -> None:
    own, shared = Row(0, 0, 0, 3000, 10, 1, {much: True}), Row(1, 0, 9, 26, 10, 1, {0: True, 1: True})
    parts = duties([own, shared], 2)[1, 0]
    assert [len(parts[rank]) for rank in (much, 1 - much)] == [0, 17]


def test_rows_with_few_holders_are_assigned_first() -> None:
    """Ranks 0 and 1 also have other rows, so ranks 2 and 3 write the rows that all four ranks have."""
    pair = Row(0, 0, 0, 4000, 10, 1, {0: True, 1: True})
    four = Row(1, 0, 0, 4000, 10, 1, dict.fromkeys(range(4), True))
    found = duties([four, pair], 4)
    assert [len(found[0, 0][rank]) for rank in range(2)] == [2000, 2000]
    assert [len(found[1, 0][rank]) for rank in range(4)] == [0, 0, 2000, 2000]


def test_the_halves_of_a_hybrid_mesh_are_balanced_independently() -> None:
    """The mesh is 2 x 2: ranks 0 and 2 have one half of each tensor, and ranks 1 and 3 the other."""
    rows = [Row(name, half, 0, 1000, 10, 4, {half: True, half + 2: True}) for name in range(10) for half in range(2)]
    found = duties(rows, 4)
    for rank in range(4):
        assert sum(len(parts.get(rank, ())) for parts in found.values()) == 5000


def test_ranks_without_data_are_assigned_nothing() -> None:
    assert [len(duty.lo) for duty in plan_writers(held([], 3))] == [0, 0, 0]
    row = Row(0, 0, 5, 9, 2, 1, {1: True})
    plan: list[WriteRanges] = plan_writers(held([row], 3))
    assert [duty.elements.tolist() for duty in plan] == [[], [4], []]


def test_a_plan_for_many_ranks_is_deterministic() -> None:
    rng = np.random.default_rng(7)
    rows = [
        Row(
            name, int(part), 0, int(rng.integers(1, 1 << 20)), 1 << 12, 4, {r: True for r in range(64) if r % 8 == part}
        )
        for name in range(40)
        for part in range(8)
    ]
    first, second = duties(rows, 64), duties(list(rows), 64)
    assert first == second
    loads = [sum(len(parts.get(rank, ())) for parts in first.values()) for rank in range(64)]
    for part in range(8):
        mine = loads[part::8]
        assert max(mine) - min(mine) <= 2 << 12
