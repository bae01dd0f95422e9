"""Windows of a checkpoint's tensors: so much of their data at a time, planned, and read into one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import torch

from casckpt.checkpoint.loading.download import Download, StreamRequest
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
        for window in plan_windows(streams, WINDOW_BYTES, self._cell_bytes):
            total, start = sum(piece.nbytes for piece in window), 0
            if self._buffer.numel() < total:
                self._buffer = torch.empty(total, dtype=torch.uint8, device="cpu")
            wants = []
            for piece in window:
                wants.append(piece.into(self._buffer[start : start + piece.nbytes]))
                start += piece.nbytes
            self._download.run(wants)
            yield memoryview(self._buffer.numpy().data)[:total]
