"""Parts of a frame: bytes stored raw, as one constant byte, or as one zstd frame. They often contain byte planes.

::

    1 byte     0 raw, 1 constant, 2 zstd
    4 bytes    how many bytes follow
    bytes      the bytes; the one byte; the zstd frame
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import repeat
from struct import Struct
from threading import local
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from casckpt.base.digest import Buffer
from casckpt.errors import Refused

Unsigned: TypeAlias = npt.NDArray[np.unsignedinteger]
Bytes: TypeAlias = npt.NDArray[np.uint8]

KEPT = 2 << 20
"""The maximum number of bytes that are kept for each name and thread.

A larger buffer exists only as long as it is used.
"""


_KEPT = local()  # its attributes are the arrays of this thread, by name


def scratch(name: str, nbytes: int) -> Bytes:
    """Return ``nbytes`` uninitialized bytes.

    The next call with this ``name`` in this thread may return the same memory.
    """
    arrays: dict[str, Bytes] = vars(_KEPT)
    array = arrays.get(name)
    if array is None or array.size < nbytes:
        array = np.empty(nbytes, np.uint8)
        if nbytes <= KEPT:
            arrays[name] = array
    return array[:nbytes]


if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

WINDOW_LOG = 17
MAX_WINDOW_LOG = 23
"""The largest window that is accepted. RFC 8878 requires every decoder to support this size."""

_LIMITS = {int(zstd.DecompressionParameter.window_log_max): MAX_WINDOW_LOG}


class _Coder(local):
    """A thread's compressor. Creating one for each plane would cost more than compressing a short plane."""

    def __init__(self) -> None:
        self.compressor = zstd.ZstdCompressor(
            options={
                zstd.CompressionParameter.compression_level: 1,
                zstd.CompressionParameter.strategy: zstd.Strategy.fast,
                zstd.CompressionParameter.min_match: 7,
                zstd.CompressionParameter.hash_log: 6,
                zstd.CompressionParameter.window_log: WINDOW_LOG,
            }
        )


_CODER = _Coder()


def compress(data: Buffer) -> bytes:
    """Compress into a single zstd frame. Releases the GIL."""
    return _CODER.compressor.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)


def decompress(data: Buffer, nbytes: int) -> bytes:
    """Decompress a single zstd frame of exactly ``nbytes`` bytes without using more memory than that.

    Raises Refused for any other bytes.
    """
    decoder = zstd.ZstdDecompressor(options=_LIMITS)
    try:
        plain = decoder.decompress(data, max_length=nbytes + 1)
    except zstd.ZstdError as error:
        raise Refused(f"a part of a frame is not a valid zstd frame: {error}") from None
    if not decoder.eof or decoder.unused_data or len(plain) != nbytes:
        raise Refused(f"a part of a frame is not a single zstd frame of {nbytes} bytes")
    return plain


Part: TypeAlias = "Bytes | int"
"""The bytes, or the single value that all of them have."""

_HEAD = Struct("<BI")


class PartKind(IntEnum):
    """How a part is stored."""

    RAW = 0
    CONSTANT = 1
    ZSTD = 2


def encode_part(data: Bytes, *, noise: bool = False) -> list[Buffer]:
    """Encode ``data`` in the smallest form. If ``noise`` is set, do not try to compress it.

    The buffers may be views of ``data``.
    """
    if data.size and data[0] == data[-1] and not (data != data[0]).any():
        return [_HEAD.pack(PartKind.CONSTANT, 1), bytes(data[:1])]
    coded = compress(data.data) if data.size and not noise else data.data
    if len(coded) < data.size:
        return [_HEAD.pack(PartKind.ZSTD, len(coded)), coded]
    return [_HEAD.pack(PartKind.RAW, data.size), data.data]


class PartReader:
    """Reads a frame from its start. ``rest`` are the bytes that have not been read yet."""

    def __init__(self, frame: memoryview) -> None:
        self.rest = frame

    def take(self, nbytes: int) -> memoryview:
        """Read ``nbytes`` bytes. Raises Refused if fewer are left."""
        if nbytes > len(self.rest):
            raise Refused(f"a frame is truncated: {nbytes - len(self.rest)} bytes are missing")
        taken, self.rest = self.rest[:nbytes], self.rest[nbytes:]
        return taken

    def unpack(self, struct: Struct) -> tuple[int, ...]:
        """Read the numbers of a struct."""
        return struct.unpack(self.take(struct.size))

    def part(self, nbytes: int) -> Part:
        """Read a part that decodes to ``nbytes`` bytes. Raises Refused for any other part."""
        kind, stored = self.unpack(_HEAD)
        data = self.take(stored)
        match kind:
            case PartKind.RAW if stored == nbytes:
                return np.frombuffer(data, np.uint8)
            case PartKind.CONSTANT if stored == 1 and nbytes:
                return data[0]
            case PartKind.ZSTD if nbytes:
                return np.frombuffer(decompress(data, nbytes), np.uint8)
        raise Refused(f"a part of a frame has kind {kind} and {stored} bytes, but must decode to {nbytes} bytes")

    def end(self) -> None:
        """Raise Refused if there are bytes left."""
        if len(self.rest):
            raise Refused(f"{len(self.rest)} bytes follow the end of a frame")


BLOCK = 1 << 16
"""The number of elements per block, chosen so that intermediate results fit into the CPU cache."""
SAMPLE = 2048
_PIECES = 8
NOISE = 7.75
"""The entropy, in bits per byte, above which compression is not attempted."""


def split(elements: Unsigned, *, rotated: bool) -> Bytes:
    """Split the elements into byte planes, lowest byte first.

    Returns a scratch array of the shape (bytes per element, elements).
    """
    width, count = elements.itemsize, elements.size
    planes = scratch("planes", elements.nbytes).reshape(width, count)
    for begin in range(0, count, BLOCK):
        block = elements[begin : begin + BLOCK]
        for place in range(width):
            _narrow(block, place, planes[place, begin : begin + BLOCK], rotated=rotated)
    return planes


def _narrow(block: Unsigned, place: int, plane: Bytes, *, rotated: bool) -> None:
    """Write the bytes of a single plane."""
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
    """Fill ``out`` (at most `BLOCK` elements) with the elements of ``planes``, starting at ``begin``."""
    other = scratch("other", out.nbytes).view(out.dtype)
    is_zero = True  # all planes above the current one, as is usual for small differences
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
    """An estimate based on a sample. ``share``: the encoded size divided by the plain size.

    ``noise``: the planes to store raw.
    """

    share: float
    noise: list[bool]


def foresee(some: Unsigned, *, rotated: bool = False) -> Outlook:
    """Estimate the size of the encoded elements from a sample."""
    bits = entropy(split(some, rotated=rotated))
    noise = bits > NOISE
    return Outlook(float(np.where(noise, 8.0, bits).mean()) / 8, noise.tolist())


def some_of(elements: Unsigned) -> Unsigned:
    """View `SAMPLE` elements in place, in evenly spaced pieces. If there are no more than that, view all of them."""
    if elements.size <= SAMPLE:
        return elements
    rows = elements[: elements.size // _PIECES * _PIECES].reshape(_PIECES, -1)
    return rows[:, : SAMPLE // _PIECES]


def sample(elements: Unsigned) -> Unsigned:
    """Copy the elements that `some_of` selects."""
    return some_of(elements).reshape(-1)


def entropy(planes: Bytes) -> npt.NDArray[np.float64]:
    """Compute each plane's entropy, in bits per byte."""
    width, count = planes.shape
    places = np.arange(0, 256 * width, 256)[:, None]
    counts = np.bincount((planes + places).reshape(-1), minlength=256 * width).reshape(width, 256)
    bits: npt.NDArray[np.float64] = np.log2(count) - (counts * np.log2(np.maximum(counts, 1))).sum(axis=1) / count
    return bits


def encode_parts(elements: Unsigned, noise: Iterable[bool] = repeat(False), *, rotated: bool = False) -> list[Buffer]:
    """Encode the planes, one part per plane. ``noise``: the planes that are not compressed."""
    planes = split(elements, rotated=rotated)
    return [part for plane, is_noise in zip(planes, noise, strict=False) for part in encode_part(plane, noise=is_noise)]


def read_parts(reader: PartReader, width: int, count: int) -> list[Part]:
    """Read the planes of ``count`` elements. Raises Refused for invalid parts."""
    return [reader.part(count) for _ in range(width)]
