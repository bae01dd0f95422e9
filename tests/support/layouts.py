"""Random layouts of tensors across ranks, as self-describing DTensors whose local data numpy splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from tests.support.torch_versions import has_torch

Numbers = np.ndarray[Any, np.dtype[np.float32]]
Shape = tuple[int, ...]
Chunk = tuple[Shape, Shape]
"""Offset and sizes."""


class Described(DTensor):
    """A DTensor of a foreign class that describes itself."""

    @staticmethod
    def of(tensor: DTensor, chunks: Sequence[ChunkStorageMetadata]) -> Described:
        found: Any = DTensor.__new__(Described, tensor._local_tensor, tensor._spec, requires_grad=False)
        found.chunks = list(chunks)
        return found  # type: ignore[no-any-return]

    def __create_chunk_list__(self) -> Any:
        return self.chunks  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Layout:
    """The chunks of a tensor that each rank holds. ``stacked``: they are stacked along the first dimension."""

    kind: str
    shape: Shape
    held: tuple[tuple[Chunk, ...], ...]
    stacked: bool
    seed: int

    @property
    def whole(self) -> Numbers:
        """Return the whole tensor. All elements are different."""
        count = int(np.prod(self.shape))
        return np.random.default_rng(self.seed).permutation(count).astype(np.float32).reshape(self.shape)

    def parts(self, rank: int) -> list[Numbers]:
        """Return the data of a rank, chunk by chunk."""
        return [self.whole[slices(chunk)] for chunk in self.held[rank]]

    def tensor(self, rank: int, mesh: DeviceMesh, *, empty: bool) -> tuple[DTensor, list[torch.Tensor]]:
        """Return the DTensor of a rank, and its data chunk by chunk. ``empty``: fill it with zeros."""
        parts = [torch.from_numpy(part.copy()) for part in self.parts(rank)]
        parts = [torch.zeros_like(part) for part in parts] if empty else parts
        several = max(map(len, self.held)) > 1
        # With several chunks, torch's wrapper supports at most two dimensions.
        ways = WAYS[:-1] if several and len(self.shape) > 2 else WAYS
        way = Random(self.seed).choice(ways) if self.stacked else wrapped
        found: tuple[DTensor, list[torch.Tensor]] = way(self, rank, mesh, parts)
        return found


def slices(chunk: Chunk) -> tuple[slice, ...]:
    return tuple(slice(start, start + extent) for start, extent in zip(*chunk, strict=True))


def _dtensor(layout: Layout, mesh: DeviceMesh, local: torch.Tensor) -> DTensor:
    """Return a DTensor whose mesh and placements contradict its data."""
    placements: list[Placement] = [Shard(0)] * mesh.ndim
    stride = torch.empty(layout.shape, device="meta").stride()
    shape = torch.Size(layout.shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _stacked(layout: Layout, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    local = torch.cat(list(parts)) if parts else torch.zeros(0, *layout.shape[1:])
    return local, list(torch.split(local, [len(part) for part in parts]))


def chunks_of(layout: Layout, rank: int) -> list[ChunkStorageMetadata]:
    """Return chunks in Megatron-FSDP's form: tuples, with an empty chunk for a rank that has none."""
    held = layout.held[rank] or (((0,) * len(layout.shape), (0, *layout.shape[1:])),)
    return [ChunkStorageMetadata(*chunk) for chunk in held]  # type: ignore[arg-type]


def by_local(layout: Layout, rank: int, mesh: DeviceMesh, parts: Sequence[torch.Tensor]) -> Any:
    """Return the tensor as Megatron-FSDP creates it."""
    local, data = _stacked(layout, parts)
    tensor = _dtensor(layout, mesh, local)
    found = chunks_of(layout, rank)
    tensor._local_tensor.__create_chunk_list__ = lambda: found  # type: ignore[attr-defined]
    return tensor, data


def by_itself(layout: Layout, rank: int, mesh: DeviceMesh, parts: Sequence[torch.Tensor]) -> Any:
    local, data = _stacked(layout, parts)
    tensor = _dtensor(layout, mesh, local)
    tensor.__create_chunk_list__ = lambda: chunks_of(layout, rank)  # type: ignore[method-assign]
    return tensor, data


def by_class(layout: Layout, rank: int, mesh: DeviceMesh, parts: Sequence[torch.Tensor]) -> Any:
    local, data = _stacked(layout, parts)
    return Described.of(_dtensor(layout, mesh, local), chunks_of(layout, rank)), data


def wrapped(layout: Layout, rank: int, mesh: DeviceMesh, parts: Sequence[torch.Tensor]) -> Any:
    """Return torch's own wrapper for several chunks."""
    local = LocalShardsWrapper(list(parts), [offset for offset, _ in layout.held[rank]])
    return _dtensor(layout, mesh, local), list(parts)


WRAPS = has_torch("2.8")
"""Whether torch's wrapper supports ranks without chunks, and chunks of different sizes."""

WAYS: list[Callable[..., Any]] = [by_local, by_itself, by_class, *([wrapped] if WRAPS else [])]


def draw(rng: Random, ranks: int) -> Layout:
    """Draw a random layout over this many ranks."""
    kind = rng.choice(list(KINDS))
    shape = tuple(rng.randint(1, 9) for _ in range(2 if kind in {"boxes", "columns and rows"} else rng.randint(1, 3)))
    held, stacked = KINDS[kind](rng, shape, ranks)
    return Layout(kind, shape, tuple(map(tuple, held)), stacked, rng.randrange(2**31))


def _cuts(rng: Random, extent: int, count: int) -> list[tuple[int, int]]:
    """Split [0, extent) into this many ranges, some of which may be empty."""
    at = [0, *sorted(rng.randint(0, extent) for _ in range(count - 1)), extent]
    return [(a, b - a) for a, b in pairwise(at)]


def _even(extent: int, count: int) -> list[tuple[int, int]]:
    """Split [0, extent) as torch.chunk does."""
    each = -(-extent // count)
    return [(min(i * each, extent), max(0, min((i + 1) * each, extent) - i * each)) for i in range(count)]


def _rows(shape: Shape, stretches: Sequence[tuple[int, int]]) -> list[list[Chunk]]:
    rest = (0,) * (len(shape) - 1)
    return [[((at, *rest), (count, *shape[1:]))] if count else [] for at, count in stretches]


Held = tuple[list[list[Chunk]], bool]


def _uneven(rng: Random, shape: Shape, ranks: int) -> Held:
    return _rows(shape, _cuts(rng, shape[0], ranks)), True


def _another_order(rng: Random, shape: Shape, ranks: int) -> Held:
    """Draw even sizes as in torch, assigned to ranks in a different order."""
    found = _rows(shape, _even(shape[0], ranks))
    rng.shuffle(found)
    return found, True


def _hybrid(rng: Random, shape: Shape, ranks: int) -> Held:
    """Draw a layout over two mesh dimensions. The inner dimension shards first."""
    outer = 2 if ranks % 2 == 0 else 1
    inner = ranks // outer
    found = _rows(shape, rng.choice([_even(shape[0], ranks), _cuts(rng, shape[0], ranks)]))
    return [found[j * outer + i] for i in range(outer) for j in range(inner)], True


def _columns(rng: Random, shape: Shape, ranks: int) -> Held:
    """Draw a layout whose columns are split by tensor parallelism, and their rows by FSDP."""
    across = 2 if ranks % 2 == 0 else 1
    columns, rows = _cuts(rng, shape[1], across), _cuts(rng, shape[0], ranks // across)
    pairs = [(row, column) for row in rows for column in columns]
    return [[((a, b), (n, m))] if n * m else [] for (a, n), (b, m) in pairs], False


def _several(rng: Random, shape: Shape, ranks: int) -> Held:
    found: list[list[Chunk]] = [[] for _ in range(ranks)]
    chunks = [chunk for row in _rows(shape, _cuts(rng, shape[0], 3 * ranks)) for chunk in row]
    rng.shuffle(chunks)
    for chunk in chunks:
        rng.choice(found).append(chunk)
    return found, True


def _boxes(rng: Random, shape: Shape, ranks: int) -> Held:
    found: list[list[Chunk]] = [[] for _ in range(ranks)]
    for a, n in _cuts(rng, shape[0], 3):
        for b, m in _cuts(rng, shape[1], 3):
            if n * m:
                rng.choice(found).append(((a, b), (n, m)))
    return found, False


def _replicas(rng: Random, shape: Shape, ranks: int) -> Held:
    found = _rows(shape, _cuts(rng, shape[0], max(1, ranks // 2)))
    return [found[rank % len(found)] for rank in range(ranks)], True


KINDS: dict[str, Callable[[Random, Shape, int], Held]] = {
    "uneven": _uneven,
    "another order": _another_order,
    "hybrid": _hybrid,
    "columns and rows": _columns,
    "several": _several,
    "boxes": _boxes,
    "replicas": _replicas,
}
