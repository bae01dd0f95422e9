"""Extents: which elements of a tensor lie in which blob at which byte, with the digest of each cell.

An extent is consecutive cells of one tensor that lie consecutively in one blob. Cells are cut at the multiples of the
cell size in the row-major order of the extent's box, so their ends need not be stored: a boundary elsewhere begins a
new extent. Extents are kept as columns of numbers; how they are stored is said in `casckpt.format.sections.tables`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from casckpt.format.columns import Ints
from casckpt.format.names import CellDigest
from casckpt.format.regions import Box, Region, Shape, full_box, whole
from casckpt.lazy import cached_property

DIGEST_BYTES = 32


class Whole(msgspec.Struct, frozen=True, gc=False):
    """The extents of most tensors: a single one, which is the whole tensor."""

    blob: int
    offset: int
    digests: bytes
    unhashed: bool = False


class StoredCell(NamedTuple):
    """One cell: the elements [lo, hi) in the row-major order of ``box``, where they lie, and their digest.

    ``nbytes`` = (hi - lo) * itemsize.
    """

    blob: int
    offset: int
    nbytes: int
    box: Box
    lo: int
    hi: int
    digest: CellDigest
    unhashed: bool = False

    @property
    def region(self) -> Region:
        """The elements as a region."""
        return Region(self.box, self.lo, self.hi)


class Extent(NamedTuple):
    """One extent: the elements [lo, hi) of ``box`` at ``offset`` of a blob. ``row``: of its first cell's digest."""

    box: Box
    lo: int
    hi: int
    blob: int
    offset: int
    unhashed: bool
    row: int

    @property
    def region(self) -> Region:
        """The elements as a region."""
        return Region(self.box, self.lo, self.hi)


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
    """

    shape: Shape
    itemsize: int
    cell: int
    boxes: tuple[Box, ...]
    form: Columns | Whole  # most tables are one extent, and need no columns unless somebody asks for them

    @cached_property
    def columns(self) -> Columns:
        """All columns."""
        form = self.form
        if isinstance(form, Columns):
            return form
        one = np.array([0, 0, self.boxes[0].numel, form.blob, form.offset], dtype=np.int64)
        digests = np.frombuffer(form.digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        return Columns(one[0:1], one[1:2], one[2:3], one[3:4], one[4:5], digests, np.array([form.unhashed]))

    def __len__(self) -> int:
        return len(self.form.lo) if isinstance(self.form, Columns) else 1

    @property
    def is_whole(self) -> bool:
        """Is a single extent the whole tensor?"""
        form = self.form
        if isinstance(form, Whole):
            return True
        return len(form.lo) == 1 and not form.box[0] and not form.lo[0] and bool(form.hi[0] == self.boxes[0].numel)

    @cached_property
    def cells(self) -> Ints:
        """Number of cells of each extent."""
        return np.asarray(-(-self.columns.hi // self.cell) - self.columns.lo // self.cell)

    @cached_property
    def first_cell(self) -> Ints:
        """Row in ``digests`` of each extent's first cell."""
        return np.asarray(np.cumsum(self.cells) - self.cells)

    def region(self, index: int) -> Region:
        """Return the region of one extent."""
        columns = self.columns
        return Region(self.boxes[columns.box[index]], int(columns.lo[index]), int(columns.hi[index]))

    def stored_cells(self, rows: Iterable[int] | None = None) -> Iterator[StoredCell]:
        """Iterate over the cells of these extents (None: of all extents), in order."""
        extents = self._extents(self.columns, range(len(self)) if rows is None else rows)
        return chain.from_iterable(self._cells(extent, 0, extent.hi) for extent in extents)

    def cells_in(self, box: int, lo: int, hi: int) -> Iterator[StoredCell]:
        """Iterate over the cells that hold any of the elements [lo, hi) of a box (by its number), in order."""
        form = self.form
        if isinstance(form, Whole):
            return self._cells_of_whole(form, lo, hi)
        return chain.from_iterable(self._cells(extent, lo, hi) for extent in self.extents_in(box, lo, hi))

    def extents_in(self, box: int, lo: int, hi: int) -> Iterator[Extent]:
        """Iterate over the extents that hold any of the elements [lo, hi) of a box (by its number), in order."""
        form, first, last = self.form, 0, len(self)
        if isinstance(form, Whole):
            only = Extent(self.boxes[0], 0, self.boxes[0].numel, form.blob, form.offset, form.unhashed, 0)
            return iter((only,))
        if len(self.boxes) > 1:
            first, last = (int(i) for i in np.searchsorted(form.box, [box, box + 1]))
        begin = first + int(np.searchsorted(form.hi[first:last], lo, side="right"))
        return self._extents(form, range(begin, first + int(np.searchsorted(form.lo[first:last], hi, side="left"))))

    def _extents(self, columns: Columns, rows: Iterable[int]) -> Iterator[Extent]:
        box, lo, hi, blob, offset, _, unhashed = columns
        boxes, first_cell = self.boxes, self.first_cell
        for i in rows:
            place = int(blob[i]), int(offset[i])
            yield Extent(boxes[box[i]], int(lo[i]), int(hi[i]), *place, bool(unhashed[i]), int(first_cell[i]))

    def _cells(self, extent: Extent, lo: int, hi: int) -> Iterator[StoredCell]:
        """Iterate over the cells of one extent that hold any of the elements [lo, hi)."""
        box, first, last, blob, offset, unhashed, row = extent
        size, step = self.itemsize, self.cell
        numbers = range(max(first, lo) // step, -(-min(last, hi) // step))
        row += numbers.start - first // step
        digests = self.columns.digests[row : row + len(numbers)].tobytes()
        start, at = max(first, numbers.start * step), 0
        for number in numbers:
            stop = min((number + 1) * step, last)
            nbytes, digest = (stop - start) * size, CellDigest(digests[at : at + DIGEST_BYTES])
            yield StoredCell(blob, offset + (start - first) * size, nbytes, box, start, stop, digest, unhashed)
            start, at = stop, at + DIGEST_BYTES

    def _cells_of_whole(self, form: Whole, lo: int, hi: int) -> Iterator[StoredCell]:
        """Iterate over the cells of the short form without making columns: most tensors are small and many."""
        box, size, step = self.boxes[0], self.itemsize, self.cell
        end = box.numel
        for number in range(lo // step, -(-hi // step)):
            start, at = number * step, number * DIGEST_BYTES
            stop, digest = min(start + step, end), CellDigest(form.digests[at : at + DIGEST_BYTES])
            place = form.offset + start * size
            yield StoredCell(form.blob, place, (stop - start) * size, box, start, stop, digest, form.unhashed)


def build(shape: Shape, itemsize: int, cell: int, cells: Sequence[StoredCell]) -> ExtentTable:
    """Build a table from cells in any order; cells that follow each other become one extent."""
    one, frame = cells[0] if len(cells) == 1 else None, whole(shape)
    if one is not None and (one.box, one.lo, one.hi) == (frame.box, 0, frame.hi):
        packed = Whole(one.blob, one.offset, one.digest, one.unhashed)
        return ExtentTable(shape, itemsize, cell, only_box(shape), packed)
    order = sorted(cells, key=lambda c: (c.box.offset, c.box.shape, c.lo))
    boxes: dict[Box, int] = {full_box(shape): 0}
    rows: list[tuple[int, int, int, int, int, bool]] = []
    for one in order:
        number = boxes.setdefault(one.box, len(boxes))
        if rows:
            last, begin, end, where, at, word = rows[-1]
            follows = last == number and end == one.lo and end % cell == 0 and where == one.blob
            if follows and at + (end - begin) * itemsize == one.offset and word == one.unhashed:
                rows[-1] = (number, begin, one.hi, where, at, word)
                continue
        rows.append((number, one.lo, one.hi, one.blob, one.offset, one.unhashed))
    digests = np.frombuffer(b"".join(c.digest for c in order), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    numbers = np.array([row[:5] for row in rows], dtype=np.int64).reshape(-1, 5)
    box, lo, hi, blob, offset = numbers.T
    columns = Columns(box, lo, hi, blob, offset, digests, np.array([row[5] for row in rows], dtype=bool))
    table = _shortened(ExtentTable(shape, itemsize, cell, tuple(boxes), columns))
    by_box = np.argsort(numbers[:, 0], kind="stable")  # box 0 may come late in the order of offsets
    return table if (by_box[:-1] < by_box[1:]).all() else _reordered(table, by_box)


def _shortened(table: ExtentTable) -> ExtentTable:
    """Return the table in the short form if it has one."""
    if not table.is_whole:
        return table
    _, _, _, blob, offset, digests, unhashed = table.columns
    packed = Whole(int(blob[0]), int(offset[0]), digests.tobytes(), bool(unhashed[0]))
    return replace(table, boxes=table.boxes[:1], form=packed)


@lru_cache(maxsize=4096)
def only_box(shape: Shape) -> tuple[Box, ...]:
    """Return the boxes of a tensor that is cut as a whole."""
    return (full_box(shape),)


def join(tables: Sequence[ExtentTable]) -> ExtentTable:
    """Join the extents of several tables of one tensor, sorted, whoever has which. Overlaps are not checked here."""
    if len(tables) == 1:
        return tables[0]
    first = tables[0]
    others = {box for table in tables for box in table.boxes[1:]}
    boxes = (first.boxes[0], *sorted(others, key=lambda box: (box.offset, box.shape)))
    number_of = {box: number for number, box in enumerate(boxes)}
    rows = []
    for table in tables:
        numbers = np.array([number_of[box] for box in table.boxes], dtype=np.int64)
        rows.append(table.columns._replace(box=numbers[table.columns.box]))
    columns = Columns(*(np.concatenate(column) for column in zip(*rows, strict=True)))
    joined = ExtentTable(first.shape, first.itemsize, first.cell, boxes, columns)
    return _reordered(joined, np.lexsort((columns.lo, columns.box)))


def with_blobs(table: ExtentTable, numbers: Ints) -> ExtentTable:
    """Return the same extents in other blobs: ``numbers[i]`` in place of blob i."""
    form: Columns | Whole = table.form
    if isinstance(form, Whole):
        form = Whole(int(numbers[form.blob]), form.offset, form.digests, form.unhashed)
    elif len(table):
        form = form._replace(blob=numbers[form.blob])
    return ExtentTable(table.shape, table.itemsize, table.cell, table.boxes, form)


def _reordered(table: ExtentTable, order: npt.NDArray[np.intp]) -> ExtentTable:
    counts = table.cells[order]
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    box, lo, hi, blob, offset, digests, unhashed = table.columns
    digests = digests[np.repeat(table.first_cell[order], counts) + within]
    columns = Columns(box[order], lo[order], hi[order], blob[order], offset[order], digests, unhashed[order])
    return ExtentTable(table.shape, table.itemsize, table.cell, table.boxes, columns)


def cell_locations(tables: Iterable[ExtentTable]) -> tuple[npt.NDArray[np.uint8], Ints, Ints]:
    """Return (digests, blobs, offsets) of all cells of some tables, in any order; digests: uint8 [cells, 32]."""
    short, found = [], []
    for table in tables:
        form = table.form
        if isinstance(form, Whole) and len(form.digests) == DIGEST_BYTES:
            short.append(form)
        else:
            found.append((table.columns.digests, *_locations(table)))
    digests = np.frombuffer(b"".join([one.digests for one in short]), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    blobs = np.array([one.blob for one in short], dtype=np.int64)
    offsets = np.array([one.offset for one in short], dtype=np.int64)
    if found:
        columns = zip((digests, blobs, offsets), *found, strict=True)
        digests, blobs, offsets = (np.concatenate(column) for column in columns)
    return digests, blobs, offsets


def _locations(table: ExtentTable) -> tuple[Ints, Ints]:
    rows = np.repeat(np.arange(len(table)), table.cells)
    number = np.arange(len(rows)) - table.first_cell[rows]
    lo, blob, offset = (column[rows] for column in (table.columns.lo, table.columns.blob, table.columns.offset))
    starts = np.where(number == 0, lo, (lo // table.cell + number) * table.cell)
    return blob, offset + (starts - lo) * table.itemsize


def byte_ranges(tables: Iterable[ExtentTable]) -> Ints:
    """Return (blob, first byte, byte after the last) of each extent of some tables, unordered: int64 [extents, 3]."""
    short, found = [], []
    for table in tables:
        form = table.form
        if isinstance(form, Whole):
            short.append((form.blob, form.offset, form.offset + table.boxes[0].numel * table.itemsize))
        else:
            nbytes = (form.hi - form.lo) * table.itemsize
            found.append(np.stack([form.blob, form.offset, form.offset + nbytes], axis=1))
    return np.concatenate([np.array(short, dtype=np.int64).reshape(-1, 3), *found])
