"""Repacking: reads and verifies stored cells, encodes them, packs them as a save does, and writes them into new blobs.

Repacking changes the location and the encoding of each cell, but not the saved bytes. Copies that encode use this
module. The manifest contains the digest of each cell, so repacking does not read cells that the target already has. It
needs a few hundred bytes of memory per cell, plus memory for a few blobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from casckpt.base.groups import runs
from casckpt.base.parallel import in_parallel
from casckpt.base.progress import Progress, silent
from casckpt.contents import blobs, manifests
from casckpt.errors import NotFound, Refused
from casckpt.format.blob import DATA_OFFSET, order
from casckpt.format.blob_writer import LEAF_BYTES, BlobWriter, buffer_bytes, padded, place_behind
from casckpt.format.digest import cell_digest
from casckpt.format.dtypes import FLOATS, coded_width
from casckpt.format.encodings.frames import decodes, encode_planes
from casckpt.format.extents import ExtentTable, Frame, StoredCell, build
from casckpt.format.keys import blob_key, uploader_folder
from casckpt.format.manifest import Encoded, Manifest, placed
from casckpt.format.names import BlobHash, CellDigest, TxId
from casckpt.format.sections.blobs import BlobList, BlobRef, encode_blobs
from casckpt.format.sections.index import Entry
from casckpt.format.sections.tables import Extents
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.plan.cells import Queue, branch_numbers, branch_of, by_branch
from casckpt.plan.reuse import CellSource, ReusableCells, mark_worn
from casckpt.repository.fetching import BlobDamaged, explain
from casckpt.repository.repository import Repository
from casckpt.storage.base import ShortObject
from casckpt.storage.buffers import BufferPool

_MEMORY = 1 << 30  # total buffer bytes
_READ_BYTES = 4 << 20
_MAX_BASES = 8


class CellPlace(NamedTuple):
    """The location of a cell: its blob, its offset in the blob's file, and its frame if it is encoded."""

    ref: BlobRef
    offset: int
    frame: Frame | None = None


@dataclass(frozen=True, slots=True)
class _Cell:
    """A cell to move. ``blob``: the number of its blob in the source. ``offset``: the cell's offset in that blob."""

    digest: CellDigest
    nbytes: int
    dtype: str
    branch: int
    blob: int
    offset: int


_Part = tuple[_Cell, memoryview]
"""A cell, and the memory for its bytes."""


@dataclass(frozen=True)
class Recoding:
    """Repacks the cells of a checkpoint from ``source`` into ``target``, under the transaction ``uploader``.

    Encodes floats where that saves bytes. ``listed``: the commits of the target, listed after that transaction began.
    ``jobs``: number of concurrent blobs, each with two buffers. ``progress``: called with the number of bytes of each
    repacked blob.
    """

    source: Repository
    target: Repository
    manifest: Manifest
    uploader: TxId
    listed: CommitList
    jobs: int = 4
    progress: Progress = silent

    def run(self) -> Encoded:
        """Store the cells durably, and return the manifest with their new locations. The caller must put the manifest.

        Raises `BlobDamaged` if bytes of the source are wrong, `Refused` for an unknown format, `Revoked`, and
        `StorageError`.
        """
        cells, known, places = cells_of(self.manifest), self._known(), dict[CellDigest, CellPlace]()

        def place() -> None:
            rest = [cell for cell in cells if cell.digest not in places]
            found = ((cell.digest, known.find(cell.digest)) for cell in rest)
            usable = ((digest, cell) for digest, cell in found if cell and _is_usable(cell))
            places.update((digest, CellPlace(known.blobs[at.blob], at.offset, at.frame)) for digest, at in usable)
            self._store([cell for cell in rest if cell.digest not in places], places)

        def exclude(lost: Collection[BlobRef]) -> None:
            known.exclude(lost)
            gone = set(lost)
            for digest in [digest for digest, at in places.items() if at.ref in gone]:
                del places[digest]

        blobs.store(self.target, self.uploader, place, lambda _: (at.ref for at in places.values()), exclude)
        self.target.storage.settle(uploader_folder(self.uploader))
        stored = sum(cell.nbytes for cell in cells if places[cell.digest].ref.uploader == self.uploader)
        self.progress(max(0, sum(self.manifest.blob_sizes) - stored))
        return self._placed(places)

    # cells of the target

    def _known(self) -> ReusableCells:
        """Return the cells of related checkpoints in the target, except cells in damaged or worn blobs."""
        related = self._related()
        avoided = blobs.damaged_marks(self.target) if related else set[tuple[TxId, BlobHash]]()
        bases = [CellSource.of(manifest) for _, manifest in manifests.readable(self.target, related)]
        return ReusableCells(None, bases, lambda ref: ref.worn or (ref.uploader, ref.hash) in avoided)

    def _related(self) -> list[Commit]:
        """Return the target's visible checkpoints that share blobs with this one in the source, most blobs first."""
        own, shared = _heads(self.manifest.blob_list), dict[str, int]()
        for commit in manifests.learn(self.source, list_commits(self.source).placed()):
            both = np.isin(_heads(manifests.blob_list(self.source, commit)), own).sum()
            shared[commit.id] = max(shared.get(commit.id, 0), int(both))
        related = [commit for commit in reversed(self.listed.visible()) if shared.get(commit.id)]
        return sorted(related, key=lambda commit: shared[commit.id], reverse=True)[:_MAX_BASES]

    # new blobs

    def _store(self, cells: Sequence[_Cell], places: dict[CellDigest, CellPlace]) -> None:
        """Put cells into new blobs, and add their locations to ``places``."""
        lots = packed(cells, self.target.marker.blob_bytes)
        size = buffer_bytes(max((padded(sum(cell.nbytes for cell in lot)) for lot in lots), default=1))
        buffers = BufferPool(max(1, min(self.jobs, len(lots), _MEMORY // (2 * size))) * 2, size)
        try:
            for made in in_parallel(buffers.count // 2, partial(self._make, buffers), lots, name="recode"):
                places |= made
        finally:
            buffers.close()

    def _make(self, buffers: BufferPool, lot: Sequence[_Cell]) -> dict[CellDigest, CellPlace]:
        """Put the cells of ``lot`` into one blob, or into one blob for frames and one for plain cells.

        Return their locations.
        """
        with buffers.borrow() as borrowed:
            parts = list(_parts(lot, borrowed.view))
            reads = runs(parts, partial(_continues, gap=self.source.storage.traits.read_gap))
            deque(in_parallel(max(1, self.jobs // buffers.count), self._read, reads), maxlen=0)
            for part in parts:
                self._check(*part)
            with buffers.borrow() as other:
                return self._put_smaller(parts, other.view)

    def _put(self, cells: Iterable[tuple[_Cell, bytes | None]], buffer: memoryview) -> dict[CellDigest, CellPlace]:
        """Upload a blob of cells, each with its frame, or with None if its bytes are already in ``buffer``."""
        writer, places = BlobWriter(buffer), dict[CellDigest, tuple[int, Frame | None]]()
        for cell, frame in cells:
            if frame is None:
                places[cell.digest] = writer.place(cell.nbytes), None
                writer.add(cell.dtype, cell.nbytes, cell.digest)
            else:
                places[cell.digest] = writer.end, Frame(len(frame), None)
                buffer[writer.end : writer.end + len(frame)] = frame
                writer.add_frame(len(frame))
            self.progress(cell.nbytes)
        ref = BlobRef(*writer.finish(), self.uploader)
        blobs.put(self.target, self.uploader, ref.hash, buffer[: ref.size])
        return {digest: CellPlace(ref, offset, frame) for digest, (offset, frame) in places.items()}

    def _put_smaller(self, parts: Sequence[_Part], buffer: memoryview) -> dict[CellDigest, CellPlace]:
        """Store cells as frames if that saves bytes, and all other cells without encoding."""
        tried = [(cell, data, _frame_of(cell, data)) for cell, data in parts]
        frames = [(cell, frame) for cell, _, frame in tried if frame is not None]
        rest = [(cell, data) for cell, data, frame in tried if frame is None]
        moved_to = list(_parts((cell for cell, _ in rest), buffer))
        for (_, data), (_, into) in zip(rest, moved_to, strict=True):
            into[:] = data
        places = self._put([(cell, None) for cell, _ in rest], buffer) if rest else {}
        return places | self._put(frames, buffer) if frames else places

    def _read(self, run: Sequence[_Part]) -> None:
        """Read consecutive cells, and the bytes between them, in one request."""
        start = end = run[0][0].offset
        views: list[memoryview] = []
        for cell, data in run:
            views += [memoryview(bytearray(cell.offset - end)), data]
            end = cell.offset + cell.nbytes
        ref = self.manifest.blob(run[0][0].blob)
        try:
            with self.source.storage.open(blob_key(ref.uploader, ref.hash)) as reader:
                reader.read_into(start, [view for view in views if len(view)])
        except (NotFound, Refused, ShortObject) as error:
            raise BlobDamaged(ref, explain(ref, error)) from error

    def _check(self, cell: _Cell, data: memoryview) -> None:
        """Verify a cell. If its digest is wrong, reread it once. Raise `BlobDamaged` if the digest is still wrong."""
        if cell_digest(data) != cell.digest:
            self._read([(cell, data)])
            if cell_digest(data) != cell.digest:
                why = f"its bytes {cell.offset} to {cell.offset + cell.nbytes} are not what was written"
                raise BlobDamaged(self.manifest.blob(cell.blob), why)

    # the manifest

    def _placed(self, places: Mapping[CellDigest, CellPlace]) -> Encoded:
        numbers: dict[BlobRef, int] = {}
        live = {commit.places.txid for commit in self.listed.placed()}

        def place(cell: StoredCell) -> tuple[int, int]:
            ref, offset, _ = places[cell.digest]
            return numbers.setdefault(ref, len(numbers)), offset

        def coded(entry: Entry) -> ExtentTable:
            table = self.manifest.extents(entry)
            cells = (cell.moved(place)._replace(frame=places[cell.digest].frame) for cell in table.stored_cells())
            return build(table.shape, table.itemsize, table.cell, list(cells))

        entries = _stored_entries(self.manifest)
        tables = {entry.number: coded(entry) for entry in entries}
        extents = Extents.of({entry.name: (entry.dtype, tables[entry.number]) for entry in entries})
        refs = mark_worn(extents, list(numbers), self.manifest.body.run, live.__contains__)
        made = placed(self.manifest, encode_blobs(refs), tables)
        again = made.manifest()
        for number in tables:  # a foreign writer may split extents in a way that the new tables cannot express
            again.extents(again.entries[number])
        return made


def is_coded(manifest: Manifest) -> bool:
    """Return whether a checkpoint has encoded cells. Copies never repack such a checkpoint."""
    tables = (manifest.extents(entry) for entry in _stored_entries(manifest))
    return any(extent.coding for table in tables for extent in table.extents)


def cells_of(manifest: Manifest) -> list[_Cell]:
    """Return each cell of a checkpoint once, in the order in which a save packs cells."""
    ranked: dict[CellDigest, tuple[tuple[object, ...], _Cell]] = {}
    branches = branch_numbers(branch_of(entry.kind, entry.key) for entry in manifest.entries)
    for entry in _stored_entries(manifest):
        table, branch = manifest.extents(entry), branches[entry.number]
        begins_small: dict[int, bool] = {}
        for extent in table.extents:
            cells = list(table.stored_cells([extent]))
            is_small = begins_small.setdefault(extent.box, cells[0].nbytes < LEAF_BYTES)
            rank = (order(entry.dtype), is_small, entry.key, entry.kind, entry.number)
            for cell in cells:
                if cell.digest not in ranked or rank < ranked[cell.digest][0]:
                    moved_cell = _Cell(cell.digest, cell.nbytes, entry.dtype, branch, cell.blob, cell.offset)
                    ranked[cell.digest] = rank, moved_cell
    return [cell for _, cell in sorted(ranked.values(), key=lambda ranked_cell: ranked_cell[0])]


def packed(cells: Sequence[_Cell], blob_bytes: int) -> list[Sequence[_Cell]]:
    """Split ``cells``, in order, into one lot per blob. A blob never has cells from two branches of the state."""
    end = DATA_OFFSET + max([blob_bytes, *(cell.nbytes for cell in cells)])
    lots: list[Sequence[_Cell]] = []
    for queue in map(Queue, by_branch(cells, lambda cell: cell.branch)):
        while not queue.is_empty:
            lots.append(queue.take(DATA_OFFSET, end)[1])
    return lots


def _parts(lot: Iterable[_Cell], buffer: memoryview) -> Iterator[_Part]:
    """Yield each cell with its part of ``buffer``, in the layout of a `BlobWriter`."""
    end = DATA_OFFSET
    for cell in lot:
        start = place_behind(end, cell.nbytes)
        end = start + cell.nbytes
        yield cell, buffer[start:end]


def _is_usable(cell: StoredCell) -> bool:
    """Return whether a copy can reuse a cell that is in the target."""
    return cell.frame is None or cell.frame.base is None


def _frame_of(cell: _Cell, plain: memoryview) -> bytes | None:
    """Return the verified frame of a cell of floats, or None if encoding does not save bytes."""
    frame = encode_planes(plain, coded_width(cell.dtype)) if cell.dtype in FLOATS else None
    return frame if frame is not None and decodes(frame, plain) else None


def _stored_entries(manifest: Manifest) -> list[Entry]:
    """Return the entries that are neither empty nor dropped."""
    return [entry for entry, rows in zip(manifest.entries, manifest.raw_rows(), strict=True) if len(rows)]


def _continues(run: Sequence[_Part], part: _Part, gap: int) -> bool:
    """Return whether a single read can get the cells of ``run`` and the cell of ``part``, which follows them."""
    (first, _), (last, _), (cell, _) = run[0], run[-1], part
    follows = cell.blob == last.blob and 0 <= cell.offset - last.offset - last.nbytes <= gap
    return follows and cell.offset + cell.nbytes - first.offset <= _READ_BYTES


def _heads(known: BlobList) -> npt.NDArray[np.uint64]:
    return np.frombuffer(known.hashes, dtype="<u8")[::4]
