"""The reads of a load, merged per blob. Each byte range is read once. The cells of a lot are decoded together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from casckpt.base.groups import in_batches
from casckpt.base.lazy import cached_property
from casckpt.format.blob import SPAN
from casckpt.format.digest import cell_digests
from casckpt.format.extents import StoredCell
from casckpt.format.regions import Box, Region, full_box
from casckpt.format.sections.columns import Ints
from casckpt.format.sections.index import Entry
from casckpt.format.sections.tables import WholeCells
from casckpt.plan.reads import Batch, Unit, affordable_gap, plan_batches, steps
from casckpt.storage.base import BLOCK, Traits
from casckpt.storage.buffers import address
from casckpt.tensors.memory import Destination, copy_addresses, copy_bytes

_FRAME_BYTES = 8 << 20  # the size of the frames of a lot; each thread holds them in memory
_FEW = 8  # if at most 1/8 of the bytes must be copied, reads are as large as if everything were read in place
# unneeded bytes that network reads may include: 4 MiB or 1/25, whichever is more
_SPARE_BYTES, _SPARE_SHARE = 4 << 20, 25


Range: TypeAlias = tuple[int, int, int]
"""The number of a blob, an offset in it, and a number of bytes."""
FilledRange: TypeAlias = tuple[int, Box, int, int]
"""The elements [lo, hi) of a box that are in a destination, which is identified by its `id`."""


class Consumer(NamedTuple):
    """A destination, the unit that it receives, and the unit's memory in the destination if that is contiguous."""

    sink: Destination
    unit: Unit
    place: memoryview | None

    def take(self, data: memoryview) -> None:
        """Copy the unit's bytes to the destination."""
        if self.place is None:
            self.sink.copy_in(self.unit.region, data)
        else:
            copy_bytes(self.place, data)


class Runs:
    """Collects copies from one buffer, so that neighboring units of a tensor are copied together at the end.

    This is for GPUs, where starting a copy takes as long as copying 1 MiB.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._last: dict[int, _Run] = {}  # the last run of each sink, by its id
        self._runs: list[_Run] = []

    def add(self, taker: Consumer, start: int) -> None:
        """Add a consumer whose unit begins at byte ``start`` of the buffer."""
        unit, run = taker.unit, self._last.get(id(taker.sink))
        if run is not None and (run.box, run.hi, run.stop) == (unit.box, unit.lo, start):
            run.hi, run.stop = unit.hi, start + unit.nbytes
        else:
            run = self._last[id(taker.sink)] = _Run(taker.sink, unit.box, unit.lo, unit.hi, start, start + unit.nbytes)
            self._runs.append(run)

    def deliver(self) -> None:
        """Make the copies."""
        for run in self._runs:
            run.sink.copy_in(Region(run.box, run.lo, run.hi), self._data[run.start : run.stop])


@dataclass(slots=True)
class _Run:
    """The elements [lo, hi) of a box, which are the bytes [start, stop) of the buffer."""

    sink: Destination
    box: Box
    lo: int
    hi: int
    start: int
    stop: int


class PlannedRead(NamedTuple):
    """One cell, or one byte range, and its consumers. Their units differ if several equal cells are stored once.

    ``root``: the unit itself, or the last cell in the chain of its bases. ``frames``: the rest of the chain, in
    decoding order. It begins with the frame whose base is the root, and ends with the unit.
    """

    unit: Unit
    key: str
    takers: list[Consumer]
    root: Unit
    frames: Sequence[StoredCell] = ()

    @property
    def place(self) -> memoryview | None:
        """The memory into which the root can be read directly."""
        return None if self.root.frame is not None else self.takers[0].place

    @property
    def nbytes(self) -> int:
        """The stored size of the root in bytes."""
        return self.root.nbytes if self.root.frame is None else self.root.frame.nbytes

    @property
    def row(self) -> tuple[int, int, int, PlannedRead]:
        """The root's blob, the root's byte range in the blob, and this read."""
        return (*_range(self.root), self)

    @property
    def plain(self) -> int:
        """The decoded size in bytes."""
        return self.unit.nbytes

    @property
    def step(self) -> int:
        """The size of a cell or, without verification, of a piece of a few cells, in bytes. The last may be shorter."""
        return self.nbytes if isinstance(self.unit, StoredCell) else self.unit.step

    @property
    def cells(self) -> int:
        """The number of these cells or pieces."""
        return -(-self.nbytes // self.step)

    @property
    def filled(self) -> Iterator[FilledRange]:
        """The ranges that it fills, one for each of these cells or pieces."""
        return (part(taker.sink, one) for taker in self.takers for one in steps(taker.unit))


class SmallReads:
    """Many small tensors, each of which is a single cell that is not coded, in columns with a row for each destination.

    Several destinations may receive the same cell. Each of them is contiguous in host memory, at ``address``. `split`
    returns parts of one blob. Each part takes the place of a `PlannedRead`: it is read into one buffer, verified there
    and then copied.
    """

    place = None
    frames = ()

    def __init__(
        self, targets: Sequence[tuple[Entry, Destination]], number: Ints, cells: WholeCells, address: Ints
    ) -> None:
        """``number``: the position of each row's entry and destination in ``targets``."""
        self._targets, self._number, self._cells, self._address = targets, number, cells, address
        self._start = cells.blob * SPAN + cells.offset
        self._end = self._start + cells.nbytes

    def take(self, rows: Ints) -> Self:
        """Return these rows."""
        return type(self)(self._targets, self._number[rows], self._cells.take(rows), self._address[rows])

    def split(self, *, gap: int, most: int) -> Iterator[Self]:
        """Yield parts of about ``most`` bytes, in the order of the cells. They may include gaps of ``gap`` bytes."""
        order = np.lexsort((self._cells.nbytes, self._start))
        start, reach = self._start[order], np.maximum.accumulate(self._end[order])
        first = 0
        for stop in [*(np.flatnonzero(start[1:] - reach[:-1] > gap) + 1).tolist(), len(reach)]:
            while first < stop:
                fits = int(np.searchsorted(reach[first:stop], start[first] + most, side="right"))
                yield self.take(order[first : (first := first + max(1, fits))])

    def overlap(self, items: Iterable[PlannedRead]) -> bool:
        """Return whether any of the cells overlaps any of these reads. The rows are in order."""
        blob, offset, nbytes = np.array([item.row[:3] for item in items], np.int64).reshape(-1, 3).T
        start, reach = blob * SPAN + offset, np.append(0, np.maximum.accumulate(self._end))
        return bool((reach[np.searchsorted(self._start, start + nbytes)] > start).any())

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """The blob, offset and size of each cell."""
        cells = self._cells
        return list(zip(cells.blob.tolist(), cells.offset.tolist(), cells.nbytes.tolist(), strict=True))

    @property
    def nbytes(self) -> int:
        """The number of bytes to read, including gaps."""
        return int(self._end.max() - self._start[0])

    @property
    def row(self) -> tuple[int, int, int, Self]:
        """The blob, the byte range in the blob, and these cells."""
        return int(self._cells.blob[0]), int(self._cells.offset[0]), self.nbytes, self

    @cached_property
    def _distinct(self) -> Ints:
        """The rows whose cell differs from the one before, which are nearly all rows."""
        columns = np.column_stack((self._start, self._end, self._cells.digest.view(np.int64)))
        return np.flatnonzero(np.concatenate(([True], (np.diff(columns, axis=0) != 0).any(axis=1))))

    @property
    def plain(self) -> int:
        """The size of all cells in bytes."""
        return int(self._cells.nbytes[self._distinct].sum())

    @property
    def cells(self) -> int:
        """The number of cells."""
        return len(self._distinct)

    @property
    def filled(self) -> Iterator[FilledRange]:
        """The ranges that they fill."""
        targets = (self._targets[number] for number in self._number.tolist())
        return ((id(sink), full_box(entry.shape), 0, entry.numel) for entry, sink in targets)

    def _read(self, row: int) -> PlannedRead:
        """Return the read of a single cell."""
        entry, _ = self._targets[self._number[row]]
        cell = self._cells.cell(row, entry.shape)
        return PlannedRead(cell, entry.key, [], cell)

    @property
    def key(self) -> str:
        """The key of the first cell."""
        return self._read(0).key

    def wrong(self, data: memoryview) -> PlannedRead | None:
        """Return the read of the first cell in ``data`` that does not match its digest, or None."""
        rows, first = self._distinct, self._start[0]
        lows, highs = (self._start[rows] - first).tolist(), (self._end[rows] - first).tolist()
        found, digests = cell_digests(data, zip(lows, highs, strict=True)), self._cells.digest[rows]
        if found == digests.tobytes():
            return None
        differ = np.frombuffer(found, np.uint8).reshape(digests.shape) != digests
        return self._read(int(rows[differ.any(axis=1).argmax()]))

    def deliver(self, data: memoryview) -> None:
        """Copy the cells from ``data`` to their destinations."""
        copy_addresses(self._address, self._start - self._start[0] + address(data), self._cells.nbytes)


Item: TypeAlias = PlannedRead | SmallReads
"""One item of a read."""


@dataclass(frozen=True, slots=True)
class Reads:
    """All reads of a load. ``lots``: for each lot, the reads of its frames, and the reads of its roots.

    ``most``: the intended size of a read in bytes. ``room``: the size of the largest cell that is not decoded in
    place, rounded up to whole pages.
    """

    lots: Sequence[tuple[Sequence[Batch[Item]], Sequence[Batch[Item]]]]
    most: int
    room: int

    @property
    def batches(self) -> list[Batch[Item]]:
        """All reads of roots."""
        return [batch for _, batches in self.lots for batch in batches]

    @property
    def plain(self) -> int:
        """The decoded size of all items in bytes."""
        return sum(item.plain for batch in self.batches for _, _, item in batch.items)

    @property
    def every(self) -> list[Batch[Item]]:
        """All reads."""
        return [batch for lot in self.lots for batches in lot for batch in batches]

    @property
    def ranges(self) -> list[Range]:
        """The ranges of all reads."""
        return [(batch.blob, batch.offset, batch.nbytes) for batch in self.every]


def new_item(unit: Unit, key: str) -> PlannedRead:
    """Return the read of a unit, without consumers."""
    if unit.frame is None:
        return PlannedRead(unit, key, [], unit)
    *frames, root = unit.chain
    return PlannedRead(unit, key, [], root, frames[::-1])


def ranges_of(unit: Unit) -> tuple[Range, ...]:
    """Return the ranges of the stored bytes that a unit consists of."""
    return (unit[:3],) if unit.frame is None else tuple(map(_range, unit.chain))


def plan_lots(
    planned: Sequence[PlannedRead], small: SmallReads | None, traits: Traits, *, most: int, scratch: int
) -> Reads:
    """Plan reads of ``most`` bytes if nearly everything is read in place.

    Otherwise, plan reads of ``scratch`` bytes.
    """
    gap = _gap(traits, planned, small)
    items: list[Item] = [*planned, *(() if small is None else small.split(gap=gap, most=scratch))]
    loose = sum(item.nbytes for item in items if item.place is None)
    in_place = traits.remote or _FEW * loose <= sum(item.nbytes for item in items)
    most = most if in_place else scratch
    apart = (i.unit.nbytes for i in planned if i.unit.frame is not None and i.takers[0].place is None)
    room = -(-max(apart, default=0) // BLOCK) * BLOCK

    def batches(items: Iterable[Item]) -> list[Batch[Item]]:
        return plan_batches((item.row for item in items), gap=gap, most=most)

    if not any(item.frames for item in items):
        return Reads([((), batches(items))] if items else [], most, room)
    in_order = sorted(items, key=lambda item: item.row[:3])
    together = in_batches(in_order, lambda item: sum(cell.stored for cell in item.frames), _FRAME_BYTES)
    return Reads(
        [(plan_batches(_frames(lot), gap=gap, most=_FRAME_BYTES), batches(lot)) for lot in together], most, room
    )


def _frames(items: Iterable[Item]) -> Iterator[tuple[int, int, int, Item]]:
    """Return the frames of a lot, each of them once."""
    frames = {_range(cell): item for item in items for cell in item.frames}
    return ((*place, item) for place, item in frames.items())


def _range(unit: Unit) -> Range:
    return unit[:3] if unit.frame is None else (unit.blob, unit.offset, unit.frame.nbytes)


def _gap(traits: Traits, items: Sequence[PlannedRead], small: SmallReads | None) -> int:
    """Return the largest gap between reads that are merged. Over a network, the total of all gaps remains small."""
    if not traits.remote:
        return traits.read_gap
    rows = [item.row[:3] for item in items] + [row[:3] for row in _frames(items)]
    rows += [] if small is None else small.places
    wanted = sum(nbytes for _, _, nbytes in rows)
    return affordable_gap(rows, most=traits.read_gap, spare=max(_SPARE_BYTES, wanted // _SPARE_SHARE))


def part(sink: Destination, unit: Unit) -> FilledRange:
    """Return the `FilledRange` of a unit in a destination."""
    return id(sink), unit.box, unit.lo, unit.hi


def place(sink: Destination, region: Region, unit: Unit) -> memoryview | None:
    """Return a unit's memory in a destination of the normalized ``region``.

    Return None unless it is whole and contiguous.
    """
    if unit.box != region.box or unit.lo < region.lo or unit.hi > region.hi:
        return None
    return sink.view(unit.lo - region.lo, unit.hi - region.lo)
