"""The copies of all ranks of a host fit into its budget."""

from __future__ import annotations

from casckpt.saving.staging_budget import Copy, Shortage, shortages


def test_the_copies_of_the_ranks_of_a_host_share_the_limit() -> None:
    here, there = Copy("here", 60, 0, limit=100), Copy("there", 90, 0, limit=100)
    assert list(shortages([here, there, Copy("here", 40, 0, limit=100)])) == []
    assert list(shortages([here, there, Copy("here", 41, 0, limit=100)])) == [
        Shortage(101, 100, 0),
        Shortage(101, 100, 2),
    ]


def test_a_copy_that_a_rank_already_has_counts() -> None:
    held = Copy("here", 60, 60)
    assert list(shortages([held, Copy("here", 40, 30, limit=100)])) == []
    assert list(shortages([held, Copy("here", 41, 30, limit=100)])) == [Shortage(101, 100, 1)]


def test_by_default_copies_leave_a_fifth_of_the_free_memory() -> None:
    assert list(shortages([Copy("here", 80, 0, free=100)])) == []
    assert list(shortages([Copy("here", 81, 0, free=100)])) == [Shortage(81, 80, 0)]
    held = Copy("here", 50, 50)
    assert list(shortages([held, Copy("here", 30, 10, free=40)])) == []
    assert list(shortages([held, Copy("here", 31, 10, free=40)])) == [Shortage(81, 80, 1)]


def test_a_copy_that_takes_no_more_memory_fits() -> None:
    assert list(shortages([Copy("here", 1000, 1000), Copy("here", 0, 0)])) == []


def test_a_host_whose_free_memory_is_unknown_has_no_limit() -> None:
    assert list(shortages([Copy("here", 1000, 0)])) == []
