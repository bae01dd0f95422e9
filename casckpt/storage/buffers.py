"""Memory for transfers: page-aligned buffers for direct I/O, and bounded pools of these buffers."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TypeAlias

from casckpt.errors import InvalidInput
from casckpt.storage.forking import PerProcess

KEPT_BYTES = 256 << 20
_WIPE_ON_FORK = 18  # Linux's MADV_WIPEONFORK, which the mmap module does not define


def address(view: memoryview) -> int:
    """Return the address of a contiguous ``view``, or 0 if it is empty."""
    import numpy as np

    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if view.nbytes else 0


def plain_bytes(data: memoryview | bytes | bytearray) -> memoryview:
    """Return ``data`` as a flat view of format "B". Raises `InvalidInput` if it is not contiguous."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise InvalidInput("the data to store must be contiguous: copy it into one buffer first")
    return view.cast("B") if view.nbytes else memoryview(b"")  # cast rejects shapes that contain a zero


class AlignedBuffer(AbstractContextManager["AlignedBuffer"]):
    """``nbytes`` bytes of zeroed, page-aligned memory. It is private to the process: a forked child gets a copy."""

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise InvalidInput(f"a buffer cannot have {nbytes} bytes: pass at least 1")
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # without huge pages, the buffer still works but is slower
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)
        self._ending: weakref.finalize[..., AlignedBuffer] | None = None

    @property
    def view(self) -> memoryview:
        """A writable view of all bytes, in format "B". Raises ValueError after `close`."""
        return self._view[:]

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self._view.nbytes

    def wipe_in_forks(self) -> None:
        """Give forked children zeroed memory instead of sharing these pages with them."""
        with suppress(OSError):  # on other kernels, the pages remain shared
            self._map.madvise(_WIPE_ON_FORK)

    def at_end(self, call: Callable[[], object]) -> None:
        """Call ``call`` once before the memory is freed, but neither at process exit nor in a forked child."""
        made_by = os.getpid()
        self._ending = weakref.finalize(self, lambda: call() if os.getpid() == made_by else None)
        self._ending.atexit = False

    def close(self) -> None:
        """Free the memory as soon as no view or array refers to it."""
        if self._ending is not None:
            self._ending()
        self._view.release()
        with suppress(BufferError):
            self._map.close()

    def __exit__(self, *_: object) -> None:
        self.close()


Ready: TypeAlias = Callable[[AlignedBuffer], object]
"""Called with each new buffer of a pool."""


class BufferPool:
    """A pool of at most ``count`` buffers of ``nbytes`` bytes each, allocated on demand and reused.

    Thread-safe. A forked child must not use the buffers. ``ready``: called with each new buffer.
    """

    def __init__(self, count: int, nbytes: int, ready: Ready | None = None) -> None:
        if count < 1 or nbytes < 1:
            raise InvalidInput(f"a pool cannot have {count} buffers of {nbytes} bytes: pass at least 1 for each")
        self.count = count
        self.nbytes = nbytes
        self._ready = ready
        self._free: list[AlignedBuffer] = []
        self._lent = 0
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def borrow(self) -> Iterator[AlignedBuffer]:
        """Borrow a buffer, waiting until one is free. Its contents are undefined.

        Raises `InvalidInput` if the pool is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._lent < self.count)
            if self._closed:
                raise InvalidInput("this buffer pool is closed: create a new one")
            buffer = self._free.pop() if self._free else None
            self._lent += 1
        try:
            if buffer is None:
                new = AlignedBuffer(self.nbytes)
                if self._ready is not None:
                    self._ready(new)
                buffer = new
            yield buffer
        finally:
            self._take_back(buffer)

    def _take_back(self, buffer: AlignedBuffer | None) -> None:
        with self._changed:
            self._lent -= 1
            if buffer is not None and self._closed:
                buffer.close()
            elif buffer is not None:  # None if the allocation failed
                self._free.append(buffer)
            self._changed.notify()

    def close(self) -> None:
        """Free the idle buffers now, and the others when they are returned. Wakes waiting threads."""
        with self._changed:
            self._closed = True
            while self._free:
                self._free.pop().close()
            self._changed.notify_all()


class KeptBuffers:
    """Keeps the buffers of the last transfer for the next one, because filling new memory takes three times as long.

    A transfer that begins while the buffers are in use gets new ones. The buffers of the transfer that ends last are
    kept if their total size is at most `KEPT_BYTES`. A forked child starts without buffers. ``ready``: called with
    each new buffer.
    """

    def __init__(self, ready: Ready | None = None) -> None:
        self._ready = ready
        self._kept = PerProcess[deque[BufferPool]](lambda: deque(maxlen=1))

    @contextmanager
    def pool(self, count: int, nbytes: int) -> Iterator[BufferPool]:
        """Yield a pool of at least ``count`` buffers of at least ``nbytes`` bytes each, for one transfer."""
        pool: BufferPool | None = None
        with suppress(IndexError):
            pool = self._kept.get().pop()
        if pool is None or pool.count < count or pool.nbytes < nbytes:
            pool = None  # free it before allocating the new one
            pool = BufferPool(count, nbytes, self._ready)
        try:
            yield pool
        finally:
            if pool.count * pool.nbytes <= KEPT_BYTES:
                self._kept.get().append(pool)
            else:
                pool.close()
