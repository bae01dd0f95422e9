"""Proof that the regions to be stored make up a whole tensor: no hole, no overlap. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from casckpt.format.regions import Box, Region, Shape, flat_boxes, full_box, holes, intersect, normalise, whole


def holes_and_overlaps(shape: Shape, regions: Sequence[Region]) -> tuple[list[Region], list[tuple[int, int]]]:
    """Find (regions that nobody holds, index pairs of regions that overlap): the first few of each, to be named."""
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
    found, reach = [], -1
    for i in order:
        if reach >= 0 and regions[i].lo < regions[reach].hi:
            found.append((reach, i))
        if reach < 0 or regions[i].hi > regions[reach].hi:
            reach = i
    return found[:4]


def _box_overlaps(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """Sweep along one dimension: only regions whose boxes are open at the same time are compared."""
    held = [i for i, region in enumerate(regions) if region.numel]
    dims = range(len(regions[held[0]].box.shape))
    dim = max(dims, key=lambda d: len({regions[i].box.offset[d] for i in held}))  # where most of them lie apart
    order = sorted(held, key=lambda i: regions[i].box.offset[dim])
    active: list[int] = []
    found: list[tuple[int, int]] = []
    for i in order:
        start = regions[i].box.offset[dim]
        active = [j for j in active if regions[j].box.end[dim] > start]
        found += [(j, i) for j in active if intersect(regions[j], regions[i])]
        if len(found) >= 4:
            break
        active.append(i)
    return found[:4]


def _holes(shape: Shape, regions: Sequence[Region]) -> list[Region]:
    rest: list[Box] = [full_box(shape)]
    for region in regions:
        for box, _ in flat_boxes(region):
            rest = [piece for part in rest for piece in part.subtract(box)]
    return [Region(box, 0, box.numel) for box in rest[:4]]
