"""Byte planes: the lowest bytes of all elements, then the next ones. In float data the planes compress differently.

The top byte of a float mixes the sign, which is noise, with the exponent, which is not. So elements may be **rotated**
to the left by one bit, which moves the sign below the mantissa.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from casckpt.base.digest import Buffer
from casckpt.format.encodings.parts import Part, PartReader, encode_part
from casckpt.format.encodings.scratch import Bytes, Unsigned, scratch

BLOCK = 1 << 16
"""Elements at a time: what is in between stays in the cache."""
SAMPLE = 2048
_PIECES = 8
NOISE = 7.75
"""Bits of entropy in a byte, above which no coder is tried."""


def split(elements: Unsigned, *, rotated: bool) -> Bytes:
    """Split into planes, the lowest first: an array of the shape (bytes of an element, elements), of scratch."""
    width, count = elements.itemsize, elements.size
    planes = scratch("planes", elements.nbytes).reshape(width, count)
    for begin in range(0, count, BLOCK):
        block = elements[begin : begin + BLOCK]
        for place in range(width):
            _narrow(block, place, planes[place, begin : begin + BLOCK], rotated=rotated)
    return planes


def _narrow(block: Unsigned, place: int, plane: Bytes, *, rotated: bool) -> None:
    """Write the bytes of one place."""
    shifted = scratch("shifted", block.nbytes).view(block.dtype)
    if rotated and not place:
        np.left_shift(block, 1, out=shifted)
        sign = scratch("sign", block.nbytes).view(block.dtype)
        np.right_shift(block, 8 * block.itemsize - 1, out=sign)
        np.bitwise_or(shifted, sign, out=shifted)
    else:
        np.right_shift(block, 8 * place - rotated, out=shifted)
    np.copyto(plane, shifted, casting="unsafe")


def join(planes: Sequence[Part], begin: int, out: Unsigned, *, rotated: bool) -> None:
    """Write the elements from ``begin`` on that ``planes`` are of, as many as ``out`` has (at most `BLOCK`)."""
    other = scratch("other", out.nbytes).view(out.dtype)
    is_zero = True  # above the plane at hand, as the upper ones of small differences are
    for plane in reversed(planes):
        part = plane if isinstance(plane, int) else plane[begin : begin + out.size]
        if is_zero:
            np.copyto(out, part)
            is_zero = isinstance(plane, int) and not plane
            continue
        np.left_shift(out, 8, out=out)
        np.copyto(other, part)
        np.bitwise_or(out, other, out=out)
    if rotated:
        np.left_shift(out, 8 * out.itemsize - 1, out=other)
        np.right_shift(out, 1, out=out)
        np.bitwise_or(out, other, out=out)


class Outlook(NamedTuple):
    """An estimate from a sample. ``share``: encoded bytes per byte. ``noise``: planes to leave raw."""

    share: float
    noise: list[bool]


def foresee(some: Unsigned, *, rotated: bool = False) -> Outlook:
    """Estimate the size of the encoded elements from a sample."""
    bits = entropy(split(some, rotated=rotated))
    noise = bits > NOISE
    return Outlook(float(np.where(noise, 8.0, bits).mean()) / 8, noise.tolist())


def some_of(elements: Unsigned) -> Unsigned:
    """View `SAMPLE` elements in place, in pieces from all over; all of them where there are no more."""
    if elements.size <= SAMPLE:
        return elements
    rows = elements[: elements.size // _PIECES * _PIECES].reshape(_PIECES, -1)
    return rows[:, : SAMPLE // _PIECES]


def sample(elements: Unsigned) -> Unsigned:
    """Copy those that `some_of` views."""
    return some_of(elements).reshape(-1)


def entropy(planes: Bytes) -> npt.NDArray[np.float64]:
    """Compute, for each plane, the bits that a byte needs on average where each is coded by itself."""
    width, count = planes.shape
    places = np.arange(0, 256 * width, 256)[:, None]
    counts = np.bincount((planes + places).reshape(-1), minlength=256 * width).reshape(width, 256)
    bits: npt.NDArray[np.float64] = np.log2(count) - (counts * np.log2(np.maximum(counts, 1))).sum(axis=1) / count
    return bits


def encode_parts(elements: Unsigned, noise: Iterable[bool] = repeat(False), *, rotated: bool = False) -> list[Buffer]:
    """Encode the planes, a part for each; ``noise``: which of them are not worth trying."""
    planes = split(elements, rotated=rotated)
    return [part for plane, is_noise in zip(planes, noise, strict=False) for part in encode_part(plane, noise=is_noise)]


def read_parts(reader: PartReader, width: int, count: int) -> list[Part]:
    """Read the planes of ``count`` elements. Raises Refused."""
    return [reader.part(count) for _ in range(width)]
