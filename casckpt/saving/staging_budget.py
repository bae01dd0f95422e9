"""Limits the memory that the copies of background saves take on each host.

Every rank sends the size of its copy, and rank 0 adds up the sizes of each host. If a sum is too large, the save runs
in the foreground, without copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_MOST = 0.8  # of the free memory; the rest is for the buffers of the save, and for what the program still allocates


class Copy(NamedTuple):
    """The memory for one rank's copy, in bytes.

    ``size``: what the copy takes. ``held``: what it takes already. ``limit``: the maximum for all copies on the host,
    or None for a fixed part of what is ``free``. Both are None if the rank needs no more memory.
    """

    host: str
    size: int
    held: int
    limit: int | None = None
    free: int | None = None


class Shortage(NamedTuple):
    """The bytes that all copies on the host of ``rank`` would take, and the maximum."""

    total: int
    most: int
    rank: int


def shortages(copies: Sequence[Copy]) -> Iterator[Shortage]:
    """Yield a shortage for each rank whose copy does not fit. ``copies``: the copies by rank."""
    total, held = Counter[str](), Counter[str]()
    for copy in copies:
        total[copy.host] += copy.size
        held[copy.host] += copy.held
    for rank, copy in enumerate(copies):
        most = copy.limit
        if most is None and copy.free is not None:
            most = int(_MOST * (copy.free + held[copy.host]))
        if most is not None and total[copy.host] > most:
            yield Shortage(total[copy.host], most, rank)
