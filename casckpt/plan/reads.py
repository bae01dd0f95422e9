"""Which bytes of which blobs a load needs, and how they are merged into few reads. Pure; nothing here reads.

The unit of a verified read is the cell: what is wanted is rounded out to whole cells. Unverified, it is the wanted
bytes themselves, in pieces of a few cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from casckpt.format.extents import DIGEST_BYTES, ExtentTable, PackedWhole
from casckpt.format.names import CellDigest
from casckpt.format.regions import Box, Region, Shape, intersect, normalise, strides
from casckpt.plan.coverage import holes_and_overlaps

T = TypeVar("T")
_PIECE_BYTES = 2 << 20
_SMALL_GAP = 64 << 10  # bytes: an unverified read does not take runs apart that are nearer to each other


class Unit(NamedTuple):
    """Consecutive elements [lo, hi), in the row-major order of ``box``, that lie at ``offset`` of a blob.

    ``nbytes`` = (hi - lo) * itemsize. ``digest``: of exactly these bytes; None if the read is not verified.
    """

    blob: int
    offset: int
    nbytes: int
    box: Box
    lo: int
    hi: int
    digest: CellDigest | None

    @property
    def region(self) -> Region:
        """The elements as a region."""
        return Region(self.box, self.lo, self.hi)


def plan_units(table: ExtentTable, wanted: Region, *, verify: bool) -> Iterator[Unit]:
    """The units that hold the elements of ``wanted``, in any order; each overlaps it.

    ``wanted`` is a region of the tensor of ``table.shape``.
    """
    wanted = normalise(wanted, table.shape)
    if not wanted.numel or not len(table):
        return
    if table.whole is not None and table.boxes[0] == wanted.box:
        yield from _units_of_whole(table, table.whole, wanted.lo, wanted.hi, verify)
        return
    worth = table.cell if verify else max(1, _SMALL_GAP // table.itemsize)
    for index, box in enumerate(table.boxes):
        if box == wanted.box:
            spans: Iterable[tuple[int, int]] = ((wanted.lo, wanted.hi),)
        elif box.intersect(wanted.box) is None:
            continue
        else:
            spans = _spans(box, wanted, worth)
        first, last = (int(i) for i in np.searchsorted(table.box, [index, index + 1]))
        for lo, hi in spans:
            begin = first + int(np.searchsorted(table.hi[first:last], lo, side="right"))
            end = first + int(np.searchsorted(table.lo[first:last], hi, side="left"))
            for row in range(begin, end):
                units = _units_of(table, row, lo, hi, verify)
                # what is as long as the longest gap within a span holds some of what is wanted
                yield from (
                    unit
                    for unit in units
                    if box == wanted.box or unit.hi - unit.lo >= worth or intersect(unit.region, wanted)
                )


def _spans(box: Box, wanted: Region, worth: int) -> list[tuple[int, int]]:
    """Ranges of the row-major order of ``box`` that hold what is wanted, sorted, ``worth`` elements apart or more."""
    commons = (common.relative_to(box) for common in intersect(Region(box, 0, box.numel), wanted))
    return _united([span for common in commons for span in _runs(common, box.shape, worth)], worth)


def _runs(local: Box, shape: Shape, worth: int) -> Iterator[tuple[int, int]]:
    """Ranges of the row-major order of ``shape`` that hold ``local``; gaps of less than ``worth`` are not left out."""
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
    """Sorted spans, those made one that are less than ``worth`` apart."""
    united: list[tuple[int, int]] = []
    for lo, hi in sorted(spans):
        if united and lo - united[-1][1] < worth:
            united[-1] = (united[-1][0], max(hi, united[-1][1]))
        else:
            united.append((lo, hi))
    return united


def _units_of_whole(table: ExtentTable, short: PackedWhole, lo: int, hi: int, verify: bool) -> Iterator[Unit]:
    """The same for the short form, without columns: most tensors are small and many."""
    box, size, cell = table.boxes[0], table.itemsize, table.cell
    if not verify:
        yield from _pieces(box, lo, hi, size, (short.blob, short.offset + lo * size))
        return
    end = box.numel
    for number in range(lo // cell, -(-hi // cell)):
        a, b = number * cell, min((number + 1) * cell, end)
        digest = CellDigest(short.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])
        yield Unit(short.blob, short.offset + a * size, (b - a) * size, box, a, b, digest)


def _pieces(box: Box, lo: int, hi: int, size: int, place: tuple[int, int]) -> Iterator[Unit]:
    """Elements [lo, hi) that lie together at ``place`` (blob, offset), in pieces that a buffer takes."""
    blob, offset = place
    step = max(1, _PIECE_BYTES // size)
    for a in range(lo, hi, step):
        b = min(a + step, hi)
        yield Unit(blob, offset + (a - lo) * size, (b - a) * size, box, a, b, None)


def _units_of(table: ExtentTable, row: int, lo: int, hi: int, verify: bool) -> Iterator[Unit]:
    """The units of one extent that hold any of [lo, hi)."""
    start, stop = int(table.lo[row]), int(table.hi[row])
    box, blob, offset = table.boxes[table.box[row]], int(table.blob[row]), int(table.offset[row])
    size, cell = table.itemsize, table.cell
    if not verify:
        a, b = max(start, lo), min(stop, hi)
        yield from _pieces(box, a, b, size, (blob, offset + (a - start) * size))
        return
    skip = max(start, lo) // cell - start // cell
    digest = int(table.first_cell[row]) + skip
    a = max(start, (start // cell + skip) * cell)
    while a < min(stop, hi):
        b = min((a // cell + 1) * cell, stop)
        yield Unit(
            blob, offset + (a - start) * size, (b - a) * size, box, a, b, CellDigest(table.digests[digest].tobytes())
        )
        a, digest = b, digest + 1


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """One read: ``nbytes`` from ``offset`` of a blob, and the items that lie in it, sorted by offset.

    Between two items there may be a gap of unwanted bytes; items that begin inside the one before overlap it.
    """

    blob: int
    offset: int
    nbytes: int
    items: Sequence[tuple[int, int, T]]  # (offset in the blob, bytes, item)


def plan_batches(items: Iterable[tuple[int, int, int, T]], *, gap: int, most: int) -> list[Batch[T]]:
    """Merge (blob, offset, nbytes, item) into reads of about ``most`` bytes, bridging gaps of up to ``gap`` bytes.

    No byte of a blob lies in two batches.
    """
    batches: list[Batch[T]] = []
    current: list[tuple[int, int, T]] = []
    blob, start, end = -1, 0, 0

    def close() -> None:
        if current:
            batches.append(Batch(blob, start, end - start, tuple(current)))
            current.clear()

    for number, offset, nbytes, item in sorted(items, key=lambda row: row[:3]):
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
    """The widest gap, up to ``most`` bytes, that merging may bridge so that ``spare`` bytes at most are read in vain.

    ``items``: (blob, offset, nbytes). All gaps up to that one are bridged, by `plan_batches`.
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
    """Do the extents hold every element of ``wanted``? Never if they overlap each other: a save made sure of it."""
    if table.whole is not None:
        return True
    region = normalise(wanted, table.shape)
    found = 0
    for index, box in enumerate(table.boxes):
        first, last = (int(i) for i in np.searchsorted(table.box, [index, index + 1]))
        if box == region.box:
            los = np.maximum(table.lo[first:last], region.lo)
            his = np.minimum(table.hi[first:last], region.hi)
            found += int(np.maximum(his - los, 0).sum())
        elif box.intersect(region.box) is not None:
            for row in range(first, last):
                found += sum(common.numel for common in intersect(table.region(row), region))
    if found < region.numel or len(table.boxes) == 1:
        return found >= region.numel
    _, overlaps = holes_and_overlaps(table.shape, [table.region(row) for row in range(len(table))])
    return not overlaps  # of a hostile table: it could hide holes, which would show what was in memory before
