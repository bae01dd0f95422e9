"""What a rank holds, in the form in which ranks compare it: names, hashes and numbers, no data.

The layout of a rank is the same from one save to the next unless the model or the topology changes, so it is sent once
and from then on only its fingerprint is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from casckpt.checkpoint.saving.prepare import Prepared
from casckpt.checkpoint.saving.shares import Streams
from casckpt.errors import InvalidInput
from casckpt.format import dtypes
from casckpt.format.digest import hex_digest
from casckpt.format.regions import Shape, normalise
from casckpt.format.sections.index import ATTACHMENT, PART, TENSOR, Name
from casckpt.format.tree import merge
from casckpt.lazy import cached_property
from casckpt.plan.writers import HeldRegions, WriteRanges, plan_writers
from casckpt.tensors.state import decode_tree, encode_tree

OBJECT = "object"


@dataclass(frozen=True)
class RankLayout:
    """One rank's streams (name, dtype, shape), its rows (`casckpt.plan.writers.HeldRegions`) and its tree.

    A row is a piece of a tensor, in the order of the sources, then an object, in their order. ``row_stream``: the
    stream of each row.
    """

    streams: Sequence[tuple[Name, str, Shape]]
    row_stream: Sequence[int]
    held: HeldRegions
    tree: bytes

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal layouts."""
        columns = (self.held.name, self.held.region, self.held.lo, self.held.hi, self.held.shared)
        text = repr(self.streams).encode() + self.tree + b"".join(column.tobytes() for column in columns)
        return hex_digest(text)


def layout_of(prepared: Prepared, cell_bytes: int) -> RankLayout:
    """The layout of this rank. Large buffers of objects have no rows: they follow their object."""
    streams: list[tuple[Name, str, Shape]] = []
    rows: list[tuple[int, int, int, int, int, int, int, bool]] = []
    row_stream: list[int] = []
    for source in prepared.sources:
        if source.kind != TENSOR:
            continue
        name = _hash(repr((source.name, source.dtype, source.shape)))
        size = dtypes.itemsize(source.dtype)
        for piece in source.pieces:
            region = normalise(piece.region, source.shape)
            where = _hash(repr((region.box.offset, region.box.shape, region.lo, region.hi)))
            rows.append((name, where, region.lo, region.hi, cell_bytes // size, size, len(rows), source.replicated))
            row_stream.append(len(streams))
        streams.append((source.name, source.dtype, source.shape))
    for one in prepared.objects:
        stream: Name = (OBJECT, one.key, 0, one.rank)
        rows.append((_hash(repr(stream)), 0, 0, 1, 1, 1, len(rows), False))
        row_stream.append(len(streams))
        streams.append((stream, "", ()))
    names = np.array([row[0] for row in rows], dtype=np.uint64)
    regions = np.array([row[1] for row in rows], dtype=np.uint64)
    lo, hi, cell, size_column = (np.array([row[i] for row in rows], dtype=np.int64) for i in (2, 3, 4, 5))
    shared = np.array([row[7] for row in rows], dtype=bool)
    return RankLayout(
        streams, row_stream, HeldRegions(names, regions, lo, hi, cell, size_column, shared), prepared.tree
    )


def _hash(text: str) -> int:
    return int(hex_digest(text.encode())[:16], 16)


@dataclass(frozen=True)
class WritePlan:
    """Who writes what, for one combination of layouts. ``tree``: of all ranks together."""

    fingerprints: tuple[str, ...]
    duties: Sequence[WriteRanges]
    tree: bytes
    streams: Streams
    layouts: Sequence[RankLayout]


def plan_writes(layouts: Sequence[RankLayout]) -> WritePlan:
    """The plan for these layouts. Raises InvalidInput, naming key and ranks, where they contradict each other."""
    streams: dict[Name, tuple[str, Shape]] = {}
    first: dict[Name, int] = {}
    for rank, layout in enumerate(layouts):
        for name, dtype, shape in layout.streams:
            known = streams.setdefault(name, (dtype, shape))
            if known != (dtype, shape):
                raise InvalidInput(
                    f"{name[1]!r} is {known[0]} of shape {list(known[1])} on rank {first[name]}, but {dtype} of shape "
                    f"{list(shape)} on rank {rank}; ranks that hold one key must agree (or wrap it in casckpt.PerRank)",
                    key=name[1],
                    rank=rank,
                )
            first.setdefault(name, rank)
    _check_kinds(streams)
    trees = dict.fromkeys(layout.tree for layout in layouts)
    merged = next(iter(trees))
    if len(trees) > 1:
        merged = encode_tree(merge([decode_tree(data) for data in trees]))
    duties = plan_writers([layout.held for layout in layouts])
    tensors = {name: form for name, form in streams.items() if name[0] == TENSOR}
    return WritePlan(tuple(layout.fingerprint for layout in layouts), duties, merged, tensors, layouts)


def _check_kinds(streams: dict[Name, tuple[str, Shape]]) -> None:
    kinds: dict[str, set[tuple[str, bool]]] = {}
    for kind, key, _, rank in streams:
        kinds.setdefault(key, set()).add((kind, rank is not None))
    for key, found in kinds.items():
        if len(found) > 1:
            raise InvalidInput(
                f"{key!r} is a tensor on one rank and something else on another, or per rank on one of them only",
                key=key,
            )


def assigned(prepared: Prepared, duty: WriteRanges | None, rank: int) -> Prepared:
    """This rank's share with only what it is to write."""
    if duty is None:
        return prepared
    ranges = iter(zip(duty.lo.tolist(), duty.hi.tolist(), strict=True))
    tensors = [s.limited([next(ranges) for _ in s.pieces]) for s in prepared.sources if s.kind == TENSOR]
    mine = [one for one in prepared.objects if (pair := next(ranges))[0] < pair[1]]
    owned = {(one.key, one.rank) for one in mine}
    parts = [s for s in prepared.sources if s.kind == PART and (s.key, s.rank) in owned]
    if rank != 0:  # attachments are rank 0's
        return Prepared([*tensors, *parts], mine, [], prepared.tree)
    large = [s for s in prepared.sources if s.kind == ATTACHMENT]
    return Prepared([*tensors, *parts, *large], mine, prepared.attachments, prepared.tree)
