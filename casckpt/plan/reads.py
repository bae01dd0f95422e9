"""Plans the reads of a load: the required ranges of each blob, merged into few requests. Performs no I/O.

A verified read reads whole cells. An unverified read reads only the wanted bytes, in pieces of a few cells, but reads
whole cells of a tensor if any of the tensor's cells is coded. A long read joins consecutive cells or pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from casckpt.format.extents import DIGEST_BYTES, ExtentTable, StoredCell
from casckpt.format.names import CellDigest
from casckpt.format.regions import Box, Region, Shape, holes_and_overlaps, intersect, normalise, strides

T = TypeVar("T")
_PIECE_BYTES = 2 << 20
_LONG_BYTES = 8 << 20  # for elements that are read in place, so that there are few units
_SMALL_GAP = 64 << 10  # bytes; an unverified read merges runs if the gap between them is smaller


class ReadPiece(NamedTuple):
    """Consecutive elements [lo, hi), in the row-major order of ``box``, stored at ``offset`` in a blob.

    ``nbytes`` = (hi - lo) * itemsize. The elements are never coded. ``digests``: the digests of the cells that the
    piece consists of, or empty if it is not verified. ``step``: the size in bytes of the steps into which `steps`
    splits the piece. The last one may be shorter.
    """

    blob: int
    offset: int
    nbytes: int
    box: Box
    lo: int
    hi: int
    step: int
    digests: bytes = b""
    digest: None = None
    frame: None = None

    @property
    def region(self) -> Region:
        """The elements as a region."""
        return Region(self.box, self.lo, self.hi)


Unit: TypeAlias = StoredCell | ReadPiece
"""A unit of a read: a cell, several cells, or, if the read is not verified, a piece of an extent."""


def steps(unit: Unit) -> list[StoredCell]:
    """Return the cells of a unit or, without verification, its steps. Steps have no digests."""
    if isinstance(unit, StoredCell):
        return [unit]
    found, size = list[StoredCell](), unit.nbytes // (unit.hi - unit.lo)
    for number, at in enumerate(range(0, unit.nbytes, unit.step)):
        nbytes, lo = min(unit.step, unit.nbytes - at), unit.lo + at // size
        digest = CellDigest(unit.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])
        found.append(StoredCell(unit.blob, unit.offset + at, nbytes, unit.box, lo, lo + nbytes // size, digest))
    return found


def plan_units(table: ExtentTable, wanted: Region, *, verify: bool, long: bool = False) -> Iterator[Unit]:
    """Iterate over the units that contain elements of ``wanted``, in any order.

    ``wanted`` is a region of the tensor of ``table.shape``. ``long``: return longer units if the wanted elements are
    consecutive, and join cells that contain only wanted elements.
    """
    wanted = normalise(wanted, table.shape)
    if wanted.lo == wanted.hi:
        return
    by_cell = verify or any(extent.coding is not None for extent in table.extents)
    find: Callable[[int, int, int], Iterator[Unit]] = table.cells_in if by_cell else partial(_pieces, table)
    worth = table.cell if by_cell else max(1, _SMALL_GAP // table.itemsize)
    for number, lo, hi in wanted_spans(table, wanted, worth):
        if table.boxes[number] == wanted.box:
            in_order = partial(_joined if by_cell else _pieces, table, most=_LONG_BYTES) if long else find
            yield from in_order(number, lo, hi)
        else:
            units = find(number, lo, hi)
            # a unit as long as the longest gap in a span always contains a wanted element
            yield from (unit for unit in units if unit.hi - unit.lo >= worth or intersect(unit.region, wanted))


def wanted_spans(table: ExtentTable, wanted: Region, worth: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each box with elements of ``wanted``, and their ranges in its row-major order.

    Gaps of fewer than ``worth`` elements are included.
    """
    for number, box in enumerate(table.boxes):
        if box is wanted.box or box == wanted.box:
            yield number, wanted.lo, wanted.hi
        elif box.intersect(wanted.box) is not None:
            yield from ((number, *span) for span in _spans(box, wanted, worth))


def _spans(box: Box, wanted: Region, worth: int) -> list[tuple[int, int]]:
    """Find the ranges of ``wanted`` in the row-major order of ``box``, sorted and at least ``worth`` elements apart."""
    commons = (common.relative_to(box) for common in intersect(Region(box, 0, box.numel), wanted))
    return _united([span for common in commons for span in _runs(common, box.shape, worth)], worth)


def _runs(local: Box, shape: Shape, worth: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of ``shape``, in row-major order, that make up ``local``.

    Gaps of fewer than ``worth`` elements are included.
    """
    steps = strides(shape)
    length, split = 1, len(shape)
    while split and (local.shape[split - 1] == 1 or steps[split - 1] - length < worth):
        split -= 1
        length += (local.shape[split] - 1) * steps[split]
    base = sum(i * s for i, s in zip(local.offset, steps, strict=True))
    for index in np.ndindex(*local.shape[:split]):
        start = base + sum(i * s for i, s in zip(index, steps, strict=False))
        yield start, start + length


def _united(spans: list[tuple[int, int]], worth: int) -> list[tuple[int, int]]:
    """Sort spans, and merge those that are less than ``worth`` apart."""
    united: list[tuple[int, int]] = []
    for lo, hi in sorted(spans):
        if united and lo - united[-1][1] < worth:
            united[-1] = (united[-1][0], max(hi, united[-1][1]))
        else:
            united.append((lo, hi))
    return united


def _pieces(table: ExtentTable, box: int, lo: int, hi: int, most: int = 0) -> Iterator[ReadPiece]:
    """Yield the elements [lo, hi) of the box with this number, in pieces of a few cells or of ``most`` bytes."""
    size = table.itemsize
    step = max(1, _PIECE_BYTES // size)
    many = step * max(1, most // _PIECE_BYTES)
    for extent in table.extents_in(box, lo, hi):
        end = min(extent.hi, hi)
        for a in range(max(extent.lo, lo), end, many):
            b, place = min(a + many, end), extent.offset + (a - extent.lo) * size
            yield ReadPiece(extent.blob, place, (b - a) * size, table.boxes[box], a, b, step * size)


def _joined(table: ExtentTable, box: int, lo: int, hi: int, most: int) -> Iterator[Unit]:
    """Yield the cells that hold the elements [lo, hi) of the box with this number.

    Cells that are not coded and contain only such elements are joined into pieces of about ``most`` bytes.
    """
    size, cell = table.itemsize, table.cell
    many = cell * max(1, most // (cell * size))
    for extent in table.extents_in(box, lo, hi):
        begin, end, number = max(extent.lo, lo), min(extent.hi, hi), extent.lo // cell
        first, last = -(-begin // cell) * cell, end if end == extent.hi else end // cell * cell
        if extent.coding is not None or last - first <= cell:
            first = last = end
        yield from table.cells_in(box, begin, first)
        for a in range(first, last, many):
            b, place = min(a + many, last), extent.offset + (a - extent.lo) * size
            digests = extent.digests[(a // cell - number) * DIGEST_BYTES : (-(-b // cell) - number) * DIGEST_BYTES]
            yield ReadPiece(extent.blob, place, (b - a) * size, table.boxes[box], a, b, cell * size, digests)
        yield from table.cells_in(box, last, end)


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """A single read: ``nbytes`` at ``offset`` in a blob, and the items in that range, sorted by offset.

    There may be gaps of unwanted bytes between items, and items may overlap.
    """

    blob: int
    offset: int
    nbytes: int
    items: Sequence[tuple[int, int, T]]  # (offset in the blob, bytes, item)


def plan_batches(items: Iterable[tuple[int, int, int, T]], *, gap: int, most: int) -> list[Batch[T]]:
    """Merge (blob, offset, nbytes, item) into reads of about ``most`` bytes, across gaps of up to ``gap`` bytes.

    Every byte of a blob is in at most one batch.
    """
    batches: list[Batch[T]] = []
    current: list[tuple[int, int, T]] = []
    blob, start, end = -1, 0, 0

    def close() -> None:
        if current:
            batches.append(Batch(blob, start, end - start, tuple(current)))
            current.clear()

    for number, offset, nbytes, item in sorted(items, key=itemgetter(0, 1, 2)):
        overlaps = number == blob and offset < end
        fits = number == blob and offset - end <= gap and offset + nbytes - start <= most
        if not (overlaps or fits):
            close()
            blob, start, end = number, offset, offset
        current.append((offset, nbytes, item))
        end = max(end, offset + nbytes)
    close()
    return batches


def affordable_gap(items: Iterable[tuple[int, int, int]], *, most: int, spare: int) -> int:
    """Return the widest gap, up to ``most``, across which merging reads costs at most ``spare`` extra bytes.

    ``items``: (blob, offset, nbytes). `plan_batches` reads across all gaps up to that width.
    """
    gaps: list[int] = []
    blob, end = -1, 0
    for number, offset, nbytes in sorted(items):
        if number == blob and 0 < offset - end <= most:
            gaps.append(offset - end)
        end = max(end, offset + nbytes) if number == blob else offset + nbytes
        blob = number
    widest = 0
    for gap, same in groupby(sorted(gaps)):
        spare -= gap * len(list(same))
        if spare < 0:
            break
        widest = gap
    return widest


def covers(table: ExtentTable, wanted: Region) -> bool:
    """Return whether the extents contain every element of ``wanted``.

    Returns False if extents overlap, which no save allows.
    """
    if table.is_whole:
        return True
    region = normalise(wanted, table.shape)
    count = 0
    for number, box in enumerate(table.boxes):
        if box == region.box:
            for extent in table.extents_in(number, region.lo, region.hi):
                count += min(extent.hi, region.hi) - max(extent.lo, region.lo)
        elif box.intersect(region.box) is not None:
            for extent in table.extents_in(number, 0, box.numel):
                count += sum(part.numel for part in intersect(table.region(extent), region))
    if count < region.numel or len(table.boxes) == 1:
        return count >= region.numel
    _, overlaps = holes_and_overlaps(table.shape, list(map(table.region, table.extents)))
    return not overlaps  # overlaps could hide holes, which a load would not fill
