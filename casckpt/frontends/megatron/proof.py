"""Proves a resume: compares a sharded state dict with the checkpoint that was loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from casckpt.format.regions import Shape
from casckpt.frontends.megatron.common import COMMON_NAME
from casckpt.frontends.megatron.errors import checkpointing_errors
from casckpt.frontends.megatron.folders import pointed_at
from casckpt.frontends.megatron.kinds import is_sharded_tensor
from casckpt.frontends.megatron.place import CheckpointDir, StoreRef, folder_of, place_of
from casckpt.frontends.megatron.saving import Saving
from casckpt.frontends.megatron.stored import CONTENT_METADATA, MegatronCheckpoint
from casckpt.frontends.stores import as_store
from casckpt.frontends.training_state.proof import Proof
from casckpt.frontends.training_state.proof import prove as prove_state
from casckpt.ranks.ranks import on_each, open_ranks
from casckpt.tensors.foreign import part_shape

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)
_FILE = "a file of Megatron-core, which is not compared"
_BESIDE = "an argument of the save"
_SHAPE = "stored with a different shape, so it was not compared"


def prove(
    sharded_state_dict: dict[Any, Any],
    checkpoint_dir: CheckpointDir,
    *,
    excused: Mapping[str, str] = MappingProxyType({}),
    allow_pickle: bool = False,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> Proof:
    """Compare the live state with the checkpoint that was loaded. Every rank makes the call with its own part.

    ``sharded_state_dict``: what the next `save` would get. Create it after the whole loaded state was handed to the
    modules and optimizers. ``checkpoint_dir``: as for `load`, or a folder that `CasSaveShardedStrategy` wrote. Each
    rank compares all its sharded values, including replicas; rank 0 also compares the common part, unless it is in
    ``common.pt``. The values are hashed, and those on a device are copied to the host. ``excused``: why values may
    differ, by key or by the beginning of keys. For the other arguments, see `load`.

    Raises Mismatch, which names the keys, if anything else differs, and the errors of `load`.
    """
    with checkpointing_errors():
        ranks = open_ranks(process_group, no_dist=no_dist)
        stored = MegatronCheckpoint.together(ranks, lambda: _located(checkpoint_dir), common=True)

        def live() -> tuple[dict[Any, Any], dict[str, str]]:
            saving = Saving(sharded_state_dict, ranks.rank)
            saving.select_all({*stored.tensors, *stored.objects})
            if stored.file is not None:
                saving.common = {}
            tensors = [value for value in saving.sharded if is_sharded_tensor(value) and value.key in stored.tensors]
            resized = [value.key for value in tensors if _may_differ(value, stored.tensors[value.key].shape)]
            return saving.state(), dict.fromkeys(resized, _SHAPE)

        state, resized = on_each(ranks, live)
        proof = prove_state(
            stored.store, stored.checkpoint, state, None, excused={CONTENT_METADATA: _BESIDE, **resized, **excused},
            by_name=True, cast=True, allow_pickle=allow_pickle, process_group=process_group, no_dist=no_dist,
        )  # fmt: skip
    if stored.file is None:
        return proof
    if ranks.rank == 0:
        log.warning("%s: not proved: %s (%s)", stored.where, COMMON_NAME, _FILE)
    return replace(proof, unproved={**proof.unproved, COMMON_NAME: _FILE})


def _may_differ(tensor: Any, stored: Shape) -> bool:
    """Return whether a load accepts a tensor whose global shape is not the stored one."""
    shape = tuple(tensor.global_shape)
    return shape != stored and (tensor.allow_shape_mismatch or part_shape(shape, stored) is not None)


def _located(checkpoint_dir: CheckpointDir) -> StoreRef:
    folder = folder_of(checkpoint_dir)
    if folder is None:
        return place_of(checkpoint_dir)
    url, ref = pointed_at(folder)
    return StoreRef(as_store(url), ref)
