"""The extents of a tensor as they are stored: apart what its cells are, and where they lie.

Of the first part is the id of a checkpoint, so it says nothing of blobs; the second part may be another one in each
store that holds it. Each begins with a byte that tells its form.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.msgpack import Decoder

from casckpt.errors import Refused
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.columns import Ints, pack, unpack
from casckpt.format.digest import Buffer
from casckpt.format.extents import DIGEST_BYTES, Columns, ExtentTable, Whole, only_box
from casckpt.format.regions import Box, Shape, full_box

WHOLE, WHOLE_UNHASHED, SPANS = b"\0", b"\1", b"\2"
ONE_ROW, ROWS = b"\0", b"\1"
_ROW = Struct("<cII")


class CellColumns(msgspec.Struct, frozen=True, array_like=True):
    """The cells of a tensor: spans of them, each [lo, hi) of a box, cut at the multiples of the cell size.

    ``boxes``: offset and shape of box 1, of box 2, ...; box 0 is the whole tensor.
    """

    boxes: bytes
    box: bytes
    lo: bytes
    hi: bytes
    digests: bytes
    unhashed: bytes = b""


class RowColumns(msgspec.Struct, frozen=True, array_like=True):
    """Where they lie: so many cells, which are of one span, follow each other from ``offset`` of a blob."""

    cells: bytes
    blob: bytes
    offset: bytes


_CELLS: Decoder[CellColumns] = Decoder(CellColumns)
_ROWS: Decoder[RowColumns] = Decoder(RowColumns)


class Frame(NamedTuple):
    """What is known of a tensor without its extents; many have the same.

    ``cell``: elements of a cell. ``boxes``: the whole tensor. ``nbytes``: of it; ``digest_bytes``: of the digests that
    it has if it is cut as a whole.
    """

    shape: Shape
    itemsize: int
    cell: int
    boxes: tuple[Box, ...]
    nbytes: int
    digest_bytes: int


@lru_cache(maxsize=4096)
def frame_of(shape: Shape, itemsize: int, cell_bytes: int) -> Frame:
    """Return the frame of tensors of one shape, with cells of ``cell_bytes``."""
    boxes, cell = only_box(shape), cell_bytes // itemsize
    count = boxes[0].numel
    return Frame(shape, itemsize, cell, boxes, count * itemsize, -(-count // cell) * DIGEST_BYTES)


def encode_cells(table: ExtentTable) -> bytes:
    """Encode what the cells are. Equal for equal cells, wherever they lie; empty for a tensor without elements."""
    form = table.form
    if isinstance(form, Whole):
        return (WHOLE_UNHASHED if form.unhashed else WHOLE) + form.digests
    if not len(form.lo):
        return b""
    box, lo, hi, _, _, digests, unhashed = form
    goes_on = (box[1:] == box[:-1]) & (lo[1:] == hi[:-1]) & (lo[1:] % table.cell == 0) & (unhashed[1:] == unhashed[:-1])
    first, last = np.flatnonzero(~np.append(False, goes_on)), np.flatnonzero(~np.append(goes_on, False))
    if len(first) == 1 and not box[0] and not lo[0] and hi[-1] == table.boxes[0].numel:
        return (WHOLE_UNHASHED if unhashed[0] else WHOLE) + digests.tobytes()
    numbers = [number for one in table.boxes[1:] for number in (*one.offset, *one.shape)]
    bits = np.packbits(unhashed[first]).tobytes() if unhashed.any() else b""
    spans = pack(box[first]), pack(lo[first]), pack(hi[last])
    return SPANS + msgspec.msgpack.encode(CellColumns(pack(numbers), *spans, digests.tobytes(), bits))


def encode_rows(table: ExtentTable) -> bytes:
    """Encode where the cells lie."""
    form = table.form
    if isinstance(form, Whole):
        return _ROW.pack(ONE_ROW, form.blob, form.offset)
    if len(form.lo) == 1:
        return _ROW.pack(ONE_ROW, int(form.blob[0]), int(form.offset[0]))
    if not len(form.lo):
        return b""
    return ROWS + msgspec.msgpack.encode(RowColumns(pack(table.cells), pack(form.blob), pack(form.offset)))


def decode_table(cells: Buffer, rows: Buffer, frame: Frame, blob_sizes: Ints) -> ExtentTable:
    """Decode a stored table. Raises Refused for anything that does not fit the tensor or the blobs.

    No number of the returned table points outside the tensor, a box, a blob or the digests. Raises too what msgspec
    does for bytes that are no columns.
    """
    if len(rows) == _ROW.size and len(cells) and cells[0] <= 1 and rows[0] == 0:
        return _whole(cells, rows, frame, blob_sizes)
    form = bytes(cells[:1])
    boxes, spans, digests = _decoded_cells(form, cells, frame)
    counts = -(-spans.hi // frame.cell) - spans.lo // frame.cell
    if len(digests) != int(counts.sum()) * DIGEST_BYTES:
        raise Refused("an extent table has another number of digests than of cells")
    row_cells, blob, offset = _decoded_rows(rows, int(counts.sum()))
    columns = _cut(spans, counts, row_cells, frame.cell)
    _check_places(columns.hi - columns.lo, blob, offset, frame.itemsize, blob_sizes)
    found = np.frombuffer(digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    made = Columns(columns.box, columns.lo, columns.hi, blob, offset, found, columns.unhashed)
    return ExtentTable(frame.shape, frame.itemsize, frame.cell, boxes, made)


def _whole(cells: Buffer, rows: Buffer, frame: Frame, blob_sizes: Ints) -> ExtentTable:
    """Decode what most tensors have, without making columns."""
    _, blob, offset = _ROW.unpack(rows)
    shape, itemsize, cell, boxes, nbytes, digest_bytes = frame
    if not nbytes or len(cells) != 1 + digest_bytes:
        raise Refused("an extent table has another number of digests than of cells")
    if not blob < len(blob_sizes) or offset < DATA_OFFSET:
        raise Refused("an extent names a blob that the manifest does not have, or lies in its header")
    if nbytes > blob_sizes.item(blob) - offset:
        raise Refused("an extent lies outside its blob")
    return ExtentTable(shape, itemsize, cell, boxes, Whole(blob, offset, bytes(cells[1:]), cells[0] == 1))


class _Spans(NamedTuple):
    """Columns of spans, or of rows: see `Columns`."""

    box: Ints
    lo: Ints
    hi: Ints
    unhashed: npt.NDArray[np.bool_]


def _decoded_cells(form: bytes, cells: Buffer, frame: Frame) -> tuple[tuple[Box, ...], _Spans, bytes]:
    tensor = frame.boxes
    if form == SPANS:
        return _decoded_spans(_CELLS.decode(cells[1:]), frame.shape)
    if form not in (b"", WHOLE, WHOLE_UNHASHED):
        raise Refused(f"a cell table has the form {form[0]}, which this version does not know; upgrade casckpt")
    if (form == b"") != (not tensor[0].numel):
        raise Refused("a tensor has no cell table, or one although it is empty")
    ends = np.array([tensor[0].numel] if form else [], dtype=np.int64)
    flags = np.full(len(ends), form == WHOLE_UNHASHED)
    return tensor, _Spans(np.zeros_like(ends), np.zeros_like(ends), ends, flags), bytes(cells[1:])


def _decoded_spans(packed: CellColumns, shape: Shape) -> tuple[tuple[Box, ...], _Spans, bytes]:
    box, lo, hi = map(unpack, (packed.box, packed.lo, packed.hi))
    count, rank, numbers = len(lo), len(shape), unpack(packed.boxes)
    if {len(box), len(hi)} != {count} or (len(numbers) % (2 * rank) if rank else len(numbers)):
        raise Refused("the columns of a cell table differ in length")
    boxes = (full_box(shape), *_boxes(numbers.reshape(-1, 2, rank) if rank else numbers.reshape(0, 2, 0), shape))
    if not count or not box.max() < len(boxes):
        raise Refused("a cell table is empty, or names a box that it does not have")
    sizes = np.array([one.numel for one in boxes], dtype=np.int64)
    if not ((lo < hi) & (hi <= sizes[box])).all():
        raise Refused("a span of cells lies outside its box")
    same = box[1:] == box[:-1]
    if not ((box[1:] > box[:-1]) | (same & (lo[1:] >= hi[:-1]))).all():
        raise Refused("the spans of a cell table overlap or are out of order")
    if int((hi - lo).sum()) != boxes[0].numel:
        raise Refused("the spans of a cell table do not add up to its tensor")
    if len(packed.unhashed) not in (0, -(-count // 8)):
        raise Refused("the columns of a cell table differ in length")
    bits = np.frombuffer(packed.unhashed or bytes(-(-count // 8)), dtype=np.uint8)
    return boxes, _Spans(box, lo, hi, np.unpackbits(bits, count=count).astype(bool)), packed.digests


def _boxes(numbers: Ints, shape: Shape) -> Iterable[Box]:
    outside = numbers[:, 1] > np.array(shape, dtype=np.int64) - numbers[:, 0]
    if outside.any() or (numbers[:, 1] == 0).any():
        raise Refused("a box of a cell table lies outside its tensor")
    return (Box(tuple(offset), tuple(extent)) for offset, extent in numbers.tolist())


def _decoded_rows(rows: Buffer, cells: int) -> tuple[Ints, Ints, Ints]:
    """Return the number of cells, the blob and the offset of each row, which are of ``cells`` cells together."""
    form = bytes(rows[:1])
    if form == ONE_ROW and len(rows) == _ROW.size and cells:
        _, blob, offset = _ROW.unpack(rows)
        numbers = np.array([[cells], [blob], [offset]], dtype=np.int64)
        return numbers[0], numbers[1], numbers[2]
    if form == b"":
        if cells:
            raise Refused("nothing says where the cells of a tensor lie: this checkpoint leaves it out")
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing, nothing
    if form not in (ONE_ROW, ROWS):
        raise Refused(f"rows have the form {form[0]}, which this version does not know; upgrade casckpt")
    if form == ONE_ROW:
        raise Refused("a row has another length than a row has, or is that of a tensor without elements")
    packed = _ROWS.decode(rows[1:])
    counts, blob, offset = map(unpack, (packed.cells, packed.blob, packed.offset))
    if not len(counts) == len(blob) == len(offset) or not len(counts) or not 1 <= counts.min() <= counts.max() <= cells:
        raise Refused("the columns of rows differ in length, or one has no cells, or too many")
    return counts, blob, offset


def _cut(spans: _Spans, counts: Ints, row_cells: Ints, cell: int) -> _Spans:
    """Cut spans of so many cells where rows end."""
    span_end, row_end = np.cumsum(counts), np.cumsum(row_cells)
    row_start = row_end - row_cells
    if int(row_cells.sum()) != int(counts.sum()):
        raise Refused("rows have together not as many cells as their tensor")
    of = np.searchsorted(span_end, row_start, side="right")
    if (row_end > span_end[of]).any():
        raise Refused("a row holds cells of two spans")
    start, base = (span_end - counts)[of], spans.lo[of] // cell
    lo = np.where(row_start == start, spans.lo[of], (base + row_start - start) * cell)
    hi = np.where(row_end == span_end[of], spans.hi[of], (base + row_end - start) * cell)
    return _Spans(spans.box[of], lo, hi, spans.unhashed[of])


def _check_places(numel: Ints, blob: Ints, offset: Ints, itemsize: int, blob_sizes: Ints) -> None:
    if len(blob) and not blob.max() < len(blob_sizes):
        raise Refused("an extent names a blob that the manifest does not have")
    room = blob_sizes[blob] - offset  # compared by division: a product of hostile numbers could wrap around
    if (offset < DATA_OFFSET).any() or not ((room >= 0) & (numel <= room // itemsize)).all():
        raise Refused("an extent lies outside its blob, or in its header")
