"""Sharded tensors of other libraries, recognized by their attributes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import InvalidInput
from casckpt.format.regions import Box, Region
from casckpt.tensors.foreign import is_megatron_tensor, megatron_region, megatron_shard
from tests.support.ranks import Pool


@dataclass
class Part:
    """A part with the attributes of Megatron-core's."""

    key: str
    data: torch.Tensor | None
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int = 0
    replica_id: int = 0


@dataclass
class FlatPart(Part):
    flattened_range: slice | None = None


def test_a_foreign_tensor_is_recognized_by_its_attributes() -> None:
    assert is_megatron_tensor(Part("w", None, (2,), (4,), (2,)))
    for other in (torch.ones(2), {"key": 1}, None, Part, "text"):
        assert not is_megatron_tensor(other)


def test_the_region_of_a_foreign_tensor_is_found() -> None:
    assert megatron_region(Part("w", None, (2, 3), (4, 2, 6), (1, 0, 3), 1)) == Region(Box((1, 0, 3), (1, 2, 3)), 0, 6)
    flat = FlatPart("w", torch.ones(3), (2, 3), (4, 2, 6), (1, 0, 3), 1, flattened_range=slice(1, 4))
    assert megatron_region(flat) == Region(Box((1, 0, 3), (1, 2, 3)), 1, 4)
    assert megatron_shard(flat).flat == ((1, 4),)
    with pytest.raises(InvalidInput, match="is outside the global shape"):
        megatron_region(Part("w", None, (3,), (4,), (2,)))
    with pytest.raises(InvalidInput, match="the data of 'w' is None"):
        megatron_shard(Part("w", None, (2,), (4,), (2,)))


def test_the_data_of_a_foreign_tensor_is_not_copied() -> None:
    data = torch.arange(6.0).view(3, 2).t()
    shard = megatron_shard(Part("w", data, (2, 3), (4, 2, 3), (1, 0, 0), 1))
    assert shard.data.data_ptr() == data.data_ptr()
    assert shard.shape == tuple(shard.data.shape) == (1, 2, 3)


def round_trip(rank: int, size: int, path: Path) -> list[Any]:
    part = Part("ignored", torch.full((2, 3), float(rank)), (2, 3), (2, 2, 3), (rank, 0, 0), 1)
    norm = FlatPart("ignored", torch.arange(4.0), (2, 2), (2, 2), (0, 0), 0, rank, slice(0, 4))
    store = casckpt.open(path)
    store.save({"layers": part, "norm": norm}, run="a", step=1)
    template = {"layers": Part("k", torch.zeros(2, 3), (2, 3), (2, 2, 3), (1 - rank, 0, 0), 1)}
    store.load(template, "a@1")
    assert template["layers"].data is not None
    return [template["layers"].data[0, :1].tolist(), store.read("a@1")["norm"].tolist()]


def test_save_and_load_accept_foreign_tensors_like_shards(tmp_path: Path, ranks: Pool) -> None:
    norm = [[0, 1], [2, 3]]
    assert ranks.run(2, round_trip, tmp_path) == [[[1], norm], [[0], norm]]
