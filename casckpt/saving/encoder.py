"""Encoding of changed cells: as frames against the previous version, where that takes less space.

A frame encodes a cell against its version in the parent checkpoint. It is decoded and compared before it counts,
because only a load would find a bad frame behind a good hash.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

import numpy as np

from casckpt.base.parallel import usable_cores
from casckpt.errors import CasckptError, InvalidInput
from casckpt.format import dtypes
from casckpt.format.encodings.chains import decode_chain
from casckpt.format.encodings.frames import MIN_CELL, decode, encode_delta, encode_planes, undo
from casckpt.format.encodings.scratch import scratch
from casckpt.format.extents import StoredCell
from casckpt.format.keys import blob_key
from casckpt.format.names import CellDigest
from casckpt.format.sections.index import Name
from casckpt.plan.bases import choose_base
from casckpt.plan.reuse import ReusableCells
from casckpt.repository.repository import Repository
from casckpt.saving.local_entries import Cell, LocalEntry
from casckpt.saving.options import Compress, SaveOptions
from casckpt.saving.previous_cells import CellName, HeldCell, HeldFrame, PreviousCells
from casckpt.storage.base import Reader, ShortObject
from casckpt.storage.forking import PerProcess

MAX_RUNS = 2
"""Of a process: the least recently saved are given up first."""


@dataclass
class PutRate:
    """How fast a storage took blobs, of those that were put beside each other. None of them: as fast as can be."""

    nbytes: int = 0
    seconds: float = 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        """Take up how long a blob took."""
        self.nbytes, self.seconds = self.nbytes + nbytes, self.seconds + seconds

    @property
    def bytes_per_second(self) -> float:
        """Of one writer."""
        return self.nbytes / self.seconds if self.seconds else float("inf")


class Pause(NamedTuple):
    """How long a stream is left alone. ``until``: the number of the save that tries it again."""

    until: int
    saves: int


@dataclass
class RunMemory:
    """What this process remembers of a run for its next save.

    It is found by store and run, because some programs make a new DCP writer or open the store again for each save.
    ``saves``: the number of saves so far. ``in_vain``: entries whose cells did not become smaller as frames.
    """

    rate: PutRate
    held: PreviousCells = field(default_factory=PreviousCells)
    saves: int = 0
    in_vain: dict[Name, Pause] = field(default_factory=dict)

    def pauses(self, name: Name) -> bool:
        """Tell whether a stream is left alone in this save."""
        found = self.in_vain.get(name)  # at once: another thread may take it out
        return found is not None and found.until > self.saves

    def pause(self, name: Name, saves: int, most: int) -> None:
        """Leave a stream alone for so many saves; for twice as many as the last time, up to ``most``, if it was."""
        last = self.in_vain.get(name)
        if last is None:
            self.in_vain[name] = Pause(self.saves + saves, saves)
        elif last.until <= self.saves:  # else another thread has just done this
            again = min(2 * last.saves, most)
            self.in_vain[name] = Pause(self.saves + again, again)


class _Runs:
    """By store and run."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, str], RunMemory] = OrderedDict()

    def of(self, store: str, run: str) -> RunMemory:
        with self._lock:
            if (store, run) not in self._kept:
                rates = (kept.rate for (other, _), kept in self._kept.items() if other == store)
                self._kept[store, run] = RunMemory(next(rates, None) or PutRate())
            self._kept.move_to_end((store, run))
            while len(self._kept) > MAX_RUNS:
                self._kept.popitem(last=False)
            return self._kept[store, run]

    def give_up(self, store: str, run: str) -> None:
        with self._lock:
            self._kept.pop((store, run), None)


_RUNS = PerProcess(_Runs)


def kept_of(repo: Repository, run: str) -> RunMemory:
    """Return what is kept of a run; the same for threads that ask at once."""
    return _RUNS.get().of(repo.marker.store_id, run)


def give_up(repo: Repository, run: str) -> None:
    """Keep nothing of a run any more."""
    _RUNS.get().give_up(repo.marker.store_id, run)


log = logging.getLogger(__name__)

_HALVES = frozenset({"bfloat16", "float16"})
_CODER_RATE = 0.8e9  # bytes that a core encodes in a second, as planes
_TRIES = 8  # cells of a stream, one where all of them were in vain before
_PAUSE, _LONGEST_PAUSE = 8, 64  # saves until a stream is tried again; twice as many each time that it is in vain
_SAVED = 0.2  # share of the bytes that planes save of most states


@contextmanager
def coding(
    repo: Repository, known: ReusableCells, options: SaveOptions, *, offered: Compress
) -> Iterator[Coder | None]:
    """Yield the encoder of a save, or None if the save does not encode cells.

    ``offered``: applies unless the options say otherwise. Afterwards memory holds only cells of this save.
    """
    compress = offered if options.compress is None else options.compress
    if compress == "off":
        give_up(repo, options.run)
        yield None
        return
    kept = kept_of(repo, options.run)
    kept.saves += 1
    with ExitStack() as opened:
        alone = compress == "always" or _is_slow(repo, kept.rate)
        log.debug("cells without a base are %s", "encoded" if alone else "stored as they are: the storage is fast")
        coder = Coder(repo, known, kept, dtypes.FLOATS if compress == "always" else _HALVES, alone, opened)
        yield coder
    kept.held.only(coder.names)


def _is_slow(repo: Repository, rate: PutRate) -> bool:
    """Would a save end earlier if its cells were encoded by themselves, as far as is known?"""
    return repo.storage.traits.uploads * rate.bytes_per_second < _SAVED * _CODER_RATE * usable_cores()


@dataclass(frozen=True, slots=True)
class EncodedCell:
    """A frame, and the known cell that it is told from."""

    frame: bytes
    base: StoredCell | None


@dataclass
class Coder:
    """Encodes cells in one save by one rank. Safe for use by threads.

    ``deltas``: dtypes of which to tell what changed. ``alone``: encode cells, too, that have no base. ``names``: of
    the cells that it may be asked for. ``opened``: what is read from.
    """

    repo: Repository
    known: ReusableCells
    kept: RunMemory
    deltas: frozenset[str]
    alone: bool
    opened: ExitStack
    names: set[CellName] = field(default_factory=set)
    _counts: dict[Name, int] = field(default_factory=dict)  # cells of each stream
    _tries: dict[Name, int] = field(default_factory=dict)  # of them that were in vain; -1 once one was worth it
    _links: dict[tuple[Name, int, int], int | None] = field(default_factory=dict)
    _readers: dict[int, Reader] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def expect(self, sources: Sequence[LocalEntry], work: Iterable[Iterable[Cell]]) -> None:
        """Take up which cells the save has; those of several calls count together."""
        for cells in work:
            for cell in cells:
                source = sources[cell.source]
                if self.takes(source, cell):
                    self._counts[source.name] = self._counts.get(source.name, 0) + 1
                    if source.dtype in self.deltas:
                        self.names.add(_name(source, cell))

    def likely_changes(self, cell: Cell) -> bool:
        """Did a cell change in the save before, and is told by that? Then nobody need look before it is copied."""
        old = cell.known
        return old is not None and old.base is not None and self.known.blobs[old.blob].uploader == self.known.newest

    def takes(self, source: LocalEntry, cell: Cell) -> bool:
        """Is a cell worth a try?"""
        asked = source.dtype in self.deltas or (self.alone and source.dtype in dtypes.FLOATS)
        return asked and cell.nbytes >= MIN_CELL and not self.kept.pauses(source.name)

    def encode(self, source: LocalEntry, cell: Cell, plain: memoryview, digest: CellDigest) -> EncodedCell | None:
        """Encode a cell that is to be stored, with its bytes ``plain``; None to store these."""
        width = dtypes.coded_width(source.dtype)
        if source.dtype in self.deltas:
            coded = self._delta(source, cell, plain, width, digest)
            if coded is not None:
                return coded
            if not self.kept.pauses(source.name):  # or nobody asks for it soon
                self.kept.held.keep(_name(source, cell), digest, plain)
        frame = self._tried(source, encode_planes(plain, width)) if self.alone else None
        found = scratch("version", plain.nbytes).data
        return EncodedCell(frame, None) if frame is not None and _decodes(frame, found, plain) else None

    def _tried(self, source: LocalEntry, frame: bytes | None) -> bytes | None:
        """Return the same, and note whether it was worth it: a stream of which no cell is, is left for some saves."""
        name, tries = source.name, self._tries.get(source.name, 0)
        self._tries[name] = tries = tries + 1 if frame is None and tries >= 0 else -1
        if tries < 0:
            self.kept.in_vain.pop(name, None)
        elif name in self.kept.in_vain or tries >= min(_TRIES, self._counts.get(name, 0)):
            self.kept.pause(name, _PAUSE, _LONGEST_PAUSE)
        return frame

    def note_known(
        self, source: LocalEntry, cell: Cell, plain: memoryview, digest: CellDigest, *, is_coded: bool
    ) -> None:
        """Keep the bytes of a cell that is stored already, for the next save."""
        name = _name(source, cell)
        if source.dtype in self.deltas and not is_coded:
            self.kept.held.keep(name, digest, plain)
            return
        held = self.kept.held.take(name)
        if held is not None and held.digest == digest:  # else the frames of this version are not at hand
            self.kept.held.put(name, held)

    def _delta(
        self, source: LocalEntry, cell: Cell, plain: memoryview, width: int, digest: CellDigest
    ) -> EncodedCell | None:
        """Encode a cell as what changed; None if no base is of use. What is held of it may be lost then."""
        old = cell.known
        if old is None or not self.known.usable_cell(old):
            return None
        link = self._link(source, cell)
        if link is None:
            return None
        name, chain = _name(source, cell), list(old.chain)
        held = self.kept.held.take(name)
        if held is None or held.digest != old.digest or len(held.frames) != len(chain) - 1:
            held = self._read(old)
        if held is None:
            return None
        older = held if not link else _older(held, chain[1 : link + 1])
        if older is None:
            self.kept.held.put(name, held)
            return None
        base = memoryview(older.plain)
        frame = self._tried(source, encode_delta(plain, width, base))
        if frame is None:
            self.kept.held.put(name, older)
            return None
        if not _decodes(frame, base, plain):
            return None
        frames = (HeldFrame(frame, older.digest), *older.frames)
        self.kept.held.put(name, HeldCell(digest, older.plain, frames))  # it has become the new version, in place
        return EncodedCell(frame, chain[link])

    def _link(self, source: LocalEntry, cell: Cell) -> int | None:
        """Choose the base of a cell: how many links behind the parent's version. Those of one row have one answer."""
        table = self.known.parent_table(source.name, source.dtype, source.shape)
        if table is None:
            return None
        box = table.boxes.index(cell.group.box)
        (extent,) = table.extents_in(box, cell.cut.lo, cell.cut.hi)
        if extent.coding is None:
            return 0
        name = (source.name, box, extent.lo)
        if name not in self._links:
            *deltas, _ = [table.stored_bytes(one) for one in extent.chain]
            nbytes = (extent.hi - extent.lo) * table.itemsize
            self._links[name] = choose_base(deltas, nbytes, f"{source.key} {extent.box} {extent.lo}")
        return self._links[name]

    def _read(self, cell: StoredCell) -> HeldCell | None:
        """Read a cell, with its frames, from where that is cheap: a local store, or this host's cache."""
        stored: list[bytearray] = []

        def read(link: StoredCell) -> bytearray:
            stored.append(self._bytes_of(link))
            return stored[-1]

        try:
            plain = decode_chain(cell, read)
        except (CasckptError, ShortObject, _TooFar) as error:
            log.debug("a base is not used: %s", error)
            return None
        *links, _ = cell.chain
        every = zip(links, reversed(stored), strict=False)
        frames = tuple(HeldFrame(bytes(data), link.base.digest) for link, data in every if link.base is not None)
        return HeldCell(cell.digest, plain, frames)

    def _bytes_of(self, cell: StoredCell) -> bytearray:
        found = bytearray(cell.stored)
        self._reader(cell.blob).read_into(cell.offset, [memoryview(found)])
        return found

    def _reader(self, blob: int) -> Reader:
        with self._lock:
            if blob not in self._readers:
                self._readers[blob] = self.opened.enter_context(self._open(blob))
            return self._readers[blob]

    def _open(self, blob: int) -> AbstractContextManager[Reader]:
        ref = self.known.blobs[blob]
        cached = self.repo.blob_cache.open(ref)
        if cached is not None:
            return cached
        if self.repo.storage.traits.remote:
            raise _TooFar
        return self.repo.storage.open(blob_key(ref.uploader, ref.hash))


class _TooFar(Exception):
    """A base would have to be read over a network."""


def _name(source: LocalEntry, cell: Cell) -> CellName:
    return source.name, cell.group.box, cell.cut.lo, cell.cut.hi


def _older(held: HeldCell, bases: Sequence[StoredCell]) -> HeldCell | None:
    """Make of what is held the last of the versions that one goes back through, in place.

    None, and nothing is changed, if what is held did not come by the same ones.
    """
    frames = held.frames[: len(bases)]
    if [one.base for one in frames] != [one.digest for one in bases]:
        return None
    np.bitwise_or.reduce(np.frombuffer(held.plain, np.uint8))  # read in order, or each element waits for memory
    for frame in frames:
        undo(memoryview(frame.data), memoryview(held.plain))
    return HeldCell(bases[-1].digest, held.plain, held.frames[len(bases) :])


def _decodes(frame: bytes, base: memoryview, plain: memoryview) -> bool:
    """Does a frame decode to ``plain``, in the memory of its base, which becomes that?"""
    with suppress(InvalidInput):  # it is no frame at all
        decode(memoryview(frame), base, base)
        if _equal(base, plain):
            return True
    log.error("a cell that was encoded decodes to something else, and is stored as it is; please report this bug")
    return False


def _equal(one: memoryview, other: memoryview) -> bool:
    """Are the bytes the same? Eight at a time, and without the GIL."""
    words = one.nbytes // 8
    same = scratch("flags", words).view(bool)
    np.equal(np.frombuffer(one, "<u8", words), np.frombuffer(other, "<u8", words), out=same)
    return bool(same.all()) and one[8 * words :] == other[8 * words :]
