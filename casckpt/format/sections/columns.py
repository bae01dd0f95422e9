"""Columns of numbers, each stored in the narrowest unsigned type that fits."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from casckpt.errors import Refused

Ints: TypeAlias = npt.NDArray[np.int64]
_WIDTHS = (1, 2, 4, 8)


def pack(values: npt.ArrayLike) -> bytes:
    """Encode a column: one byte for the width of an item in bytes, then the little-endian unsigned items."""
    array = np.asarray(values, dtype=np.int64).reshape(-1)
    top = int(array.max()) if array.size else 0
    width = next(w for w in _WIDTHS if top < 1 << min(8 * w, 63))
    return bytes([width]) + array.astype(f"<u{width}").tobytes()


def unpack(data: bytes) -> list[int]:
    """Decode the items of a column. Raises Refused for bytes that `pack` cannot produce."""
    width = data[0] if data else 0
    if width not in _WIDTHS or (len(data) - 1) % width:
        raise Refused("a column of the manifest has an invalid width or length")
    items: list[int] = np.frombuffer(data, dtype=f"<u{width}", offset=1).tolist() if width > 1 else list(data[1:])
    if width == 8 and max(items, default=0) > 2**62:
        raise Refused("a column of the manifest contains a number above 2**62")
    return items
