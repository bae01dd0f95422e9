"""Checks that the regions to store make up a whole tensor without holes or overlaps. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from casckpt.format.columns import Ints
from casckpt.format.regions import Box, Region, Shape, flat_boxes, full_box, holes, normalise, whole


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
