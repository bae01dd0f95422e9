"""Frames: the stored form of coded cells (docs/format.md, "Frames").

::

    1 byte     form: 1 planes, 2 sparse, 3 diff
    1 byte     bytes of an element: 1, 2, 4 or 8
    1 byte     1 where elements are rotated (planes only), else 0
    1 byte     0
    4 bytes    bytes of the cell
    sparse     4 bytes how many elements changed, 4 bytes how many bytes their gaps have; the gaps, a part
    planes     a part for each byte of an element
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import IntEnum
from struct import Struct
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from casckpt.base.digest import Buffer
from casckpt.errors import InvalidInput, Refused
from casckpt.format.digest import cell_digest
from casckpt.format.encodings.parts import (
    BLOCK,
    Bytes,
    Part,
    PartReader,
    Unsigned,
    encode_part,
    encode_parts,
    foresee,
    join,
    read_parts,
    sample,
    scratch,
    some_of,
)
from casckpt.format.extents import StoredCell

log = logging.getLogger(__name__)

Indices: TypeAlias = npt.NDArray[np.int64]
MORE = 255
_LINE = 8


class Changes(NamedTuple):
    """Changed elements: their indices in ascending order, and their new and old values."""

    indices: Indices
    new: Unsigned
    old: Unsigned


def changed(elements: Unsigned, base: Unsigned, most: float) -> Changes | None:
    """Find the elements that differ from those of ``base``. Return None if their fraction exceeds ``most``."""
    words = _changed_words(elements, base)
    if words is None:
        return _changed_singly(elements, base, most)
    shift = 4 - elements.itemsize.bit_length()  # a word contains 1 << shift elements
    new, old = (side.view(np.uint64)[words].view(side.dtype) for side in (elements, base))
    differing = np.flatnonzero(new != old)
    if differing.size > most * elements.size:
        return None
    return Changes(_among(words, shift, differing), new[differing], old[differing])


def _changed_singly(elements: Unsigned, base: Unsigned, most: float) -> Changes | None:
    """Compare every element, unless too many elements in a sample have changed."""
    sampled = some_of(elements) != some_of(base)
    if 2 * np.count_nonzero(sampled) > (1 + most) * sampled.size:
        return None
    is_changed = elements != base
    if np.count_nonzero(is_changed) > most * elements.size:
        return None
    indices = np.flatnonzero(is_changed)
    return Changes(indices, elements[indices], base[indices])


def _changed_words(elements: Unsigned, base: Unsigned) -> Indices | None:
    """Return the indices of the 8-byte words that differ, or None if there are too many for this to be worthwhile.

    If there are very few, only the differing lines of `_LINE` words are compared word by word.
    """
    if elements.nbytes % 8:
        return None
    differ = scratch("flags", elements.nbytes // 8).view(bool)
    np.not_equal(elements.view(np.uint64), base.view(np.uint64), out=differ)
    count = np.count_nonzero(differ)
    if count > differ.size // 2:
        return None
    if count > differ.size // 16 or differ.size % _LINE:
        return np.flatnonzero(differ)
    of_lines = differ.view(np.uint64)
    lines = np.flatnonzero(of_lines != 0)  # for bools, this takes a fifth of the time
    return _among(lines, 3, np.flatnonzero(of_lines[lines].view(bool)))


def _among(groups: Indices, shift: int, found: Indices) -> Indices:
    """Convert indices into the concatenation of some groups (of 1 << shift items) to indices into all items."""
    indices: Indices = groups[found >> shift]
    indices <<= shift
    indices += found & (1 << shift) - 1
    return indices


def encode_gaps(indices: Indices) -> Bytes:
    """Encode ascending indices."""
    between = indices.copy()
    between[1:] -= indices[:-1]
    between[1:] -= 1
    more = between // MORE
    ends = more.cumsum()
    ends += np.arange(ends.size)
    gaps = np.empty(ends[-1] + 1 if ends.size else 0, np.uint8)
    gaps.fill(MORE)
    more *= MORE
    between -= more
    gaps[ends] = between
    return gaps


def check_gaps(gaps: Bytes, changes: int, count: int) -> None:
    """Raise Refused if the gaps do not describe ``changes`` changed elements among ``count``."""
    ends = int(np.count_nonzero(gaps != MORE))
    last = int(gaps.sum(dtype=np.int64)) + ends
    if ends != changes or last > count or (gaps.size and gaps[-1] == MORE):
        raise Refused(
            f"a frame declares {changes} changes, but its gaps describe {ends}, up to element {last} of {count}"
        )


def decode_gaps(gaps: Bytes) -> Iterator[Indices]:
    """Yield the decoded indices, block by block."""
    behind = 0
    for begin in range(0, gaps.size, BLOCK):
        block = gaps[begin : begin + BLOCK]
        is_end = block != MORE
        steps = block.astype(np.int64)
        steps += is_end
        np.cumsum(steps, out=steps)
        indices = steps[is_end]
        indices += behind - 1
        behind += int(steps[-1])
        yield indices


def zigzag(elements: Unsigned, base: Unsigned, out: Unsigned) -> None:
    """Write the differences between ``elements`` and ``base``, with wrap-around, into the separate array ``out``.

    They are zigzag encoded: 0, -1, 1, -2, 2 become 0, 1, 2, 3, 4. As a result, small differences have zeros in their
    high bytes.
    """
    np.subtract(elements, base, out=out)
    signs = scratch("other", out.nbytes).view(f"i{out.itemsize}")
    np.right_shift(out.view(signs.dtype), 8 * out.itemsize - 1, out=signs)
    np.left_shift(out, 1, out=out)
    np.bitwise_xor(out, signs.view(out.dtype), out=out)


def unzigzag(differences: Unsigned) -> None:
    """Decode zigzag differences in place."""
    signs = scratch("other", differences.nbytes).view(differences.dtype)
    np.bitwise_and(differences, 1, out=signs)
    np.negative(signs, out=signs)
    np.right_shift(differences, 1, out=differences)
    np.bitwise_xor(differences, signs, out=differences)


MIN_CELL = 4096
"""The size in bytes of the smallest cell that is encoded as a frame."""
WORTH = 0.97
"""The maximum size of a frame, as a fraction of the cell's size."""

WIDTHS = (1, 2, 4, 8)
_DENSE = 3 / 8  # fraction of changed elements above which the differences of all elements take fewer bytes than gaps
_HEAD = Struct("<BBBBI")
_SPARSE = Struct("<II")


class Form(IntEnum):
    """How a cell is stored."""

    RAW = 0
    PLANES = 1
    SPARSE = 2
    DIFF = 3


def needs_base(form: Form) -> bool:
    """Return whether frames of this form are decoded against a base."""
    return form in {Form.SPARSE, Form.DIFF}


def encode_planes(plain: memoryview, width: int) -> bytes | None:
    """Encode a cell of elements of ``width`` bytes, without a base. Return None if the frame would be too large.

    A frame is too large if it exceeds the share `WORTH` of the cell's size. A cell is not encoded if it is smaller than
    `MIN_CELL`, or if its size is not a multiple of ``width``.
    """
    if not _is_fit(plain, width):
        return None
    elements = _elements(plain, width)
    rotated = _signs_vary(elements)
    outlook = foresee(sample(elements), rotated=rotated)
    if outlook.share > WORTH:
        return None
    head = _head(Form.PLANES, elements, rotated=rotated)
    return _worthwhile(plain, [head, *encode_parts(elements, outlook.noise, rotated=rotated)])


def encode_delta(plain: memoryview, width: int, base: memoryview) -> bytes | None:
    """Encode the changes since ``base``. Return None if the frame would be too large.

    Raises InvalidInput for a base of a different length.
    """
    if base.nbytes != plain.nbytes:
        raise InvalidInput(
            f"a cell of {plain.nbytes} bytes has a base of {base.nbytes} bytes; pass a base of the same length"
        )
    if not _is_fit(plain, width):
        return None
    elements, others = _elements(plain, width), _elements(base, width)
    changes = changed(elements, others, _DENSE)
    if changes is not None:
        return _worthwhile(plain, _sparse(elements, changes))
    outlook = foresee(_zigzag(sample(elements), sample(others)))
    if outlook.share > WORTH:
        return None
    return _worthwhile(plain, [_head(Form.DIFF, elements), *encode_parts(_zigzag(elements, others), outlook.noise)])


def _sparse(elements: Unsigned, changes: Changes) -> list[Buffer]:
    gaps, differences = encode_gaps(changes.indices), _zigzag(changes.new, changes.old)
    head = _head(Form.SPARSE, elements) + _SPARSE.pack(differences.size, gaps.size)
    return [head, *encode_part(gaps), *encode_parts(differences)]


def _is_fit(plain: memoryview, width: int) -> bool:
    return plain.nbytes >= MIN_CELL and width in WIDTHS and not plain.nbytes % width


def _elements(data: memoryview, width: int) -> Unsigned:
    return np.frombuffer(data, f"<u{width}")


def _signs_vary(elements: Unsigned) -> bool:
    """Return whether a sample of the elements contains both signs.

    Always False for single bytes, which are never rotated.
    """
    signs = elements[:: max(1, elements.size >> 12)] >> (8 * elements.itemsize - 1)
    return bool(elements.itemsize > 1 and signs.min() != signs.max())


def _zigzag(elements: Unsigned, base: Unsigned) -> Unsigned:
    out = scratch("differences", elements.nbytes).view(elements.dtype)
    for begin in range(0, elements.size, BLOCK):
        block = slice(begin, begin + BLOCK)
        zigzag(elements[block], base[block], out[block])
    return out


def _head(form: Form, elements: Unsigned, *, rotated: bool = False) -> bytes:
    return _HEAD.pack(form, elements.itemsize, rotated, 0, elements.nbytes)


def _worthwhile(plain: memoryview, frame: list[Buffer] | None) -> bytes | None:
    return b"".join(frame) if frame and sum(map(len, frame)) <= WORTH * plain.nbytes else None


class ParsedFrame(NamedTuple):
    """A parsed frame. ``gaps`` is used only in the sparse form."""

    form: Form
    width: int
    rotated: bool
    planes: list[Part]
    gaps: Bytes


def _read_head(reader: PartReader) -> tuple[int, ...]:
    form, width, rotated, zero, nbytes = reader.unpack(_HEAD)
    if form not in {Form.PLANES, Form.SPARSE, Form.DIFF}:
        raise Refused(
            f"a frame has the form {form}, which this version does not know; a later version may be able to read it"
        )
    if width not in WIDTHS or nbytes % width or rotated > (form == Form.PLANES) or zero:
        raise Refused(
            f"a frame of form {form} has invalid values: {nbytes} bytes, {width} bytes per element, flags "
            f"{rotated}, {zero}"
        )
    return form, width, rotated, nbytes


def read_frame(data: memoryview, nbytes: int) -> ParsedFrame:
    """Parse the frame of a cell of ``nbytes`` bytes without using more memory than that. Raises Refused."""
    reader = PartReader(data)
    form, width, rotated, stored = _read_head(reader)
    if stored != nbytes:
        raise Refused(f"a frame encodes {stored} bytes, but the cell has {nbytes}")
    count, gaps = nbytes // width, np.empty(0, np.uint8)
    if form == Form.SPARSE:
        count, gaps = _read_gaps(reader, count)
    planes = read_parts(reader, width, count)
    reader.end()
    return ParsedFrame(Form(form), width, bool(rotated), planes, gaps)


def _read_gaps(reader: PartReader, count: int) -> tuple[int, Bytes]:
    """Return how many of the ``count`` elements changed, and the gaps between them."""
    changes, nbytes = reader.unpack(_SPARSE)
    if changes > count or nbytes > changes + (count - changes) // 255:
        raise Refused(f"a frame declares {changes} changes in {count} elements, with {nbytes} bytes of gaps")
    part = reader.part(nbytes)
    gaps = np.full(nbytes, part, np.uint8) if isinstance(part, int) else part
    check_gaps(gaps, changes, count)
    return changes, gaps


def decode(frame: memoryview, into: memoryview, base: memoryview | None) -> None:
    """Decode a cell into ``into``, which has the same size as the cell.

    Args:
        frame: The stored bytes.
        into: The target. It is not changed if the frame is refused.
        base: The cell that the frame was encoded against. It may be ``into`` itself, but must not overlap it
            otherwise. It is ignored if the form does not need a base.

    Raises:
        Refused: The bytes are not a frame of a cell of this size. InvalidInput: The form needs a base, but there is
            none, or it has a different length.
    """
    read = read_frame(frame, into.nbytes)
    if not needs_base(read.form):
        _write_planes(read, _elements(into, read.width))
        return
    if base is None or base.nbytes != into.nbytes:
        raise InvalidInput("a frame of differences needs a base of the same size as the cell; pass one")
    target, others = _elements(into, read.width), _elements(base, read.width)
    if read.form == Form.SPARSE and target.__array_interface__["data"] != others.__array_interface__["data"]:
        np.copyto(target, others)
    _change(read, target, others, np.add)


def decodes(frame: bytes, plain: memoryview, base: memoryview | None = None) -> bool:
    """Return whether a new frame decodes to the cell ``plain``. Decodes in place, and overwrites the ``base``.

    Otherwise, only a load would detect a bad frame. Logs an error if the result is False.
    """
    into = scratch("version", plain.nbytes).data if base is None else base
    with suppress(InvalidInput):  # not a frame
        decode(memoryview(frame), into, into)
        if _equal(into, plain):
            return True
    log.error("an encoded cell decodes to something else, so it is stored unencoded; please report this bug")
    return False


def _equal(one: memoryview, other: memoryview) -> bool:
    """Return whether the bytes are equal. Compares eight bytes at a time, without the GIL."""
    words = one.nbytes // 8
    same = scratch("flags", words).view(bool)
    np.equal(np.frombuffer(one, "<u8", words), np.frombuffer(other, "<u8", words), out=same)
    return bool(same.all()) and one[8 * words :] == other[8 * words :]


def undo(frame: memoryview, into: memoryview) -> None:
    """Turn the cell in ``into`` back into its base, in place.

    Raises:
        Refused: The bytes are not a frame of a cell of this size, or the form does not use a base.
    """
    read = read_frame(frame, into.nbytes)
    if not needs_base(read.form):
        raise Refused("a frame without a base cannot be undone; decode the frame of the base that you need")
    elements = _elements(into, read.width)
    _change(read, elements, elements, np.subtract)


def _write_planes(frame: ParsedFrame, into: Unsigned) -> None:
    for begin in range(0, into.size, BLOCK):
        join(frame.planes, begin, into[begin : begin + BLOCK], rotated=frame.rotated)


def _change(frame: ParsedFrame, into: Unsigned, base: Unsigned, operation: np.ufunc) -> None:
    """Write the elements that the frame covers. Each is ``operation`` of an element of ``base`` and a difference."""
    begin = 0
    for where in _places(frame, into.size):
        old = base[where]
        differences = scratch("differences", old.nbytes).view(old.dtype)
        join(frame.planes, begin, differences, rotated=False)
        unzigzag(differences)
        into[where] = operation(old, differences, out=differences)
        begin += old.size


def _places(frame: ParsedFrame, count: int) -> Iterator[slice | Indices]:
    """Yield the positions of the elements in the planes, at most `BLOCK` at a time."""
    if frame.form == Form.SPARSE:
        yield from decode_gaps(frame.gaps)
        return
    for begin in range(0, count, BLOCK):
        yield slice(begin, begin + BLOCK)


def decoded(cell: StoredCell, stored: bytearray, base: bytearray | None) -> bytearray:
    """Return the bytes of a cell. ``stored``: its bytes in the blob.

    ``base``: the bytes of its base, which are overwritten. Raises Refused if the result does not match the cell's
    digest.
    """
    plain = stored if cell.frame is None else bytearray(cell.nbytes) if base is None else base
    try:
        if cell.frame is not None:
            decode(memoryview(stored), memoryview(plain), None if base is None else memoryview(base))
    except InvalidInput as error:
        raise Refused(str(error)) from error
    if cell_digest(plain) != cell.digest:
        raise Refused("it decodes to the wrong cell")
    return plain


def decode_chain(cell: StoredCell, read: Callable[[StoredCell], bytearray]) -> bytearray:
    """Return the bytes of a cell. ``read`` returns the stored bytes of the cell and of each base.

    Raises Refused if a cell does not match its digest, and any error that ``read`` raises.
    """
    base = None if cell.base is None else decode_chain(cell.base, read)
    return decoded(cell, read(cell), base)
