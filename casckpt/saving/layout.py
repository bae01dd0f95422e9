"""The layout of a rank: the names, hashes and sizes of its values, without the data.

The layout changes only if the model or the topology changes. Therefore, a rank sends the layout once, and after that
only its fingerprint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt

from casckpt.base.digest import hex_digest
from casckpt.base.lazy import cached_property
from casckpt.errors import InvalidInput
from casckpt.format import dtypes
from casckpt.format.records import changed
from casckpt.format.regions import Box, Shape, normalise
from casckpt.format.sections.index import ATTACHMENT, PART, TENSOR, Name
from casckpt.format.sections.tables import Streams
from casckpt.format.tree import merge
from casckpt.plan.writers import HeldRegions, Holders, Words, WriteRanges, plan_writers
from casckpt.saving.local_entries import LocalEntry
from casckpt.saving.prepare import Prepared
from casckpt.tensors.state import decode_tree, encode_tree

OBJECT = "object"


@dataclass(frozen=True)
class RankLayout:
    """A rank's streams (name, dtype, shape), its rows (`casckpt.plan.writers.HeldRegions`), and its tree.

    There is one row for each piece of a tensor, in source order, followed by one row for each object. ``row_stream``:
    the stream number of each row. ``may_differ``: for each row, see `casckpt.tensors.shards.may_differ`. ``left``:
    keys that this rank leaves to the ranks that own them.
    """

    streams: Sequence[tuple[Name, str, Shape]]
    row_stream: Sequence[int]
    held: HeldRegions
    tree: bytes
    may_differ: npt.NDArray[np.bool_]
    left: Mapping[str, int]

    def stream(self, row: int) -> tuple[Name, str, Shape]:
        """Return the stream of a row."""
        return self.streams[self.row_stream[row]]

    def key(self, row: int) -> str:
        """Return the key of a row."""
        return self.stream(row)[0][1]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the layout. Equal layouts have equal hashes."""
        columns = (self.held.name, self.held.region, self.held.lo, self.held.hi, self.held.shared, self.may_differ)
        text = repr((self.streams, self.left)).encode() + self.tree + b"".join(column.tobytes() for column in columns)
        return hex_digest(text)


def layout_of(prepared: Prepared, cell_bytes: int) -> RankLayout:
    """Return the layout of this rank.

    Large buffers of objects do not have rows, because the rank that writes the object writes them too.
    """
    streams: list[tuple[Name, str, Shape]] = []
    rows: list[tuple[int, int, int, int, int, int, bool, bool]] = []
    row_stream: list[int] = []
    for source in prepared.sources:
        if source.kind != TENSOR:
            continue
        name = _hash(repr((source.name, source.dtype, source.shape)))
        size = dtypes.itemsize(source.dtype)
        for piece in source.pieces:
            region = normalise(piece.region, source.shape)
            where, elements = region_hash(region.box, region.lo, region.hi), cell_bytes // size
            rows.append((name, where, region.lo, region.hi, elements, size, source.replicated, source.may_differ))
            row_stream.append(len(streams))
        streams.append((source.name, source.dtype, source.shape))
    for entry in prepared.objects:
        stream: Name = (OBJECT, entry.key, 0, entry.rank)
        rows.append((_hash(repr(stream)), 0, 0, 1, 1, 1, False, True))
        row_stream.append(len(streams))
        streams.append((stream, "", ()))
    table = np.array(rows, "u8, u8, i8, i8, i8, i8, ?, ?")
    *held, may_differ = (table[column].copy() for column in table.dtype.names or ())
    return RankLayout(streams, row_stream, HeldRegions(*held), prepared.tree, may_differ, prepared.left)


def region_hash(box: Box, lo: int, hi: int) -> int:
    """Return a number that `casckpt.plan.writers` uses to compare regions."""
    return _hash(repr((box.offset, box.shape, lo, hi)))


def _hash(text: str) -> int:
    return int(hex_digest(text.encode())[:16], 16)


@dataclass(frozen=True)
class WritePlan:
    """The assignment of writes to ranks, for one combination of layouts. ``tree``: the tree joined from all ranks.

    ``ranges`` and ``sets`` have one item for each rank. For ``sets``, see `casckpt.plan.writers.Holders.sets`. It is 0
    for rows that are not compared. If ``check`` is "off", these are all rows.
    """

    fingerprints: tuple[str, ...]
    ranges: Sequence[WriteRanges]
    tree: bytes
    streams: Streams
    layouts: Sequence[RankLayout]
    sets: Sequence[Words]
    check: str


def plan_writes(layouts: Sequence[RankLayout], check: str = "sample", whole: Collection[str] = ()) -> WritePlan:
    """Plan the writes for these layouts. Raises InvalidInput, with the key and ranks, if layouts contradict each other.

    Divides a replica among its holders only if ``check`` compares replicas. Never divides a key in ``whole``.
    """
    streams: dict[Name, tuple[str, Shape]] = {}
    first: dict[Name, int] = {}
    for rank, layout in enumerate(layouts):
        for name, dtype, shape in layout.streams:
            known = streams.setdefault(name, (dtype, shape))
            if known != (dtype, shape):
                raise InvalidInput(
                    f"{name[1]!r} is {known[0]} of shape {list(known[1])} on rank {first[name]}, but {dtype} of shape "
                    f"{list(shape)} on rank {rank}; ranks that hold the same key must agree on both (or wrap it in "
                    "casckpt.PerRank)",
                    key=name[1],
                    rank=rank,
                )
            first.setdefault(name, rank)
    _check_kinds(streams)
    _check_owners(layouts, first)
    trees = dict.fromkeys(layout.tree for layout in layouts)
    merged = next(iter(trees))
    if len(trees) > 1:
        merged = encode_tree(merge([decode_tree(data) for data in trees]))
    compared = [_compared(layout, check, whole) for layout in layouts]
    held = [
        replace(layout.held, shared=layout.held.shared & mine) for layout, mine in zip(layouts, compared, strict=True)
    ]
    holders = Holders(held)
    sets = [np.where(mine, every, np.uint64(0)) for mine, every in zip(compared, holders.sets(), strict=True)]
    tensors = {name: form for name, form in streams.items() if name[0] == TENSOR}
    fingerprints = tuple(layout.fingerprint for layout in layouts)
    return WritePlan(fingerprints, plan_writers(held, holders), merged, tensors, layouts, sets, check)


def _compared(layout: RankLayout, check: str, whole: Collection[str]) -> npt.NDArray[np.bool_]:
    """Return whether a save compares each row with the same row on other ranks."""
    if check == "off" or not whole:
        return np.full(len(layout.held), check != "off")
    of_stream = np.array([name[1] not in whole for name, _, _ in layout.streams], dtype=bool)
    return of_stream[np.array(layout.row_stream, dtype=np.int64)]


def _check_owners(layouts: Sequence[RankLayout], first: Mapping[Name, int]) -> None:
    """Raise InvalidInput unless each rank holds the keys that other ranks leave to it."""
    held = {(name[1], rank) for name, rank in first.items()}
    for rank, layout in enumerate(layouts):
        for key, owner in layout.left.items():
            if (key, owner) not in held:
                raise InvalidInput(
                    f"owners assigns {key!r} to rank {owner}, which does not hold the value, although rank {rank} "
                    "does: return a rank that holds the value, or leave the value out of the state on the other "
                    "ranks",
                    key=key,
                    rank=owner,
                )


def _check_kinds(streams: dict[Name, tuple[str, Shape]]) -> None:
    kinds: dict[str, set[tuple[str, bool]]] = {}
    for kind, key, _, rank in streams:
        kinds.setdefault(key, set()).add((kind, rank is not None))
    for key, found in kinds.items():
        if len(found) > 1:
            raise InvalidInput(
                f"{key!r} is a tensor on one rank and something else on another, or it is per rank on only one of them",
                key=key,
            )


def _limited(source: LocalEntry, limits: Sequence[tuple[int, int]]) -> LocalEntry:
    is_whole = source.data is not None and limits == [(0, prod(source.shape))]
    return source if is_whole else changed(source, limits=limits)


def assigned(prepared: Prepared, ranges: WriteRanges, rank: int) -> Prepared:
    """Return the part of the entries that a rank must write according to its ``ranges``."""
    rows = iter(zip(ranges.lo.tolist(), ranges.hi.tolist(), strict=True))
    limits = [(s, [next(rows) for _ in s.pieces]) for s in prepared.sources if s.kind == TENSOR]
    tensors = [_limited(s, mine) for s, mine in limits if any(lo < hi for lo, hi in mine)]
    objects = [entry for entry in prepared.objects if (row := next(rows))[0] < row[1]]
    owned = {(entry.key, entry.rank) for entry in objects}
    buffers = [s for s in prepared.sources if s.kind == PART and (s.key, s.rank) in owned]
    large = [s for s in prepared.sources if s.kind == ATTACHMENT and rank == 0]  # only rank 0 writes attachments
    return Prepared([*tensors, *buffers, *large], objects, prepared.attachments if rank == 0 else [], prepared.tree)
