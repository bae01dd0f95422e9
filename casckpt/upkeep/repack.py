"""Stored cells once more, in other blobs: read, compared, packed as a save packs them, and put; encoded, on request.

What was saved stays as it is, to the byte; only places change, and how a cell lies there. Copies with blobs of another
size are made of this, copies that encode, and rewrites that pack a checkpoint anew. What is known of a cell beforehand
is its digest, so cells that a checkpoint of the target has are not even read. Of each cell some hundred bytes are in
memory, and besides a few blobs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from casckpt.base.parallel import in_parallel
from casckpt.base.progress import Progress, silent
from casckpt.contents import blobs, manifests
from casckpt.errors import NotFound, Refused
from casckpt.format.blob import DATA_OFFSET, order
from casckpt.format.blob_writer import LEAF_BYTES, BlobWriter, buffer_bytes, padded, place_behind
from casckpt.format.digest import cell_digest
from casckpt.format.draft import Encoded, placed
from casckpt.format.dtypes import FLOATS, coded_width
from casckpt.format.encodings.frames import decode, encode_planes
from casckpt.format.encodings.scratch import scratch
from casckpt.format.extents import ExtentTable, Frame, StoredCell, build, moved
from casckpt.format.keys import blob_key, uploader_folder
from casckpt.format.manifest import Manifest
from casckpt.format.names import BlobHash, CellDigest, TxId
from casckpt.format.sections.blobs import BlobList, BlobRef, encode_blobs
from casckpt.format.sections.index import Entry
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.plan.packing import Queue, branch_of, branches_of, by_branch
from casckpt.plan.reuse import ManifestCells, ReusableCells, mark_worn
from casckpt.repository.fetching import BlobDamaged, explain
from casckpt.repository.repository import Repository
from casckpt.storage.base import ShortObject
from casckpt.storage.buffers import BufferPool
from casckpt.upkeep.repair.cell_sources import readable

log = logging.getLogger(__name__)

_MEMORY = 1 << 30  # bytes of buffers
_READ_BYTES = 4 << 20
_MAX_BASES = 8


class CellPlace(NamedTuple):
    """Where a cell lies: in which blob, from which byte of its file on, and as which frame, if it is coded."""

    ref: BlobRef
    offset: int
    frame: Frame | None = None


@dataclass(frozen=True, slots=True)
class _Cell:
    """A cell that is to move: ``blob`` (its number) and ``offset`` in the source."""

    digest: CellDigest
    nbytes: int
    dtype: str
    branch: str
    blob: int
    offset: int


_Part = tuple[_Cell, memoryview]
"""A cell, and where its bytes are to be put."""


@dataclass(frozen=True)
class Recoding:
    """Gives cells of a checkpoint of ``source`` places in ``target``, under the transaction ``uploader``.

    ``listed``: what the target has, listed after that transaction began. ``moving``: numbers of the blobs whose cells
    move; all, unless the source is the target. ``blob_bytes``: of data in a new blob; None for what the target has.
    ``jobs``: blobs at once, each with a buffer. ``progress``: gets the bytes of the blobs that move. ``read``: fills
    buffers with bytes of a blob that follow each other, from an offset on, in place of the source. ``compress``: encode
    floats where that is less.
    """

    source: Repository
    target: Repository
    manifest: Manifest
    uploader: TxId
    listed: CommitList
    moving: Collection[int]
    blob_bytes: int | None = None
    jobs: int = 4
    progress: Progress = silent
    read: Callable[[BlobRef, int, Sequence[memoryview]], None] | None = None
    compress: bool = False

    def run(self) -> Encoded:
        """Store what is to move, durably, and return the manifest that says where, which is yet to be put.

        Raises `BlobDamaged` where the source does not hold what was written, `Refused` for what is not understood,
        `Revoked`, `StorageError`.
        """
        cells, known, places = cells_of(self.manifest, self.moving), self._known(), dict[CellDigest, CellPlace]()
        while rest := [cell for cell in cells if cell.digest not in places]:
            had = ((cell.digest, known.find(cell.digest)) for cell in rest if known.any)
            usable = ((digest, cell) for digest, cell in had if cell and self._is_usable(cell))
            found = {digest: CellPlace(known.blobs[cell.blob], cell.offset, cell.frame) for digest, cell in usable}
            places |= found
            self._store([cell for cell in rest if cell.digest not in found], places)
            reused = (place.ref for place in places.values() if place.ref.uploader != self.uploader)
            lost = set(blobs.check_reused(self.target, self.uploader, reused))
            for number, ref in enumerate(known.blobs):
                if ref in lost:
                    known.exclude(number)
            places = {digest: place for digest, place in places.items() if place.ref not in lost}
        self.target.storage.settle(uploader_folder(self.uploader))
        stored = sum(cell.nbytes for cell in cells if places[cell.digest].ref.uploader == self.uploader)
        self.progress(max(0, sum(self.manifest.blob_sizes[number] for number in self.moving) - stored))
        return self._placed(places)

    def _is_usable(self, cell: StoredCell) -> bool:
        """Is a cell of the target to be taken as it lies there?"""
        return cell.frame is None or (self.compress and cell.frame.base is None)

    # what the target has

    def _known(self) -> ReusableCells:
        """Cells of visible checkpoints of the target that are likely to have the same; none in blobs to be left."""
        related = self._related()
        avoided = blobs.damaged_marks(self.target) if related else set[tuple[TxId, BlobHash]]()
        if self.source is self.target:
            avoided |= {(ref.uploader, ref.hash) for ref in map(self.manifest.blob, self.moving)}
        bases = [ManifestCells(one) for _, one in readable(self.target, related)]
        return ReusableCells(None, bases, lambda ref: ref.worn or (ref.uploader, ref.hash) in avoided)

    def _related(self) -> list[Commit]:
        """Return those visible in the target that share blobs with this one in the source: the most first."""
        listed = self.listed if self.source is self.target else list_commits(self.source)
        own, shared = _heads(self.manifest.blob_list), dict[str, int]()
        for one in manifests.learn(self.source, listed.live()):
            both = np.isin(_heads(manifests.blob_list(self.source, one)), own).sum()
            shared[one.id] = max(shared.get(one.id, 0), int(both))
        found = [one for one in reversed(self.listed.visible()) if shared.get(one.id)]
        return sorted(found, key=lambda one: shared[one.id], reverse=True)[:_MAX_BASES]

    # what is stored

    def _store(self, cells: Sequence[_Cell], places: dict[CellDigest, CellPlace]) -> None:
        """Put cells into new blobs, and their places into ``places``."""
        lots = packed(self.manifest, cells, self.blob_bytes or self.target.marker.blob_bytes)
        size = buffer_bytes(max((padded(sum(cell.nbytes for cell in lot)) for lot in lots), default=1))
        each = 2 if self.compress else 1
        buffers = BufferPool(max(1, min(self.jobs, len(lots), _MEMORY // (each * size))) * each, size)
        try:
            for found in in_parallel(buffers.count // each, partial(self._make, buffers), lots, name="recode"):
                places |= found
        finally:
            buffers.close()

    def _make(self, buffers: BufferPool, lot: Sequence[_Cell]) -> dict[CellDigest, CellPlace]:
        """Put a blob of ``lot``, or one of its frames and one of what is not worth one; return where each cell lies."""
        with buffers.borrow() as borrowed:
            parts = list(_parts(lot, borrowed.view))
            runs = _runs(parts, self.source.storage.traits.read_gap)
            deque(in_parallel(max(1, self.jobs // buffers.count), self._read, runs), maxlen=0)
            for part in parts:
                self._check(*part)
            if not self.compress:
                return self._put(parts, borrowed.view)
            with buffers.borrow() as other:
                return self._put_smaller(parts, other.view)

    def _put(self, parts: Sequence[_Part], buffer: memoryview) -> dict[CellDigest, CellPlace]:
        """Put a blob of cells whose bytes lie at their places in ``buffer``."""
        writer, offsets = BlobWriter(buffer), dict[CellDigest, int]()
        for cell, _ in parts:
            offsets[cell.digest] = writer.place(cell.nbytes)
            writer.add(cell.dtype, cell.nbytes, cell.digest)
            self.progress(cell.nbytes)
        ref = self._finish(writer, buffer)
        return {digest: CellPlace(ref, offset) for digest, offset in offsets.items()}

    def _put_smaller(self, parts: Sequence[_Part], buffer: memoryview) -> dict[CellDigest, CellPlace]:
        """Put the cells that are worth it as frames, and the others as they are."""
        tried = [(cell, data, _frame_of(cell, data)) for cell, data in parts]
        frames = [(cell, frame) for cell, _, frame in tried if frame is not None]
        rest = [(cell, data) for cell, data, frame in tried if frame is None]
        moved_to = list(_parts((cell for cell, _ in rest), buffer))
        for (_, data), (_, into) in zip(rest, moved_to, strict=True):
            into[:] = data
        places = self._put(moved_to, buffer) if rest else {}
        return places | self._put_frames(frames, buffer) if frames else places

    def _put_frames(self, frames: Sequence[tuple[_Cell, bytes]], buffer: memoryview) -> dict[CellDigest, CellPlace]:
        writer, offsets = BlobWriter(buffer), dict[CellDigest, tuple[int, int]]()
        for cell, frame in frames:
            offsets[cell.digest] = writer.end, len(frame)
            buffer[writer.end : writer.end + len(frame)] = frame
            writer.add_frame(len(frame))
            self.progress(cell.nbytes)
        ref = self._finish(writer, buffer)
        return {digest: CellPlace(ref, at, Frame(nbytes, None)) for digest, (at, nbytes) in offsets.items()}

    def _finish(self, writer: BlobWriter, buffer: memoryview) -> BlobRef:
        """Put what was written, and name it."""
        ref = BlobRef(*writer.finish(), self.uploader)
        blobs.put(self.target, self.uploader, ref.hash, buffer[: ref.size])
        return ref

    def _read(self, run: Sequence[_Part]) -> None:
        """Read cells that lie one after the other, at once, and what lies between them."""
        start = end = run[0][0].offset
        views: list[memoryview] = []
        for cell, data in run:
            views += [memoryview(bytearray(cell.offset - end)), data]
            end = cell.offset + cell.nbytes
        (self.read or self._read_source)(self.manifest.blob(run[0][0].blob), start, [one for one in views if len(one)])

    def _read_source(self, ref: BlobRef, offset: int, views: Sequence[memoryview]) -> None:
        try:
            with self.source.storage.open(blob_key(ref.uploader, ref.hash)) as reader:
                reader.read_into(offset, views)
        except (NotFound, Refused, ShortObject) as error:
            raise BlobDamaged(ref, explain(ref, error)) from error

    def _check(self, cell: _Cell, data: memoryview) -> None:
        """Compare a cell, read once more where the network has spoilt it. Raises `BlobDamaged`."""
        if cell_digest(data) != cell.digest:
            self._read([(cell, data)])
            if cell_digest(data) != cell.digest:
                why = f"its bytes {cell.offset} to {cell.offset + cell.nbytes} are not what was written"
                raise BlobDamaged(self.manifest.blob(cell.blob), why)

    # the manifest

    def _placed(self, places: Mapping[CellDigest, CellPlace]) -> Encoded:
        numbers: dict[BlobRef, int] = {}
        before, live = list(self.manifest.blobs), {commit.txid for commit in self.listed.live()}

        def place(cell: StoredCell) -> tuple[int, int]:
            moving = cell.blob in self.moving
            ref, offset, _ = places[cell.digest] if moving else CellPlace(before[cell.blob], cell.offset)
            return numbers.setdefault(replace(ref, worn=False) if ref.worn else ref, len(numbers)), offset

        def coded(table: ExtentTable) -> ExtentTable:
            cells = (cell.moved(place)._replace(frame=places[cell.digest].frame) for cell in table.stored_cells())
            return build(table.shape, table.itemsize, table.cell, list(cells))

        make = coded if self.compress else partial(moved, place=place)
        tables = {entry.number: make(self.manifest.extents(entry)) for entry in _stored_entries(self.manifest)}
        refs = mark_worn(tables.values(), list(numbers), self.manifest.body.run, live.__contains__)
        made = placed(self.manifest, encode_blobs(refs), tables)
        again = made.manifest()
        for number in tables:  # who has cut spans in another way than we do would not be understood any more
            again.extents(again.entries[number])
        return made


def poor_blobs(manifest: Manifest, blob_bytes: int, kept: Container[tuple[TxId, BlobHash]]) -> frozenset[int]:
    """Return the numbers of the blobs of which fewer, or less, would be left if their cells were packed anew.

    They have less than half of ``blob_bytes``, or are worn, and nobody else has ``kept`` them. Those of coded cells
    and of their bases stay. Raises what reading a manifest does.
    """
    chained = blobs_of_chains(manifest)
    every = ((number, ref) for number, ref in enumerate(manifest.blobs) if number not in chained)
    refs = [(number, ref) for number, ref in every if (ref.uploader, ref.hash) not in kept]
    poor = {number: ref for number, ref in refs if ref.worn or 2 * ref.size < blob_bytes}
    is_gain = any(ref.worn for ref in poor.values())
    is_gain = is_gain or len(packed(manifest, cells_of(manifest, poor), blob_bytes)) < len(poor)
    return frozenset(poor if is_gain else ())


def blobs_of_chains(manifest: Manifest) -> frozenset[int]:
    """Return the numbers of the blobs that hold coded cells or their bases: what lies in these moves as it is."""
    tables = (manifest.extents(entry) for entry in _stored_entries(manifest))
    coded = (extent for table in tables for extent in table.extents if extent.coding)
    return frozenset(one.blob for extent in coded for one in extent.chain)


def cells_of(manifest: Manifest, wanted: Container[int]) -> list[_Cell]:
    """Return the cells in the blobs ``wanted``, each once, in the order in which a save lets them lie in blobs."""
    found: dict[CellDigest, tuple[tuple[object, ...], _Cell]] = {}
    for entry in _stored_entries(manifest):
        table, branch = manifest.extents(entry), branch_of(entry.kind, entry.key)
        begins_small: dict[int, bool] = {}
        for extent in table.extents:
            cells = list(table.stored_cells([extent]))
            is_small = begins_small.setdefault(extent.box, cells[0].nbytes < LEAF_BYTES)
            rank = (order(entry.dtype), is_small, entry.key, entry.kind, entry.number)
            for cell in cells if extent.blob in wanted else ():
                one = _Cell(cell.digest, cell.nbytes, entry.dtype, branch, cell.blob, cell.offset)
                if cell.digest not in found or rank < found[cell.digest][0]:
                    found[cell.digest] = rank, one
    return [cell for _, cell in sorted(found.values(), key=lambda one: one[0])]


def packed(manifest: Manifest, cells: Sequence[_Cell], blob_bytes: int) -> list[Sequence[_Cell]]:
    """Return ``cells``, in order, in lots for a blob each, the branches of the state apart."""
    end = DATA_OFFSET + max([blob_bytes, *(cell.nbytes for cell in cells)])
    branches = branches_of(branch_of(entry.kind, entry.key) for entry in manifest.entries)
    lots: list[Sequence[_Cell]] = []
    for queue in map(Queue, by_branch(cells, lambda cell: cell.branch, branches)):
        while not queue.is_empty:
            lots.append(queue.take(DATA_OFFSET, end)[1])
    return lots


def _parts(lot: Iterable[_Cell], buffer: memoryview) -> Iterator[_Part]:
    """Yield the cells with their parts of a buffer: those that a writer gives them."""
    end = DATA_OFFSET
    for cell in lot:
        start = place_behind(end, cell.nbytes)
        end = start + cell.nbytes
        yield cell, buffer[start:end]


def _frame_of(cell: _Cell, plain: memoryview) -> bytes | None:
    """Return the planes of a cell of floats, decoded and compared; None where they are not worth it."""
    frame = encode_planes(plain, coded_width(cell.dtype)) if cell.dtype in FLOATS else None
    if frame is not None:
        found = scratch("version", cell.nbytes).data
        decode(memoryview(frame), found, None)
        if cell_digest(found) != cell.digest:
            log.error(
                "a cell that was encoded decodes to something else, and is stored as it is; please report this bug"
            )
            return None
    return frame


def _stored_entries(manifest: Manifest) -> list[Entry]:
    """Return the entries that have elements, and of which the bytes are there."""
    return [entry for entry, rows in zip(manifest.entries, manifest.raw_rows(), strict=True) if len(rows)]


def _runs(parts: Iterable[_Part], gap: int) -> Iterator[list[_Part]]:
    """Yield cells that follow each other in the source, too, together: one read for each."""
    run: list[_Part] = []
    for part in parts:
        cell, last = part[0], run[-1][0] if run else part[0]
        follows = cell.blob == last.blob and 0 <= cell.offset - last.offset - last.nbytes <= gap
        if run and not (follows and cell.offset + cell.nbytes - run[0][0].offset <= _READ_BYTES):
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _heads(known: BlobList) -> npt.NDArray[np.uint64]:
    return np.frombuffer(known.hashes, dtype="<u8")[::4]
