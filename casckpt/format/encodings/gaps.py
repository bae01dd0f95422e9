"""Which elements changed: a byte for how many lie between one and the next; 255 is as many, and then none yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from casckpt.errors import Refused
from casckpt.format.encodings.planes import BLOCK
from casckpt.format.encodings.scratch import Bytes, Unsigned

Indices: TypeAlias = npt.NDArray[np.int64]
MORE = 255


def changed(elements: Unsigned, base: Unsigned, most: int) -> Indices | None:
    """Find the elements that differ from those of ``base``; None if there are more than ``most``."""
    words = _changed_words(elements, base)
    if words is None:
        is_changed = elements != base
        return np.flatnonzero(is_changed) if np.count_nonzero(is_changed) <= most else None
    shift = 4 - elements.itemsize.bit_length()  # a word has 1 << shift elements
    mine, theirs = (some.view(np.uint64)[words].view(some.dtype) for some in (elements, base))
    found = np.flatnonzero(mine != theirs)
    return (words[found >> shift] << shift) + (found & (1 << shift) - 1) if found.size <= most else None


def _changed_words(elements: Unsigned, base: Unsigned) -> Indices | None:
    """The words of 8 bytes that differ, where that spares work: where they are few."""
    if elements.nbytes % 8:
        return None
    differ = elements.view(np.uint64) != base.view(np.uint64)
    return np.flatnonzero(differ) if np.count_nonzero(differ) <= differ.size // 2 else None


def encode_gaps(indices: Indices) -> Bytes:
    """Encode indices, which ascend."""
    between = np.diff(indices, prepend=-1) - 1
    more = between // MORE
    ends = np.cumsum(more + 1) - 1
    gaps = np.full(ends[-1] + 1 if ends.size else 0, MORE, np.uint8)
    gaps[ends] = between - more * MORE
    return gaps


def check_gaps(gaps: Bytes, changes: int, count: int) -> None:
    """Raise Refused for gaps that are not of ``changes`` among ``count`` elements."""
    ends = int(np.count_nonzero(gaps != MORE))
    last = int(gaps.sum(dtype=np.int64)) + ends
    if ends != changes or last > count or (gaps.size and gaps[-1] == MORE):
        raise Refused(f"a frame tells of {changes} changes, and has gaps for {ends}, up to {last} of {count} elements")


def decode_gaps(gaps: Bytes) -> Iterator[Indices]:
    """Decode the indices, some at a time."""
    behind = 0
    for begin in range(0, gaps.size, BLOCK):
        block = gaps[begin : begin + BLOCK]
        is_end = block != MORE
        steps = np.cumsum(block + is_end, dtype=np.int64)
        steps += behind
        behind = int(steps[-1])
        yield steps[is_end] - 1
