"""Chooses the base against which the next version of some cells is stored. Pure.

A delta is a frame with a base. A key is a version of the cells without a base. The cells are those of one row in a
manifest: they are stored together and share their bases. The choice depends only on that manifest, which records the
size of each delta between the key and the parent's version. Therefore, all ranks make the same choice, and a resumed
run repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

MAX_DELTAS = 4
"""The maximum number of deltas between a key and a version.

The format allows more, but each delta costs loads a pass over the cell.
"""

_SHARE = 1 / 6  # limit on the total size of all deltas, as a fraction of the plain bytes
_SPREAD = 1 / 4  # variation of this limit, so that rows with similar changes do not all get new keys in the same save


def choose_base(deltas: Sequence[int], nbytes: int, place: str) -> int | None:
    """Choose how many deltas there are between the parent's version and the next version's base.

    While there are fewer than `MAX_DELTAS` deltas, the base is the parent's version. After that, skip the newest
    deltas as long as the next delta is not larger than the sum of these deltas and the change in the next version. As
    a result, each remaining delta is about as large as all newer ones together, and the bytes to store grow with the
    logarithm of the number of versions, like the merges of a log-structured tree (O'Neil et al. 1996).

    Args:
        deltas: The stored bytes of each delta, starting with the parent's own. Empty if the parent's version is a key.
        nbytes: The plain bytes of the cells.
        place: Identifies these cells in all saves: the tensor's key and their first element.

    Returns:
        0 for the parent's version, 1 for its base (the result of undoing its delta), and so on, up to ``len(deltas)``
        for the key. None to make the next version a key.
    """
    if sum(deltas) > _limit(nbytes, place):
        return None
    if len(deltas) < MAX_DELTAS:
        return 0
    left, change = 0, min(deltas)
    while left < len(deltas) and (len(deltas) - left >= MAX_DELTAS or deltas[left] < change):
        change += deltas[left]
        left += 1
    return left


def _limit(nbytes: int, place: str) -> float:
    """Return the maximum number of delta bytes that a load may have to read."""
    where = crc32(place.encode()) / (1 << 32)
    return nbytes * _SHARE * (1 + _SPREAD * (2 * where - 1))
