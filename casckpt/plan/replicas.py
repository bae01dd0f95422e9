"""Choice of the elements of replicas that a save compares. Pure.

Ranks describe what they hold as in `casckpt.plan.writers`. All of them sample the same places of a row, which depend on
its name and on a seed that the ranks of a save share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from casckpt.format.columns import Ints
from casckpt.plan.writers import HeldRegions, Words, WriteRanges

RUNS: Final = 4
"""Runs of each row that every save compares."""
MORE_RUNS: Final = 16
"""Runs of a row that ranks send if samples differ: 64 values of float32. The first `RUNS` are the compared ones."""
SLICES: Final = 64
"""In each save a rank reads some cells that others write: 1/64 of its own share."""


def places(name: Words, seed: int, room: Ints, runs: int) -> Ints:
    """Choose the starts, below ``room``, of ``runs`` runs of each row: a column for each run.

    The first columns do not depend on ``runs``.
    """
    numbers = np.arange(1, runs + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = _mixed(name[:, None] ^ (numbers[None, :] + np.uint64(seed)))
    return np.asarray(mixed % np.maximum(room, 1).astype(np.uint64)[:, None], np.int64)


def row_digests(words: Words) -> Words:
    """Digest each row of words. The digest is fast and not cryptographic."""
    odd = np.arange(1, words.shape[1] + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    return _mixed(_mixed(words ^ odd).sum(axis=1, dtype=np.uint64))


def _mixed(words: Words) -> Words:
    """Mix the bits of each word as splitmix64 does."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def to_read_again(held: HeldRegions, ranges: WriteRanges, turn: int) -> Iterator[tuple[int, int, int]]:
    """Choose (row, lo, hi) of the cells that other ranks write and that this rank reads in save number ``turn``.

    A cell of a row that h ranks write together is chosen once in `SLICES` * (h - 1) turns.
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
