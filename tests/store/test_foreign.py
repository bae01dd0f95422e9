"""Sharded tensors of other libraries, together with other values.

A save stores the tensors' contents, and a load fills the tensors in place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as TorchShard

import casckpt
from casckpt.errors import InvalidInput
from tests.support.ranks import Pool
from tests.support.saves import small_folder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
WHOLE = torch.arange(48, dtype=torch.int32).reshape(8, 6)


class FlatTensor(torch.Tensor):
    """A tensor with the attributes of OLMo-core's ShardedFlatTensor."""

    unsharded_shape: tuple[int, ...] = ()
    unsharded_flattened_offsets: tuple[tuple[int, int], ...] = ()
    sharded_data: torch.Tensor
    metadata_set: bool


def flat(data: torch.Tensor, shape: tuple[int, ...], *offsets: tuple[int, int], known: bool = True) -> FlatTensor:
    made = torch.Tensor._make_subclass(FlatTensor, data)
    made.unsharded_shape, made.unsharded_flattened_offsets = shape, offsets
    made.sharded_data, made.metadata_set = data, known
    return made


def rows(rank: int, size: int, data: torch.Tensor) -> ShardedTensor:
    """Return this rank's rows of ``WHOLE``. The last rank has none."""
    shards = []
    if rank < size - 1:
        height = len(data)
        shards = [TorchShard.from_tensor_and_offsets(data, [rank * height, 0], rank)]
    return init_from_local_shards(shards, 8, 6)


def sharded(rank: int, size: int, path: Path) -> Any:
    store = casckpt.open(path)
    height = 8 // (size - 1)
    mine = WHOLE[rank * height : (rank + 1) * height].clone()
    cut = 7 * rank
    ranges = [(cut, cut + 7)] + ([(7 * size, 48)] if rank == 0 else [])
    parts = torch.cat([WHOLE.reshape(-1)[lo:hi] for lo, hi in ranges])
    store.save({"box": rows(rank, size, mine), "flat": flat(parts, (8, 6), *ranges)}, step=0)

    target, empty = torch.zeros_like(mine), torch.zeros_like(parts)
    store.load({"box": rows(rank, size, target), "flat": flat(empty, (8, 6), *ranges)}, "default@0")
    swapped = torch.zeros_like(mine)
    store.load({"a": rows(rank, size, swapped)}, "default@0", rename={"a": "flat"})
    return torch.equal(empty, parts), rank == size - 1 or (torch.equal(target, mine) and torch.equal(swapped, mine))


def test_foreign_tensors_are_saved_and_loaded_in_place_on_ranks(ranks: Pool, tmp_path: Path) -> None:
    small_folder(tmp_path / "store")
    assert ranks.run(3, sharded, tmp_path / "store") == [(True, True)] * 3
    found = casckpt.open(tmp_path / "store").read("default@0")
    assert torch.equal(found["box"], WHOLE)
    assert torch.equal(found["flat"], WHOLE)


def nested(rank: int, size: int, path: Path) -> None:
    """Split rows over all ranks, and each of them into columns over a group of one rank.

    This is what FSDP over tensor parallelism looks like in older versions.
    """
    alone = [dist.new_group([one]) for one in range(size)][rank]
    mine = WHOLE[4 * rank : 4 * rank + 4].clone()
    halves = [TorchShard.from_tensor_and_offsets(mine[:, at : at + 3].contiguous(), [0, at], rank) for at in (0, 3)]
    inner = init_from_local_shards(halves, 4, 6, process_group=alone)
    outer = init_from_local_shards([TorchShard.from_tensor_and_offsets(mine, [4 * rank, 0], rank)], 8, 6)
    outer.local_shards()[0].tensor = inner
    casckpt.open(path).save({"w": outer}, step=0)


def test_nested_foreign_tensors_are_saved(ranks: Pool, tmp_path: Path) -> None:
    small_folder(tmp_path / "store")
    ranks.run(2, nested, tmp_path / "store")
    assert torch.equal(casckpt.open(tmp_path / "store").read("default@0")["w"], WHOLE)


def test_a_foreign_tensor_without_sharding_is_rejected(store: casckpt.Store) -> None:
    with pytest.raises(InvalidInput, match=r"'w': its sharding is not known yet: call its mark_as_sharded\(\)"):
        store.save({"w": flat(torch.zeros(3), (), known=False)}, step=0)


def test_the_error_for_an_unreduced_sum_names_the_key(store: casckpt.Store) -> None:
    with pytest.raises(InvalidInput, match="w"):
        store.save({"w": flat(torch.zeros(3), (4,), (0, 4))}, step=0)
    with pytest.raises(InvalidInput, match="'w' of shape"):
        store.save({"w": flat(torch.zeros(3), (4,), (0, 3))}, step=0)
