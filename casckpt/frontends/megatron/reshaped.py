"""Flat tensors as Megatron-core up to 0.15 stores them: [X, Y], in parts of [x, y], becomes [X/x, Y/y, x*y].

The last axis is a part, flattened; the others say which part it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from casckpt.format.regions import Box, Shape, flat_boxes
from casckpt.tensors.foreign import flat_range, megatron_data, megatron_region
from casckpt.tensors.memory import narrow
from casckpt.tensors.values import Shard


@dataclass(frozen=True)
class Copies:
    """What is to be read beside a sharded tensor, and then copied into it: (target, source) views."""

    shards: list[Shard]
    copies: list[tuple[torch.Tensor, torch.Tensor]]

    def run(self) -> None:
        """Copy."""
        for target, source in self.copies:
            target.copy_(source)


def copies(value: Any, data: torch.Tensor, stored: Shape, part: Shape) -> Copies:
    """How to fill ``data`` of a Megatron-style tensor: each stored part that it overlaps is read into new memory."""
    result = Copies([], [])
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
    """Which parts a box overlaps."""
    ends = zip(box.offset, box.end, part, strict=True)
    return product(*(range(start // extent, -(-end // extent)) for start, end, extent in ends))


def boxes_of(value: Any, data: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Boxes of the global tensor that the value holds, and the views of its data."""
    region, local = megatron_region(value), megatron_data(value, data)
    if flat_range(value) is None:
        yield region.box, local
        return
    for box, start in flat_boxes(region):
        yield box, local[start - region.lo :][: box.numel].view(box.shape)
