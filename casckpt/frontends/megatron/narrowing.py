"""A part of a part: `ShardedTensor.narrow`, which the factories of Megatron's Mamba and GatedDeltaNet layers call."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, TypeVar

from casckpt.frontends.megatron.errors import CheckpointingException

if TYPE_CHECKING:
    from casckpt.frontends.megatron.mapping import ShardedTensor

    Part = TypeVar("Part", bound=ShardedTensor)


def narrowed(part: Part, dim: int, start: int, length: int) -> list[Part]:
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


def _check(part: ShardedTensor, dim: int, start: int, length: int) -> None:
    """Raise CheckpointingException for what cannot be narrowed so."""
    if not 0 <= dim < len(part.local_shape):
        raise _refused(part, f"it has {len(part.local_shape)} axes, and dim is {dim}")
    extent, axis = part.local_shape[dim], dim + part.prepend_axis_num
    if min(start, length) < 0 or start + length > extent:
        raise _refused(part, f"{length} elements from {start} on are not within the {extent} of axis {dim}")
    if not extent or part.global_shape[axis] % extent or part.global_offset[axis] % extent:
        raise _refused(part, f"parts are not cut evenly along axis {dim}")
    if part.flattened_range is not None and dim != 0:
        raise _refused(part, f"flat data is narrowed along the first axis alone, not along {dim}")


def _refused(part: ShardedTensor, why: str) -> CheckpointingException:
    return CheckpointingException(f"{part.key!r} cannot be narrowed: {why}", key=part.key)


def _with(shape: tuple[int, ...], axis: int, extent: int) -> tuple[int, ...]:
    return (*shape[:axis], extent, *shape[axis + 1 :])
