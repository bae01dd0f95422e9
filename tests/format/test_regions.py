"""Regions have the elements of the equivalent numpy slices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import InvalidInput
from casckpt.format.regions import (
    MAX_DIMENSIONS,
    Box,
    Region,
    Shape,
    check_shape,
    cut,
    flat_boxes,
    full_box,
    holes,
    holes_and_overlaps,
    intersect,
    is_contiguous,
    normalise,
    strides,
    whole,
)
from tests.support.geometry import (
    box_elements,
    boxes,
    columns,
    elements,
    flat,
    full_shapes,
    partitions,
    regions,
    rows,
    shapes,
)


@st.composite
def _one(draw: st.DrawFn) -> tuple[Shape, Region]:
    shape = draw(shapes)
    return shape, draw(regions(shape))


@st.composite
def _two(draw: st.DrawFn) -> tuple[Shape, Region, Region]:
    shape = draw(shapes)
    one = draw(regions(shape))
    if draw(st.booleans()):  # another test covers two ranges of one box
        lo = draw(st.integers(0, one.box.numel))
        return shape, one, Region(one.box, lo, draw(st.integers(lo, one.box.numel)))
    return shape, one, draw(regions(shape))


@given(_one())
def test_flat_boxes_cover_the_elements_in_order(case: tuple[Shape, Region]) -> None:
    shape, region = case
    pieces = list(flat_boxes(region))
    assert box_elements([box for box, _ in pieces], shape) == elements(region, shape)
    assert len(pieces) <= max(1, 2 * len(shape) - 1)
    position = region.lo
    for box, start in pieces:
        assert start == position
        assert box.numel > 0
        position += box.numel


@given(_one())
def test_normalise_preserves_the_elements_and_their_order(case: tuple[Shape, Region]) -> None:
    shape, region = case
    normal = normalise(region, shape)
    assert elements(normal, shape) == elements(region, shape)
    assert normalise(normal, shape) == normal


@given(_one())
def test_a_region_of_consecutive_elements_becomes_a_range_of_the_whole(case: tuple[Shape, Region]) -> None:
    shape, region = case
    every = elements(Region(region.box, 0, region.box.numel), shape)
    together = every == list(range(every[0], every[-1] + 1)) if every else True
    assert is_contiguous(region.box, shape) == together
    if together and region.numel:
        found = elements(region, shape)
        assert normalise(region, shape) == Region(full_box(shape), found[0], found[-1] + 1)


@given(_two())
def test_the_intersection_of_two_regions_has_their_common_elements(case: tuple[Shape, Region, Region]) -> None:
    shape, one, other = case
    found = box_elements(intersect(one, other), shape)
    assert sorted(found) == sorted(set(elements(one, shape)) & set(elements(other, shape)))


@given(st.data())
def test_boxes_can_be_subtracted_and_intersected(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    mine, theirs = (set(box_elements([box], shape)) for box in (one, other))
    rest = one.subtract(other)
    assert sorted(box_elements(rest, shape)) == sorted(mine - theirs)
    assert len(rest) <= max(1, 2 * len(shape))
    common = one.intersect(other)
    assert set(box_elements([common] if common else [], shape)) == mine & theirs
    if mine:
        assert one.inside(other) == (mine <= theirs)


def test_a_box_is_shifted_relative_to_a_second_box() -> None:
    assert Box((3, 4), (1, 2)).relative_to(Box((1, 4), (5, 5))) == Box((2, 0), (1, 2))


@given(shapes)
def test_the_strides_of_a_shape_equal_those_of_numpy(shape: Shape) -> None:
    if 0 not in shape:
        assert strides(shape) == tuple(n // 8 for n in np.zeros(shape).strides)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 64))
def test_a_region_is_split_at_the_grid(lo: int, length: int, cell: int) -> None:
    pieces = cut(lo, lo + length, cell)
    assert [i for a, b in pieces for i in range(a, b)] == list(range(lo, lo + length))
    assert all(a < b and a // cell == (b - 1) // cell for a, b in pieces)
    assert all(b % cell == 0 for _, b in pieces[:-1])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=8), st.integers(0, 40))
def test_the_holes_between_regions_are_found(pairs: list[tuple[int, int]], end: int) -> None:
    ranges = [(lo, lo + n) for lo, n in pairs]
    held = {i for lo, hi in ranges for i in range(lo, hi)}
    found = [i for lo, hi in holes(ranges, end) for i in range(lo, hi) if i < end]
    assert found == [i for i in range(end) if i not in held]


def test_whole_and_empty_regions_are_recognized() -> None:
    assert whole((2, 3)) == Region(Box((0, 0), (2, 3)), 0, 6)
    assert whole(()).numel == 1
    empty = normalise(Region(Box((1, 3), (1, 0)), 0, 0), (2, 3))
    assert empty == Region(full_box((2, 3)), 0, 0)
    assert not list(flat_boxes(empty))


@pytest.mark.parametrize(
    ("region", "text"),
    [
        (whole(()), "[scalar]"),
        (whole((4, 5)), "[0:4]x[0:5]"),
        (Region(Box((1, 2), (3, 3)), 2, 7), "[1:4]x[2:5] elements 2..7"),
    ],
)
def test_a_region_is_formatted_as_slices(region: Region, text: str) -> None:
    assert str(region) == text


@given(st.data())
def test_a_box_is_selected_from_the_array_of_an_enclosing_box(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    outer = data.draw(boxes(shape))
    part = data.draw(boxes(outer.shape))
    inner = Box(tuple(a + b for a, b in zip(outer.offset, part.offset, strict=True)), part.shape)
    held = np.array(box_elements([outer], shape)).reshape(outer.shape)
    picked = held[inner.within(outer)]
    assert isinstance(picked, np.ndarray)
    assert not picked.size or np.shares_memory(picked, held)
    assert picked.reshape(-1).tolist() == box_elements([inner], shape)


@pytest.mark.parametrize(
    ("offset", "shape"),
    [((0,), (-1,)), ((-1,), (1,)), ((0, 0), (1,)), ((), (1,)), ((0,), (2**62 + 1,)), ((0,) * 65, (1,) * 65)],
)
def test_a_box_outside_the_limits_is_rejected(offset: Shape, shape: Shape) -> None:
    with pytest.raises(InvalidInput):
        Box(offset, shape)


@pytest.mark.parametrize(("lo", "hi"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_its_box_is_rejected(lo: int, hi: int) -> None:
    with pytest.raises(InvalidInput, match="is outside a box of 6 elements"):
        Region(Box((0, 0), (2, 3)), lo, hi)


@pytest.mark.parametrize("one", [True, np.int64(1)])
def test_sizes_that_equal_an_int_do_not_replace_it_in_later_shapes(one: int) -> None:
    check_shape.cache_clear()
    assert [type(size) for size in check_shape((one, 3)) + check_shape((1, 3))] == [int] * 4


def test_a_shape_with_a_fraction_is_rejected() -> None:
    with pytest.raises(InvalidInput, match=r"\[2\.5\] has a size that is not an integer"):
        check_shape((2.5,))


def test_a_shape_outside_the_limits_is_rejected() -> None:
    assert check_shape((2**62,)) == (2**62,)
    assert check_shape((2**62, 0)) == (2**62, 0)
    assert check_shape((1,) * MAX_DIMENSIONS) == (1,) * MAX_DIMENSIONS
    for shape in ((2**31, 2**31, 2), (0, 2**63), (2**40, 0, 2**40)):  # extents beside a zero count too
        with pytest.raises(InvalidInput):
            check_shape(shape)


@given(full_shapes, st.data())
def test_a_partition_covers_each_element_exactly_once(shape: Shape, data: st.DataObject) -> None:
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
def test_the_holes_of_an_incomplete_partition_are_found(shape: Shape, data: st.DataObject) -> None:
    parts = data.draw(partitions(shape))
    _check(shape, data.draw(st.lists(st.sampled_from(parts))) if parts else [])


@given(full_shapes, st.data())
def test_the_overlap_of_a_partition_with_an_extra_region_is_found(shape: Shape, data: st.DataObject) -> None:
    parts = [*data.draw(partitions(shape)), data.draw(regions(shape))]
    _check(shape, data.draw(st.permutations(parts)))


@given(shapes, st.data())
def test_the_coverage_of_any_set_of_regions_is_computed_correctly(shape: Shape, data: st.DataObject) -> None:
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


def test_the_coverage_of_empty_tensors_and_scalars_is_complete() -> None:
    assert holes_and_overlaps((0, 3), []) == ([], [])
    assert holes_and_overlaps((0, 3), [whole((0, 3))]) == ([], [])
    assert holes_and_overlaps((), [whole(())]) == ([], [])
    assert holes_and_overlaps((), [])[0] == [whole(())]
    assert holes_and_overlaps((), [whole(()), whole(())])[1] == [(0, 1)]


def test_coverage_is_computed_without_comparing_many_columns_pairwise() -> None:
    shape = (4, 512)
    parts = [Region(Box((0, i), (4, 1)), 0, 4) for i in range(512)]
    assert holes_and_overlaps(shape, parts) == ([], [])


def test_coverage_is_computed_without_comparing_all_boxes_pairwise() -> None:
    """A hostile manifest can contain horizontal and vertical strips, half of whose pairs overlap in each dimension."""
    count = 5000
    upright = [Region(Box((0, i), (count, 1)), 0, count) for i in range(count)]
    level = [Region(Box((i, count), (1, count)), 0, count) for i in range(count)]
    shape = (count, 2 * count)
    assert holes_and_overlaps(shape, upright + level) == ([], [])
    assert holes_and_overlaps(shape, [*upright, *level, level[7]])[1] == [(count + 7, 2 * count)]
