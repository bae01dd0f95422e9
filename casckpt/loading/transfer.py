"""Reads into the destinations in parallel, and decodes and verifies each cell.

A unit is usually one cell. It is read in place if its elements are contiguous in a destination in host memory.
Otherwise, it is read into a buffer and copied. A frame with a base is decoded in the memory that holds the base. The
frames of a lot are read together. If a decoded cell is wrong, its frames are reread and decoded again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Condition, Event
from typing import NamedTuple

import numpy as np

from casckpt.base.progress import Progress
from casckpt.errors import InvalidInput, NotFound, Refused, StorageError
from casckpt.format.digest import cell_digest
from casckpt.format.encodings.frames import decode, decoded
from casckpt.format.extents import DIGEST_BYTES, StoredCell
from casckpt.format.manifest import Manifest
from casckpt.loading.blob_readers import BlobReader, BlobReaders, Lost
from casckpt.loading.planned_reads import Item, PlannedRead, Runs, SmallReads
from casckpt.plan.reads import Batch, Unit, steps
from casckpt.plan.routes import Link
from casckpt.repository.fetching import explain, holds_cell
from casckpt.repository.repository import Repository
from casckpt.storage.base import Reader, ShortObject
from casckpt.storage.buffers import AlignedBuffer, BufferPool
from casckpt.storage.local.reader import LocalReader
from casckpt.tensors.memory import copy_bytes

_VERIFIED_BYTES = 1 << 20  # read in place before they are verified, so that they are still in a core's cache


class Lot:
    """The frames of cells that are decoded together. They remain in memory until the last of these cells is decoded.

    The first threads that need the frames read them, so no thread waits for a read that has not begun. ``frames``: the
    reads of the frames. ``users``: the number of batches that need these frames. ``decoded``: if it is set, it receives
    the frames that were used.
    """

    def __init__(
        self, frames: Sequence[Batch[Item]] = (), users: int = 0, decoded: dict[Link, bytes] | None = None
    ) -> None:
        self._unread, self._decoded, self._has_frames = deque(frames), decoded, bool(frames)
        self._reading, self._failed, self._users = 0, False, users
        self._held: dict[tuple[int, int], memoryview] = {}
        self._changed = Condition()

    def fetch(self, read: Callable[[Batch[Item]], memoryview]) -> bool:
        """Read all frames. Return False if another thread failed to read one. Raises the errors of ``read``."""
        if not self._has_frames:
            return True
        while (batch := self._next()) is not None:
            frames: Sequence[tuple[tuple[int, int], memoryview]] | None = None
            try:
                data = read(batch)
                frames = [((batch.blob, at), data[at - batch.offset :][:nbytes]) for at, nbytes, _ in batch.items]
            finally:
                self._has_read(frames)
        with self._changed:
            self._changed.wait_for(lambda: not self._reading)
            return not self._failed

    def _next(self) -> Batch[Item] | None:
        with self._changed:
            if not self._unread or self._failed:
                return None
            self._reading += 1
            return self._unread.popleft()

    def _has_read(self, frames: Sequence[tuple[tuple[int, int], memoryview]] | None) -> None:
        with self._changed:
            self._reading -= 1
            self._failed |= frames is None
            self._held.update(frames or ())
            self._changed.notify_all()

    def decode(self, item: PlannedRead, root: memoryview, into: memoryview) -> None:
        """Decode a cell. ``root``: the stored bytes of its root. It may be the same memory as ``into``.

        Raises InvalidInput.
        """
        if item.root.frame is not None:
            decode(root, into, None)
        elif root is not into:
            copy_bytes(into, root)
        for cell in item.frames:
            frame = self._held[cell.blob, cell.offset]
            decode(frame, into, into)
            if self._decoded is not None and cell.base is not None:
                self._decoded[cell.digest, cell.base.digest] = bytes(frame)

    def done(self) -> None:
        """Record that one batch is done. After the last batch, free the memory."""
        if not self._has_frames:
            return
        with self._changed:
            self._users -= 1
            if not self._users:
                self._held.clear()


class Task(NamedTuple):
    """One read, its lot, and the size of the largest cell that is not decoded in place."""

    batch: Batch[Item]
    lot: Lot
    room: int

    @property
    def nbytes(self) -> int:
        """The number of bytes of scratch memory."""
        return self.room + self.batch.nbytes


class _Target(NamedTuple):
    """A buffer of a read. ``items``: the contents of the buffer, with their offsets.

    ``direct``: whether the buffer is the memory of the first consumer of a single item, or the part of that memory
    that begins at the offset.
    """

    view: memoryview
    items: Sequence[tuple[int, Item]]
    direct: bool = False


@dataclass(frozen=True, slots=True)
class Transfer:
    """Runs the tasks of a load, in any number of threads. ``finished``: the reads that were delivered.

    ``turns``: the semaphore that a thread holds while it computes, but not while it waits for a disk.
    """

    repo: Repository
    manifest: Manifest
    slots: BlobReaders
    scratches: BufferPool
    turns: AbstractContextManager[object]
    progress: Progress
    finished: list[Batch[Item]]
    verify: bool
    _stop: Event = field(default_factory=Event)

    def run_all(self, tasks: Iterable[Task]) -> None:
        """Run the tasks in order."""
        for task in tasks:
            self.run(task)

    def run(self, task: Task) -> None:
        """Read and deliver. Raises Lost, StorageError. After an error, tasks that have not begun are skipped."""
        try:
            if self._stop.is_set() or not task.lot.fetch(self._frames):  # another thread failed
                self.slots.skip(task.batch.blob)
                return
            scratches, nbytes = self.scratches, task.nbytes
            with AlignedBuffer(nbytes) if nbytes > scratches.nbytes else scratches.borrow() as scratch:
                self._read(task, _targets(task.batch, scratch.view[task.room :]), scratch.view[: task.room])
        except BaseException:
            self._stop.set()
            raise
        task.lot.done()
        self.progress(sum(item.plain for _, _, item in task.batch.items))
        self.finished.append(task.batch)

    def _frames(self, batch: Batch[Item]) -> memoryview:
        """Read the frames of a lot."""
        data = np.empty(batch.nbytes, np.uint8).data
        self._read(Task(batch, Lot(), 0), [_Target(data, ())], data[:0])
        return data

    def _read(self, task: Task, targets: Sequence[_Target], room: memoryview) -> None:
        with self.slots.use(task.batch.blob) as slot:
            while not self._has_read(slot, task, targets, room):
                pass

    def _has_read(self, slot: BlobReader, task: Task, targets: Sequence[_Target], room: memoryview) -> bool:
        """Read and deliver.

        Return False if the copy in this host's cache is damaged. The caller must then read from the store.
        """
        reader: Reader | None = None
        try:
            reader = slot.reader()
            delivered = 0
            with closing(self._filling(reader, task.batch.offset, [target.view for target in targets])) as filling:
                for count in filling:
                    for target in targets[delivered:count]:
                        self._deliver_all(target, task.lot, room)
                    delivered = count
        except (_WrongCell, NotFound, ShortObject, StorageError) as error:
            if slot.distrust(reader, failed=isinstance(error, StorageError)):
                return False
            if isinstance(error, StorageError):
                raise
            key, why = task.batch.items[0][2].key, explain(slot.ref, error)
            if isinstance(error, _WrongCell):
                key = error.item.key
                if reader is not None and _is_right(reader, error.item.unit):
                    why += _SECOND_LOOK.format(key)
            raise Lost(slot.ref, key, why) from error
        return True

    def _filling(self, reader: Reader, offset: int, views: Sequence[memoryview]) -> Generator[int, None, None]:
        """Fill all views, and yield how many are full so far."""
        if isinstance(reader, LocalReader):
            yield from reader.fill(offset, views, self.turns)
        else:
            reader.read_into(offset, views)
            yield len(views)

    def _deliver_all(self, target: _Target, lot: Lot, room: memoryview) -> None:
        runs = Runs(target.view)
        for start, item in target.items:
            if isinstance(item, SmallReads):
                self._deliver_small(item, target.view[start : start + item.nbytes])
                continue
            in_place, unit = target.direct, item.unit
            data = target.view if in_place else target.view[start : start + item.nbytes]
            if unit.frame is not None:
                place = data if in_place else item.takers[0].place
                into, in_place = (room[: unit.nbytes], False) if place is None else (place, True)
                self._decode(item, unit, lot, data, into)
                data = into
            elif self.verify and (wrong := _first_wrong(item, data, start if in_place else 0)) is not None:
                raise _WrongCell(wrong)
            if target.direct and start + data.nbytes < unit.nbytes:
                continue  # the other consumers need the whole unit
            data = item.place or data if target.direct else data
            for taker in item.takers[1 if in_place else 0 :]:
                if taker.place is None and unit.frame is None and taker.sink.on_gpu:
                    runs.add(taker, start)
                else:
                    taker.take(data)
        runs.deliver()

    def _deliver_small(self, cells: SmallReads, data: memoryview) -> None:
        wrong = cells.wrong(data) if self.verify else None
        if wrong is not None:
            raise _WrongCell(wrong)
        cells.deliver(data)

    def _decode(self, item: PlannedRead, cell: StoredCell, lot: Lot, root: memoryview, into: memoryview) -> None:
        """Decode an item's cell. If the result is wrong, decode it again, link by link. Raises Lost, StorageError."""
        try:
            lot.decode(item, root, into)
            if not self.verify or cell_digest(into) == cell.digest:
                return
        except InvalidInput:  # one of the frames cannot be decoded
            pass
        copy_bytes(into, memoryview(decode_again(self.repo, self.manifest, cell, item.key)))
        if self.verify and cell_digest(into) != cell.digest:
            why = f"its bytes {cell.offset} to {cell.offset + cell.stored} seem wrong" + _SECOND_LOOK.format(item.key)
            raise Lost(self.manifest.blob(cell.blob), item.key, why)


_SECOND_LOOK = ", but a second read finds them correct: does something else write to the memory of {!r}?"


class _WrongCell(Exception):
    """Raised if a cell that is stored unencoded does not match its digest."""

    def __init__(self, item: PlannedRead) -> None:
        unit = item.unit
        super().__init__(f"its bytes {unit.offset} to {unit.offset + unit.nbytes} are not what was written")
        self.item = item


def _first_wrong(item: PlannedRead, data: memoryview, start: int) -> PlannedRead | None:
    """Return the read of the first cell in ``data`` that does not match its digest, or None.

    ``start``: the position of ``data`` in the item, in bytes.
    """
    unit, step = item.unit, item.step
    digests = unit.digest if isinstance(unit, StoredCell) else unit.digests
    for at in range(0, data.nbytes, step):
        number = (start + at) // step
        if cell_digest(data[at : at + step]) != digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
            return item._replace(unit=steps(unit)[number])
    return None


def _is_right(reader: Reader, unit: Unit) -> bool:
    """Reread the cell of ``unit`` into memory that nothing else writes to, and return whether it is correct."""
    return holds_cell(reader, unit.offset, memoryview(bytearray(unit.nbytes)), unit.digest)


def _targets(batch: Batch[Item], scratch: memoryview) -> list[_Target]:
    """Return the consecutive buffers of a batch. Data that cannot be read in place goes into ``scratch``.

    This data is packed at the start of ``scratch``, because untouched memory is slow.
    """
    begin, end = batch.offset, batch.offset + batch.nbytes
    if any(offset < before + nbytes for (before, nbytes, _), (offset, _, _) in pairwise(batch.items)):
        # some ranges overlap, but no byte is read twice, so the whole batch is read into one buffer
        return [_Target(scratch[: batch.nbytes], [(offset - begin, item) for offset, _, item in batch.items])]
    targets: list[_Target] = []
    loose: list[tuple[int, Item]] = []
    start, used = begin, 0
    for offset, nbytes, item in batch.items:
        place = item.place
        if place is None or isinstance(item, SmallReads):
            loose.append((offset - start, item))
            continue
        if offset > start:
            targets.append(_Target(scratch[used : used + offset - start], loose))
            loose, used = [], used + offset - start
        step = item.step * max(1, _VERIFIED_BYTES // item.step)
        targets += [_Target(place[at : at + step], [(at, item)], direct=True) for at in range(0, nbytes, step)]
        start = offset + nbytes
    if end > start:
        targets.append(_Target(scratch[used : used + end - start], loose))
    return targets


def decode_again(
    repo: Repository, manifest: Manifest, cell: StoredCell, key: str, *, what: str = "a cell"
) -> bytearray:
    """Reread and decode a cell and all its bases. Compare each of them with its digest.

    This corrects errors that exist only in a cache. Raises `Lost` for the first wrong cell, and StorageError.
    """
    base, below = None, cell.base
    if below is not None:
        base = decode_again(repo, manifest, below, key, what="a base of a cell")
    with closing(BlobReader(repo, manifest.blob(cell.blob), shared=False, keep=False)) as slot:
        while True:
            reader: Reader | None = None
            try:
                reader = slot.reader()
                stored = bytearray(cell.stored)
                reader.read_into(cell.offset, [memoryview(stored)])
                return decoded(cell, stored, None if base is None else bytearray(base))
            except (NotFound, ShortObject, StorageError, Refused) as error:
                if slot.distrust(reader):
                    continue
                if isinstance(error, StorageError):
                    raise
                why = explain(slot.ref, error)
                if isinstance(error, Refused):
                    why = f"its bytes {cell.offset} to {cell.offset + cell.stored}, {what}, are not what was written"
                    if cell.frame is not None:
                        why += f", or are not a frame of it ({error}; run `casckpt verify --decode` to find out)"
                raise Lost(slot.ref, key, why) from error
