"""Zstandard, as little more than Huffman: what it codes are byte planes, in which nothing repeats."""

from __future__ import annotations

import sys
from threading import local

from casckpt.errors import Refused
from casckpt.format.digest import Buffer

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

WINDOW_LOG = 17
MAX_WINDOW_LOG = 23
"""A frame with a larger window is refused; RFC 8878 asks every decoder for as much."""

_LIMITS = {int(zstd.DecompressionParameter.window_log_max): MAX_WINDOW_LOG}


class _Coder(local):
    """The compressor of a thread: a new one for each plane costs more than a short plane."""

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
