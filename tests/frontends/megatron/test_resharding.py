"""A tensor that was saved with any sharding loads with any other."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from casckpt.frontends.megatron import load, save
from tests.support.grids import CUTS, FRAGMENTS, PREPENDED, SHAPE, WHOLE, parts

counter = iter(range(10**9))


@given(saved=FRAGMENTS, saved_cuts=CUTS, loaded=FRAGMENTS, loaded_cuts=CUTS)
def test_any_sharding_loads_from_any_other(
    saved: tuple[int, int], saved_cuts: list[float] | None, loaded: tuple[int, int], loaded_cuts: list[float] | None
) -> None:
    where = f"memory://resharding#a@{next(counter)}"
    save({"w": parts(WHOLE, saved, saved_cuts)}, where)
    asked = parts(torch.zeros_like(WHOLE), loaded, loaded_cuts)
    expected = parts(WHOLE, loaded, loaded_cuts)
    for found, wanted in zip(load({"w": asked}, where)["w"], expected, strict=True):
        assert torch.equal(found, torch.as_tensor(wanted.data))


@given(rows=st.integers(1, 8), columns=st.integers(1, 8), cuts=CUTS)
def test_a_different_shape_is_padded_with_zeros_and_truncated(
    rows: int, columns: int, cuts: list[float] | None
) -> None:
    where = f"memory://padding#a@{next(counter)}"
    save({"w": parts(WHOLE, (2, 3), None)}, where)
    padded = torch.zeros(PREPENDED, rows, columns)
    common = (slice(None), slice(min(rows, SHAPE[0])), slice(min(columns, SHAPE[1])))
    padded[common] = WHOLE[common]
    asked = parts(torch.full_like(padded, -1), (1, 1), cuts)
    for one in asked:
        one.allow_shape_mismatch = True
    for found, wanted in zip(load({"w": asked}, where)["w"], parts(padded, (1, 1), cuts), strict=True):
        assert torch.equal(found, torch.as_tensor(wanted.data))
