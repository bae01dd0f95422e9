"""Is a blob what was written? Its size, the BLAKE3 of all its bytes, and its header."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from casckpt.errors import NotFound, Refused, StorageError
from casckpt.format.blob import DATA_OFFSET, decode_header
from casckpt.format.digest import Hasher
from casckpt.format.keys import blob_key
from casckpt.format.manifest import BlobRef
from casckpt.repository.parallel import in_parallel
from casckpt.repository.repository import Repository
from casckpt.storage.base import Reader, ShortObject
from casckpt.storage.buffers import BufferPool

PIECE = 4 << 20  # bytes read at once
_MAX_THREADS = 8
_ATTEMPTS = 2


@dataclass(frozen=True)
class Checked:
    """``why``: what is wrong with the blob, "" if nothing. ``failed``: the storage did not let it be read."""

    ref: BlobRef
    why: str = ""
    failed: str = ""


def check_blobs(repo: Repository, refs: Iterable[BlobRef], progress: Callable[[int], None]) -> Iterator[Checked]:
    """Read each of ``refs`` whole, and compare. ``progress``: called with the bytes just read. In order."""
    traits = repo.storage.traits
    threads = min(_MAX_THREADS, traits.parallel if traits.remote else os.cpu_count() or 1)
    buffers = BufferPool(threads, PIECE)
    try:
        yield from in_parallel(threads, partial(_check, repo, buffers, progress), refs, name="verify")
    finally:
        buffers.close()


def _check(repo: Repository, buffers: BufferPool, progress: Callable[[int], None], ref: BlobRef) -> Checked:
    found = Checked(ref)
    for _ in range(_ATTEMPTS):
        found = _attempt(repo, buffers, progress, ref)
        if not found.failed:
            break
    return found


def _attempt(repo: Repository, buffers: BufferPool, progress: Callable[[int], None], ref: BlobRef) -> Checked:
    try:
        with buffers.borrow() as buffer, repo.storage.open(blob_key(ref.uploader, ref.hash)) as reader:
            return Checked(ref, _compare(reader, ref, buffer.view, progress))
    except NotFound:
        return Checked(ref, "it is gone")
    except Refused as error:  # a pipe or a folder in its place
        return Checked(ref, str(error))
    except ShortObject as error:
        return Checked(ref, f"it ends after {error.size} of {ref.size} bytes")
    except StorageError as error:
        return Checked(ref, failed=str(error))


def _compare(reader: Reader, ref: BlobRef, buffer: memoryview, progress: Callable[[int], None]) -> str:
    if reader.size != ref.size:
        return f"it has {reader.size} bytes instead of {ref.size}"
    hasher, header = Hasher(), b""
    for start in range(0, ref.size, len(buffer)):
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
