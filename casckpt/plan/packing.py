"""Choice of the cells that share a blob: cells of one branch of the state, in order, up to its size. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from threading import Lock
from typing import Generic, Protocol, TypeVar

from casckpt.base.groups import in_batches
from casckpt.format.blob_writer import LEAF_BYTES, place_behind
from casckpt.format.sections.index import ATTACHMENT

_MAX_BRANCHES = 16
_MIXED = 1 << 20  # bytes: branches up to this size together share a blob


class _Sized(Protocol):
    @property
    def nbytes(self) -> int:
        """Bytes of the cell."""


C = TypeVar("C", bound=_Sized)


def branch_of(kind: str, key: str) -> str:
    """Return the branch of a stream: its key up to the first dot. All attachments are one branch."""
    return "" if kind == ATTACHMENT else key.partition(".")[0]


def branches_of(branches: Iterable[str]) -> frozenset[str]:
    """Return all branches of a state; more than 16 count as one."""
    names: set[str] = set()
    for branch in branches:
        names.add(branch)
        if len(names) > _MAX_BRANCHES:
            return frozenset({""})
    return frozenset(names)


def by_branch(cells: Sequence[C], branch: Callable[[C], str], branches: Collection[str]) -> list[Sequence[C]]:
    """Separate the branches of the state, so that one of them can be read alone. Small ones stay together."""
    if not cells or len(branches) == 1:
        return [cells] if cells else []
    nbytes: dict[str, int] = defaultdict(int)
    for cell in cells:
        nbytes[branch(cell)] += cell.nbytes
    parts: list[list[C]] = []
    part_of: dict[str, list[C]] = {}
    for names in in_batches(sorted(nbytes, key=nbytes.__getitem__), nbytes.__getitem__, _MIXED):
        parts.append([])
        part_of.update((name, parts[-1]) for name in names)
    for cell in cells:
        part_of[branch(cell)].append(cell)
    return list(parts)


class Queue(Generic[C]):
    """Cells in order, taken as many as fit into a buffer. Safe for use by several threads."""

    def __init__(self, cells: Sequence[C]) -> None:
        self._cells = cells
        self._next = 0
        self._lock = Lock()

    @property
    def is_empty(self) -> bool:
        """Whether all cells were taken."""
        return self._next == len(self._cells)

    def take(self, begin: int, end: int) -> tuple[int, Sequence[C]]:
        """Take the next cells that fit between bytes ``begin`` and ``end`` of a blob: (number of the first, cells)."""
        with self._lock:
            first = last = self._next
            while last < len(self._cells):
                nbytes = self._cells[last].nbytes
                begin = (begin if nbytes < LEAF_BYTES else place_behind(begin, nbytes)) + nbytes
                if begin > end:
                    break
                last += 1
            self._next = last
            return first, self._cells[first:last]
