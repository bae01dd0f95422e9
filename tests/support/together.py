"""Helpers for jobs on several ranks: tensors that every rank can create and cut, storage that counts, ways to die."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from inspect import signature
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

import casckpt
from casckpt.ranks import wire
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.faulty import Call, Fault, FaultyStore
from tests.support.ranks import die
from tests.support.saves import steps


class Watched(FaultyStore):
    """Storage that counts the blob bytes that this rank writes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._written: list[int] = []  # threads append to it; an addition could lose what another thread adds

    @property
    def blob_bytes(self) -> int:
        return sum(self._written)

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        super().put(key, data, settle=settle)
        if key.endswith(".safetensors"):
            self._written.append(memoryview(data).nbytes)

    def reads(self) -> list[str]:
        """Return the reads of whole objects, except the marker and the settings, which every process reads once."""
        return [key for key in self.keys("get") if not key.startswith(("casckpt.json", "settings/"))]


def watched(path: Path, *faults: Fault) -> tuple[Store, Watched]:
    """Open the store in a folder as one rank does. Return it and its storage."""
    storage = Watched(LocalStore(path), faults)
    return Store(Repository(storage)), storage


def numbers(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random numbers. For each name, they are the same on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if dtype.is_floating_point:
        return torch.randn(prod(shape), generator=generator).reshape(shape).to(dtype)
    return torch.randint(0, 100, (prod(shape),), generator=generator).reshape(shape).to(dtype)


def line(size: int) -> DeviceMesh:
    """Return a mesh with all ranks in one dimension."""
    return init_device_mesh("cpu", (size,))


def spread(
    tensors: dict[str, torch.Tensor], mesh: DeviceMesh, placements: Sequence[Placement] = (Replicate(),)
) -> dict[str, DTensor]:
    """Shard tensors that all ranks have over a mesh, without communication."""
    return {key: cut(full, mesh, placements) for key, full in tensors.items()}


def emptied(state: Any) -> Any:
    """Return the same state without its values, as a template."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, casckpt.Shard):
        data = torch.zeros_like(state.data)
        return casckpt.Shard(data, state.global_shape, state.offset, state.shape, state.flat)
    if isinstance(state, list):
        return [emptied(one) for one in state]
    return {key: emptied(value) for key, value in state.items()} if isinstance(state, dict) else None


def parts(state: Any) -> list[torch.Tensor]:
    """Return the local tensors of a state in order."""
    if isinstance(state, dict):
        return [part for value in state.values() for part in parts(value)]
    if isinstance(state, list):
        return [part for value in state for part in parts(value)]
    if isinstance(state, casckpt.Shard):
        return [state.data]
    if isinstance(state, DTensor):
        return [state.to_local()]
    return [state] if isinstance(state, torch.Tensor) else []


def same_parts(one: Any, other: Any) -> bool:
    """Report whether two states of one rank agree."""
    pairs = list(zip(parts(one), parts(other), strict=True))
    return bool(pairs) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def killing(_: Call) -> None:
    """Kill this process (a hook for `call_first`)."""
    die()


def impatient() -> None:
    """Let a broken connection mark a rank as dead after a short time."""
    wire.WORD_SECONDS = 1


def visible(path: Path) -> list[tuple[str, int]]:
    """Return the run and step of all visible checkpoints of the store in a folder."""
    return steps(casckpt.open(path))


TALKS = "src_data_rank" not in signature(distribute_tensor).parameters
"""Whether torch is older than 2.7: it can split a tensor only to send the parts to other ranks, and lacks strides."""


def cut(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return this rank's shard, as torch splits it."""
    if TALKS:
        whole = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(mesh, placements)
    return distribute_tensor(full, mesh, placements, src_data_rank=None)
