"""Whole blobs out of a store, compared with what was written, and the words for what is wrong with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from casckpt.errors import CasckptError, NotFound, Refused
from casckpt.format.blob import DATA_OFFSET, decode_header
from casckpt.format.digest import Hasher, cell_digest
from casckpt.format.keys import blob_key
from casckpt.plan.progress import silent
from casckpt.storage.base import ObjectStore, Reader, ShortObject

if TYPE_CHECKING:
    from casckpt.format.names import CellDigest
    from casckpt.format.sections.blobs import BlobRef

_ATTEMPTS = 2  # the network may have spoilt the first


class Spoilt(Exception):
    """A blob, ``ref``, is not there as it was written; the text says why.

    Caught by the layer above, which knows who needs it.
    """

    def __init__(self, ref: BlobRef, why: str) -> None:
        super().__init__(why)
        self.ref = ref


def fetch(storage: ObjectStore, ref: BlobRef, buffer: memoryview) -> memoryview:
    """Read a blob into the start of ``buffer``, and return that part. Raises `Spoilt`, `StorageError`."""
    view, why = buffer[: ref.size], ""
    for _ in range(_ATTEMPTS):
        try:
            with storage.open(blob_key(ref.uploader, ref.hash)) as reader:
                why = compare(reader, ref, view)
        except (NotFound, ShortObject) as error:
            raise Spoilt(ref, explain(ref, error)) from error
        if not why:
            return view
    raise Spoilt(ref, why)


def compare(reader: Reader, ref: BlobRef, buffer: memoryview, progress: Callable[[int], None] = silent) -> str:
    """Read a whole blob, a piece of ``buffer`` at a time; say what is wrong with its bytes, "" if nothing.

    ``progress``: called with the bytes just read. Raises what reading does.
    """
    hasher, header = Hasher(), b""
    for start in range(0, ref.size, len(buffer) or 1):
        piece = buffer[: min(len(buffer), ref.size - start)]
        reader.read_into(start, [piece])
        hasher.update(piece)
        header = header or bytes(piece[:DATA_OFFSET])
        progress(len(piece))
    if hasher.hexdigest() != ref.hash:
        return "its bytes do not have the hash in its name"
    try:
        decode_header(header, ref.size)
    except Refused as error:
        return str(error)
    return ""


def compare_size(ref: BlobRef, size: int | None) -> str:
    """Say what is wrong with a blob that has ``size`` bytes, None where there is none; "" if nothing."""
    if size is None:
        return "it is gone"
    return "" if size == ref.size else f"it has {size} bytes instead of {ref.size}"


def explain(ref: BlobRef, error: Exception) -> str:
    """Say what ``error``, raised while a blob was read, means for it."""
    if isinstance(error, ShortObject):
        return f"it ends after {error.size} of {ref.size} bytes"
    return "it is gone" if isinstance(error, NotFound) else str(error)


def holds_cell(reader: Reader, offset: int, buffer: memoryview, digest: CellDigest | None) -> bool:
    """Read a cell into ``buffer``; is it what was written?"""
    try:
        reader.read_into(offset, [buffer])
    except (CasckptError, ShortObject):
        return False
    return cell_digest(buffer) == digest
