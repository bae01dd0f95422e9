"""The pieces of a section, which are read and verified separately. Each piece belongs to an entry or an object.

Consecutive pieces form groups, and each group has a hash. In a small manifest, a group is a single piece, so that
damage affects only that piece. In a large manifest, a group has several KiB, so that the hashes, which every reader
needs, remain small.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import accumulate, pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from casckpt.base.digest import Buffer
from casckpt.base.groups import runs
from casckpt.base.lazy import cached_property
from casckpt.errors import Damaged, Refused
from casckpt.format.digest import cell_digest
from casckpt.format.sections.columns import Ints, pack, unpack
from casckpt.format.sections.head import Read, Section

_HASH = 32
_GROUP_BYTES, _FEW = 16 << 10, 256
_SMALL = 64 << 10  # the size in bytes of the largest section that is read at once


class Pieces(msgspec.Struct, frozen=True, array_like=True):
    """The pieces' sizes, as a column, and a BLAKE3 hash for each group of ``each`` pieces, or fewer at the end."""

    lengths: bytes
    each: int
    hashes: bytes


def cut(pieces: Sequence[Buffer]) -> tuple[Pieces, bytes]:
    """Return the table of ``pieces``, and the section that contains them one after the other."""
    data, lengths = b"".join(pieces), list(map(len, pieces))
    each = max(1, min(-(-len(pieces) // _FEW), len(pieces) * _GROUP_BYTES // max(1, len(data))))
    view, ends = memoryview(data), list(accumulate(lengths, initial=0))
    hashes = [cell_digest(view[lo:hi]) for lo, hi in pairwise([*ends[:-1:each], ends[-1]])]
    return Pieces(pack(lengths), each, b"".join(hashes)), data


class PieceReader:
    """The ``count`` pieces of a section, each read and verified on use. Thread-safe.

    Raises Refused if the table does not match the section.
    """

    def __init__(self, table: Pieces, count: int, section: Section, read: Read) -> None:
        self._section, self._read, self._hashes = section, read, table.hashes
        lengths, self._each = unpack(table.lengths), min(table.each, max(count, 1))
        if len(lengths) != count or self._each < 1:
            raise Refused(f"the table of its section {section.name!r} does not have {count} pieces")
        self._ends = ends = list(accumulate(lengths, initial=0))
        self._bounds = [*ends[: -1 : self._each], ends[-1]]  # the start of each group, and the end of the last group
        if ends[-1] != section.length or len(table.hashes) != _HASH * (len(self._bounds) - 1):
            raise Refused(
                f"the pieces of its section {section.name!r} do not add up to its size, or the number of hashes is "
                "wrong"
            )
        self._held: dict[int, memoryview | None] = {}  # None: the group does not match its hash
        self.is_damaged = False

    def __len__(self) -> int:
        return len(self._ends) - 1

    def length(self, number: int) -> int:
        """Return the size of a piece in bytes."""
        return self._ends[number + 1] - self._ends[number]

    def get(self, number: int) -> memoryview:
        """Return a piece. Raises Damaged if its group does not match its hash, and read errors."""
        group, ends = number // self._each, self._ends
        try:
            held = self._held[group]
        except KeyError:
            self._fetch([group])
            held = self._held[group]
        if held is None:
            raise Damaged(f"its section {self._section.name!r} does not match its hash here")
        begin = self._bounds[group]
        return held[ends[number] - begin : ends[number + 1] - begin]

    def is_right(self, number: int) -> bool:
        """Return whether a piece that was read matches its hash."""
        try:
            self.get(number)
        except Damaged:
            return False
        return True

    def ready(self, numbers: Iterable[int]) -> None:
        """Of these pieces, read those that are not in memory yet. Raises read errors. `get` reports damage."""
        self._ready({number // self._each for number in numbers})

    def _ready(self, groups: Set[int]) -> None:
        if missing := groups - self._held.keys():
            self._fetch(sorted(missing))

    @cached_property
    def _all_ends(self) -> Ints:
        return np.array(self._ends)

    def rows(self, numbers: Ints, length: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8]]:
        """Return which of these pieces match their hash and have ``length`` bytes, and an array with a row for each.

        The rows of all other pieces are 0. Raises read errors.
        """
        every, group = np.unique(numbers // self._each, return_inverse=True)
        self._ready(set(every.tolist()))
        held = [self._held[number] or b"" for number in every.tolist()]
        data, lengths = b"".join(held), np.array(list(map(len, held)), np.int64)
        starts, begins = np.cumsum(lengths) - lengths, self._all_ends[numbers]
        fits = (lengths[group] > 0) & (self._all_ends[numbers + 1] - begins == length)
        rows = np.zeros(len(numbers), f"V{length}")
        if fits.any():
            pieces = np.ndarray(len(data) - length + 1, rows.dtype, data, strides=1)
            rows[fits] = pieces[(begins - self._all_ends[every[group] * self._each] + starts[group])[fits]]
        return fits, rows.view(np.uint8).reshape(-1, length)

    def _fetch(self, groups: Sequence[int]) -> None:
        """Read groups and verify each. Adjacent groups are read together. A small section is read completely."""
        bounds, start = self._bounds, self._section.offset
        if self._section.length <= _SMALL:
            groups = range(len(bounds) - 1)
        adjacent = list(runs(groups, lambda run, group: group == run[-1] + 1))
        spans = [(start + bounds[run[0]], bounds[run[-1] + 1] - bounds[run[0]]) for run in adjacent]
        found = self._read(spans) if any(length for _, length in spans) else [b""] * len(spans)
        for run, data in zip(adjacent, found, strict=True):
            view, begin = memoryview(data), bounds[run[0]]
            for group in run:
                part = view[bounds[group] - begin : bounds[group + 1] - begin]
                right = self._has_hash(group, part)
                self._held[group] = part if right else None
                self.is_damaged |= not right

    def prove(self, data: Buffer) -> bool:
        """Return whether all pieces in ``data``, the section's bytes, match their hashes."""
        view = memoryview(data)
        return all(self._has_hash(group, view[lo:hi]) for group, (lo, hi) in enumerate(pairwise(self._bounds)))

    def _has_hash(self, group: int, data: Buffer) -> bool:
        return cell_digest(data) == self._hashes[_HASH * group : _HASH * (group + 1)]
