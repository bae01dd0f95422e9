"""The engine of a load: ranged reads in parallel, straight into the destinations, verified cell by cell.

A unit (usually one cell) is read in place where a destination holds just its elements together in host memory, else
into a buffer and copied from there. Units that several destinations want are read once. Reads of one blob are merged.

Where bytes are gone or wrong, what is left is read at the places that another commit of the same checkpoint has.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Sequence, Set
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from threading import BoundedSemaphore, Event
from typing import NamedTuple, TypeAlias

from casckpt.checkpoint.cycle_collector import collecting_later
from casckpt.checkpoint.loading.blob_readers import BlobReader, BlobReaders
from casckpt.errors import CasckptError, Conflict, Damaged, NotFound, Refused, StorageError
from casckpt.format.digest import cell_digest
from casckpt.format.extents import ExtentTable
from casckpt.format.manifest import Manifest
from casckpt.format.regions import Box, Region, normalise
from casckpt.format.sections.blobs import BlobRef
from casckpt.lazy import cached_property
from casckpt.parallel import run_all, usable_cores, useful_threads
from casckpt.plan.progress import Progress, silent
from casckpt.plan.reads import Batch, Unit, affordable_gap, plan_batches, plan_units
from casckpt.repository.commits import Commit, CommitList, list_commits
from casckpt.repository.fetching import explain, holds_cell
from casckpt.repository.manifests import blobs_of, get, others
from casckpt.repository.repository import Repository
from casckpt.storage.base import Reader, ShortObject, Traits
from casckpt.storage.buffers import AlignedBuffer, BufferPool
from casckpt.storage.local.headroom import headroom
from casckpt.storage.local.reader import LocalReader
from casckpt.tensors.memory import Destination, copy_bytes, note_writes

_BATCH_BYTES = 8 << 20
_SCRATCH_BYTES = 2 << 20  # of what is copied once more: read, hashed and copied while a core's cache holds it
_AHEAD = 4  # threads more than compute, where reads wait for a disk: to have the next ones in flight
_ALWAYS = 64 << 20  # so little memory is not asked for: the answer takes longer than a tiny load
_PLENTY = 4  # times what is read: with so much memory to spare, it stays in the page cache
_SPARE_BYTES, _SPARE_SHARE = 4 << 20, 25  # over a network: so much, or 1/25 of what is wanted, is read in vain


_Part: TypeAlias = tuple[int, Box, int, int]
"""The elements [lo, hi) of a box that a sink (by its `id`) has got."""

log = logging.getLogger(__name__)


class StreamRequest(NamedTuple):
    """One entry of the manifest (by its number) and one sink for it. ``table``: its extents, if they are at hand."""

    entry: int
    sink: Destination
    table: ExtentTable | None = None


class _Taker(NamedTuple):
    """A sink, the unit that it takes from, and the bytes of that unit in place, if the sink holds it whole."""

    sink: Destination
    unit: Unit
    place: memoryview | None


class _Item(NamedTuple):
    """One range of bytes and all who want it. Their units differ where equal cells are stored once."""

    unit: Unit
    key: str
    takers: list[_Taker]


class _Target(NamedTuple):
    """A buffer of a read. ``items``: what lies in it, and where. ``direct``: it is the place of its first taker."""

    view: memoryview
    items: Sequence[tuple[int, _Item]]
    direct: bool = False


@dataclass
class Download:
    """All reads of one load by one rank of ``ranks``, of which ``ranks_here`` share this host."""

    repo: Repository
    manifest: Manifest
    verify: bool
    threads: int
    progress: Progress = silent
    ranks: int = 1
    ranks_here: int = 1

    def run(self, wants: Sequence[StreamRequest]) -> None:
        """Fill all sinks. Raises Damaged (or Conflict, if the checkpoint was purged meanwhile) naming what is hit."""
        self._run(wants, frozenset(), frozenset())

    def _run(self, wants: Sequence[StreamRequest], done: Set[_Part], tried: Set[str]) -> None:
        """``done``: what sinks have already, from manifests with the heads ``tried``."""
        finished: list[Batch[_Item]] = []
        tried |= {self.manifest.head.digest}
        try:
            self._fill(wants, done, finished, is_first=len(tried) == 1)
            return
        except (_Lost, Conflict, Damaged) as error:
            other = self._other(tried)
            if other is None and isinstance(error, _Lost):
                raise damaged_error(self.repo, self.manifest, error.ref, error.key, str(error)) from error.__cause__
            if other is None:
                raise
            log.info("%s; the load goes on from another commit of %s", error, self.manifest.id)
        takers = (taker for batch in finished for _, _, item in batch.items for taker in item.takers)
        left = [want._replace(table=None) for want in wants]
        replace(self, manifest=other)._run(left, done | {_part(one.sink, one.unit) for one in takers}, tried)

    def _other(self, tried: Set[str]) -> Manifest | None:
        """The manifest of another commit of the checkpoint, with other places."""
        for commit in others(self.repo, self.manifest.id, tried):
            with suppress(Conflict, Damaged, Refused):
                return get(self.repo, commit)
        return None

    def _fill(
        self, wants: Sequence[StreamRequest], done: Set[_Part], finished: list[Batch[_Item]], *, is_first: bool
    ) -> None:
        traits = self.repo.storage.traits
        if not is_first:
            self.manifest.ready({want.entry for want in wants}, ())
        batches, most = self._batches(wants, done)
        note_writes(tensor for want in wants for tensor in want.sink.written)
        total, pieces = sum(batch.nbytes for batch in batches), sum(len(batch.items) for batch in batches)
        if is_first:
            self.progress.expect(sum(item.unit.nbytes for batch in batches for _, _, item in batch.items))
        threads = traits.parallel if traits.remote else useful_threads(self.threads, total, pieces)
        # ranks that want more than their part want the same bytes, and on one host a cache serves them all
        shared = self.ranks > 1 and 2 * total * self.ranks > 3 * sum(self.manifest.blob_sizes)
        slots = BlobReaders(self.repo, self.manifest, batches, shared=shared, stays=self._stays_in_memory(total))
        tasks = [[batch] for batch in batches]
        if batches and threads > 1 and not traits.remote:
            tasks, threads = self._in_order(slots, batches, threads)
        scratches = BufferPool(threads, most)
        stop = Event()
        try:
            with collecting_later() if threads == 1 else nullcontext():
                run_all(lambda task: self._read_all(slots, scratches, task, stop, finished), tasks, threads)
        finally:
            slots.close()
            scratches.close()

    def _in_order(
        self, slots: BlobReaders, batches: Sequence[Batch[_Item]], threads: int
    ) -> tuple[list[list[Batch[_Item]]], int]:
        """What of a local store one thread reads after the other, and how many threads do."""
        first = batches[0].blob
        if slots.is_in_memory(first):  # reads wait for nothing else
            return [[batch] for batch in batches], min(threads, usable_cores(self.ranks_here))
        if not slots.is_shared(first):
            return [[batch] for batch in batches], threads + _AHEAD
        # the kernel reads ahead, and fills its cache in large pieces, for one who reads a file in order
        by_blob = groupby(batches, key=lambda batch: batch.blob)
        return [list(group) for _, group in by_blob], threads + _AHEAD // 2

    def _stays_in_memory(self, nbytes: int) -> bool:
        """Whether so much, and what the other ranks here read, is left in the page cache for the next load."""
        wanted, most = self.repo.storage.traits.page_cache, _PLENTY * nbytes * self.ranks_here
        return (most <= _ALWAYS or most <= headroom()) if wanted is None else wanted

    @cached_property
    def _turns(self) -> BoundedSemaphore:
        """What a thread holds while it works for a core, and not while it waits for a disk."""
        return BoundedSemaphore(min(self.threads, usable_cores(self.ranks_here)))

    def blobs(self, wants: Sequence[StreamRequest]) -> list[BlobRef]:
        """The blobs that `run` would read."""
        return [self.manifest.blob(number) for number in sorted({batch.blob for batch in self._batches(wants)[0]})]

    @collecting_later()
    def _batches(
        self, wants: Sequence[StreamRequest], done: Set[_Part] = frozenset()
    ) -> tuple[list[Batch[_Item]], int]:
        """All reads, and the most bytes that one of them is meant to have."""
        traits = self.repo.storage.traits
        items = list(self._items(wants, done))
        in_place = traits.remote or all(item.takers[0].place is not None for item in items)
        most = _BATCH_BYTES if in_place else _SCRATCH_BYTES
        rows = ((i.unit.blob, i.unit.offset, i.unit.nbytes, i) for i in items)
        return plan_batches(rows, gap=_gap(traits, items), most=most), most

    def _items(self, wants: Sequence[StreamRequest], done: Set[_Part]) -> Iterable[_Item]:
        """One item for each distinct range of bytes that is not ``done``."""
        items: dict[tuple[int, int, int], _Item] = {}
        entries = self.manifest.entries
        for number, sink, given in wants:
            entry = entries[number]
            table = self.manifest.extents(entry) if given is None else given
            region = normalise(sink.region, entry.shape)
            for unit in plan_units(table, region, verify=self.verify):
                if done and _part(sink, unit) in done:
                    continue
                taker, name = _Taker(sink, unit, _place(sink, region, unit)), unit[:3]
                if name in items:
                    items[name].takers.append(taker)
                else:
                    items[name] = _Item(unit, entry.key, [taker])
        for item in items.values():
            if len(item.takers) > 1:
                item.takers.sort(key=lambda taker: taker.place is None)
        return items.values()

    def _read_all(
        self,
        slots: BlobReaders,
        scratches: BufferPool,
        task: Sequence[Batch[_Item]],
        stop: Event,
        finished: list[Batch[_Item]],
    ) -> None:
        for batch in task:
            self._read(slots, scratches, batch, stop, finished)

    def _read(
        self, slots: BlobReaders, scratches: BufferPool, batch: Batch[_Item], stop: Event, finished: list[Batch[_Item]]
    ) -> None:
        if stop.is_set():  # something failed: what was loaded is of no use any more
            slots.skip(batch.blob)
            return
        try:
            with AlignedBuffer(batch.nbytes) if batch.nbytes > scratches.nbytes else scratches.borrow() as scratch:
                self._read_now(slots, batch, scratch.view)
        except BaseException:
            stop.set()
            raise
        finished.append(batch)

    def _read_now(self, slots: BlobReaders, batch: Batch[_Item], scratch: memoryview) -> None:
        targets = _targets(batch, scratch)
        with slots.use(batch.blob) as slot:
            while not self._has_read(slot, batch, targets):
                pass
        self.progress(sum(item.unit.nbytes for _, _, item in batch.items))

    def _has_read(self, slot: BlobReader, batch: Batch[_Item], targets: Sequence[_Target]) -> bool:
        """Read and deliver. False if what this host has cached is spoilt, and the store is to be asked."""
        reader: Reader | None = None
        try:
            reader = slot.reader()
            delivered = 0
            with closing(self._filling(reader, batch.offset, [target.view for target in targets])) as filling:
                for count in filling:
                    self._deliver_all(targets[delivered:count])
                    delivered = count
        except (_WrongCell, NotFound, ShortObject, StorageError) as error:
            if slot.distrust(reader):
                return False
            if isinstance(error, StorageError):
                raise
            item = error.item if isinstance(error, _WrongCell) else batch.items[0][2]
            why = explain(slot.ref, error)
            if isinstance(error, _WrongCell) and reader is not None and _is_right(reader, item.unit):
                why += f", but at a second look they are: does something else write where {item.key!r} is loaded to?"
            raise _Lost(slot.ref, item.key, why) from error
        return True

    def _filling(self, reader: Reader, offset: int, views: Sequence[memoryview]) -> Generator[int, None, None]:
        """Fill all views, and yield how many are full by now."""
        if isinstance(reader, LocalReader):
            yield from reader.fill(offset, views, self._turns)
        else:
            reader.read_into(offset, views)
            yield len(views)

    def _deliver_all(self, targets: Sequence[_Target]) -> None:
        for target in targets:
            for start, item in target.items:
                self._deliver(item, target.view[start : start + item.unit.nbytes], target.direct)

    def _deliver(self, item: _Item, data: memoryview, direct: bool) -> None:
        unit = item.unit
        if unit.digest is not None and cell_digest(data) != unit.digest:
            raise _WrongCell(item)
        for taker in item.takers[1 if direct else 0 :]:
            if taker.place is None:
                taker.sink.copy_in(taker.unit.region, data)
            else:
                copy_bytes(taker.place, data)


def _gap(traits: Traits, items: Sequence[_Item]) -> int:
    """The gap that merging may bridge: what it costs of the way, and of a network little more than is wanted."""
    if not traits.remote:
        return traits.read_gap
    wanted = sum(item.unit.nbytes for item in items)
    rows = (item.unit[:3] for item in items)
    return affordable_gap(rows, most=traits.read_gap, spare=max(_SPARE_BYTES, wanted // _SPARE_SHARE))


def _place(sink: Destination, region: Region, unit: Unit) -> memoryview | None:
    """The bytes of a unit in a sink of ``region`` (normalised), if it holds the unit whole and together."""
    if unit.box != region.box or unit.lo < region.lo or unit.hi > region.hi:
        return None
    return sink.view(unit.lo - region.lo, unit.hi - region.lo)


def _part(sink: Destination, unit: Unit) -> _Part:
    return id(sink), unit.box, unit.lo, unit.hi


class _Lost(Exception):
    """Bytes of a blob are not there, or not as they were written; the tensor ``key`` needs them."""

    def __init__(self, ref: BlobRef, key: str, why: str) -> None:
        super().__init__(why)
        self.ref, self.key = ref, key


class _WrongCell(Exception):
    """A cell does not have its digest."""

    def __init__(self, item: _Item) -> None:
        unit = item.unit
        super().__init__(f"its bytes {unit.offset} to {unit.offset + unit.nbytes} are not what was written")
        self.item = item


def _is_right(reader: Reader, unit: Unit) -> bool:
    """Is the cell of ``unit`` what was written when it is read once more, into memory that nobody else writes to?"""
    return holds_cell(reader, unit.offset, memoryview(bytearray(unit.nbytes)), unit.digest)


def damaged_error(repo: Repository, manifest: Manifest, ref: BlobRef, key: str, why: str) -> CasckptError:
    """The error for bytes that are not there as they were written: Conflict if the checkpoint was purged meanwhile."""
    commits = list_commits(repo)
    head = manifest.head.digest  # others of the same id may lie elsewhere
    mine = [c for c in commits.commits.values() if c.last != "revoked" and c.committed.head == head]
    name = f"{manifest.body.run}@{manifest.body.step}"
    if mine and not any(commit.live for commit in mine):
        return Conflict(f"checkpoint {name} ({manifest.id}) was purged while it was read; load another one", key=key)
    users = list(checkpoints_using(repo, commits, ref))
    listed = ", ".join(map(str, users[:8])) + (", ..." if len(users) > 8 else "")
    return Damaged(
        f"blob {ref.hash} is damaged: {why}. Tensor {key!r} of {name} needs it, and so do the checkpoints {listed}. "
        "What was being loaded is undefined now. Run `casckpt verify`, then `casckpt repair`, on the store",
        key=key,
        blob=ref.hash,
        checkpoints=tuple(commit.id for commit in users),
    )


def checkpoints_using(repo: Repository, commits: CommitList, ref: BlobRef) -> Iterator[Commit]:
    """The live checkpoints that name a blob; those whose manifest cannot be read are left out."""
    for commit in commits.live():
        try:
            if any((uploader, name) == (ref.uploader, ref.hash) for uploader, name, _ in blobs_of(repo, commit)):
                yield commit
        except CasckptError:
            continue


def _targets(batch: Batch[_Item], scratch: memoryview) -> list[_Target]:
    """Consecutive buffers that together are the batch; what has no place of its own goes into ``scratch``."""
    begin, end = batch.offset, batch.offset + batch.nbytes
    if any(offset < before + nbytes for (before, nbytes, _), (offset, _, _) in pairwise(batch.items)):
        # some overlap: no byte is read twice, so all of the batch shares a buffer
        return [_Target(scratch[: batch.nbytes], [(offset - begin, item) for offset, _, item in batch.items])]
    targets: list[_Target] = []
    loose: list[tuple[int, _Item]] = []
    start = begin
    for offset, nbytes, item in batch.items:
        place = item.takers[0].place
        if place is None:
            loose.append((offset - start, item))
            continue
        if offset > start:
            targets.append(_Target(scratch[start - begin : offset - begin], loose))
            loose = []
        targets.append(_Target(place, [(0, item)], direct=True))
        start = offset + nbytes
    if end > start:
        targets.append(_Target(scratch[start - begin : batch.nbytes], loose))
    return targets
