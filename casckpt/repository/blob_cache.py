"""Caches blobs on this host by hash, for all stores, all users of its folder, and any number of processes.

The cache holds only whole blobs: those that were fetched and verified, and those that saves have just written. A file
gets its name only after it is complete and durable. Ranged reads of blobs that are not in the cache go to the store and
are not cached. A load also verifies the cells that it reads from the cache. If a cached blob is damaged, the load drops
it and reads it from the store. When the cache needs space, it removes the least recently used blobs first. A removed
file remains readable as long as it is open.

A second cache uses this host's memory. Its folder also contains the bytes that ranks share
(`casckpt.repository.host_reads`), which count toward its size and are removed in the same order.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from casckpt.base.parallel import in_parallel
from casckpt.base.progress import Progress
from casckpt.errors import CasckptError, InvalidInput, StorageError
from casckpt.repository.fetching import fetch
from casckpt.repository.processes import alone_on_this_host
from casckpt.storage.base import AlreadyExists, ObjectStore
from casckpt.storage.buffers import AlignedBuffer
from casckpt.storage.failures import reporting
from casckpt.storage.forking import PerProcess
from casckpt.storage.local.reader import LocalReader, headroom
from casckpt.storage.local.store import LocalStore

if TYPE_CHECKING:
    from casckpt.format.sections.blobs import BlobRef

FOLDER, LOCKS = "blobs", "locks"
PARTS = "parts"
"""The folder of blobs that ranks are reading together (`casckpt.repository.host_reads`)."""
MEMORY = Path("/dev/shm")  # noqa: S108 - a private folder is created below it
AT_ONCE = 8  # blobs fetched at the same time, each with a buffer of its size

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Held:
    """A file in the cache. ``used``: the time of its last use in nanoseconds, by the file system's clock."""

    used: int
    path: str
    nbytes: int


class BlobCache:
    """The blobs in the folder ``root``.

    ``limit``: the maximum size in bytes. None means half of the disk's free space. ``in_memory``: whether the folder is
    in this host's memory. The cache then uses at most half of what is free, regardless of the limit.
    """

    def __init__(self, root: Path, limit: int | None = None, *, in_memory: bool = False) -> None:
        if limit is not None and (type(limit) is not int or limit < 0):
            raise InvalidInput(
                f"a cache size of {limit!r} is not valid: pass a number of bytes, or 0 to disable the cache"
            )
        self.root = root
        self._limit = limit
        self._in_memory = in_memory
        self._files = LocalStore(root)
        self._turns = PerProcess(lambda: threading.BoundedSemaphore(AT_ONCE))
        self.is_off = limit == 0  # whether this process no longer adds blobs

    @property
    def is_there(self) -> bool:
        """Whether this cache has ever held a blob. This check is cheaper than looking up each blob."""
        try:
            return (self.root / FOLDER).exists()
        except OSError:  # the folder is inaccessible; the store has all blobs
            return False

    def open(self, ref: BlobRef) -> LocalReader | None:
        """Open a blob for ranged reads. Returns None if it is not in the cache."""
        if self._in_memory and not self._is_private:
            return None
        try:
            reader = self._files.open(_key(ref))
        except CasckptError:  # the blob is missing or the folder is inaccessible; the store has the blob
            return None
        if reader.size == ref.size:
            self.touch(ref)
            return reader
        reader.close()
        self.drop(ref)
        return None

    def drop(self, ref: BlobRef) -> None:
        """Remove a damaged blob."""
        log.warning("%s is damaged in this cache; casckpt reads it from the store instead", self.root / _key(ref))
        with suppress(CasckptError):
            self._files.delete(_key(ref))

    def keep(self, storage: ObjectStore, ref: BlobRef) -> bool:
        """Fetch the blob if it is not in the cache yet and fits. Return whether the cache has it.

        Raises `casckpt.repository.fetching.BlobDamaged`, or `StorageError` if the store fails.
        """
        if self.touch(ref):
            return True
        if self.is_off:
            return False
        is_kept = False
        with self.tried():
            if ref.size <= self.room():
                self._fetch(storage, ref)
                is_kept = True
        return is_kept

    def add(self, ref: BlobRef, data: memoryview) -> None:
        """Add a blob that this process has just stored, if it fits."""
        with self.tried():
            if not self.is_off and not self.touch(ref):
                self._put(ref, data)

    @contextmanager
    def tried(self) -> Iterator[None]:
        """If the cache turns out to be unusable, end the block, stop adding blobs, and log this once."""
        try:
            yield
        except Unusable as error:
            if not self.is_off:  # only one of several threads logs this
                self.is_off = True
                log.warning("this process no longer adds blobs to the cache %s: %s", self.root, error)

    def fill(self, storage: ObjectStore, refs: Sequence[BlobRef], threads: int, progress: Progress) -> int:
        """Fetch the blobs in ``refs`` that are missing. Return the number of bytes fetched.

        ``progress``: called with the size of each blob. Raises `InvalidInput` if the blobs exceed the limit,
        `StorageError` if the cache is not writable, and `casckpt.repository.fetching.BlobDamaged`.
        """
        wanted = list({ref.hash: ref for ref in refs}.values())
        need = sum(ref.size for ref in wanted)

        def fetch_one(ref: BlobRef) -> int:
            done = self._fetch(storage, ref)
            progress(ref.size)
            return done

        try:
            room = self.room()
            if need <= room:
                return sum(in_parallel(threads, fetch_one, wanted, name="cache"))
        except Unusable as error:
            raise StorageError(f"{error}; you can also pass a different cache_dir") from error
        raise InvalidInput(
            f"the blobs need {need} bytes, but the cache {self.root} can hold only {room}: allow more (cache_bytes), "
            "or use a larger disk (cache_dir)"
        )

    def _fetch(self, storage: ObjectStore, ref: BlobRef) -> int:
        """Fetch a blob. Return the number of bytes fetched: 0 if the blob is already there."""
        if self.touch(ref):
            return 0
        with self._turns.get(), alone_on_this_host(self.root / LOCKS / ref.hash[:3]):
            if self.touch(ref):
                return 0
            with AlignedBuffer(ref.size) as buffer:
                self._put(ref, fetch(storage, ref, buffer.view))
        return ref.size

    def _put(self, ref: BlobRef, data: memoryview) -> None:
        if not self.make_room(ref.size):
            return
        try:
            self._files.put(_key(ref), data, settle=False)
        except AlreadyExists:
            return  # without file locks, another process may have fetched the blob first
        except CasckptError as error:
            raise Unusable(str(error)) from error

    def touch(self, ref: BlobRef) -> bool:
        """Record that a blob has just been used. Return whether it is in the cache."""
        path = self.root / _key(ref)
        try:
            if path.stat().st_size != ref.size:
                return False
            with suppress(PermissionError):  # only the file's owner can update its time
                os.utime(path)
        except OSError:
            return False
        return True

    @property
    def contents(self) -> tuple[int, int]:
        """The number of blobs, and their size in bytes. Raises `StorageError`."""
        with reporting("list", self.root):
            held = list(self._scan())
        return len(held), sum(file.nbytes for file in held)

    def clear(self) -> tuple[int, int]:
        """Remove all blobs. Return their number and size in bytes. Raises `StorageError`."""
        found = self.contents
        with reporting("clear", self.root):
            for file in list(self._scan()):
                with suppress(FileNotFoundError):
                    os.unlink(file.path)
        return found

    # room

    def make_room(self, size: int) -> bool:
        """Remove the least recently used blobs until ``size`` more bytes fit. Return whether they fit.

        All processes pick the same blobs.
        """
        held = sorted(self._held(), key=lambda file: (file.used, file.path))
        total = sum(file.nbytes for file in held)
        most = self._most(total)
        if size > most:
            return False
        for file in held:
            if total + size <= most:
                break
            with usable(self.root), suppress(FileNotFoundError):  # another process has already removed it
                os.unlink(file.path)
            total -= file.nbytes
        return total + size <= most

    def room(self) -> int:
        """Return the maximum size of the cache in bytes."""
        held = sum(file.nbytes for file in self._held())
        with usable(self.root):
            return self._most(held)

    def _held(self) -> list[_Held]:
        """Return the cached files. Raises Unusable if other users may access a cache in memory."""
        with usable(self.root):
            if self._in_memory:
                self.make_folder()
            return list(self._scan())

    def make_folder(self) -> None:
        """Create the folder of a cache in memory. Raises Unusable if other users may access it, and OSError."""
        with suppress(FileExistsError):
            self.root.mkdir(0o700)
        if not self._is_private:
            raise Unusable(f"{self.root} is not a folder that only this user can access")

    def _most(self, held: int) -> int:
        """Return the maximum size of the cache in bytes, given that it currently holds ``held`` bytes."""
        if self._limit is not None and not self._in_memory:
            return self._limit
        disk = os.statvfs(next(path for path in (self.root, *self.root.parents) if path.exists()))
        free = disk.f_bavail * disk.f_frsize
        most = (held + (min(free, headroom() or 0) if self._in_memory else free)) // 2
        return most if self._limit is None else min(most, self._limit)

    def _scan(self) -> Iterator[_Held]:
        if self._in_memory and not self._is_private:  # it may be a link to this user's other files
            return
        yield from _files(self.root / FOLDER)
        if self._in_memory:
            for folder in (self.root / PARTS).glob("*"):
                yield from _files(folder)

    @property
    def _is_private(self) -> bool:
        try:
            status = self.root.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def in_memory(limit: int | None = None) -> BlobCache:
    """Return the cache in this host's memory, which only this user can access."""
    return BlobCache(MEMORY / f"casckpt-{os.geteuid()}", limit, in_memory=True)


def _files(folder: Path) -> Iterator[_Held]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if "-" in entry.name:  # the ranges that a rank needs; other ranks must find this small file
                continue
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                yield _Held(status.st_mtime_ns, entry.path, min(status.st_size, status.st_blocks * 512))


class Unusable(Exception):
    """The cache is not writable: its disk is full, it is read-only, or it belongs to a different user."""


@contextmanager
def usable(root: Path) -> Iterator[None]:
    """Raise Unusable for an error of the operating system."""
    try:
        yield
    except OSError as error:
        raise Unusable(f"{root}: {error.strerror or error}") from error


def _key(ref: BlobRef) -> str:
    return f"{FOLDER}/{ref.hash}"
