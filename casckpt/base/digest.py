"""BLAKE3 of bytes, as text. The digests of the format are in `casckpt.format.digest`.

No other module imports blake3.
"""

from __future__ import annotations

from typing import TypeAlias

from blake3 import blake3

Buffer: TypeAlias = bytes | bytearray | memoryview


def hex_digest(data: Buffer) -> str:
    """Compute the digest of a whole object: 64 hex digits, as b3sum prints them."""
    return blake3(data).hexdigest()
