"""Routes between versions of a single cell, as a reference for those of extents."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from casckpt.format.extents import StoredCell
from casckpt.plan.routes import Link


def links(cell: StoredCell) -> Iterator[Link]:
    """Iterate over the links from a cell to the last of its bases."""
    for version in cell.chain:
        if version.base is not None:
            yield version.digest, version.base.digest


class Route(NamedTuple):
    """The cells whose frames are undone, followed by those whose frames are decoded."""

    undone: Sequence[StoredCell]
    decoded: Sequence[StoredCell]

    def cost(self, kept: Container[Link] = ()) -> int:
        """Sum the bytes to read. The ``kept`` frames are already in memory."""
        every = (*self.undone, *self.decoded)
        return sum(cell.stored for cell in every if cell.base is None or (cell.digest, cell.base.digest) not in kept)


def find_route(held: StoredCell, wanted: StoredCell, kept: Container[Link] = ()) -> Route | None:
    """Find the route that reads the fewest bytes between two cells of equal size. The ``kept`` frames are in memory.

    Returns None if the chains do not meet, or if reading ``wanted`` with all of its bases is not more expensive.
    """
    up, down = list(held.chain), list(wanted.chain)
    places = {cell.digest: number for number, cell in enumerate(down)}
    meetings = [(number, places[cell.digest]) for number, cell in enumerate(up) if cell.digest in places]
    routes = [Route(up[:behind], down[:ahead][::-1]) for behind, ahead in meetings]
    best = min(routes, key=lambda route: route.cost(kept), default=None)
    return best if best is not None and best.cost(kept) < sum(cell.stored for cell in down) else None
