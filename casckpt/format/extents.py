"""Extents: which elements of a tensor lie in which blob at which byte, with the digest of each cell.

An extent is consecutive cells of one tensor that lie consecutively in one blob. Cells are cut at the multiples of the
cell size in the row-major order of the extent's box, so their ends need not be stored: a boundary elsewhere begins a
new extent. Extents are kept and written as columns of numbers, each in the narrowest unsigned type that fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from casckpt.errors import Refused
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.names import CellDigest
from casckpt.format.regions import Box, Region, Shape, full_box

Ints: TypeAlias = npt.NDArray[np.int64]
DIGEST_BYTES = 32
_WIDTHS = (1, 2, 4, 8)


def pack(values: npt.ArrayLike) -> bytes:
    """A column: one byte that gives the width of an item in bytes, then little-endian unsigned items."""
    array = np.asarray(values, dtype=np.int64).reshape(-1)
    top = int(array.max()) if array.size else 0
    width = next(w for w in _WIDTHS if top < 1 << min(8 * w, 63))
    return bytes([width]) + array.astype(f"<u{width}").tobytes()


def unpack(data: bytes) -> Ints:
    """The items of a column as int64. Raises Refused for anything that `pack` does not make."""
    width = data[0] if data else 0
    if width not in _WIDTHS or (len(data) - 1) % width:
        raise Refused("a column of the manifest has no valid width or length")
    array = np.frombuffer(data, dtype=f"<u{width}", offset=1)
    if width == 8 and array.size and int(array.max()) > 2**62:
        raise Refused("a column of the manifest holds a number beyond 2**62")
    return array.astype(np.int64)


class PackedExtents(msgspec.Struct, frozen=True, array_like=True):
    """Extents as they are stored: columns, see `ExtentTable`. ``boxes``: offset and shape of box 1, of box 2, ..."""

    boxes: bytes
    box: bytes
    lo: bytes
    hi: bytes
    blob: bytes
    offset: bytes
    digests: bytes
    unhashed: bytes = b""


class CellPlace(NamedTuple):
    """One cell: its region in flat order of its box, where it lies, its digest. ``nbytes``: its length in bytes."""

    region: Region
    blob: int
    offset: int
    nbytes: int
    digest: CellDigest
    unhashed: bool = False


@dataclass(frozen=True)
class ExtentTable:
    """The extents of one tensor, as columns of equal length, sorted by (box, lo).

    ``boxes``: box 0 is always the whole tensor. ``box``: index into it. ``lo``, ``hi``: elements, in the row-major
    order of the box. ``blob``: index into the manifest's blobs. ``offset``: bytes from the start of the blob file.
    ``digests``: uint8 [cells, 32]. ``unhashed``: bool, True where the bytes were taken on the caller's word (frozen).
    ``cell``: elements of a cell. ``itemsize``: bytes of an element.
    """

    shape: Shape
    itemsize: int
    cell: int
    boxes: tuple[Box, ...]
    box: Ints
    lo: Ints
    hi: Ints
    blob: Ints
    offset: Ints
    digests: npt.NDArray[np.uint8]
    unhashed: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.lo)

    @cached_property
    def cells(self) -> Ints:
        """Number of cells of each extent."""
        return np.asarray(-(-self.hi // self.cell) - self.lo // self.cell)

    @cached_property
    def first_cell(self) -> Ints:
        """Row in ``digests`` of each extent's first cell."""
        return np.asarray(np.cumsum(self.cells) - self.cells)

    @property
    def nbytes(self) -> Ints:
        """Bytes of each extent."""
        return (self.hi - self.lo) * self.itemsize

    def region(self, index: int) -> Region:
        """Region of one extent."""
        return Region(self.boxes[self.box[index]], int(self.lo[index]), int(self.hi[index]))

    def places(self, index: int) -> Iterable[CellPlace]:
        """The cells of one extent, in order."""
        lo, hi, first = int(self.lo[index]), int(self.hi[index]), int(self.first_cell[index])
        box, blob, offset = self.boxes[self.box[index]], int(self.blob[index]), int(self.offset[index])
        unhashed, start = bool(self.unhashed[index]), lo
        for row in range(first, first + int(self.cells[index])):
            end = min((start // self.cell + 1) * self.cell, hi)
            digest = CellDigest(self.digests[row].tobytes())
            nbytes = (end - start) * self.itemsize
            yield CellPlace(
                Region(box, start, end), blob, offset + (start - lo) * self.itemsize, nbytes, digest, unhashed
            )
            start = end

    def packed(self) -> PackedExtents:
        """As it is stored."""
        numbers = [number for box in self.boxes[1:] for number in (*box.offset, *box.shape)]
        unhashed = np.packbits(self.unhashed).tobytes() if self.unhashed.any() else b""
        return PackedExtents(
            pack(numbers),
            pack(self.box),
            pack(self.lo),
            pack(self.hi),
            pack(self.blob),
            pack(self.offset),
            self.digests.tobytes(),
            unhashed,
        )


def build(shape: Shape, itemsize: int, cell: int, cells: Sequence[CellPlace]) -> ExtentTable:
    """A table from cells in any order: sorted, and joined to extents where they follow each other."""
    order = sorted(cells, key=lambda c: (c.region.box.offset, c.region.box.shape, c.region.lo))
    boxes: dict[Box, int] = {full_box(shape): 0}
    rows: list[tuple[int, int, int, int, int, bool]] = []
    for one in order:
        box = boxes.setdefault(one.region.box, len(boxes))
        if rows:
            last_box, lo, hi, blob, offset, unhashed = rows[-1]
            follows = last_box == box and hi == one.region.lo and hi % cell == 0 and blob == one.blob
            if follows and offset + (hi - lo) * itemsize == one.offset and unhashed == one.unhashed:
                rows[-1] = (box, lo, one.region.hi, blob, offset, unhashed)
                continue
        rows.append((box, one.region.lo, one.region.hi, one.blob, one.offset, one.unhashed))
    digests = np.frombuffer(b"".join(c.digest for c in order), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    columns = np.array([row[:5] for row in rows], dtype=np.int64).reshape(-1, 5)
    by_box = np.argsort(columns[:, 0], kind="stable")  # box 0 may come late in the order of offsets
    table = _table(
        (shape, itemsize, cell), tuple(boxes), columns, digests, np.array([row[5] for row in rows], dtype=bool)
    )
    return table if (by_box[:-1] < by_box[1:]).all() else _reordered(table, by_box)


def join(tables: Sequence[ExtentTable]) -> ExtentTable:
    """The extents of several tables of one tensor as one, sorted; they may overlap, which is for others to see."""
    if len(tables) == 1:
        return tables[0]
    first = tables[0]
    boxes: dict[Box, int] = {}
    columns, digests = [], []
    for table in tables:
        numbers = np.array([boxes.setdefault(box, len(boxes)) for box in table.boxes], dtype=np.int64)
        columns.append(np.stack([numbers[table.box], table.lo, table.hi, table.blob, table.offset], axis=1))
        digests.append(table.digests)
    unhashed = np.concatenate([table.unhashed for table in tables])
    joined = _table(
        (first.shape, first.itemsize, first.cell),
        tuple(boxes),
        np.concatenate(columns),
        np.concatenate(digests),
        unhashed,
    )
    return _reordered(joined, np.lexsort((joined.lo, joined.box)))


def with_blobs(table: ExtentTable, numbers: Ints) -> ExtentTable:
    """The same extents in other blobs: ``numbers[i]`` in place of blob i."""
    return replace(table, blob=numbers[table.blob]) if len(table) else table


def _table(
    frame: tuple[Shape, int, int], boxes: tuple[Box, ...], columns: Ints, digests: Any, unhashed: Any
) -> ExtentTable:
    """``frame``: shape, itemsize, cell. ``columns``: [rows, 5]."""
    shape, itemsize, cell = frame
    box, lo, hi, blob, offset = columns.T
    return ExtentTable(shape, itemsize, cell, boxes, box, lo, hi, blob, offset, digests, unhashed)


def _reordered(table: ExtentTable, order: npt.NDArray[np.intp]) -> ExtentTable:
    counts = table.cells[order]
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    digests = table.digests[np.repeat(table.first_cell[order], counts) + within]
    columns = np.stack([table.box, table.lo, table.hi, table.blob, table.offset], axis=1)[order]
    return _table((table.shape, table.itemsize, table.cell), table.boxes, columns, digests, table.unhashed[order])


def unpacked(packed: PackedExtents, shape: Shape, itemsize: int, cell: int, blob_sizes: Ints) -> ExtentTable:
    """A table from what is stored. Raises Refused for anything that does not fit the tensor or the blobs.

    After it, no number of the table points outside the tensor, a box, a blob or the digests.
    """
    box, lo, hi, blob, offset = map(unpack, (packed.box, packed.lo, packed.hi, packed.blob, packed.offset))
    count, rank = len(lo), len(shape)
    numbers = unpack(packed.boxes)
    if {len(box), len(hi), len(blob), len(offset)} != {count} or (len(numbers) % (2 * rank) if rank else len(numbers)):
        raise Refused("the columns of an extent table differ in length")
    boxes = (full_box(shape), *_boxes(numbers.reshape(-1, 2, rank) if rank else numbers.reshape(0, 2, 0), shape))
    if count and not (box.max() < len(boxes) and blob.max() < len(blob_sizes)):
        raise Refused("an extent names a box or a blob that the manifest does not have")
    sizes = np.array([b.numel for b in boxes], dtype=np.int64)
    if not ((lo < hi) & (hi <= sizes[box])).all():
        raise Refused("an extent lies outside its box")
    room = blob_sizes[blob] - offset  # compared by division: a product of hostile numbers could wrap around
    if not ((room >= 0) & (hi - lo <= room // itemsize)).all():
        raise Refused("an extent lies outside its blob")
    if (offset < DATA_OFFSET).any() or not _sorted(box, lo, hi):
        raise Refused("an extent lies in the header of a blob, or the extents of a tensor overlap or are out of order")
    cells = int((-(-hi // cell) - lo // cell).sum())
    if len(packed.digests) != cells * DIGEST_BYTES or len(packed.unhashed) not in (0, -(-count // 8)):
        raise Refused("an extent table has another number of digests than of cells")
    digests = np.frombuffer(packed.digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    bits = np.unpackbits(np.frombuffer(packed.unhashed, dtype=np.uint8), count=count) if packed.unhashed else None
    unhashed = np.zeros(count, dtype=bool) if bits is None else bits.astype(bool)
    return ExtentTable(shape, itemsize, cell, boxes, box, lo, hi, blob, offset, digests, unhashed)


def _sorted(box: Ints, lo: Ints, hi: Ints) -> bool:
    """Sorted by (box, lo), and disjoint inside each box."""
    same = box[1:] == box[:-1]
    return bool(((box[1:] > box[:-1]) | (same & (lo[1:] >= hi[:-1]))).all())


def _boxes(numbers: Ints, shape: Shape) -> Iterable[Box]:
    outside = numbers[:, 1] > np.array(shape, dtype=np.int64) - numbers[:, 0]
    if outside.any() or (numbers[:, 1] == 0).any():
        raise Refused("a box of an extent table lies outside its tensor")
    return (Box(tuple(offset), tuple(extent)) for offset, extent in numbers.tolist())
