"""Random shapes, regions and partitions, their elements according to numpy, and manifests of such tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import prod

import numpy as np
from hypothesis import strategies as st

from casckpt.format.extents import MAX_LINKS, ExtentTable, Frame, StoredCell, build
from casckpt.format.manifest import Manifest, decode, encode
from casckpt.format.names import BlobHash, CellDigest, TxId
from casckpt.format.regions import Box, Region, Shape, full_box, normalise, whole
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.index import TENSOR
from casckpt.plan.cells import Group, plan_cells
from tests.support.repositories import draft

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
full_shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def elements(region: Region, shape: Shape) -> list[int]:
    """Return the row-major positions of a region's elements in the tensor, in numpy's slice order."""
    box = region.box
    every = np.arange(prod(shape)).reshape(shape)
    inside = every[tuple(slice(lo, hi) for lo, hi in zip(box.offset, box.end, strict=True))]
    found: list[int] = inside.reshape(-1)[region.lo : region.hi].tolist()
    return found


def box_elements(boxes: Sequence[Box], shape: Shape) -> list[int]:
    """Return the elements of several boxes in order."""
    return [i for box in boxes for i in elements(Region(box, 0, box.numel), shape)]


def only_cell(table: ExtentTable) -> StoredCell | None:
    """Return the cell that holds the whole tensor, or None if there are several cells, no cells, or a coded cell."""
    cells = list(table.stored_cells())
    is_only = len(cells) == 1 and cells[0].frame is None and cells[0].region == whole(table.shape)
    return cells[0] if is_only else None


@st.composite
def boxes(draw: st.DrawFn, shape: Shape) -> Box:
    """Draw a box inside a tensor. It may be empty."""
    offset, extent = [], []
    for size in shape:
        start = draw(st.integers(0, size))
        offset.append(start)
        extent.append(draw(st.integers(0, size - start)))
    return Box(tuple(offset), tuple(extent))


@st.composite
def regions(draw: st.DrawFn, shape: Shape) -> Region:
    """Draw a region inside a tensor: a box or part of a box."""
    box = draw(boxes(shape))
    if draw(st.booleans()):
        return Region(box, 0, box.numel)
    lo = draw(st.integers(0, box.numel))
    return Region(box, lo, draw(st.integers(lo, box.numel)))


@st.composite
def partitions(draw: st.DrawFn, shape: Shape) -> list[Region]:
    """Draw disjoint regions that cover a tensor: boxes that are split repeatedly, some of them into flat ranges."""
    parts = [full_box(shape)]
    for _ in range(draw(st.integers(0, 4))):
        number = draw(st.integers(0, len(parts) - 1))
        box = parts[number]
        wide = [dim for dim, extent in enumerate(box.shape) if extent > 1]
        if wide:
            dim = draw(st.sampled_from(wide))
            parts[number : number + 1] = _split(box, dim, draw(st.integers(1, box.shape[dim] - 1)))
    found = []
    for box in parts:
        ends = sorted({0, box.numel, *draw(st.lists(st.integers(0, box.numel), max_size=3))})
        found += [Region(box, lo, hi) for lo, hi in pairwise(ends)]
    return draw(st.permutations(found))


def _split(box: Box, dim: int, at: int) -> list[Box]:
    first = Box(box.offset, (*box.shape[:dim], at, *box.shape[dim + 1 :]))
    offset = (*box.offset[:dim], box.offset[dim] + at, *box.offset[dim + 1 :])
    return [first, Box(offset, (*box.shape[:dim], box.shape[dim] - at, *box.shape[dim + 1 :]))]


def digest(region: Region, version: int = 0) -> CellDigest:
    """Return a fake digest of a region's bytes. It differs for each version."""
    return CellDigest(hashlib.sha256(f"{region}{version}".encode()).digest())


def cells_of(groups: Sequence[Group]) -> list[Region]:
    return [Region(group.box, cut.lo, cut.hi) for group in groups for cut in group.cuts]


def stored_cell(region: Region, blob: int, offset: int, nbytes: int, digest: CellDigest) -> StoredCell:
    return StoredCell(blob, offset, nbytes, region.box, region.lo, region.hi, digest)


def table_of(shape: Shape, cell: int, cells: Sequence[Region], *, itemsize: int = 2, per_blob: int = 7) -> ExtentTable:
    """Return a table of these cells as a save would place them: in order, with a new blob every few cells."""
    places, offset = [], 4096
    for number, region in enumerate(cells):
        if number % per_blob == 0:
            offset = 4096
        nbytes = region.numel * itemsize
        places.append(stored_cell(region, number // per_blob, offset, nbytes, digest(region)))
        offset += nbytes
    return build(shape, itemsize, cell, places)


def rows(shape: Shape, ranks: int) -> list[Region]:
    """Return the region of each of ``ranks`` when torch.chunk splits a tensor along its first dimension."""
    step = -(-shape[0] // ranks)
    starts = [min(rank * step, shape[0]) for rank in range(ranks + 1)]
    split = (Box((lo, *(0 for _ in shape[1:])), (hi - lo, *shape[1:])) for lo, hi in pairwise(starts))
    return [Region(box, 0, box.numel) for box in split if box.numel]


def columns(shape: Shape, ranks: int) -> list[Region]:
    """Return the region of each of ``ranks`` when a matrix is split along its second dimension."""
    step = -(-shape[1] // ranks)
    starts = [min(rank * step, shape[1]) for rank in range(ranks + 1)]
    split = (Box((0, lo), (shape[0], hi - lo)) for lo, hi in pairwise(starts))
    return [Region(box, 0, box.numel) for box in split if box.numel]


def flat(shape: Shape, ends: Sequence[int]) -> list[Region]:
    """Return flat shards of a whole tensor that end at ``ends``."""
    starts = [0, *sorted(ends)[:-1]]
    return [Region(full_box(shape), lo, hi) for lo, hi in zip(starts, sorted(ends), strict=True) if lo < hi]


def normal(cells: Sequence[Region], shape: Shape) -> set[Region]:
    """Return the normal form of regions."""
    return {normalise(cell, shape) for cell in cells}


@dataclass(frozen=True)
class Case:
    """The cells of a tensor, each somewhere in a blob."""

    shape: Shape
    itemsize: int
    cell: int
    cells: list[StoredCell]
    blob_sizes: list[int]

    @property
    def table(self) -> ExtentTable:
        return build(self.shape, self.itemsize, self.cell, self.cells)


@st.composite
def cases(draw: st.DrawFn, *, coded: bool = True) -> Case:
    """Draw a tensor with any cells in any blobs. ``coded``: some cells may be frames."""
    shape, cell, itemsize = draw(full_shapes), draw(st.integers(1, 12)), draw(st.sampled_from([1, 2, 4, 8, 16]))
    blobs = draw(st.integers(1, 3))
    ends = [draw(st.integers(4096, 5000)) for _ in range(blobs)]
    regions = [one for part in draw(partitions(shape)) for one in cells_of(plan_cells(part, shape, cell, None))]
    cells = [draw(_placed_cells(one, itemsize, ends, coded)) for one in regions]
    return Case(shape, itemsize, cell, cells, ends)


@st.composite
def _placed_cells(draw: st.DrawFn, region: Region, itemsize: int, ends: list[int], coded: bool) -> StoredCell:
    """Draw a cell that follows the current ``ends`` of the blobs. Some cells are frames, with or without bases."""
    nbytes = region.numel * itemsize
    made: StoredCell | None = None
    links = draw(st.sampled_from([0, 0, 0, 1, 2, 3, MAX_LINKS])) if coded else 0
    for link in range(links, -1, -1):
        frame = None
        if link < links or (coded and draw(st.integers(0, 4)) == 0):
            frame = Frame(draw(st.integers(1, nbytes)), made)
        blob = draw(st.integers(0, len(ends) - 1))
        made = stored_cell(region, blob, ends[blob], nbytes, digest(region, link))._replace(frame=frame)
        ends[blob] += made.stored + draw(st.sampled_from([0, 0, 0, 64]))
    assert made is not None
    return made


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
