"""Pieces of a section that are read and verified separately. Each belongs to one entry or object.

Consecutive pieces form groups, each with a hash. In a small manifest a group is one piece, so that damage affects only
this piece. In a large one a group has some KiB, so that the hashes, which every reader needs, stay small.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import msgspec

from casckpt.base.digest import Buffer
from casckpt.errors import Damaged, Refused
from casckpt.format.columns import pack, unpack
from casckpt.format.digest import cell_digest
from casckpt.format.sections.head import Read, Section

_HASH = 32
_GROUP_BYTES, _FEW = 16 << 10, 256
_SMALL = 64 << 10  # bytes of a section that is read at once


class Pieces(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of each piece (column), BLAKE3 of each group of ``each`` pieces; the last one may have fewer."""

    lengths: bytes
    each: int
    hashes: bytes


def cut(pieces: Sequence[Buffer]) -> tuple[Pieces, bytes]:
    """Return the table of ``pieces``, and the section that holds them one after the other."""
    data, lengths = b"".join(pieces), list(map(len, pieces))
    each = max(1, min(-(-len(pieces) // _FEW), len(pieces) * _GROUP_BYTES // max(1, len(data))))
    view, ends = memoryview(data), list(accumulate(lengths, initial=0))
    hashes = [cell_digest(view[lo:hi]) for lo, hi in pairwise([*ends[:-1:each], ends[-1]])]
    return Pieces(pack(lengths), each, b"".join(hashes)), data


class PieceReader:
    """The ``count`` pieces of a section, each read and verified on use. Safe for use by several threads.

    Raises Refused if the table does not fit the section.
    """

    def __init__(self, table: Pieces, count: int, section: Section, read: Read) -> None:
        self._section, self._read, self._hashes = section, read, table.hashes
        lengths, self._each = unpack(table.lengths), table.each
        if len(lengths) != count or self._each < 1:
            raise Refused(f"the table of its section {section.name!r} is not one of {count} pieces")
        self._ends = ends = list(accumulate(lengths, initial=0))
        self._bounds = [*ends[: -1 : self._each], ends[-1]]  # the start of each group, and the end of the last one
        if ends[-1] != section.length or len(table.hashes) != _HASH * (len(self._bounds) - 1):
            raise Refused(f"the pieces of its section {section.name!r} do not add up to it, or have other hashes")
        self._held: dict[int, memoryview | None] = {}  # None: it does not have its hash
        self.is_damaged = False

    def __len__(self) -> int:
        return len(self._ends) - 1

    def length(self, number: int) -> int:
        """Return the bytes of a piece."""
        return self._ends[number + 1] - self._ends[number]

    def get(self, number: int) -> memoryview:
        """Return a piece. Raises Damaged if its group does not have its hash, and the errors of a read."""
        group, ends = number // self._each, self._ends
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
        """Return whether a piece that was read has its hash."""
        try:
            self.get(number)
        except Damaged:
            return False
        return True

    def ready(self, numbers: Iterable[int]) -> None:
        """Read the missing ones of these pieces, in few reads. Raises the errors of a read. `get` reports damage."""
        groups = {number // self._each for number in numbers}
        if missing := groups - self._held.keys():
            self._fetch(sorted(missing))

    def _fetch(self, groups: Sequence[int]) -> None:
        """Read groups, adjacent ones at once, and verify each. A small section is read completely."""
        bounds, start = self._bounds, self._section.offset
        if self._section.length <= _SMALL:
            groups = range(len(bounds) - 1)
        runs: list[list[int]] = []
        for group in groups:
            if runs and group == runs[-1][-1] + 1:
                runs[-1].append(group)
            else:
                runs.append([group])
        spans = [(start + bounds[run[0]], bounds[run[-1] + 1] - bounds[run[0]]) for run in runs]
        found = self._read(spans) if any(length for _, length in spans) else [b""] * len(spans)
        for run, data in zip(runs, found, strict=True):
            view, begin = memoryview(data), bounds[run[0]]
            for group in run:
                part = view[bounds[group] - begin : bounds[group + 1] - begin]
                right = self._has_hash(group, part)
                self._held[group] = part if right else None
                self.is_damaged |= not right

    def prove(self, data: Buffer) -> bool:
        """Return whether all pieces in ``data``, the section, have their hashes."""
        view = memoryview(data)
        return all(self._has_hash(group, view[lo:hi]) for group, (lo, hi) in enumerate(pairwise(self._bounds)))

    def _has_hash(self, group: int, data: Buffer) -> bool:
        return cell_digest(data) == self._hashes[_HASH * group : _HASH * (group + 1)]
