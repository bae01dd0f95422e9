"""Access to the bytes of files without mapping them, so that a file that is truncated meanwhile ends no process."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol


class ReadableFile(Protocol):
    """A file from which several threads may read."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on. Raises an error if there are fewer."""


class FileRange(NamedTuple):
    """``length`` bytes of a file, from ``offset`` on."""

    file: ReadableFile
    offset: int
    length: int


class FileMemory:
    """The elements in ranges of files, in order. They have to be copied."""

    on_gpu = False

    def __init__(self, ranges: Sequence[FileRange], itemsize: int = 1) -> None:
        self.itemsize = itemsize
        self._ranges = ranges
        self._ends = list(accumulate(one.length for one in ranges))

    def view(self, lo: int, hi: int) -> None:
        """Return None, because the bytes are not in memory."""

    def copy_out(self, lo: int, hi: int, buffer: memoryview) -> None:
        """Read elements [lo, hi) into ``buffer``."""
        at, end = lo * self.itemsize, hi * self.itemsize
        number, start = bisect_right(self._ends, at), at
        while at < end:
            one, stop = self._ranges[number], min(end, self._ends[number])
            offset = one.offset + one.length - (self._ends[number] - at)
            one.file.read_into(offset, buffer[at - start : stop - start])
            at, number = stop, number + 1
