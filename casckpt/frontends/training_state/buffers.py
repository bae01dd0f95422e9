"""Buffers that ranks have in common, and yet not alike: of these a checkpoint keeps only those of the lowest rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from casckpt.format.digest import cell_digest
from casckpt.frontends.training_state.groups import listed
from casckpt.tensors.dtensors import CHUNK_LIST, is_dtensor
from casckpt.tensors.foreign import parts_of
from casckpt.tensors.memory import TensorMemory
from casckpt.tensors.shards import check_storable

log = logging.getLogger("casckpt")

_SAMPLE_BYTES = 64 << 10


def digests(model: Any) -> dict[str, bytes]:
    """A digest of the beginning of each plain tensor in a model's state: no parameter, and no part of anything.

    Raises InvalidInput, naming the key, for what a save could not store.
    """
    found = {}
    for name, value in model.items() if isinstance(model, Mapping) else ():
        if _is_buffer(name, value):
            check_storable(f"model.{name}", value)
            found[name] = _digest(value)
    return found


def _is_buffer(name: str, value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
        return False
    if is_dtensor(value) or hasattr(value, CHUNK_LIST):
        return False
    return parts_of(f"model.{name}", value) is None


def _digest(data: torch.Tensor) -> bytes:
    count = min(data.numel(), _SAMPLE_BYTES // data.element_size())
    sample = bytearray(count * data.element_size())
    TensorMemory(data).copy_out(0, count, memoryview(sample))
    return cell_digest(sample)


def differing(found: Sequence[Mapping[str, bytes]]) -> list[str]:
    """The names for which ranks have different digests."""
    first: dict[str, bytes] = {}
    odd = {name: None for rank in found for name, digest in rank.items() if first.setdefault(name, digest) != digest}
    return list(odd)


def say(names: Sequence[str]) -> None:
    """Log that these differ. On rank 0."""
    log.warning(
        "ranks have other values each in the buffers %s: a checkpoint keeps those of the lowest rank, and all ranks "
        "load these. Synchronise them before the save (torch.nn.SyncBatchNorm for batch norms), or save what belongs "
        "to a rank as casckpt.PerRank. This is said once",
        listed(names),
    )
