"""Rows of a tensor with coded cells: their frames and the bases of these.

The rows of the tensor come first, then those of the bases, in the order of the rows that have bases. So each base
belongs to one row, and no chain is circular.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.msgpack import Decoder

from casckpt.base.digest import Buffer
from casckpt.errors import Refused
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.extents import DIGEST_BYTES, MAX_LINKS, Coding, Extent

ROW = Struct("<IIIB")
"""As in `casckpt.format.sections.tables`, and the form of the cells."""
AS_THEY_ARE, FRAMES, FRAMES_WITH_BASES = range(3)


class CodedRows(msgspec.Struct, frozen=True, array_like=True):
    """``lengths``: 4 bytes for each cell of a row of frames; ``digests``: 32 for each cell of the bases."""

    rows: bytes
    lengths: bytes
    digests: bytes


_DECODER: Decoder[CodedRows] = Decoder(CodedRows)


class _Row(NamedTuple):
    cells: int
    blob: int
    offset: int
    kind: int


Cut = Callable[[Iterator[tuple[int, int, int]]], Iterator[Extent]]
"""Cuts the cells of a tensor where rows end. It uses all rows."""


def encode_coded(extents: Sequence[Extent]) -> bytes:
    """Encode where the cells lie."""
    every, rows, lengths = list(extents), list[bytes](), list[bytes]()
    for extent in every:  # the loop appends their bases
        kind = AS_THEY_ARE
        if extent.coding is not None:
            kind = FRAMES if extent.coding.base is None else FRAMES_WITH_BASES
            lengths.append(extent.coding.frames)
            every += [] if extent.coding.base is None else [extent.coding.base]
        rows.append(ROW.pack(len(extent.digests) // DIGEST_BYTES, extent.blob, extent.offset, kind))
    digests = [extent.digests for extent in every[len(extents) :]]
    return msgspec.msgpack.encode(CodedRows(b"".join(rows), b"".join(lengths), b"".join(digests)))


def decode_coded(
    packed: Buffer, cut: Cut, blob_sizes: Sequence[int], *, cells: int, itemsize: int, cell_bytes: int
) -> tuple[Extent, ...]:
    """Decode the extents of a tensor of so many ``cells``. Raises Refused, and what msgspec does."""
    stored = _DECODER.decode(packed)
    if len(stored.rows) % ROW.size:
        raise Refused("the last row of a tensor is cut short")
    rows = [_Row(*row) for row in ROW.iter_unpack(stored.rows)]
    extents = list(cut(row[:3] for row in rows[: _covering(rows, cells)]))
    first, bases = len(extents), _add_bases(extents, rows, stored.digests)
    lengths = _lengths(rows, stored.lengths, cell_bytes)
    for number in reversed(range(len(rows))):  # bases before the rows that need them
        one, frames = extents[number], lengths[number]
        nbytes = (one.hi - one.lo) * itemsize if frames is None else int(frames.sum())
        _check(one, nbytes, blob_sizes)
        if frames is not None:
            base = extents[bases[number]] if number in bases else None
            extents[number] = msgspec.structs.replace(one, coding=Coding(frames.tobytes(), base))
    return tuple(extents[:first])


def _covering(rows: Sequence[_Row], cells: int) -> int:
    """Return how many of the rows hold the cells of the tensor itself."""
    number = 0
    while cells > 0 and number < len(rows):
        cells -= rows[number].cells
        number += 1
    return number


def _add_bases(extents: list[Extent], rows: Sequence[_Row], digests: bytes) -> dict[int, int]:
    """Add the extents of all bases, and return which row is whose base."""
    bases, links, at = dict[int, int](), [0] * len(extents), 0
    for number, row in enumerate(rows):
        if number == len(extents):
            raise Refused("a tensor has more rows than cells and bases")
        if row.kind != FRAMES_WITH_BASES:
            continue
        if len(extents) == len(rows) or rows[len(extents)].cells != row.cells:
            raise Refused("frames have no bases, or more or fewer than cells")
        bases[number], base, one = len(extents), rows[len(extents)], extents[number]
        end = at + DIGEST_BYTES * row.cells
        extents.append(Extent(one.box, one.lo, one.hi, base.blob, base.offset, digests[at:end]))
        links.append(links[number] + 1)
        at = end
    if at != len(digests) or max(links, default=0) > MAX_LINKS:
        raise Refused("a tensor has another number of digests than of bases, or too many of them in a chain")
    return bases


def _lengths(
    rows: Sequence[_Row], packed: bytes, cell_bytes: int
) -> list[np.ndarray[tuple[int], np.dtype[np.uint32]] | None]:
    """Return the lengths of the frames of each row; None where there are none."""
    ends, at = list[tuple[int, int] | None](), 0
    for row in rows:
        if row.kind > FRAMES_WITH_BASES:
            raise Refused(f"cells lie in a way ({row.kind}) that this version does not know; upgrade casckpt")
        ends.append((at, at := at + row.cells) if row.kind else None)
    every = np.frombuffer(packed, "<u4") if len(packed) == 4 * at else np.zeros(1, "<u4")
    if (at and (not every.all() or int(every.max()) > cell_bytes)) or 4 * at != len(packed):
        raise Refused("a frame is empty or longer than a cell, or rows have another number of them")
    return [None if one is None else every[one[0] : one[1]] for one in ends]


def _check(extent: Extent, nbytes: int, blob_sizes: Sequence[int]) -> None:
    if extent.blob >= len(blob_sizes):
        raise Refused("an extent names a blob that the manifest does not have")
    if extent.offset < DATA_OFFSET or extent.offset + nbytes > blob_sizes[extent.blob]:
        raise Refused("an extent lies outside its blob, or in its header")
