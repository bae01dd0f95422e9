"""From placed cells to extents: each rank's share, the union of all, and the proof that every tensor is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from casckpt.checkpoint.cycle_collector import collecting_later
from casckpt.checkpoint.saving.sources import Cell, Source
from casckpt.checkpoint.saving.upload import PlacedCell
from casckpt.errors import InvalidInput
from casckpt.format import dtypes
from casckpt.format.blob import most_data
from casckpt.format.extents import ExtentTable, StoredCell, build, join, with_blobs
from casckpt.format.keys import parse_txid, run_hash
from casckpt.format.names import TxId
from casckpt.format.regions import Region, Shape, intersect
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.index import Name
from casckpt.plan.coverage import holes_and_overlaps
from casckpt.plan.reuse import KnownCells, used_bytes

Streams: TypeAlias = Mapping[Name, tuple[str, Shape]]
"""Dtype and shape of streams, in the order in which the manifest is to hold them."""


@dataclass(frozen=True)
class Share:
    """What one rank stored or reused, or all: the extents of the streams, in order, and the blobs that these count.

    Also what a rank remembers of its last save; see `casckpt.plan.reuse.CellSource`.
    """

    extents: Mapping[Name, tuple[str, ExtentTable]]
    refs: Sequence[BlobRef]

    def table(self, name: Name, dtype: str, shape: Shape) -> ExtentTable | None:
        """The extents of one stream, if it has it with this dtype and shape."""
        found = self.extents.get(name)
        return found[1] if found is not None and found[0] == dtype and found[1].shape == shape else None

    def tables(self) -> Iterator[ExtentTable]:
        """The extents of all streams."""
        return (table for _, table in self.extents.values())


@collecting_later()
def share_of(
    sources: Sequence[Source],
    work: Sequence[Sequence[Cell]],
    places: Sequence[Sequence[PlacedCell]],
    *,
    known: KnownCells,
    written: Sequence[BlobRef | None],
    cell_bytes: int,
) -> Share:
    """One rank's share, in the order of its sources."""
    numbers: dict[BlobRef, int] = {}
    cells: list[list[StoredCell]] = [[] for _ in sources]
    for group, placed in zip(work, places, strict=True):
        for cell, place in zip(group, placed, strict=True):
            ref = written[place.blob] if place.new else known.blobs[place.blob]
            if ref is None:
                raise InvalidInput("a cell was placed in a blob that was never written; this is a bug of casckpt")
            number = numbers.setdefault(ref, len(numbers))
            elements = cell.group.box, cell.cut.lo, cell.cut.hi
            cells[cell.source].append(
                StoredCell(number, place.offset, cell.nbytes, *elements, place.digest, place.unhashed)
            )
    extents = {}
    for source, mine in zip(sources, cells, strict=True):
        size = dtypes.itemsize(source.dtype)
        extents[source.name] = (source.dtype, build(source.shape, size, cell_bytes // size, mine))
    return Share(extents, list(numbers))


def joined(shares: Sequence[Share]) -> Share:
    """Several shares of one rank as one; a stream may be in several of them, with different elements."""
    if len(shares) == 1:
        return shares[0]
    numbers: dict[BlobRef, int] = {}
    held: dict[Name, list[tuple[str, ExtentTable]]] = {}
    for share in shares:
        blobs = np.array([numbers.setdefault(ref, len(numbers)) for ref in share.refs], dtype=np.int64)
        for name, (dtype, table) in share.extents.items():
            held.setdefault(name, []).append((dtype, with_blobs(table, blobs) if len(table) else table))
    return Share({name: _joined(found) for name, found in held.items()}, list(numbers))


def _joined(found: Sequence[tuple[str, ExtentTable]]) -> tuple[str, ExtentTable]:
    filled = [table for _, table in found if len(table)]
    return found[0][0], join(filled) if len(filled) > 1 else (filled[0] if filled else found[0][1])


@collecting_later()
def merge(shares: Sequence[Share], streams: Streams, cell_bytes: int) -> Share:
    """All ranks' shares as one. Raises InvalidInput, naming key, ranks and region, unless each tensor is whole."""
    numbers: dict[BlobRef, int] = {}
    maps = [np.array([numbers.setdefault(r, len(numbers)) for r in share.refs], dtype=np.int64) for share in shares]
    held: dict[Name, list[tuple[int, ExtentTable]]] = {name: [] for name in streams}
    dtype_of = {name: dtype for name, (dtype, _) in streams.items()}
    for rank, share in enumerate(shares):
        for name, (dtype, table) in share.extents.items():
            dtype_of.setdefault(name, dtype)
            held.setdefault(name, []).append((rank, table))
    extents = {}
    for name, tables in held.items():
        filled = [with_blobs(table, maps[rank]) for rank, table in tables if len(table)]
        if filled:
            table = join(filled)
        elif tables:
            table = tables[0][1]
        else:
            size = dtypes.itemsize(dtype_of[name])
            table = build(streams[name][1], size, cell_bytes // size, [])
        _check_whole(name, tables, table)
        extents[name] = (dtype_of[name], table)
    return Share(extents, list(numbers))


def _check_whole(name: Name, tables: Sequence[tuple[int, ExtentTable]], table: ExtentTable) -> None:
    if table.is_whole:
        return
    holes, overlaps = holes_and_overlaps(table.shape, [table.region(row) for row in range(len(table))])
    if holes:
        raise InvalidInput(
            f"{name[1]!r} of shape {list(table.shape)} is not whole: no rank holds {', '.join(map(str, holes))}. "
            "Nothing was saved; give every element to one rank",
            key=name[1],
        )
    if overlaps:
        one, other = (table.region(row) for row in overlaps[0])
        ranks = sorted(
            {rank for rank, mine in tables for row in range(len(mine)) if _meets(mine.region(row), one, other)}
        )
        raise InvalidInput(
            f"{name[1]!r} of shape {list(table.shape)}: {one} and {other} overlap (ranks {ranks}). Nothing was saved; "
            "give every element to one rank only",
            key=name[1],
        )


def _meets(region: Region, one: Region, other: Region) -> bool:
    return bool(intersect(region, one) and intersect(region, other)) or region in (one, other)


def mark_worn(described: Share, run: str, lives: Callable[[TxId], bool]) -> list[BlobRef]:
    """The blobs, with those marked that the next save of the run is to leave behind.

    Worn is a blob of the run itself, or of a checkpoint that no longer ``lives``, of which less than half is used.
    """
    used = used_bytes(list(described.tables()), len(described.refs))
    mine, ours = run_hash(run), dict[TxId, bool]()
    marked = []
    for ref, nbytes in zip(described.refs, used.tolist(), strict=True):
        half_empty = 2 * nbytes < most_data(ref.size)
        if half_empty and ref.uploader not in ours:
            ours[ref.uploader] = parse_txid(ref.uploader).run_hash == mine or not lives(ref.uploader)
        marked.append(BlobRef(ref.hash, ref.size, ref.uploader, half_empty and ours[ref.uploader]))
    return marked
