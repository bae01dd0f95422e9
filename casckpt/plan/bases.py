"""Bases: since which earlier version of some cells their next one is stored as a difference. Pure.

The cells are those of one row of a manifest: they lie together and have their bases in common. All that is known of
them is what that manifest says: how many bytes each delta has that leads from their key to the parent's version. So
every rank decides alike, and a run that was killed decides as if it had not been.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

MAX_DELTAS = 4
"""From a key to any version. The format allows more; each is one more pass over the cell in a load."""

_SHARE = 1 / 6  # of the plain bytes, for all deltas: a quarter of what bfloat16 weights have in planes
_SPREAD = 1 / 4  # of that, more or less, so that rows which change alike do not have new keys in one save


def choose_base(deltas: Sequence[int], nbytes: int, place: str) -> int | None:
    """Choose how many deltas lie between the parent's version and the base of the next one.

    While there are fewer than `MAX_DELTAS`, the base is the parent's version. Then the newest are left behind, as long
    as the next is not larger than all of these and the next version's own change: so each delta that stays is about as
    large as all behind it, and what is stored anew grows with the logarithm of the versions, not with their number
    (the merges of a log-structured tree; O'Neil et al. 1996).

    Args:
        deltas: stored bytes of each, the parent's own first; none where the parent's version is stored by itself.
        nbytes: plain bytes of the cells.
        place: tells these cells from others, in any save of them: the key of the tensor and where they begin.

    Returns:
        0 for the parent's version; 1 for the base of that, whose bytes are had by undoing its delta; and so on, up to
        ``len(deltas)`` for the key. None where the next version is to be a new key.
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
    """Bytes of deltas beyond which a load costs too much."""
    where = crc32(place.encode()) / (1 << 32)
    return nbytes * _SHARE * (1 + _SPREAD * (2 * where - 1))
