"""Updates: loads that read only the differences from the version that the memory holds.

A tensor that is equal in both manifests is not touched. If a cell changed, the update computes it from the held cell
with frames, if this reads less. Each computed cell is hashed. A cell that is wrong is loaded as usual.

The decoded frames are kept with the held version. If the next version has an older base, the update first undoes these
frames, and need not reread them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from casckpt.base.groups import in_batches
from casckpt.base.parallel import run_all, useful_threads
from casckpt.contents import manifests
from casckpt.contents.checkpoint import Checkpoint, Frames
from casckpt.contents.contents import Contents
from casckpt.errors import CasckptError, Damaged, InvalidInput, MissingKey, NotFound, Refused, StorageError
from casckpt.format.digest import cell_digest
from casckpt.format.encodings.frames import decode, undo
from casckpt.format.encodings.parts import scratch
from casckpt.format.extents import Extent, ExtentTable, StoredCell
from casckpt.format.manifest import Manifest
from casckpt.format.names import CellDigest
from casckpt.format.regions import Box, Region, normalise
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.index import Entry
from casckpt.loading.blob_readers import BlobReaders
from casckpt.loading.entry_reader import EntryReader, RegionRequest
from casckpt.loading.planned_reads import Consumer, FilledRange, Range, part, place
from casckpt.plan.reads import Batch, affordable_gap, plan_batches, wanted_spans
from casckpt.plan.routes import Link, Span, common, find_extent_route, within
from casckpt.repository.host_reads import HostReads
from casckpt.storage.base import ShortObject
from casckpt.tensors.gpu import wait_for_copies
from casckpt.tensors.memory import Destination, note_writes

_LOT_BYTES = 8 << 20  # bytes of frames that a thread reads before it uses the first of them
_LEAST_BYTES = 256 << 10
_WORK = 16  # hashing and decoding this many bytes costs as much as reading one
_SPARE_SHARE = 25  # up to 1/25 of the wanted bytes may be read unnecessarily, to save requests

_UNKNOWN = (Damaged, MissingKey, NotFound, Refused)
"""The errors for a manifest that is gone, thinned or unreadable."""

log = logging.getLogger(__name__)


class Move(NamedTuple):
    """One frame of a step, and the range to read it from unless it is ``kept``.

    ``is_undone``: whether to undo the frame instead of decoding it.
    """

    link: Link
    where: Range
    is_undone: bool
    kept: bytes | None


@dataclass(frozen=True, slots=True)
class Step:
    """A cell that is computed from a held cell, and its consumers, all of which hold that cell."""

    cell: StoredCell
    moves: Sequence[Move]
    takers: list[Consumer]

    @property
    def ranges(self) -> list[Range]:
        """The byte ranges that are read for it."""
        return [move.where for move in self.moves if move.kept is None]

    @property
    def work(self) -> int:
        """The cost of the step, as a number of bytes to read."""
        return sum(nbytes for _, _, nbytes in self.ranges) + self.cell.nbytes // _WORK


class _Place(NamedTuple):
    """A destination: a normalized ``region`` of a tensor. ``kept``: the frames of the cells that it holds."""

    key: str
    sink: Destination
    region: Region
    kept: Mapping[Link, bytes]


Lot: TypeAlias = "tuple[Sequence[Step], Sequence[Batch[None]]]"
"""Steps, and the reads of their frames."""


def update(planned: Update) -> Frames:
    """Perform an update. Raises the errors of a load, with advice for the destinations."""
    try:
        return planned.run()
    except CasckptError as error:
        more = "The updated tensors are now undefined; to repair them, load all of them, or update with check=True"
        raise type(error)(f"{error}. {more}", **error.__dict__) from error


def plan_update(
    reader: EntryReader, wants: Sequence[RegionRequest], held: Checkpoint | None, rank: int, *, check: bool
) -> Update:
    """Plan an update. The destinations that are not new hold the version ``held``."""
    keys = {reader.manifest.entries[want.entry].key for want in wants if not want.is_new}
    contents = None if held is None else _contents(held, rank, keys)
    return Update(reader, wants, contents, {} if held is None else held.frames, check)


def _contents(held: Checkpoint, rank: int, keys: Iterable[str]) -> Contents | None:
    """Return the held version of these keys, or None if its manifest is gone or unreadable."""

    def read(_: object, manifest: Manifest) -> Contents:
        contents = Contents(manifest, rank)
        contents.ready(keys)
        return contents

    try:
        return manifests.use(held.repo, held.commit, read)
    except _UNKNOWN as error:
        log.info("the update reads everything, because it cannot compare the held version: %s", error)
        return None


@dataclass
class Update:
    """An update, which is planned when it is created. ``known``: the frames of the cells of the version ``held``."""

    reader: EntryReader
    wants: Sequence[RegionRequest]
    held: Contents | None
    known: Frames
    check: bool = False
    _decoded: dict[Link, bytes] = field(default_factory=dict)  # the frames that were decoded since then
    _done: set[FilledRange] = field(default_factory=set)  # the ranges that hold correct data
    _differ: list[RegionRequest] = field(default_factory=list)  # the requests for tensors that are not equal
    _steps: dict[Hashable, Step] = field(default_factory=dict)
    _links: dict[str, list[Iterator[Link]]] = field(default_factory=dict)  # the links of the wanted cells, by key
    _equal: set[str] = field(default_factory=set)  # the keys of equal tensors
    _cells: Counter[int] = field(default_factory=Counter)  # the number of cells in each sink, by its id

    def __post_init__(self) -> None:
        self.reader = replace(self.reader, decoded=self._decoded)
        for want in self.wants:
            entry = self.reader.manifest.entries[want.entry]
            table = self.reader.manifest.extents(entry) if want.table is None else want.table
            before = None if want.is_new else self._held_table(entry)
            if before is not None and not self.check and _are_equal(before, table):
                self._equal.add(entry.key)
                continue
            self._differ.append(want)
            region = normalise(want.sink.region, table.shape)
            self._compare(_Place(entry.key, want.sink, region, self.known.get(entry.key, {})), before, table)

    def run(self) -> Frames:
        """Fill the destinations. Return the frames of the cells that they hold afterwards, and clear those ``known``.

        Raises the errors of a load.
        """
        tensors = [tensor for want in self.wants for tensor in want.sink.written]
        note_writes(tensors)
        if self._steps:
            self._take(list(self._steps.values()))
            wait_for_copies(tensors)
        self.reader.fill(self._left(self._done), self._done)
        frames = self._frames()
        self.known.clear()
        return frames

    def ranges(self) -> list[Range]:
        """Return the ranges of the wanted version's blobs that the update reads if it can compute all planned cells."""
        steps = self._steps.values()
        made = self._done.union(part(taker.sink, taker.unit) for step in steps for taker in step.takers)
        reads = self.reader.plan(self._left(made), made)
        frames = (where for step in steps for where in step.ranges if where[0] < self._behind)
        return [*frames, *reads.ranges]

    def _left(self, done: set[FilledRange]) -> list[RegionRequest]:
        """Return the requests that are not completely ``done``."""
        made = Counter(sink for sink, *_ in done)
        return [want for want in self._differ if made[id(want.sink)] < self._cells[id(want.sink)]]

    def _held_table(self, entry: Entry) -> ExtentTable | None:
        """Return the extents of a tensor's held version, or None if it is unknown or has a different shape or dtype."""
        if self.held is None:
            return None
        before = self.held.tensors.get(entry.key)
        if before is None or (before.kind, before.shape, before.dtype) != (entry.kind, entry.shape, entry.dtype):
            return None
        try:
            return self.held.manifest.extents(before)
        except _UNKNOWN:
            return None

    @property
    def _behind(self) -> int:
        """The number of the held version's first blob. They are numbered after those of the wanted version."""
        return len(self.reader.manifest.blob_sizes)

    def _frames(self) -> Frames:
        """Return the frames of the wanted cells that are in memory, by key."""
        frames = {key: self.known.get(key, {}) for key in self._equal}
        for key, wanted in self._links.items():
            known = self.known.get(key, {})
            at_hand = ((link, known.get(link) or self._decoded.get(link)) for link in chain.from_iterable(wanted))
            frames[key] = {link: frame for link, frame in at_hand if frame}
        return frames

    def _compare(self, at: _Place, before: ExtentTable | None, table: ExtentTable) -> None:
        """Plan a step for each cell that differs or must be checked, if it can be computed."""
        wanted_links = self._links.setdefault(at.key, [])
        for number, lo, hi in wanted_spans(table, at.region, table.cell):
            box = table.boxes[number]
            there: Sequence[Extent] = ()
            if before is not None and before.cell == table.cell and box in before.boxes:
                there = before.extents_in(before.boxes.index(box), lo, hi)
            for wanted in table.extents_in(number, lo, hi):
                span = within(table, wanted, lo, hi)
                wanted_links.append(span.all_links(wanted))
                self._cells[id(at.sink)] += span.size
                for held, both in common(there, wanted, span):
                    self._compare_span(at, box, held, wanted, both)

    def _compare_span(self, at: _Place, box: Box, held: Extent, wanted: Extent, span: Span) -> None:
        """Compare the cells of two extents.

        Compare them all together if the same frames lead from one extent to the other.
        """
        way = find_extent_route(held, wanted, span, at.kept)
        if way is None:
            for piece in span.apart() if span.size > 1 else ():
                self._compare_span(at, box, held, wanted, piece)
            return
        frames = [self._moves_of(extent, span, at.kept, is_undone=True) for extent in way.undone]
        frames += [self._moves_of(extent, span, at.kept, is_undone=False) for extent in way.decoded]
        moves = zip(*frames, strict=True) if frames else repeat(())
        digests = zip(span.each_digest(held), span.each_digest(wanted), strict=True)
        for (lo, hi), (old, new), of_cell in zip(span.bounds, digests, moves, strict=False):
            cell = StoredCell(wanted.blob, 0, (hi - lo) * span.itemsize, box, lo, hi, new)
            self._plan(at, old, cell, () if old == new else of_cell)

    def _plan(self, at: _Place, old: CellDigest, cell: StoredCell, moves: Sequence[Move]) -> None:
        """Plan the computation of a cell from ``old``, once for all destinations that hold ``old``."""
        if old == cell.digest and not self.check:
            self._done.add(part(at.sink, cell))
        elif at.sink.holds(cell.region):
            step = self._steps.setdefault((old, cell.digest), Step(cell, moves, []))
            step.takers.append(Consumer(at.sink, cell, place(at.sink, at.region, cell)))

    def _moves_of(self, extent: Extent, span: Span, kept: Mapping[Link, bytes], *, is_undone: bool) -> list[Move]:
        """Return the moves for an extent's frames, one for each cell of a span."""
        first = self._behind if is_undone else 0
        pairs = zip(span.links(extent), span.places(extent), strict=True)
        return [Move(link, (first + blob, at, size), is_undone, kept.get(link)) for link, (blob, at, size) in pairs]

    def _blob(self, number: int) -> BlobRef:
        if self.held is None or number < self._behind:
            return self.reader.manifest.blob(number)
        return self.held.manifest.blob(number - self._behind)

    def _take(self, steps: Sequence[Step]) -> None:
        """Perform all steps, in parallel."""
        reader, plain = self.reader, sum(step.cell.nbytes for step in steps)
        traits = reader.repo.storage.traits
        threads = traits.parallel if traits.remote else useful_threads(reader.threads, plain, len(steps))
        in_order = sorted(steps, key=lambda step: step.moves[-1].where if step.moves else (-1, 0, 0))
        weighed = [(step.work, step) for step in in_order]
        most = min(_LOT_BYTES, max(_LEAST_BYTES, sum(work for work, _ in weighed) // (2 * threads)))
        each = ([step for _, step in lot] for lot in in_batches(weighed, itemgetter(0), most))
        planned = [(lot, self._batches(lot)) for lot in each]
        batches = [batch for _, batches in planned for batch in batches]
        reader.progress.expect(plain)
        if reader.reads is not None:
            reader.reads.begin(self.ranges())
        shared = [batch for batch in batches if batch.blob < self._behind]
        own = [batch for batch in batches if batch.blob >= self._behind]  # other ranks may hold other versions
        with closing(self._slots(shared, reader.reads)) as slots, closing(self._slots(own, None)) as held:
            run_all(partial(self._run, slots, held), planned, threads)

    def _slots(self, batches: Sequence[Batch[None]], reads: HostReads | None) -> BlobReaders:
        return BlobReaders(self.reader.repo, self._blob, batches, shared=False, stays=lambda: False, reads=reads)

    def _batches(self, steps: Iterable[Step]) -> list[Batch[None]]:
        ranges = {where for step in steps for where in step.ranges}
        spare = sum(nbytes for _, _, nbytes in ranges) // _SPARE_SHARE
        gap = affordable_gap(ranges, most=self.reader.repo.storage.traits.read_gap, spare=spare)
        return plan_batches(((*where, None) for where in ranges), gap=gap, most=_LOT_BYTES)

    def _run(self, slots: BlobReaders, held: BlobReaders, lot: Lot) -> None:
        steps, batches = lot
        by_slots = ((slots if batch.blob < self._behind else held, batch) for batch in batches)
        frames = {where: data for some, batch in by_slots for where, data in _read(some, batch)}
        with self.reader.turns:
            for step in steps:
                if _is_made(step, frames):
                    self._done.update(part(taker.sink, taker.unit) for taker in step.takers)
                    self._decoded.update({
                        move.link: bytes(frames[move.where])
                        for move in step.moves if move.kept is None and not move.is_undone
                    })  # fmt: skip
        self.reader.progress(sum(step.cell.nbytes for step in steps))


def _are_equal(one: ExtentTable, other: ExtentTable) -> bool:
    """Return whether two tables have the same cells in the same extents. The blobs may differ."""
    first, second = ([(at.box, at.lo, at.hi, at.digests) for at in table.extents] for table in (one, other))
    return one.cell == other.cell and one.boxes == other.boxes and first == second


def _read(slots: BlobReaders, batch: Batch[None]) -> Iterator[tuple[Range, memoryview]]:
    """Yield the frames of a batch. Yield nothing if it cannot be read."""
    data = np.empty(batch.nbytes, np.uint8).data
    try:
        with slots.use(batch.blob) as slot:
            slot.reader().read_into(batch.offset, [data])
    except (NotFound, ShortObject, StorageError) as error:
        log.info("the update reads whole cells, because it cannot read their frames: %s", error)
        return
    for at, nbytes, _ in batch.items:
        yield (batch.blob, at, nbytes), data[at - batch.offset :][:nbytes]


def _is_made(step: Step, frames: Mapping[Range, memoryview]) -> bool:
    """Compute a cell from the held cell, and return whether the result is correct.

    If the result is wrong, the held cell may be overwritten.
    """
    first, *others = step.takers
    plain = scratch("updated", step.cell.nbytes).data if first.place is None else first.place
    if first.place is None:
        first.sink.copy_out(first.unit.region, plain)
    try:
        for move in step.moves:
            frame = frames[move.where] if move.kept is None else memoryview(move.kept)
            undo(frame, plain) if move.is_undone else decode(frame, plain, plain)
    except (KeyError, InvalidInput):  # a frame was not read, or cannot be decoded
        return False
    if cell_digest(plain) != step.cell.digest:
        return False
    for taker in step.takers if first.place is None and step.moves else others:
        taker.take(plain)
    return True
