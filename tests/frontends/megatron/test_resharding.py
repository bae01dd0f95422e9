"""A tensor that was saved with any sharding loads with any other."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from casckpt.frontends.megatron import ShardedTensor, load, save

SHAPE, PREPENDED = (4, 6), 2
WHOLE = torch.arange(float(2 * prod(SHAPE))).view(PREPENDED, *SHAPE)
FRAGMENTS = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 6]))
CUTS = st.none() | st.lists(st.floats(0, 1), max_size=3)


def parts(whole: torch.Tensor, fragments: tuple[int, int], cuts: list[float] | None) -> list[ShardedTensor]:
    """Return all parts of a grid. ``cuts``: the fractions at which each part is split into flat parts."""
    layers, *rest = whole.shape
    local = tuple(extent // count for extent, count in zip(rest, fragments, strict=True))
    found = []
    for layer, *at in product(range(layers), *map(range, fragments)):
        offsets = [(0, layer, layers), *((axis + 1, i, fragments[axis]) for axis, i in enumerate(at))]
        values = whole[layer][tuple(slice(i * n, i * n + n) for i, n in zip(at, local, strict=True))]
        if cuts is None:
            found.append(ShardedTensor.from_rank_offsets("w", values.clone(), *offsets, prepend_axis_num=1))
            continue
        ends = sorted({0, prod(local), *(int(cut * prod(local)) for cut in cuts)})
        for lo, hi in pairwise(ends):
            data = values.flatten()[lo:hi].clone()
            found.append(
                ShardedTensor.from_rank_offsets_flat(
                    "w", data, local, *offsets, prepend_axis_num=1, flattened_range=slice(lo, hi)
                )
            )
    return found


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
