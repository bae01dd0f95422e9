"""Known cells of a save: those of a few live manifests, found by key and region or by digest. Pure."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt

from casckpt.errors import Damaged, Refused
from casckpt.format.extents import DIGEST_BYTES, Extent, ExtentTable
from casckpt.format.manifest import Manifest
from casckpt.format.names import CellDigest
from casckpt.format.regions import Shape
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.index import Name, StreamEntry

log = logging.getLogger(__name__)


class CellSource(Protocol):
    """A source of known cells: a manifest, or what a rank remembers of its last save."""

    @property
    def refs(self) -> Sequence[BlobRef]:
        """Its blobs; tables count these."""

    def table(self, name: Name, dtype: str, shape: Shape) -> ExtentTable | None:
        """Return the extents of one stream, if the source has it with this dtype and shape."""

    def tables(self) -> Iterator[ExtentTable]:
        """Iterate over the extents of all streams."""


class ManifestCells:
    """The cells of a manifest. Unusable entries are left out with a warning: a save cannot reuse them."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._entries = {entry.name: entry for entry in manifest.held}
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

    def _usable(self, entry: StreamEntry) -> ExtentTable | None:
        if entry.name not in self._tables:
            self._tables[entry.name] = self._decoded(entry)
        return self._tables[entry.name]

    def _decoded(self, entry: StreamEntry) -> ExtentTable | None:
        try:
            return self._manifest.extents(entry)
        except (Damaged, Refused) as error:
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
        """Whether there is anything that could be reused."""
        return bool(self._usable.any())

    def usable(self, blob: int) -> bool:
        """Tell whether cells of this blob may be reused."""
        return bool(self._usable[blob])

    def exclude(self, blob: int) -> None:
        """Stop reusing a blob whose bytes turned out to be gone."""
        self._usable[blob] = False

    def parent_table(self, name: Name, dtype: str, shape: Shape) -> ExtentTable | None:
        """Return the parent's extents of a stream, if dtype and shape are the same too."""
        return None if self._parent is None else self._parent.table(name, dtype, shape)

    def find(self, digest: CellDigest) -> tuple[int, int] | None:
        """Find (blob, offset) of a usable cell with this digest."""
        with self._lock:
            if self._index is None:
                self._index = _DigestIndex(self._sources)
        return self._index.find(digest, self._usable)


class _DigestIndex:
    """All cells of some sources, sorted by the first eight bytes of their digests."""

    def __init__(self, sources: Sequence[CellSource]) -> None:
        self._extents: list[tuple[int, ExtentTable, Extent]] = []  # behind the number of their source's first blob
        base = 0
        for source in sources:
            self._extents += [(base, table, extent) for table in source.tables() for extent in table.extents]
            base += len(source.refs)
        self._digests = b"".join([extent.digests for _, _, extent in self._extents])
        prefixes = np.frombuffer(self._digests, dtype="<u8")[:: DIGEST_BYTES // 8]
        self._order = np.argsort(prefixes, kind="stable")
        self._prefixes = prefixes[self._order]
        self._ends = list(accumulate(len(extent.digests) for _, _, extent in self._extents))

    def find(self, digest: CellDigest, usable: npt.NDArray[np.bool_]) -> tuple[int, int] | None:
        prefix = np.uint64(int.from_bytes(digest[:8], "little"))
        row = int(np.searchsorted(self._prefixes, prefix))
        while row < len(self._prefixes) and self._prefixes[row] == prefix:
            at = int(self._order[row]) * DIGEST_BYTES
            number = bisect_right(self._ends, at)
            base, table, extent = self._extents[number]
            if usable[base + extent.blob] and self._digests.startswith(digest, at):
                begin = self._ends[number] - len(extent.digests)
                return base + extent.blob, table.offset_of(extent, (at - begin) // DIGEST_BYTES)
            row += 1
        return None


def used_bytes(tables: Iterable[ExtentTable], blob_count: int) -> list[int]:
    """Count the bytes of each blob that the extents of one manifest use; shared cells count once."""
    used, reached = [0] * blob_count, [0] * blob_count
    for blob, start, stop in sorted(
        (one.blob, one.offset, one.offset + (one.hi - one.lo) * table.itemsize)
        for table in tables
        for one in table.extents
    ):
        used[blob] += max(0, stop - max(start, reached[blob]))
        reached[blob] = max(stop, reached[blob])
    return used
