"""Reads local files: cached bytes come from the page cache, and all others directly from disk.

A file that is mostly uncached is read directly (O_DIRECT) into an aligned buffer and copied from there. This is faster
than reading through the cache, and does not evict other pages. cachestat or mincore reports the cached pages. (A read
with RWF_NOWAIT would also report them, but it triggers the kernel's read-ahead, so the disk would read all bytes
twice.)

`headroom` returns how much memory is left for buffers.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from typing_extensions import override

from casckpt.storage.base import BLOCK, Reader, ShortObject
from casckpt.storage.buffers import AlignedBuffer, address
from casckpt.storage.failures import reporting
from casckpt.storage.local.syscalls import Lacking, cached_pages

_MAX_BUFFERS = 1024  # Linux's IOV_MAX
_LARGE = 512 << 10  # bytes; a smaller read is not worth a second system call
_WORTH_A_CALL = 256 << 10  # bytes
_BOUNCE = 2 << 20
_FIRST = 64 << 10  # bytes; after a smaller first read, the kernel uses pieces so large that allocating them may be slow
_MOST = 0.75  # reads use the cache if at least this fraction of the file is cached
_LIBC = ctypes.CDLL(None, use_errno=True)
_MAP_FIXED = 16  # which the mmap module does not define
_thread = threading.local()


class LocalReader(Reader, AbstractContextManager["LocalReader"]):
    """One open file. Any number of threads can read it at any offset.

    ``shared``: other processes also read the file, so reads always go through the page cache.
    """

    def __init__(self, fd: int, size: int, key: str, path: Path, *, shared: bool = False) -> None:
        self._fd = fd
        self._size = size
        self._key = key
        self._path = path
        # descriptor for direct I/O; -1 if direct I/O is impossible or not worthwhile, None if not yet known
        self._direct: int | None = -1 if shared else None
        self._cached: bool | None = None
        self._is_begun = not shared
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """The size in bytes at the time the file was opened."""
        return self._size

    @property
    def is_cached(self) -> bool:
        """Whether the page cache holds most of the file. This is looked up only once."""
        if self._cached is None:
            self._cached = is_cached(self._fd, 0, self._size)
        return self._cached

    @property
    def version(self) -> str:
        """A string that changes whenever the file is replaced or changed, as in a listing."""
        with reporting("read", self._path):
            status = os.fstat(self._fd)
        return f"{status.st_ino} {status.st_ctime_ns}"

    def map_over(self, memory: memoryview, offset: int) -> None:
        """Map the bytes from ``offset`` over ``memory``. Writes to this memory do not change the file.

        ``offset`` and ``memory`` must begin at page boundaries, and all of the last page must belong to the caller. The
        map survives `close`.
        """
        start, nbytes = ctypes.c_void_p(address(memory)), ctypes.c_size_t(memory.nbytes)
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        with reporting("map", self._path):
            if _LIBC.mmap(start, nbytes, access, kind, self._fd, ctypes.c_int64(offset)) == -1:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    @override
    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for _ in self.fill(offset, [buffer for buffer in buffers if buffer.nbytes], nullcontext()):
            pass

    def fill(
        self, offset: int, buffers: Sequence[memoryview], turns: AbstractContextManager[object]
    ) -> Generator[int, None, None]:
        """Read as `read_into` does, and yield the number of full ``buffers`` so far. No buffer may be empty.

        The method holds ``turns`` while there is work for a CPU core: here, and in the caller after a yield, while the
        bytes are still in that core's cache. Close the generator (`contextlib.closing`); otherwise, an error might
        leave the turn held.
        """
        total = sum(buffer.nbytes for buffer in buffers)
        with reporting("read", self._path):
            if total >= _LARGE and self._direct_fd(offset, total) >= 0:
                yield from self._fill_directly(offset, buffers, turns)
            else:
                yield from self._fill_from_cache(offset, buffers, turns)

    def read_all(self) -> bytes:
        """Read the whole file through the page cache."""
        data = bytearray(self._size)
        with reporting("read", self._path):
            if data:
                self._fill(0, [memoryview(data)], len(data))
        return bytes(data)

    def _direct_fd(self, offset: int, nbytes: int) -> int:
        """Open the file for direct I/O once. Return -1 if that is impossible or the file is cached.

        Looking up the cached pages of the whole file is slow. If this has not been done yet, the range of the first
        read decides.
        """
        with self._lock:
            if self._direct is None:
                self._direct = -1
                cached = is_cached(self._fd, offset, nbytes) if self._cached is None else self._cached
                if not cached:
                    with suppress(OSError):  # the file system does not support it
                        self._direct = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            return self._direct

    def _fill_directly(
        self, offset: int, buffers: Sequence[memoryview], turns: AbstractContextManager[object]
    ) -> Iterator[int]:
        """Read directly from disk, as many bytes at a time as fit in the bounce buffer."""
        bounce, direct = _bounce_buffer(), self._direct_fd(offset, 0)
        left, full, at = sum(buffer.nbytes for buffer in buffers), 0, 0
        while left:
            skipped = offset % BLOCK
            most = min(-(-(skipped + left) // BLOCK) * BLOCK, len(bounce))
            try:
                held = min(os.preadv(direct, [bounce[:most]], offset - skipped) - skipped, left)
            except OSError as error:
                if error.errno != errno.EINVAL or direct == self._fd:
                    raise
                direct = self._fd  # the file system requires a different alignment
                continue
            if held <= 0:
                raise ShortObject(self._key, os.fstat(self._fd).st_size)
            offset, left = offset + held, left - held
            data = bounce[skipped : skipped + held]
            with turns:
                while data:
                    nbytes = min(buffers[full].nbytes - at, data.nbytes)
                    _copy(buffers[full][at : at + nbytes], data[:nbytes])
                    data, at = data[nbytes:], at + nbytes
                    if at == buffers[full].nbytes:
                        full, at = full + 1, 0
                        yield full

    def _fill_from_cache(
        self, offset: int, buffers: Sequence[memoryview], turns: AbstractContextManager[object]
    ) -> Iterator[int]:
        """Read several buffers at a time: enough for an efficient system call, but few enough for a core's cache."""
        self._begin()
        full = 0
        while full < len(buffers):
            first, nbytes = full, 0
            while nbytes < _WORTH_A_CALL and full < min(len(buffers), first + _MAX_BUFFERS):
                nbytes, full = nbytes + buffers[full].nbytes, full + 1
            self._fill(offset, buffers[first:full], nbytes)  # without a turn, because this may wait for the disk
            offset += nbytes
            with turns:
                yield full

    def _begin(self) -> None:
        """Read a few bytes of a shared file before any other read.

        Linux reads ahead in steps and fills the cache in larger pieces with each step. If the first read covered a
        whole cell, the first step would have the maximum length (several MiB) and consist entirely of single pages,
        which are slow to fill and to read.
        """
        if not self._is_begun:
            self._is_begun = True
            with suppress(OSError):  # the bytes are discarded; a later read reports the error
                os.pread(self._fd, _FIRST, 0)

    def _fill(self, offset: int, buffers: Sequence[memoryview], nbytes: int) -> None:
        """Fill all of ``buffers``, which hold ``nbytes`` bytes in total."""
        while (count := os.preadv(self._fd, buffers, offset)) < nbytes:
            if count == 0:
                raise ShortObject(self._key, os.fstat(self._fd).st_size)
            offset, nbytes = offset + count, nbytes - count
            buffers = _rest(buffers, count)

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
        for fd in (self._fd, -1 if self._direct is None else self._direct):
            if fd >= 0:
                with suppress(OSError):  # a file that was only read loses nothing
                    os.close(fd)
        self._fd = self._direct = -1

    def __exit__(self, *_: object) -> None:
        self.close()


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Return whether the page cache holds most of this byte range, or True if the system does not report it."""
    if nbytes == 0:
        return True
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    size = offset + nbytes - start
    with suppress(Lacking):
        if cached := cached_pages(fd, start, size):  # always 0 on an overlay, whose files have their pages elsewhere
            return cached >= _MOST * -(-size // mmap.PAGESIZE)
    return _is_resident(fd, start, size)


def _is_resident(fd: int, start: int, size: int) -> bool:
    """Implement `is_cached` with mincore on a memory map of the file. This takes ten times as long."""
    import numpy as np

    try:
        with mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start) as mapped:
            pages = np.empty(-(-size // mmap.PAGESIZE), dtype=np.uint8)
            view = np.frombuffer(mapped, dtype=np.uint8)
            failed = _LIBC.mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
            )
            del view  # otherwise, the map could not be closed
    except OSError:
        return True
    return bool(failed) or float((pages & 1).mean()) >= _MOST


def _bounce_buffer() -> memoryview:
    """Return this thread's own aligned buffer, which is freed when the thread ends."""
    buffer: AlignedBuffer | None = getattr(_thread, "buffer", None)
    if buffer is None:
        buffer = _thread.buffer = AlignedBuffer(_BOUNCE + BLOCK)
    return buffer.view


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without holding the GIL."""
    import numpy as np

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _rest(buffers: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """Return what remains of ``buffers`` after the first ``count`` bytes."""
    for index, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[index + 1 :]]
        count -= buffer.nbytes
    return []


_MEMINFO, _MINE, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_FILES = (
    ("memory.max", "memory.current", "(?:in)?active_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_(?:in)?active_file"),
)
"""For cgroup v2 and v1: the limit file, the usage file, and the memory.stat fields of the page cache, which the kernel
reclaims."""


def headroom(meminfo: Path = _MEMINFO, mine: Path = _MINE, groups: Path = _GROUPS) -> int | None:
    """Return the number of bytes available without swapping, or None if the system does not report it."""
    try:
        available = _number("MemAvailable:", meminfo.read_text()) << 10
        return max(0, min([available, *_left(mine.read_text(), groups)]))
    except (OSError, ValueError):
        return None


def _left(mine: str, groups: Path) -> Iterator[int]:
    """Yield the bytes remaining under each memory limit of this process's cgroup and its parents."""
    for line in mine.splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        folder = (groups / "memory" if kinds else groups).joinpath(*Path(path).parts[1:])
        for _ in Path(path).parts:
            yield from _left_in(folder, *_FILES[bool(kinds)])  # missing if a container sees its group as the root
            folder = folder.parent


def _left_in(folder: Path, limit: str, use: str, part: str) -> Iterator[int]:
    with suppress(FileNotFoundError):
        most = (folder / limit).read_text().strip()
        if most != "max":
            reclaimed = _number(part, (folder / "memory.stat").read_text())
            yield int(most) - int((folder / use).read_text()) + reclaimed


def _number(name: str, text: str) -> int:
    """Return the sum of the fields that match ``name``."""
    numbers = re.findall(rf"^{name}\s+(\d+)", text, re.MULTILINE)
    if not numbers:
        raise ValueError(f"{name} is missing")
    return sum(map(int, numbers))
