"""Limits the memory that the copies of background saves take on this host.

Each process that has a copy keeps a locked file in a folder that all processes of this user on this host share. The
file holds the size of the copy. A process that needs memory first writes the new size, and then adds the sizes in all
locked files. If the sum is too large, the save runs in the foreground, without a copy. No process waits for another
one. If several processes write at the same time, the last one sees all sizes, so the sum never exceeds the limit.

If a process dies, the kernel releases its lock, and the next process removes the file. Forked children do not keep the
lock. If the processes of this host have no common folder, rank 0 adds up the sizes.
"""

from __future__ import annotations

import fcntl
import os
import struct
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from casckpt.repository.blob_cache import BlobCache, Unusable, usable
from casckpt.storage.local.reader import headroom

FOLDER = "copies"
_MOST = 0.8  # of the free memory; the rest is for the buffers of the save, and for what the program still allocates
_SIZES = struct.Struct("=qq")  # the size of a copy, and how much of it already takes memory


class Shortage(NamedTuple):
    """The bytes that all copies on this host would take, and the maximum.

    ``host``: set if ``total`` is only the size of one copy, because the processes of this host have no common folder.
    """

    total: int
    most: int
    host: str = ""


def shortages(claims: Sequence[Shortage | None]) -> list[tuple[Shortage, int]]:
    """Return the shortages of all hosts, each with a rank. ``claims``: what `StagingBudget.claim` returned by rank."""
    found = [(claim, rank) for rank, claim in enumerate(claims) if claim is not None]
    totals = Counter[str]()
    for claim, _ in found:
        totals[claim.host] += claim.total
    summed = [(claim._replace(total=totals[claim.host]) if claim.host else claim, rank) for claim, rank in found]
    return [(claim, rank) for claim, rank in summed if claim.total > claim.most]


class StagingBudget:
    """The memory of one copy in this process.

    ``memory``: the cache whose folder the processes share. ``limit``: the maximum for all copies on this host, in
    bytes. None means a fixed part of what is free.
    """

    def __init__(self, memory: BlobCache, limit: int | None) -> None:
        self._memory, self._limit = memory, limit
        self._folder = memory.root / FOLDER
        self._path = Path()
        self._fd = -1
        _budgets.add(self)

    def claim(self, nbytes: int, held: int, host: str = "") -> Shortage | None:
        """Claim ``nbytes`` for a copy that replaces one of ``held`` bytes. Return None if they fit.

        Otherwise, or if the processes of ``host`` have no common folder, return a Shortage for `shortages`. Call
        `settle` afterwards in all cases.
        """
        try:
            with usable(self._folder):
                self._write(nbytes, 0)
                others = list(self._others())
                host = ""
        except Unusable:
            others = []
        total, free = nbytes + sum(size for size, _ in others), headroom()  # after the sizes, which may change
        if self._limit is not None:
            most = self._limit
        elif free is None:
            return None
        else:
            most = int(_MOST * (free + held)) + sum(filled for _, filled in others)
        return None if total <= most and not host else Shortage(total, most, host)

    def settle(self, nbytes: int) -> None:
        """Record that the copy takes ``nbytes`` from now on. If a cleanup of the host removed the file, replace it."""
        with suppress(OSError, Unusable):
            if self._fd >= 0:
                self._write(nbytes, nbytes)

    def close(self) -> None:
        """Give up this process's claim. In a forked child, this does not affect the parent's."""
        if self._fd >= 0:
            self._closing()
            self._fd = -1

    def _write(self, *sizes: int) -> None:
        while self._fd < 0 or not os.fstat(self._fd).st_nlink:  # a cleanup, or `_others` before the lock, removed it
            self.close()
            self._memory.make_folder()
            self._folder.mkdir(exist_ok=True)
            self._path = self._folder / os.urandom(8).hex()
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            self._closing = weakref.finalize(self, os.close, self._fd)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # `_others` of another process has locked it, and that process may be stopped
                self.close()
        os.pwrite(self._fd, _SIZES.pack(*sizes), 0)

    def _others(self) -> Iterator[tuple[int, int]]:
        """Yield the sizes of all other copies of living processes."""
        for path in self._folder.iterdir():
            if path == self._path:
                continue
            with suppress(FileNotFoundError), path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    if len(data := file.read()) == _SIZES.size:  # otherwise its process is about to write it
                        size, filled = _SIZES.unpack(data)
                        yield size, filled
                else:
                    path.unlink()


_budgets = weakref.WeakSet[StagingBudget]()


def _close_in_child() -> None:
    """Close the files that a forked child has inherited, because they would keep its parent's locks."""
    for budget in list(_budgets):
        budget.close()


os.register_at_fork(after_in_child=_close_in_child)
