"""Shares the reads of a host's ranks: bytes that several ranks need are read from a remote store only once.

The ranks share a folder in this host's memory. It contains a file for each blob, with the bytes read so far at their
offsets. Each file ends with one state byte for each block, which is 1 if the block has been written. A rank that needs
unwritten blocks locks them, reads them from the store into its own tensors, writes them to the file, and then sets
their state bytes. If a process dies, the kernel releases its locks.

Each rank also writes a file with the ranges that it needs, which is empty for a rank that reads alone. If no other
rank of this host needs a range, a rank reads it directly and does not write it to memory.

Some blobs are also passed between hosts (`casckpt.loading.job_reads`). On each host, one rank brings such a blob: it
reads the blob from the store, or receives it from another host. It holds locks on a separate file, its gate, at the
positions of the bytes that it has not written yet. The other ranks wait for these locks.

If a shared file cannot be used, the process reads from the store, and the load does not fail. A load verifies the
cells that it reads here.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from math import inf
from pathlib import Path
from threading import Lock

import numpy as np
from typing_extensions import override

from casckpt.errors import CasckptError
from casckpt.format.blob import SPAN
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.columns import Ints
from casckpt.repository.blob_cache import PARTS, BlobCache, Unusable, usable
from casckpt.storage.base import BLOCK, Reader, ShortObject
from casckpt.storage.local.newfile import write_all
from casckpt.storage.local.reader import LocalReader

LEAST_ROOM = 512 << 20  # bytes; with less memory, ranks would evict bytes that others have not read yet
PATIENCE = 180.0  # seconds to wait for a process that reads the same bytes: as long as for a silent server
_PAUSES = (0.001, 0.05)  # the first and the longest pause between two attempts to lock, in seconds
_GATE_PAUSE = 0.02  # the longest pause while bytes arrive, in seconds
_STALE = 3600  # seconds without a new file after which a killed job's files are removed
_THERE = b"\1"

log = logging.getLogger(__name__)


class HostReads:
    """The reads of one rank in one load.

    ``folder``: the name of a folder for this checkpoint. ``name``: LOAD-RANK. LOAD is unique, and the same on all
    ranks. ``sharing``: the number of ranks on this host that share reads. ``patience``: how long this rank waits for
    another one without progress, in seconds. It is at most `PATIENCE`. ``passed``: the blobs that hosts pass to each
    other, each with the rank of this host that brings it, and the rank that reads it from the store.
    """

    def __init__(self, cache: BlobCache, folder: str, name: str, sharing: int, patience: float = inf) -> None:
        self.cache = cache
        self._folder = cache.root / PARTS / folder
        self._wants, self._done = self._folder / f"{name}-wants", self._folder / f"{name}-done"
        self._sharing, self.patience = sharing, min(patience, PATIENCE)
        self._others: Sequence[Ints] | None = None  # the ranges of each other rank, once all have written them
        self._is_on = False
        self.passed: Mapping[int, tuple[int, int]] = {}
        self._passing = 0  # the number of ranks of this host that use them
        self._alive: Callable[[], object] = bool
        load, _, rank = name.rpartition("-")
        self._own = cache.root / PARTS / load  # the gates of this load; another job may remove ``folder``
        self._rank = int(rank)
        self._gate = self._gate_of(self._rank)
        self._held_fd = -1  # of this rank's gate, if it brings blobs
        self._gates: dict[int, int] = {}  # the files of other gates, by rank
        self._gates_lock = Lock()

    def room(self, nbytes: int) -> int:
        """Return how many bytes the ranks of this host may share.

        0 if this rank, which needs ``nbytes``, reads alone, which is logged once.
        """
        with self.cache.tried():
            if not self.cache.is_off:
                room = self.cache.room()
                if room >= min(nbytes, LEAST_ROOM):
                    return room
                raise Unusable(f"{self.cache.root} has room for only {room} bytes")
        return 0

    def expect(self, passed: Mapping[int, tuple[int, int]], ranks: int, alive: Callable[[], object]) -> None:
        """Set which blobs are ``passed`` between hosts. ``ranks``: how many ranks of this host use them.

        ``alive``: called at intervals while this rank waits for their bytes.
        """
        self.passed, self._passing, self._alive = passed, ranks, alive

    def begin(self, ranges: Sequence[tuple[int, int, int]]) -> bool:
        """Announce the ranges that this rank needs: (blob number, offset, bytes). Return whether to share reads.

        Only the first call announces ranges.
        """
        if self._is_on:
            return not self.cache.is_off
        shares = self.room(sum(nbytes for _, _, nbytes in ranges)) > 0
        with self.cache.tried(), usable(self.cache.root):
            self.cache.make_folder()
            if self.passed:
                self._own.mkdir(parents=True, exist_ok=True)
            self._announce(_merged(ranges if shares else ()))  # other ranks must know that this one reads alone
            self._remove_stale()
            self._is_on = True
        return self._is_on and shares

    def _announce(self, ranges: Ints, *, retry: bool = True) -> None:
        """Write the ranges that this rank needs. Another job that loads this checkpoint may remove the folder."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _write(self._wants, ranges)
        except (FileExistsError, FileNotFoundError):
            if not retry:
                raise
            self._announce(ranges, retry=False)

    def end(self) -> None:
        """Record that this rank has read everything. The last rank of this host removes the folder."""
        if not self._is_on:  # this rank does not need any bytes, or has failed
            self.begin(())
        while self._gates:
            os.close(self._gates.popitem()[1])
        if self._is_on:
            self._is_on = False
            with suppress(OSError):
                try:
                    os.replace(self._wants, self._done)
                except FileNotFoundError:  # another job has removed the folder, and a rank may have made it again
                    self._done.touch()
                if len(self._files_of_ranks("done")) == self._sharing:
                    shutil.rmtree(self._folder, ignore_errors=True)
            with suppress(OSError):
                if self.passed:
                    (self._own / f"{self._rank}-done").touch()
                    if sum(name.endswith("-done") for name in os.listdir(self._own)) == self._passing:
                        shutil.rmtree(self._own, ignore_errors=True)

    def reader(self, number: int, ref: BlobRef, source: Reader) -> Reader:
        """Return a reader of blob ``number`` that shares its reads. ``source``: the blob in the store."""
        return _SharedReader(self, number, ref, source)

    @contextmanager
    def bringing(self) -> Iterator[None]:
        """Let the other ranks wait for what this rank brings, until `put` or `release` is called for it."""
        temporary = self._gate.with_suffix(".tmp")
        with self.cache.tried(), usable(self._folder):
            self.cache.room()  # creates the private folder
            for folder in (self._folder, self._own):
                folder.mkdir(parents=True, exist_ok=True)
            self._held_fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _lock(self._held_fd, temporary, fcntl.F_WRLCK, 0, 0)
            finally:  # the other ranks do not wait for a gate without locks
                temporary.replace(self._gate)
        try:
            yield
        finally:
            if self._held_fd >= 0:
                self.release(0, 0, 0)
                os.close(self._held_fd)
                self._held_fd = -1

    def put(self, number: int, size: int, offset: int, data: memoryview) -> None:
        """Write bytes of a blob that this rank brings. If that fails, the ranks read them from the store."""
        if not self.cache.is_off:
            with self.cache.tried(), self.opened(number, size, create=True) as part:
                if part is not None:
                    part.write(offset, [data])
        self.release(number, offset, data.nbytes)

    def release(self, number: int, offset: int, nbytes: int) -> None:
        """Let the other ranks read these bytes. 0 bytes: everything from ``offset`` on."""
        if self._held_fd >= 0:
            with suppress(OSError, Unusable):
                _lock(self._held_fd, self._gate, fcntl.F_UNLCK, number * SPAN + offset, nbytes)
                os.utime(self._held_fd)  # those who wait see that this rank makes progress

    def wait(self, number: int, start: int, stop: int) -> None:
        """Wait until these bytes are there, or no rank brings them. Raises Unusable without progress for too long."""
        if number not in self.passed:
            return
        who, seen, since, pause = self.passed[number][0], -1, 0.0, _PAUSES[0]
        while (sign := self._sign(who, number * SPAN + start, stop - start)) is not None:
            if sign != seen:
                seen, since = sign, time.monotonic()
                self._alive()
            elif time.monotonic() - since > self.patience:
                raise Unusable(f"rank {who} has not brought bytes of {self.path(number)} for {self.patience:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _GATE_PAUSE)

    def _sign(self, who: int, lo: int, nbytes: int) -> int | None:
        """Return a number that changes with the progress of a rank, or None if a range of its gate is not locked."""
        with usable(self._folder), self._gates_lock:
            if who not in self._gates:
                try:
                    self._gates[who] = os.open(self._gate_of(who), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                except FileNotFoundError:  # it has not begun, or the folder was removed
                    return 0 if self._own.exists() else None
            found = fcntl.fcntl(self._gates[who], fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, lo, nbytes))
            is_free = struct.unpack_from("h", found)[0] == fcntl.F_UNLCK
            return None if is_free else os.fstat(self._gates[who]).st_mtime_ns

    def _gate_of(self, rank: int) -> Path:
        return self._own / f"{rank}-gate"

    def drop(self, number: int) -> None:
        """Remove the shared bytes of a blob, because some of them are wrong."""
        who, sender = self.passed.get(number, (-1, -1))
        if who != sender:
            log.warning("bytes that rank %d passed on are wrong; this rank reads them from the store", sender)
        with suppress(OSError):
            self.path(number).unlink()

    def path(self, number: int) -> Path:
        """Return the file with the shared bytes of a blob."""
        return self._folder / str(number)

    @contextmanager
    def opened(self, number: int, size: int, *, create: bool) -> Iterator[_Part | None]:
        """Open the file of a blob of ``size`` bytes. Yield None if it is missing, or if there is no room for it."""
        path = self.path(number)
        if create and not path.exists() and not self.cache.make_room(size):
            yield None
            return
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        with usable(path):
            try:
                fd = os.open(path, flags, 0o600)
            except FileNotFoundError:  # this rank did not create it, or the folder was removed
                fd = -1
        if fd < 0:
            yield None
            return
        try:
            part = _Part(fd, size, path)
            yield part if part.is_complete else None
        finally:
            os.close(fd)

    def is_wanted(self, number: int, start: int, stop: int) -> bool:
        """Return whether another rank of this host needs any of these bytes, or may need them."""
        if self._others is None:
            self._others = self._read_others()
        lo, hi = number * SPAN + start, number * SPAN + stop
        return self._others is None or any(_overlaps(ranges, lo, hi) for ranges in self._others)

    def _read_others(self) -> Sequence[Ints] | None:
        """Return the ranges of all other ranks of this host, or None if some of them have not begun."""
        # another job has removed the folder, a rank has just ended, or a file is damaged
        with usable(self._folder), suppress(FileNotFoundError, ValueError):
            paths = [path for path in self._files_of_ranks("wants", "done") if path != self._wants]
            if len(paths) >= self._sharing - 1:
                return [np.fromfile(path, np.int64).reshape(2, -1) for path in paths]
        return None

    def _files_of_ranks(self, *kinds: str) -> list[Path]:
        load = self._wants.name.partition("-")[0]
        names = (name.split("-") for name in os.listdir(self._folder))
        return [self._folder / "-".join(name) for name in names if name[0] == load and name[-1] in kinds]

    def _remove_stale(self) -> None:
        """Remove the folders of killed jobs."""
        now = time.time()
        for folder in self._folder.parent.iterdir():
            with suppress(FileNotFoundError):
                if now - folder.stat().st_mtime > _STALE:
                    shutil.rmtree(folder, ignore_errors=True)


class _SharedReader(Reader):
    """A blob in the store, whose bytes the ranks of this host share."""

    def __init__(self, reads: HostReads, number: int, ref: BlobRef, source: Reader) -> None:
        self._reads, self._number, self._ref, self._source = reads, number, ref, source
        self._cache = reads.cache

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self._ref.size

    @override
    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        views = [buffer for buffer in buffers if buffer.nbytes]
        with self._cache.tried():
            if not self._cache.is_off and self._read(offset, views):
                return
        self._source.read_into(offset, views)

    def _read(self, offset: int, views: Sequence[memoryview]) -> bool:
        """Read from this host's memory, or from the store for all ranks. Return False if this rank should read alone.

        Raises Unusable, and the errors of the source.
        """
        stop = offset + sum(view.nbytes for view in views)
        self._reads.wait(self._number, offset, stop)
        wanted = self._reads.is_wanted(self._number, offset, stop)
        with self._reads.opened(self._number, self._ref.size, create=wanted) as part:
            if part is None:
                return False
            if not part.has(offset, stop):
                if not wanted:
                    return False
                with part.locked(offset, stop, self._reads.patience):
                    self._fill(part, offset, stop, views)
                return True
            part.read(offset, views)
        return True

    def _fill(self, part: _Part, offset: int, stop: int, views: Sequence[memoryview]) -> None:
        """Read whole blocks, each from the file if it is there, and otherwise from the store."""
        lo, hi = part.blocks(offset, stop)
        whole = [memoryview(bytearray(offset - lo)), *views, memoryview(bytearray(hi - stop))]
        for is_there, start, end in part.runs(lo, hi):
            pieces = _cut(whole, start - lo, end - lo)
            if is_there:
                part.read(start, pieces)
                continue
            self._source.read_into(start, pieces)
            part.write(start, pieces)


class _Part:
    """An open file with some of the blocks of a blob."""

    def __init__(self, fd: int, size: int, path: Path) -> None:
        self._fd, self._size, self._path = fd, size, path
        self._states = -(-size // BLOCK) * BLOCK  # the offset of the state bytes
        total = self._states + self._states // BLOCK
        with usable(path):
            found = os.fstat(fd).st_size
            if not found:
                os.ftruncate(fd, total)
            elif found != total:
                path.unlink(missing_ok=True)
        self.is_complete = found in (0, total)

    def blocks(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of the blocks that contain the bytes from ``start`` to ``stop``."""
        return start // BLOCK * BLOCK, min(self._size, -(-stop // BLOCK) * BLOCK)

    def has(self, start: int, stop: int) -> bool:
        """Return whether all of these bytes are there."""
        states = self._read_states(start, stop)
        return states == _THERE * len(states)

    def runs(self, start: int, stop: int) -> Iterator[tuple[bool, int, int]]:
        """Yield ranges of blocks, each as (whether the blocks are there, start, end)."""
        at = start
        for is_there, run in groupby(self._read_states(start, stop), lambda state: state == _THERE[0]):
            end = min(self._size, at + BLOCK * len(list(run)))
            yield is_there, at, end
            at = end

    def _read_states(self, start: int, stop: int) -> bytes:
        first, count = start // BLOCK, -(-stop // BLOCK) - start // BLOCK
        with usable(self._path):
            states = os.pread(self._fd, count, self._states + first)
        if len(states) != count:
            raise Unusable(f"{self._path} was truncated")
        return states

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill ``views`` with bytes that the file has."""
        try:
            LocalReader(self._fd, self._states, "", self._path, shared=True).read_into(offset, views)
        except (CasckptError, ShortObject) as error:
            raise Unusable(f"{self._path} cannot be read: {error}") from error

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write whole blocks, and then their state bytes."""
        at = offset
        with usable(self._path):
            for view in views:
                write_all(self._fd, view, at)
                at += view.nbytes
            count = -(-at // BLOCK) - offset // BLOCK
            write_all(self._fd, memoryview(_THERE * count), self._states + offset // BLOCK)

    @contextmanager
    def locked(self, start: int, stop: int, patience: float) -> Iterator[None]:
        """Lock the blocks of a range. Raises Unusable if another process holds one for ``patience`` seconds."""
        lo, hi = self.blocks(start, stop)
        give_up, pause = time.monotonic() + patience, _PAUSES[0]
        while not _lock(self._fd, self._path, fcntl.F_WRLCK, lo, hi - lo):
            if time.monotonic() > give_up:
                raise Unusable(f"a process has been reading bytes of {self._path} for {patience:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        try:
            yield
        finally:
            # closing is not enough: a forked child also has the file open
            _lock(self._fd, self._path, fcntl.F_UNLCK, lo, hi - lo)


def _lock(fd: int, path: Path, kind: int, lo: int, nbytes: int) -> bool:
    """Lock or unlock a range of an open file. Return False if another open file has locked a part of it."""
    with usable(path):
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _range(kind, lo, nbytes))  # of the open file, so also between threads
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
    return True


def _range(kind: int, lo: int, nbytes: int) -> bytes:
    """Return a `struct flock`. 0 bytes: everything from ``lo`` on."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, lo, nbytes, 0)


def _write(path: Path, ranges: Ints) -> None:
    """Write ``ranges`` to a file that other ranks see only once it is complete."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(ranges.tobytes())
    temporary.replace(path)


def _merged(ranges: Sequence[tuple[int, int, int]]) -> Ints:
    """Return the starts and ends of these ranges (blob number, offset, bytes), sorted and with neighbors merged."""
    columns = np.array(sorted(ranges), np.int64).reshape(-1, 3)
    starts = columns[:, 0] * SPAN + columns[:, 1]
    ends = np.maximum.accumulate(starts + columns[:, 2])
    apart = np.flatnonzero(starts[1:] > ends[:-1])
    return np.stack((starts[np.append(0, apart + 1)], ends[np.append(apart, -1)])) if len(starts) else columns.T[:2]


def _overlaps(ranges: Ints, start: int, stop: int) -> bool:
    first = int(np.searchsorted(ranges[1], start, side="right"))
    return first < ranges.shape[1] and bool(ranges[0][first] < stop)


def _cut(views: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Return the bytes from ``start`` to ``stop`` of consecutive views."""
    pieces, at = [], 0
    for view in views:
        lo, hi = max(start - at, 0), min(stop - at, view.nbytes)
        if lo < hi:
            pieces.append(view[lo:hi])
        at += view.nbytes
    return pieces
