"""A GPT-like model and its optimizer as Megatron-style sharded state dicts, for any parallel configuration.

All values come from the same global tensors, so the expected state of a rank after a load can be computed as well.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

import casckpt
from casckpt.frontends import megatron

LAYERS, HIDDEN, FFN, VOCAB = 4, 8, 6, 10
Offsets = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Topology:
    """The sizes of tensor, pipeline and data parallelism.

    ``cut`` (0 to 1): an additional split of flat optimizer state.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cut: float = 0.0

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp

    def at(self, rank: int) -> Rank:
        return Rank(self, rank % self.tp, rank // (self.tp * self.dp), rank // self.tp % self.dp)


@dataclass(frozen=True)
class Rank:
    """A process with its rank in each of the three groups."""

    of: Topology
    tp: int
    pp: int
    dp: int

    @property
    def layers(self) -> range:
        each = LAYERS // self.of.pp
        return range(self.pp * each, (self.pp + 1) * each)


def whole(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the global tensor with this name. It is always the same."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator).to(dtype)


def embedding(name: str, rank: Rank, dtype: torch.dtype) -> torch.Tensor:
    """Return the vocabulary, padded to a multiple of four rows for each tensor-parallel rank."""
    rows = -(-VOCAB // (4 * rank.of.tp)) * 4 * rank.of.tp
    padded = torch.zeros(rows, HIDDEN, dtype=dtype)
    padded[:VOCAB] = whole(name, VOCAB, HIDDEN, dtype=dtype)
    return padded.chunk(rank.of.tp)[rank.tp].clone()


def swiglu(layer: int, rank: Rank) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return gate and up, which are together in one local tensor, but separate in the global one."""
    make, make_flat = megatron.ShardedTensor.from_rank_offsets, megatron.ShardedTensor.from_rank_offsets_flat
    shape = (FFN * 4 // rank.of.tp, HIDDEN)

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> Any:
        parts = []
        for half in range(2):
            offsets: Offsets = ((0, layer, LAYERS), (1, half * rank.of.tp + rank.tp, 2 * rank.of.tp))
            more: dict[str, Any] = {"replica_id": replica_id, "prepend_axis_num": 1}
            if flattened_range is None:
                parts.append(make(key, data.chunk(2)[half].clone(), *offsets, **more))
                continue
            lo, hi = (min(max(end - half * prod(shape), 0), prod(shape)) for end in _ends(flattened_range))
            if lo < hi:
                start = half * prod(shape) - flattened_range.start
                mine = data[start + lo : start + hi].clone()
                parts.append(make_flat(key, mine, shape, *offsets, flattened_range=slice(lo, hi), **more))
        return parts

    return build, torch.cat


def _ends(flat: slice) -> tuple[int, int]:
    return flat.start, flat.stop


def model(rank: Rank, name: str, dtype: torch.dtype = torch.bfloat16, prefix: str = "") -> dict[str, Any]:
    """Return the sharded state dict of the parameters, or of their optimizer state."""
    make = megatron.ShardedTensor.from_rank_offsets
    tp, top = rank.of.tp, rank.of.pp - 1
    state: dict[str, Any] = {}
    if rank.pp in (0, top):  # the last stage also has it, tied
        copy = 0 if rank.pp == 0 else 1
        state["embedding.weight"] = make(
            f"{prefix}embedding.weight", embedding(f"{name}/embedding", rank, dtype), (0, rank.tp, tp),
            replica_id=(copy, 0, rank.dp), allow_shape_mismatch=True,
        )  # fmt: skip
    for local, layer in enumerate(rank.layers):
        values = whole(f"{name}/attention/{layer}", HIDDEN, HIDDEN, dtype=dtype)
        state[f"layers.{local}.attention"] = make(
            f"{prefix}layers.attention", values.chunk(tp, 1)[rank.tp].clone(), (0, layer, LAYERS), (2, rank.tp, tp),
            replica_id=(0, 0, rank.dp), prepend_axis_num=1,
        )  # fmt: skip
        state[f"layers.{local}.norm"] = make(
            f"{prefix}layers.norm", whole(f"{name}/norm/{layer}", HIDDEN, dtype=dtype), (0, layer, LAYERS),
            replica_id=(0, rank.tp, rank.dp), prepend_axis_num=1,
        )  # fmt: skip
        halves = whole(f"{name}/fc1/{layer}", 2, FFN * 4, HIDDEN, dtype=dtype)
        data = torch.cat([half.chunk(tp)[rank.tp] for half in halves])
        state[f"layers.{local}.fc1"] = megatron.ShardedTensorFactory(
            f"{prefix}layers.fc1", data, *swiglu(layer, rank), replica_id=(0, 0, rank.dp)
        )
    return state


def flat(rank: Rank, name: str, prefix: str) -> dict[str, Any]:
    """Return the same state as a distributed optimizer holds it: each rank has part of each flattened local tensor."""
    state = {}
    for key, value in model(replace(rank, dp=0), name, torch.float32, prefix).items():
        if megatron.is_main_replica(value.replica_id):
            state[key] = [_slice(value, lo, hi) for lo, hi in _cuts(rank, value.data)]
    return state


def _cuts(rank: Rank, data: torch.Tensor | None) -> list[tuple[int, int]]:
    assert data is not None
    count = data.numel()
    lo, hi = (count * i // rank.of.dp for i in (rank.dp, rank.dp + 1))
    inner = lo + int((hi - lo) * rank.of.cut)
    return [(lo, inner), (inner, hi)] if lo < inner else [(lo, hi)]


def _slice(value: Any, lo: int, hi: int) -> Any:
    assert value.data is not None
    return replace(value, data=value.data.flatten()[lo:hi].clone(), flattened_range=slice(lo, hi), replica_id=0)


def state(rank: Rank) -> dict[str, Any]:
    """Return parameters, optimizer state (sharded in the same way, and flat), objects, and the common part."""
    objects = {
        f"layers.{local}._extra_state": megatron.ShardedObject(
            "layers._extra_state", {"layer": layer, "scale": (1.5, layer)}, (LAYERS,), (layer,), (0, rank.tp, rank.dp)
        )
        for local, layer in enumerate(rank.layers)
    }
    own = megatron.LocalNonpersistentObject
    return {
        "model": model(rank, "weight") | objects,
        "optimizer": {
            "state": {"exp_avg": model(rank, "exp_avg", torch.float32, "optimizer.state.exp_avg.")},
            "flat": flat(rank, "exp_avg_sq", "optimizer.state.exp_avg_sq."),
            "param_groups": [
                {"lr": 0.1, "betas": (0.9, 0.95), "step": 100, "params": own([rank.tp, rank.pp])},
                {"lr": 0.2, "weight_decay": 0.0, "step": 100, "params": own([])},
            ],
            "common_step": torch.tensor(100.0),
        },
        "iteration": 7,
    }


def expected(state: dict[str, Any]) -> dict[str, Any]:
    """Return the expected result of a load into a state dict with this sharding."""

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, megatron.LocalNonpersistentObject):
            return leaf.unwrap()
        return leaf.data if isinstance(leaf, megatron.ShardedBase) else leaf

    result: dict[str, Any] = megatron.dict_list_map_outplace(value_of, state)
    return result


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a template: tensors with different values, objects without data, and different plain values."""

    def empty(leaf: Any) -> Any:
        if isinstance(leaf, megatron.ShardedObject):
            return leaf.without_data()
        if isinstance(leaf, megatron.ShardedBase):
            return replace(leaf, data=torch.full_like(leaf.data, 99))  # type: ignore[type-var] # they are dataclasses
        return leaf if hasattr(leaf, "unwrap") else "plain"

    result: dict[str, Any] = megatron.dict_list_map_outplace(empty, state)
    return result


def differences(one: Any, other: Any) -> list[Any]:
    """Return the paths of values that differ in any bit. Key order does not matter."""
    left, right = dict(leaves(one)), dict(leaves(other))
    return [path for path in left | right if not same(left.get(path), right.get(path))]


def leaves(x: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Return all leaves of dicts and lists, with their paths."""
    if not isinstance(x, dict | list):
        yield path, x
        return
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        yield from leaves(value, (*path, key))


def same(one: Any, other: Any) -> bool:
    """Report whether two values agree in type and bits."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def saved(rank: int, size: int, where: str, topology: Topology, **options: Any) -> int:
    """Save as one rank. Return the number of bytes that all ranks wrote."""
    megatron.save(state(topology.at(rank)), where, **options)
    return casckpt.open(where.partition("#")[0]).get(where.partition("#")[2]).stats.bytes_written


COMMON = {
    "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99)),
    "groups": [{"lr": 1.0}],
    "seed": torch.tensor([5]),
    "empty": {"dict": {}, "list": []},
    "content_metadata": {"version": 2},
}
