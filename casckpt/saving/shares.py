"""The shares of ranks: the extents that each rank stored, their union, and the check that every tensor is complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from casckpt.base.cycle_collector import collector_paused
from casckpt.errors import InvalidInput
from casckpt.format import dtypes
from casckpt.format.extents import ExtentTable, Frame, StoredCell, build, join
from casckpt.format.regions import Region, Shape, holes_and_overlaps, intersect
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.index import Name
from casckpt.format.sections.tables import Extents, Streams, WholeCells
from casckpt.plan.reuse import CellSource
from casckpt.saving.local_entries import Cell, SmallCells
from casckpt.saving.prepare import Prepared
from casckpt.saving.upload import PlacedCell, Upload


@dataclass(frozen=True)
class Share(CellSource):
    """The extents that one rank, or all ranks together, stored or reused, by stream and in order, with their blobs.

    ``unhashed``: the streams with cells that were not hashed because the stream was declared frozen. A rank remembers
    its share of the last save.
    """

    unhashed: frozenset[Name] = frozenset()


@collector_paused()
def share_of(
    prepared: Prepared,
    work: Sequence[Sequence[Cell | SmallCells]],
    places: Sequence[Sequence[PlacedCell | SmallCells]],
    upload: Upload,
) -> Share:
    """Return the share of one rank, in the order of its sources."""
    sources, numbers, cell_bytes = prepared.sources, dict[BlobRef, int](), upload.repo.marker.cell_bytes
    single = WholeCells.none(len(sources))
    cells: dict[int, list[StoredCell]] = defaultdict(list)
    unhashed: set[Name] = set()

    @cache
    def number(blob: int) -> int:
        ref = upload.refs[blob]
        if ref is None:
            raise InvalidInput("a cell was placed in a blob that was never written; this is a bug in casckpt")
        return numbers.setdefault(ref, len(numbers))

    for group, placed in zip(work, places, strict=True):
        for cell, place in zip(group, placed, strict=True):
            if isinstance(cell, SmallCells):
                _add_small(single, cell, number)
            elif isinstance(place, PlacedCell):
                cells[cell.source].append(_stored(cell, place, number))
                if place.unhashed:
                    unhashed.add(sources[cell.source].name)
    others = {}
    for row in np.flatnonzero(~single.is_whole).tolist():
        size = dtypes.itemsize(sources[row].dtype)
        others[row] = build(sources[row].shape, size, cell_bytes // size, cells[row])
    extents = upload.known.parent.with_cells(prepared.streams, cell_bytes, single, others)
    return Share(extents, list(numbers), frozenset(unhashed))


def _stored(cell: Cell, place: PlacedCell, number: Callable[[int], int]) -> StoredCell:
    """Return a cell with the numbers of the blobs in the share."""
    blob, frame, cut = number(place.blob), place.frame, cell.cut
    if frame is not None and frame.base is not None:
        frame = Frame(frame.nbytes, frame.base.moved(lambda base: (number(base.blob), base.offset)))
    return StoredCell(blob, place.offset, cell.nbytes, cell.box, cut.lo, cut.hi, place.digest, frame)


def _add_small(single: WholeCells, cells: SmallCells, number: Callable[[int], int]) -> None:
    """Add cells to the columns of all streams. ``number``: returns the number of a blob in the share."""
    placed, at = cells.placed, cells.source
    numbers = list(map(number, placed.blob.tolist()))
    single.is_whole[at], single.blob[at], single.offset[at] = True, numbers, placed.offset
    single.nbytes[at], single.digest[at] = placed.nbytes, placed.digest


def joined(shares: Sequence[Share]) -> Share:
    """Join shares. The same stream may occur in several of them, with different elements in each."""
    if len(shares) == 1:
        return shares[0]
    numbers: dict[BlobRef, int] = {}
    held: dict[Name, tuple[str, list[tuple[ExtentTable, Sequence[int]]]]] = {}
    for share in shares:
        blobs = [numbers.setdefault(ref, len(numbers)) for ref in share.refs]
        for name, (dtype, table) in share.extents.items():
            held.setdefault(name, (dtype, []))[1].append((table, blobs))
    extents = {name: (dtype, join(parts)) for name, (dtype, parts) in held.items()}
    return Share(Extents.of(extents), list(numbers), frozenset[Name]().union(*(share.unhashed for share in shares)))


@collector_paused()
def merge(shares: Sequence[Share], streams: Streams, cell_bytes: int) -> Share:
    """Join the shares of all ranks. Raises InvalidInput, with key, ranks and region, if a tensor is incomplete."""
    every = joined(shares)
    if not every.extents.has_only(streams):
        extents = {name: every.extents.get(name) or _nothing(*form, cell_bytes) for name, form in streams.items()}
        every = replace(every, extents=Extents.of({**extents, **every.extents}))
    for number, table in every.extents.others.items():
        if not table.is_whole:
            _check_whole(every.extents.names[number], table, shares)
    return every


def _nothing(dtype: str, shape: Shape, cell_bytes: int) -> tuple[str, ExtentTable]:
    size = dtypes.itemsize(dtype)
    return dtype, build(shape, size, cell_bytes // size, [])


def _check_whole(name: Name, table: ExtentTable, shares: Sequence[Share]) -> None:
    holes, overlaps = holes_and_overlaps(table.shape, list(map(table.region, table.extents)))
    if holes:
        raise InvalidInput(
            f"{name[1]!r} of shape {list(table.shape)} is incomplete: no rank holds {', '.join(map(str, holes))}. "
            "Nothing was saved: make sure that some rank holds every element",
            key=name[1],
        )
    if overlaps:
        a, b = (table.region(table.extents[row]) for row in overlaps[0])
        held = [share.extents[name][1] if name in share.extents else None for share in shares]
        ranks = [
            rank
            for rank, part in enumerate(held)
            if part is not None and any(_meets(part.region(extent), a, b) for extent in part.extents)
        ]
        raise InvalidInput(
            f"{name[1]!r} of shape {list(table.shape)}: {a} and {b} overlap (ranks {ranks}). Nothing was saved; "
            "make sure that only one rank holds each element",
            key=name[1],
        )


def _meets(region: Region, one: Region, other: Region) -> bool:
    return bool(intersect(region, one) and intersect(region, other)) or region in (one, other)
