"""In a DCP folder, flat tensors from Megatron-core up to 0.15 regain their original shape or remain flat."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from casckpt.frontends.dcp.unflattened import unflatten

Chunk = tuple[Sequence[int], Sequence[int]]
"""Offset and sizes in a tensor of (4, 3) that is stored as (2, 1, 6): two parts of (2, 3)."""


def folder(*chunks: Chunk) -> Metadata:
    held = [ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)) for offset, sizes in chunks]
    stored = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2, 1, 6]), held)
    metadata = Metadata({"w": stored})
    vars(metadata)["mcore_data"] = {"w": {"nd_reformulated_orig_global_shape": (4, 3)}}
    return metadata


def test_flat_chunks_are_boxes_of_the_tensor() -> None:
    described, cuts = unflatten(folder(((0, 0, 0), (1, 1, 6)), ((1, 0, 0), (1, 1, 6))))
    stored = described.state_dict_metadata["w"]
    assert isinstance(stored, TensorStorageMetadata)
    assert stored.size == torch.Size([4, 3])
    assert sorted(cut.offset for cut in cuts.values()) == [(0, 0), (2, 0)]


@pytest.mark.parametrize("first", [0, 1])
def test_a_tensor_with_a_chunk_that_is_not_flat_is_left_unchanged(first: int) -> None:
    chunks: list[Chunk] = [((0, 0, 0), (2, 1, 3)), ((0, 0, 3), (1, 1, 3)), ((1, 0, 3), (1, 1, 3))]
    metadata = folder(*chunks[first:], *chunks[:first])
    described, cuts = unflatten(metadata)
    assert described is metadata
    assert not cuts
