"""The entries of one rank: named streams of elements, and the pieces of them that the rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from casckpt.base.cycle_collector import collector_paused
from casckpt.format import blob, dtypes
from casckpt.format.blob_writer import LEAF_BYTES
from casckpt.format.extents import StoredCell
from casckpt.format.regions import Box, Region, Shape, normalise, whole
from casckpt.format.sections.index import Name
from casckpt.plan.cells import Cut, Group, branch_of, only_cut, plan_cells
from casckpt.plan.reuse import ReusableCells
from casckpt.tensors.gpu import on_gpu
from casckpt.tensors.memory import BufferMemory, Memory, TensorMemory, narrow
from casckpt.tensors.shards import Piece

Data: TypeAlias = torch.Tensor | bytes


@dataclass(slots=True)  # not frozen, because that makes a save of many tensors slower
class LocalEntry:
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
    def branch(self) -> str:
        """The branch of the state that contains the entry."""
        return branch_of(self.kind, self.key)

    @property
    def nbytes(self) -> int:
        """The size of the whole stream in bytes. This rank may hold only a part of it."""
        return prod(self.shape) * dtypes.itemsize(self.dtype)

    @property
    def on_gpu(self) -> bool:
        """Whether any of the pieces are in GPU memory."""
        return on_gpu(piece.data for piece in self.pieces)

    @property
    def order(self) -> tuple[tuple[int, str], str, str, int]:
        """The sort key. A save fills blobs in this order, which keeps every tensor aligned."""
        return blob.order(self.dtype), self.key, self.kind, self.index

    @property
    def only(self) -> Piece | None:
        """The piece of an entry that consists of one piece, which this rank writes completely. Otherwise, None."""
        return self.pieces[0] if self.limits is None and len(self.pieces) == 1 else None

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


@dataclass(slots=True)
class Cell:
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


@collector_paused()
def plan_work(sources: Sequence[LocalEntry], cell_bytes: int, known: ReusableCells) -> list[list[Cell]]:
    """Return the cells of all sources, group by group, in blob order.

    Within a dtype, groups that begin with a large cell come first. Such cells begin at a page boundary, and leave only
    small gaps.
    """
    work: list[list[Cell]] = []
    small: list[list[Cell]] = []
    stored = None
    for number in sorted(range(len(sources)), key=[source.order for source in sources].__getitem__):
        source = sources[number]
        if stored != (stored := blob.order(source.dtype)):
            work, small = work + small, []
        size = dtypes.itemsize(source.dtype)
        parent = known.parent_table(source.name, source.dtype, source.shape)
        only = source.only
        if only is not None and (cut := only_cut(only.region, source.shape, cell_bytes // size, parent)) is not None:
            nbytes = cut.hi * size
            cells = [Cell(number, only.region.box, cut, TensorMemory(only.data), 0, cut.hi, nbytes)]
            (small if nbytes < LEAF_BYTES else work).append(cells)
            continue
        for region, data, base in source.parts():
            for group in plan_cells(region, source.shape, cell_bytes // size, parent):
                memory = _memory(region, data, group)
                shift = base - group.lo
                cells = [
                    Cell(number, group.box, cut, memory, cut.lo + shift, cut.hi + shift, (cut.hi - cut.lo) * size)
                    for cut in group.cuts
                ]
                (small if cells[0].nbytes < LEAF_BYTES else work).append(cells)
    return work + small


def _memory(region: Region, data: Data, group: Group) -> Memory:
    if not isinstance(data, torch.Tensor):
        return BufferMemory(data)
    if group.part is None or group.part == region.box:
        return TensorMemory(data)
    return TensorMemory(narrow(data, group.part.relative_to(region.box)))
