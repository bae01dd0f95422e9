"""Holes and overlaps are found if and only if they exist."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from casckpt.format.regions import Box, Region, Shape, full_box, whole
from casckpt.plan.coverage import holes_and_overlaps
from tests.support.geometry import columns, elements, flat, full_shapes, partitions, regions, rows, shapes


@given(full_shapes, st.data())
def test_a_partition_covers_everything_exactly_once(shape: Shape, data: st.DataObject) -> None:
    assert holes_and_overlaps(shape, data.draw(partitions(shape))) == ([], [])


def _check(shape: Shape, parts: list[Region]) -> None:
    holes, overlaps = holes_and_overlaps(shape, parts)
    counts = [0] * whole(shape).numel
    for part in parts:
        for i in elements(part, shape):
            counts[i] += 1
    assert bool(overlaps) == any(count > 1 for count in counts)
    for one, other in overlaps:
        assert one != other
        assert set(elements(parts[one], shape)) & set(elements(parts[other], shape))
    missing = {i for i, count in enumerate(counts) if not count}
    for hole in holes:
        assert hole.numel
        assert set(elements(hole, shape)) <= missing
    assert bool(holes) == bool(missing) or overlaps  # after an overlap, the search for holes may be skipped
    assert len(holes) <= 4
    assert len(overlaps) <= 4


@given(full_shapes, st.data())
def test_an_incomplete_partition_has_holes(shape: Shape, data: st.DataObject) -> None:
    parts = data.draw(partitions(shape))
    _check(shape, data.draw(st.lists(st.sampled_from(parts))) if parts else [])


@given(full_shapes, st.data())
def test_a_partition_with_an_extra_region_overlaps(shape: Shape, data: st.DataObject) -> None:
    parts = [*data.draw(partitions(shape)), data.draw(regions(shape))]
    _check(shape, data.draw(st.permutations(parts)))


@given(shapes, st.data())
def test_coverage_of_any_regions_is_correct(shape: Shape, data: st.DataObject) -> None:
    _check(shape, data.draw(st.lists(regions(shape), max_size=5)))


def test_all_holes_of_a_flat_partition_are_named() -> None:
    parts = flat((100,), [10, 20, 30, 100])
    assert holes_and_overlaps((100,), [parts[1], parts[3]])[0] == [
        Region(full_box((100,)), 0, 10),
        Region(full_box((100,)), 20, 30),
    ]


def test_the_holes_left_by_a_missing_rank_are_found() -> None:
    shape = (8, 12)
    for split in (rows, columns):
        parts = split(shape, 4)
        holes, overlaps = holes_and_overlaps(shape, [parts[0], parts[1], parts[3]])
        assert not overlaps
        assert [i for hole in holes for i in elements(hole, shape)] == elements(parts[2], shape)


def test_the_overlaps_caused_by_a_repeated_rank_are_found() -> None:
    shape = (8, 12)
    for split in (rows, columns):
        parts = split(shape, 4)
        holes, overlaps = holes_and_overlaps(shape, [*parts, parts[2]])
        assert not holes
        assert overlaps == [(2, 4)]


def test_empty_tensors_and_scalars_are_covered() -> None:
    assert holes_and_overlaps((0, 3), []) == ([], [])
    assert holes_and_overlaps((0, 3), [whole((0, 3))]) == ([], [])
    assert holes_and_overlaps((), [whole(())]) == ([], [])
    assert holes_and_overlaps((), [])[0] == [whole(())]
    assert holes_and_overlaps((), [whole(()), whole(())])[1] == [(0, 1)]


def test_many_columns_are_not_compared_pairwise() -> None:
    shape = (4, 512)
    parts = [Region(Box((0, i), (4, 1)), 0, 4) for i in range(512)]
    assert holes_and_overlaps(shape, parts) == ([], [])


def test_simultaneously_open_boxes_are_not_compared_pairwise() -> None:
    """A hostile manifest can hold upright and level strips, which overlap in half of all pairs in either dimension."""
    count = 5000
    upright = [Region(Box((0, i), (count, 1)), 0, count) for i in range(count)]
    level = [Region(Box((i, count), (1, count)), 0, count) for i in range(count)]
    shape = (count, 2 * count)
    assert holes_and_overlaps(shape, upright + level) == ([], [])
    assert holes_and_overlaps(shape, [*upright, *level, level[7]])[1] == [(count + 7, 2 * count)]
