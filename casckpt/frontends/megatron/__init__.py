"""Saves and loads Megatron-style sharded state dicts: the API of ``megatron.core.dist_checkpointing`` on a store.

::

    from casckpt.frontends.megatron import ShardedTensor, load, save

    state = {"w": ShardedTensor.from_rank_offsets("w", part, (0, tp_rank, tp_size)), "iteration": 100}
    save(state, "ckpts#sft@100")                      # STORE#RUN@STEP, or casckpt.at(store, run="sft", step=100)
    state = load(state, "ckpts#sft@latest")           # in any other parallel configuration

A checkpoint contains each sharded tensor as a whole under its key, each shard of an object under its unique key, and
the common part under its keys in the state dict. Every other front end can load such a checkpoint, and this one can
load theirs.

Megatron-core itself is not required. The functions also accept its objects, and its own ``save`` and ``load`` accept
`CasSaveShardedStrategy` and `CasLoadShardedStrategy`; `install` makes its training loop use them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from casckpt.frontends.megatron.claims import validate_sharding_integrity
from casckpt.frontends.megatron.config import (
    CheckpointingConfig,
    check_is_distributed_checkpoint,
    maybe_load_config,
    save_config,
)
from casckpt.frontends.megatron.errors import CheckpointingException
from casckpt.frontends.megatron.folders import remove_sharded_tensors, write_folder
from casckpt.frontends.megatron.kinds import (
    add_prefix_for_sharding,
    apply_prefix_mapping,
    extract_nonpersistent,
    extract_sharded_base,
    extract_sharded_tensors,
    extract_sharded_tensors_and_factories,
    extract_sharded_tensors_or_nonpersistent,
    replace_prefix_for_sharding,
)
from casckpt.frontends.megatron.loading import StrictHandling, load, parse_strict_flag
from casckpt.frontends.megatron.mapping import (
    FactoryBuildFn,
    FactoryMergeFn,
    LocalNonpersistentObject,
    LocalNonpersitentObject,
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    is_main_replica,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from casckpt.frontends.megatron.nesting import (
    CommonStateDict,
    ShardedStateDict,
    StateDict,
    dict_list_map_inplace,
    dict_list_map_outplace,
    dict_map,
    dict_map_with_key,
    diff,
    extract_matching_values,
    inspect_types,
    map_reduce,
    merge,
    nested_items_iter,
    nested_values,
)
from casckpt.frontends.megatron.saving import AsyncRequest, save
from casckpt.frontends.megatron.stored import (
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_sharded_objects,
    load_tensors_metadata,
)

if TYPE_CHECKING:
    from casckpt.frontends.megatron.strategies import CasLoadShardedStrategy as CasLoadShardedStrategy
    from casckpt.frontends.megatron.strategies import CasSaveShardedStrategy as CasSaveShardedStrategy
    from casckpt.frontends.megatron.training_loop import Installed as Installed
    from casckpt.frontends.megatron.training_loop import install as install
    from casckpt.frontends.megatron.training_loop import register_strategies as register_strategies

# Not in __all__, so that a star import works without Megatron-core.
_NEED_MEGATRON_CORE = {
    "CasLoadShardedStrategy": "strategies",
    "CasSaveShardedStrategy": "strategies",
    "Installed": "training_loop",
    "install": "training_loop",
    "register_strategies": "training_loop",
}

__all__ = [
    "AsyncRequest",
    "CheckpointingConfig",
    "CheckpointingException",
    "CommonStateDict",
    "FactoryBuildFn",
    "FactoryMergeFn",
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "StrictHandling",
    "add_prefix_for_sharding",
    "apply_factories",
    "apply_factory_merges",
    "apply_prefix_mapping",
    "check_is_distributed_checkpoint",
    "dict_list_map_inplace",
    "dict_list_map_outplace",
    "dict_map",
    "dict_map_with_key",
    "diff",
    "extract_matching_values",
    "extract_nonpersistent",
    "extract_sharded_base",
    "extract_sharded_tensors",
    "extract_sharded_tensors_and_factories",
    "extract_sharded_tensors_or_nonpersistent",
    "get_optim_param_to_id_map",
    "get_param_id_to_sharded_param_map",
    "inspect_types",
    "is_main_replica",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_sharded_objects",
    "load_tensors_metadata",
    "make_sharded_optimizer_tensor",
    "map_reduce",
    "maybe_load_config",
    "merge",
    "nested_items_iter",
    "nested_values",
    "optim_state_to_sharding_state",
    "parse_strict_flag",
    "remove_sharded_tensors",
    "replace_prefix_for_sharding",
    "save",
    "save_config",
    "validate_sharding_integrity",
    "write_folder",
]


def __getattr__(name: str) -> Any:
    if name not in _NEED_MEGATRON_CORE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_MEGATRON_CORE[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, *_NEED_MEGATRON_CORE]
