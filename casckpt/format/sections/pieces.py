"""Pieces of a section that are read apart: each belongs to an entry or object, and is proved without the others.

Consecutive pieces form groups, each with a hash: one piece a group in a small manifest, so that damage hits one alone;
some KiB a group in a large one, so that the hashes, which every reader needs, stay a small part of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from casckpt.errors import Damaged, Refused
from casckpt.format.columns import pack, unpack
from casckpt.format.digest import Buffer, cell_digest
from casckpt.format.sections.head import Read, Section

_HASH = 32
_GROUP_BYTES, _FEW = 16 << 10, 256


class Pieces(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of each piece (column), number of pieces in each group (column), BLAKE3 of each group."""

    lengths: bytes
    groups: bytes
    hashes: bytes


def cut(pieces: Sequence[Buffer]) -> tuple[Pieces, bytes]:
    """Return the table of ``pieces``, and the section that holds them one after the other."""
    data = b"".join(pieces)
    lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    starts = np.cumsum(lengths) - lengths
    step = max(1, min(_GROUP_BYTES, len(data) // _FEW))
    firsts = np.flatnonzero(np.diff(starts // step, prepend=-1))
    view, ends = memoryview(data), [*starts[firsts[1:]].tolist(), len(data)]
    hashes = [cell_digest(view[lo:hi]) for lo, hi in zip(starts[firsts].tolist(), ends, strict=False)]
    return Pieces(pack(lengths), pack(np.diff(firsts, append=len(pieces))), b"".join(hashes)), data


class PieceReader:
    """The ``count`` pieces of a section, each read and proved when it is asked for. Thread-safe.

    Raises Refused if the table does not fit the section.
    """

    def __init__(self, table: Pieces, count: int, section: Section, read: Read) -> None:
        self._section, self._read, self._hashes = section, read, table.hashes
        lengths, groups = unpack(table.lengths), unpack(table.groups)
        possible = not count or (
            int(lengths.max()) <= section.length and 1 <= int(groups.min()) <= int(groups.max()) <= count
        )
        if len(lengths) != count or not possible or len(table.hashes) != _HASH * len(groups):
            raise Refused(f"the table of its section {section.name!r} is not one of {count} pieces")
        ends = np.concatenate([[0], np.cumsum(lengths)])
        if int(ends[-1]) != section.length or int(groups.sum()) != count:
            raise Refused(f"the pieces of its section {section.name!r} do not add up to it")
        self._firsts = np.cumsum(groups) - groups
        self._ends = memoryview(ends.data)  # its items are Python's integers, and quickly had
        self._bounds = ends[np.concatenate([self._firsts, [count]])].tolist()
        self._group_of = memoryview(np.repeat(np.arange(len(groups)), groups).data)
        self._held: dict[int, memoryview | None] = {}  # None: it does not have its hash

    def __len__(self) -> int:
        return len(self._group_of)

    def length(self, number: int) -> int:
        """Return the bytes of a piece."""
        return int(self._ends[number + 1] - self._ends[number])

    @property
    def held_bytes(self) -> int:
        """Bytes that are in memory."""
        return sum(len(data) for data in self._held.values() if data is not None)

    def get(self, number: int) -> memoryview:
        """Return a piece. Raises Damaged if its group does not have its hash, and what reading does."""
        group, ends = self._group_of[number], self._ends
        try:
            held = self._held[group]
        except KeyError:
            self._fetch([group])
            held = self._held[group]
        if held is None:
            raise Damaged(f"its section {self._section.name!r} does not have its hash here")
        begin = self._bounds[group]
        return held[ends[number] - begin : ends[number + 1] - begin]

    def is_right(self, number: int) -> bool:
        """Tell whether a piece, which is at hand, has its hash."""
        try:
            self.get(number)
        except Damaged:
            return False
        return True

    def ready(self, numbers: Iterable[int]) -> None:
        """Read what is missing of these pieces, in few reads. Raises what reading does; `get` tells what is damaged."""
        groups = {self._group_of[number] for number in numbers}
        self._fetch(sorted(groups - self._held.keys()))

    def _fetch(self, groups: Sequence[int]) -> None:
        bounds, start = self._bounds, self._section.offset
        spans: list[tuple[int, int]] = []  # of bytes
        for group in groups:
            lo, hi = bounds[group], bounds[group + 1]
            if spans and lo == spans[-1][1]:
                spans[-1] = (spans[-1][0], hi)
            else:
                spans.append((lo, hi))
        if not spans:
            return
        wanted = [(start + lo, hi - lo) for lo, hi in spans]
        found = self._read(wanted) if any(length for _, length in wanted) else [b""] * len(wanted)
        begins = [lo for lo, _ in spans]
        for group in groups:
            span = bisect_right(begins, bounds[group]) - 1
            at = bounds[group] - begins[span]
            data = memoryview(found[span])[at : at + bounds[group + 1] - bounds[group]]
            digest = self._hashes[_HASH * group : _HASH * (group + 1)]
            self._held[group] = data if cell_digest(data) == digest else None
