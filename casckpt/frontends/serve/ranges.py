"""Byte ranges of files that are produced on request: parsed from headers, and mapped to elements. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import NamedTuple

from casckpt.frontends.interchange.safetensors.layout import FileLayout
from casckpt.loading.regions import EntrySlice

_ONE = re.compile(r"bytes=[ \t]*([0-9]*)-([0-9]*)[ \t]*", re.IGNORECASE)
_DIGITS = 19


class Unsatisfiable(ValueError):
    """A range that contains no byte of the file."""


class FileSpan(NamedTuple):
    """Bytes [start, stop) of a file."""

    start: int
    stop: int


def parse_range(header: str | None, size: int) -> FileSpan | None:
    """The bytes that a Range header asks for, of a file of ``size`` bytes; None for the whole file.

    For several ranges, other units and malformed headers it is the whole file, which RFC 9110 (14.2) allows. Raises
    Unsatisfiable.
    """
    match = None if header is None else _ONE.fullmatch(header)
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        wanted = _number(last)
        start, stop = max(size - wanted, 0), size
    else:
        start, stop = _number(first), min(_number(last) + 1, size) if last else size
    if start >= stop:
        raise Unsatisfiable(f"{header!r:.80} asks for no byte of a file of {size} bytes")
    return FileSpan(start, stop)


def _number(digits: str) -> int:
    """Convert digits, limited to a number beyond any file size, because int() of a long text is slow."""
    return int(digits) if len(digits) <= _DIGITS else 10**_DIGITS


class RequestedRange(NamedTuple):
    """The content of a range: ``head``, then the bytes of ``sources`` after the first ``skip``.

    The range may end within the last element.
    """

    head: memoryview
    sources: list[EntrySlice]
    skip: int


class FileMap:
    """Maps the bytes of a file to elements."""

    def __init__(self, file: FileLayout) -> None:
        self._head = memoryview(file.head)
        self._sources = [source for tensor in file.tensors for source in tensor.sources if source.nbytes]
        self._begins = list(accumulate((source.nbytes for source in self._sources), initial=0))

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self._head) + self._begins[-1]

    def wanted(self, span: FileSpan) -> RequestedRange:
        """The fewest whole elements that contain the bytes ``span``."""
        start, stop = (max(at - len(self._head), 0) for at in span)
        sources, skip = self._elements(start, stop)
        return RequestedRange(self._head[span.start : span.stop], sources, skip)

    def _elements(self, start: int, stop: int) -> tuple[list[EntrySlice], int]:
        """The elements that hold bytes [start, stop) of the data, and how many bytes of the first lie before."""
        if start >= stop:
            return [], 0
        first, last = bisect_right(self._begins, start) - 1, bisect_left(self._begins, stop)
        sources = [self._cut(number, start, stop) for number in range(first, last)]
        return sources, (start - self._begins[first]) % sources[0].entry.itemsize

    def _cut(self, number: int, start: int, stop: int) -> EntrySlice:
        source, begin = self._sources[number], self._begins[number]
        size = source.entry.itemsize
        lo = max(start - begin, 0) // size
        hi = -(-min(stop - begin, source.nbytes) // size)
        return source._replace(lo=source.lo + lo, hi=source.lo + hi)
