"""The kinds of values in a sharded state dict: checks for a kind, extraction by kind, and new keys for sharded values.

A value's attributes determine its kind, so both our classes and Megatron-core's work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from casckpt.frontends.megatron.errors import CheckpointingException
from casckpt.frontends.megatron.nesting import Nested, dict_list_map_inplace, extract_matching_values
from casckpt.tensors.foreign import is_megatron_tensor

is_sharded_tensor = is_megatron_tensor
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
    """Return whether the value is a shard of an object."""
    return _has_key_and(value, _OBJECT) and not hasattr(value, "local_shape")


def is_factory(value: Any) -> bool:
    """Return whether the value is a factory of sharded tensors."""
    return _has_key_and(value, _FACTORY)


def is_sharded_base(value: Any) -> bool:
    """Return whether the value is a sharded tensor, a shard of an object, or a factory."""
    return is_sharded_tensor(value) or is_sharded_object(value) or is_factory(value)


def is_nonpersistent(value: Any) -> bool:
    """Return whether the value is excluded from saves. Only the name of its class reveals that."""
    return any(kind.__name__ in _NONPERSISTENT for kind in type(value).__mro__) and hasattr(value, "unwrap")


def extract_sharded_tensors(sharded_state_dict: Nested) -> tuple[Nested, Nested]:
    """Return (sharded tensors, the rest), each in the hierarchy of the whole; see `extract_matching_values`."""
    return extract_matching_values(sharded_state_dict, is_sharded_tensor)


def extract_sharded_tensors_and_factories(sharded_state_dict: Nested) -> tuple[Nested, Nested]:
    """Return (sharded tensors and factories, the rest)."""
    return extract_matching_values(sharded_state_dict, lambda value: is_sharded_tensor(value) or is_factory(value))


def extract_sharded_tensors_or_nonpersistent(sharded_state_dict: Nested) -> tuple[Nested, Nested]:
    """Return (sharded tensors, factories and values that are not saved, the rest)."""
    return extract_matching_values(
        sharded_state_dict, lambda value: is_sharded_tensor(value) or is_factory(value) or is_nonpersistent(value)
    )


def extract_sharded_base(sharded_state_dict: Nested) -> tuple[Nested, Nested]:
    """Return (values with a key: tensors, objects and factories; the rest)."""
    return extract_matching_values(sharded_state_dict, is_sharded_base)


def extract_nonpersistent(sharded_state_dict: Nested) -> tuple[Nested, Nested]:
    """Return (values that are not saved, the rest)."""
    return extract_matching_values(sharded_state_dict, is_nonpersistent)


def add_prefix_for_sharding(sharded_state_dict: Nested, prefix: str) -> None:
    """Prepend ``prefix`` to every key, in place."""
    _rekey(sharded_state_dict, lambda key: f"{prefix}{key}")


def replace_prefix_for_sharding(sharded_state_dict: Nested, old_prefix: str, new_prefix: str) -> None:
    """Replace the prefix of every key, in place. Raises CheckpointingException (a ValueError) if a key lacks it."""

    def replaced(key: str) -> str:
        if not key.startswith(old_prefix):
            raise CheckpointingException(f"{key!r} does not begin with {old_prefix!r}", key=key)
        return f"{new_prefix}{key.removeprefix(old_prefix)}"

    _rekey(sharded_state_dict, replaced)


def apply_prefix_mapping(sharded_state_dict: Nested, prefix_map: Mapping[str, str]) -> None:
    """Replace the first matching prefix from ``prefix_map`` (old to new) in each key, in place.

    Other keys are unchanged.
    """

    def replaced(key: str) -> str:
        for old, new in prefix_map.items():
            if key.startswith(old):
                return f"{new}{key.removeprefix(old)}"
        return key

    _rekey(sharded_state_dict, replaced)


def _rekey(sharded_state_dict: Nested, rename: Callable[[str], str]) -> None:
    def rekeyed(value: Any) -> Any:
        if is_sharded_base(value):
            value.key = rename(value.key)
        return value

    dict_list_map_inplace(rekeyed, sharded_state_dict)
