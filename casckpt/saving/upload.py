"""The uploads of a save: compares cells in parallel, packs new cells into blobs, and puts the blobs.

There are two phases. Each uses all cores:

- **compare** hashes one cell of every tensor in place. If this cell is known, it also hashes the tensor's other cells.
  For a frozen tensor, it hashes a sample. It skips small tensors, and cells that the last save stored as deltas. The
  second phase packs the skipped cells, and stores only those with unknown digests.
- **pack**: workers take unknown cells from a queue, copy each into an aligned buffer, and hash it there, so that the
  hashed bytes are the stored bytes. Small tensors come in lots of 4 MiB. If the first of a lot is unchanged, all are
  hashed in place, and only those that changed are copied. Then the workers put the full buffer as a blob. If a cell
  was encoded, the next cell overwrites it in the buffer, because frames go into separate blobs. Each branch of the
  state has its own queue, and therefore its own blobs. Cells that move out of worn blobs also have their own queue.
  At any time, one worker per core fills buffers, while the other workers wait for the disk.

The workers' buffers limit memory use, whatever the size of the state. The next save reuses them.

Hence a cell is hashed once if it is unchanged (`_compare_all`, `_same_small`) or was not compared (`_write`), and twice
if it was compared in place and had changed. Of a frozen tensor, at most 16 cells are hashed (`_trust`). Stored cells
below 64 KiB are hashed again as parts of a leaf (`casckpt.format.blob_writer`). Values that several ranks hold are also
hashed beforehand: samples, or all with ``check_replicas="raise"``. Each rank later hashes a few cells that other ranks
write (`casckpt.saving.replicas`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from random import Random
from threading import BoundedSemaphore, Event, Lock

import numpy as np
import numpy.typing as npt

from casckpt.base.groups import in_batches
from casckpt.base.parallel import run_all, usable_cores, useful_threads
from casckpt.base.progress import Progress, silent
from casckpt.contents import blobs
from casckpt.format.blob_writer import BlobWriter, buffer_bytes, padded
from casckpt.format.digest import cell_digest, cell_digests
from casckpt.format.extents import DIGEST_BYTES, Frame, StoredCell
from casckpt.format.names import CellDigest, TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.columns import Ints
from casckpt.plan.cells import Queue, branch_numbers, branch_of, by_branch
from casckpt.plan.reuse import ReusableCells
from casckpt.repository.repository import Repository
from casckpt.saving.encoder import Coder
from casckpt.saving.health_scan import HealthScan
from casckpt.saving.local_entries import Cell, LocalEntry, SmallCells
from casckpt.storage.buffers import BufferPool, KeptBuffers, address
from casckpt.tensors import gpu
from casckpt.tensors.memory import ADDRESSES, Memory, copy_addresses, copy_bytes

_ROOM = 8 << 20


class Copier:
    """Copies cells for one worker.

    ``room``: the pinned memory through which cells on a GPU are copied. If it is None, they are copied directly.
    """

    def __init__(self, room: memoryview | None) -> None:
        self._room = room
        self._memory: Memory | None = None  # its elements [lo, hi) are in the room
        self._lo = self._hi = 0

    def copy(self, cells: Sequence[Cell | SmallCells], cell: Cell, number: int, target: memoryview) -> None:
        """Copy a cell into ``target``. This may also copy the ``cells`` that follow its ``number`` from the GPU."""
        room = self._room
        if room is None or not cell.memory.on_gpu or cell.nbytes > room.nbytes:
            cell.memory.copy_out(cell.start, cell.stop, target)
            return
        if self._memory is not cell.memory or cell.start < self._lo or self._hi < cell.stop:
            stop, nbytes = cell.stop, cell.nbytes
            for other in cells[number + 1 :]:
                if isinstance(other, SmallCells):
                    break
                if other.memory is not cell.memory or other.start != stop or nbytes + other.nbytes > room.nbytes:
                    break
                stop, nbytes = other.stop, nbytes + other.nbytes
            self._memory, self._lo, self._hi = None, cell.start, stop
            cell.memory.copy_out(cell.start, stop, room[:nbytes])
            self._memory = cell.memory
        at = (cell.start - self._lo) * cell.memory.itemsize
        copy_bytes(target, room[at : at + cell.nbytes])


def rooms(cells: Iterable[Cell | SmallCells], workers: int) -> AbstractContextManager[BufferPool | None]:
    """Allocate pinned memory for the workers of a save, if any of ``cells`` is on a GPU."""
    any_on_gpu = any(isinstance(cell, Cell) and cell.memory.on_gpu for cell in cells)
    return gpu.PINNED.pool(workers, _ROOM) if any_on_gpu else nullcontext()


@contextmanager
def copier(rooms: BufferPool | None) -> Iterator[Copier]:
    """Yield the copier of one worker."""
    with nullcontext() if rooms is None else rooms.borrow() as room:
        yield Copier(None if room is None else room.view)


log = logging.getLogger(__name__)
_TASK_BYTES = 8 << 20
_TASK_CELLS = 4096
_SMALL_LOT = 4 << 20  # bytes; small cells are compared, copied and hashed together
_SMALL = 64 << 10  # bytes; below this size, copying a cell costs less than hashing a changed cell twice
_SAMPLE = 16  # the maximum number of cells of a frozen tensor that are hashed; the minimum is 1
_BUFFERS = KeptBuffers()  # shared by all stores of this process
_WORTH_FILLING = 4  # a buffer accepts more cells while more than 1/4 of it is free


@dataclass(slots=True)
class PlacedCell:
    """The location of one cell. ``blob``: its number in `Upload.refs`.

    ``frame``: the encoding of the cell. Its base is a known cell. ``unhashed``: the cell was not hashed, because its
    tensor was declared frozen.
    """

    digest: CellDigest
    blob: int
    offset: int
    frame: Frame | None = None
    unhashed: bool = False

    @property
    def needs(self) -> list[int]:
        """The numbers of the blobs that hold the cell and its bases."""
        base = None if self.frame is None else self.frame.base
        return [self.blob] if base is None else [self.blob, *(link.blob for link in base.chain)]

    @classmethod
    def known(cls, cell: StoredCell, *, unhashed: bool = False) -> PlacedCell:
        """Return the location of a known cell."""
        return cls(cell.digest, cell.blob, cell.offset, cell.frame, unhashed)


@dataclass
class Upload:
    """The uploads of one rank in one transaction.

    ``refs``: the known blobs, followed by this upload's own blobs. None stands for a blob that is not complete.
    """

    repo: Repository
    uploader: TxId
    sources: Sequence[LocalEntry]
    known: ReusableCells
    threads: int
    coder: Coder | None = None
    scan: HealthScan | None = None
    progress: Progress = silent
    refs: list[BlobRef | None] = field(init=False)
    _claims: dict[CellDigest, PlacedCell] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.refs = list(self.known.blobs)

    def place(self, work: Sequence[Sequence[Cell | SmallCells]]) -> list[list[PlacedCell | SmallCells]]:
        """Find or store every cell. The blobs are durable when this returns.

        Their names are durable after a `settle` of the folder. `SmallCells` hold their own locations.
        """
        self.progress.expect(sum(cell.nbytes for cells in work for cell in cells))
        placed: dict[int, PlacedCell] = {}
        large = [[cell for cell in cells if isinstance(cell, Cell)] for cells in work]
        if self.known.any:
            self._compare([cells for cells in large if cells], placed)
        unknown = [cell for cells in work for cell in cells if id(cell) not in placed]
        if unknown:
            self._pack(unknown, placed)
        return [[cell if isinstance(cell, SmallCells) else placed[id(cell)] for cell in cells] for cells in work]

    # compare

    def _compare(self, work: Sequence[Sequence[Cell]], placed: dict[int, PlacedCell]) -> None:
        if any(source.frozen for source in self.sources):
            self._trust(work, placed)
            work = [cells for cells in work if id(cells[0]) not in placed]
        probed = [cells for cells in work if self._is_probed(cells)]
        compare = partial(self._compare_all, placed)
        self._in_lots([cells[0] for cells in probed], compare)
        self._in_lots([cell for cells in probed if id(cells[0]) in placed for cell in cells[1:]], compare)

    def _is_probed(self, cells: Sequence[Cell]) -> bool:
        """Return whether the first of these cells should be hashed in place."""
        first = cells[0]
        if (len(cells) == 1 and first.nbytes <= _SMALL) or first.memory.view(0, 0) is None:
            return False
        return self.coder is None or not self.coder.likely_changes(first)

    def _trust(self, work: Sequence[Sequence[Cell]], placed: dict[int, PlacedCell]) -> None:
        """Reuse the parent's cells for tensors that are declared frozen, if a random sample of them is unchanged."""
        random = Random(self.repo.entropy(8))  # noqa: S311 - a sample, not a secret
        declared = [(cells, known) for cells in work if (known := self._declared_frozen(cells))]
        samples = [random.sample(cells, min(len(cells), _SAMPLE, 1 + len(cells) // _SAMPLE)) for cells, _ in declared]
        changed = self._changed([cell for sample in samples for cell in sample])
        for (cells, known), sample in zip(declared, samples, strict=True):
            if any(id(cell) in changed for cell in sample):
                key = self.sources[cells[0].source].key
                log.warning("%r was declared frozen, but it changed; casckpt compares all of its cells", key)
                continue
            for cell, old in zip(cells, known, strict=True):
                placed[id(cell)] = PlacedCell.known(old, unhashed=True)
                self.progress(cell.nbytes)

    def _declared_frozen(self, cells: Sequence[Cell]) -> list[StoredCell]:
        """Return the parent's cells of a frozen tensor. Return an empty list if any of them cannot be reused."""
        if not self.sources[cells[0].source].frozen:
            return []
        known = [old for cell in cells if (old := cell.known) is not None and self.known.usable_cell(old)]
        return known if len(known) == len(cells) else []

    def _changed(self, cells: Sequence[Cell]) -> set[int]:
        """Return the ids of the cells that differ from the parent's cells."""
        changed: set[int] = set()

        def compare(lot: Sequence[Cell]) -> None:
            changed.update(
                id(cell) for cell in lot if cell.known is None or cell_digest(cell.data()) != cell.known.digest
            )

        self._in_lots(cells, compare)
        return changed

    def _in_lots(self, cells: Sequence[Cell], call: Callable[[Sequence[Cell]], None]) -> None:
        """Call ``call`` in parallel, with lots of cells of a size that suits one task."""
        threads = useful_threads(self.threads, sum(cell.nbytes for cell in cells), len(cells))
        lots = in_batches(cells, lambda cell: max(cell.nbytes, _TASK_BYTES // _TASK_CELLS), _TASK_BYTES)
        run_all(call, lots, threads)

    def _compare_all(self, placed: dict[int, PlacedCell], cells: Sequence[Cell]) -> None:
        for cell in cells:
            view = cell.memory.view(cell.start, cell.stop)
            if view is None:
                continue
            digest = cell_digest(view)
            found = self._find(cell.known, digest)
            if found is not None:
                self._scan(cell, view, digest)
                placed[id(cell)] = PlacedCell.known(found)
                self.progress(cell.nbytes)

    def _find(self, old: StoredCell | None, digest: CellDigest) -> StoredCell | None:
        """Return a known cell with this digest, preferably ``old``, the parent's version."""
        if old is not None and old.digest == digest and self.known.usable_cell(old):
            return old
        return self.known.find(digest) if self.known.any else None

    # pack

    def _pack(self, unknown: Sequence[Cell | SmallCells], placed: dict[int, PlacedCell]) -> None:
        capacity = self.repo.marker.blob_bytes
        total = sum(cell.nbytes for cell in unknown)
        count = sum(len(cell.source) if isinstance(cell, SmallCells) else 1 for cell in unknown)
        useful = useful_threads(self.threads, total, count)
        writers = 1 if self.threads == 1 else max(useful, self.repo.storage.traits.uploads)
        workers = min(writers, -(-total // capacity) or 1)
        packing = _Packing(self._queues(unknown), placed, min(capacity, padded(max(total, 1))))
        with _BUFFERS.pool(workers, buffer_bytes(packing.capacity)) as buffers:
            with rooms(unknown, workers) as pinned:
                run_all(lambda _: self._work(packing, buffers, pinned), range(workers), workers)
            with buffers.borrow() as borrowed:
                for queue in packing.queues:
                    self._put_frames(queue.frames.take(0), packing, borrowed.view)

    def _work(self, packing: _Packing, buffers: BufferPool, pinned: BufferPool | None) -> None:
        try:
            with buffers.borrow() as borrowed, copier(pinned) as own:
                for queue in packing.queues:
                    self._empty(queue, packing, borrowed.view, own)
        except BaseException:
            packing.stop.set()  # nothing will be committed, so the other workers need not write
            raise

    def _queues(self, unknown: Sequence[Cell | SmallCells]) -> list[_Queue]:
        """Return queues of cells that may have changed, and separate queues of cells that move out of worn blobs.

        Cells in the second kind of queue will probably not change. In a blob with changing cells, they would soon have
        to move again.
        """
        moved, rest = list[Cell | SmallCells](), list[Cell | SmallCells]()
        numbers = branch_numbers(branch_of(source.kind, source.key) for source in self.sources)
        branch = np.array(numbers, np.int64)
        for cell in unknown:
            if isinstance(cell, SmallCells):
                to_move = cell.known.is_whole & ~self.known.usable_cells(cell.known)
                for label, cells in cell.runs(2 * branch[cell.source] + to_move):
                    (moved if label % 2 else rest).append(cells)
            else:
                is_moved = cell.known is not None and not self.known.usable_cell(cell.known)
                (moved if is_moved else rest).append(cell)
        parts = (by_branch(part, lambda cell: numbers[_first(cell)]) for part in (rest, moved))
        return [_Queue(cells) for part in parts for cells in part]

    def _empty(self, queue: _Queue, packing: _Packing, buffer: memoryview, copier: Copier) -> None:
        while not packing.stop.is_set() and not queue.is_empty:
            with packing.turns:
                blob = self._fill(queue, packing, buffer, copier)
            if blob is not None:
                self._put(blob, buffer)
            self._put_frames(queue.frames.take(packing.capacity), packing, buffer)

    def _put(self, blob: BlobRef, buffer: memoryview) -> None:
        blobs.put(self.repo, self.uploader, blob.hash, buffer[: blob.size])
        if self.repo.cache_saves:
            self.repo.blob_cache.add(blob, buffer[: blob.size])

    def _fill(self, queue: _Queue, packing: _Packing, buffer: memoryview, copier: Copier) -> BlobRef | None:
        """Fill one blob at the start of the buffer, and return its name. Return None if there is no blob to put."""
        writer, number = BlobWriter(buffer), self._next_number()
        end = writer.end + packing.capacity
        while end - writer.end > packing.capacity // _WORTH_FILLING and queue.frames.nbytes < packing.capacity:
            first, cells = queue.take(writer.end, end)
            if not cells:
                break
            for order, cell in enumerate(cells):
                if isinstance(cell, SmallCells):
                    self._write_small(cell, writer, buffer, number)
                    continue
                at = writer.place(cell.nbytes)
                target = buffer[at : at + cell.nbytes]
                copier.copy(cells, cell, order, target)
                place, frame = self._write(cell, writer, target, number, at)
                packing.placed[id(cell)] = place
                if frame is not None:
                    queue.frames.add(first + order, place, frame)
                self.progress(cell.nbytes)
        return None if writer.is_empty else self._finish(writer, number)

    def _write(
        self, cell: Cell, writer: BlobWriter, target: memoryview, number: int, at: int
    ) -> tuple[PlacedCell, bytes | None]:
        """Hash a cell that was copied to ``at``.

        The cell remains there if it is new and this call does not return a frame.
        """
        source, digest = self.sources[cell.source], cell_digest(target)
        self._scan(cell, target, digest)
        place, is_new = self._claim(self._find(cell.known, digest), digest, number, at)
        coder = self.coder if self.coder is not None and self.coder.takes(source, cell) else None
        coded = coder.encode(source, cell, target, digest) if coder is not None and is_new else None
        if coded is not None:
            frame, base = coded
            place.frame = Frame(len(frame), base)
            return place, frame
        if is_new:
            writer.add(source.dtype, cell.nbytes, digest)
        elif coder is not None:
            coder.note_known(source, cell, target, place.digest, is_coded=place.frame is not None)
        return place, None

    def _write_small(self, cells: SmallCells, writer: BlobWriter, buffer: memoryview, number: int) -> None:
        """Find or store cells. If the first is unchanged, compare all of them in place, and copy only the others.

        Copied cells that are new remain in the buffer, next to each other.
        """
        placed, known, usable = cells.placed, cells.known, self.known.usable_cells(cells.known)
        placed.blob[:], placed.offset[:] = known.blob, known.offset
        rows = np.arange(len(usable))
        if usable[0] and self._same_small(cells, rows[:1], ADDRESSES, cells.address[:1]).all():
            rows = rows[1:][~(usable[1:] & self._same_small(cells, rows[1:], ADDRESSES, cells.address[1:]))]
        if len(rows):
            sizes = placed.nbytes[rows]
            starts = writer.end + np.cumsum(sizes) - sizes
            copy_addresses(address(buffer) + starts, cells.address[rows], sizes)
            is_new = ~(usable[rows] & self._same_small(cells, rows, buffer, starts, stored=True))
            self._add_small(cells, rows[is_new], starts[is_new], writer, buffer=buffer, number=number)
        self.progress(cells.nbytes)

    def _same_small(
        self, cells: SmallCells, rows: Ints, data: memoryview, starts: Ints, *, stored: bool = False
    ) -> npt.NDArray[np.bool_]:
        """Hash some of the cells, which begin at ``starts`` in ``data``. Return which of them are the parent's cells.

        Scan the health of these, or of all if they are ``stored`` there.
        """
        spans = list(zip(starts.tolist(), (starts + cells.placed.nbytes[rows]).tolist(), strict=True))
        digests = np.frombuffer(cell_digests(data, spans), np.uint8).reshape(-1, DIGEST_BYTES)
        cells.placed.digest[rows] = digests
        same: npt.NDArray[np.bool_] = cells.known.is_whole[rows] & (cells.known.digest[rows] == digests).all(axis=1)
        if self.scan is not None:
            for row in np.flatnonzero(same | stored).tolist():
                source, (lo, hi), digest = cells.source[rows[row]], spans[row], CellDigest(digests[row].tobytes())
                self.scan.scan(self.sources[source], data[lo:hi], digest, is_unchanged=same[row])
        return same

    def _add_small(
        self, cells: SmallCells, rows: Ints, starts: Ints, writer: BlobWriter, *, buffer: memoryview, number: int
    ) -> None:
        """Find cells by their digests. Move those that are new to the end of the blob."""
        placed, places, dtype = cells.placed, list[tuple[int, int]](), self.sources[_first(cells)].dtype
        for row, lo, nbytes in zip(rows.tolist(), starts.tolist(), placed.nbytes[rows].tolist(), strict=True):
            digest, at = CellDigest(placed.digest[row].tobytes()), writer.end
            place, is_new = self._claim(self._find(None, digest), digest, number, at)
            if place.frame is not None:  # a frame of a different tensor, which columns cannot describe
                place, is_new = PlacedCell(digest, number, at), True
            places.append((place.blob, place.offset))
            if is_new:
                buffer[at : at + nbytes] = buffer[lo : lo + nbytes]  # a known cell may have been here
                writer.add(dtype, nbytes, digest)
        placed.blob[rows], placed.offset[rows] = np.array(places).reshape(-1, 2).T

    def _scan(self, cell: Cell, data: memoryview, digest: CellDigest) -> None:
        """Scan the health of a cell while its bytes are in the CPU's cache."""
        if self.scan is not None:
            is_unchanged = cell.known is not None and cell.known.digest == digest
            self.scan.scan(self.sources[cell.source], data, digest, is_unchanged=is_unchanged)

    def _put_frames(self, frames: Sequence[tuple[PlacedCell, bytes]], packing: _Packing, buffer: memoryview) -> None:
        """Put frames into separate blobs, because their sizes are not known in advance."""
        for lot in in_batches(frames, lambda one: len(one[1]), packing.capacity):
            with packing.turns:
                writer, number = BlobWriter(buffer), self._next_number()
                for place, frame in lot:
                    place.blob, place.offset = number, writer.end
                    buffer[writer.end : writer.end + len(frame)] = frame
                    writer.add_frame(len(frame))
                blob = self._finish(writer, number)
            self._put(blob, buffer)

    def _finish(self, writer: BlobWriter, number: int) -> BlobRef:
        ref = self.refs[number] = BlobRef(*writer.finish(), self.uploader)
        return ref

    def _next_number(self) -> int:
        with self._lock:
            self.refs.append(None)
            return len(self.refs) - 1

    def _claim(
        self, stored: StoredCell | None, digest: CellDigest, number: int, offset: int
    ) -> tuple[PlacedCell, bool]:
        """Return the location of a freshly hashed cell, and whether it is stored now.

        Otherwise, it was stored earlier. ``stored``: a known cell with this digest.
        """
        with self._lock:
            earlier = self._claims.get(digest)
            if earlier is not None and all(map(self.known.usable, earlier.needs)):
                return earlier, False
            place = PlacedCell.known(stored) if stored else PlacedCell(digest, number, offset)
            self._claims[digest] = place
        return place, stored is None


def _first(cells: Cell | SmallCells) -> int:
    """Return the number of the first entry."""
    return int(cells.source[0]) if isinstance(cells, SmallCells) else cells.source


class _Queue(Queue[Cell | SmallCells]):
    """Ordered cells, in lots that fit one buffer. ``frames``: the frames of its cells that are not in a blob yet."""

    def __init__(self, cells: Sequence[Cell | SmallCells]) -> None:
        super().__init__(cells)
        self.frames = _Frames()

    def _place(self, number: int, begin: int, end: int) -> int:
        """Split small cells into lots, and at the end of the blob."""
        cells = self._cells[number]
        if isinstance(cells, Cell):
            return super()._place(number, begin, end)
        ends = np.cumsum(cells.placed.nbytes[:_TASK_CELLS])  # all of them would take time for each lot
        fits = int(np.searchsorted(ends, min(_SMALL_LOT, end - begin), side="right"))
        if 0 < fits < len(cells.source):
            self._cells[number : number + 1] = [cells.rows(slice(fits)), cells.rows(slice(fits, None))]
        return begin + int(ends[max(fits, 1) - 1])


class _Frames:
    """Frames that are not in a blob yet."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._found: list[tuple[int, PlacedCell, bytes]] = []
        self._lock = Lock()

    def add(self, order: int, place: PlacedCell, frame: bytes) -> None:
        """Add the frame of a cell. Its ``place`` is completed later."""
        with self._lock:
            self._found.append((order, place, frame))
            self.nbytes += len(frame)

    def take(self, least: int) -> list[tuple[PlacedCell, bytes]]:
        """Remove and return all frames, in cell order, if they have at least ``least`` bytes in total."""
        with self._lock:
            found = sorted(self._found, key=lambda one: one[0]) if self.nbytes >= least else []
            if found:
                self.nbytes, self._found = 0, []
        return [(place, frame) for _, place, frame in found]


@dataclass(frozen=True)
class _Packing:
    """The state that all workers share.

    ``turns``: keeps the workers from all filling buffers at the same time, and then all waiting for the disk.
    """

    queues: Sequence[_Queue]
    placed: dict[int, PlacedCell]
    capacity: int  # the number of data bytes in a blob
    stop: Event = field(default_factory=Event)
    turns: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(usable_cores()))
