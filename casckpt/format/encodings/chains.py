"""Decoding of cells with a chain of bases. Every cell is compared with its digest."""

from __future__ import annotations

from collections.abc import Callable

from casckpt.errors import InvalidInput, Refused
from casckpt.format.digest import cell_digest
from casckpt.format.encodings.frames import decode
from casckpt.format.extents import StoredCell


def decoded(cell: StoredCell, stored: bytearray, base: bytearray | None) -> bytearray:
    """Return the bytes of a cell. ``stored``: its bytes in the blob. ``base``: the bytes of its base, overwritten.

    Raises Refused if the result does not have the digest of the cell.
    """
    plain = stored if cell.frame is None else bytearray(cell.nbytes) if base is None else base
    try:
        if cell.frame is not None:
            decode(memoryview(stored), memoryview(plain), None if base is None else memoryview(base))
    except InvalidInput as error:
        raise Refused(str(error)) from error
    if cell_digest(plain) != cell.digest:
        raise Refused("what it makes is another cell")
    return plain


def decode_chain(cell: StoredCell, read: Callable[[StoredCell], bytearray]) -> bytearray:
    """Return the bytes of a cell. ``read`` returns the stored bytes of the cell and of each base.

    Raises Refused if a cell does not have its digest, and the errors of ``read``.
    """
    base = None if cell.base is None else decode_chain(cell.base, read)
    return decoded(cell, read(cell), base)
