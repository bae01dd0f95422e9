"""The pieces of a leaf: the regions of a global tensor that this process holds, and their data."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from casckpt.errors import InvalidInput
from casckpt.format.light import LightStruct
from casckpt.format.regions import Region, Shape, whole
from casckpt.tensors.dtensors import CHUNK_LIST, described_shards, is_dtensor, local_boxes
from casckpt.tensors.dtypes import dtype_name
from casckpt.tensors.foreign import is_megatron_tensor, megatron_shard, parts_of
from casckpt.tensors.kinds import PLAIN
from casckpt.tensors.memory import Block, block_of, has_memory, narrow
from casckpt.tensors.values import Shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
"""The names of buffers in torch's norm modules."""
_EXTRA_STATE = "_extra_state"
_MOST_BYTES = 1 << 48  # no host has more memory, so the elements of a larger tensor share memory


class Piece(LightStruct, frozen=True):
    """The local data of one region: a tensor with the box's shape, or flat if the region is only a part of the box."""

    region: Region
    data: torch.Tensor


class LocalTensor(LightStruct, frozen=True):
    """The part of a tensor that this process holds. ``shape``: the global tensor's shape.

    ``data``: the whole tensor, or None if this process holds only ``shards`` of it, of which there may be none.
    ``replicated``: whether it is expected to be equal on all ranks that hold it. If so, these ranks share the writing.
    ``block``: see `plain_block`.
    """

    key: str
    dtype: torch.dtype
    shape: Shape
    data: torch.Tensor | None
    shards: Sequence[Piece] = ()
    replicated: bool = False
    block: Block | None = None

    @property
    def pieces(self) -> Sequence[Piece]:
        """The pieces that this process holds."""
        return self.shards if self.data is None else (Piece(whole(self.shape), self.data),)


def data_and_shards(shape: Shape, pieces: Sequence[Piece]) -> tuple[torch.Tensor | None, Sequence[Piece]]:
    """Return pieces as the fields of a `LocalTensor`."""
    return (pieces[0].data, ()) if len(pieces) == 1 and pieces[0].region == whole(shape) else (None, pieces)


def plain_block(leaf: Any) -> Block | None:
    """Return the memory of a leaf that is not sharded and can be stored as it is, like most. None: not known."""
    is_plain = type(leaf) in PLAIN and not hasattr(leaf, CHUNK_LIST) and not hasattr(leaf, "ds_id")
    return block_of(leaf) if is_plain else None


def local_tensor(key: str, leaf: Any) -> LocalTensor:
    """Return a leaf's pieces. Raises an InvalidInput that names the key for a tensor without bytes of its own."""
    block = plain_block(leaf)
    if block is None:
        is_whole = type(leaf) in PLAIN and not hasattr(leaf, CHUNK_LIST)
        if not is_whole and (local := _sharded(key, leaf)) is not None:
            return local
        check_storable(key, leaf)
    is_parameter = type(leaf) is not torch.Tensor and isinstance(leaf, torch.nn.Parameter)
    return LocalTensor(key, leaf.dtype, tuple(leaf.shape), leaf, (), is_parameter, block)


def _sharded(key: str, leaf: Any) -> LocalTensor | None:
    """Return the pieces of a leaf of which this process may hold only a part. Return None for a whole tensor."""
    if not isinstance(leaf, torch.Tensor):
        return _from_shards(key, _shards(key, leaf))
    described = described_shards(key, leaf)
    if described is None and is_dtensor(leaf):
        return _from_dtensor(key, leaf)
    parts = parts_of(key, leaf) if described is None else described
    if parts is None:
        return None
    if parts:
        return _from_shards(key, parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ShardedTensor is deprecated
        return LocalTensor(key, leaf.dtype, tuple(leaf.size()), None)


def may_differ(leaf: Any, local: LocalTensor) -> bool:
    """Return whether ranks may hold different values of a leaf.

    If so, a save stores one rank's values without an error.

    This applies to single numbers, extra state, buffers (`torch.nn.Buffer`, and the statistics of norm layers, which
    are recognized by name), and tensors that are not parameters and whose dtype is neither float nor complex. Any
    other leaf counts as a parameter or its optimizer state, because a module's state_dict does not distinguish other
    buffers from parameters.
    """
    *_, last = names = local.key.split(".")
    is_buffer = isinstance(leaf, torch.nn.Buffer) or last in _STATISTICS or _EXTRA_STATE in names
    is_parameter = local.replicated or local.dtype.is_floating_point or local.dtype.is_complex
    return is_buffer or not is_parameter or prod(local.shape) <= 1


def _shards(key: str, leaf: Any) -> list[Shard]:
    if isinstance(leaf, torch.Tensor):
        return [] if is_dtensor(leaf) else parts_of(key, leaf) or []
    if is_megatron_tensor(leaf):  # Megatron's replicas are equal by definition
        return [megatron_shard(leaf, replicated=True)]
    return [leaf] if isinstance(leaf, Shard) else list(leaf)


def _from_dtensor(key: str, leaf: DTensor) -> LocalTensor:
    local = leaf.to_local()
    if local.numel():
        check_storable(key, local)
    pieces = [
        Piece(Region(box, 0, box.numel), narrow(local, inner)) for box, inner in local_boxes(key, leaf) if box.numel
    ]
    return LocalTensor(key, leaf.dtype, tuple(leaf.shape), *data_and_shards(tuple(leaf.shape), pieces), replicated=True)


def _from_shards(key: str, shards: Sequence[Shard]) -> LocalTensor:
    shapes = {shard.global_shape for shard in shards}
    dtypes = {shard.data.dtype for shard in shards}
    if len(shapes) != 1 or len(dtypes) != 1:
        raise InvalidInput(
            f"{key!r}: the shards of this key differ in global shape ({sorted(shapes)}) or dtype "
            f"({sorted(map(str, dtypes))}); they must describe a single tensor",
            key=key,
        )
    pieces = []
    for shard in shards:
        check_storable(key, shard.data)
        pieces += _shard_pieces(shard)
    replicated = all(shard.replicated for shard in shards)
    shape = shards[0].global_shape
    return LocalTensor(key, shards[0].data.dtype, shape, *data_and_shards(shape, pieces), replicated)


def _shard_pieces(shard: Shard) -> list[Piece]:
    regions = shard.regions()
    if regions and regions[0].is_whole:
        return [Piece(regions[0], shard.data.reshape(regions[0].box.shape))]
    flat = shard.data.reshape(-1)
    pieces, start = [], 0
    for region in regions:
        pieces.append(Piece(region, flat[start : start + region.numel]))
        start += region.numel
    return pieces


def check_storable(key: str, data: torch.Tensor) -> None:
    """Raise InvalidInput, with advice, for a tensor whose bytes cannot be stored directly."""
    problem = _problem(data)
    if problem:
        raise InvalidInput(f"{key!r}: {problem}", key=key)


def inner_names(data: Any) -> list[str]:
    """Return the names of the tensors inside a wrapper tensor. Other tensors, including nested ones, have none."""
    if type(data) in PLAIN or data.is_nested or not hasattr(data, "__tensor_flatten__"):
        return []
    return list(map(str, data.__tensor_flatten__()[0]))


def _problem(data: Any) -> str | None:
    is_plain = type(data) in PLAIN
    if not is_plain and is_lazy(data):
        return "an uninitialized parameter has no shape yet; first run the module once, or fill the parameter"
    if not is_plain and (inner := inner_names(data)):
        return (
            f"a {type(data).__name__} consists of other tensors ({', '.join(inner)}), and cannot be stored here; store "
            f"these in its place"
        )
    if data.is_meta:
        return (
            "a meta tensor has no values; for a load, call module.to_empty(device=...), tie its tied weights again, "
            "and fill the buffers that are not in its state_dict. For a save, fill the module. If accelerate offloaded "
            "it, load the model without device_map"
        )
    if hasattr(data, "ds_id") and data.shape != getattr(data, "ds_shape", data.shape):
        return (
            f"this is a placeholder of DeepSpeed's ZeRO-3 for a tensor of shape {list(data.ds_shape)}, which has no "
            f"elements here; save and load inside deepspeed.zero.GatheredParameters, or with DeepSpeed's "
            f"save_checkpoint, whose folders `casckpt import --format files` stores"
        )
    if data.is_nested:
        parts = "the tensors that it unbinds to" if data.layout is torch.strided else "its values() and offsets()"
        return f"a nested tensor cannot be stored directly; store {parts}"
    if data.layout is not torch.strided:
        return f"a tensor of layout {data.layout} cannot be stored directly; store to_dense()"
    if data.is_quantized:
        per_tensor = data.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
        scales = (
            "q_scale() and q_zero_point()" if per_tensor else "q_per_channel_scales() and q_per_channel_zero_points()"
        )
        return f"a quantized tensor cannot be stored directly; store int_repr() with {scales}"
    dtype_name(data.dtype)
    is_fine = not data.numel() or has_memory(data)
    advice = "store the tensors that it wraps, or pass a flatten for its class to casckpt.register_wrapper"
    return _size_problem(data) if is_fine else f"a {type(data).__name__} has no memory of its own; {advice}"


def _size_problem(data: torch.Tensor) -> str | None:
    if data.numel() * data.element_size() > _MOST_BYTES:
        return f"an expanded tensor of shape {list(data.shape)} is too large to be stored; store it before expand"
    last = data.storage_offset() + sum((n - 1) * stride for n, stride in zip(data.shape, data.stride(), strict=True))
    held, need = data.untyped_storage().nbytes(), (last + 1) * data.element_size()
    if held < need and data.numel():
        return f"its storage was resized to {held} bytes, but its elements need {need}; resize the storage back first"
    return None


def check_in_place(key: str, leaf: Any) -> None:
    """Raise InvalidInput for a flat `Shard` whose data has no flat view, because a load would only fill a copy."""
    if type(leaf) in PLAIN:
        return
    for shard in _shards(key, leaf):
        if shard.data.is_contiguous():  # every reshape of contiguous data is a view
            continue
        memory = shard.data.untyped_storage().data_ptr()
        if any(piece.data.untyped_storage().data_ptr() != memory for piece in _shard_pieces(shard)):
            raise InvalidInput(
                f"{key!r}: the data of a flat Shard has strides {list(shard.data.stride())}, so a load cannot fill "
                f"it; pass contiguous data",
                key=key,
            )


def check_destination(key: str, data: torch.Tensor) -> None:
    """Raise InvalidInput for a tensor that cannot be the target of a load."""
    check_storable(key, data)
    check_apart(key, data)


def check_apart(key: str, data: torch.Tensor) -> None:
    """Raise InvalidInput for a tensor whose elements share memory."""
    if data.is_contiguous():
        return
    reach = 1
    for stride, extent in sorted((s, n) for s, n in zip(data.stride(), data.shape, strict=True) if n > 1):
        if stride < reach and data.numel():
            raise InvalidInput(
                f"{key!r}: the elements of an expanded tensor share memory, so a load cannot fill it; pass a "
                f"contiguous one",
                key=key,
            )
        reach += (extent - 1) * stride
