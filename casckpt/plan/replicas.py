"""Replicas: which ranks hold one region, where each save looks at it, and what differs. Pure.

Ranks describe what they hold as in `casckpt.plan.writers`. All of them look at the same places of a row: these follow
from its name and a seed that the ranks of a save have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from casckpt.format.columns import Ints
from casckpt.lazy import cached_property
from casckpt.plan.writers import HeldRegions, WriteRanges

Words = npt.NDArray[np.uint64]

RUNS: Final = 4
"""So many runs of a row are looked at by each save."""
SLICES: Final = 64
"""A rank reads this part of its own share again, of what others write."""


@dataclass(frozen=True)
class Holders:
    """The rows of all ranks, by region. ``held``: of each rank."""

    held: Sequence[HeldRegions]

    @cached_property
    def _rank(self) -> Ints:
        return np.repeat(np.arange(len(self.held)), [len(one) for one in self.held])

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints, Ints]:
        """(rows in the order of their regions, where each region begins in it, how many rows it has)."""
        name, region = (np.concatenate([getattr(one, what) for one in self.held]) for what in ("name", "region"))
        order = np.lexsort((self._rank, region, name))
        new = np.ones(len(order), dtype=bool)
        new[1:] = (name[order][1:] != name[order][:-1]) | (region[order][1:] != region[order][:-1])
        starts = np.flatnonzero(new)
        return order, starts, np.diff(np.append(starts, len(order)))

    def shared(self) -> list[Ints]:
        """Of each row of each rank, how many ranks share out the writing of it; 0 where they do not."""
        order, starts, counts = self._sorted
        every = np.concatenate([one.shared for one in self.held])[order]
        shares = np.logical_and.reduceat(every, starts) if len(starts) else counts > 1
        return self._by_row(np.where((counts > 1) & shares, counts, 0))

    def sets(self) -> list[Words]:
        """Of each row of each rank, a number for the set of ranks that hold it; 0 where that is one rank alone."""
        order, starts, counts = self._sorted
        weights = np.random.default_rng(0).integers(1, 2**62, size=max(len(self.held), 1), dtype=np.uint64)
        sums = np.add.reduceat(weights[self._rank[order]], starts) if len(starts) else np.zeros(0, np.uint64)
        return self._by_row(np.where(counts > 1, sums, np.uint64(0)))

    def differing(self, digests: Sequence[Words]) -> list[list[tuple[int, int]]]:
        """The regions of which holders have different digests: (rank, row) of each holder, by rank."""
        order, starts, counts = self._sorted
        first = np.cumsum([0, *(len(one) for one in self.held)])
        found = np.concatenate(digests)[order]
        if not len(starts):
            return []
        odd = np.flatnonzero(np.logical_or.reduceat(found != np.repeat(found[starts], counts), starts))
        rows = [order[starts[one] : starts[one] + counts[one]] for one in odd.tolist()]
        return [[(int(self._rank[row]), int(row - first[self._rank[row]])) for row in region] for region in rows]

    def _by_row(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        order, _, counts = self._sorted
        found = np.zeros(len(order), values.dtype)
        found[order] = np.repeat(values, counts)
        return np.split(found, np.cumsum([len(one) for one in self.held])[:-1])


def places(name: Words, seed: int, room: Ints, runs: int) -> Ints:
    """Choose where ``runs`` runs of each row begin, a column a run: below ``room``. More runs begin with fewer ones."""
    numbers = np.arange(1, runs + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = _mixed(name[:, None] ^ (numbers[None, :] + np.uint64(seed)))
    return np.asarray(mixed % np.maximum(room, 1).astype(np.uint64)[:, None], np.int64)


def row_digests(words: Words) -> Words:
    """A digest of each row of words: one of a sample, which nobody forges."""
    odd = np.arange(1, words.shape[1] + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    return _mixed(_mixed(words ^ odd).sum(axis=1, dtype=np.uint64))


def _mixed(words: Words) -> Words:
    """Spread the bits of each word over all of it, as splitmix64 does."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def to_read_again(held: HeldRegions, duty: WriteRanges, counts: Ints, turn: int) -> Iterator[tuple[int, int, int]]:
    """Choose (row, lo, hi) of the cells that others write, and that this rank reads in save number ``turn``.

    ``counts``: the ranks that share out each row; 0 for one that is not shared out. A cell of a row that h ranks share
    is chosen once in `SLICES` * (h - 1) turns.
    """
    first, end = held.lo // held.cell, -(-held.hi // held.cell)
    idle = duty.lo == duty.hi
    before = np.where(idle, end, duty.lo // held.cell) - first
    after = np.where(idle, end, -(-duty.hi // held.cell))
    for count in np.unique(counts[counts > 1]).tolist():
        cells = np.where(counts == count, before + end - after, 0)
        ends, period = np.cumsum(cells), SLICES * (count - 1)
        numbers = np.arange(turn % period, int(ends[-1]), period)
        rows = np.searchsorted(ends, numbers, side="right")
        at = numbers - (ends - cells)[rows]
        at = np.where(at < before[rows], first[rows] + at, after[rows] + at - before[rows])
        lo = np.maximum(at * held.cell[rows], held.lo[rows])
        hi = np.minimum((at + 1) * held.cell[rows], held.hi[rows])
        yield from zip(rows.tolist(), lo.tolist(), hi.tolist(), strict=True)
