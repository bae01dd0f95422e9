"""Encodes changed cells as frames against their previous version, where this takes less space.

A frame encodes a cell against its version in the parent checkpoint. A save decodes each frame and compares the result
with the cell. Otherwise, only a load would detect a bad frame, because the frame's own hash would be correct.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple, TypeAlias

import numpy as np

from casckpt.errors import CasckptError, NotFound
from casckpt.format import dtypes
from casckpt.format.encodings.frames import MIN_CELL, decode_chain, decodes, encode_delta, encode_planes, undo
from casckpt.format.extents import StoredCell
from casckpt.format.keys import blob_key
from casckpt.format.names import CellDigest
from casckpt.format.regions import Box
from casckpt.format.sections.index import Name
from casckpt.plan.reuse import ReusableCells
from casckpt.plan.routes import choose_base
from casckpt.repository.repository import Repository
from casckpt.saving.local_entries import Cell, LocalEntry, SmallCells
from casckpt.saving.options import Compress, SaveOptions
from casckpt.storage.base import Reader, ShortObject
from casckpt.storage.forking import PerProcess
from casckpt.tensors.memory import copy_bytes

CellName: TypeAlias = tuple[Name, Box, int, int]
"""The elements of a cell: the range [lo, hi) of a box in a stream."""
Encoded: TypeAlias = tuple[bytes, StoredCell | None]
"""A frame, and the known cell that is its base. The base is None for planes."""


class HeldFrame(NamedTuple):
    """A frame that was decoded and compared. ``base``: the digest of the cell that `undo` restores."""

    data: bytes
    base: CellDigest


@dataclass(frozen=True, slots=True)
class HeldCell:
    """The bytes of one version of a cell. ``frames``: the chain that encodes it, beginning with its own frame."""

    digest: CellDigest
    plain: bytearray
    frames: tuple[HeldFrame, ...] = ()


MAX_RUNS = 2
"""The maximum number of runs that a process keeps in memory. It drops the least recently saved run first."""


class Pause(NamedTuple):
    """A break in the encoding of a stream. ``until``: the number of the save that resumes encoding."""

    until: int
    saves: int


@dataclass
class RunMemory:
    """The data about a run that this process keeps for its next save.

    It is keyed by store and run, because some programs create a DCP writer or open the store for every save.
    ``held``: the cells that it saved. ``saves``: the number of saves so far. ``in_vain``: streams whose cells did not
    become smaller as frames.
    """

    held: dict[CellName, HeldCell] = field(default_factory=dict)
    saves: int = 0
    in_vain: dict[Name, Pause] = field(default_factory=dict)

    def take(self, name: CellName) -> HeldCell | None:
        """Remove a held cell and return it. The caller may change it in place and put it back.

        Removal ensures that a save in another thread, or a save after an error, never sees partly changed bytes.
        """
        return self.held.pop(name, None)

    def keep(self, name: CellName, digest: CellDigest, plain: memoryview) -> None:
        """Hold a copy of a cell's bytes. Reuses the memory of the held version."""
        held = self.take(name)
        buffer = bytearray(plain.nbytes) if held is None or len(held.plain) != plain.nbytes else held.plain
        copy_bytes(memoryview(buffer), plain)
        self.held[name] = HeldCell(digest, buffer)

    def pauses(self, name: Name) -> bool:
        """Return whether encoding of a stream is paused for this save."""
        pause = self.in_vain.get(name)  # a single access, because another thread may remove it
        return pause is not None and pause.until > self.saves

    def pause(self, name: Name, saves: int, most: int) -> None:
        """Stop encoding a stream for ``saves`` saves.

        If it was paused before, double the length of the last pause, up to ``most``.
        """
        last = self.in_vain.get(name)
        if last is None:
            self.in_vain[name] = Pause(self.saves + saves, saves)
        elif last.until <= self.saves:  # otherwise another thread has already done this
            again = min(2 * last.saves, most)
            self.in_vain[name] = Pause(self.saves + again, again)


class _Runs:
    """The memory of each run, by store and run."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._memories: OrderedDict[tuple[str, str], RunMemory] = OrderedDict()

    def of(self, store: str, run: str) -> RunMemory:
        with self._lock:
            memory = self._memories.setdefault((store, run), RunMemory())
            self._memories.move_to_end((store, run))
            while len(self._memories) > MAX_RUNS:
                self._memories.popitem(last=False)
            return memory

    def forget(self, store: str, run: str) -> None:
        with self._lock:
            self._memories.pop((store, run), None)


_RUNS = PerProcess(_Runs)


def run_memory(repo: Repository, run: str) -> RunMemory:
    """Return the memory of a run. Concurrent calls get the same object."""
    return _RUNS.get().of(repo.marker.store_id, run)


def forget_run(repo: Repository, run: str) -> None:
    """Drop a run's memory."""
    _RUNS.get().forget(repo.marker.store_id, run)


log = logging.getLogger(__name__)

_HALVES = frozenset({"bfloat16", "float16"})
_TRIES = 8  # cells of a stream to try; only one if all earlier attempts saved nothing
_PAUSE, _LONGEST_PAUSE = 8, 64  # saves until the next attempt to encode a stream; doubled after each failure


@contextmanager
def coding(
    repo: Repository, known: ReusableCells, options: SaveOptions, *, offered: Compress
) -> Iterator[Coder | None]:
    """Yield the encoder of a save, or None if the save does not encode cells.

    ``offered``: the encoding that applies unless the options specify one. Afterwards, the memory holds only cells of
    this save.
    """
    compress = offered if options.compress is None else options.compress
    if compress == "off":
        forget_run(repo, options.run)
        yield None
        return
    memory = run_memory(repo, options.run)
    memory.saves += 1
    with ExitStack() as opened:
        alone = compress == "always" or repo.storage.traits.remote  # on a local disk, it takes longer than it saves
        coder = Coder(repo, known, memory, dtypes.FLOATS if compress == "always" else _HALVES, alone, opened)
        yield coder
    for name in list(memory.held):
        if name not in coder.names:  # the state no longer has the cell, or divides the tensor differently
            memory.take(name)


@dataclass
class Coder:
    """Encodes cells in one save on one rank. Thread-safe.

    ``deltas``: dtypes whose cells are encoded against a base. ``alone``: whether to also encode cells without a base.
    ``names``: the cells of this save. ``opened``: the stack that closes the readers.
    """

    repo: Repository
    known: ReusableCells
    memory: RunMemory
    deltas: frozenset[str]
    alone: bool
    opened: ExitStack
    names: set[CellName] = field(default_factory=set)
    _counts: dict[Name, int] = field(default_factory=dict)  # the number of cells in each stream
    _tries: dict[Name, int] = field(default_factory=dict)  # the number of failed attempts; -1 after a success
    _links: dict[tuple[Name, int, int], int | None] = field(default_factory=dict)
    _readers: dict[int, Reader] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def expect(self, sources: Sequence[LocalEntry], work: Iterable[Iterable[Cell | SmallCells]]) -> None:
        """Register the cells of the save. Later calls add more cells."""
        for cells in work:
            for cell in cells:
                if isinstance(cell, Cell) and self.takes(source := sources[cell.source], cell):
                    self._counts[source.name] = self._counts.get(source.name, 0) + 1
                    if source.dtype in self.deltas:
                        self.names.add(_name(source, cell))

    def likely_changes(self, cell: Cell) -> bool:
        """Return whether the last save stored a cell as a delta. Such a cell will probably change again."""
        old = cell.known
        return old is not None and old.base is not None and self.known.blobs[old.blob].uploader == self.known.newest

    def takes(self, source: LocalEntry, cell: Cell) -> bool:
        """Return whether the save should try to encode a cell."""
        is_wanted = source.dtype in self.deltas or (self.alone and source.dtype in dtypes.FLOATS)
        return is_wanted and cell.nbytes >= MIN_CELL and not self.memory.pauses(source.name)

    def encode(self, source: LocalEntry, cell: Cell, plain: memoryview, digest: CellDigest) -> Encoded | None:
        """Encode a new cell with the bytes ``plain``. Return None if the save should store the bytes themselves."""
        width = dtypes.coded_width(source.dtype)
        if source.dtype in self.deltas:
            coded = self._delta(source, cell, plain, width, digest)
            if coded is not None:
                return coded
            if not self.memory.pauses(source.name):  # otherwise the next save does not need it
                self.memory.keep(_name(source, cell), digest, plain)
        frame = self._tried(source, encode_planes(plain, width)) if self.alone else None
        return (frame, None) if frame is not None and decodes(frame, plain) else None

    def _tried(self, source: LocalEntry, frame: bytes | None) -> bytes | None:
        """Count the attempt, and return ``frame``. Pause a stream for some saves if no attempt succeeded."""
        name, tries = source.name, self._tries.get(source.name, 0)
        self._tries[name] = tries = tries + 1 if frame is None and tries >= 0 else -1
        if tries < 0:
            self.memory.in_vain.pop(name, None)
        elif name in self.memory.in_vain or tries >= min(_TRIES, self._counts.get(name, 0)):
            self.memory.pause(name, _PAUSE, _LONGEST_PAUSE)
        return frame

    def note_known(
        self, source: LocalEntry, cell: Cell, plain: memoryview, digest: CellDigest, *, is_coded: bool
    ) -> None:
        """Keep the bytes of a cell that is already stored, for the next save."""
        name = _name(source, cell)
        if source.dtype in self.deltas and not is_coded:
            self.memory.keep(name, digest, plain)
            return
        held = self.memory.take(name)
        if held is not None and held.digest == digest:  # otherwise the frames of this version are not in memory
            self.memory.held[name] = held

    def _delta(
        self, source: LocalEntry, cell: Cell, plain: memoryview, width: int, digest: CellDigest
    ) -> Encoded | None:
        """Encode a cell against its base. Return None if it does not have a useful base.

        If this returns None, the held version may be lost.
        """
        old = cell.known
        if old is None or not self.known.usable_cell(old):
            return None
        link = self._link(source, cell)
        if link is None:
            return None
        name, chain = _name(source, cell), list(old.chain)
        held = self.memory.take(name)
        if held is None or held.digest != old.digest or len(held.frames) != len(chain) - 1:
            held = self._read(old)
        if held is None:
            return None
        older = held if not link else _older(held, chain[1 : link + 1])
        if older is None:
            self.memory.held[name] = held
            return None
        base = memoryview(older.plain)
        frame = self._tried(source, encode_delta(plain, width, base))
        if frame is None:
            self.memory.held[name] = older
            return None
        if not decodes(frame, plain, base):
            return None
        frames = (HeldFrame(frame, older.digest), *older.frames)
        self.memory.held[name] = HeldCell(digest, older.plain, frames)  # the buffer now holds the new version
        return frame, chain[link]

    def _link(self, source: LocalEntry, cell: Cell) -> int | None:
        """Choose a cell's base, and return it as the number of links from the parent's version.

        All cells of an extent have the same number.
        """
        table = self.known.parent.table(source.name, source.dtype, source.shape)
        if table is None:
            return None
        box = table.boxes.index(cell.box)
        (extent,) = table.extents_in(box, cell.cut.lo, cell.cut.hi)
        if extent.coding is None:
            return 0
        name = (source.name, box, extent.lo)
        if name not in self._links:
            *deltas, _ = [table.stored_bytes(link) for link in extent.chain]
            nbytes = (extent.hi - extent.lo) * table.itemsize
            self._links[name] = choose_base(deltas, nbytes, f"{source.key} {extent.box} {extent.lo}")
        return self._links[name]

    def _read(self, cell: StoredCell) -> HeldCell | None:
        """Read a cell and its frames from a local store, or from this host's cache."""
        stored: list[bytearray] = []

        def read(link: StoredCell) -> bytearray:
            stored.append(bytearray(link.stored))
            self._reader(link.blob).read_into(link.offset, [memoryview(stored[-1])])
            return stored[-1]

        try:
            plain = decode_chain(cell, read)
        except (CasckptError, ShortObject) as error:
            log.debug("casckpt cannot use a base: %s", error)
            return None
        *links, _ = cell.chain
        every = zip(links, reversed(stored), strict=False)
        frames = tuple(HeldFrame(bytes(data), link.base.digest) for link, data in every if link.base is not None)
        return HeldCell(cell.digest, plain, frames)

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
            raise NotFound("a base is only available over the network")
        return self.repo.storage.open(blob_key(ref.uploader, ref.hash))


def _name(source: LocalEntry, cell: Cell) -> CellName:
    return source.name, cell.box, cell.cut.lo, cell.cut.hi


def _older(held: HeldCell, bases: Sequence[StoredCell]) -> HeldCell | None:
    """Undo a held cell's frames, in place, until the cell has the version of the last of ``bases``.

    If the cell's frames have different bases, return None and change nothing.
    """
    frames = held.frames[: len(bases)]
    if [frame.base for frame in frames] != [base.digest for base in bases]:
        return None
    # reads the bytes into the cache in order, which is faster than random access
    np.bitwise_or.reduce(np.frombuffer(held.plain, np.uint8))
    for frame in frames:
        undo(memoryview(frame.data), memoryview(held.plain))
    return HeldCell(bases[-1].digest, held.plain, held.frames[len(bases) :])
