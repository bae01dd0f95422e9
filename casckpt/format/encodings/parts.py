"""Parts of a frame: bytes stored raw, as one constant byte, or as one zstd frame.

::

    1 byte     0 raw, 1 constant, 2 zstd
    4 bytes    how many bytes follow
    bytes      the bytes; the one byte; the zstd frame
"""

from __future__ import annotations

import sys
from enum import IntEnum
from struct import Struct
from threading import local
from typing import TypeAlias

import numpy as np

from casckpt.base.digest import Buffer
from casckpt.errors import Refused
from casckpt.format.encodings.scratch import Bytes

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

WINDOW_LOG = 17
MAX_WINDOW_LOG = 23
"""A frame with a larger window is refused; RFC 8878 asks every decoder for as much."""

_LIMITS = {int(zstd.DecompressionParameter.window_log_max): MAX_WINDOW_LOG}


class _Coder(local):
    """The compressor of a thread. A new one for each plane would cost more than a short plane."""

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
    """Encode as one frame. Releases the GIL."""
    return _CODER.compressor.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)


def decompress(data: Buffer, nbytes: int) -> bytes:
    """Decode one frame of just ``nbytes`` bytes, and take no more memory than that. Raises Refused for any other."""
    decoder = zstd.ZstdDecompressor(options=_LIMITS)
    try:
        plain = decoder.decompress(data, max_length=nbytes + 1)
    except zstd.ZstdError as error:
        raise Refused(f"a part of a frame is no zstd frame that can be read: {error}") from None
    if not decoder.eof or decoder.unused_data or len(plain) != nbytes:
        raise Refused(f"a part of a frame is not one zstd frame of {nbytes} bytes")
    return plain


Part: TypeAlias = "Bytes | int"
"""The bytes, or the value of all of them."""

_HEAD = Struct("<BI")


class PartKind(IntEnum):
    """How a part is stored."""

    RAW = 0
    CONSTANT = 1
    ZSTD = 2


def encode_part(data: Bytes, *, noise: bool = False) -> list[Buffer]:
    """Encode in the smallest form; ``noise`` is not compressed. The buffers may be views of ``data``."""
    if data.size and data[0] == data[-1] and not (data != data[0]).any():
        return [_HEAD.pack(PartKind.CONSTANT, 1), bytes(data[:1])]
    coded = compress(data.data) if data.size and not noise else data.data
    if len(coded) < data.size:
        return [_HEAD.pack(PartKind.ZSTD, len(coded)), coded]
    return [_HEAD.pack(PartKind.RAW, data.size), data.data]


class PartReader:
    """Reads a frame from its front. ``rest``: what was not read yet."""

    def __init__(self, frame: memoryview) -> None:
        self.rest = frame

    def take(self, nbytes: int) -> memoryview:
        """Read so many bytes. Raises Refused if there are not as many."""
        if nbytes > len(self.rest):
            raise Refused(f"a frame is cut short: it lacks {nbytes - len(self.rest)} bytes")
        taken, self.rest = self.rest[:nbytes], self.rest[nbytes:]
        return taken

    def unpack(self, struct: Struct) -> tuple[int, ...]:
        """Read numbers."""
        return struct.unpack(self.take(struct.size))

    def part(self, nbytes: int) -> Part:
        """Read a part that has ``nbytes`` bytes once it is decoded. Raises Refused for any other."""
        kind, stored = self.unpack(_HEAD)
        data = self.take(stored)
        match kind:
            case PartKind.RAW if stored == nbytes:
                return np.frombuffer(data, np.uint8)
            case PartKind.CONSTANT if stored == 1 and nbytes:
                return data[0]
            case PartKind.ZSTD if nbytes:
                return np.frombuffer(decompress(data, nbytes), np.uint8)
        raise Refused(f"a part of a frame has kind {kind} and {stored} bytes, where it is to give {nbytes}")

    def end(self) -> None:
        """Raise Refused where something is left."""
        if len(self.rest):
            raise Refused(f"{len(self.rest)} bytes follow a frame")
