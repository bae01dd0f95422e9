"""The ranks that have each row, the positions that each save samples, and the cells that a rank reads again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.plan.writers import RUNS, SLICES, HeldRegions, Holders, places, plan_writers, row_digests, to_read_again


def held(names: list[int], *, length: int = 100, cell: int = 10, shared: bool = True) -> HeldRegions:
    """Return the rows of one rank: one for each name, all of the same length."""
    count = len(names)
    full = np.full(count, length)
    return HeldRegions(
        np.array(names, np.uint64), np.zeros(count, np.uint64), np.zeros(count, np.int64), full,
        np.full(count, cell), np.full(count, 4), np.full(count, shared),
    )  # fmt: skip


def test_rows_on_the_same_ranks_belong_to_the_same_set() -> None:
    sets = Holders([held([1, 2, 3]), held([2, 1]), held([2, 4])]).sets()
    assert [(one > 0).tolist() for one in sets] == [[True, True, False], [True, True], [True, False]]
    assert sets[0][0] == sets[1][1] != sets[0][1] == sets[1][0] == sets[2][0]


def test_a_region_counts_as_different_if_any_holder_has_a_different_digest() -> None:
    holders = Holders([held([1, 2, 3]), held([2, 1]), held([2, 4])])
    digests = [np.array(one, np.uint64) for one in ([7, 5, 1], [5, 7], [5, 9])]
    assert holders.differing(digests) == []
    digests[2][0] = 6
    assert holders.differing(digests) == [[(0, 1), (1, 0), (2, 0)]]


def test_ranks_without_rows_do_not_cause_a_difference() -> None:
    assert Holders([held([]), held([])]).differing([np.zeros(0, np.uint64)] * 2) == []
    assert [len(one) for one in Holders([held([]), held([])]).sets()] == [0, 0]


def test_only_regions_divided_among_all_holders_are_reread() -> None:
    duties = plan_writers([held([1]), held([1], shared=False), held([2]), held([2])])
    assert [one.sharing.tolist() for one in duties] == [[0], [0], [2], [2]]


def test_sample_positions_depend_on_the_save_and_row_and_smaller_samples_are_prefixes() -> None:
    names, room = np.array([1, 2], np.uint64), np.array([1000, 1])
    few, more, later = (places(names, seed, room, runs) for seed, runs in ((5, RUNS), (5, 64), (6, RUNS)))
    assert np.array_equal(few, more[:, :RUNS])
    assert (more >= 0).all()
    assert (more < room[:, None]).all()
    assert not np.array_equal(few[0], later[0])
    assert len(set(more[0].tolist())) > 32


@given(st.integers(0, 7), st.integers(0, 63))
def test_a_changed_bit_changes_only_the_digest_of_its_row(word: int, bit: int) -> None:
    words = np.arange(16, dtype=np.uint64).reshape(2, 8)
    before = row_digests(words)
    words[1, word] ^= np.uint64(1 << bit)
    after = row_digests(words)
    assert (before == after).tolist() == [True, False]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("lengths", [[100], [1000, 5, 33, 1]])
def test_each_cell_of_other_ranks_is_read_once_per_save_cycle(ranks: int, lengths: list[int]) -> None:
    rows = held(list(range(len(lengths))))
    rows = HeldRegions(rows.name, rows.region, rows.lo, np.array(lengths), rows.cell, rows.itemsize, rows.shared)
    duties = plan_writers([rows] * ranks)
    for duty in duties:
        read = [
            (row, element)
            for turn in range(SLICES * (ranks - 1))
            for row, lo, hi in to_read_again(rows, duty, turn + 12345)
            for element in range(lo, hi)
        ]
        theirs = {(row, i) for row, n in enumerate(lengths) for i in range(n) if not duty.lo[row] <= i < duty.hi[row]}
        assert sorted(read) == sorted(theirs)


def test_a_save_rereads_one_64th_of_the_share_of_each_rank() -> None:
    rows = held([1], length=64 * 200)
    duties = plan_writers([rows] * 2)
    for turn in range(3):
        assert len(list(to_read_again(rows, duties[0], turn))) == 10
