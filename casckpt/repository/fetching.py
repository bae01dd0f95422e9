"""Fetches and verifies whole blobs, and describes their damage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from casckpt.base.groups import runs
from casckpt.base.progress import silent
from casckpt.errors import CasckptError, NotFound, Refused
from casckpt.format.blob import DATA_OFFSET, decode_header
from casckpt.format.digest import cell_digest
from casckpt.format.keys import blob_key
from casckpt.format.proof import Leaf, LeafCheck, decode_proof, read_proof
from casckpt.storage.base import ObjectStore, Reader, ShortObject

if TYPE_CHECKING:
    from casckpt.format.names import CellDigest
    from casckpt.format.sections.blobs import BlobRef

Range: TypeAlias = tuple[int, int]
"""Bytes of a blob's file: start and end."""

_ATTEMPTS = 2  # the network may have damaged the first attempt's data
_SHOWN = 3


class BlobDamaged(Exception):
    """The blob ``ref`` is missing or differs from what was written. The message contains the reason.

    A caller that knows which checkpoint needs the blob catches this error.
    """

    def __init__(self, ref: BlobRef, why: str) -> None:
        super().__init__(why)
        self.ref = ref


def fetch(storage: ObjectStore, ref: BlobRef, buffer: memoryview) -> memoryview:
    """Read a blob into the start of ``buffer``, verify it, and return that part of the buffer.

    Raises `BlobDamaged` and `StorageError`.
    """
    view, why = buffer[: ref.size], ""
    for _ in range(_ATTEMPTS):
        try:
            with storage.open(blob_key(ref.uploader, ref.hash)) as reader:
                why = prove(reader, ref, view)
        except (NotFound, ShortObject) as error:
            raise BlobDamaged(ref, explain(ref, error)) from error
        if not why:
            return view
    raise BlobDamaged(ref, why)


def prove(reader: Reader, ref: BlobRef, buffer: memoryview, progress: Callable[[int], None] = silent) -> str:
    """Read and verify a whole blob. Return a description of the damage, or "" if there is none.

    This function first verifies the proof against the blob's name, and then the rest in pieces that fill ``buffer``. If
    ``buffer`` is large enough, the whole blob is read in one piece. ``progress``: called with the number of bytes just
    read. Raises the reader's errors.
    """
    view = buffer[: ref.size]
    at_once = len(view) == ref.size
    if at_once:
        reader.read_into(0, [view])

    def tail(offset: int, nbytes: int) -> memoryview:
        if at_once:
            return view[offset : offset + nbytes]
        data = memoryview(bytearray(nbytes))
        reader.read_into(offset, [data])
        return data

    try:
        proof = read_proof(tail, ref.size, ref.hash)
        leaves = decode_proof(proof)
    except Refused as error:
        return str(error)
    check, header = LeafCheck(leaves), b""
    for start in range(0, leaves[-1].end, len(view)):
        piece = view[: min(len(view), leaves[-1].end - start)]
        if not at_once:
            reader.read_into(start, [piece])
        check.update(piece)
        header = header or bytes(piece[:DATA_OFFSET])
        progress(len(piece))
    progress(len(proof))
    return _damage(ref, check.wrong, header)


def _damage(ref: BlobRef, wrong: Sequence[Leaf], header: bytes) -> str:
    if wrong:
        joined = runs(wrong, lambda run, leaf: run[-1].end == leaf.offset)
        return _words([(run[0].offset, run[-1].end) for run in joined])
    try:
        decode_header(header, ref.size)
    except Refused as error:
        return str(error)
    return ""


def _words(ranges: Sequence[Range]) -> str:
    if ranges == [(0, DATA_OFFSET)]:
        return "its header is not what was written"
    shown = ", ".join(f"{start} to {end}" for start, end in ranges[:_SHOWN])
    more = f" and {len(ranges) - _SHOWN} more ranges" if ranges[_SHOWN:] else ""
    return f"its bytes {shown}{more} are not what was written"


def compare_size(ref: BlobRef, size: int | None) -> str:
    """Describe the damage of a blob of ``size`` bytes (None: it is missing). "" means that the size is correct."""
    if size is None:
        return "it is gone"
    return "" if size == ref.size else f"it has {size} bytes instead of {ref.size}"


def explain(ref: BlobRef, error: Exception) -> str:
    """Describe an error raised while reading a blob."""
    if isinstance(error, ShortObject):
        return f"it ends after {error.size} of {ref.size} bytes"
    return "it is gone" if isinstance(error, NotFound) else str(error)


def holds_cell(reader: Reader, offset: int, buffer: memoryview, digest: CellDigest | None) -> bool:
    """Read a cell into ``buffer`` and return whether it matches its digest."""
    try:
        reader.read_into(offset, [buffer])
    except (CasckptError, ShortObject):
        return False
    return cell_digest(buffer) == digest
