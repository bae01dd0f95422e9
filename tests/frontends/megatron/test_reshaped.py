"""Flat tensors in the shape that Megatron-core up to 0.15 stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given

import casckpt
from casckpt.errors import Mismatch
from casckpt.frontends.megatron import ShardedTensor, load
from casckpt.tensors.foreign import part_shape
from tests.frontends.megatron.test_resharding import CUTS, FRAGMENTS, PREPENDED, SHAPE, WHOLE, parts

counter = iter(range(10**9))


@pytest.mark.parametrize(
    ("shape", "stored", "part"),
    [
        ((4, 6), (2, 3, 4), (2, 2)),
        ((4, 6), (1, 1, 24), (4, 6)),
        ((4,), (2, 2), (2,)),
        ((4, 6), (2, 3, 5), None),
        ((4, 6), (3, 3, 4), None),
        ((4, 6), (4, 6), None),
        ((4, 6), (2, 3, 2, 2), None),
        ((0, 6), (0, 1, 0), None),
    ],
)
def test_a_reshaped_part_has_the_documented_shape(
    shape: tuple[int, ...], stored: tuple[int, ...], part: tuple[int, ...] | None
) -> None:
    assert part_shape(shape, stored) == part


def as_stored(fragments: tuple[int, int]) -> torch.Tensor:
    """Return the parts of a grid, each flattened, in grid order."""
    flat = [torch.as_tensor(one.data).flatten() for one in parts(WHOLE, fragments, None)]
    return torch.stack(flat).view(PREPENDED, *fragments, -1)


@given(saved=FRAGMENTS, loaded=FRAGMENTS, cuts=CUTS)
def test_a_reshaped_tensor_loads_into_any_sharding(
    saved: tuple[int, int], loaded: tuple[int, int], cuts: list[float] | None
) -> None:
    step = next(counter)
    casckpt.open("memory://reshaped").save({"w": as_stored(saved)}, run="a", step=step)
    asked = parts(torch.full_like(WHOLE, -1), loaded, cuts)
    expected = parts(WHOLE, loaded, cuts)
    for found, wanted in zip(load({"w": asked}, f"memory://reshaped#a@{step}")["w"], expected, strict=True):
        assert torch.equal(found, torch.as_tensor(wanted.data))


def test_a_reshaped_part_of_an_incorrect_shape_is_rejected(tmp_path: Path) -> None:
    casckpt.open(tmp_path).save({"w": as_stored((2, 3))}, run="a", step=1)
    asked = ShardedTensor.from_rank_offsets("w", torch.zeros(PREPENDED, SHAPE[0], SHAPE[1] + 1))
    with pytest.raises(Mismatch, match=r"\[2, 4, 7\] here, but \[2, 2, 3, 4\]"):
        load({"w": asked}, f"{tmp_path}#a@1")
