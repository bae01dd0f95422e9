"""Extents: which elements of a tensor lie in which blob at which byte, with the digest of each cell.

An extent is consecutive cells of one tensor that lie consecutively in one blob. Cells are cut at the multiples of the
cell size in the row-major order of the extent's box, so their ends need not be stored: a boundary elsewhere begins a
new extent. Extents are kept and written as columns of numbers, each in the narrowest unsigned type that fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from casckpt.errors import Refused
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.names import CellDigest
from casckpt.format.regions import Box, Region, Shape, full_box, whole
from casckpt.lazy import cached_property

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


class PackedExtents(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Extents as they are stored: columns, see `ExtentTable`. ``boxes``: offset and shape of box 1, of box 2, ..."""

    boxes: bytes
    box: bytes
    lo: bytes
    hi: bytes
    blob: bytes
    offset: bytes
    digests: bytes
    unhashed: bytes = b""


class PackedWhole(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The extents of most tensors, as they are stored: a single one, which is the whole tensor."""

    blob: int
    offset: int
    digests: bytes
    unhashed: bool = False


Packed: TypeAlias = PackedExtents | PackedWhole


class CellPlace(NamedTuple):
    """One cell: its region in flat order of its box, where it lies, its digest. ``nbytes``: its length in bytes."""

    region: Region
    blob: int
    offset: int
    nbytes: int
    digest: CellDigest
    unhashed: bool = False


class Columns(NamedTuple):
    """See `ExtentTable`."""

    box: Ints
    lo: Ints
    hi: Ints
    blob: Ints
    offset: Ints
    digests: npt.NDArray[np.uint8]
    unhashed: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ExtentTable:
    """The extents of one tensor, as columns of equal length, sorted by (box, lo).

    ``boxes``: box 0 is always the whole tensor. ``box``: index into it. ``lo``, ``hi``: elements, in the row-major
    order of the box. ``blob``: index into the manifest's blobs. ``offset``: bytes from the start of the blob file.
    ``digests``: uint8 [cells, 32]. ``unhashed``: bool, True where the bytes were taken on the caller's word (frozen).
    ``cell``: elements of a cell. ``itemsize``: bytes of an element.

    ``whole``: set where a single extent is the whole tensor. Most tables are like that, and so need no columns unless
    they are asked for.
    """

    shape: Shape
    itemsize: int
    cell: int
    boxes: tuple[Box, ...]
    given: Columns | None
    whole: PackedWhole | None = None

    @cached_property
    def columns(self) -> Columns:
        """All columns."""
        if self.given is not None or self.whole is None:
            return self.given or _NOTHING
        one = np.array([0, 0, self.boxes[0].numel, self.whole.blob, self.whole.offset], dtype=np.int64)
        digests = np.frombuffer(self.whole.digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        return Columns(one[0:1], one[1:2], one[2:3], one[3:4], one[4:5], digests, np.array([self.whole.unhashed]))

    @property
    def box(self) -> Ints:
        """Index of the box of each extent."""
        return self.columns.box

    @property
    def lo(self) -> Ints:
        """First element of each extent."""
        return self.columns.lo

    @property
    def hi(self) -> Ints:
        """Element behind the last one of each extent."""
        return self.columns.hi

    @property
    def blob(self) -> Ints:
        """Blob of each extent."""
        return self.columns.blob

    @property
    def offset(self) -> Ints:
        """Byte of the blob file at which each extent starts."""
        return self.columns.offset

    @property
    def digests(self) -> npt.NDArray[np.uint8]:
        """Digests of all cells, in order."""
        return self.columns.digests

    @property
    def unhashed(self) -> npt.NDArray[np.bool_]:
        """Which extents were not hashed when they were saved."""
        return self.columns.unhashed

    def __len__(self) -> int:
        return 1 if self.whole is not None else len(self.lo)

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
            at, nbytes = offset + (start - lo) * self.itemsize, (end - start) * self.itemsize
            yield CellPlace(Region(box, start, end), blob, at, nbytes, digest, unhashed)
            start = end

    def packed(self) -> Packed:
        """As it is stored."""
        return self.packed_columns() if self.whole is None else self.whole

    def packed_columns(self) -> PackedExtents:
        """The long form, which every table has."""
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
    if len(cells) == 1 and cells[0].region == whole(shape):
        one = cells[0]
        packed = PackedWhole(one.blob, one.offset, one.digest, one.unhashed)
        return ExtentTable(shape, itemsize, cell, _only_box(shape), None, packed)
    order = sorted(cells, key=lambda c: (c.region.box.offset, c.region.box.shape, c.region.lo))
    boxes: dict[Box, int] = {full_box(shape): 0}
    rows: list[tuple[int, int, int, int, int, bool]] = []
    for one in order:
        number = boxes.setdefault(one.region.box, len(boxes))
        if rows:
            last, begin, end, where, at, word = rows[-1]
            follows = last == number and end == one.region.lo and end % cell == 0 and where == one.blob
            if follows and at + (end - begin) * itemsize == one.offset and word == one.unhashed:
                rows[-1] = (number, begin, one.region.hi, where, at, word)
                continue
        rows.append((number, one.region.lo, one.region.hi, one.blob, one.offset, one.unhashed))
    digests = np.frombuffer(b"".join(c.digest for c in order), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    numbers = np.array([row[:5] for row in rows], dtype=np.int64).reshape(-1, 5)
    box, lo, hi, blob, offset = numbers.T
    columns = Columns(box, lo, hi, blob, offset, digests, np.array([row[5] for row in rows], dtype=bool))
    table = _shortened(ExtentTable(shape, itemsize, cell, tuple(boxes), columns))
    by_box = np.argsort(numbers[:, 0], kind="stable")  # box 0 may come late in the order of offsets
    return table if (by_box[:-1] < by_box[1:]).all() else _reordered(table, by_box)


def _shortened(table: ExtentTable) -> ExtentTable:
    """The same, in the short form if it has one."""
    columns = table.given
    if columns is None or len(columns.lo) != 1 or columns.box[0] or columns.lo[0]:
        return table
    if columns.hi[0] != table.boxes[0].numel:
        return table
    packed = PackedWhole(
        int(columns.blob[0]), int(columns.offset[0]), columns.digests.tobytes(), bool(columns.unhashed[0])
    )
    return replace(table, boxes=table.boxes[:1], given=None, whole=packed)


@lru_cache(maxsize=4096)
def _only_box(shape: Shape) -> tuple[Box, ...]:
    return (full_box(shape),)


def join(tables: Sequence[ExtentTable]) -> ExtentTable:
    """The extents of several tables of one tensor as one, sorted; they may overlap, which is for others to see."""
    if len(tables) == 1:
        return tables[0]
    first = tables[0]
    boxes: dict[Box, int] = {}
    rows = []
    for table in tables:
        numbers = np.array([boxes.setdefault(box, len(boxes)) for box in table.boxes], dtype=np.int64)
        rows.append(table.columns._replace(box=numbers[table.box]))
    columns = Columns(*(np.concatenate(column) for column in zip(*rows, strict=True)))
    joined = ExtentTable(first.shape, first.itemsize, first.cell, tuple(boxes), columns)
    return _reordered(joined, np.lexsort((joined.lo, joined.box)))


def with_blobs(table: ExtentTable, numbers: Ints) -> ExtentTable:
    """The same extents in other blobs: ``numbers[i]`` in place of blob i."""
    if table.whole is not None:
        short = table.whole
        moved = PackedWhole(int(numbers[short.blob]), short.offset, short.digests, short.unhashed)
        return ExtentTable(table.shape, table.itemsize, table.cell, table.boxes, None, moved)
    if not len(table):
        return table
    columns = table.columns._replace(blob=numbers[table.blob])
    return ExtentTable(table.shape, table.itemsize, table.cell, table.boxes, columns)


def _reordered(table: ExtentTable, order: npt.NDArray[np.intp]) -> ExtentTable:
    counts = table.cells[order]
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    digests = table.digests[np.repeat(table.first_cell[order], counts) + within]
    box, lo, hi, blob, offset, _, unhashed = table.columns
    columns = Columns(box[order], lo[order], hi[order], blob[order], offset[order], digests, unhashed[order])
    return ExtentTable(table.shape, table.itemsize, table.cell, table.boxes, columns)


def unpacked(packed: Packed, shape: Shape, itemsize: int, cell: int, blob_sizes: Ints) -> ExtentTable:
    """A table from what is stored. Raises Refused for anything that does not fit the tensor or the blobs.

    After it, no number of the table points outside the tensor, a box, a blob or the digests.
    """
    if isinstance(packed, PackedExtents):
        return _unpacked_columns(packed, (shape, itemsize, cell), blob_sizes)
    boxes = _only_box(shape)
    count = boxes[0].numel
    if not 0 <= packed.blob < len(blob_sizes) or packed.offset < DATA_OFFSET or not count:
        raise Refused("an extent names a blob that the manifest does not have, lies in its header, or is empty")
    if count * itemsize > int(blob_sizes[packed.blob]) - packed.offset:
        raise Refused("an extent lies outside its blob")
    if len(packed.digests) != -(-count // cell) * DIGEST_BYTES:
        raise Refused("an extent table has another number of digests than of cells")
    return ExtentTable(shape, itemsize, cell, boxes, None, packed)


def _unpacked_columns(packed: PackedExtents, frame: tuple[Shape, int, int], blob_sizes: Ints) -> ExtentTable:
    shape, itemsize, cell = frame
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
    if int((hi - lo).sum()) != boxes[0].numel:
        raise Refused("the extents of a tensor do not add up to it")
    cells = int((-(-hi // cell) - lo // cell).sum())
    if len(packed.digests) != cells * DIGEST_BYTES or len(packed.unhashed) not in (0, -(-count // 8)):
        raise Refused("an extent table has another number of digests than of cells")
    digests = np.frombuffer(packed.digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    bits = np.unpackbits(np.frombuffer(packed.unhashed, dtype=np.uint8), count=count) if packed.unhashed else None
    unhashed = np.zeros(count, dtype=bool) if bits is None else bits.astype(bool)
    return ExtentTable(shape, itemsize, cell, boxes, Columns(box, lo, hi, blob, offset, digests, unhashed))


def _sorted(box: Ints, lo: Ints, hi: Ints) -> bool:
    """Sorted by (box, lo), and disjoint inside each box."""
    same = box[1:] == box[:-1]
    return bool(((box[1:] > box[:-1]) | (same & (lo[1:] >= hi[:-1]))).all())


def _boxes(numbers: Ints, shape: Shape) -> Iterable[Box]:
    outside = numbers[:, 1] > np.array(shape, dtype=np.int64) - numbers[:, 0]
    if outside.any() or (numbers[:, 1] == 0).any():
        raise Refused("a box of an extent table lies outside its tensor")
    return (Box(tuple(offset), tuple(extent)) for offset, extent in numbers.tolist())


_ZERO = np.empty(0, dtype=np.int64)
_NOTHING = Columns(
    _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, np.empty((0, DIGEST_BYTES), dtype=np.uint8), np.empty(0, dtype=bool)
)
