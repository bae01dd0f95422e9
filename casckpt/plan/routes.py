"""Finds routes between two versions of a cell through their frames, and chooses bases. Performs no I/O.

A coded cell has a chain of bases. The last of them, which has no base, is called the key. If the chains of two versions
meet, one version can be turned into the other: undo the frames of the first down to the common base, and then decode
the frames of the second from that base. This does not read any cell that has no base.

Cells from the same save usually have the same route, so casckpt searches for a single route for all cells of an extent.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias
from zlib import crc32

from casckpt.format.extents import DIGEST_BYTES, Extent, ExtentTable
from casckpt.format.names import CellDigest

Link: TypeAlias = tuple[CellDigest, CellDigest]
"""The digests of a cell and of its base. They identify a frame regardless of where it is stored."""


class Span(NamedTuple):
    """Cells of a box that are in several extents: the elements [lo, hi), split at multiples of ``cell``.

    ``itemsize``: the bytes per element.
    """

    lo: int
    hi: int
    cell: int
    itemsize: int

    @property
    def size(self) -> int:
        """The number of cells."""
        return -(-self.hi // self.cell) - self.lo // self.cell

    def apart(self) -> Iterator[Span]:
        """Iterate over the cells as single-cell spans."""
        return (self._replace(lo=lo, hi=hi) for lo, hi in self.bounds)

    @property
    def bounds(self) -> Iterator[tuple[int, int]]:
        """Iterate over the element ranges [lo, hi) of the cells."""
        first, last = self.lo // self.cell, -(-self.hi // self.cell)
        return ((max(n * self.cell, self.lo), min((n + 1) * self.cell, self.hi)) for n in range(first, last))

    def _numbers(self, extent: Extent) -> slice:
        """Return the positions of these cells in an extent."""
        first = extent.lo // self.cell
        return slice(self.lo // self.cell - first, -(-self.hi // self.cell) - first)

    def digests(self, extent: Extent) -> bytes:
        """Return these cells' digests in an extent, concatenated."""
        numbers = self._numbers(extent)
        return extent.digests[numbers.start * DIGEST_BYTES : numbers.stop * DIGEST_BYTES]

    def each_digest(self, extent: Extent) -> list[CellDigest]:
        """Return these cells' digests in an extent, as a list."""
        every = self.digests(extent)
        return [CellDigest(every[at : at + DIGEST_BYTES]) for at in range(0, len(every), DIGEST_BYTES)]

    def links(self, extent: Extent) -> list[Link]:
        """Return the links from these cells to their bases. There are none if the extent has no bases."""
        base = None if extent.coding is None else extent.coding.base
        return [] if base is None else list(zip(self.each_digest(extent), self.each_digest(base), strict=True))

    def all_links(self, extent: Extent) -> Iterator[Link]:
        """Iterate over the links from these cells to the last of their bases."""
        for version in extent.chain:
            yield from self.links(version)

    def places(self, extent: Extent) -> list[tuple[int, int, int]]:
        """Return (blob, offset, stored bytes) for each cell."""
        numbers, size = self._numbers(extent), self.itemsize
        if extent.coding is None:
            at = extent.offset - extent.lo * size
            return [(extent.blob, at + lo * size, (hi - lo) * size) for lo, hi in self.bounds]
        lengths = extent.coding.lengths
        offsets = list(accumulate(lengths, initial=extent.offset))
        return [(extent.blob, at, nbytes) for at, nbytes in zip(offsets[numbers], lengths[numbers], strict=True)]


class ExtentRoute(NamedTuple):
    """The route for all cells of a span: the extents whose frames are undone, then those whose frames are decoded."""

    undone: Sequence[Extent]
    decoded: Sequence[Extent]


def within(table: ExtentTable, extent: Extent, lo: int, hi: int) -> Span:
    """Return the span of an extent's cells that contain any of the elements [lo, hi)."""
    begin, end = lo // table.cell * table.cell, -(-hi // table.cell) * table.cell
    return Span(max(extent.lo, begin), min(extent.hi, end), table.cell, table.itemsize)


def common(held: Iterable[Extent], wanted: Extent, span: Span) -> Iterator[tuple[Extent, Span]]:
    """Iterate over the cells in a span of ``wanted`` that are also in one of the ``held`` extents of the same box."""
    for extent in held:
        lo, hi = max(extent.lo, span.lo), min(extent.hi, span.hi)
        if extent.lo != wanted.lo:  # a cell that begins elsewhere is a different cell
            lo = -(-lo // span.cell) * span.cell
        if extent.hi != wanted.hi:
            hi = hi // span.cell * span.cell
        if lo < hi:
            yield extent, span._replace(lo=lo, hi=hi)


def find_extent_route(held: Extent, wanted: Extent, span: Span, kept: Container[Link] = ()) -> ExtentRoute | None:
    """Find the route that reads the fewest bytes between all cells of two extents. The ``kept`` frames are in memory.

    Returns None if the cells need different routes, if their chains do not meet, or if reading the ``wanted`` cells
    with all of their bases is not more expensive.
    """
    up, down = list(held.chain), list(wanted.chain)
    places = {span.digests(base): number for number, base in reversed(list(enumerate(down)))}
    first = places.get(span.digests(held))
    if first is not None:  # nothing to undo, so all other routes are longer
        return ExtentRoute((), down[:first][::-1])
    above = [span.digests(base) for base in up]
    meetings = [(number, places[digests]) for number, digests in enumerate(above) if digests in places]
    routes = [ExtentRoute(up[:behind], down[:ahead][::-1]) for behind, ahead in meetings]
    costs = [sum(_cost(extent, span, kept) for extent in (*route.undone, *route.decoded)) for route in routes]
    alone = sum(nbytes for extent in down for _, _, nbytes in span.places(extent))
    return routes[costs.index(min(costs))] if costs and min(costs) < alone else None


def _cost(extent: Extent, span: Span, kept: Container[Link]) -> int:
    """Sum the bytes of the frames to read. The ``kept`` ones are already in memory."""
    pairs = zip(span.links(extent), span.places(extent), strict=True)
    return sum(nbytes for link, (_, _, nbytes) in pairs if link not in kept)


MAX_DELTAS = 4
"""The maximum number of deltas between a key and a version.

The format allows more, but a load needs one pass over the cell for each delta.
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
