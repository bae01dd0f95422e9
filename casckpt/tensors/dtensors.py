"""Regions of a DTensor's local tensor in the whole, for every mesh and placement.

Computed per dimension as the list of indices that this rank holds: each mesh dimension that shards it takes its chunk
of what the ones before it left. A strided shard (FSDP2 over tensor parallelism) comes after the mesh dimensions to its
right that its split factor counts, which is how FSDP2 really cuts, uneven sizes included. Such indices are no single
range, so a local tensor is a list of boxes. (torch's own offset helper gives one box, and a wrong one there.)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from casckpt.errors import InvalidInput
from casckpt.format.columns import Ints
from casckpt.format.regions import Box, Shape

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Tell whether it is a DTensor, without importing torch.distributed: if that is not loaded, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor; any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_boxes(key: str, tensor: DTensor) -> list[tuple[Box, Box]]:
    """List (box of the whole tensor, box of the local one) of each piece that this rank holds, if any.

    Raises InvalidInput for placements that are no plain parts of a whole (Partial).
    """
    check_added_up(key, tensor)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    shards: dict[int, list[tuple[int, int, int]]] = {}  # tensor dimension -> (mesh size, coordinate, split factor)
    for mesh_dim, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            factor = int(getattr(placement, "split_factor", 1))
            shards.setdefault(dim, []).append((mesh.size(mesh_dim), coordinate[mesh_dim], factor))
    shape, local = tuple(tensor.shape), tuple(tensor.to_local().shape)
    indices = [_held(extent, shards.get(dim, [])) for dim, extent in enumerate(shape)]
    if not all(map(len, indices)) and 0 in local:
        return []  # where nothing is held, FSDP2 leaves other extents than those of the placements
    if tuple(len(held) for held in indices) != local:
        raise InvalidInput(
            f"{key!r}: a DTensor of shape {list(shape)} with placements {tensor.placements} holds a local tensor of "
            f"shape {list(local)} here, where {[len(held) for held in indices]} was expected; casckpt cannot tell "
            "which elements these are",
            key=key,
        )
    return boxes_of(indices)


def check_added_up(key: str, tensor: DTensor) -> None:
    """Raise InvalidInput for placements that are no plain parts of a whole (Partial)."""
    for placement in tensor.placements:
        if getattr(placement, "dim", None) is None and not placement.is_replicate():
            raise InvalidInput(
                f"{key!r}: a DTensor with placement {placement} holds sums that are not added up yet; "
                "redistribute it to Shard or Replicate first",
                key=key,
            )


def boxes_of(indices: Sequence[Ints]) -> list[tuple[Box, Box]]:
    """Yield (global box, local box) for every combination of consecutive runs of the indices held in each dimension."""
    runs = [_runs(held) for held in indices]
    found = []
    for combination in product(*runs):
        shape: Shape = tuple(count for _, _, count in combination)
        offset = tuple(start for start, _, _ in combination)
        found.append((Box(offset, shape), Box(tuple(at for _, at, _ in combination), shape)))
    return found


def _held(extent: int, shards: Sequence[tuple[int, int, int]]) -> Ints:
    """Compute the indices of one dimension that this rank holds."""
    held = np.arange(extent)
    for size, coordinate, _ in _in_order(shards):
        chunk = -(-len(held) // size)  # torch.chunk: equal chunks, the last ones short or empty
        held = held[coordinate * chunk : (coordinate + 1) * chunk]
    return held


def _in_order(shards: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Order mesh dimensions as they really split: a strided shard after those that its split factor counts."""
    order: list[tuple[int, int, int]] = []
    for shard in reversed(shards):
        at, counted = 0, 1
        while counted < shard[2] and at < len(order):
            counted *= order[at][0]
            at += 1
        if counted != shard[2]:
            raise InvalidInput(f"a strided shard with split factor {shard[2]} over mesh sizes {[s[0] for s in shards]}")
        order.insert(at, shard)
    return order


def _runs(held: Ints) -> list[tuple[int, int, int]]:
    """Yield (first index, position, count) of each run of consecutive indices."""
    if not len(held):
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(held) != 1) + 1])
    ends = np.concatenate([starts[1:], [len(held)]])
    return [(int(held[a]), int(a), int(b - a)) for a, b in zip(starts, ends, strict=True)]
