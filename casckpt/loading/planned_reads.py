"""What a load reads: each range of bytes once, whoever wants it, in lots whose cells are decoded together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from casckpt.base.groups import lots
from casckpt.format.extents import StoredCell
from casckpt.format.regions import Box, Region
from casckpt.plan.reads import Batch, Unit, affordable_gap, plan_batches
from casckpt.storage.base import BLOCK, Traits
from casckpt.tensors.memory import Destination, copy_bytes

_FRAME_BYTES = 8 << 20  # of a lot: so many at most are held, for each thread that is at another lot
_FEW = 8  # with 1/8 of the bytes or less that are copied once more, reads are as large as if all went right into place
_SPARE_BYTES, _SPARE_SHARE = 4 << 20, 25  # over a network: so much, or 1/25 of what is wanted, is read in vain

FilledRange: TypeAlias = tuple[int, Box, int, int]
"""The elements [lo, hi) of a box that a sink (by its `id`) has got."""


class Consumer(NamedTuple):
    """A sink, the unit that it takes from, and the bytes of that unit in place, if the sink holds it whole."""

    sink: Destination
    unit: Unit
    place: memoryview | None

    def take(self, data: memoryview) -> None:
        """Copy the unit's bytes to where they belong."""
        if self.place is None:
            self.sink.copy_in(self.unit.region, data)
        else:
            copy_bytes(self.place, data)


class Runs:
    """Takers of what lies in one buffer, who take it at the end: one after the other of a tensor in one go.

    For a GPU: to begin a copy costs it as much as 1 MiB of it.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._last: dict[int, _Run] = {}  # of each sink, by its id
        self._runs: list[_Run] = []

    def add(self, taker: Consumer, start: int) -> None:
        """Add one whose unit begins at byte ``start``."""
        unit, run = taker.unit, self._last.get(id(taker.sink))
        if run is not None and (run.box, run.hi, run.stop) == (unit.box, unit.lo, start):
            run.hi, run.stop = unit.hi, start + unit.nbytes
        else:
            run = self._last[id(taker.sink)] = _Run(taker.sink, unit.box, unit.lo, unit.hi, start, start + unit.nbytes)
            self._runs.append(run)

    def deliver(self) -> None:
        """Let them take it."""
        for run in self._runs:
            run.sink.copy_in(Region(run.box, run.lo, run.hi), self._data[run.start : run.stop])


@dataclass(slots=True)
class _Run:
    """Elements [lo, hi) of a box, which are bytes [start, stop) of the buffer."""

    sink: Destination
    box: Box
    lo: int
    hi: int
    start: int
    stop: int


class PlannedRead(NamedTuple):
    """One cell, or one range of bytes, and all who want it. Their units differ where equal cells are stored once.

    ``root``: the unit itself, or the last in the chain of its bases. ``frames``: the others of that chain, the one that
    is told from the root first, and the unit last.
    """

    unit: Unit
    key: str
    takers: list[Consumer]
    root: Unit
    frames: Sequence[StoredCell] = ()

    @property
    def place(self) -> memoryview | None:
        """Where the bytes of the root may be read to right away."""
        return None if self.root.frame is not None else self.takers[0].place

    @property
    def nbytes(self) -> int:
        """Bytes that are read of the root."""
        return self.root.nbytes if self.root.frame is None else self.root.frame.nbytes

    @property
    def row(self) -> tuple[int, int, int, PlannedRead]:
        """The blob and the bytes in it of the root."""
        return (*_range(self.root), self)


@dataclass(frozen=True, slots=True)
class Reads:
    """All reads of a load: of each lot first the ``frames``, then the ``batches``, which are of roots.

    ``most``: bytes that one of them is meant to have. ``room``: bytes of the largest cell that is decoded out of place,
    in whole pages.
    """

    lots: Sequence[tuple[Sequence[Batch[PlannedRead]], Sequence[Batch[PlannedRead]]]]
    most: int
    room: int

    @property
    def batches(self) -> list[Batch[PlannedRead]]:
        """All that are of roots."""
        return [batch for _, batches in self.lots for batch in batches]

    @property
    def plain(self) -> int:
        """Bytes of all items, decoded."""
        return sum(item.unit.nbytes for batch in self.batches for _, _, item in batch.items)

    @property
    def every(self) -> list[Batch[PlannedRead]]:
        """All."""
        return [batch for lot in self.lots for batches in lot for batch in batches]


def new_item(unit: Unit, key: str) -> PlannedRead:
    """Make the item of a unit that nobody takes yet."""
    if unit.frame is None:
        return PlannedRead(unit, key, [], unit)
    *frames, root = unit.chain
    return PlannedRead(unit, key, [], root, frames[::-1])


def place_of(unit: Unit) -> Hashable:
    """Tell units apart by all the bytes that they are made of."""
    return unit[:3] if unit.frame is None else tuple(map(_range, unit.chain))


def plan_lots(items: Sequence[PlannedRead], traits: Traits, *, most: int, scratch: int) -> Reads:
    """Plan the reads: of ``most`` bytes where nearly all goes right into place, else of ``scratch``."""
    loose = sum(item.nbytes for item in items if item.place is None)
    in_place = traits.remote or _FEW * loose <= sum(item.nbytes for item in items)
    most, gap = most if in_place else scratch, _gap(traits, items)
    apart = (i.unit.nbytes for i in items if i.unit.frame is not None and i.takers[0].place is None)
    room = -(-max(apart, default=0) // BLOCK) * BLOCK

    def batches(items: Iterable[PlannedRead]) -> list[Batch[PlannedRead]]:
        return plan_batches((item.row for item in items), gap=gap, most=most)

    if not any(item.frames for item in items):
        return Reads([((), batches(items))] if items else [], most, room)
    in_order = sorted(items, key=lambda item: item.row[:3])
    together = lots(in_order, lambda item: sum(cell.stored for cell in item.frames), _FRAME_BYTES)
    return Reads(
        [(plan_batches(_frames(lot), gap=gap, most=_FRAME_BYTES), batches(lot)) for lot in together], most, room
    )


def _frames(items: Iterable[PlannedRead]) -> Iterator[tuple[int, int, int, PlannedRead]]:
    """The frames of a lot, each once."""
    found = {_range(cell): item for item in items for cell in item.frames}
    return ((*place, item) for place, item in found.items())


def _range(unit: Unit) -> tuple[int, int, int]:
    return unit[:3] if unit.frame is None else (unit.blob, unit.offset, unit.frame.nbytes)


def _gap(traits: Traits, items: Sequence[PlannedRead]) -> int:
    """The gap that merging may bridge: what it costs of the way, and of a network little more than is wanted."""
    if not traits.remote:
        return traits.read_gap
    rows = [item.row[:3] for item in items] + [row[:3] for row in _frames(items)]
    wanted = sum(nbytes for _, _, nbytes in rows)
    return affordable_gap(rows, most=traits.read_gap, spare=max(_SPARE_BYTES, wanted // _SPARE_SHARE))


def part(sink: Destination, unit: Unit) -> FilledRange:
    """Name what a sink takes of a unit."""
    return id(sink), unit.box, unit.lo, unit.hi


def place(sink: Destination, region: Region, unit: Unit) -> memoryview | None:
    """The bytes of a unit in a sink of ``region`` (normalised), if it holds the unit whole and together."""
    if unit.box != region.box or unit.lo < region.lo or unit.hi > region.hi:
        return None
    return sink.view(unit.lo - region.lo, unit.hi - region.lo)
