"""Which elements changed: a byte for how many lie between one and the next; 255 is as many, and then none yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from casckpt.errors import Refused
from casckpt.format.encodings.planes import BLOCK, some_of
from casckpt.format.encodings.scratch import Bytes, Unsigned, scratch

Indices: TypeAlias = npt.NDArray[np.int64]
MORE = 255
_LINE = 8


class Changes(NamedTuple):
    """Elements that changed: which, in order; what they are, and what they were."""

    indices: Indices
    new: Unsigned
    old: Unsigned


def changed(elements: Unsigned, base: Unsigned, most: float) -> Changes | None:
    """Find the elements that differ from those of ``base``; None if that is a share of more than ``most``."""
    words = _changed_words(elements, base)
    if words is None:
        return _changed_singly(elements, base, most)
    shift = 4 - elements.itemsize.bit_length()  # a word has 1 << shift elements
    mine, theirs = (some.view(np.uint64)[words].view(some.dtype) for some in (elements, base))
    found = np.flatnonzero(mine != theirs)
    if found.size > most * elements.size:
        return None
    return Changes(_among(words, shift, found), mine[found], theirs[found])


def _changed_singly(elements: Unsigned, base: Unsigned, most: float) -> Changes | None:
    """Look at each element, unless so many of a sample changed that this is in vain."""
    sampled = some_of(elements) != some_of(base)
    if 2 * np.count_nonzero(sampled) > (1 + most) * sampled.size:
        return None
    is_changed = elements != base
    if np.count_nonzero(is_changed) > most * elements.size:
        return None
    indices = np.flatnonzero(is_changed)
    return Changes(indices, elements[indices], base[indices])


def _changed_words(elements: Unsigned, base: Unsigned) -> Indices | None:
    """The words of 8 bytes that differ, where that spares work: where they are few.

    Where they are very few, only the lines of `_LINE` words that differ are looked at word by word.
    """
    if elements.nbytes % 8:
        return None
    differ = scratch("flags", elements.nbytes // 8).view(bool)
    np.not_equal(elements.view(np.uint64), base.view(np.uint64), out=differ)
    count = np.count_nonzero(differ)
    if count > differ.size // 2:
        return None
    if count > differ.size // 16 or differ.size % _LINE:
        return np.flatnonzero(differ)
    of_lines = differ.view(np.uint64)
    lines = np.flatnonzero(of_lines != 0)  # of bools it takes a fifth of the time that other types take
    return _among(lines, 3, np.flatnonzero(of_lines[lines].view(bool)))


def _among(groups: Indices, shift: int, found: Indices) -> Indices:
    """Which ones they are that were ``found`` in some groups of 1 << shift."""
    indices: Indices = groups[found >> shift]
    indices <<= shift
    indices += found & (1 << shift) - 1
    return indices


def encode_gaps(indices: Indices) -> Bytes:
    """Encode indices, which ascend."""
    between = indices.copy()
    between[1:] -= indices[:-1]
    between[1:] -= 1
    more = between // MORE
    ends = more.cumsum()
    ends += np.arange(ends.size)
    gaps = np.empty(ends[-1] + 1 if ends.size else 0, np.uint8)
    gaps.fill(MORE)
    more *= MORE
    between -= more
    gaps[ends] = between
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
        steps = block.astype(np.int64)
        steps += is_end
        np.cumsum(steps, out=steps)
        found = steps[is_end]
        found += behind - 1
        behind += int(steps[-1])
        yield found
