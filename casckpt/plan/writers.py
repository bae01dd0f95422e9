"""Divides the writes of a save among the ranks that hold the same regions, and samples these regions. Performs no I/O.

If only one rank holds a region, that rank writes it. The ranks that hold a replica, which is identical on all of them,
share the writing. The division balances the total bytes per rank, and splits only at multiples of the cell size. If
several ranks hold any other region, the lowest of these ranks writes it.

Ranks describe what they hold as columns of numbers, and the plan works on columns, because 4,096 ranks with 1,000
tensors each have four million rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from casckpt.format.sections.columns import Ints

Words: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class HeldRegions:
    """The regions that a rank holds, one per row. All columns have the same length.

    ``name``, ``region``: hashes of the entry's name and of the region, which are equal for equal names and regions.
    ``lo``, ``hi``: the region's elements, in the row-major order of its box. ``cell``: the elements per cell.
    ``itemsize``: the bytes per element. ``shared``: whether the region is identical on all holders.
    """

    name: npt.NDArray[np.uint64]
    region: npt.NDArray[np.uint64]
    lo: Ints
    hi: Ints
    cell: Ints
    itemsize: Ints
    shared: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.lo)


@dataclass(frozen=True)
class WriteRanges:
    """The elements [lo, hi) of each row that a rank writes. lo == hi means that it writes none.

    ``sharing``: the number of ranks that share the writing of each row, or 0.
    """

    lo: Ints
    hi: Ints
    sharing: Ints

    @property
    def elements(self) -> Ints:
        """How many elements of each row the rank writes."""
        return self.hi - self.lo


class Holders:
    """The rows of all ranks, grouped by region."""

    def __init__(self, held: Sequence[HeldRegions]) -> None:
        lengths = [len(regions) for regions in held]
        self._first = np.cumsum([0, *lengths])
        self.rank = np.repeat(np.arange(len(held)), lengths)
        name, region, shared = (_joined(held, what) for what in ("name", "region", "shared"))
        self.order = np.lexsort((self.rank, region, name))
        self.new = np.ones(len(self.order), dtype=bool)  # for each sorted row: whether it starts a new region
        same_name = name[self.order][1:] == name[self.order][:-1]
        self.new[1:] = ~(same_name & (region[self.order][1:] == region[self.order][:-1]))
        self.starts = np.flatnonzero(self.new)
        self.counts = np.diff(np.append(self.starts, len(self.order)))
        weights = np.random.default_rng(0).integers(1, 2**62, size=len(held) + 1, dtype=np.uint64)
        some = len(self.starts) > 0
        self.sums = np.add.reduceat(weights[self.rank[self.order]], self.starts) if some else weights[:0]
        """For each region, a number that identifies the set of ranks that hold it."""
        every = np.logical_and.reduceat(shared[self.order], self.starts) if some else shared
        self.pooled = (self.counts > 1) & every
        """For each region, whether its holders share the writing. Such a region is called a pool."""

    def sets(self) -> list[Words]:
        """Return, for each row of each rank, a number that identifies its set of holders, or 0 for a single holder."""
        return self.by_row(np.where(self.counts > 1, self.sums, np.uint64(0)))

    def differing(self, digests: Sequence[Words]) -> list[list[tuple[int, int]]]:
        """Return the regions whose holders have different digests, as (rank, row) of each holder, sorted by rank."""
        sorted_digests = np.concatenate(digests)[self.order]
        odd = np.cumsum(self.new)[sorted_digests != np.repeat(sorted_digests[self.starts], self.counts)] - 1
        rows = [self.order[self.starts[number] :][: self.counts[number]].tolist() for number in np.unique(odd).tolist()]
        return [[(int(self.rank[row]), row - int(self._first[self.rank[row]])) for row in region] for region in rows]

    def by_row(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Copy each region's value to all of its rows, rank by rank."""
        spread = np.zeros(len(self.order), values.dtype)
        spread[self.order] = np.repeat(values, self.counts)
        return np.split(spread, self._first[1:-1])


def _joined(held: Sequence[HeldRegions], what: str) -> npt.NDArray[Any]:
    return np.concatenate([getattr(regions, what) for regions in held])


class _Rows:
    """The rows of all ranks in one table, with the range of elements to write for each."""

    def __init__(self, held: Sequence[HeldRegions]) -> None:
        self.lo, self.hi, self.cell, self.size = (_joined(held, what) for what in ("lo", "hi", "cell", "itemsize"))
        self.nbytes = (self.hi - self.lo) * self.size
        self.from_, self.to = self.lo.copy(), self.hi.copy()


def plan_writers(held: Sequence[HeldRegions], holders: Holders | None = None) -> list[WriteRanges]:
    """Assign each element of each distinct region to exactly one rank, which writes it."""
    rows, holders = _Rows(held), Holders(held) if holders is None else holders
    order, pooled = holders.order, holders.pooled
    alone = ~pooled[np.cumsum(holders.new) - 1]  # for each sorted row: whether a single rank writes its region

    later = order[~holders.new & alone]  # the lowest rank writes all elements
    rows.to[later] = rows.from_[later]
    fixed = order[alone]
    load = np.zeros(len(held))
    np.add.at(load, holders.rank[fixed], ((rows.to - rows.from_) * rows.size)[fixed])
    for members, pools in _by_holders(holders):
        _share_out(rows, order[holders.starts[pools][:, None] + np.arange(len(members))], members, load)
    ends = np.cumsum([len(regions) for regions in held])[:-1]
    sharing = holders.by_row(np.where(pooled, holders.counts, 0))
    parts = zip(np.split(rows.from_, ends), np.split(rows.to, ends), sharing, strict=True)
    return [WriteRanges(lo, hi, counts) for lo, hi, counts in parts]


def _by_holders(holders: Holders) -> list[tuple[Ints, Ints]]:
    """Return (ranks, pools that exactly these ranks hold).

    Small sets come first, because there are fewer ways to balance them.
    """
    pools = np.flatnonzero(holders.pooled)
    _, first, which = np.unique(holders.sums[pools], return_index=True, return_inverse=True)
    rank, sets = holders.rank[holders.order], []
    for number, at in enumerate(first):
        start = holders.starts[pools[at]]
        sets.append((rank[start : start + holders.counts[pools[at]]], pools[which == number]))
    return sorted(sets, key=lambda pair: (len(pair[0]), pair[0].tolist()))


def _share_out(rows: _Rows, pools: Ints, members: Ints, load: npt.NDArray[np.float64]) -> None:
    """Treat the pools ([pool, member]) as a sequence of bytes, and split it into a range for each member.

    Add these ranges to the loads.
    """
    firsts = pools[:, 0]
    ends = np.cumsum(rows.nbytes[firsts])
    bounds = np.cumsum(_quotas(load[members], float(ends[-1])))
    cuts = [rows.lo[firsts], *(_cut_points(rows, firsts, ends, bound) for bound in bounds[:-1]), rows.hi[firsts]]
    for member, (begin, end) in enumerate(pairwise(cuts)):
        stop = np.maximum(begin, end)
        rows.from_[pools[:, member]] = begin
        rows.to[pools[:, member]] = stop
        load[members[member]] += float(((stop - begin) * rows.size[firsts]).sum())


def _quotas(load: npt.NDArray[np.float64], total: float) -> npt.NDArray[np.float64]:
    """Compute how to distribute ``total`` bytes over the ranks so that their loads are as balanced as possible."""
    level = np.sort(load)
    heights = (total + np.cumsum(level)) / np.arange(1, len(level) + 1)
    reached = np.append(heights[:-1] <= level[1:], True)
    return np.asarray(np.maximum(heights[np.argmax(reached)] - load, 0.0))


def _cut_points(rows: _Rows, firsts: Ints, ends: Ints, bound: float) -> Ints:
    """Find the element of each pool at which to split the sequence: a cell boundary or an end of the pool.

    It is the position nearest to byte ``bound``, at most half a cell away. ``firsts``: the first row of each pool.
    """
    at = rows.lo[firsts].copy()
    whole = ends <= bound
    at[whole] = rows.hi[firsts][whole]
    inside = int(np.searchsorted(ends, bound, side="right"))
    if inside < len(firsts):
        row = firsts[inside]
        lo, hi, step = int(rows.lo[row]), int(rows.hi[row]), int(rows.cell[row])
        wanted = hi - float(ends[inside] - bound) / int(rows.size[row])
        at[inside] = min((lo, hi, round(wanted / step) * step), key=lambda cut: abs(cut - wanted))
    return at


RUNS: Final = 4
"""The number of runs of bytes that every save compares in each row."""
MORE_RUNS: Final = 16
"""The number of runs of bytes that ranks send for a row if samples differ: 64 float32 values.

The first `RUNS` are those that were compared.
"""
SLICES: Final = 64
"""In each save, a rank reads some cells that other ranks write, in total 1/64 of the size of its own share."""


def places(name: Words, seed: int, room: Ints, runs: int) -> Ints:
    """Choose where ``runs`` runs of bytes start in each row, always below ``room``. Returns a column for each run.

    The first columns are the same for any value of ``runs``.
    """
    numbers = np.arange(1, runs + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = _mixed(name[:, None] ^ (numbers[None, :] + np.uint64(seed)))
    return np.asarray(mixed % np.maximum(room, 1).astype(np.uint64)[:, None], np.int64)


def row_digests(words: Words) -> Words:
    """Compute a digest of each row of words. The digest is fast but not cryptographic."""
    odd = np.arange(1, words.shape[1] + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    return _mixed(_mixed(words ^ odd).sum(axis=1, dtype=np.uint64))


def _mixed(words: Words) -> Words:
    """Mix the bits of each word, like splitmix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def to_read_again(held: HeldRegions, ranges: WriteRanges, turn: int) -> Iterator[tuple[int, int, int]]:
    """Choose the cells, as (row, lo, hi), that other ranks write and that this rank reads in save number ``turn``.

    In a row that h ranks write together, each cell is chosen once in `SLICES` * (h - 1) turns.
    """
    first, end = held.lo // held.cell, -(-held.hi // held.cell)
    idle = ranges.lo == ranges.hi
    before = np.where(idle, end, ranges.lo // held.cell) - first
    after = np.where(idle, end, -(-ranges.hi // held.cell))
    for count in np.unique(ranges.sharing[ranges.sharing > 1]).tolist():
        cells = np.where(ranges.sharing == count, before + end - after, 0)
        ends, period = np.cumsum(cells), SLICES * (count - 1)
        numbers = np.arange(turn % period, int(ends[-1]), period)
        rows = np.searchsorted(ends, numbers, side="right")
        at = numbers - (ends - cells)[rows]
        at = np.where(at < before[rows], first[rows] + at, after[rows] + at - before[rows])
        lo = np.maximum(at * held.cell[rows], held.lo[rows])
        hi = np.minimum((at + 1) * held.cell[rows], held.hi[rows])
        yield from zip(rows.tolist(), lo.tolist(), hi.tolist(), strict=True)
