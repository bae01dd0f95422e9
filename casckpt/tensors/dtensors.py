"""Computes the regions of the global tensor that a DTensor's local tensor holds, for any mesh and placements.

For each tensor dimension, this module computes the indices that this rank holds: each mesh dimension that shards it
takes its chunk of what remains. A strided shard (FSDP2 over tensor parallelism) comes after the mesh dimensions to its
right that its split factor counts. FSDP2 splits in this order, even for uneven sizes. The indices may have gaps, so a
local tensor is a list of boxes. (torch's own offset helper returns a single box, which is incorrect in that case.)

A tensor, or a DTensor's local tensor, may describe its chunks with a ``__create_chunk_list__`` method. In that case,
mesh and placements are ignored. The method that torch defines for every DTensor does not count as such a description.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations, product
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch

from casckpt.errors import InvalidInput
from casckpt.format.regions import Box, Shape
from casckpt.format.sections.columns import Ints
from casckpt.tensors.values import Shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Return whether ``value`` is a DTensor, without importing torch.distributed."""
    if type(value) is torch.Tensor:  # a fast path, because DTensor's metaclass makes isinstance slow
        return False
    module = _dtensors()
    return module is not None and isinstance(value, module.DTensor)


def _dtensors() -> Any:
    return sys.modules.get("torch.distributed.tensor")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, and any other tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def from_local(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return a DTensor with this local tensor, and the shape, mesh and placements of ``like``."""
    made: DTensor = _dtensors().DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


CHUNK_LIST = "__create_chunk_list__"
"""The method with which a tensor describes its chunks. torch.distributed.checkpoint also uses it."""


def _description(tensor: torch.Tensor) -> Any:
    """Return the method with which a tensor, or a DTensor's local tensor, describes its chunks, or None."""
    method = getattr(tensor, CHUNK_LIST, None)
    if not is_dtensor(tensor) or getattr(method, "__func__", None) is not vars(_dtensors().DTensor).get(CHUNK_LIST):
        return method
    return getattr(tensor._local_tensor, CHUNK_LIST, None)


def described_shards(key: str, tensor: torch.Tensor) -> list[Shard] | None:
    """List the parts that a tensor describes, with views of their data. Return None if there is no description.

    Raises InvalidInput if the parts lie outside the tensor, overlap, or do not match its local tensor.
    """
    describe = _description(tensor)
    if describe is None:
        return None
    local, replicated = tensor, isinstance(tensor, torch.nn.Parameter)
    if is_dtensor(tensor):
        check_added_up(key, tensor)
        local, replicated = tensor._local_tensor, True
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in describe() if 0 not in chunk.sizes]
    data = _parts_of_local(local, [sizes for _, sizes in chunks])
    if [tuple(part.shape) for part in data] == [sizes for _, sizes in chunks]:
        with suppress(InvalidInput):
            shape = tuple(tensor.shape)
            shards = [Shard(part, shape, at, replicated=replicated) for (at, _), part in zip(chunks, data, strict=True)]
            if not any(a.box.intersect(b.box) for a, b in combinations(shards, 2)):
                return shards
    where = ", ".join(f"{list(sizes)} at {list(at)}" for at, sizes in chunks) or "empty"
    raise InvalidInput(
        f"{key!r}: the tensor of shape {list(tensor.shape)} describes its part here as {where}, which does not fit "
        f"the tensor or its local tensor of shape {list(local.shape)}; casckpt cannot tell which elements these are. "
        f"Correct its {CHUNK_LIST}, or save its parts as casckpt.Shard",
        key=key,
    )


def _parts_of_local(local: Any, sizes: Sequence[Shape]) -> Sequence[torch.Tensor]:
    """View the parts of a local tensor: the shards of torch's LocalShardsWrapper, or else consecutive parts."""
    if callable(getattr(local, "local_shards", None)):
        return [shard for shard in local.local_shards() if shard.numel()]
    for dim, extent in enumerate(local.shape if len(sizes) > 1 else ()):
        extents = [shape[dim] for shape in sizes if dim < len(shape)]
        if sum(extents) == extent:
            return list(local.split(extents, dim))
    return [local] if local.numel() else []


def described_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a view of a DTensor with the chunk description of ``other``, if ``other`` has one and is sharded alike."""
    if not is_dtensor(tensor) or not is_dtensor(other) or _description(tensor) is not None:
        return tensor
    describe = _description(other)
    if describe is None or (tensor.shape, tensor.placements) != (other.shape, other.placements):
        return tensor
    view = tensor.detach()
    setattr(view._local_tensor, CHUNK_LIST, describe)  # type: ignore[attr-defined] # a DTensor too
    return view


def local_boxes(key: str, tensor: DTensor) -> list[tuple[Box, Box]]:
    """List (box of the global tensor, box of the local tensor) for each piece that this rank holds.

    Raises InvalidInput for Partial placements, for a local tensor of an unexpected shape, and see `_check_strides`.
    """
    check_added_up(key, tensor)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    shards: dict[int, list[tuple[int, int, int]]] = {}  # tensor dimension -> (mesh size, coordinate, split factor)
    for mesh_dim in _mesh_order(key, tensor):
        placement = tensor.placements[mesh_dim]
        dim = getattr(placement, "dim", None)
        if dim is not None:
            factor = int(getattr(placement, "split_factor", 1))
            shards.setdefault(dim, []).append((mesh.size(mesh_dim), coordinate[mesh_dim], factor))
    shape, local = tuple(tensor.shape), tuple(tensor._local_tensor.shape)
    indices = [_held(extent, shards.get(dim, [])) for dim, extent in enumerate(shape)]
    if not all(map(len, indices)) and 0 in local:
        return []  # in FSDP2, the shape of an empty local tensor may differ from the one that its placements imply
    if tuple(len(held) for held in indices) != local:
        raise InvalidInput(
            f"{key!r}: a DTensor of shape {list(shape)} with placements {tensor.placements} has a local tensor of "
            f"shape {list(local)} here instead of {[len(held) for held in indices]}; casckpt cannot tell which "
            f"elements these are",
            key=key,
        )
    _check_strides(key, tensor, shards)
    return boxes_of(indices)


def check_added_up(key: str, tensor: DTensor) -> None:
    """Raise InvalidInput for a Partial placement."""
    for placement in tensor.placements:
        if getattr(placement, "dim", None) is None and not placement.is_replicate():
            raise InvalidInput(
                f"{key!r}: a DTensor with placement {placement} holds partial sums; redistribute it to Shard or "
                f"Replicate first",
                key=key,
            )


def _check_strides(key: str, tensor: DTensor, shards: Mapping[int, Sequence[tuple[int, int, int]]]) -> None:
    """Raise InvalidInput for uneven strided shards that torch before 2.10 splits in a different order than FSDP2.

    FSDP2 itself creates them since 2.8, always on a mesh whose dimensions have names.
    """
    if torch.__version__ >= "2.10" or (torch.__version__ >= "2.8" and tensor.device_mesh.mesh_dim_names):
        return
    for dim, splits in shards.items():
        ranks = prod(size for size, _, _ in splits)
        if tensor.shape[dim] % ranks and any(factor > 1 for _, _, factor in splits):
            raise InvalidInput(
                f"{key!r}: torch {torch.__version__} may split a DTensor of shape {list(tensor.shape)} with placements "
                f"{tensor.placements} in two ways, because {ranks} ranks do not divide dimension {dim} evenly; upgrade "
                f"torch to 2.10 or later",
                key=key,
            )


def _mesh_order(key: str, tensor: DTensor) -> Sequence[int]:
    """Return the mesh dimensions in sharding order: from left to right, unless the spec defines an order.

    Raises InvalidInput for a mesh of Megatron-FSDP, which shards in a different order than its spec says.
    """
    dims = [dim for placement in tensor.placements if (dim := getattr(placement, "dim", None)) is not None]
    if len(set(dims)) < len(dims) and hasattr(tensor.device_mesh, "_shard_order"):
        raise InvalidInput(
            f"{key!r}: a DTensor of Megatron-FSDP does not say which elements it holds; call "
            f"preprocess_state_dict_for_uneven_dtensor on the state first. It is in megatron_fsdp.uneven_dtensor, "
            f"which is under megatron.core.distributed.fsdp.src in Megatron-core",
            key=key,
        )
    if any(hasattr(placement, "split_factor") for placement in tensor.placements):
        return range(len(tensor.placements))  # the strides define the order; the spec of torch 2.10 repeats it
    entries = getattr(tensor._spec, "shard_order", None) or ()
    return [mesh_dim for entry in entries for mesh_dim in entry.mesh_dims] or range(len(tensor.placements))


def boxes_of(indices: Sequence[Ints]) -> list[tuple[Box, Box]]:
    """Return (global box, local box) for every combination of runs of consecutive indices across dimensions."""
    runs = [_runs(held) for held in indices]
    boxes = []
    for combination in product(*runs):
        shape: Shape = tuple(count for _, _, count in combination)
        offset = tuple(start for start, _, _ in combination)
        boxes.append((Box(offset, shape), Box(tuple(at for _, at, _ in combination), shape)))
    return boxes


def _held(extent: int, shards: Sequence[tuple[int, int, int]]) -> Ints:
    """Compute the indices in one dimension that this rank holds."""
    held = np.arange(extent)
    for size, coordinate, _ in _in_order(shards):
        chunk = -(-len(held) // size)  # as in torch.chunk: equal chunks, except that the last ones are shorter or empty
        held = held[coordinate * chunk : (coordinate + 1) * chunk]
    return held


def _in_order(shards: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Order mesh dimensions as FSDP2 splits them: a strided shard comes after those that its split factor counts."""
    order: list[tuple[int, int, int]] = []
    for shard in reversed(shards):
        at, counted = 0, 1
        while counted < shard[2] and at < len(order):
            counted *= order[at][0]
            at += 1
        if counted != shard[2]:
            raise InvalidInput(
                f"a strided shard has split factor {shard[2]}, which does not match the mesh sizes "
                f"{[s[0] for s in shards]}"
            )
        order.insert(at, shard)
    return order


def _runs(held: Ints) -> list[tuple[int, int, int]]:
    """Return (first index, position, count) for each run of consecutive indices."""
    if not len(held):
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(held) != 1) + 1])
    ends = np.concatenate([starts[1:], [len(held)]])
    return [(int(held[a]), int(a), int(b - a)) for a, b in zip(starts, ends, strict=True)]
