"""Windows of a checkpoint's tensors: so much of their data at a time, planned, and read into one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch

from casckpt.checkpoint.loading.download import Download, StreamRequest
from casckpt.format.dtypes import itemsize
from casckpt.format.extents import ExtentTable
from casckpt.format.manifest import Manifest
from casckpt.format.regions import Region, full_box
from casckpt.frontends.recut import Source, ViewTensor
from casckpt.parallel import usable_threads
from casckpt.plan.progress import Progress, Shown
from casckpt.repository.repository import Repository
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.memory import BITS, Destination

WINDOW_BYTES: Final = 64 << 20


def plan_windows(sources: Iterable[Source], most: int, cell_bytes: int) -> Iterator[list[Source]]:
    """Cut the data of ``sources``, one after the other, into pieces of at most ``most`` bytes together.

    Streams are cut between cells, so that no cell is read twice, unless ``most`` is less than a cell.
    """
    window: list[Source] = []
    room = most
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


def fill(
    download: Download, window: Sequence[Source], buffer: torch.Tensor, tables: Mapping[int, ExtentTable] | None = None
) -> int:
    """Read a window into the front of ``buffer``, of dtype uint8; how many bytes that was. Raises as a load.

    ``tables``: of entries, by number, whose extents are at hand.
    """
    wants, start = [], 0
    for one in window:
        end = start + one.nbytes
        wants.append(_request(one, buffer[start:end], (tables or {}).get(one.number)))
        start = end
    download.run(wants)
    return start


def _request(one: Source, data: torch.Tensor, table: ExtentTable | None) -> StreamRequest:
    kind = BITS.get(itemsize(one.entry.dtype)) or torch_dtype(one.entry.dtype)
    region = Region(full_box(one.entry.shape), one.lo, one.hi)
    return StreamRequest(one.number, Destination(region, data.view(kind), kind), table)


class WindowReader:
    """Reads the data of tensors one after the other; every byte is verified. ``nbytes``: of all, for ``progress``."""

    def __init__(self, repo: Repository, manifest: Manifest, nbytes: int, progress: Shown | None) -> None:
        self._cell_bytes = manifest.body.cell_bytes
        self._download = Download(repo, manifest, True, usable_threads(None), Progress(progress).of(nbytes))
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read(self, streams: Iterable[ViewTensor]) -> Iterator[memoryview]:
        """Give it, by at most `WINDOW_BYTES` together. What is given holds until the next is asked for."""
        sources = (source for one in streams for source in one.sources)
        for window in plan_windows(sources, WINDOW_BYTES, self._cell_bytes):
            total = sum(one.nbytes for one in window)
            if self._buffer.numel() < total:
                self._buffer = torch.empty(total, dtype=torch.uint8, device="cpu")
            fill(self._download, window, self._buffer)
            yield memoryview(self._buffer.numpy().data)[:total]
