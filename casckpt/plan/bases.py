"""Which version of a cell the next one is told from. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_LINKS = 6
_SHARE = 4


def choose(chain: Sequence[int | None], nbytes: int) -> int | None:
    """Choose the base of a cell of ``nbytes`` bytes: its place in ``chain``, or None for a key.

    ``chain``: bytes of the frames of the parent's cell, of its base, ...; None for what is stored as it is.
    """
    deltas = [stored for stored in chain[:-1] if stored is not None]
    if len(deltas) >= _LINKS or sum(deltas) > nbytes // _SHARE:
        return None
    return 0
