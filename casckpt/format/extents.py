"""Extents: which elements of a tensor lie in which blob at which byte, with the digest of each cell.

An extent is consecutive cells of one tensor that lie consecutively in one blob. Cells are cut at the multiples of the
cell size in the row-major order of the extent's box, so their ends need not be stored: a boundary elsewhere begins a
new extent. How they are stored is said in `casckpt.format.sections.tables`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

import msgspec

from casckpt.format.names import CellDigest
from casckpt.format.regions import Box, Region, Shape, full_box

DIGEST_BYTES = 32


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

    @property
    def region(self) -> Region:
        """The elements as a region."""
        return Region(self.box, self.lo, self.hi)


class Extent(msgspec.Struct, frozen=True, gc=False):
    """One extent: the elements [lo, hi) of a box, by its number, at ``offset`` of a blob, by its number.

    ``digests``: 32 bytes for each of its cells.
    """

    box: int
    lo: int
    hi: int
    blob: int
    offset: int
    digests: bytes


class ExtentTable(msgspec.Struct, frozen=True, gc=False):
    """The extents of one tensor, sorted by (box, lo).

    ``boxes``: box 0 is always the whole tensor. ``cell``: elements of a cell. ``itemsize``: bytes of an element.
    """

    shape: Shape
    itemsize: int
    cell: int
    boxes: tuple[Box, ...]
    extents: tuple[Extent, ...]

    @property
    def is_whole(self) -> bool:
        """Is a single extent the whole tensor?"""
        if len(self.extents) != 1:
            return False
        (only,) = self.extents
        return not only.box and not only.lo and only.hi == self.boxes[0].numel

    def region(self, extent: Extent) -> Region:
        """Return the elements of an extent as a region."""
        return Region(self.boxes[extent.box], extent.lo, extent.hi)

    def stored_cells(self, extents: Iterable[Extent] | None = None) -> Iterator[StoredCell]:
        """Iterate over the cells of these extents (None: of all), in order."""
        for extent in self.extents if extents is None else extents:
            yield from self._cells(extent, extent.lo, extent.hi)

    def cells_in(self, box: int, lo: int, hi: int) -> Iterator[StoredCell]:
        """Iterate over the cells that hold any of the elements [lo, hi) of a box (by its number), in order."""
        for extent in self.extents_in(box, lo, hi):
            yield from self._cells(extent, lo, hi)

    def extents_in(self, box: int, lo: int, hi: int) -> Sequence[Extent]:
        """Find the extents that hold any of the elements [lo, hi) of a box (by its number), in order."""
        every = self.extents
        if len(every) == 1:  # as in most tensors
            (only,) = every
            return every if only.box == box and only.lo < hi and lo < only.hi else ()
        first = bisect_right(every, (box, lo), key=_end)
        return every[first : bisect_left(every, (box, hi), lo=first, key=_begin)]

    def offset_of(self, extent: Extent, number: int) -> int:
        """Compute at which byte of its blob a cell of an extent lies, by its number."""
        lo = max(extent.lo, (extent.lo // self.cell + number) * self.cell)
        return extent.offset + (lo - extent.lo) * self.itemsize

    def _cells(self, extent: Extent, lo: int, hi: int) -> Iterator[StoredCell]:
        """Iterate over the cells of one extent that hold any of the elements [lo, hi)."""
        box, size, step, begin, end = self.boxes[extent.box], self.itemsize, self.cell, extent.lo, extent.hi
        first = begin // step
        for number in range((begin if lo < begin else lo) // step, -(-(end if hi > end else hi) // step)):
            start, stop = number * step, (number + 1) * step
            start, stop = begin if start < begin else start, end if stop > end else stop  # as `min`, in half the time
            place, at = extent.offset + (start - begin) * size, (number - first) * DIGEST_BYTES
            digest = CellDigest(extent.digests[at : at + DIGEST_BYTES])
            yield StoredCell(extent.blob, place, (stop - start) * size, box, start, stop, digest)


def _begin(extent: Extent) -> tuple[int, int]:
    return extent.box, extent.lo


def _end(extent: Extent) -> tuple[int, int]:
    return extent.box, extent.hi


def build(shape: Shape, itemsize: int, cell: int, cells: Sequence[StoredCell]) -> ExtentTable:
    """Build a table from cells in any order; cells that follow each other become one extent."""
    full = full_box(shape)
    others = {one.box for one in cells if one.box is not full} - {full}
    boxes = _boxes(full, others)
    numbers = {box: number for number, box in enumerate(boxes)} if others else {}

    def number(one: StoredCell) -> int:
        return numbers[one.box] if others else 0  # a box takes long to hash, and most tensors have no others

    runs: list[list[StoredCell]] = []
    for one in sorted(cells, key=lambda one: (number(one), one.lo)):
        if runs and _follows(one, runs[-1][-1], cell):
            runs[-1].append(one)
        else:
            runs.append([one])
    return ExtentTable(shape, itemsize, cell, boxes, tuple([_extent(number(run[0]), run) for run in runs]))


def moved(table: ExtentTable, place: Callable[[StoredCell], tuple[int, int]]) -> ExtentTable:
    """Return a table of the same cells at other places: ``place`` tells blob and offset of each."""
    runs: list[tuple[int, list[StoredCell]]] = []
    for extent in table.extents:
        for cell in table.stored_cells([extent]):
            blob, offset = place(cell)
            one = cell._replace(blob=blob, offset=offset)
            if runs and runs[-1][0] == extent.box and _follows(one, runs[-1][1][-1], table.cell):
                runs[-1][1].append(one)
            else:
                runs.append((extent.box, [one]))
    return msgspec.structs.replace(table, extents=tuple(_extent(box, run) for box, run in runs))


def _extent(box: int, run: Sequence[StoredCell]) -> Extent:
    first = run[0]
    return Extent(box, first.lo, run[-1].hi, first.blob, first.offset, b"".join([one.digest for one in run]))


def _follows(one: StoredCell, last: StoredCell, cell: int) -> bool:
    together = last.blob == one.blob and last.offset + last.nbytes == one.offset
    return together and last.hi == one.lo and not one.lo % cell and last.box == one.box


def join(parts: Sequence[tuple[ExtentTable, Sequence[int]]]) -> ExtentTable:
    """Join the extents of tables of one tensor, with ``numbers[i]`` of each in place of its blob i, whoever has which.

    Overlaps are not checked here.
    """
    first = parts[0][0]
    boxes = _boxes(first.boxes[0], {box for table, _ in parts for box in table.boxes[1:]})
    number_of = {box: number for number, box in enumerate(boxes)}
    extents: list[Extent] = []
    for table, numbers in parts:
        places = [number_of[box] for box in table.boxes]
        extents += [
            Extent(places[one.box], one.lo, one.hi, numbers[one.blob], one.offset, one.digests) for one in table.extents
        ]
    extents.sort(key=_begin)
    return ExtentTable(first.shape, first.itemsize, first.cell, boxes, tuple(extents))


def _boxes(full: Box, others: Set[Box]) -> tuple[Box, ...]:
    """Return the boxes of a table in the order of their numbers: equal cells are to have equal tables."""
    return (full, *sorted(others, key=lambda box: (box.offset, box.shape)))
