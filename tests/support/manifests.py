"""Manifests of tensors that nobody stored, for the plans that look at manifests alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

import msgspec

from casckpt.format.columns import pack
from casckpt.format.extents import Packed, PackedExtents, build
from casckpt.format.manifest import TENSOR, BlobRef, Manifest, ManifestBody, decode, encode, packed_blobs, packed_entry
from casckpt.format.names import BlobHash, CellDigest, TxId
from casckpt.format.regions import Region, Shape, full_box
from tests.support.geometry import stored_cell

UPLOADER = TxId("20260102T030405000000Z-00000000000000ab-00000000000000cd-7")
CELL = 4096  # bytes
_BLOBS = count(1)


def flat_cells(shape: Shape, ends: Sequence[int]) -> list[Region]:
    """Cells of a whole tensor that end at ``ends``."""
    starts = [0, *ends[:-1]]
    return [Region(full_box(shape), lo, hi) for lo, hi in zip(starts, ends, strict=True)]


def manifest(
    tensors: Mapping[str, tuple[str, int, Shape, Sequence[tuple[Region, bytes]]]], *, worn: bool = False
) -> Manifest:
    """Of each key: dtype, bytes of an element, shape, cells with their digests. All of it in one new blob."""
    entries, end = [], CELL
    for key, (dtype, itemsize, shape, cells) in tensors.items():
        places = []
        for region, digest in cells:
            nbytes = region.numel * itemsize
            places.append(stored_cell(region, 0, end, nbytes, CellDigest(digest)))
            end += nbytes
        entries.append(packed_entry(TENSOR, key, dtype, build(shape, itemsize, CELL // itemsize, places)))
    refs = [BlobRef(BlobHash(f"{next(_BLOBS):064x}"), end, UPLOADER, worn)]
    blobs, table = packed_blobs(refs)
    body = ManifestBody(
        format=1,
        casckpt="0",
        torch="0",
        run="run",
        step=0,
        created_at=0,
        parent=None,
        world_size=1,
        cell_bytes=CELL,
        metadata=msgspec.Raw(msgspec.msgpack.encode({})),
        blobs=blobs,
        entries=entries,
        objects=[],
        attachments=[],
        tree=b"",
    )
    found, data = encode(body, table)
    return decode(data, found)


def as_columns(packed: Packed, numel: int) -> PackedExtents:
    """The long form of extents, which says the same."""
    if isinstance(packed, PackedExtents):
        return packed
    zero, hi, blob, offset = (pack([value]) for value in (0, numel, packed.blob, packed.offset))
    return PackedExtents(pack([]), zero, zero, hi, blob, offset, packed.digests)
