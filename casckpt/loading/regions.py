"""Regions of a checkpoint's tensors, read one after the other in bounded memory, and verified."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final, NamedTuple

import torch

from casckpt.base.groups import lots
from casckpt.base.parallel import usable_threads
from casckpt.base.progress import Progress
from casckpt.format.extents import ExtentTable
from casckpt.format.manifest import Manifest
from casckpt.format.regions import Region, full_box
from casckpt.format.sections.index import Entry
from casckpt.loading.entry_reader import EntryReader, RegionRequest
from casckpt.repository.repository import Repository
from casckpt.storage.buffers import AlignedBuffer
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.memory import BITS, Destination

LOT_BYTES: Final = 64 << 20
_ALIGNED: Final = 16  # bytes: no element needs more


class Part(NamedTuple):
    """A region of an entry."""

    entry: Entry
    region: Region

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.region.numel * self.entry.itemsize


def parts_in_order(entry: Entry, cell_bytes: int) -> Iterator[Part]:
    """Cut an entry into parts that follow each other in its row-major order; between cells, where it is cut as one."""
    step = max(LOT_BYTES // 2 // cell_bytes, 1) * max(cell_bytes // entry.itemsize, 1)
    for lo in range(0, entry.numel, step):
        yield Part(entry, Region(full_box(entry.shape), lo, min(lo + step, entry.numel)))


class RegionReader:
    """Reads parts of one checkpoint, in lots of about `LOT_BYTES`. Raises Damaged, MissingKey, Gone, StorageError.

    ``nbytes``: of all that is read, for ``progress``.
    """

    def __init__(self, repo: Repository, manifest: Manifest, nbytes: int, progress: Progress) -> None:
        self._download = EntryReader(repo, manifest, True, usable_threads(None), progress.of(nbytes))
        self._buffer = AlignedBuffer(1)

    def read(self, parts: Iterable[Part]) -> Iterator[tuple[Part, memoryview]]:
        """Give each part with its bytes, in order. What is given holds until the next is asked for."""
        for lot in lots(parts, lambda part: part.nbytes, LOT_BYTES):
            ends = list(accumulate(-(-part.nbytes // _ALIGNED) * _ALIGNED for part in lot))
            if self._buffer.nbytes < ends[-1]:
                self._buffer = AlignedBuffer(ends[-1])
            views = [self._buffer.view[at : at + part.nbytes] for at, part in zip([0, *ends], lot, strict=False)]
            self._download.run([request_for(part, view) for part, view in zip(lot, views, strict=True)])
            yield from zip(lot, views, strict=True)


def request_for(part: Part, view: memoryview, table: ExtentTable | None = None) -> RegionRequest:
    """What reads a part into ``view``, of just its bytes. ``table``: the extents of its entry, if they are at hand."""
    kind = BITS.get(part.entry.itemsize) or torch_dtype(part.entry.dtype)
    data = torch.frombuffer(view, dtype=kind)
    shaped = data.view(part.region.box.shape) if part.region.is_whole else data
    return RegionRequest(part.entry.number, Destination(part.region, shaped, kind), table)
