"""The engine of a save: compare what may be known in place, pack what is new into blobs, put them, all in parallel.

Two phases, each over all cores:

- **compare**: of every tensor that may be unchanged, one cell is hashed in place; if it is known, the others are too.
  (Of tensors that the caller declares frozen, a sample is. Small ones are not: they go on as if unknown, and no bytes
  of them are kept if they turn out to be known.)
- **pack**: workers take unknown cells from a queue, copy each into an aligned buffer, hash it there (what is stored is
  what was hashed), and put the full buffer as a blob. Cells that are moved out of worn blobs have a queue of their own,
  and so blobs; so has each branch of the state. As many workers fill at a time as there are cores: while some wait for
  the disk others copy and hash.

Memory is bounded by the workers' buffers, whatever the size of the state; they are kept for the next save.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from random import Random
from threading import BoundedSemaphore, Event, Lock

from casckpt.checkpoint.cycle_collector import collecting_later
from casckpt.checkpoint.saving.sources import Cell, Source
from casckpt.format.blob_writer import BlobWriter, buffer_bytes, padded
from casckpt.format.digest import cell_digest
from casckpt.format.extents import StoredCell
from casckpt.format.names import CellDigest, TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.lazy import cached_property
from casckpt.parallel import run_all, usable_cores, useful_threads
from casckpt.plan.lots import lots
from casckpt.plan.packing import Queue, branches_of, by_branch
from casckpt.plan.progress import Progress, silent
from casckpt.plan.reuse import KnownCells
from casckpt.repository import blobs
from casckpt.repository.repository import Repository
from casckpt.storage.buffers import BufferPool, KeptBuffers

log = logging.getLogger(__name__)
_TASK_BYTES = 8 << 20
_TASK_CELLS = 4096
_SMALL = 64 << 10  # bytes: to copy a cell costs less than to hash it twice where it changed
_SAMPLE = 16  # cells of a frozen tensor that are looked at: at least 1, at most so many
_BUFFERS = KeptBuffers()  # of this process, whichever store it saves to
_WORTH_FILLING = 4  # a buffer with more than 1/4 of it free takes more cells, if there are any


@dataclass(slots=True)
class PlacedCell:
    """Where one cell lies. ``new``: ``blob`` counts this save's own blobs, else those of the known cells.

    ``unhashed``: it was not looked at, since its tensor was declared frozen.
    """

    digest: CellDigest
    new: bool
    blob: int
    offset: int
    unhashed: bool = False


@dataclass
class Upload:
    """One rank's uploads in one transaction."""

    repo: Repository
    uploader: TxId
    sources: Sequence[Source]
    known: KnownCells
    threads: int
    progress: Progress = silent
    written: list[BlobRef | None] = field(default_factory=list)
    _claims: dict[CellDigest, PlacedCell] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def place(self, work: Sequence[Sequence[Cell]]) -> list[list[PlacedCell]]:
        """Find or store every cell. Blobs are durable when it returns; their names once the folder is settled."""
        placed: dict[int, PlacedCell] = {}
        every = [cell for cells in work for cell in cells]
        many_small = useful_threads(2, sum(cell.nbytes for cell in every), len(every)) == 1
        with collecting_later() if many_small else nullcontext():
            unknown = self._compare(work, placed) if self.known.any else every
            if unknown:
                self._pack(unknown, placed)
            return [[placed[id(cell)] for cell in cells] for cells in work]

    # compare

    def _compare(self, work: Sequence[Sequence[Cell]], placed: dict[int, PlacedCell]) -> list[Cell]:
        self._trust(work, placed)
        work = [cells for cells in work if id(cells[0]) not in placed]
        probes = [
            cells[0]
            for cells in work
            if (len(cells) > 1 or cells[0].nbytes > _SMALL) and cells[0].memory.view(0, 0) is not None
        ]
        self._compare_each(probes, placed)
        self._compare_each([cell for cells in work if id(cells[0]) in placed for cell in cells[1:]], placed)
        return [cell for cells in work for cell in cells if id(cell) not in placed]

    def _trust(self, work: Sequence[Sequence[Cell]], placed: dict[int, PlacedCell]) -> None:
        """Take tensors that were declared frozen to be what the parent has, if a random sample of their cells is."""
        random = Random(self.repo.entropy(8))  # noqa: S311 - a sample, no secret
        declared = [(cells, known) for cells in work if (known := self._declared_frozen(cells))]
        samples = [random.sample(cells, min(len(cells), _SAMPLE, 1 + len(cells) // _SAMPLE)) for cells, _ in declared]
        changed = self._changed([cell for sample in samples for cell in sample])
        for (cells, known), sample in zip(declared, samples, strict=True):
            if any(id(cell) in changed for cell in sample):
                key = self.sources[cells[0].source].key
                log.warning("%r was declared frozen, but it changed; all of it is compared", key)
                continue
            for cell, old in zip(cells, known, strict=True):
                placed[id(cell)] = PlacedCell(old.digest, False, old.blob, old.offset, unhashed=True)
                self.progress(cell.nbytes)

    def _declared_frozen(self, cells: Sequence[Cell]) -> list[StoredCell]:
        """The parent's cells that the caller says ``cells`` to be; empty if one cannot be reused."""
        if not self.sources[cells[0].source].frozen:
            return []
        known = [old for cell in cells if (old := cell.known) is not None and self.known.usable(old.blob)]
        return known if len(known) == len(cells) else []

    def _changed(self, cells: Sequence[Cell]) -> set[int]:
        """Which of these are not what the parent has, by id."""
        changed: set[int] = set()

        def look(lot: Sequence[Cell]) -> None:
            changed.update(id(cell) for cell in lot if cell.known is None or _digest_of(cell) != cell.known.digest)

        threads = useful_threads(self.threads, sum(cell.nbytes for cell in cells), len(cells))
        run_all(look, _tasks(cells), threads)
        return changed

    def _compare_each(self, cells: Sequence[Cell], placed: dict[int, PlacedCell]) -> None:
        threads = useful_threads(self.threads, sum(cell.nbytes for cell in cells), len(cells))
        run_all(lambda lot: self._compare_all(lot, placed), _tasks(cells), threads)

    def _compare_all(self, cells: Sequence[Cell], placed: dict[int, PlacedCell]) -> None:
        for cell in cells:
            view = cell.memory.view(cell.start, cell.stop)
            if view is None:
                continue
            digest = cell_digest(view)
            place = self._find(cell, digest)
            if place is not None:
                placed[id(cell)] = PlacedCell(digest, False, *place)
                self.progress(cell.nbytes)

    def _find(self, cell: Cell, digest: CellDigest) -> tuple[int, int] | None:
        """(blob, offset) of known bytes with the digest of ``cell``: first where the parent has that cell."""
        old = cell.known
        if old is not None and old.digest == digest and self.known.usable(old.blob):
            return old.blob, old.offset
        return self.known.find(digest) if self.known.any else None

    # pack

    def _pack(self, unknown: list[Cell], placed: dict[int, PlacedCell]) -> None:
        capacity = self.repo.marker.blob_bytes
        total = sum(cell.nbytes for cell in unknown)
        useful = useful_threads(self.threads, total, len(unknown))
        writers = 1 if self.threads == 1 else max(useful, self.repo.storage.traits.uploads)
        workers = min(writers, -(-total // capacity) or 1)
        packing = _Packing(self._queues(unknown), placed, min(capacity, padded(max(total, 1))))
        with _BUFFERS.pool(workers, buffer_bytes(packing.capacity)) as buffers:
            run_all(lambda _: self._work(packing, buffers), range(workers), workers)

    def _work(self, packing: _Packing, buffers: BufferPool) -> None:
        try:
            with buffers.borrow() as borrowed:
                for queue in packing.queues:
                    self._empty(queue, packing, borrowed.view)
        except BaseException:
            packing.stop.set()  # the other workers need not write what will never be committed
            raise

    def _queues(self, unknown: Sequence[Cell]) -> list[Queue[Cell]]:
        """What may have changed, and apart from it what is moved out of a worn blob: likely to stay as it is.

        In one blob with what changes again it would be moved at every other save.
        """
        moved = [cell for cell in unknown if cell.known is not None and not self.known.usable(cell.known.blob)]
        ids = {id(cell) for cell in moved}
        rest = [cell for cell in unknown if id(cell) not in ids] if moved else unknown
        branch = [source.branch for source in self.sources] if len(self._branches) > 1 else []
        parts = (by_branch(part, lambda cell: branch[cell.source], self._branches) for part in (rest, moved))
        return [Queue(cells) for part in parts for cells in part]

    @cached_property
    def _branches(self) -> frozenset[str]:
        return branches_of(source.branch for source in self.sources)

    def _empty(self, queue: Queue[Cell], packing: _Packing, buffer: memoryview) -> None:
        while not packing.stop.is_set():
            with packing.turns:
                blob = self._fill(queue, packing, buffer)
            if blob is None:
                return
            blobs.put(self.repo, self.uploader, blob.hash, buffer[: blob.size])

    def _fill(self, queue: Queue[Cell], packing: _Packing, buffer: memoryview) -> BlobRef | None:
        """Fill one blob, whose bytes then begin the buffer, and name it. None when nothing new is left."""
        writer, number = BlobWriter(buffer), self._next_number()
        end = writer.end + packing.capacity
        while end - writer.end > packing.capacity // _WORTH_FILLING:
            cells = queue.take(writer.end, end)
            if not cells:
                break
            for cell in cells:
                at = writer.place(cell.nbytes)
                target = buffer[at : at + cell.nbytes]
                cell.memory.copy_out(cell.start, cell.stop, target)
                digest = cell_digest(target)
                packing.placed[id(cell)], is_new = self._claim(cell, digest, number, at)
                if is_new:
                    writer.add(self.sources[cell.source].dtype, cell.nbytes, digest)
                self.progress(cell.nbytes)
        if writer.is_empty:
            return None
        ref = self.written[number] = BlobRef(*writer.finish(), self.uploader)
        return ref

    def _next_number(self) -> int:
        with self._lock:
            self.written.append(None)
            return len(self.written) - 1

    def _claim(self, cell: Cell, digest: CellDigest, number: int, offset: int) -> tuple[PlacedCell, bool]:
        """The place of a cell that was just hashed: where it is already, or here."""
        found = self._find(cell, digest)
        with self._lock:
            earlier = self._claims.get(digest)
            if earlier is not None and (earlier.new or self.known.usable(earlier.blob)):
                return earlier, False
            place = PlacedCell(digest, False, *found) if found else PlacedCell(digest, True, number, offset)
            self._claims[digest] = place
        return place, found is None


def _digest_of(cell: Cell) -> CellDigest:
    view = cell.memory.view(cell.start, cell.stop)
    if view is None:
        view = memoryview(bytearray(cell.nbytes))
        cell.memory.copy_out(cell.start, cell.stop, view)
    return cell_digest(view)


@dataclass(frozen=True)
class _Packing:
    """What the workers share. ``turns``: or all would fill at once, and then all wait for the disk at once."""

    queues: Sequence[Queue[Cell]]
    placed: dict[int, PlacedCell]
    capacity: int  # bytes of data in a blob
    stop: Event = field(default_factory=Event)
    turns: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(usable_cores()))


def _tasks(cells: Sequence[Cell]) -> Iterable[Sequence[Cell]]:
    """Cells in lots worth a task of their own."""
    return lots(cells, lambda cell: max(cell.nbytes, _TASK_BYTES // _TASK_CELLS), _TASK_BYTES)
