"""Routes between two versions of a cell, by the frames that tell one from the other. Pure; nothing here reads.

A cell stands on a chain of bases. Where the chains of two versions meet, one becomes the other: its own frames are
undone down to where they meet, and the frames of the other are decoded from there. No key is read for that.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from casckpt.format.extents import StoredCell
from casckpt.format.names import CellDigest

Link: TypeAlias = tuple[CellDigest, CellDigest]
"""What a frame tells, and from what: the digests of a cell and of its base. Wherever it lies, it does the same."""


class Route(NamedTuple):
    """The cells whose frames are ``undone``, and then those whose frames are ``decoded``, in this order."""

    undone: Sequence[StoredCell]
    decoded: Sequence[StoredCell]

    def cost(self, kept: Container[Link] = ()) -> int:
        """Add up the bytes that are read; the frames ``kept`` are at hand."""
        every = (*self.undone, *self.decoded)
        return sum(cell.stored for cell in every if cell.base is None or (cell.digest, cell.base.digest) not in kept)


def links(cell: StoredCell) -> Iterator[Link]:
    """Iterate over the frames that tell a cell from the last of its bases."""
    for one in cell.chain:
        if one.base is not None:
            yield one.digest, one.base.digest


def find_route(held: StoredCell, wanted: StoredCell, kept: Container[Link] = ()) -> Route | None:
    """Find the way from one cell to another of as many bytes that reads the least; the frames ``kept`` are at hand.

    None where the chains do not meet, or where reading ``wanted`` by itself, with all of its bases, is not more.
    """
    up, down = list(held.chain), list(wanted.chain)
    places = {cell.digest: number for number, cell in enumerate(down)}
    meetings = [(number, places[cell.digest]) for number, cell in enumerate(up) if cell.digest in places]
    routes = [Route(up[:behind], down[:ahead][::-1]) for behind, ahead in meetings]
    best = min(routes, key=lambda route: route.cost(kept), default=None)
    return best if best is not None and best.cost(kept) < sum(cell.stored for cell in down) else None
