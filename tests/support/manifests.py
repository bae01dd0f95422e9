"""Manifests of tensors that are not stored, for code that reads only manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from casckpt.format.extents import build
from casckpt.format.manifest import Manifest, decode, encode
from casckpt.format.names import BlobHash, CellDigest, TxId
from casckpt.format.regions import Region, Shape, full_box
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.index import TENSOR
from tests.support.geometry import stored_cell
from tests.support.repositories import draft

UPLOADER = TxId("20260102T030405000000Z-00000000000000ab-00000000000000cd-7")
CELL = 4096  # bytes
_BLOBS = count(1)


def flat_cells(shape: Shape, ends: Sequence[int]) -> list[Region]:
    """Return the cells of a whole tensor that end at ``ends``."""
    starts = [0, *ends[:-1]]
    return [Region(full_box(shape), lo, hi) for lo, hi in zip(starts, ends, strict=True)]


def manifest(
    tensors: Mapping[str, tuple[str, int, Shape, Sequence[tuple[Region, bytes]]]], *, worn: bool = False
) -> Manifest:
    """Create a manifest from the dtype, element size, shape and cells (with digests) of each key.

    All cells are in one new blob.
    """
    streams, end = {}, CELL
    for key, (dtype, itemsize, shape, cells) in tensors.items():
        places = []
        for region, digest in cells:
            nbytes = region.numel * itemsize
            places.append(stored_cell(region, 0, end, nbytes, CellDigest(digest)))
            end += nbytes
        streams[TENSOR, key, 0, None] = (dtype, build(shape, itemsize, CELL // itemsize, places))
    refs = [BlobRef(BlobHash(f"{next(_BLOBS):064x}"), end, UPLOADER, worn)]
    made = encode(draft(refs, cell_bytes=CELL, streams=streams))
    return decode(made.data, made.id)
