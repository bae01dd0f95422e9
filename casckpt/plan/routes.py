"""Routes between two versions of a cell, by the frames that tell one from the other. Pure; nothing here reads.

A cell stands on a chain of bases. Where the chains of two versions meet, one becomes the other: its own frames are
undone down to where they meet, and the frames of the other are decoded from there. No key is read for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from casckpt.format.extents import StoredCell


class Route(NamedTuple):
    """The cells whose frames are ``undone``, and then those whose frames are ``decoded``, in this order."""

    undone: Sequence[StoredCell]
    decoded: Sequence[StoredCell]

    @property
    def stored(self) -> int:
        """Bytes that are read."""
        return sum(cell.stored for cell in (*self.undone, *self.decoded))


def find_route(held: StoredCell, wanted: StoredCell) -> Route | None:
    """Find the way from one cell to another of as many bytes that reads the least.

    None where the chains do not meet, or where reading ``wanted`` by itself, with all of its bases, is not more.
    """
    up, down = list(held.chain), list(wanted.chain)
    places = {cell.digest: number for number, cell in enumerate(down)}
    meetings = [(number, places[cell.digest]) for number, cell in enumerate(up) if cell.digest in places]
    routes = [Route(up[:behind], down[:ahead][::-1]) for behind, ahead in meetings]
    best = min(routes, key=lambda route: route.stored, default=None)
    return best if best is not None and best.stored < sum(cell.stored for cell in down) else None
