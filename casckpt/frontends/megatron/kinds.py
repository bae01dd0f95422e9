"""What a value of a sharded state dict is, told by its attributes: of ours and of Megatron-core's own classes alike."""

from __future__ import annotations

from typing import Any

import torch

from casckpt.tensors.foreign import is_megatron_tensor as is_sharded_tensor

_OBJECT = ("unique_key", "global_shape", "global_offset")
_FACTORY = ("build_fn", "merge_fn")
_NONPERSISTENT = frozenset(("LocalNonpersistentObject", "LocalNonpersitentObject"))


def _has_key_and(value: Any, names: tuple[str, ...]) -> bool:
    if isinstance(value, torch.Tensor | type):
        return False
    if not isinstance(getattr(value, "key", None), str) or not hasattr(value, "replica_id"):
        return False
    return all(hasattr(value, name) for name in names)


def is_sharded_object(value: Any) -> bool:
    """Is it a shard of an object?"""
    return _has_key_and(value, _OBJECT) and not hasattr(value, "local_shape")


def is_factory(value: Any) -> bool:
    """Is it a factory of sharded tensors?"""
    return _has_key_and(value, _FACTORY)


def is_sharded_base(value: Any) -> bool:
    """Is it one of these three?"""
    return is_sharded_tensor(value) or is_sharded_object(value) or is_factory(value)


def is_nonpersistent(value: Any) -> bool:
    """Is it what is not saved? Its class has no attribute that tells, so it is known by name."""
    return any(kind.__name__ in _NONPERSISTENT for kind in type(value).__mro__) and hasattr(value, "unwrap")


__all__ = ["is_factory", "is_nonpersistent", "is_sharded_base", "is_sharded_object", "is_sharded_tensor"]
