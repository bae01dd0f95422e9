"""Cells on their way into a blob. Those of a GPU come several at once: to begin a copy there costs as much as 1 MiB."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from casckpt.saving.local_entries import Cell, Source
from casckpt.storage.buffers import BufferPool
from casckpt.tensors import gpu
from casckpt.tensors.memory import Memory, copy_bytes

_ROOM = 8 << 20


class Copier:
    """Copies cells, one after the other, for one worker. ``room``: pinned memory, where what lies on a GPU goes first.

    Without room all is copied to where it belongs.
    """

    def __init__(self, room: memoryview | None) -> None:
        self._room = room
        self._memory: Memory | None = None  # of which elements [lo, hi) are in the room
        self._lo = self._hi = 0

    def copy(self, cells: Sequence[Cell], number: int, target: memoryview) -> None:
        """Copy one of ``cells`` into ``target``; the next ones may be asked for next."""
        cell, room = cells[number], self._room
        if room is None or not cell.memory.on_gpu or cell.nbytes > room.nbytes:
            cell.memory.copy_out(cell.start, cell.stop, target)
            return
        if self._memory is not cell.memory or cell.start < self._lo or self._hi < cell.stop:
            stop, nbytes = cell.stop, cell.nbytes
            for other in cells[number + 1 :]:
                if other.memory is not cell.memory or other.start != stop or nbytes + other.nbytes > room.nbytes:
                    break
                stop, nbytes = other.stop, nbytes + other.nbytes
            self._memory, self._lo, self._hi = None, cell.start, stop
            cell.memory.copy_out(cell.start, stop, room[:nbytes])
            self._memory = cell.memory
        at = (cell.start - self._lo) * cell.memory.itemsize
        copy_bytes(target, room[at : at + cell.nbytes])


def rooms(sources: Sequence[Source], workers: int) -> AbstractContextManager[BufferPool | None]:
    """Make room for the workers of a save, if any of ``sources`` is on a GPU."""
    return gpu.PINNED.pool(workers, _ROOM) if any(source.on_gpu for source in sources) else nullcontext()


@contextmanager
def copier(rooms: BufferPool | None) -> Iterator[Copier]:
    """Give one worker its copier."""
    if rooms is None:
        yield Copier(None)
        return
    with rooms.borrow() as room:
        yield Copier(room.view)
