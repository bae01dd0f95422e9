"""BLAKE3 hashes of bytes, as hex strings. The digests used by the format are in `casckpt.format.digest`.

No other module imports blake3.
"""

from __future__ import annotations

from typing import TypeAlias

from blake3 import blake3

Buffer: TypeAlias = bytes | bytearray | memoryview


def hex_digest(data: Buffer) -> str:
    """Compute the digest of all of ``data``, as the 64 hex digits that b3sum prints."""
    return blake3(data).hexdigest()
