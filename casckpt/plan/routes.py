"""Routes between two versions of a cell, by the frames that tell one from the other. Pure; nothing here reads.

A cell stands on a chain of bases. Where the chains of two versions meet, one becomes the other: its own frames are
undone down to where they meet, and the frames of the other are decoded from there. No key is read for that.

Cells that were saved together mostly go the same way. So ways are looked for by extents, all cells of one at a time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from casckpt.format.extents import DIGEST_BYTES, Extent, ExtentTable, StoredCell
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


class Span(NamedTuple):
    """Cells of one box that several extents have: the elements [lo, hi), cut at the multiples of ``cell``.

    ``itemsize``: bytes of an element.
    """

    lo: int
    hi: int
    cell: int
    itemsize: int

    @property
    def size(self) -> int:
        """How many cells they are."""
        return -(-self.hi // self.cell) - self.lo // self.cell

    def apart(self) -> Iterator[Span]:
        """Iterate over the cells, each by itself."""
        return (self._replace(lo=lo, hi=hi) for lo, hi in self.bounds)

    @property
    def bounds(self) -> Iterator[tuple[int, int]]:
        """Iterate over the elements [lo, hi) of each cell."""
        first, last = self.lo // self.cell, -(-self.hi // self.cell)
        return ((max(n * self.cell, self.lo), min((n + 1) * self.cell, self.hi)) for n in range(first, last))

    def _numbers(self, extent: Extent) -> slice:
        """Which cells of an extent they are."""
        first = extent.lo // self.cell
        return slice(self.lo // self.cell - first, -(-self.hi // self.cell) - first)

    def digests(self, extent: Extent) -> bytes:
        """Return what an extent has as their digests, one behind the other."""
        numbers = self._numbers(extent)
        return extent.digests[numbers.start * DIGEST_BYTES : numbers.stop * DIGEST_BYTES]

    def each_digest(self, extent: Extent) -> list[CellDigest]:
        """Return their digests."""
        every = self.digests(extent)
        return [CellDigest(every[at : at + DIGEST_BYTES]) for at in range(0, len(every), DIGEST_BYTES)]

    def links(self, extent: Extent) -> list[Link]:
        """Return what their frames in a coded extent tell, and from what."""
        base = None if extent.coding is None else extent.coding.base
        return [] if base is None else list(zip(self.each_digest(extent), self.each_digest(base), strict=True))

    def all_links(self, extent: Extent) -> Iterator[Link]:
        """Iterate over the frames that tell them from the last of their bases."""
        for one in extent.chain:
            yield from self.links(one)

    def places(self, extent: Extent) -> list[tuple[int, int, int]]:
        """Return the blob, offset and bytes of what is stored of each."""
        numbers, size = self._numbers(extent), self.itemsize
        if extent.coding is None:
            at = extent.offset - extent.lo * size
            return [(extent.blob, at + lo * size, (hi - lo) * size) for lo, hi in self.bounds]
        lengths = extent.coding.lengths
        offsets = list(accumulate(lengths, initial=extent.offset))
        return [(extent.blob, at, nbytes) for at, nbytes in zip(offsets[numbers], lengths[numbers], strict=True)]


class ExtentRoute(NamedTuple):
    """The extents whose frames are ``undone``, and then those whose frames are ``decoded``, of all cells of a span."""

    undone: Sequence[Extent]
    decoded: Sequence[Extent]


def within(table: ExtentTable, extent: Extent, lo: int, hi: int) -> Span:
    """Return the cells of an extent that hold any of the elements [lo, hi)."""
    begin, end = lo // table.cell * table.cell, -(-hi // table.cell) * table.cell
    return Span(max(extent.lo, begin), min(extent.hi, end), table.cell, table.itemsize)


def common(held: Iterable[Extent], wanted: Extent, span: Span) -> Iterator[tuple[Extent, Span]]:
    """Iterate over the cells of a span of ``wanted`` that one of ``held``, extents of its box, has too."""
    for one in held:
        lo, hi = max(one.lo, span.lo), min(one.hi, span.hi)
        if one.lo != wanted.lo:  # a cell that begins elsewhere is another one
            lo = -(-lo // span.cell) * span.cell
        if one.hi != wanted.hi:
            hi = hi // span.cell * span.cell
        if lo < hi:
            yield one, span._replace(lo=lo, hi=hi)


def find_extent_route(held: Extent, wanted: Extent, span: Span, kept: Container[Link] = ()) -> ExtentRoute | None:
    """Find the way that `find_route` does, where it is the same one for all cells of a span; else None."""
    up, down = list(held.chain), list(wanted.chain)
    places = {span.digests(one): number for number, one in reversed(list(enumerate(down)))}
    first = places.get(span.digests(held))
    if first is not None:  # nothing is undone, so all others are longer
        return ExtentRoute((), down[:first][::-1])
    meetings = [(number, places[span.digests(one)]) for number, one in enumerate(up) if span.digests(one) in places]
    ways = [ExtentRoute(up[:behind], down[:ahead][::-1]) for behind, ahead in meetings]
    costs = [sum(_cost(one, span, kept) for one in (*way.undone, *way.decoded)) for way in ways]
    alone = sum(nbytes for one in down for _, _, nbytes in span.places(one))
    return ways[costs.index(min(costs))] if costs and min(costs) < alone else None


def _cost(extent: Extent, span: Span, kept: Container[Link]) -> int:
    """Add up the bytes that are read of frames; those ``kept`` are at hand."""
    pairs = zip(span.links(extent), span.places(extent), strict=True)
    return sum(nbytes for link, (_, _, nbytes) in pairs if link not in kept)
