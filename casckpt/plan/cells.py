"""Splits shards into cells: along the parent checkpoint's cells where possible, and otherwise at fixed multiples.

A cell is the unit of comparison. Splitting along the parent's cells lets a save reuse them, even after a change of
topology. All functions are pure. Sizes and offsets count elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from casckpt.base.groups import in_batches
from casckpt.format.blob_writer import place_behind
from casckpt.format.extents import ExtentTable, StoredCell
from casckpt.format.regions import Box, Region, Shape, cut, normalise
from casckpt.format.sections.index import ATTACHMENT

_MAX_REST = 64  # the maximum number of remaining boxes of a shard; more fragments would cost more than reuse saves
_LONG_RUN = 4  # cells: a run this long in a non-contiguous shard is split like a flat range of the whole tensor


class NewCell(NamedTuple):
    """A cell that the parent lacks: the elements [lo, hi) in the row-major order of the group's box."""

    lo: int
    hi: int


Cut: TypeAlias = StoredCell | NewCell
"""A cell of a group: the parent's cell if there is one with exactly these elements, and otherwise a new cell."""


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive cells in the row-major order of ``box``, from ``lo`` to ``hi``.

    ``part``: the box of the tensor whose local data is split. In row-major order, element ``lo`` of the group is
    element 0 of that data.
    """

    box: Box
    lo: int
    hi: int
    part: Box
    cuts: Sequence[Cut]


def plan_cells(region: Region, shape: Shape, cell: int, parent: ExtentTable | None) -> list[Group]:
    """Split a shard of a tensor of ``shape``. ``cell``: the elements per cell.

    ``parent``: the extents with the same key, dtype and shape in the parent checkpoint.
    """
    if not region.numel:
        return []
    if parent is not None and parent.cell != cell:
        parent = None  # the parent is from a store with a different cell size
    if not region.is_whole:
        return [_group(normalise(region, shape), region.box, cell, parent)]
    parts = _parts(region.box, shape, cell, parent)
    return [_group(normalise(Region(part, 0, part.numel), shape), part, cell, parent) for part in parts]


def _group(region: Region, part: Box, cell: int, parent: ExtentTable | None) -> Group:
    return Group(region.box, region.lo, region.hi, part, _cuts(region, cell, parent))


def _cuts(region: Region, cell: int, parent: ExtentTable | None) -> list[Cut]:
    """Split a region along the parent's cells of the same box that are completely inside it."""
    cuts: list[Cut] = []
    if parent is not None and region.box in parent.boxes:
        for stored in parent.cells_in(parent.boxes.index(region.box), region.lo, region.hi):
            if region.lo <= stored.lo and stored.hi <= region.hi:
                cuts += [NewCell(*ends) for ends in cut(cuts[-1].hi if cuts else region.lo, stored.lo, cell)]
                cuts.append(stored)
    return cuts + [NewCell(*ends) for ends in cut(cuts[-1].hi if cuts else region.lo, region.hi, cell)]


def _parts(box: Box, shape: Shape, cell: int, parent: ExtentTable | None) -> list[Box]:
    """Return the boxes that result from the first split of a shard."""
    filled = [] if parent is None else _filled_boxes(parent)
    inner = [other for other in filled if other != box and other.inside(box)]
    rest = _rest(box, inner)
    return [box] if rest is None else inner + [run for part in rest for run in _long_runs(part, shape, cell)]


def _filled_boxes(parent: ExtentTable) -> list[Box]:
    """Return the boxes that the parent's extents fill. These are disjoint, but other boxes may overlap."""
    held = [0] * len(parent.boxes)
    for extent in parent.extents:
        held[extent.box] += extent.hi - extent.lo
    return [box for box, count in zip(parent.boxes[1:], held[1:], strict=True) if count == box.numel]


def _rest(box: Box, inner: Sequence[Box]) -> list[Box] | None:
    """Subtract disjoint ``inner`` boxes from ``box``. Return None if too many pieces remain."""
    if sum(other.numel for other in inner) == box.numel:
        return []
    rest = [box]
    for other in inner:
        rest = [piece for part in rest for piece in part.subtract(other)]
        if len(rest) > _MAX_REST:
            return None
    return rest


def _long_runs(box: Box, shape: Shape, cell: int) -> list[Box]:
    """Return a box for each contiguous run of a box, or the box itself if it is contiguous or its runs are short."""
    dim = len(shape)
    while dim > 0 and box.shape[dim - 1] == shape[dim - 1]:
        dim -= 1
    dim = max(dim - 1, 0)  # each index of the dimensions before this one is a separate run
    if prod(box.shape[:dim]) == 1 or prod(box.shape[dim:]) < _LONG_RUN * cell:
        return [box]
    heads = np.ndindex(*box.shape[:dim])
    return [
        Box(
            (*(base + i for base, i in zip(box.offset, head, strict=False)), *box.offset[dim:]),
            (*(1 for _ in head), *box.shape[dim:]),
        )
        for head in heads
    ]


_MAX_BRANCHES = 16
_MIXED = 1 << 20  # bytes; branches with up to this total size share a blob


class _Sized(Protocol):
    @property
    def nbytes(self) -> int:
        """The size of the cell in bytes."""


C = TypeVar("C", bound=_Sized)


def branch_of(kind: str, key: str) -> str:
    """Return the branch of an entry: its key up to the first dot. All attachments form one branch."""
    return "" if kind == ATTACHMENT else key.partition(".")[0]


def branch_numbers(branches: Iterable[str]) -> list[int]:
    """Number the distinct branches, and return the number of each item. More than 16 count as a single branch."""
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(branch, len(numbers)) for branch in branches]
    return found if len(numbers) <= _MAX_BRANCHES else [0] * len(found)


def by_branch(cells: Iterable[C], branch: Callable[[C], int]) -> list[list[C]]:
    """Separate the branches of the state, so that reading one branch needs few blobs.

    Small branches are kept together. ``branch``: returns the number of a cell's branch.
    """
    nbytes: dict[int, int] = defaultdict(int)
    for cell in cells:
        nbytes[branch(cell)] += cell.nbytes
    parts: list[list[C]] = []
    part_of: dict[int, list[C]] = {}
    for numbers in in_batches(sorted(nbytes, key=nbytes.__getitem__), nbytes.__getitem__, _MIXED):
        parts.append([])
        part_of.update((number, parts[-1]) for number in numbers)
    for cell in cells:
        part_of[branch(cell)].append(cell)
    return parts


class Queue(Generic[C]):
    """A queue that hands out cells in batches that fit into a buffer. Thread-safe."""

    def __init__(self, cells: Iterable[C]) -> None:
        self._cells = list(cells)
        self._next = 0
        self._lock = Lock()

    @property
    def is_empty(self) -> bool:
        """Whether all cells have been taken."""
        return self._next == len(self._cells)

    def take(self, begin: int, end: int) -> tuple[int, Sequence[C]]:
        """Take the next cells that fit between bytes ``begin`` and ``end`` of a blob.

        Returns (index of the first cell, cells).
        """
        with self._lock:
            first = last = self._next
            while last < len(self._cells) and (begin := self._place(last, begin, end)) <= end:
                last += 1
            self._next = last
            return first, self._cells[first:last]

    def _place(self, number: int, begin: int, end: int) -> int:
        """Return the byte at which a cell ends if the previous cell in the blob ends at byte ``begin``."""
        nbytes = self._cells[number].nbytes
        return place_behind(begin, nbytes) + nbytes
