"""Windows of a checkpoint's tensors: so much of their data at a time, planned, and read into one buffer.

A file that holds them as another checkpoint has them is revised: of what differs alone anything is read, and written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedRandom
from itertools import accumulate
from typing import Final

from casckpt.base.parallel import usable_threads
from casckpt.base.progress import Progress, Shown
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import StorageError
from casckpt.format.dtypes import itemsize
from casckpt.format.extents import ExtentTable
from casckpt.format.manifest import Manifest
from casckpt.format.regions import Region, full_box
from casckpt.frontends.views.recut import EntrySlice, ViewTensor
from casckpt.loading.entry_reader import EntryReader, RegionRequest
from casckpt.loading.regions import Part, request_for
from casckpt.loading.update import change
from casckpt.repository.repository import Repository
from casckpt.storage.buffers import AlignedBuffer

WINDOW_BYTES: Final = 64 << 20
_BLOCK = 1 << 20  # of a file: it is written where one differs


def plan_windows(
    sources: Iterable[EntrySlice], most: int, cell_bytes: int, first: int | None = None
) -> Iterator[list[EntrySlice]]:
    """Cut the data of ``sources``, one after the other, into pieces of at most ``most`` bytes together.

    Streams are cut between cells, so that no cell is read twice, unless ``most`` is less than a cell. ``first``: the
    most bytes of the first piece, if these are others.
    """
    window: list[EntrySlice] = []
    room = most if first is None else first
    for one in sources:
        lo, size = one.lo, itemsize(one.entry.dtype)
        cell = max(cell_bytes // size, 1)
        while lo < one.hi:
            fits = room // size if window else max(room // size, 1)
            hi = min(lo + fits, one.hi)
            if hi < one.hi:
                hi = max(hi // cell * cell, lo) if window or fits >= cell else hi
            if hi > lo:
                window.append(one._replace(lo=lo, hi=hi))
                room -= (hi - lo) * size
                lo = hi
            if lo < one.hi:
                yield window
                window, room = [], most
    if window:
        yield window


def requests(
    window: Sequence[EntrySlice], buffer: memoryview, tables: Mapping[int, ExtentTable]
) -> list[RegionRequest]:
    """What reads a window into the front of ``buffer``. ``tables``: of entries, by number, if they are at hand."""
    ends = accumulate((one.nbytes for one in window), initial=0)
    parts = (Part(one.entry, Region(full_box(one.entry.shape), one.lo, one.hi)) for one in window)
    return [
        request_for(part, buffer[start : start + part.nbytes], tables.get(part.entry.number))
        for part, start in zip(parts, ends, strict=False)
    ]


class WindowReader:
    """Reads the data of tensors one after the other; every byte is verified. ``nbytes``: of all, for ``progress``."""

    def __init__(self, repo: Repository, manifest: Manifest, nbytes: int, progress: Shown | None) -> None:
        self._cell_bytes = manifest.body.cell_bytes
        self._download = EntryReader(repo, manifest, True, usable_threads(None), Progress(progress).of(nbytes))
        self._buffer = AlignedBuffer(1)

    def read(self, streams: Iterable[ViewTensor]) -> Iterator[memoryview]:
        """Give it, by at most `WINDOW_BYTES` together. What is given holds until the next is asked for."""
        for wants, window in self._windows(streams):
            self._download.run(wants)
            yield window

    def revise(self, streams: Iterable[ViewTensor], file: BufferedRandom, held: Checkpoint) -> None:
        """Make what a file holds from its position on, as ``held`` has it, what it is to be.

        All of it is hashed, so it may hold anything; what differs is read, and only that is written.
        """
        for wants, window in self._windows(streams):
            start = file.tell()
            if file.readinto(window) != len(window):
                raise StorageError(f"{file.name} was cut while it was read; let nothing else write to it")
            before = bytes(window)
            change(self._download, wants, held, 0, check=True)
            for at in range(0, len(window), _BLOCK):
                if window[at : at + _BLOCK] != before[at : at + _BLOCK]:
                    file.seek(start + at)
                    file.write(window[at : at + _BLOCK])
            file.seek(start + len(window))

    def _windows(self, streams: Iterable[ViewTensor]) -> Iterator[tuple[list[RegionRequest], memoryview]]:
        """Requests, and the bytes that they fill."""
        sources = (source for one in streams for source in one.sources)
        for window in plan_windows(sources, WINDOW_BYTES, self._cell_bytes):
            total = sum(one.nbytes for one in window)
            if self._buffer.nbytes < total:
                self._buffer = AlignedBuffer(total)
            yield requests(window, self._buffer.view, {}), self._buffer.view[:total]
