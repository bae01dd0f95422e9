"""What a save knows already: the cells of a few live manifests, found by key and region or by digest. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt

from casckpt.errors import Refused
from casckpt.format.extents import DIGEST_BYTES, ExtentTable, Ints
from casckpt.format.manifest import BlobRef, Entry, Manifest, Name
from casckpt.format.names import CellDigest
from casckpt.format.regions import Shape

log = logging.getLogger(__name__)


class CellSource(Protocol):
    """Something that says where cells lie: a manifest, or what a rank remembers of its last save."""

    @property
    def refs(self) -> Sequence[BlobRef]:
        """Its blobs; tables count these."""

    def table(self, name: Name, dtype: str, shape: Shape) -> ExtentTable | None:
        """The extents of one stream, if it has it with this dtype and shape."""

    def tables(self) -> Iterator[ExtentTable]:
        """The extents of all streams."""


class ManifestCells:
    """The cells of a manifest. What is not usable of it is left out, with a warning: it costs a save its reuse."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._entries = {entry.name: entry for entry in manifest.body.entries}
        self._tables: dict[Name, ExtentTable | None] = {}
        self.refs: Sequence[BlobRef] = list(manifest.blobs)

    def table(self, name: Name, dtype: str, shape: Shape) -> ExtentTable | None:
        """See `CellSource`."""
        entry = self._entries.get(name)
        if entry is None or entry.dtype != dtype or entry.shape != shape:
            return None
        return self._usable(entry)

    def tables(self) -> Iterator[ExtentTable]:
        """See `CellSource`."""
        return (table for entry in self._entries.values() if (table := self._usable(entry)) is not None)

    def _usable(self, entry: Entry) -> ExtentTable | None:
        if entry.name not in self._tables:
            self._tables[entry.name] = self._decoded(entry)
        return self._tables[entry.name]

    def _decoded(self, entry: Entry) -> ExtentTable | None:
        try:
            return self._manifest.extents(entry)
        except Refused as error:
            log.warning("this save reuses nothing of key %r of %s: %s", entry.key, self._manifest.body.run, error)
            return None


class KnownCells:
    """Cells of the parent and of the bases, in blobs that may be reused.

    Blobs have one numbering over all sources; the parent's come first and keep their own numbers. ``excluded`` tells
    which blobs must not be reused: damaged ones, worn ones, those whose bytes turned out to be gone.
    """

    def __init__(
        self, parent: CellSource | None, bases: Sequence[CellSource], excluded: Callable[[BlobRef], bool]
    ) -> None:
        self._parent = parent
        self._sources = [*([] if parent is None else [parent]), *bases]
        self.blobs: list[BlobRef] = [ref for source in self._sources for ref in source.refs]
        self._usable = np.array([not excluded(ref) for ref in self.blobs], dtype=bool)
        self._index: _DigestIndex | None = None
        self._lock = Lock()

    @property
    def any(self) -> bool:
        """Is there anything that could be reused?"""
        return bool(self._usable.any())

    def usable(self, blob: int) -> bool:
        """May cells of this blob be reused?"""
        return bool(self._usable[blob])

    def exclude(self, blob: int) -> None:
        """Its bytes are not there after all."""
        self._usable[blob] = False

    def parent_table(self, name: Name, dtype: str, shape: Shape) -> ExtentTable | None:
        """The parent's extents of the same stream, if dtype and shape are the same too."""
        return None if self._parent is None else self._parent.table(name, dtype, shape)

    def find(self, digest: CellDigest) -> tuple[int, int] | None:
        """(blob, offset) of a usable cell with this digest."""
        with self._lock:
            if self._index is None:
                self._index = _DigestIndex(self._sources)
        return self._index.find(digest, self._usable)


class _DigestIndex:
    """All cells of some sources, sorted by the first eight bytes of their digests."""

    def __init__(self, sources: Sequence[CellSource]) -> None:
        digests: list[npt.NDArray[np.uint8]] = []
        blobs, offsets = [], []
        short = _ShortCells()
        base = 0
        for source in sources:
            for table in source.tables():
                if not short.take(table, base):
                    blob, offset = cell_places(table)
                    digests.append(table.digests)
                    blobs.append(blob + base)
                    offsets.append(offset)
            base += len(source.refs)
        digests.append(np.frombuffer(b"".join(short.digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES))
        blobs.append(np.array(short.blobs, dtype=np.int64))
        offsets.append(np.array(short.offsets, dtype=np.int64))
        every = np.concatenate(digests)
        prefixes = np.ascontiguousarray(every[:, :8]).view("<u8").reshape(-1)
        order = np.argsort(prefixes, kind="stable")
        self._prefixes, self._digests = prefixes[order], every[order]
        self._blobs, self._offsets = np.concatenate(blobs)[order], np.concatenate(offsets)[order]

    def find(self, digest: CellDigest, usable: npt.NDArray[np.bool_]) -> tuple[int, int] | None:
        prefix = np.uint64(int.from_bytes(digest[:8], "little"))
        row = int(np.searchsorted(self._prefixes, prefix))
        while row < len(self._prefixes) and self._prefixes[row] == prefix:
            if self._digests[row].tobytes() == digest and usable[self._blobs[row]]:
                return int(self._blobs[row]), int(self._offsets[row])
            row += 1
        return None


class _ShortCells:
    """The cells of tensors that are one cell each, as most of many tensors are: without columns."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.blobs: list[int] = []
        self.offsets: list[int] = []

    def take(self, table: ExtentTable, base: int) -> bool:
        """Take the cell of such a tensor, in blob ``base`` + its own number; False for another one."""
        short = table.whole
        if short is None or len(short.digests) != DIGEST_BYTES:
            return False
        self.digests.append(short.digests)
        self.blobs.append(base + short.blob)
        self.offsets.append(short.offset)
        return True


def cell_places(table: ExtentTable) -> tuple[Ints, Ints]:
    """(blob, offset) of every cell of a table, in the order of its digests."""
    rows = np.repeat(np.arange(len(table)), table.cells)
    number = np.arange(len(rows)) - table.first_cell[rows]
    starts = np.where(number == 0, table.lo[rows], (table.lo[rows] // table.cell + number) * table.cell)
    return table.blob[rows], table.offset[rows] + (starts - table.lo[rows]) * table.itemsize


def used_bytes(tables: Sequence[ExtentTable], blob_count: int) -> Ints:
    """Bytes of each blob that the extents of one manifest use; cells that several tensors share count once."""
    short = [(t.whole.blob, t.whole.offset, t.whole.offset + t.boxes[0].numel * t.itemsize) for t in tables if t.whole]
    seen: list[Ints] = [np.array(short, dtype=np.int64).reshape(-1, 3)]
    seen += [np.stack([t.blob, t.offset, t.offset + t.nbytes], axis=1) for t in tables if t.whole is None]
    rows = np.concatenate(seen)
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    used = np.zeros(blob_count, dtype=np.int64)
    blob, end = -1, 0
    for number, start, stop in rows.tolist():
        if number != blob:
            blob, end = number, 0
        if stop > end:
            used[number] += stop - max(start, end)
            end = stop
    return used
