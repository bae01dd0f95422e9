"""Parts of a tensor: narrowed parts, and flat tensors as Megatron-core up to 0.15 stores them.

The factories of Megatron's Mamba and GatedDeltaNet layers call `ShardedTensor.narrow`. Megatron-core up to 0.15 stores
a flat tensor of shape [X, Y] in parts of [x, y] as [X/x, Y/y, x*y]: the last axis is a flattened part, and the other
axes index the parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch

from casckpt.format.regions import Box, Shape, flat_boxes
from casckpt.frontends.megatron.errors import CheckpointingException
from casckpt.tensors.foreign import flat_range, megatron_data, megatron_region
from casckpt.tensors.memory import narrow
from casckpt.tensors.values import Shard


def narrowed(part: Any, dim: int, start: int, length: int) -> list[Any]:
    """See `ShardedTensor.narrow`."""
    _check(part, dim, start, length)
    extent, axis = part.local_shape[dim], dim + part.prepend_axis_num
    result = replace(
        part,
        data=None,
        local_shape=_with(part.local_shape, dim, length),
        global_shape=_with(part.global_shape, axis, part.global_shape[axis] // extent * length),
        global_offset=_with(part.global_offset, axis, part.global_offset[axis] // extent * length),
        flattened_range=None,
    )
    if part.flattened_range is None:
        return [replace(result, data=None if part.data is None else part.data.narrow(dim, start, length))]
    row, flat = prod(part.local_shape[1:]), part.flat_elements()
    lo, hi = max(flat.start, start * row), min(flat.stop, (start + length) * row)
    if lo >= hi:
        return []
    data = None if part.data is None else part.data[lo - flat.start : hi - flat.start]
    return [replace(result, data=data, flattened_range=slice(lo - start * row, hi - start * row))]


def _check(part: Any, dim: int, start: int, length: int) -> None:
    """Raise CheckpointingException if the part cannot be narrowed like this."""
    if not 0 <= dim < len(part.local_shape):
        raise _refused(part, f"it has {len(part.local_shape)} axes, and dim is {dim}")
    extent, axis = part.local_shape[dim], dim + part.prepend_axis_num
    if min(start, length) < 0 or start + length > extent:
        raise _refused(part, f"{length} elements from {start} on are not within the {extent} of axis {dim}")
    if not extent or part.global_shape[axis] % extent or part.global_offset[axis] % extent:
        raise _refused(part, f"parts are not cut evenly along axis {dim}")
    if part.flattened_range is not None and dim != 0:
        raise _refused(part, f"flat data is narrowed along the first axis alone, not along {dim}")


def _refused(part: Any, why: str) -> CheckpointingException:
    return CheckpointingException(f"{part.key!r} cannot be narrowed: {why}", key=part.key)


def _with(shape: Shape, axis: int, extent: int) -> Shape:
    return (*shape[:axis], extent, *shape[axis + 1 :])


@dataclass(frozen=True)
class ReshapedCopies:
    """Shards to read into new memory, and (target, source) views to copy into a sharded tensor afterwards."""

    shards: list[Shard]
    copies: list[tuple[torch.Tensor, torch.Tensor]]

    def run(self) -> None:
        """Copy each source into its target."""
        for target, source in self.copies:
            target.copy_(source)


def copies(value: Any, data: torch.Tensor, stored: Shape, part: Shape) -> ReshapedCopies:
    """Plan how to fill ``data`` of a Megatron-style tensor from the stored parts that it overlaps."""
    result = ReshapedCopies([], [])
    pieces = list(boxes_of(value, data))
    box = megatron_region(value).box
    for at in _parts(box, part):
        buffer = torch.empty(stored[-1], dtype=data.dtype, device="cpu")
        here = Box(tuple(i * n for i, n in zip(at, part, strict=True)), part)
        overlaps = [(piece, target, common) for piece, target in pieces if (common := piece.intersect(here))]
        for piece, target, common in overlaps:
            source = narrow(buffer.view(part), common.relative_to(here))
            result.copies.append((narrow(target, common.relative_to(piece)), source))
        if overlaps:
            result.shards.append(Shard(buffer.view((1,) * len(at) + stored[-1:]), stored, (*at, 0)))
    return result


def _parts(box: Box, part: Shape) -> Iterator[Shape]:
    """Indices of the parts that a box overlaps."""
    ends = zip(box.offset, box.end, part, strict=True)
    return product(*(range(start // extent, -(-end // extent)) for start, end, extent in ends))


def boxes_of(value: Any, data: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """(box of the global tensor, view of the data) for each box that the value holds."""
    region, local = megatron_region(value), megatron_data(value, data)
    if flat_range(value) is None:
        yield region.box, local
        return
    for box, start in flat_boxes(region):
        yield box, local[start - region.lo :][: box.numel].view(box.shape)
