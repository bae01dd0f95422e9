"""The entries of one rank: named streams of elements, and the pieces of them that the rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from casckpt.base.cycle_collector import collector_paused
from casckpt.format import blob, dtypes
from casckpt.format.blob_writer import LEAF_BYTES
from casckpt.format.columns import Ints
from casckpt.format.extents import StoredCell
from casckpt.format.light import LightStruct
from casckpt.format.regions import Box, Region, Shape, normalise, whole
from casckpt.format.sections.index import Name
from casckpt.format.sections.tables import Streams, WholeCells
from casckpt.plan.cells import Cut, Group, plan_cells
from casckpt.plan.reuse import ReusableCells
from casckpt.tensors.kinds import PLAIN
from casckpt.tensors.memory import BufferMemory, Memory, TensorMemory, address_of, narrow
from casckpt.tensors.shards import Piece

Data: TypeAlias = torch.Tensor | bytes


class LocalEntry(LightStruct, frozen=True):
    """A tensor, a large buffer of an object, or an attachment; see `casckpt.format.sections.index.Entry`.

    ``limits``: for each piece, the elements [lo, hi) of its normalized region that this rank writes. None means all of
    them. ``buffer``: the whole stream, which replaces the pieces if this is not a tensor. ``replicated``: see
    `LocalTensor`. ``may_differ``: see `casckpt.tensors.shards.may_differ`. ``frozen``: the caller declares that the
    tensor did not change.
    """

    kind: str
    key: str
    index: int
    rank: int | None
    dtype: str
    shape: Shape
    pieces: Sequence[Piece] = ()
    buffer: bytes | None = None
    replicated: bool = False
    limits: Sequence[tuple[int, int]] | None = None
    frozen: bool = False
    may_differ: bool = False

    @property
    def name(self) -> Name:
        """The entry's unique name."""
        return self.kind, self.key, self.index, self.rank

    @property
    def nbytes(self) -> int:
        """The size of the whole stream in bytes. This rank may hold only a part of it."""
        return prod(self.shape) * dtypes.itemsize(self.dtype)

    @property
    def order(self) -> tuple[tuple[int, str], str, str, int]:
        """The sort key. A save fills blobs in this order, which keeps every tensor aligned."""
        return blob.order(self.dtype), self.key, self.kind, self.index

    @property
    def only(self) -> torch.Tensor | None:
        """The data of a plain tensor that this rank holds and writes completely. Otherwise, None."""
        if len(self.pieces) != 1 or self.frozen or type(self.pieces[0].data) not in PLAIN:
            return None
        region, data = self.pieces[0].region, self.pieces[0].data
        is_written = self.limits is None or self.limits[0] == (region.lo, region.hi)
        return data if is_written and region.box.shape == self.shape and region.is_whole else None

    def parts(self) -> Iterator[tuple[Region, Data, int]]:
        """Yield the writes of this rank as (region, data, element of the data at which the region begins)."""
        if self.buffer is not None:
            yield whole(self.shape), self.buffer, 0
            return
        for number, piece in enumerate(self.pieces):
            region = normalise(piece.region, self.shape)
            lo, hi = self.limits[number] if self.limits is not None else (region.lo, region.hi)
            if (lo, hi) == (region.lo, region.hi):
                yield piece.region, piece.data, 0
            elif lo < hi:
                yield Region(region.box, lo, hi), piece.data, lo - region.lo


class Cell(LightStruct, frozen=True):
    """A cell to process: the elements [cut.lo, cut.hi) of ``box``, which are elements [start, stop) of ``memory``."""

    source: int
    box: Box
    cut: Cut
    memory: Memory
    start: int
    stop: int
    nbytes: int

    @property
    def known(self) -> StoredCell | None:
        """The parent's cell with exactly these elements, or None."""
        return self.cut if isinstance(self.cut, StoredCell) else None

    def data(self) -> memoryview:
        """Return the bytes of the cell without a copy. Copy them only if they are not contiguous in host memory."""
        view = self.memory.view(self.start, self.stop)
        if view is None:
            view = memoryview(bytearray(self.nbytes))
            self.memory.copy_out(self.start, self.stop, view)
        return view


class SmallCells(NamedTuple):
    """Small tensors in host memory, each of which is a single cell that is not coded, in columns with a row for each.

    They take the place of a `Cell`, have the same stored dtype, and are in blob order. ``source``: the number of each
    tensor's entry. ``data``: keeps the memory at ``address`` alive. ``known``: the parent's cells. ``placed``: the
    cells after an upload, where ``is_whole`` means that ``blob`` is one of this save's own blobs. Results in some of
    the `rows` are visible in all of them.
    """

    source: Ints
    data: Sequence[torch.Tensor]
    address: Ints
    known: WholeCells
    placed: WholeCells

    @property
    def nbytes(self) -> int:
        """The size of all cells in bytes."""
        return int(self.placed.nbytes.sum())

    @property
    def needs(self) -> list[int]:
        """The numbers of the known blobs that hold the cells."""
        numbers: list[int] = np.unique(self.placed.blob[~self.placed.is_whole]).tolist()
        return numbers

    def rows(self, which: slice) -> SmallCells:
        """Return some of the rows."""
        known, placed = self.known.take(which), self.placed.take(which)
        return SmallCells(self.source[which], self.data, self.address[which], known, placed)

    def runs(self, labels: npt.NDArray[Any]) -> Iterator[tuple[Any, SmallCells]]:
        """Split the rows wherever their labels change, and yield the label and the rows of each run."""
        ends = [*(np.flatnonzero(labels[1:] != labels[:-1]) + 1).tolist(), len(labels)]
        return ((labels[start], self.rows(slice(start, end))) for start, end in pairwise([0, *ends]))


def _small_cells(
    sources: Sequence[LocalEntry],
    order: Sequence[int],
    cell_bytes: int,
    known: ReusableCells,
    *,
    streams: Streams,
    most: int,
) -> SmallCells:
    """Return the tensors below ``most`` bytes that can be in columns, in blob order."""
    usable = len(streams) == len(sources)  # two sources with the same name are rejected later, by name
    found = [(number, data.data) for number in order if usable and (data := sources[number].only) is not None]
    held = [(number, address_of(data), data.nbytes) for number, data in found]
    numbers, address, nbytes = np.array(held, np.int64).reshape(-1, 3).T
    cells = known.parent.find(streams, cell_bytes).take(numbers)
    fits = (address != 0) & (nbytes > 0) & (nbytes < most) & (nbytes <= cell_bytes)
    for number, row in zip(numbers[new := fits & ~cells.is_whole].tolist(), np.flatnonzero(new).tolist(), strict=True):
        source = sources[number]
        fits[row] = known.parent.table(source.name, source.dtype, source.shape) is None
    placed = WholeCells.none(int(fits.sum()))._replace(nbytes=nbytes[fits])
    return SmallCells(numbers[fits], [data for _, data in found], address[fits], cells.take(fits), placed)


@collector_paused()
def plan_work(
    sources: Sequence[LocalEntry],
    cell_bytes: int,
    known: ReusableCells,
    streams: Streams = MappingProxyType({}),
    small_bytes: int = 0,
) -> list[list[Cell | SmallCells]]:
    """Return the cells of all sources, group by group, in blob order.

    Within a dtype, groups that begin with a large cell come first. Such cells begin at a page boundary, and leave only
    small gaps. ``streams``: the names and forms of the sources. If they are given, tensors below ``small_bytes`` may
    be in `SmallCells`.
    """
    places = [source.order for source in sources]
    order = sorted(range(len(sources)), key=places.__getitem__)
    every = _small_cells(sources, order, cell_bytes, known, streams=streams, most=min(small_bytes, LEAF_BYTES))
    row_of = {number: row for row, number in enumerate(every.source.tolist())}
    work: list[list[Cell | SmallCells]] = []
    for _, numbers in groupby(order, key=lambda number: places[number][0]):
        small: list[list[Cell | SmallCells]] = []
        for is_row, some in groupby(numbers, key=row_of.__contains__):
            first, *more = some
            if is_row:
                small.append([every.rows(slice(row_of[first], row_of[first] + len(more) + 1))])
                continue
            for number in (first, *more):
                for cells in _cells(number, sources[number], cell_bytes, known):
                    (small if cells[0].nbytes < LEAF_BYTES else work).append([*cells])
        work += small
    return work


def _cells(number: int, source: LocalEntry, cell_bytes: int, known: ReusableCells) -> Iterator[list[Cell]]:
    """Return the groups of cells of the source with this number."""
    size = dtypes.itemsize(source.dtype)
    parent = known.parent.table(source.name, source.dtype, source.shape)
    for region, data, base in source.parts():
        for group in plan_cells(region, source.shape, cell_bytes // size, parent):
            memory = _memory(region, data, group)
            shift = base - group.lo
            yield [
                Cell(number, group.box, cut, memory, cut.lo + shift, cut.hi + shift, (cut.hi - cut.lo) * size)
                for cut in group.cuts
            ]


def _memory(region: Region, data: Data, group: Group) -> Memory:
    if not isinstance(data, torch.Tensor):
        return BufferMemory(data)
    if group.part is None or group.part == region.box:
        return TensorMemory(data)
    return TensorMemory(narrow(data, group.part.relative_to(region.box)))
