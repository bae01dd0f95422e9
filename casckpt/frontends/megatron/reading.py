"""Loads parts of a checkpoint without a sharded state dict. Each process reads by itself."""

from __future__ import annotations

from typing import Any

import torch

from casckpt.frontends.megatron.errors import ShardedKeyMissing, checkpointing_errors
from casckpt.frontends.megatron.kinds import is_sharded_object
from casckpt.frontends.megatron.mapping import ShardedObject, ShardedTensor
from casckpt.frontends.megatron.nesting import Nested, dict_list_map_inplace, nested_values
from casckpt.frontends.megatron.place import CheckpointDir, place_of
from casckpt.frontends.megatron.stored import MegatronCheckpoint, ReadRequest, read_values
from casckpt.tensors.dtypes import torch_dtype

CONTENT_METADATA = "content_metadata"


def load_common_state_dict(checkpoint_dir: CheckpointDir, *, allow_pickle: bool = False) -> dict[Any, Any]:
    """Load the common part: all values that are not sharded, nested as they were saved.

    Raises CheckpointingException (also a NotFound) if there is no checkpoint, or for a pickle without ``allow_pickle``.
    """
    with checkpointing_errors():
        return read_common(MegatronCheckpoint.read(place_of(checkpoint_dir), common=True), allow_pickle)


def read_common(stored: MegatronCheckpoint, allow_pickle: bool) -> dict[Any, Any]:
    """See `load_common_state_dict`."""
    return stored.common(read_values(stored, stored.common_keys, allow_pickle=allow_pickle), allow_pickle)


def load_content_metadata(
    checkpoint_dir: CheckpointDir | None = None,
    *,
    preloaded_state_dict: dict[str, Any] | None = None,
    allow_pickle: bool = False,
) -> dict[str, Any] | None:
    """The ``content_metadata`` given to `save`, or None; read from a checkpoint or from a loaded state dict.

    Raises as `load_common_state_dict`.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ValueError("give a checkpoint_dir, or a preloaded_state_dict")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir, allow_pickle=allow_pickle)
    return preloaded_state_dict.get(CONTENT_METADATA)


def load_plain_tensors(checkpoint_dir: CheckpointDir) -> dict[str, torch.Tensor]:
    """Load all sharded tensors whole into new memory, by key, without the common part."""
    with checkpointing_errors():
        stored = MegatronCheckpoint.read(place_of(checkpoint_dir))
        return read_values(stored, stored.tensors)


def load_tensors_metadata(checkpoint_dir: CheckpointDir, sharded_strategy: Any = None) -> dict[str, ShardedTensor]:
    """A whole ShardedTensor without data for each sharded tensor, by key, for its shape and dtype."""
    with checkpointing_errors():
        return tensors_metadata(MegatronCheckpoint.read(place_of(checkpoint_dir)))


def tensors_metadata(stored: MegatronCheckpoint, kind: Any = ShardedTensor) -> dict[str, Any]:
    """See `load_tensors_metadata`. ``kind``: the class of the result."""
    metadata = {}
    for key, entry in stored.tensors.items():
        whole = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="meta")
        metadata[key] = kind.from_rank_offsets(key, whole).without_data()
    return metadata


def load_sharded_metadata(
    checkpoint_dir: CheckpointDir, sharded_strategy: Any = None, common_strategy: Any = None
) -> dict[str, ShardedTensor | ShardedObject]:
    """As `load_tensors_metadata`, with a ShardedObject without data for each shard of an object, by unique key."""
    with checkpointing_errors():
        stored = MegatronCheckpoint.read(place_of(checkpoint_dir))
        return {**tensors_metadata(stored), **stored.objects}


def load_sharded_objects(
    sharded_state_dict: Nested, checkpoint_dir: CheckpointDir, *, allow_pickle: bool = False
) -> None:
    """Replace every ShardedObject of a state dict by its value, in place. Other values stay.

    Raises CheckpointingException (also a MissingKey) that names key and shard, before anything changes.
    """
    with checkpointing_errors():
        stored = MegatronCheckpoint.read(place_of(checkpoint_dir))
        request = ReadRequest()
        wanted = [value for value in nested_values(sharded_state_dict) if is_sharded_object(value)]
        values = {id(value): stored.ask_for(request, object_key(stored, value)) for value in wanted}
        request.run(stored, no_dist=True, allow_pickle=allow_pickle)
    dict_list_map_inplace(lambda x: values[id(x)]() if id(x) in values else x, sharded_state_dict)


def object_key(stored: MegatronCheckpoint, wanted: Any) -> str:
    """The flat key of the value for a ShardedObject. Raises ShardedKeyMissing that names key and shard."""
    key = stored.object_key(wanted)
    if key is None:
        shards = [shard for shard in stored.objects.values() if shard.key == wanted.key]
        have = [f"{shard.global_offset} of {shard.global_shape}" for shard in shards]
        raise ShardedKeyMissing(
            f"{stored.where} lacks the object {wanted.key!r} at {wanted.global_offset} of {wanted.global_shape}; "
            + (f"it has it at {', '.join(have[:5])}" if have else "it has no object of that key"),
            key=wanted.key,
            keys=(wanted.unique_key,),
        )
    return key
