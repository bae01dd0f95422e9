"""Restores the shapes of flattened tensors in folders that Megatron-core up to 0.15 wrote; see `part_shape`."""

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
    """A box of a tensor, and its start in the flat chunk that the folder stores under ``index``."""

    index: MetadataIndex
    start: int
    offset: Shape
    shape: Shape

    def out_of(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return the box's elements from a chunk, as a copy unless they are the whole chunk.

        A short chunk yields fewer elements.
        """
        box = torch.Size(self.shape)
        part = chunk.flatten()[self.start : self.start + box.numel()]
        if part.numel() != box.numel():
            return part
        return (part if part.numel() == chunk.numel() else part.clone()).view(box)


def unflatten(metadata: Metadata) -> tuple[Metadata, dict[MetadataIndex, FlatBox]]:
    """Describe flat tensors as boxes of their original shape.

    Return the metadata, and the part of a chunk for each box.
    """
    described, cuts = dict(metadata.state_dict_metadata), dict[MetadataIndex, FlatBox]()
    for key, shape in _own_shapes(metadata):
        stored = described.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            continue
        boxes = _cuts(key, stored, shape)
        if boxes:
            chunks = [ChunkStorageMetadata(torch.Size(cut.offset), torch.Size(cut.shape)) for cut in boxes.values()]
            described[key] = TensorStorageMetadata(stored.properties, torch.Size(shape), chunks)
            cuts |= boxes
    return (replace(metadata, state_dict_metadata=described) if cuts else metadata), cuts


def _own_shapes(metadata: Metadata) -> Iterator[tuple[str, Shape]]:
    """Yield the shapes that Megatron recorded."""
    noted = getattr(metadata, "mcore_data", None)
    for key, value in noted.items() if isinstance(noted, dict) else ():
        shape = value.get(_SHAPE) if isinstance(value, dict) else None
        if isinstance(shape, tuple) and all(type(extent) is int for extent in shape):
            yield key, shape


def _cuts(key: str, stored: TensorStorageMetadata, shape: Shape) -> dict[MetadataIndex, FlatBox]:
    """Split a tensor's flat chunks into boxes. Return an empty dict for a tensor that is not flat."""
    part = part_shape(shape, tuple(stored.size))
    if part is None or any(not set(chunk.sizes[:-1]) <= {1} for chunk in stored.chunks):
        return {}
    cuts = {}
    for chunk in stored.chunks:
        *at, lo = chunk.offsets
        box = Box(tuple(i * extent for i, extent in zip(at, part, strict=True)), part)
        for piece, start in flat_boxes(Region(box, lo, lo + chunk.sizes[-1])):
            cut = FlatBox(MetadataIndex(key, chunk.offsets), start - lo, piece.offset, piece.shape)
            cuts[MetadataIndex(key, torch.Size(piece.offset))] = cut
    return cuts


def places(stored: Mapping[MetadataIndex, Any], cuts: Mapping[MetadataIndex, FlatBox]) -> dict[MetadataIndex, Any]:
    """Return the location of each box, which is the location of its chunk."""
    return {**stored, **{index: stored[cut.index] for index, cut in cuts.items() if cut.index in stored}}
