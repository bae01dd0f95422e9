"""Ranges of bytes of a file that is made while it is sent: what a header asks for, and which elements hold it. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import NamedTuple

from casckpt.format.dtypes import itemsize
from casckpt.frontends.interchange.safetensors.layout import FileLayout
from casckpt.loading.regions import EntrySlice

_ONE = re.compile(r"bytes=[ \t]*([0-9]*)-([0-9]*)[ \t]*", re.IGNORECASE)
_DIGITS = 19


class Unsatisfiable(ValueError):
    """A range that no byte of the file lies in, or that ends before it begins."""


class FileSpan(NamedTuple):
    """Bytes [start, stop) of a file."""

    start: int
    stop: int


def parse_range(header: str | None, size: int) -> FileSpan | None:
    """The bytes of a file of ``size`` bytes that a Range header asks for; None for all of it.

    Several ranges, other units and what is no range ask for all, as a server may answer (RFC 9110, 14.2). Raises
    Unsatisfiable.
    """
    found = None if header is None else _ONE.fullmatch(header)
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        wanted = _number(last)
        start, stop = max(size - wanted, 0), size
    else:
        start, stop = _number(first), min(_number(last) + 1, size) if last else size
    if start >= stop:
        raise Unsatisfiable(f"{header!r:.80} asks for no byte of a file of {size} bytes")
    return FileSpan(start, stop)


def _number(digits: str) -> int:
    """What has more digits than any file has bytes is as good as the greatest number; int() of a long text is slow."""
    return int(digits) if len(digits) <= _DIGITS else 10**_DIGITS


class RequestedRange(NamedTuple):
    """What a range is made of: ``head``, then the bytes of ``sources`` but for the first ``skip``.

    The last element may be cut short.
    """

    head: memoryview
    sources: list[EntrySlice]
    skip: int


class FileMap:
    """Of which elements each byte of a file is made."""

    def __init__(self, file: FileLayout) -> None:
        self._head = memoryview(file.head)
        self._sources = [source for one in file.tensors for source in one.sources if source.nbytes]
        self._begins = list(accumulate((one.nbytes for one in self._sources), initial=0))

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self._head) + self._begins[-1]

    def wanted(self, span: FileSpan) -> RequestedRange:
        """What bytes ``span`` are made of: whole elements, as few as hold them."""
        start, stop = (max(at - len(self._head), 0) for at in span)
        sources, skip = self._elements(start, stop)
        return RequestedRange(self._head[span.start : span.stop], sources, skip)

    def _elements(self, start: int, stop: int) -> tuple[list[EntrySlice], int]:
        """The elements that hold bytes [start, stop) of the data, and how many bytes of the first lie before."""
        if start >= stop:
            return [], 0
        first, last = bisect_right(self._begins, start) - 1, bisect_left(self._begins, stop)
        found = [self._cut(number, start, stop) for number in range(first, last)]
        return found, (start - self._begins[first]) % itemsize(found[0].entry.dtype)

    def _cut(self, number: int, start: int, stop: int) -> EntrySlice:
        one, begin = self._sources[number], self._begins[number]
        size = itemsize(one.entry.dtype)
        lo = max(start - begin, 0) // size
        hi = -(-min(stop - begin, one.nbytes) // size)
        return one._replace(lo=one.lo + lo, hi=one.lo + hi)
