"""Finds cells of live manifests that a save may reuse, by key and region or by digest. Performs no I/O."""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from casckpt.base.names import run_hash
from casckpt.errors import Damaged, Refused
from casckpt.format.blob import SPAN, most_data
from casckpt.format.extents import DIGEST_BYTES, ExtentTable, StoredCell
from casckpt.format.keys import parse_txid
from casckpt.format.manifest import Manifest
from casckpt.format.names import CellDigest, TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.index import TENSOR, Entry
from casckpt.format.sections.tables import Extents, WholeCells

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CellSource:
    """A source of stored cells: a manifest, or this rank's last save.

    ``refs``: its blobs. Blob numbers in ``extents`` are indices into this list.
    """

    extents: Extents
    refs: Sequence[BlobRef]

    @classmethod
    def of(cls, manifest: Manifest, entries: Iterable[Entry] | None = None) -> CellSource:
        """Return the cells of these entries of a manifest. None means all entries. Skip invalid ones with a warning."""
        every = manifest.entries if entries is None else entries
        by_name = {entry.name: entry for entry in every if not manifest.lacks(entry)}
        entries = list(by_name.values())
        cells = manifest.whole_cells(np.array([entry.number for entry in entries], np.int64))
        others = dict[int, ExtentTable]()
        for row in np.flatnonzero(~cells.is_whole).tolist():
            entry = entries[row]
            try:
                others[row] = manifest.extents(entry)
            except (Damaged, Refused) as error:
                log.warning("this save cannot reuse the cells of %r in run %s: %s", entry.key, manifest.body.run, error)
        streams = {name: (entry.dtype, entry.shape) for name, entry in by_name.items()}
        return cls(Extents(streams, manifest.body.cell_bytes, cells, others), list(manifest.blobs))


class ReusableCells:
    """The cells of the parent and of the bases that are in reusable blobs.

    ``parent``: the parent's extents. Blobs are numbered across all sources. The parent's blobs come first and keep
    their numbers. ``excluded``: a function that returns whether a blob must not be reused because it is damaged, worn
    or missing. ``any``: whether any blob may be reused. ``newest``: the last save that wrote any of the parent's blobs.
    """

    def __init__(
        self, parent: CellSource | None, bases: Sequence[CellSource], excluded: Callable[[BlobRef], bool]
    ) -> None:
        first = parent or CellSource(Extents.of({}), [])
        self.parent = first.extents
        self._sources = [first, *bases]
        self.blobs: list[BlobRef] = [ref for source in self._sources for ref in source.refs]
        self._usable = [not excluded(ref) for ref in self.blobs]
        self.any = any(self._usable)
        self.newest: TxId | None = max((ref.uploader for ref in first.refs), default=None)
        self._index: _DigestIndex | None = None
        self._lock = Lock()

    def usable(self, blob: int) -> bool:
        """Return whether the cells in this blob may be reused. A save's own blobs have higher numbers."""
        return blob >= len(self._usable) or self._usable[blob]

    def exclude(self, lost: Iterable[BlobRef]) -> None:
        """Stop reusing blobs whose bytes are missing."""
        names = {(ref.uploader, ref.hash) for ref in lost}
        for number, ref in enumerate(self.blobs):
            self._usable[number] &= (ref.uploader, ref.hash) not in names
        self.any = any(self._usable)

    def usable_cells(self, cells: WholeCells) -> npt.NDArray[np.bool_]:
        """Return which of the parent's cells may be reused."""
        usable = np.array([*self._usable, False], np.bool_)
        return usable[np.where(cells.is_whole, cells.blob, -1)]

    def usable_cell(self, cell: StoredCell) -> bool:
        """Return whether a cell and all its bases may be reused."""
        return self._usable[cell.blob] and (cell.frame is None or all(self._usable[c.blob] for c in cell.chain))

    def find(self, digest: CellDigest) -> StoredCell | None:
        """Find a reusable cell with this digest. The cell may belong to a different tensor or region."""
        with self._lock:
            if self._index is None:
                self._index = _DigestIndex(self._sources)
        return self._index.find(digest, self.usable_cell)


class _DigestIndex:
    """All cells of several sources, sorted by the first eight bytes of their digests."""

    def __init__(self, sources: Sequence[CellSource]) -> None:
        # (number of the source's first blob, digests, function that returns the cell with the n-th digest)
        self._parts: list[tuple[int, bytes, Callable[[int], StoredCell]]] = []
        base = 0
        for source in sources:
            rows = np.flatnonzero(source.extents.cells.is_whole).tolist()
            digests = source.extents.cells.digest[rows].tobytes()
            self._parts.append((base, digests, partial(_cell_of, source.extents, rows)))
            for table in source.extents.others.values():
                self._parts += [(base, extent.digests, partial(table.cell_at, extent)) for extent in table.extents]
            base += len(source.refs)
        self._digests = b"".join([digests for _, digests, _ in self._parts])
        prefixes = np.frombuffer(self._digests, dtype="<u8")[:: DIGEST_BYTES // 8]
        self._order = np.argsort(prefixes, kind="stable")
        # a search in a numpy array takes ten times as long
        self._prefixes = array("Q", prefixes[self._order].astype("=u8").tobytes())
        self._ends = list(accumulate(len(digests) for _, digests, _ in self._parts))
        # where to begin: thousands of equal cells, such as zeros, may be in a blob that stays unusable
        self._begins = dict[CellDigest, int]()

    def find(self, digest: CellDigest, usable: Callable[[StoredCell], bool]) -> StoredCell | None:
        prefix = int.from_bytes(digest[:8], "little")
        begin = self._begins.get(digest) or bisect_left(self._prefixes, prefix)
        for row in range(begin, bisect_right(self._prefixes, prefix)):
            at = int(self._order[row]) * DIGEST_BYTES
            number = bisect_right(self._ends, at)
            base, digests, cell_at = self._parts[number]
            if self._digests.startswith(digest, at):
                first = self._ends[number] - len(digests)
                cell = _shifted(cell_at((at - first) // DIGEST_BYTES), base)
                if usable(cell):
                    return cell
                self._begins[digest] = row + 1
        return None


def _cell_of(extents: Extents, rows: Sequence[int], number: int) -> StoredCell:
    row = rows[number]
    return extents.cells.cell(row, extents.streams[extents.names[row]][1])


def _shifted(cell: StoredCell, blobs: int) -> StoredCell:
    """Return the cell with ``blobs`` added to its blob numbers."""
    return cell.moved(lambda stored: (stored.blob + blobs, stored.offset)) if blobs else cell


def used_bytes(extents: Extents, blob_count: int) -> list[int]:
    """Count the bytes of each blob that a manifest's extents use. Shared cells are counted once."""
    places = [
        (link.blob, link.offset, table.stored_bytes(link))
        for table in extents.others.values()
        for extent in table.extents
        for link in ((extent,) if extent.coding is None else extent.chain)
    ]
    cells = np.column_stack((extents.cells.blob, extents.cells.offset, extents.cells.nbytes))[extents.cells.is_whole]
    blob, offset, nbytes = np.concatenate((np.array(places, np.int64).reshape(-1, 3), cells)).T
    order = np.lexsort((offset, blob))
    start = (blob * SPAN + offset)[order]
    end = start + nbytes[order]
    reached = np.maximum.accumulate(np.append(0, end))[:-1]
    more = np.maximum(end - np.maximum(start, reached), 0)
    used: list[int] = np.bincount(blob[order], more, blob_count).astype(np.int64).tolist()
    return used


class CodedBytes(NamedTuple):
    """The total bytes of coded cells, of their frames, and of those frames that have a base."""

    bytes_coded: int
    bytes_frames: int
    bytes_deltas: int


def coded_bytes(tables: Iterable[ExtentTable]) -> CodedBytes:
    """Count the bytes of the coded cells in these tables, except cells that only serve as bases."""
    coded = [(table, part, part.coding) for table in tables for part in table.extents if part.coding is not None]
    plain = sum((part.hi - part.lo) * table.itemsize for table, part, _ in coded)
    frames = sum(table.stored_bytes(part) for table, part, _ in coded)
    deltas = sum(table.stored_bytes(part) for table, part, coding in coded if coding.base is not None)
    return CodedBytes(plain, frames, deltas)


def bytes_in(extents: Extents, blobs: Collection[int]) -> int:
    """Count the in-memory bytes of the tensors' cells in ``blobs``. Each location is counted once."""
    places = {
        (extent.blob, extent.offset): (extent.hi - extent.lo) * table.itemsize
        for number, table in extents.others.items()
        if extents.names[number][0] == TENSOR
        for extent in table.extents
        if extent.blob in blobs
    }
    cells = extents.cells.take(extents.cells.is_whole & np.isin(extents.cells.blob, list(blobs)))
    places |= zip(zip(cells.blob.tolist(), cells.offset.tolist(), strict=True), cells.nbytes.tolist(), strict=True)
    return sum(places.values())


def frames_in(tables: Iterable[ExtentTable]) -> set[int]:
    """Return the numbers of the blobs that contain frames."""
    coded = (extent for table in tables for extent in table.extents if extent.coding)
    return {link.blob for extent in coded for link in extent.chain if link.coding}


def mark_worn(extents: Extents, refs: Sequence[BlobRef], run: str, lives: Callable[[TxId], bool]) -> list[BlobRef]:
    """Return ``refs``, the blobs of ``extents``, and mark the worn ones.

    The run's next save stores the cells of worn blobs again.

    A blob is worn if less than half of it is used and it belongs to the run itself or to a checkpoint that no longer
    ``lives``. A blob with frames is never worn, because its cells would have to be stored in full.
    """
    used, framed = used_bytes(extents, len(refs)), frames_in(extents.others.values())
    own_hash, is_own = run_hash(run), dict[TxId, bool]()
    marked = []
    for number, (ref, nbytes) in enumerate(zip(refs, used, strict=True)):
        half_empty = 2 * nbytes < most_data(ref.size) and number not in framed
        if half_empty and ref.uploader not in is_own:
            is_own[ref.uploader] = parse_txid(ref.uploader).run_hash == own_hash or not lives(ref.uploader)
        marked.append(BlobRef(ref.hash, ref.size, ref.uploader, half_empty and is_own[ref.uploader]))
    return marked
