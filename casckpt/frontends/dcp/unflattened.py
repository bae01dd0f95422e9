"""Flat tensors in a folder of Megatron-core up to 0.15, in the shape that they have without that; see `part_shape`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from casckpt.format.regions import Box, Region, Shape, flat_boxes
from casckpt.tensors.foreign import part_shape

_SHAPE = "nd_reformulated_orig_global_shape"


@dataclass(frozen=True)
class FlatBox:
    """A box of a tensor, and where it lies in the flat chunk that the folder has under ``index``."""

    index: MetadataIndex
    start: int
    offset: Shape
    shape: Shape

    def out_of(self, chunk: torch.Tensor) -> torch.Tensor:
        """It, in memory of its own where it is not all of the chunk; fewer elements of a chunk that is too short."""
        box = torch.Size(self.shape)
        found = chunk.flatten()[self.start : self.start + box.numel()]
        if found.numel() != box.numel():
            return found
        return (found if found.numel() == chunk.numel() else found.clone()).view(box)


def unflatten(metadata: Metadata) -> tuple[Metadata, dict[MetadataIndex, FlatBox]]:
    """The metadata with flat tensors in their own shape, as boxes of it; and what each of these is cut out of."""
    described, cuts = dict(metadata.state_dict_metadata), dict[MetadataIndex, FlatBox]()
    for key, shape in _own_shapes(metadata):
        stored = described.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            continue
        mine = _cuts(key, stored, shape)
        if mine:
            chunks = [ChunkStorageMetadata(torch.Size(cut.offset), torch.Size(cut.shape)) for cut in mine.values()]
            described[key] = TensorStorageMetadata(stored.properties, torch.Size(shape), chunks)
            cuts |= mine
    return (replace(metadata, state_dict_metadata=described) if cuts else metadata), cuts


def _own_shapes(metadata: Metadata) -> Iterator[tuple[str, Shape]]:
    """Give what Megatron says of them."""
    said = getattr(metadata, "mcore_data", None)
    for key, value in said.items() if isinstance(said, dict) else ():
        shape = value.get(_SHAPE) if isinstance(value, dict) else None
        if isinstance(shape, tuple) and all(type(extent) is int for extent in shape):
            yield key, shape


def _cuts(key: str, stored: TensorStorageMetadata, shape: Shape) -> dict[MetadataIndex, FlatBox]:
    """Cut the flat chunks of a tensor into boxes of it; empty for a tensor that is not stored flat."""
    part = part_shape(shape, tuple(stored.size))
    if part is None or any(not set(chunk.sizes[:-1]) <= {1} for chunk in stored.chunks):
        return {}
    found = {}
    for chunk in stored.chunks:
        *at, lo = chunk.offsets
        box = Box(tuple(i * extent for i, extent in zip(at, part, strict=True)), part)
        for piece, start in flat_boxes(Region(box, lo, lo + chunk.sizes[-1])):
            cut = FlatBox(MetadataIndex(key, chunk.offsets), start - lo, piece.offset, piece.shape)
            found[MetadataIndex(key, torch.Size(piece.offset))] = cut
    return found


def places(stored: Mapping[MetadataIndex, Any], cuts: Mapping[MetadataIndex, FlatBox]) -> dict[MetadataIndex, Any]:
    """Tell where each box lies: in the file where its chunk does."""
    return {**stored, **{index: stored[cut.index] for index, cut in cuts.items() if cut.index in stored}}
