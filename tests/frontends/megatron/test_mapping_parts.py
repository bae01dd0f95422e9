"""Parts of parts, as created by the factories of Megatron's Mamba and GatedDeltaNet layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casckpt.frontends.megatron import CheckpointingException, ShardedTensor, ShardedTensorFactory, load, save

SECTIONS = (2, 1, 3)


@given(data=st.data())
def test_all_parts_together_form_the_narrowed_tensor(data: st.DataObject) -> None:
    """This includes flat and stacked parts: each writes its own elements of the whole tensor."""
    parts, columns, layers = (data.draw(st.integers(1, 3)) for _ in range(3))
    extent = data.draw(st.integers(1, 4))
    start = data.draw(st.integers(0, extent - 1))
    length = data.draw(st.integers(1, extent - start))
    dim = data.draw(st.sampled_from([0, 1]))
    shape = (extent, columns) if dim == 0 else (columns, extent)
    whole = torch.arange(float(layers * parts * extent * columns)).view(layers, parts, *shape)
    found = torch.full((layers, *((parts * length, columns) if dim == 0 else (columns, parts * length))), -1.0)
    for layer in range(layers):
        for rank in range(parts):
            local, offsets = whole[layer, rank], ((0, layer, layers), (1 + dim, rank, parts))
            part = ShardedTensor.from_rank_offsets("k", local, *offsets, prepend_axis_num=1)
            cut = data.draw(st.integers(0, local.numel())) if dim == 0 else None
            for piece in [part] if cut is None else halves(part, cut):
                for one in piece.narrow(dim, start, length):
                    assert one.global_shape == found.shape
                    put(found, one)
    wanted = torch.cat([whole[:, rank].narrow(1 + dim, start, length) for rank in range(parts)], dim=1 + dim)
    assert torch.equal(found, wanted)


def halves(part: ShardedTensor, at: int) -> list[ShardedTensor]:
    flat = torch.as_tensor(part.data).flatten()
    ranges = [slice(0, at), slice(at, len(flat))]
    return [replace(part, data=flat[one], flattened_range=one) for one in ranges if one.start < one.stop]


def put(whole: torch.Tensor, part: ShardedTensor) -> None:
    data = torch.as_tensor(part.data)
    if part.flattened_range is None:
        whole[part.global_slice()] = data
    else:
        whole[part.global_coordinates()] = data


def test_narrowing_returns_views_and_also_works_without_data() -> None:
    data = torch.arange(6.0).view(3, 2)
    part = ShardedTensor.from_rank_offsets("k", data, (0, 1, 4))
    (one,) = part.narrow(0, 1, 2)
    assert torch.as_tensor(one.data).data_ptr() == data[1:].data_ptr()
    assert part.without_data().narrow(0, 1, 2) == [one.without_data()]
    assert flat(slice(0, 2)).narrow(0, 1, 2) == []


def flat(at: slice) -> ShardedTensor:
    data = torch.ones(at.stop - at.start)
    return ShardedTensor.from_rank_offsets_flat("k", data, (3, 2), flattened_range=at)


@pytest.mark.parametrize(
    ("part", "asked", "message"),
    [
        (ShardedTensor.from_rank_offsets("k", torch.ones(3)), (1, 0, 1), "has 1 axes, but dim is 1"),
        (
            ShardedTensor.from_rank_offsets("k", torch.ones(3)),
            (0, 2, 2),
            "2 elements starting at 2 exceed the extent 3",
        ),
        (ShardedTensor("k", None, torch.int8, (2,), (5,), (3,), None), (0, 0, 1), "not equal along axis 0"),
        (flat(slice(0, 3)), (1, 0, 1), "along the first axis only, not along axis 1"),
    ],
)
def test_parts_that_cannot_be_narrowed_are_rejected(
    part: ShardedTensor, asked: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(CheckpointingException, match=message) as caught:
        part.narrow(*asked)
    assert caught.value.key == "k"


def split(template: ShardedTensor) -> ShardedTensorFactory:
    """Return a factory that narrows its argument, as Megatron's Mamba does."""

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        part = replace(
            template, key=key, data=data, dtype=data.dtype, replica_id=replica_id, flattened_range=flattened_range
        )
        starts = [sum(SECTIONS[:number]) for number in range(len(SECTIONS))]
        found = [part.narrow(0, start, length) for start, length in zip(starts, SECTIONS, strict=True)]
        return [replace(one, key=f"{key}.{number}") for number, (one,) in enumerate(found)]

    return ShardedTensorFactory(template.key, template.data, build, torch.cat, template.replica_id)


def test_a_narrowing_factory_is_saved_and_loaded(tmp_path: Path) -> None:
    data = torch.arange(12.0).view(6, 2)
    save({"x": split(ShardedTensor.from_rank_offsets("w", data))}, f"{tmp_path}#a@1")
    asked = {"x": split(ShardedTensor.from_rank_offsets("w", torch.zeros(6, 2)))}
    assert torch.equal(load(asked, f"{tmp_path}#a@1")["x"], data)
