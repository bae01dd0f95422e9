"""The entries of one rank: named streams of elements, and the pieces of them that the rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from casckpt.base.cycle_collector import collector_paused
from casckpt.format import blob, dtypes
from casckpt.format.blob_writer import LEAF_BYTES
from casckpt.format.extents import StoredCell
from casckpt.format.light import LightStruct
from casckpt.format.regions import Box, Region, Shape, normalise, whole
from casckpt.format.sections.columns import Ints
from casckpt.format.sections.index import Name
from casckpt.format.sections.tables import Streams, WholeCells
from casckpt.plan.cells import Cut, Group, plan_cells
from casckpt.plan.reuse import ReusableCells
from casckpt.tensors.file_memory import FileMemory
from casckpt.tensors.kinds import PLAIN
from casckpt.tensors.memory import Block, BufferMemory, Memory, TensorMemory, block_of, narrow
from casckpt.tensors.shards import Piece

Data: TypeAlias = torch.Tensor | bytes | FileMemory


class LocalEntry(LightStruct, frozen=True):
    """A tensor, a large buffer of an object, or an attachment; see `casckpt.format.sections.index.Entry`.

    ``data``, ``shards``, ``replicated``: see `casckpt.tensors.shards.LocalTensor`. The data is bytes if this is not a
    tensor, or the content of files. ``limits``: for each piece, the elements [lo, hi) of its normalized region that
    this rank writes. None means all of them. ``frozen``: the caller declares that the tensor did not change.
    ``may_differ``: see `casckpt.tensors.shards.may_differ`. ``block``: the memory of most plain tensors.
    """

    kind: str
    key: str
    index: int
    rank: int | None
    dtype: str
    shape: Shape
    data: Data | None = None
    shards: Sequence[Piece] = ()
    replicated: bool = False
    limits: Sequence[tuple[int, int]] | None = None
    frozen: bool = False
    may_differ: bool = False
    block: Block | None = None

    @property
    def name(self) -> Name:
        """The entry's unique name."""
        return self.kind, self.key, self.index, self.rank

    @property
    def pieces(self) -> Sequence[Piece]:
        """The pieces of a tensor that this rank holds."""
        return (Piece(whole(self.shape), self.data),) if isinstance(self.data, torch.Tensor) else self.shards

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The data of its pieces."""
        return (self.data,) if isinstance(self.data, torch.Tensor) else [piece.data for piece in self.shards]

    def parts(self) -> Iterator[tuple[Region, Data, int]]:
        """Yield the writes of this rank as (region, data, element of the data at which the region begins)."""
        if isinstance(self.data, bytes | FileMemory):
            yield whole(self.shape), self.data, 0
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
    tensor's entry. ``blocks``: keep the memory at ``address`` alive. ``known``: the parent's cells. ``placed``: the
    cells after an upload, where ``blob`` is a number in the ``refs`` of `casckpt.saving.upload.Upload`. Results in
    some of the `rows` are visible in all of them.
    """

    source: Ints
    blocks: Sequence[Block | None]
    address: Ints
    known: WholeCells
    placed: WholeCells

    @property
    def nbytes(self) -> int:
        """The size of all cells in bytes."""
        return int(self.placed.nbytes.sum())

    @property
    def needs(self) -> list[int]:
        """The numbers of the blobs that hold the cells."""
        numbers: list[int] = np.unique(self.placed.blob).tolist()
        return numbers

    def rows(self, which: slice) -> SmallCells:
        """Return some of the rows."""
        known, placed = self.known.take(which), self.placed.take(which)
        return SmallCells(self.source[which], self.blocks, self.address[which], known, placed)

    def runs(self, labels: npt.NDArray[Any]) -> Iterator[tuple[Any, SmallCells]]:
        """Split the rows wherever their labels change, and yield the label and the rows of each run."""
        starts = np.flatnonzero(np.diff(labels, prepend=-1)).tolist()
        return ((labels[start], self.rows(slice(start, end))) for start, end in pairwise([*starts, len(labels)]))


def _block(source: LocalEntry) -> Block | None:
    """Return the memory of a plain tensor that this rank writes completely."""
    data, block = source.data, source.block
    if not isinstance(data, torch.Tensor) or type(data) not in PLAIN or source.limits is not None or source.frozen:
        return None
    return block if block is not None and block.data is data else block_of(data)


def _small_cells(
    sources: Sequence[LocalEntry], order: Ints, known: ReusableCells, streams: Streams, *, cell_bytes: int, most: int
) -> tuple[SmallCells, npt.NDArray[np.bool_]]:
    """Return all sources as columns, in this order, and which rows are valid.

    Valid rows are plain tensors below ``most`` bytes. The others have to become `Cell` values.
    """
    none = WholeCells.none(len(order))
    if not most or len(streams) != len(sources):  # two sources with the same name are rejected later, by name
        return SmallCells(order, (), none.blob, none, none), none.is_whole
    blocks = list(map(_block, sources))
    address = np.array([0 if block is None else block.address for block in blocks], np.int64)[order]
    nbytes = np.array([0 if block is None else block.nbytes for block in blocks], np.int64)[order]
    cells = known.parent.find(streams, cell_bytes).take(order)
    fits = (address != 0) & (nbytes > 0) & (nbytes < most) & (nbytes <= cell_bytes)
    for row in np.flatnonzero(fits & ~cells.is_whole).tolist():
        source = sources[order[row]]
        fits[row] = known.parent.table(source.name, source.dtype, source.shape) is None
    return SmallCells(order, blocks, address, cells, none._replace(nbytes=nbytes)), fits


@collector_paused()
def plan_work(
    sources: Sequence[LocalEntry],
    cell_bytes: int,
    known: ReusableCells,
    streams: Streams = MappingProxyType({}),
    small_bytes: int = 0,
) -> list[list[Cell | SmallCells]]:
    """Return the cells of all sources, group by group, in blob order.

    Sources are sorted by the order of their dtype, which keeps every tensor aligned, and then by name. Within a dtype,
    groups that begin with a large cell come first. Such cells begin at a page boundary, and leave only small gaps.
    ``streams``: the names and forms of the sources. If they are given, tensors below ``small_bytes`` may be in
    `SmallCells`.
    """
    orders = {dtype: blob.order(dtype) for dtype in {source.dtype for source in sources}}
    type_of = {dtype: sorted({*orders.values()}).index(order) for dtype, order in orders.items()}
    places = [(type_of[source.dtype], source.key, source.kind, source.index) for source in sources]
    order = np.array(sorted(range(len(sources)), key=places.__getitem__), np.int64)
    types = np.array([place[0] for place in places], np.int64)[order]
    most = min(small_bytes, LEAF_BYTES)
    every, fits = _small_cells(sources, order, known, streams, cell_bytes=cell_bytes, most=most)
    # for each dtype, the groups that begin with a large cell, and all others
    parts: list[list[list[Cell | SmallCells]]] = [[] for _ in range(2 * len(orders))]
    for label, some in every.runs(2 * types + fits):
        if label % 2:
            parts[label].append([some])
            continue
        for number in some.source.tolist():
            for cells in _cells(number, sources[number], cell_bytes, known):
                parts[label + (cells[0].nbytes < LEAF_BYTES)].append([*cells])
    return [group for part in parts for group in part]


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
    if isinstance(data, bytes):
        return BufferMemory(data)
    if isinstance(data, FileMemory):
        return data
    if group.part == region.box:
        return TensorMemory(data)
    return TensorMemory(narrow(data, group.part.relative_to(region.box)))
