"""The sharded tensors of other libraries. They are recognized by their attributes, without importing the libraries.

- Megatron's ShardedTensor: ``data`` of ``local_shape``, at ``global_offset`` in ``global_shape``. The data lacks the
  first ``prepend_axis_num`` axes, which have size 1. With a ``flattened_range``, ``data`` is that slice of the
  flattened part.
- torch's ShardedTensor: several boxes of a tensor of shape ``size()``. Their data may itself be a ShardedTensor (FSDP
  over tensor parallel).
- OLMo-core's ShardedFlatTensor: ``sharded_data`` holds the ranges ``unsharded_flattened_offsets`` of the flattened
  tensor of ``unsharded_shape``, one after the other.
"""

from __future__ import annotations

import warnings
from math import prod
from typing import Any

import torch

from casckpt.errors import InvalidInput
from casckpt.format.regions import Box, Region, Shape, full_box
from casckpt.tensors.dtensors import CHUNK_LIST, local_of
from casckpt.tensors.values import Shard

_MEGATRON = ("key", "data", "replica_id", "local_shape", "global_shape", "global_offset", "prepend_axis_num")


def is_megatron_tensor(value: Any) -> bool:
    """Return whether ``value`` is a Megatron-style ShardedTensor: either Megatron-core's own or casckpt's."""
    return not isinstance(value, torch.Tensor | type) and all(hasattr(value, name) for name in _MEGATRON)


def parts_of(key: str, value: torch.Tensor) -> list[Shard] | None:
    """Return the parts of a ShardedTensor or a ShardedFlatTensor that this process holds, or None for other tensors.

    Raises InvalidInput if the tensor's sharding is not known yet, or if its offsets and sizes do not match its data.
    """
    if type(value) in (torch.Tensor, torch.nn.Parameter) or hasattr(value, CHUNK_LIST):
        return None
    try:
        if callable(getattr(value, "local_shards", None)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # ShardedTensor is deprecated
                return _boxes_of(value)
        if not hasattr(type(value), "unsharded_flattened_offsets"):
            return None
        flat: Any = value
        if not flat.metadata_set:
            raise InvalidInput("its sharding is not known yet: call its mark_as_sharded() first")
        return [Shard(flat.sharded_data, flat.unsharded_shape, flat=list(flat.unsharded_flattened_offsets))]
    except InvalidInput as error:
        raise InvalidInput(f"{key!r}: {error}", key=key) from error


def _boxes_of(sharded: Any) -> list[Shard]:
    shards = []
    for shard in sharded.local_shards():
        offset, shape = tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)
        inner = _boxes_of(shard.tensor) if callable(getattr(shard.tensor, "local_shards", None)) else None
        for part in [Shard(shard.tensor, shape)] if inner is None else inner:
            begin = [a + b for a, b in zip(offset, part.offset, strict=True)]
            shards.append(Shard(part.data, tuple(sharded.size()), begin, part.shape))
    return shards


def flat_range(tensor: Any) -> range | None:
    """Return the range of its flattened part that a Megatron-style tensor holds, or None if it holds the whole part."""
    flat = getattr(tensor, "flattened_range", None)
    return None if flat is None else range(prod(tensor.local_shape))[flat]


def megatron_region(tensor: Any) -> Region:
    """Return the region of a Megatron-style tensor. Raises InvalidInput if it is outside the global shape."""
    box = Box(tuple(tensor.global_offset), (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape))
    if not box.inside(full_box(tuple(tensor.global_shape))):
        raise InvalidInput(
            f"{tensor.key!r}: a part at {list(box.offset)} of shape {list(box.shape)} is outside the global shape "
            f"{list(tensor.global_shape)}",
            key=tensor.key,
        )
    flat = flat_range(tensor)
    return Region(box, 0, box.numel) if flat is None else Region(box, flat.start, max(flat.start, flat.stop))


def megatron_data(tensor: Any, data: Any) -> torch.Tensor:
    """Return a view of a Megatron-style tensor's ``data``, either flat or with the shape of its box."""
    local = local_of(data).detach()
    as_it_is = flat_range(tensor) is not None or not tensor.prepend_axis_num
    return local if as_it_is else local[(None,) * tensor.prepend_axis_num]


def megatron_shard(tensor: Any, data: Any = None, *, replicated: bool = False) -> Shard:
    """Convert a Megatron-style tensor to a `Shard` of ``data``, by default of its own data.

    Raises InvalidInput if there is no data.
    """
    data = tensor.data if data is None else data
    if data is None:
        raise InvalidInput(f"the data of {tensor.key!r} is None; set its data", key=tensor.key)
    region, flat = megatron_region(tensor), flat_range(tensor)
    try:
        return Shard(
            megatron_data(tensor, data),
            tuple(tensor.global_shape),
            region.box.offset,
            region.box.shape,
            None if flat is None else (region.lo, region.hi),
            replicated=replicated,
        )
    except InvalidInput as error:
        raise InvalidInput(f"{tensor.key!r}: {error}", key=tensor.key) from error


def part_shape(shape: Shape, stored: Shape) -> Shape | None:
    """Return the shape of the parts in which a tensor was stored, or None if it was not stored in parts.

    Megatron-core up to 0.15 stores a flat tensor of shape [X, Y], in parts of [x, y], as [X/x, Y/y, x*y].
    """
    if len(stored) != len(shape) + 1 or not prod(stored):
        return None
    if any(extent % count for extent, count in zip(shape, stored[:-1], strict=True)):
        return None
    part = tuple(extent // count for extent, count in zip(shape, stored[:-1], strict=True))
    return part if prod(part) == stored[-1] else None
