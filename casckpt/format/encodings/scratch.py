"""Memory that a thread reuses for each cell, because fresh pages are slow."""

from __future__ import annotations

from threading import local
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Unsigned: TypeAlias = npt.NDArray[np.unsignedinteger]
Bytes: TypeAlias = npt.NDArray[np.uint8]

KEPT = 2 << 20
"""The maximum number of bytes that are kept for each name and thread.

A larger buffer exists only as long as it is used.
"""


class _Kept(local):
    def __init__(self) -> None:
        self.arrays: dict[str, Bytes] = {}


_KEPT = _Kept()


def scratch(name: str, nbytes: int) -> Bytes:
    """Return ``nbytes`` uninitialized bytes.

    The next call with this ``name`` in this thread may return the same memory.
    """
    array = _KEPT.arrays.get(name)
    if array is None or array.size < nbytes:
        array = np.empty(nbytes, np.uint8)
        if nbytes <= KEPT:
            _KEPT.arrays[name] = array
    return array[:nbytes]
