"""The stored form of a tensor's extents: a table of its cells, and rows with their locations.

The cell table is part of a checkpoint's id, so it does not mention blobs. The rows may differ across stores. Both begin
with a byte that identifies their layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from struct import Struct
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.msgpack import Decoder

from casckpt.base.digest import Buffer
from casckpt.base.lazy import cached_property
from casckpt.errors import Refused
from casckpt.format import dtypes
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.extents import DIGEST_BYTES, MAX_LINKS, Coding, Extent, ExtentTable, StoredCell
from casckpt.format.names import CellDigest
from casckpt.format.regions import Box, Shape, full_box
from casckpt.format.sections.columns import Ints
from casckpt.format.sections.index import EntryColumns, Name, entry_columns

CODED_ROW = Struct("<IIIB")
"""Like `ROW`, with the form of the cells."""
AS_THEY_ARE, FRAMES, FRAMES_WITH_BASES = range(3)


class CodedRows(msgspec.Struct, frozen=True, array_like=True):
    """``lengths``: 4 bytes for each cell in a row of frames. ``digests``: 32 bytes for each cell of the bases."""

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
"""Splits a tensor's cells where rows end. It consumes all rows."""


def encode_coded(extents: Sequence[Extent]) -> bytes:
    """Encode the locations of coded cells."""
    every, rows, lengths = list(extents), list[bytes](), list[bytes]()
    for extent in every:  # the loop appends the bases
        kind = AS_THEY_ARE
        if extent.coding is not None:
            kind = FRAMES if extent.coding.base is None else FRAMES_WITH_BASES
            lengths.append(extent.coding.frames)
            every += [] if extent.coding.base is None else [extent.coding.base]
        rows.append(CODED_ROW.pack(len(extent.digests) // DIGEST_BYTES, extent.blob, extent.offset, kind))
    digests = [extent.digests for extent in every[len(extents) :]]
    return msgspec.msgpack.encode(CodedRows(b"".join(rows), b"".join(lengths), b"".join(digests)))


def decode_coded(
    packed: Buffer, cut: Cut, blob_sizes: Sequence[int], *, cells: int, itemsize: int, cell_bytes: int
) -> tuple[Extent, ...]:
    """Decode the extents of a tensor with ``cells`` cells. Raises Refused and msgspec's errors."""
    stored = _DECODER.decode(packed)
    if len(stored.rows) % CODED_ROW.size:
        raise Refused("the last row of a tensor is cut short")
    rows = [_Row(*row) for row in CODED_ROW.iter_unpack(stored.rows)]
    extents = list(cut(row[:3] for row in rows[: _covering(rows, cells)]))
    first, bases = len(extents), _add_bases(extents, rows, stored.digests)
    lengths = _lengths(rows, stored.lengths, cell_bytes)
    for number in reversed(range(len(rows))):  # bases come before the rows that need them
        one, frames = extents[number], lengths[number]
        nbytes = (one.hi - one.lo) * itemsize if frames is None else int(frames.sum())
        _check(one.blob, one.offset, nbytes, blob_sizes)
        if frames is not None:
            base = extents[bases[number]] if number in bases else None
            extents[number] = msgspec.structs.replace(one, coding=Coding(frames.tobytes(), base))
    return tuple(extents[:first])


def _covering(rows: Sequence[_Row], cells: int) -> int:
    """Return how many of the rows contain the tensor's own cells."""
    number = 0
    while cells > 0 and number < len(rows):
        cells -= rows[number].cells
        number += 1
    return number


def _add_bases(extents: list[Extent], rows: Sequence[_Row], digests: bytes) -> dict[int, int]:
    """Add the extents of all bases. Return, by row number, the number of the row with the bases of that row."""
    bases, links, at = dict[int, int](), [0] * len(extents), 0
    for number, row in enumerate(rows):
        if number == len(extents):
            raise Refused("a tensor has more rows than cells and bases")
        if row.kind != FRAMES_WITH_BASES:
            continue
        if len(extents) == len(rows) or rows[len(extents)].cells != row.cells:
            raise Refused("the number of bases differs from the number of frames")
        bases[number], base, one = len(extents), rows[len(extents)], extents[number]
        end = at + DIGEST_BYTES * row.cells
        extents.append(Extent(one.box, one.lo, one.hi, base.blob, base.offset, digests[at:end]))
        links.append(links[number] + 1)
        at = end
    if at != len(digests) or max(links, default=0) > MAX_LINKS:
        raise Refused("a tensor has more or fewer digests than bases, or a chain has too many bases")
    return bases


def _lengths(
    rows: Sequence[_Row], packed: bytes, cell_bytes: int
) -> list[np.ndarray[tuple[int], np.dtype[np.uint32]] | None]:
    """Return the frame lengths of each row, or None for a row without frames."""
    ends, at = list[tuple[int, int] | None](), 0
    for row in rows:
        if row.kind > FRAMES_WITH_BASES:
            raise Refused(f"cells are stored in a form ({row.kind}) that this version does not know; upgrade casckpt")
        ends.append((at, at := at + row.cells) if row.kind else None)
    every = np.frombuffer(packed, "<u4") if len(packed) == 4 * at else np.zeros(1, "<u4")
    if (at and (not every.all() or int(every.max()) > cell_bytes)) or 4 * at != len(packed):
        raise Refused("a frame is empty or longer than a cell, or rows have the wrong number of frames")
    return [None if one is None else every[one[0] : one[1]] for one in ends]


def _check(blob: int, offset: int, nbytes: int, blob_sizes: Sequence[int]) -> None:
    if blob >= len(blob_sizes):
        raise Refused("an extent names a blob that the manifest does not have")
    if offset < DATA_OFFSET or offset + nbytes > blob_sizes[blob]:
        raise Refused("an extent lies outside its blob, or in the header of the blob")


WHOLE, SPANS = b"\0", b"\1"
ROWS, CODED_ROWS = b"\0", b"\1"
ROW = Struct("<III")
"""The number of consecutive cells in one span, their blob's number, and their offset in the blob's file."""


class CellSpans(msgspec.Struct, frozen=True, array_like=True):
    """The cells of a tensor as ``spans``, each [lo, hi) of a numbered box, split at multiples of the cell size.

    ``boxes``: the offset and shape of box 1, box 2, and so on. Box 0 is the whole tensor.
    """

    boxes: list[tuple[Shape, Shape]]
    spans: list[tuple[int, int, int]]
    digests: bytes


_SPANS: Decoder[CellSpans] = Decoder(CellSpans)


def encode_cells(table: ExtentTable) -> bytes:
    """Encode the cells without their locations. Equal cells have equal bytes.

    A tensor without elements has no bytes.
    """
    if not table.extents:
        return b""
    digests = b"".join([extent.digests for extent in table.extents])
    spans: list[tuple[int, int, int]] = []
    for one in table.extents:
        if spans and (one.box, one.lo) == spans[-1][::2] and not one.lo % table.cell:
            spans[-1] = (one.box, spans[-1][1], one.hi)
        else:
            spans.append((one.box, one.lo, one.hi))
    if spans == [(0, 0, table.boxes[0].numel)]:
        return WHOLE + digests
    boxes = [(box.offset, box.shape) for box in table.boxes[1:]]
    return SPANS + msgspec.msgpack.encode(CellSpans(boxes, spans, digests))


def encode_rows(table: ExtentTable) -> bytes:
    """Encode the locations of the cells."""
    if any(one.coding for one in table.extents):
        return CODED_ROWS + encode_coded(table.extents)
    rows = [ROW.pack(len(one.digests) // DIGEST_BYTES, one.blob, one.offset) for one in table.extents]
    return b"".join((ROWS, *rows)) if rows else b""


def decode_table(
    cells: Buffer, rows: Buffer, blob_sizes: Sequence[int], *, shape: Shape, itemsize: int, cell: int
) -> ExtentTable:
    """Decode a tensor's table, with cells of ``cell`` elements. ``blob_sizes``: the file size of each blob in bytes.

    Raises Refused or InvalidInput for anything that does not fit the tensor or the blobs. No number in the returned
    table points outside the tensor, a box, a blob or the digests. Also raises msgspec's errors.
    """
    if bool(cells) != bool(rows):
        raise Refused(
            "a tensor has cells without locations (this checkpoint may have dropped them), or locations without cells"
        )
    boxes, spans, digests = _decoded_cells(cells, shape)
    if bytes(rows[:1]) != CODED_ROWS:
        extents = tuple(_extents(spans, digests, _decoded_rows(rows), blob_sizes, itemsize=itemsize, cell=cell))
    else:
        count, cut = len(digests) // DIGEST_BYTES, partial(_extents, spans, digests)
        cut = partial(cut, blob_sizes=blob_sizes, itemsize=0, cell=cell)  # frame sizes are not known yet
        extents = decode_coded(rows[1:], cut, blob_sizes, cells=count, itemsize=itemsize, cell_bytes=cell * itemsize)
    return ExtentTable(shape, itemsize, cell, boxes, extents)


class WholeCells(NamedTuple):
    """One row for each of several tensors. ``is_whole``: whether the tensor is a single cell that is not coded.

    If so, the other columns describe the cell's location and size in bytes, and its digest.
    """

    is_whole: npt.NDArray[np.bool_]
    blob: Ints
    offset: Ints
    nbytes: Ints
    digest: npt.NDArray[np.uint8]

    def take(self, rows: Ints | npt.NDArray[np.bool_] | slice) -> WholeCells:
        """Return these rows."""
        return WholeCells(self.is_whole[rows], self.blob[rows], self.offset[rows], self.nbytes[rows], self.digest[rows])

    def cell(self, row: int, shape: Shape) -> StoredCell:
        """Return the cell of one of the tensors, which has this shape."""
        box, place = full_box(shape), (int(self.blob[row]), int(self.offset[row]), int(self.nbytes[row]))
        return StoredCell(*place, box, 0, box.numel, CellDigest(self.digest[row].tobytes()))

    @classmethod
    def none(cls, count: int) -> WholeCells:
        """Return ``count`` rows for tensors that are not single cells."""
        blob, offset, nbytes = np.zeros((3, count), np.int64)
        return cls(np.zeros(count, np.bool_), blob, offset, nbytes, np.zeros((count, DIGEST_BYTES), np.uint8))


Streams: TypeAlias = Mapping[Name, tuple[str, Shape]]
"""The dtype and shape of each entry, in the order of the manifest."""


def bytes_of(streams: Streams) -> int:
    """Return the size of all entries in memory."""
    return sum(dtypes.itemsize(dtype) * prod(shape) for dtype, shape in streams.values())


class Extents(Mapping[Name, tuple[str, ExtentTable]]):
    """The dtype and extents of each entry, in order. Most entries are single cells, which are stored in columns.

    ``others``: the tables of all entries that are not in ``cells``, by number.
    """

    def __init__(self, streams: Streams, cell_bytes: int, cells: WholeCells, others: Mapping[int, ExtentTable]) -> None:
        self.streams, self.cell_bytes, self.cells, self.others = streams, cell_bytes, cells, others

    @classmethod
    def of(cls, tables: Mapping[Name, tuple[str, ExtentTable]]) -> Extents:
        """Return these tables, without columns."""
        streams = {name: (dtype, table.shape) for name, (dtype, table) in tables.items()}
        others = {number: table for number, (_, table) in enumerate(tables.values())}
        return cls(streams, 0, WholeCells.none(len(streams)), others)

    def with_cells(
        self, streams: Streams, cell_bytes: int, cells: WholeCells, others: Mapping[int, ExtentTable]
    ) -> Extents:
        """Return new extents. If their streams are those of this object, take over what was computed from them."""
        made = Extents(streams, cell_bytes, cells, others)
        if self.streams is streams:
            held = vars(self).copy()  # another thread may add to it
            vars(made).update({k: held[k] for k in ("columns", "names", "_numbers") if k in held})
        return made

    @cached_property
    def columns(self) -> EntryColumns:
        """The entry columns, if no tensor is in a wrapper, and all were hashed completely."""
        return entry_columns(self.streams, ())

    @cached_property
    def names(self) -> Sequence[Name]:
        """The name of each entry."""
        return list(self.streams)

    @cached_property
    def _numbers(self) -> Mapping[Name, int]:
        return {name: number for number, name in enumerate(self.streams)}

    def __len__(self) -> int:
        return len(self.streams)

    def __iter__(self) -> Iterator[Name]:
        return iter(self.streams)

    def __getitem__(self, name: Name) -> tuple[str, ExtentTable]:
        dtype, shape = self.streams[name]
        table = self.table(name, dtype, shape)
        if table is None:
            raise KeyError(name)
        return dtype, table

    def table(self, name: Name, dtype: str, shape: Shape) -> ExtentTable | None:
        """Return an entry's extents, or None if there is no entry with this name, dtype and shape."""
        if self.streams.get(name) != (dtype, shape):
            return None
        number = self._numbers[name]
        if not self.cells.is_whole[number]:
            return self.others.get(number)
        cell, size = self.cells.cell(number, shape), dtypes.itemsize(dtype)
        only = Extent(0, 0, cell.hi, cell.blob, cell.offset, cell.digest)
        return ExtentTable(shape, size, self.cell_bytes // size, (cell.box,), (only,))

    def has_only(self, streams: Streams) -> bool:
        """Return whether these are the same entries in the same order, which is the case in most saves."""
        return self.streams is streams or list(self.streams.items()) == list(streams.items())

    def find(self, streams: Streams, cell_bytes: int) -> WholeCells:
        """Return a row for each of these entries. It is not whole unless the same entry is a single cell here."""
        if not self.streams or self.cell_bytes != cell_bytes:
            return WholeCells.none(len(streams))
        if self.has_only(streams):
            return self.cells
        is_same = [self.streams.get(name) == form for name, form in streams.items()]
        found = self.cells.take(np.array([self._numbers.get(name, 0) for name in streams], np.int64))
        return found._replace(is_whole=found.is_whole & np.array(is_same, np.bool_))

    def encoded(self) -> tuple[list[bytes], list[bytes]]:
        """Return the encoded cells and the encoded locations of each entry."""
        found, count = self.cells, len(self)
        cells, rows = np.zeros((count, CELL_BYTES), np.uint8), np.zeros((count, ROW_BYTES), np.uint8)
        cells[:, len(WHOLE) :] = found.digest
        rows[:, len(ROWS) :] = np.column_stack((found.is_whole, found.blob, found.offset)).astype("<u4").view(np.uint8)
        encoded = cells.view(f"V{CELL_BYTES}")[:, 0].tolist(), rows.view(f"V{ROW_BYTES}")[:, 0].tolist()
        for number, table in self.others.items():
            encoded[0][number], encoded[1][number] = encode_cells(table), encode_rows(table)
        return encoded


CELL_BYTES, ROW_BYTES = len(WHOLE) + DIGEST_BYTES, len(ROWS) + ROW.size
"""The stored sizes of the cell table and of the rows of a tensor that is a single cell."""


def decode_whole_cells(
    cells: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.uint8],
    blob_sizes: Sequence[int],
    nbytes: Ints,
    cell_bytes: int,
) -> WholeCells:
    """Decode the tables of many tensors at once, as `decode_table` does for one. Invalid tables count as not whole.

    ``cells`` and ``rows`` have a row of `CELL_BYTES` or `ROW_BYTES` stored bytes for each tensor of ``nbytes`` bytes.
    """
    count, blob, offset = np.ascontiguousarray(rows[:, len(ROWS) :]).view("<u4").astype(np.int64).T
    sizes = np.array([*blob_sizes, 0])
    fits = (cells[:, 0] == WHOLE[0]) & (rows[:, 0] == ROWS[0]) & (count == 1)
    fits &= (nbytes > 0) & (nbytes <= cell_bytes)
    fits &= (offset >= DATA_OFFSET) & (offset + nbytes <= sizes[np.minimum(blob, len(blob_sizes))])
    return WholeCells(fits, blob, offset, nbytes, cells[:, len(WHOLE) :])


def decode_cells(cells: Buffer, *, shape: Shape, itemsize: int, cell: int) -> ExtentTable:
    """Decode a tensor's cells, with each span as an extent without a location.

    Raises the same errors as `decode_table`.
    """
    boxes, spans, digests = _decoded_cells(cells, shape)
    extents, at = [], 0
    for box, lo, hi in spans:
        end = at + (-(-hi // cell) - lo // cell) * DIGEST_BYTES
        extents.append(Extent(box, lo, hi, 0, 0, digests[at:end]))
        at = end
    if at != len(digests):
        raise Refused("a tensor has more or fewer digests than cells")
    return ExtentTable(shape, itemsize, cell, boxes, tuple(extents))


def _decoded_cells(cells: Buffer, shape: Shape) -> tuple[tuple[Box, ...], Sequence[tuple[int, int, int]], bytes]:
    tensor, stored = full_box(shape), bytes(cells)
    numel, form = tensor.numel, stored[:1]
    if form == (WHOLE if numel else b""):
        return (tensor,), [(0, 0, numel)] if numel else [], stored[1:]
    if not numel or not form:
        raise Refused("a non-empty tensor lacks a cell table, or an empty tensor has one")
    if form != SPANS:
        raise Refused(f"a cell table has the form {form[0]}, which this version does not know; upgrade casckpt")
    packed = _SPANS.decode(stored[1:])
    boxes = (tensor, *(_box(offset, extent, tensor) for offset, extent in packed.boxes))
    sizes = [box.numel for box in boxes]
    before, total = (0, 0), 0
    for box, lo, hi in packed.spans:
        if not 0 <= box < len(boxes) or not 0 <= lo < hi <= sizes[box]:
            raise Refused("a span of cells is outside its box, or its box does not exist")
        if (box, lo) < before:
            raise Refused("the spans in a cell table overlap or are out of order")
        before, total = (box, hi), total + hi - lo
    if total != numel:
        raise Refused("the spans in a cell table do not add up to the tensor")
    return boxes, packed.spans, packed.digests


def _box(offset: Shape, shape: Shape, tensor: Box) -> Box:
    box = Box(offset, shape)
    if len(shape) != len(tensor.shape) or not box.numel or not box.inside(tensor):
        raise Refused("a box in a cell table is empty or outside its tensor")
    return box


def _decoded_rows(rows: Buffer) -> Iterator[tuple[int, int, int]]:
    stored = bytes(rows)  # not a memoryview: Python 3.11 crashes if its collector finds one together with the iterator
    if stored and stored[0]:
        raise Refused(f"rows have the form {stored[0]}, which this version does not know; upgrade casckpt")
    if stored and (len(stored) - 1) % ROW.size:
        raise Refused("the last row of a tensor is cut short")
    return ROW.iter_unpack(stored[1:])


def _extents(
    spans: Sequence[tuple[int, int, int]],
    digests: bytes,
    rows: Iterator[tuple[int, int, int]],
    blob_sizes: Sequence[int],
    *,
    itemsize: int,
    cell: int,
) -> Iterator[Extent]:
    """Split spans of cells where rows end."""
    at = 0
    for box, start, stop in spans:
        lo, number, last = start, start // cell, -(-stop // cell)
        while number < last:
            cells, blob, offset = next(rows, (0, 0, 0))
            number += cells
            if not cells or number > last:
                raise Refused("a row is empty or has cells from two spans, or a tensor's rows do not cover its cells")
            hi = min(number * cell, stop)
            _check(blob, offset, (hi - lo) * itemsize, blob_sizes)
            end = at + cells * DIGEST_BYTES
            yield Extent(box, lo, hi, blob, offset, digests[at:end])
            lo, at = hi, end
    if at != len(digests) or next(rows, None) is not None:
        raise Refused("a tensor has more or fewer digests or rows than cells")
