"""Extents: the blob and byte offset of a tensor's elements, with the digest of each cell.

An extent is a run of consecutive cells of one tensor that are also consecutive in one blob. In the row-major order of
the extent's box, cells end at multiples of the cell size, so their ends are not stored. A cell boundary elsewhere
starts a new extent. `casckpt.format.sections.tables` defines the stored form.

A cell is stored in its blob either unchanged or **coded** as a frame (`casckpt.format.encodings`). A frame may contain
only the differences from a second cell, its base. A base has the same size as the cell, and may itself be coded. It
belongs to its cell, and is not in any of the extents that cover the tensor.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate, repeat
from typing import NamedTuple

import msgspec
import numpy as np

from casckpt.base.groups import runs
from casckpt.format.names import CellDigest
from casckpt.format.regions import Box, Region, Shape, full_box

DIGEST_BYTES = 32
MAX_LINKS = 16
"""The maximum number of bases in a coded cell's chain."""


class Frame(NamedTuple):
    """The stored form of a coded cell: ``nbytes`` bytes that are decoded against ``base``, if there is one."""

    nbytes: int
    base: StoredCell | None = None


class StoredCell(NamedTuple):
    """One cell: the elements [lo, hi) in the row-major order of ``box``, their location in a blob, and their digest.

    ``nbytes`` = (hi - lo) * itemsize. ``frame``: None if the cell is not coded.
    """

    blob: int
    offset: int
    nbytes: int
    box: Box
    lo: int
    hi: int
    digest: CellDigest
    frame: Frame | None = None

    @property
    def stored(self) -> int:
        """The number of bytes that it occupies in the blob."""
        return self.nbytes if self.frame is None else self.frame.nbytes

    @property
    def base(self) -> StoredCell | None:
        """The cell that it is decoded against, or None."""
        return None if self.frame is None else self.frame.base

    @property
    def chain(self) -> Iterator[StoredCell]:
        """The cell itself, its base, its base's base, and so on."""
        cell: StoredCell | None = self
        while cell is not None:
            yield cell
            cell = cell.base

    def moved(self, place: Callable[[StoredCell], tuple[int, int]]) -> StoredCell:
        """Return the cell at a new location. ``place`` returns (blob, offset) for the cell and for each base."""
        frame = None if self.frame is None else Frame(self.frame.nbytes, self.base and self.base.moved(place))
        blob, offset = place(self)
        return self._replace(blob=blob, offset=offset, frame=frame)

    @property
    def region(self) -> Region:
        """The elements as a region."""
        return Region(self.box, self.lo, self.hi)


class Coding(msgspec.Struct, frozen=True, gc=False):
    """How the cells of an extent are coded. ``frames``: the size of each frame, as 4 bytes.

    ``base``: the bases of the cells.
    """

    frames: bytes
    base: Extent | None = None

    @property
    def lengths(self) -> list[int]:
        """The size of each frame in bytes."""
        lengths: list[int] = np.frombuffer(self.frames, "<u4").tolist()
        return lengths


class Extent(msgspec.Struct, frozen=True, gc=False):
    """One extent: the elements [lo, hi) of box number ``box``, at ``offset`` in blob number ``blob``.

    ``digests``: 32 bytes for each of its cells. ``coding``: None if the cells are not coded.
    """

    box: int
    lo: int
    hi: int
    blob: int
    offset: int
    digests: bytes
    coding: Coding | None = None

    @property
    def chain(self) -> Iterator[Extent]:
        """The extent itself, the extent of its bases, the extent of their bases, and so on."""
        extent: Extent | None = self
        while extent is not None:
            yield extent
            extent = None if extent.coding is None else extent.coding.base


class ExtentTable(msgspec.Struct, frozen=True, gc=False):
    """The extents of one tensor, sorted by (box, lo).

    ``boxes``: box 0 is always the whole tensor. ``cell``: the elements per cell. ``itemsize``: the bytes per element.
    """

    shape: Shape
    itemsize: int
    cell: int
    boxes: tuple[Box, ...]
    extents: tuple[Extent, ...]

    @property
    def is_whole(self) -> bool:
        """Whether a single extent covers the whole tensor."""
        if len(self.extents) != 1:
            return False
        (only,) = self.extents
        return not only.box and not only.lo and only.hi == self.boxes[0].numel

    def region(self, extent: Extent) -> Region:
        """Return an extent's elements as a region."""
        return Region(self.boxes[extent.box], extent.lo, extent.hi)

    def stored_cells(self, extents: Iterable[Extent] | None = None) -> Iterator[StoredCell]:
        """Iterate over the cells of these extents, in order. None stands for all extents."""
        for extent in self.extents if extents is None else extents:
            yield from self._cells(extent, extent.lo, extent.hi)

    def cells_in(self, box: int, lo: int, hi: int) -> Iterator[StoredCell]:
        """Iterate, in order, over the cells that hold any of the elements [lo, hi) of the box with this number."""
        for extent in self.extents_in(box, lo, hi):
            yield from self._cells(extent, lo, hi)

    def extents_in(self, box: int, lo: int, hi: int) -> Sequence[Extent]:
        """Find, in order, the extents that hold any of the elements [lo, hi) of the box with this number."""
        every = self.extents if lo < hi else ()
        first = bisect_right(every, (box, lo), key=lambda one: (one.box, one.hi))
        return every[first : bisect_left(every, (box, hi), lo=first, key=_begin)]

    def cell_at(self, extent: Extent, number: int) -> StoredCell:
        """Return the cell with this number in an extent."""
        lo = max(extent.lo, (extent.lo // self.cell + number) * self.cell)
        return next(self._cells(extent, lo, lo + 1))

    def stored_bytes(self, extent: Extent) -> int:
        """Compute the number of bytes that an extent occupies in its blob."""
        return (extent.hi - extent.lo) * self.itemsize if extent.coding is None else sum(extent.coding.lengths)

    def _cells(self, extent: Extent, lo: int, hi: int) -> Iterator[StoredCell]:
        """Iterate over the cells of one extent that hold any of the elements [lo, hi)."""
        cells = self._plain(extent, lo, hi)
        return cells if extent.coding is None else self._coded(extent, extent.coding, lo, hi, cells)

    def _coded(
        self, extent: Extent, coding: Coding, lo: int, hi: int, cells: Iterator[StoredCell]
    ) -> Iterator[StoredCell]:
        bases: Iterator[StoredCell | None] = repeat(None) if coding.base is None else self._cells(coding.base, lo, hi)
        lengths, first = coding.lengths, max(lo, extent.lo) // self.cell - extent.lo // self.cell
        offsets = accumulate(lengths, initial=extent.offset)
        places = list(zip(offsets, lengths, strict=False))[first:]
        for cell, base, (offset, nbytes) in zip(cells, bases, places, strict=False):
            yield cell._replace(offset=offset, frame=Frame(nbytes, base))

    def _plain(self, extent: Extent, lo: int, hi: int) -> Iterator[StoredCell]:
        box, size, step, begin, end = self.boxes[extent.box], self.itemsize, self.cell, extent.lo, extent.hi
        first = begin // step
        for number in range(max(lo, begin) // step, -(-min(hi, end) // step)):
            start, stop = max(number * step, begin), min((number + 1) * step, end)
            place, at = extent.offset + (start - begin) * size, (number - first) * DIGEST_BYTES
            digest = CellDigest(extent.digests[at : at + DIGEST_BYTES])
            yield StoredCell(extent.blob, place, (stop - start) * size, box, start, stop, digest)


def _begin(extent: Extent) -> tuple[int, int]:
    return extent.box, extent.lo


def build(shape: Shape, itemsize: int, cell: int, cells: Sequence[StoredCell]) -> ExtentTable:
    """Build a table from cells in any order. Cells that follow each other are joined into one extent."""
    full = full_box(shape)
    others = {stored.box for stored in cells if stored.box is not full} - {full}
    boxes = _boxes(full, others)
    numbers = {box: number for number, box in enumerate(boxes)} if others else {}

    def place(stored: StoredCell) -> tuple[int, int]:
        # If all boxes are the whole tensor, do not hash any of them, because hashing is slow.
        return numbers[stored.box] if others else 0, stored.lo

    ordered = ((place(stored)[0], stored) for stored in sorted(cells, key=place))
    return ExtentTable(shape, itemsize, cell, boxes, _joined(ordered, cell))


def _joined(cells: Iterable[tuple[int, StoredCell]], cell: int) -> tuple[Extent, ...]:
    """Join cells into extents. Each cell comes with its box number."""
    joined = runs(cells, lambda run, one: run[-1][0] == one[0] and _follows(one[1], run[-1][1], cell))
    return tuple([_extent(run[0][0], run[0][1].lo, run[-1][1].hi, [stored for _, stored in run]) for run in joined])


def _extent(box: int, lo: int, hi: int, run: Sequence[StoredCell]) -> Extent:
    first = run[0]
    digests = first.digest if len(run) == 1 else b"".join([stored.digest for stored in run])
    if first.frame is None:
        return Extent(box, lo, hi, first.blob, first.offset, digests)
    bases = [stored.base for stored in run if stored.base is not None]
    frames = np.array([stored.stored for stored in run], "<u4").tobytes()
    coding = Coding(frames, _extent(box, lo, hi, bases) if bases else None)
    return Extent(box, lo, hi, first.blob, first.offset, digests, coding)


def _follows(stored: StoredCell, last: StoredCell, cell: int) -> bool:
    return _is_next(stored, last) and last.hi == stored.lo and not stored.lo % cell and last.box == stored.box


def _is_next(stored: StoredCell | None, last: StoredCell | None) -> bool:
    """Return whether two cells, and their bases, are adjacent in a blob and are either both coded or both raw."""
    if stored is None or last is None:
        return stored is last
    if last.blob != stored.blob or last.offset + last.stored != stored.offset:
        return False
    raw = stored.frame is None
    return raw == (last.frame is None) and (raw or _is_next(stored.base, last.base))


def join(parts: Sequence[tuple[ExtentTable, Sequence[int]]]) -> ExtentTable:
    """Join the extents of several tables of one tensor. In each table, blob i is renumbered to ``numbers[i]``.

    This function does not check for overlaps.
    """
    first = parts[0][0]
    boxes = _boxes(first.boxes[0], {box for table, _ in parts for box in table.boxes[1:]})
    number_of = {box: number for number, box in enumerate(boxes)}
    extents: list[Extent] = []
    for table, numbers in parts:
        places = [number_of[box] for box in table.boxes]
        extents += [_renumbered(extent, places[extent.box], numbers) for extent in table.extents]
    extents.sort(key=_begin)
    return ExtentTable(first.shape, first.itemsize, first.cell, boxes, tuple(extents))


def renumbered(table: ExtentTable, blobs: Mapping[int, int]) -> ExtentTable:
    """Return the table with its blobs renumbered."""
    extents = tuple([_renumbered(extent, extent.box, blobs) for extent in table.extents])
    return msgspec.structs.replace(table, extents=extents)


def _renumbered(extent: Extent, box: int, blobs: Sequence[int] | Mapping[int, int]) -> Extent:
    coding = extent.coding
    if coding is not None and coding.base is not None:
        coding = Coding(coding.frames, _renumbered(coding.base, box, blobs))
    return Extent(box, extent.lo, extent.hi, blobs[extent.blob], extent.offset, extent.digests, coding)


def _boxes(full: Box, others: Set[Box]) -> tuple[Box, ...]:
    """Return a table's boxes in the order of their numbers.

    The order is fixed, so equal cells always have equal tables.
    """
    return (full, *sorted(others, key=lambda box: (box.offset, box.shape)))
