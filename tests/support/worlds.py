"""Random states, and random ways in which ranks can hold them: everything that `casckpt.Store.save` accepts.

Everything is drawn from seeds. All ranks draw the same values, so only the seeds are sent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import casckpt
from casckpt.format.regions import Box, full_box
from tests.support.tensors import raw
from tests.support.together import cut

Shape: TypeAlias = tuple[int, ...]
Leaf: TypeAlias = Any

MESHES: dict[int, list[Shape]] = {1: [(1,)], 2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2), (4, 1), (1, 4)]}
DTYPES = ("float32", "float32", "float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool", "complex64")


def reference(seed: int, changes: int = 0) -> dict[str, torch.Tensor]:
    """Return whole tensors by key. Each change affects some rows or elements of some tensors."""
    draw = random.Random(f"reference {seed}")
    found = {}
    for number in range(draw.randint(3, 9)):
        dims = draw.choice([0, 1, 1, 2, 2, 2, 2, 3, 4])
        limit = {0: 1, 1: 9000, 2: 90, 3: 20, 4: 9}[dims]
        shape = tuple(
            draw.choice([draw.randint(1, limit), draw.randint(1, limit), draw.randint(0, 6)]) for _ in range(dims)
        )
        found[f"layer{number % 3}.{number}"] = raw(draw.choice(DTYPES), shape, seed + number).clone()
    for change in range(changes):
        draw = random.Random(f"change {seed} {change}")
        for key in draw.sample(list(found), draw.randint(1, len(found))):
            _change(found[key], draw)
    return found


def _change(tensor: torch.Tensor, draw: random.Random) -> None:
    if not tensor.numel():
        return
    flat = tensor.view(-1)
    lo = draw.randrange(flat.numel())
    hi = min(flat.numel(), lo + draw.choice([1, 7, 1000]))
    other = raw(str(tensor.dtype).removeprefix("torch."), (hi - lo,), draw.randrange(1 << 30))
    flat[lo:hi] = other


@dataclass(frozen=True)
class World:
    """``size`` ranks in a mesh that hold tensors in random ways drawn from ``seed``."""

    size: int
    mesh: Shape
    seed: int

    @classmethod
    def drawn(cls, draw: random.Random) -> World:
        size = draw.choice([1, 2, 3, 4, 4, 4])
        return cls(size, draw.choice(MESHES[size]), draw.randrange(1 << 30))

    def state(self, rank: int, tensors: dict[str, torch.Tensor]) -> dict[str, Leaf]:
        """Return the state of ``rank``. Every rank must call this, in a process group of `size` ranks."""
        mesh = init_device_mesh("cpu", self.mesh)
        found: dict[str, Leaf] = {}
        for key, full in tensors.items():
            draw = random.Random(f"{self.seed} {key}")
            leaf = draw.choice(WAYS)(full, self, mesh, rank, draw)
            if leaf is not None:
                found.setdefault(key.split(".")[0], {})[key.split(".")[1]] = leaf
        return found


def _plain(full: torch.Tensor, world: World, mesh: DeviceMesh, rank: int, draw: random.Random) -> Leaf:
    """Return the whole tensor, on all ranks or on some."""
    some = draw.sample(range(world.size), draw.randint(1, world.size))
    if rank not in draw.choice([some, range(world.size)]):
        return None
    return nn.Parameter(full.clone()) if draw.random() < 0.5 and full.is_floating_point() else full.clone()


def _placed(full: torch.Tensor, world: World, mesh: DeviceMesh, rank: int, draw: random.Random) -> Leaf:
    """Return a DTensor with random placements, including strided ones where they split evenly."""
    dims = range(full.dim())
    placements: list[Placement] = [draw.choice([Replicate(), *map(Shard, dims), *map(Shard, dims)]) for _ in world.mesh]
    if len(world.mesh) == 2 and full.dim() and draw.random() < 0.5:
        dim = draw.choice(dims)
        if full.shape[dim] % prod(world.mesh) == 0:
            placements = [_StridedShard(dim, split_factor=world.mesh[1]), Shard(dim)]
    return cut(full.clone(), mesh, placements)


def _flat(full: torch.Tensor, world: World, mesh: DeviceMesh, rank: int, draw: random.Random) -> Leaf:
    """Return ranges of elements, of any size, that belong to this rank. A rank may have none or several."""
    cuts = sorted({0, full.numel(), *(draw.randint(0, full.numel()) for _ in range(draw.randint(0, 2 * world.size)))})
    mine = [(lo, hi) for lo, hi in pairwise(cuts) if draw.randrange(world.size) == rank]
    flat = full.reshape(-1)
    return casckpt.Shard(torch.cat([flat[:0], *(flat[lo:hi] for lo, hi in mine)]), full.shape, flat=mine)


def _boxes(full: torch.Tensor, world: World, mesh: DeviceMesh, rank: int, draw: random.Random) -> Leaf:
    """Return the boxes that belong to this rank."""
    mine = [box for box in _cut(full_box(tuple(full.shape)), draw, 3) if draw.randrange(world.size) == rank]
    return [casckpt.Shard(_inside(full, box).clone(), full.shape, offset=box.offset) for box in mine] or None


def _ranges_of_boxes(full: torch.Tensor, world: World, mesh: DeviceMesh, rank: int, draw: random.Random) -> Leaf:
    """Return flat ranges of boxes. Each box is split over all ranks."""
    found = []
    for box in _cut(full_box(tuple(full.shape)), draw, 2):
        cuts = sorted([0, box.numel, *(draw.randint(0, box.numel) for _ in range(world.size - 1))])
        flat, (lo, hi) = _inside(full, box).reshape(-1), list(pairwise(cuts))[rank]
        found.append(casckpt.Shard(flat[lo:hi].clone(), full.shape, offset=box.offset, shape=box.shape, flat=(lo, hi)))
    return found


WAYS: Sequence[Callable[[torch.Tensor, World, DeviceMesh, int, random.Random], Leaf]] = (
    _plain,
    _placed,
    _placed,
    _placed,
    _flat,
    _boxes,
    _ranges_of_boxes,
)


def _inside(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(lo, hi) for lo, hi in zip(box.offset, box.end, strict=True))]


def _cut(box: Box, draw: random.Random, depth: int) -> list[Box]:
    """Split the box into several boxes."""
    wide = [dim for dim, extent in enumerate(box.shape) if extent > 1]
    if not depth or not wide or draw.random() < 0.2:
        return [box]
    dim = draw.choice(wide)
    at = draw.randint(1, box.shape[dim] - 1)
    ends = [(0, at), (at, box.shape[dim])]
    halves = []
    for lo, hi in ends:
        offset = (*box.offset[:dim], box.offset[dim] + lo, *box.offset[dim + 1 :])
        halves.append(Box(offset, (*box.shape[:dim], hi - lo, *box.shape[dim + 1 :])))
    return [part for half in halves for part in _cut(half, draw, depth - 1)]
