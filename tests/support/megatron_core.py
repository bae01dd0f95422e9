"""The real Megatron-core: imported where a test needs it, since that takes seconds and warns."""

from __future__ import annotations

import dataclasses
import warnings
from importlib import import_module
from typing import Any

from casckpt.frontends import megatron


def core(name: str = "") -> Any:
    """A module of ``megatron.core.dist_checkpointing``, or the package itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("megatron.core.dist_checkpointing.strategies.torch")
        import_module("casckpt.frontends.megatron.strategies")
        return import_module(f"megatron.core.dist_checkpointing{name}")


def theirs(state: Any) -> Any:
    """A sharded state dict with objects of Megatron-core in place of ours."""
    mapping = core(".mapping")

    def converted(leaf: Any) -> Any:
        if isinstance(leaf, megatron.LocalNonpersistentObject):
            return mapping.LocalNonpersistentObject(leaf.unwrap())
        if not isinstance(leaf, megatron.ShardedBase):
            return leaf
        values = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}  # type: ignore[arg-type]
        if isinstance(leaf, megatron.ShardedTensorFactory):
            values["build_fn"] = lambda *arguments: theirs(leaf.build_fn(*arguments))
        return getattr(mapping, type(leaf).__name__)(**values)

    return megatron.dict_list_map_outplace(converted, state)
