"""Reads regions of entries into destinations.

If bytes are missing or wrong, the rest is read from a different commit.

A unit with several destinations is read once. Reads of one blob are merged. A different commit of the same checkpoint
may have its cells in different blobs.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby, pairwise
from operator import is_
from threading import BoundedSemaphore

import numpy as np

from casckpt.base.cycle_collector import collector_paused
from casckpt.base.lazy import cached_property
from casckpt.base.parallel import run_all, usable_cores, useful_threads
from casckpt.base.progress import Progress, silent
from casckpt.contents.manifests import get, others
from casckpt.contents.signatures import check_trusted, check_verified
from casckpt.errors import Damaged, Gone, Refused
from casckpt.format.extents import ExtentTable
from casckpt.format.light import LightStruct
from casckpt.format.manifest import Manifest
from casckpt.format.records import changed
from casckpt.format.regions import Region, normalise
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.index import Entry
from casckpt.loading.blob_readers import BlobReaders, Lost, damaged_error
from casckpt.loading.planned_reads import (
    Consumer,
    FilledRange,
    Item,
    PlannedRead,
    Range,
    Reads,
    SmallReads,
    new_item,
    part,
    place,
    plan_lots,
    ranges_of,
)
from casckpt.loading.transfer import Lot, Task, Transfer
from casckpt.plan.reads import Batch, plan_units
from casckpt.plan.routes import Link
from casckpt.repository.host_reads import HostReads
from casckpt.repository.processes import loaded_here
from casckpt.repository.repository import Repository
from casckpt.storage.buffers import BufferPool
from casckpt.storage.local.reader import headroom
from casckpt.tensors import gpu
from casckpt.tensors.memory import Destination, note_writes

_BATCH_BYTES = 8 << 20
# for data that is copied afterwards, so that it is read, hashed and copied within a core's cache
_SCRATCH_BYTES = 2 << 20
_SMALL_BYTES = 32 << 10  # the largest cell that is read together with others and copied, because that is faster
_MANY = 64  # with fewer small tensors, columns are not worthwhile
_WORTH_PINNING = 16 << 20  # the number of bytes for a GPU
_AHEAD = 4  # extra threads that keep the next reads in flight when reads wait for a disk
_ALWAYS = 64 << 20  # below this size, free memory is not queried, because the query takes longer than a tiny load
_PLENTY = 4  # the bytes remain in the page cache if this multiple of them is free

log = logging.getLogger(__name__)


class RegionRequest(LightStruct, frozen=True):
    """The number of a manifest entry, and a destination for the entry. ``table``: its extents, if they are known.

    ``is_new``: whether the destination is still empty.
    """

    entry: int
    sink: Destination
    table: ExtentTable | None = None
    is_new: bool = False


@dataclass
class EntryReader:
    """The reads of one load on one of ``ranks`` ranks. ``ranks_here`` of them run on this host.

    ``shared``: other processes will read the same bytes soon, so all reads go through the page cache. ``decoded``: if
    it is set, it receives the frames that were decoded against a base. ``reads``: if it is set, the ranks of this host
    share their reads within `sharing`.
    """

    repo: Repository
    manifest: Manifest
    verify: bool
    threads: int
    progress: Progress = silent
    ranks: int = 1
    ranks_here: int = 1
    shared: bool = False
    decoded: dict[Link, bytes] | None = None
    reads: HostReads | None = None
    _planned: tuple[Sequence[RegionRequest], Set[FilledRange], Reads] | None = None

    def __post_init__(self) -> None:
        body = self.manifest.body
        check_verified(self.repo, verify=self.verify)
        check_trusted(self.repo, self.manifest.id, f"{body.run}@{body.step}")

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Make all reads inside this context. At its end, the ranks of this host drop the bytes that they shared."""
        try:
            yield
        finally:
            if self.reads is not None:
                self.reads.end()

    def fill(self, wants: Sequence[RegionRequest], done: Set[FilledRange] = frozenset()) -> None:
        """Fill all destinations, except for the ranges in ``done``.

        Raises Damaged, with the key and the blob, and Gone if the checkpoint was purged in the meantime.
        """
        self._run(wants, done, frozenset())
        loaded_here.add((self.repo.marker.store_id, self.manifest.body.run))

    def _run(self, wants: Sequence[RegionRequest], done: Set[FilledRange], tried: Set[str]) -> None:
        """Read everything except the ranges in ``done``, which were filled from manifests with the heads ``tried``."""
        finished: list[Batch[Item]] = []
        tried |= {self.manifest.head.digest}
        try:
            self._fill(wants, done, finished, is_first=len(tried) == 1)
            return
        except (Lost, Gone, Damaged) as error:
            other = self._other(tried)
            if other is None and isinstance(error, Lost):
                raise damaged_error(self.repo, self.manifest, error.ref, error.key, str(error)) from error.__cause__
            if other is None:
                raise
            log.info("%s; the load continues with a different commit of %s", error, self.manifest.id)
        filled = {filled for batch in finished for _, _, item in batch.items for filled in item.filled}
        left = [changed(want, table=None) for want in wants]
        replace(self, manifest=other, reads=None, _planned=None)._run(left, done | filled, tried)

    def _other(self, tried: Set[str]) -> Manifest | None:
        """Return the manifest of a different commit of the checkpoint. Its cells are in different blobs."""
        for commit in others(self.repo, self.manifest.id, tried):
            with suppress(Gone, Damaged, Refused):
                return get(self.repo, commit)
        return None

    def _fill(
        self,
        wants: Sequence[RegionRequest],
        done: Set[FilledRange],
        finished: list[Batch[Item]],
        *,
        is_first: bool,
    ) -> None:
        if not is_first:
            self.manifest.ready({want.entry for want in wants}, ())
        planned, self._planned = self._planned, None
        is_planned = planned is not None and _are_same(planned[0], wants) and planned[1] == done
        reads = planned[2] if planned is not None and is_planned else self._reads(wants, done)
        written = [tensor for want in wants for tensor in want.sink.written]
        note_writes(written)
        if is_first:
            self.progress.expect(reads.plain)
        total = sum(batch.nbytes for batch in reads.every)
        # ranks that read more than their part read the same bytes, so the host's page cache can serve all of them
        together = self.ranks > 1 and 2 * total * self.ranks > 3 * sum(self.manifest.blob_sizes)
        stays, blob_at = cache(partial(self._stays_in_memory, total)), self.manifest.blob
        slots = BlobReaders(
            self.repo, blob_at, reads.every, shared=self.shared or together, stays=stays, reads=self.reads
        )
        lots = [(Lot(frames, len(batches), self.decoded), batches) for frames, batches in reads.lots]
        tasks, threads = self._in_order([Task(one, lot, reads.room) for lot, many in lots for one in many], slots)
        on_gpus = [tensor for tensor in written if tensor.is_cuda]
        pinned = total > _WORTH_PINNING and bool(on_gpus)
        nbytes = reads.most + reads.room
        pool = gpu.PINNED.pool(threads, nbytes) if pinned else closing(BufferPool(threads, nbytes))
        turns = self.turns if threads > self._cores else nullcontext()  # turns are not needed if each thread has a core
        with closing(slots), pool as scratches:
            transfer = Transfer(self.repo, self.manifest, slots, scratches, turns, self.progress, finished, self.verify)
            try:
                with collector_paused() if threads == 1 else nullcontext():
                    run_all(transfer.run_all, tasks, threads)
            finally:  # even after a failure, because no copy may still be running when this call returns
                gpu.wait_for_copies(on_gpus)

    def _in_order(self, tasks: Sequence[Task], slots: BlobReaders) -> tuple[Sequence[Sequence[Task]], int]:
        """Return lists of tasks, each of which a single thread runs in order, and the number of threads."""
        traits, each = self.repo.storage.traits, [[task] for task in tasks]
        if traits.remote or self.reads is not None:
            passed = {} if self.reads is None else self.reads.passed
            if passed and tasks and tasks[0].lot is tasks[-1].lot:  # begin with what this rank does not wait for
                each.sort(key=lambda lot: lot[0].batch.blob in passed)
            return each, traits.parallel
        items = [item for task in tasks for _, _, item in task.batch.items]
        plain, cells = sum(item.plain for item in items), sum(item.cells for item in items)
        threads = useful_threads(self.threads, plain, cells)
        if not tasks or threads == 1:
            return each, threads
        first = tasks[0].batch.blob
        if slots.is_in_memory(first):  # reads never wait for a disk
            if tasks[0].lot is tasks[-1].lot:
                each.sort(key=lambda lot: -lot[0].batch.nbytes)  # so that all threads finish at about the same time
            return each, min(threads, usable_cores(self.ranks_here))
        if not slots.is_shared(first):
            return each, threads + _AHEAD
        # if a single thread reads a file in order, the kernel reads ahead and fills its cache in large pieces
        by_blob = groupby(tasks, key=lambda task: task.batch.blob)
        return [list(group) for _, group in by_blob], threads + _AHEAD // 2

    def _stays_in_memory(self, nbytes: int) -> bool:
        """Return whether the bytes that this host reads remain in its page cache for the next load.

        ``nbytes``: the number of bytes that one rank reads.
        """
        wanted, most = self.repo.storage.traits.page_cache, _PLENTY * nbytes * self.ranks_here
        return (most <= _ALWAYS or most <= (headroom() or 0)) if wanted is None else wanted

    @cached_property
    def turns(self) -> BoundedSemaphore:
        """The semaphore that each thread holds while it computes, but not while it waits for a disk."""
        return BoundedSemaphore(self._cores)

    @cached_property
    def _cores(self) -> int:
        """The number of threads that may compute at the same time."""
        return min(self.threads, usable_cores(self.ranks_here))

    def plan(self, wants: Sequence[RegionRequest], done: Set[FilledRange] = frozenset()) -> Reads:
        """Plan the reads of `fill`, which then does not plan them again."""
        reads = self._reads(wants, done)
        self._planned = wants, done, reads
        return reads

    def blobs(self, wants: Sequence[RegionRequest]) -> list[BlobRef]:
        """Return the blobs that `fill` would read."""
        return [self.manifest.blob(number) for number in sorted({batch.blob for batch in self._reads(wants).every})]

    def ranges(self, parts: Iterable[tuple[Entry, Region]]) -> list[Range]:
        """Return the ranges of blobs that parts of entries consist of."""
        tables = ((self.manifest.extents(entry), region) for entry, region in parts)
        units = (unit for table, region in tables for unit in plan_units(table, region, verify=self.verify))
        return sorted({where for unit in units for where in ranges_of(unit)})

    @collector_paused()
    def _reads(self, wants: Sequence[RegionRequest], done: Set[FilledRange] = frozenset()) -> Reads:
        """Plan all reads."""
        small, others = self._small_cells(wants) if not done else (None, wants)
        items = self._items(others, done, long=not done)
        overlap = _overlap(items) or (small is not None and small.overlap(items))
        if overlap:  # otherwise, a chain of reads that overlap would become one large read
            items = self._items(others, done, long=False)
        scratch = _BATCH_BYTES if any(want.sink.on_gpu for want in others) else _SCRATCH_BYTES
        return plan_lots(items, small, self.repo.storage.traits, most=_BATCH_BYTES, scratch=scratch)

    def _small_cells(self, wants: Sequence[RegionRequest]) -> tuple[SmallReads | None, Sequence[RegionRequest]]:
        """Return the requests for small tensors that are read together, if there are many, and all other requests."""
        nbytes = np.array([want.sink.nbytes for want in wants])
        if np.count_nonzero(nbytes <= _SMALL_BYTES) < _MANY:
            return None, wants
        cells = self.manifest.whole_cells(np.array([want.entry for want in wants]))
        addresses = np.array([want.sink.address for want in wants], np.int64)
        is_small = cells.is_whole & (cells.nbytes == nbytes) & (nbytes <= _SMALL_BYTES) & (addresses != 0)
        rows, others = np.flatnonzero(is_small), np.flatnonzero(~is_small)
        if len(rows) < _MANY:
            return None, wants
        entries = self.manifest.entries
        targets = [(entries[want.entry], want.sink) for want in wants]
        small = SmallReads(targets, np.arange(len(wants)), cells, addresses).take(rows)
        return small, [wants[row] for row in others.tolist()]

    def _items(self, wants: Sequence[RegionRequest], done: Set[FilledRange], *, long: bool) -> list[PlannedRead]:
        """Return one read for each distinct byte range that is not ``done``. ``long``: see `plan_units`."""
        items: dict[Hashable, PlannedRead] = {}
        entries = self.manifest.entries
        for want in wants:
            entry, sink = entries[want.entry], want.sink
            table = self.manifest.extents(entry) if want.table is None else want.table
            region = normalise(sink.region, entry.shape)
            for unit in plan_units(table, region, verify=self.verify, long=long and sink.address != 0):
                if done and part(sink, unit) in done:
                    continue
                taker, name = Consumer(sink, unit, place(sink, region, unit)), ranges_of(unit)
                if name not in items:
                    items[name] = new_item(unit, entry.key)
                items[name].takers.append(taker)
        for item in items.values():
            if len(item.takers) > 1:
                item.takers.sort(key=lambda taker: taker.place is None)
        return list(items.values())


def _are_same(wants: Sequence[RegionRequest], others: Sequence[RegionRequest]) -> bool:
    return len(wants) == len(others) and all(map(is_, wants, others))


def _overlap(items: Iterable[PlannedRead]) -> bool:
    """Return whether any two reads overlap."""
    ranges = sorted(item.row[:3] for item in items)
    return any(blob == other and at + nbytes > start for (blob, at, nbytes), (other, start, _) in pairwise(ranges))
