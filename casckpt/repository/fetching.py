"""Fetches and verifies whole blobs, and describes their damage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

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

_ATTEMPTS = 2  # the network may have damaged the first
_SHOWN = 3


class BlobDamaged(Exception):
    """The blob ``ref`` is missing or differs from the written data. The message gives the reason.

    Callers catch this if they know which checkpoint needs the blob.
    """

    def __init__(self, ref: BlobRef, why: str) -> None:
        super().__init__(why)
        self.ref = ref


@dataclass(frozen=True)
class Proved:
    """The result of verifying a blob. ``why``: a description of the damage, "" if there is none.

    ``ranges``: the bytes that are wrong, or cannot be verified. ``proof``: empty if the proof itself is wrong.
    """

    why: str = ""
    ranges: tuple[Range, ...] = ()
    proof: bytes = b""


def fetch(storage: ObjectStore, ref: BlobRef, buffer: memoryview) -> memoryview:
    """Read a blob into the start of ``buffer``, verify it, and return that part.

    Raises `BlobDamaged`, `StorageError`.
    """
    view, why = buffer[: ref.size], ""
    for _ in range(_ATTEMPTS):
        try:
            with storage.open(blob_key(ref.uploader, ref.hash)) as reader:
                why = prove(reader, ref, view).why
        except (NotFound, ShortObject) as error:
            raise BlobDamaged(ref, explain(ref, error)) from error
        if not why:
            return view
    raise BlobDamaged(ref, why)


def prove(reader: Reader, ref: BlobRef, buffer: memoryview, progress: Callable[[int], None] = silent) -> Proved:
    """Read and verify a whole blob.

    It verifies the proof first, by the name of the blob, then the rest in pieces of the size of ``buffer``. A
    ``buffer`` that is large enough takes the whole blob in one read. ``progress``: called with the number of bytes
    just read. Raises the errors of the reader.
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
        return Proved(str(error), ((0, ref.size),))
    check, header = LeafCheck(leaves), b""
    for start in range(0, leaves[-1].end, len(view)):
        piece = view[: min(len(view), leaves[-1].end - start)]
        if not at_once:
            reader.read_into(start, [piece])
        check.update(piece)
        header = header or bytes(piece[:DATA_OFFSET])
        progress(len(piece))
    progress(len(proof))
    return _proved(ref, check.wrong, header, proof)


def _proved(ref: BlobRef, wrong: Sequence[Leaf], header: bytes, proof: bytes) -> Proved:
    if wrong:
        ranges = tuple(_merged(wrong))
        return Proved(_words(ranges), ranges, proof)
    try:
        decode_header(header, ref.size)
    except Refused as error:
        return Proved(str(error), ((0, DATA_OFFSET),), proof)
    return Proved(proof=proof)


def _merged(leaves: Sequence[Leaf]) -> list[Range]:
    """Return the byte ranges of ``leaves``, which are sorted, with adjacent ranges merged."""
    ranges: list[Range] = []
    for leaf in leaves:
        follows = bool(ranges) and ranges[-1][1] == leaf.offset
        start = ranges.pop()[0] if follows else leaf.offset
        ranges.append((start, leaf.end))
    return ranges


def _words(ranges: Sequence[Range]) -> str:
    if ranges == ((0, DATA_OFFSET),):
        return "its header is not what was written"
    shown = ", ".join(f"{start} to {end}" for start, end in ranges[:_SHOWN])
    more = f" and {len(ranges) - _SHOWN} more ranges" if ranges[_SHOWN:] else ""
    return f"its bytes {shown}{more} are not what was written"


def compare_size(ref: BlobRef, size: int | None) -> str:
    """Describe the damage of a blob with ``size`` bytes (None: it is missing); "" if the size is right."""
    if size is None:
        return "it is gone"
    return "" if size == ref.size else f"it has {size} bytes instead of {ref.size}"


def explain(ref: BlobRef, error: Exception) -> str:
    """Describe an error of reading a blob."""
    if isinstance(error, ShortObject):
        return f"it ends after {error.size} of {ref.size} bytes"
    return "it is gone" if isinstance(error, NotFound) else str(error)


def holds_cell(reader: Reader, offset: int, buffer: memoryview, digest: CellDigest | None) -> bool:
    """Read a cell into ``buffer``, and return whether it matches its digest."""
    try:
        reader.read_into(offset, [buffer])
    except (CasckptError, ShortObject):
        return False
    return cell_digest(buffer) == digest
