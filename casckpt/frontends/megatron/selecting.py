"""Parts of a sharded state dict by what they are, and other keys for what is sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from casckpt.frontends.megatron.errors import CheckpointingException
from casckpt.frontends.megatron.kinds import is_factory, is_nonpersistent, is_sharded_base, is_sharded_tensor
from casckpt.frontends.megatron.nesting import Nested, dict_list_map_inplace, extract_matching_values


def extract_sharded_tensors(sharded_state_dict: Nested) -> tuple[Nested, Nested]:
    """(sharded tensors, the rest), each in the hierarchy of the whole; see `extract_matching_values`."""
    return extract_matching_values(sharded_state_dict, is_sharded_tensor)


def extract_sharded_tensors_and_factories(sharded_state_dict: Nested) -> tuple[Nested, Nested]:
    """(sharded tensors and factories, the rest)."""
    return extract_matching_values(sharded_state_dict, lambda value: is_sharded_tensor(value) or is_factory(value))


def extract_sharded_tensors_or_nonpersistent(sharded_state_dict: Nested) -> tuple[Nested, Nested]:
    """(sharded tensors, factories and what is not saved, the rest)."""
    return extract_matching_values(
        sharded_state_dict, lambda value: is_sharded_tensor(value) or is_factory(value) or is_nonpersistent(value)
    )


def extract_sharded_base(sharded_state_dict: Nested) -> tuple[Nested, Nested]:
    """(all that has a key: tensors, objects and factories, the rest)."""
    return extract_matching_values(sharded_state_dict, is_sharded_base)


def extract_nonpersistent(sharded_state_dict: Nested) -> tuple[Nested, Nested]:
    """(what is not saved, the rest)."""
    return extract_matching_values(sharded_state_dict, is_nonpersistent)


def add_prefix_for_sharding(sharded_state_dict: Nested, prefix: str) -> None:
    """Put ``prefix``, as it is, before every key, in place."""
    _rekey(sharded_state_dict, lambda key: f"{prefix}{key}")


def replace_prefix_for_sharding(sharded_state_dict: Nested, old_prefix: str, new_prefix: str) -> None:
    """Replace the prefix of every key, in place. Raises CheckpointingException (a ValueError) if one lacks it."""

    def replaced(key: str) -> str:
        if not key.startswith(old_prefix):
            raise CheckpointingException(f"{key!r} does not begin with {old_prefix!r}", key=key)
        return f"{new_prefix}{key.removeprefix(old_prefix)}"

    _rekey(sharded_state_dict, replaced)


def apply_prefix_mapping(sharded_state_dict: Nested, prefix_map: Mapping[str, str]) -> None:
    """Replace the first prefix of ``prefix_map`` (old to new) that a key begins with, in place; other keys stay."""

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
