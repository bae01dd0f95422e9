"""Tensors split into the parts of any grid, as Megatron-style shards."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import torch
from hypothesis import strategies as st

from casckpt.frontends.megatron import ShardedTensor

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
