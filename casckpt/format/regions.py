"""Boxes and regions, which describe the elements of a global tensor that a piece of data holds.

A `Region` is an n-dimensional box of the global tensor, with a sub-range of that box in row-major order. It can
describe a plain tensor (the full box), a shard of a DTensor (a box), a flat shard of FSDP1 or ZeRO (the full box with
a sub-range) and Megatron's flattened_range (a local box with a sub-range). Everything here is a pure function of
frozen values.

All sizes and offsets are in elements, never in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from types import EllipsisType
from typing import TypeAlias

import numpy as np

from casckpt.errors import InvalidInput
from casckpt.format.sections.columns import Ints

Shape: TypeAlias = tuple[int, ...]

MAX_DIMENSIONS = 64
MAX_ELEMENTS = 2**62


@lru_cache(maxsize=4096)
def check_shape(shape: Shape) -> Shape:
    """Return ``shape`` as ints: equal shapes share a cached result, and True and `numpy.int64` (1) equal 1.

    Raises InvalidInput if a size is not an integer, or if the number of dimensions, their sizes, or the product of the
    sizes exceeds the format's limits.
    """
    if not all(isinstance(extent, int | np.integer) for extent in shape):
        raise InvalidInput(f"shape {list(shape)[:8]} has a size that is not an integer")
    if len(shape) > MAX_DIMENSIONS or any(extent < 0 for extent in shape):
        raise InvalidInput(f"shape {list(shape)[:8]} has a negative size or more than {MAX_DIMENSIONS} dimensions")
    if prod(max(extent, 1) for extent in shape) > MAX_ELEMENTS:
        raise InvalidInput(f"shape {list(shape)[:8]} has more than 2**62 elements")
    return tuple(map(int, shape))


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a global tensor: ``offset`` and ``shape`` in elements, with one number per dimension."""

    offset: Shape
    shape: Shape

    def __post_init__(self) -> None:
        check_shape(self.shape)
        if len(self.offset) != len(self.shape) or (self.offset and min(self.offset) < 0):
            raise InvalidInput(f"offset {list(self.offset)[:8]} does not match shape {list(self.shape)[:8]}")

    @property
    def numel(self) -> int:
        """The number of elements, which is 1 for a 0-d box."""
        return prod(self.shape)

    @property
    def end(self) -> Shape:
        """The first index after the box in each dimension."""
        return tuple(start + extent for start, extent in zip(self.offset, self.shape, strict=True))

    def inside(self, outer: Box) -> bool:
        """Return whether ``outer`` contains every element of this box."""
        pairs = zip(self.offset, self.end, outer.offset, outer.end, strict=True)
        return all(lo >= outer_lo and hi <= outer_hi for lo, hi, outer_lo, outer_hi in pairs)

    def intersect(self, other: Box) -> Box | None:
        """Return the box of common elements, or None if there are none."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        shape = tuple(hi - lo for lo, hi in zip(low, high, strict=True))
        return None if any(extent <= 0 for extent in shape) else Box(low, shape)

    def subtract(self, other: Box) -> list[Box]:
        """Return the rest of this box without ``other``, as at most 2 * dimensions disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.numel else []
        rest, offset, shape = [], list(self.offset), list(self.shape)
        for dim, (low, extent) in enumerate(zip(common.offset, common.shape, strict=True)):
            for start, count in (
                (offset[dim], low - offset[dim]),
                (low + extent, offset[dim] + shape[dim] - low - extent),
            ):
                if count:
                    rest.append(
                        Box((*offset[:dim], start, *offset[dim + 1 :]), (*shape[:dim], count, *shape[dim + 1 :]))
                    )
            offset[dim], shape[dim] = low, extent
        return rest

    def relative_to(self, outer: Box) -> Box:
        """Return the same box with its offset relative to that of ``outer``."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    def within(self, outer: Box) -> tuple[slice | EllipsisType, ...]:
        """Return the index that selects these elements from an array of ``outer``.

        It selects a view even if the array is 0-d.
        """
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return (*(slice(start, start + extent) for start, extent in zip(starts, self.shape, strict=True)), ...)


@lru_cache(maxsize=4096)
def full_box(shape: Shape) -> Box:
    """Return the box of the whole tensor."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class Region:
    """The elements ``[lo, hi)``, in row-major order, of a box."""

    box: Box
    lo: int
    hi: int

    def __post_init__(self) -> None:
        if not 0 <= self.lo <= self.hi <= self.box.numel:
            raise InvalidInput(f"flat range [{self.lo}, {self.hi}) is outside a box of {self.box.numel} elements")

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.hi - self.lo

    @property
    def is_whole(self) -> bool:
        """Whether it covers its whole box."""
        return self.lo == 0 and self.hi == self.box.numel

    def __str__(self) -> str:
        box = "x".join(f"[{lo}:{hi}]" for lo, hi in zip(self.box.offset, self.box.end, strict=True)) or "[scalar]"
        return box if self.is_whole else f"{box} elements {self.lo}..{self.hi}"


@lru_cache(maxsize=4096)
def whole(shape: Shape) -> Region:
    """Return the region of the whole tensor."""
    box = full_box(shape)
    return Region(box, 0, box.numel)


def strides(shape: Shape) -> Shape:
    """Compute row-major strides in elements."""
    result = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        result[dim] = result[dim + 1] * shape[dim + 1]
    return tuple(result)


def is_contiguous(box: Box, shape: Shape) -> bool:
    """Return whether the elements of ``box`` are contiguous in the row-major order of a tensor of ``shape``."""
    if not box.numel:
        return True
    dim = next((d for d, extent in enumerate(box.shape) if extent > 1), len(shape))
    return all(box.shape[d] == shape[d] for d in range(dim + 1, len(shape)))


def normalise(region: Region, shape: Shape) -> Region:
    """Return a flat range of the whole tensor with the same elements if there is one. Otherwise, return the region.

    As a result, equal elements have equal regions, regardless of the front end that describes them.
    """
    if region.box.shape == shape or not is_contiguous(region.box, shape):
        return region
    if not region.numel:
        return Region(full_box(shape), 0, 0)
    start = sum(i * stride for i, stride in zip(region.box.offset, strides(shape), strict=True))
    return Region(full_box(shape), start + region.lo, start + region.hi)


def flat_boxes(region: Region) -> Iterator[tuple[Box, int]]:
    """Split a region into the boxes that make it up, at most ``max(1, 2 * dimensions - 1)``, in the region's order.

    Yield each box in global coordinates, with the flat position of its first element in the region's box. The elements
    of each box are consecutive in the region's order.
    """
    box, lo, hi = region.box, region.lo, region.hi
    if lo < hi:
        for offset, shape, start in _pieces(box.shape, lo, hi):
            yield Box(tuple(a + b for a, b in zip(box.offset, offset, strict=True)), shape), start


def _pieces(shape: Shape, lo: int, hi: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Yield (offset, shape, start) for each box in the flat range [lo, hi) of a box of ``shape`` at the origin."""
    if lo == 0 and hi == prod(shape):
        yield (0,) * len(shape), shape, 0
        return
    inner = prod(shape[1:])
    first, last = lo // inner, (hi - 1) // inner
    if first == last:
        for offset, piece, start in _pieces(shape[1:], lo - first * inner, hi - first * inner):
            yield (first, *offset), (1, *piece), first * inner + start
        return
    head = lo - first * inner
    tail = hi - last * inner
    if head:
        for offset, piece, start in _pieces(shape[1:], head, inner):
            yield (first, *offset), (1, *piece), first * inner + start
        first += 1
    stop = last + 1 if tail == inner else last
    if first < stop:
        yield (first, *(0,) * (len(shape) - 1)), (stop - first, *shape[1:]), first * inner
    if tail < inner:
        for offset, piece, start in _pieces(shape[1:], 0, tail):
            yield (last, *offset), (1, *piece), last * inner + start


def intersect(region: Region, other: Region) -> list[Box]:
    """Return the elements that two regions of a tensor share, as disjoint boxes."""
    if region.box == other.box:
        lo, hi = max(region.lo, other.lo), min(region.hi, other.hi)
        return [box for box, _ in flat_boxes(Region(region.box, lo, hi))] if lo < hi else []
    if region.box.intersect(other.box) is None:
        return []
    theirs = [box for box, _ in flat_boxes(other)]
    overlaps = (a.intersect(b) for a, _ in flat_boxes(region) for b in theirs)
    return [box for box in overlaps if box is not None]


def holes(ranges: Iterable[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Find the parts of [0, end) that are not in any of ``ranges``."""
    gaps, position = [], 0
    for lo, hi in [*sorted(ranges), (end, end)]:
        if lo > position:
            gaps.append((position, lo))
        position = max(position, hi)
    return gaps


def cut(lo: int, hi: int, cell: int) -> list[tuple[int, int]]:
    """Split [lo, hi) at the multiples of ``cell``."""
    inner = range((lo // cell + 1) * cell, hi, cell)
    return list(pairwise((lo, *inner, hi))) if lo < hi else []


def holes_and_overlaps(shape: Shape, regions: Sequence[Region]) -> tuple[list[Region], list[tuple[int, int]]]:
    """Return (regions that no rank holds, index pairs of overlapping regions).

    Each list has only the first few, for use in a message.
    """
    regions = [normalise(region, shape) for region in regions]
    flat = [i for i, region in enumerate(regions) if region.box == full_box(shape) and region.numel]
    overlaps = _flat_overlaps(regions, flat)
    if len(flat) == sum(1 for region in regions if region.numel):
        missing = holes(((regions[i].lo, regions[i].hi) for i in flat), whole(shape).hi)
        return [Region(full_box(shape), lo, hi) for lo, hi in missing[:4]], overlaps
    overlaps = overlaps or _box_overlaps(regions)
    total = sum(region.numel for region in regions)
    if overlaps or total == whole(shape).numel:
        return [], overlaps
    return _holes(shape, regions), []


def _flat_overlaps(regions: Sequence[Region], flat: list[int]) -> list[tuple[int, int]]:
    order = sorted(flat, key=lambda i: (regions[i].lo, regions[i].hi))
    overlaps, reach = [], -1
    for i in order:
        if reach >= 0 and regions[i].lo < regions[reach].hi:
            overlaps.append((reach, i))
        if reach < 0 or regions[i].hi > regions[reach].hi:
            reach = i
    return overlaps[:4]


def _box_overlaps(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """Sweep over the regions' boxes along one dimension. A box can overlap only boxes that begin before its end."""
    parts = [(i, box) for i, region in enumerate(regions) for box, _ in flat_boxes(region)]
    starts = np.array([box.offset for _, box in parts], dtype=np.int64)
    ends = np.array([box.end for _, box in parts], dtype=np.int64)

    def sweep(dim: int) -> tuple[Ints, Ints]:
        """Return the boxes ordered by their starts, and for each box, the first box that begins after its end."""
        order = np.argsort(starts[:, dim], kind="stable")
        return order, np.searchsorted(starts[order, dim], ends[order, dim])

    order, stops = sweep(min(range(starts.shape[1]), key=lambda dim: int(sweep(dim)[1].sum())))
    starts, ends = starts[order], ends[order]
    overlaps: dict[tuple[int, int], None] = {}
    for first, stop in enumerate(stops.tolist()):
        later = slice(first + 1, stop)
        meets = ((starts[later] < ends[first]) & (ends[later] > starts[first])).all(axis=1)
        for other in np.flatnonzero(meets)[:4].tolist():
            overlaps[parts[order[first]][0], parts[order[first + 1 + other]][0]] = None
        if len(overlaps) >= 4:
            break
    return list(overlaps)[:4]


def _holes(shape: Shape, regions: Sequence[Region]) -> list[Region]:
    rest: list[Box] = [full_box(shape)]
    for region in regions:
        for box, _ in flat_boxes(region):
            rest = [piece for part in rest for piece in part.subtract(box)]
    return [Region(box, 0, box.numel) for box in rest[:4]]
