"""A Shard refuses inconsistent numbers, and describes the regions of its data."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from casckpt.errors import InvalidInput
from casckpt.format.regions import Box, Region, whole
from casckpt.tensors.values import PerRank, Shard
from tests.support.ids import named


def test_a_shard_can_be_the_whole_tensor() -> None:
    assert Shard(torch.zeros(3, 4), global_shape=(3, 4)).regions() == [whole((3, 4))]
    assert Shard(torch.zeros(()), global_shape=()).regions() == [whole(())]
    assert Shard(torch.zeros(3), global_shape=torch.Size([3]), shape=[3]).regions() == [whole((3,))]


def test_a_shard_can_be_described_by_a_box() -> None:
    wanted = [Region(Box((2, 1), (3, 4)), 0, 12)]
    assert Shard(torch.zeros(3, 4), global_shape=(8, 8), offset=(2, 1)).regions() == wanted
    assert Shard(torch.zeros(3, 4), (8, 8), [2, 1], [3, 4]).regions() == wanted


def test_flat_ranges_of_a_tensor_or_box_are_valid() -> None:
    box = Box((0, 0), (8, 8))
    assert Shard(torch.zeros(5), global_shape=(8, 8), flat=(3, 8)).regions() == [Region(box, 3, 8)]
    several = Shard(torch.zeros(2, 3), global_shape=(8, 8), flat=[(60, 64), (1, 1), (0, 2)])
    assert several.regions() == [Region(box, 60, 64), Region(box, 0, 2)]
    local = Shard(torch.zeros(2), global_shape=(8, 8), offset=(4, 4), shape=(2, 2), flat=(1, 3))
    assert local.regions() == [Region(Box((4, 4), (2, 2)), 1, 3)]
    numpy_range: Any = (np.int64(1), np.int64(3))
    assert Shard(torch.zeros(2), (4,), flat=numpy_range).regions() == [Region(Box((0,), (4,)), 1, 3)]
    assert Shard(torch.zeros(2), (4,), flat=[[1, 3]]).regions() == [Region(Box((0,), (4,)), 1, 3)]


@pytest.mark.parametrize(
    "options",
    [{"flat": (5, 5)}, {"flat": []}, {"offset": (8, 0), "shape": (0, 8)}],
    ids=named,
)
def test_empty_shards_have_no_regions(options: dict[str, Any]) -> None:
    data = torch.zeros(options.get("shape", (0,)))
    assert Shard(data, global_shape=(8, 8), **options).regions() == []


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3,), {"global_shape": (4,)}, r"data of shape \[3\] does not fill a box of shape \[4\]"),
        ((4,), {"global_shape": (2, 2)}, "does not fill"),
        ((2, 2), {"global_shape": (3, 3), "offset": (2, 0)}, "is outside a tensor"),
        ((2,), {"global_shape": (3, 3), "offset": (0,)}, "is outside a tensor"),
        ((2,), {"global_shape": (3,), "offset": (-1,)}, "offset"),
        ((2,), {"global_shape": (3,), "shape": (2,)}, "needs an offset"),
        ((2,), {"global_shape": (3,), "offset": (0,), "flat": (0, 2)}, "also needs shape: the shape of the box"),
        ((2,), {"global_shape": (-3,)}, "negative size"),
        ((2,), {"global_shape": ("a",)}, "global_shape of a Shard must be a sequence of ints"),
        ((2,), {"global_shape": 2}, "global_shape of a Shard must be a sequence of ints"),
        ((3,), {"global_shape": (8,), "flat": (0, 4)}, "flat ranges with 4 elements in total do not match data with 3"),
        ((3,), {"global_shape": (8,), "flat": [(0, 2), (4, 6)]}, "flat ranges with 4 elements in total"),
        ((4,), {"global_shape": (8,), "flat": [(0, 3), (2, 3)]}, "overlap: one ends at 3, but the next starts at 2"),
        ((4,), {"global_shape": (8,), "flat": (6, 10)}, r"flat range \[6, 10\) is outside a box of 8"),
        ((4,), {"global_shape": (8,), "flat": (4, 0)}, "is outside a box"),
        ((4,), {"global_shape": (8,), "flat": 4}, r"must be \(lo, hi\) or a list of such ranges"),
        ((4,), {"global_shape": (8,), "flat": (1, 2, 3)}, r"must be \(lo, hi\) or a list of such ranges"),
        ((4,), {"global_shape": (8,), "flat": [(1, 2, 3)]}, r"must be \(lo, hi\) or a list of such ranges"),
        ((4,), {"global_shape": (8,), "flat": (0.0, 4.0)}, "flat of a Shard must be a sequence of ints"),
    ],
)
def test_inconsistent_numbers_are_rejected(shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Shard(torch.zeros(shape), **options)


def test_data_that_is_not_a_tensor_is_rejected() -> None:
    data: Any = [1, 2]
    with pytest.raises(InvalidInput, match="not a list"):
        Shard(data, global_shape=(2,))


def test_the_repr_of_a_shard_describes_its_region() -> None:
    assert repr(Shard(torch.zeros(2), (8,), flat=(1, 3))) == "Shard([0:8] elements 1..3 of [8], torch.float32)"
    assert repr(Shard(torch.zeros(0), (8,), flat=(1, 1))) == "Shard(nothing of [8], torch.float32)"
    assert repr(PerRank([1])) == "PerRank([1])"


def test_shards_can_be_pickled() -> None:
    shard = pickle.loads(pickle.dumps(Shard(torch.arange(2), (8,), flat=(1, 3))))
    assert shard.regions() == [Region(Box((0,), (8,)), 1, 3)]
    assert pickle.loads(pickle.dumps(PerRank(3))) == PerRank(3)
