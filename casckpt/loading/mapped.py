"""Maps the raw cells of a local store into memory, so that all processes of a host share one copy: the page cache.

The memory of a tensor is reserved, and each extent is mapped at its position there, even if the extents are in
different blobs. This is possible because cells of `LEAF_BYTES` or more begin at page boundaries. Maps are private: a
write changes only this process's copy of a page, and never the store. Therefore, an ordinary read can fill the extents
that are damaged or cannot be mapped, and raise their errors.

Tensors that are neighbors in a blob are neighbors in memory, with the same alignment. As a result, they share one map,
and the kernel can use huge pages. This halves the cost of the first access to each page.

Cells are verified through reads and not through the map, because a process dies if it touches a mapped page that the
kernel cannot read.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from mmap import PAGESIZE
from typing import Final, NamedTuple

import torch

from casckpt.base.parallel import in_parallel
from casckpt.base.units import format_size
from casckpt.contents.contents import Contents
from casckpt.errors import NotFound
from casckpt.format.blob_writer import LEAF_BYTES
from casckpt.format.extents import Extent, ExtentTable
from casckpt.format.keys import blob_key
from casckpt.format.regions import Region
from casckpt.format.sections.index import Entry
from casckpt.loading.entry_reader import EntryReader, RegionRequest
from casckpt.repository.fetching import holds_cell
from casckpt.storage.buffers import AlignedBuffer, address
from casckpt.storage.local.reader import LocalReader
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.memory import Destination, tensor_over

MAX_VERIFIED: Final = 1 << 18
"""The maximum number of verified extents that an open store remembers. When it has that many, it forgets them all."""

_HUGE_PAGE = 2 << 20  # bytes
_RESERVED = 256 << 20  # bytes of address space that neighboring tensors share

log = logging.getLogger(__name__)


class _Part(NamedTuple):
    """An extent of a table, its memory in the new tensor, and the ordinary read that fills this memory."""

    table: ExtentTable
    extent: Extent
    memory: memoryview
    request: RegionRequest


class MappedTensors:
    """The new tensors of one read. `new` reserves their memory, and `fill` maps blobs over that memory."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._parts: dict[int, list[_Part]] = defaultdict(list)
        """The extents to map, by blob number."""
        self._unmapped: list[_Part] = []
        self._reserved, self._used = memoryview(b""), 0
        self._nbytes_read = 0

    def new(self, entry: Entry) -> torch.Tensor | None:
        """Return a tensor for a whole entry, or None if it cannot be mapped. Raises as `Contents.extents` does."""
        table = self._contents.extents(entry) if entry.nbytes >= LEAF_BYTES else None
        memory = None
        if table is not None and len(table.boxes) == 1 and any(extent.coding is None for extent in table.extents):
            with suppress(OSError):  # too little memory, or too many maps
                memory = self._reserve(entry.nbytes, table.extents[0].offset)
        if table is None or memory is None:
            self._nbytes_read += entry.nbytes
            return None
        dtype, size = torch_dtype(entry.dtype), table.itemsize
        data = tensor_over(memory, dtype, entry.shape)
        for extent in table.extents:
            lo, hi = extent.lo, extent.hi
            destination = Destination(Region(table.boxes[0], lo, hi), data.view(-1)[lo:hi], dtype)
            request = RegionRequest(entry.number, destination, table, is_new=True)
            is_aligned = lo * size % PAGESIZE == extent.offset % PAGESIZE == 0
            parts = self._parts[extent.blob] if is_aligned and extent.coding is None else self._unmapped
            parts.append(_Part(table, extent, memory[lo * size : hi * size], request))
        return data

    def _reserve(self, nbytes: int, offset: int) -> memoryview:
        """Reserve memory for a tensor that begins at ``offset`` in a blob, with the alignment that it has there."""
        page = offset - offset % PAGESIZE
        start = self._used + (page - address(self._reserved) - self._used) % _HUGE_PAGE
        if start + nbytes > self._reserved.nbytes:
            self._reserved = AlignedBuffer(max(_RESERVED, nbytes + _HUGE_PAGE)).view
            start = (page - address(self._reserved)) % _HUGE_PAGE
        self._used = start + nbytes
        return self._reserved[start : self._used]

    def fill(self, reader: EntryReader) -> list[RegionRequest]:
        """Map all extents that can be mapped, and verify those that are new. Return the requests for the others."""
        reader.progress.expect(sum(map(_nbytes, self._parts.values())))
        for parts in in_parallel(reader.threads, partial(self._map, reader), list(self._parts), name="map"):
            reader.progress.expect(-_nbytes(parts))  # the ordinary read counts them
            self._unmapped += parts
        if left := self._nbytes_read + _nbytes(self._unmapped):
            log.info("%s of %s cannot be mapped, and is read into memory", format_size(left), self._contents.where)
        return [part.request for part in self._unmapped]

    def _map(self, reader: EntryReader, number: int) -> Sequence[_Part]:
        """Map one blob, and return its extents that must be read."""
        ref, parts = reader.manifest.blob(number), self._parts[number]
        key = blob_key(ref.uploader, ref.hash)
        with suppress(NotFound), reader.repo.storage.open(key, shared=True) as blob:  # the ordinary read explains it
            if isinstance(blob, LocalReader) and blob.size == ref.size:
                name = f"{key} {blob.version}"
                wrong = []
                for part in parts:
                    if reader.verify and not _is_right(reader, blob, name, part):
                        wrong.append(part)
                    else:
                        blob.map_over(part.memory, part.extent.offset)
                reader.progress(_nbytes(parts) - _nbytes(wrong))
                return wrong
        return parts


def _nbytes(parts: Sequence[_Part]) -> int:
    return sum(part.memory.nbytes for part in parts)


def _is_right(reader: EntryReader, blob: LocalReader, name: str, part: _Part) -> bool:
    """Verify the cells of an extent, unless this open store has already verified them in this version of the blob."""
    table, extent, verified = part.table, part.extent, reader.repo.verified_extents
    seen = name, extent.offset, extent.lo, extent.hi, table.cell, table.itemsize, extent.digests
    if seen in verified:
        return True
    buffer = memoryview(bytearray(min(part.memory.nbytes, table.cell * table.itemsize)))
    for cell in table.stored_cells([extent]):
        if not holds_cell(blob, cell.offset, buffer[: cell.nbytes], cell.digest):
            return False
    if len(verified) >= MAX_VERIFIED:
        verified.clear()
    verified.add(seen)
    return True
