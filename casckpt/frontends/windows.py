"""Windows of a checkpoint's tensors: so much of their data at a time, planned, and read into one buffer.

A file that holds them as another checkpoint has them is revised: of what differs alone anything is read, and written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BufferedRandom
from typing import Final, NamedTuple

import torch

from casckpt.checkpoint.handle import Checkpoint
from casckpt.checkpoint.loading.download import Download, StreamRequest
from casckpt.checkpoint.loading.update import change
from casckpt.errors import StorageError
from casckpt.format.dtypes import itemsize
from casckpt.format.manifest import Manifest
from casckpt.format.regions import Region, full_box
from casckpt.frontends.view import ViewTensor
from casckpt.parallel import usable_threads
from casckpt.plan.progress import Progress, Shown
from casckpt.repository.repository import Repository
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.memory import BITS, Destination

WINDOW_BYTES: Final = 64 << 20
_BLOCK = 1 << 20  # of a file: it is written where one differs


class StreamPiece(NamedTuple):
    """Elements [lo, hi) of a stream."""

    stream: ViewTensor
    lo: int
    hi: int

    @property
    def nbytes(self) -> int:
        """Bytes of these elements."""
        return (self.hi - self.lo) * itemsize(self.stream.entry.dtype)

    def into(self, data: torch.Tensor) -> StreamRequest:
        """Ask for them, to be read into the bytes ``data``."""
        entry = self.stream.entry
        kind = BITS.get(itemsize(entry.dtype)) or torch_dtype(entry.dtype)
        region = Region(full_box(entry.shape), self.lo, self.hi)
        return StreamRequest(self.stream.number, Destination(region, data.view(kind), kind))


def plan_windows(streams: Iterable[ViewTensor], most: int, cell_bytes: int) -> Iterator[list[StreamPiece]]:
    """Cut the data of ``streams``, one after the other, into pieces of at most ``most`` bytes together.

    Tensors are cut between cells, so that no cell is read twice, unless ``most`` is less than a cell.
    """
    window: list[StreamPiece] = []
    room = most
    for one in streams:
        lo, size = 0, itemsize(one.entry.dtype)
        cell = max(cell_bytes // size, 1)
        while lo < one.entry.numel:
            fits = room // size if window else max(room // size, 1)
            hi = min(lo + fits, one.entry.numel)
            if hi < one.entry.numel:
                hi = max(hi // cell * cell, lo) if window or fits >= cell else hi
            if hi > lo:
                window.append(StreamPiece(one, lo, hi))
                room -= (hi - lo) * size
                lo = hi
            if lo < one.entry.numel:
                yield window
                window, room = [], most
    if window:
        yield window


class WindowReader:
    """Reads the data of tensors one after the other; every byte is verified. ``nbytes``: of all, for ``progress``."""

    def __init__(self, repo: Repository, manifest: Manifest, nbytes: int, progress: Shown | None) -> None:
        self._cell_bytes = manifest.body.cell_bytes
        self._download = Download(repo, manifest, True, usable_threads(None), Progress(progress).of(nbytes))
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

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

    def _windows(self, streams: Iterable[ViewTensor]) -> Iterator[tuple[list[StreamRequest], memoryview]]:
        """Requests, and the bytes that they fill."""
        for window in plan_windows(streams, WINDOW_BYTES, self._cell_bytes):
            total, start = sum(piece.nbytes for piece in window), 0
            if self._buffer.numel() < total:
                self._buffer = torch.empty(total, dtype=torch.uint8, device="cpu")
            wants = []
            for piece in window:
                wants.append(piece.into(self._buffer[start : start + piece.nbytes]))
                start += piece.nbytes
            yield wants, memoryview(self._buffer.numpy().data)[:total]
