"""Which cells lie together in a blob: those of one branch of the state, in order, as many as have room. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from threading import Lock
from typing import Generic, Protocol, TypeVar

from casckpt.base.groups import lots
from casckpt.format.blob_writer import LEAF_BYTES, place_behind
from casckpt.format.sections.index import ATTACHMENT

_MAX_BRANCHES = 16
_MIXED = 1 << 20  # bytes: branches that have no more together share a blob


class _Sized(Protocol):
    @property
    def nbytes(self) -> int:
        """Bytes of the cell."""


C = TypeVar("C", bound=_Sized)


def branch_of(kind: str, key: str) -> str:
    """Return the child of the state's root that a stream belongs to, as far as a key tells; attachments are one."""
    return "" if kind == ATTACHMENT else key.partition(".")[0]


def branches_of(branches: Iterable[str]) -> frozenset[str]:
    """Return all branches of a state; where they are many, they count as one."""
    found: set[str] = set()
    for branch in branches:
        found.add(branch)
        if len(found) > _MAX_BRANCHES:
            return frozenset({""})
    return frozenset(found)


def by_branch(cells: Sequence[C], branch: Callable[[C], str], branches: Collection[str]) -> list[Sequence[C]]:
    """Keep the branches of the state apart, for who wants one of them alone; small ones lie together."""
    if not cells or len(branches) == 1:
        return [cells] if cells else []
    nbytes: dict[str, int] = defaultdict(int)
    for cell in cells:
        nbytes[branch(cell)] += cell.nbytes
    parts: list[list[C]] = []
    part_of: dict[str, list[C]] = {}
    for lot in lots(sorted(nbytes, key=nbytes.__getitem__), nbytes.__getitem__, _MIXED):
        parts.append([])
        part_of.update((name, parts[-1]) for name in lot)
    for cell in cells:
        part_of[branch(cell)].append(cell)
    return list(parts)


class Queue(Generic[C]):
    """Cells in order, handed out by the buffer. Safe for use by several threads."""

    def __init__(self, cells: Sequence[C]) -> None:
        self._cells = cells
        self._next = 0
        self._lock = Lock()

    @property
    def is_empty(self) -> bool:
        """Are all cells handed out?"""
        return self._next == len(self._cells)

    def take(self, begin: int, end: int) -> tuple[int, Sequence[C]]:
        """Take the next cells that have room in a blob from byte ``begin`` to byte ``end``; the number of the first."""
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
