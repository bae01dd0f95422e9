"""Division of work: of every region that several ranks hold, the part that each of them writes. Pure.

A region that one rank holds, that rank writes. What is the same on all of its holders (a replica) is shared out among
them, balanced by the bytes that each has to write altogether, and split at the fixed multiples of the cell size, so
that one huge replica does not land on one rank. Anything else that several ranks hold is written by the lowest of them.

Ranks describe what they hold in columns of numbers, and the plan works on columns: 4,096 ranks of 1,000 tensors are
four million rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from casckpt.format.columns import Ints

Words: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class HeldRegions:
    """What one rank holds, a row a region. All columns are of equal length.

    ``name``, ``region``: hashes that are equal where stream and region are. ``lo``, ``hi``: the region's elements, in
    the row-major order of its box. ``cell``: elements of a cell. ``itemsize``: bytes of an element. ``shared``: is it
    the same on all holders?
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
    """What one rank writes of its rows: the elements [lo, hi) of each; lo == hi for none.

    ``sharing``: how many ranks share out the writing of each row; 0 where they do not.
    """

    lo: Ints
    hi: Ints
    sharing: Ints

    @property
    def elements(self) -> Ints:
        """How many elements of each row."""
        return self.hi - self.lo


class Holders:
    """The rows of all ranks, by region."""

    def __init__(self, held: Sequence[HeldRegions]) -> None:
        lengths = [len(one) for one in held]
        self._first = np.cumsum([0, *lengths])
        self.rank = np.repeat(np.arange(len(held)), lengths)
        name, region, shared = (_joined(held, what) for what in ("name", "region", "shared"))
        self.order = np.lexsort((self.rank, region, name))
        self.new = np.ones(len(self.order), dtype=bool)  # of each sorted row: does a region begin with it?
        same_name = name[self.order][1:] == name[self.order][:-1]
        self.new[1:] = ~(same_name & (region[self.order][1:] == region[self.order][:-1]))
        self.starts = np.flatnonzero(self.new)
        self.counts = np.diff(np.append(self.starts, len(self.order)))
        weights = np.random.default_rng(0).integers(1, 2**62, size=len(held) + 1, dtype=np.uint64)
        some = len(self.starts) > 0
        self.sums = np.add.reduceat(weights[self.rank[self.order]], self.starts) if some else weights[:0]
        """Of each region, a number for the set of ranks that hold it."""
        every = np.logical_and.reduceat(shared[self.order], self.starts) if some else shared
        self.pooled = (self.counts > 1) & every
        """Of each region, whether its holders share out the writing of it."""

    def sets(self) -> list[Words]:
        """Of each row of each rank, a number for the set of ranks that hold it; 0 where that is one rank alone."""
        return self.by_row(np.where(self.counts > 1, self.sums, np.uint64(0)))

    def differing(self, digests: Sequence[Words]) -> list[list[tuple[int, int]]]:
        """The regions of which holders have different digests: (rank, row) of each holder, by rank."""
        found = np.concatenate(digests)[self.order]
        odd = np.cumsum(self.new)[found != np.repeat(found[self.starts], self.counts)] - 1
        rows = [self.order[self.starts[one] :][: self.counts[one]].tolist() for one in np.unique(odd).tolist()]
        return [[(int(self.rank[row]), row - int(self._first[self.rank[row]])) for row in region] for region in rows]

    def by_row(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Spread a value of each region over its rows, rank by rank."""
        found = np.zeros(len(self.order), values.dtype)
        found[self.order] = np.repeat(values, self.counts)
        return np.split(found, self._first[1:-1])


def _joined(held: Sequence[HeldRegions], what: str) -> npt.NDArray[Any]:
    return np.concatenate([getattr(one, what) for one in held])


class _Rows:
    """The rows of all ranks in one table, and how many elements of each are to be written."""

    def __init__(self, held: Sequence[HeldRegions]) -> None:
        self.lo, self.hi, self.cell, self.size = (_joined(held, what) for what in ("lo", "hi", "cell", "itemsize"))
        self.nbytes = (self.hi - self.lo) * self.size
        self.from_, self.to = self.lo.copy(), self.hi.copy()


def plan_writers(held: Sequence[HeldRegions], holders: Holders | None = None) -> list[WriteRanges]:
    """Assign to each rank what it writes. Every element of every distinct region is assigned to exactly one rank."""
    rows, holders = _Rows(held), Holders(held) if holders is None else holders
    order, pooled = holders.order, holders.pooled
    alone = ~pooled[np.cumsum(holders.new) - 1]  # of each sorted row: is its region not shared out?

    later = order[~holders.new & alone]  # whole to the lowest rank, nothing to the others
    rows.to[later] = rows.from_[later]
    fixed = order[alone]
    load = np.zeros(len(held))
    np.add.at(load, holders.rank[fixed], ((rows.to - rows.from_) * rows.size)[fixed])
    for members, pools in _by_holders(holders):
        _share_out(rows, order[holders.starts[pools][:, None] + np.arange(len(members))], members, load)
    ends = np.cumsum([len(one) for one in held])[:-1]
    sharing = holders.by_row(np.where(pooled, holders.counts, 0))
    parts = zip(np.split(rows.from_, ends), np.split(rows.to, ends), sharing, strict=True)
    return [WriteRanges(lo, hi, counts) for lo, hi, counts in parts]


def _by_holders(holders: Holders) -> list[tuple[Ints, Ints]]:
    """Yield (ranks, pools that only these ranks hold), small sets first: they have fewer ways to balance."""
    pools = np.flatnonzero(holders.pooled)
    _, first, which = np.unique(holders.sums[pools], return_index=True, return_inverse=True)
    rank, sets = holders.rank[holders.order], []
    for number, at in enumerate(first):
        start = holders.starts[pools[at]]
        sets.append((rank[start : start + holders.counts[pools[at]]], pools[which == number]))
    return sorted(sets, key=lambda pair: (len(pair[0]), pair[0].tolist()))


def _share_out(rows: _Rows, pools: Ints, members: Ints, load: npt.NDArray[np.float64]) -> None:
    """Cut pools ([pool, member]), as one sequence of bytes, into one stretch for each member; adds to their loads."""
    one = pools[:, 0]
    ends = np.cumsum(rows.nbytes[one])
    bounds = np.cumsum(_quotas(load[members], float(ends[-1])))
    cuts = [rows.lo[one], *(_cut_points(rows, one, ends, bound) for bound in bounds[:-1]), rows.hi[one]]
    for member, (begin, end) in enumerate(pairwise(cuts)):
        stop = np.maximum(begin, end)
        rows.from_[pools[:, member]] = begin
        rows.to[pools[:, member]] = stop
        load[members[member]] += float(((stop - begin) * rows.size[one]).sum())


def _quotas(load: npt.NDArray[np.float64], total: float) -> npt.NDArray[np.float64]:
    """Compute how many bytes each gets so that ``total`` bytes even out the loads as far as possible."""
    level = np.sort(load)
    heights = (total + np.cumsum(level)) / np.arange(1, len(level) + 1)
    reached = np.append(heights[:-1] <= level[1:], True)
    return np.asarray(np.maximum(heights[np.argmax(reached)] - load, 0.0))


def _cut_points(rows: _Rows, one: Ints, ends: Ints, bound: float) -> Ints:
    """Find the element of each pool at which to cut the sequence: where cells of the pool meet, or an end of it.

    That is the place nearest to byte ``bound``, at most half a cell away.
    """
    at = rows.lo[one].copy()
    whole = ends <= bound
    at[whole] = rows.hi[one][whole]
    inside = int(np.searchsorted(ends, bound, side="right"))
    if inside < len(one):
        row = one[inside]
        lo, hi, step = int(rows.lo[row]), int(rows.hi[row]), int(rows.cell[row])
        wanted = hi - float(ends[inside] - bound) / int(rows.size[row])
        at[inside] = min((lo, hi, round(wanted / step) * step), key=lambda cut: abs(cut - wanted))
    return at
