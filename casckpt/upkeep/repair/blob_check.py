"""Checks whole blobs against their names: size, proof, leaves and header."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from casckpt.base.parallel import in_parallel
from casckpt.errors import NotFound, Refused, StorageError
from casckpt.format.keys import blob_key
from casckpt.format.sections.blobs import BlobRef
from casckpt.repository.fetching import compare_size, explain, prove
from casckpt.repository.repository import Repository
from casckpt.storage.base import ShortObject
from casckpt.storage.buffers import BufferPool

PIECE = 4 << 20  # bytes per read
_MAX_THREADS = 8
_ATTEMPTS = 2


@dataclass(frozen=True)
class Checked:
    """The result of checking one blob. ``why``: the damage, or "" if there is none.

    ``failed``: the error that prevented reading.
    """

    ref: BlobRef
    why: str = ""
    failed: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the whole blob was read and is undamaged."""
        return not self.why and not self.failed


def check_blobs(repo: Repository, refs: Iterable[BlobRef], progress: Callable[[int], None]) -> Iterator[Checked]:
    """Check each of ``refs``, and yield the results in order.

    ``progress``: called with the number of bytes just read.
    """
    threads = threads_for(repo)
    buffers = BufferPool(threads, PIECE)
    try:
        yield from in_parallel(threads, partial(_check, repo, buffers, progress), refs, name="verify")
    finally:
        buffers.close()


def threads_for(repo: Repository) -> int:
    """Return how many threads to use to read and verify a store."""
    traits = repo.storage.traits
    return min(_MAX_THREADS, traits.parallel if traits.remote else os.cpu_count() or 1)


def _check(repo: Repository, buffers: BufferPool, progress: Callable[[int], None], ref: BlobRef) -> Checked:
    failed = ""
    for _ in range(_ATTEMPTS):
        try:
            with buffers.borrow() as buffer, repo.storage.open(blob_key(ref.uploader, ref.hash)) as reader:
                if why := compare_size(ref, reader.size):
                    return Checked(ref, why)
                return Checked(ref, prove(reader, ref, buffer.view, progress))
        except (NotFound, Refused, ShortObject) as error:  # Refused: the path is a pipe or a folder
            return Checked(ref, explain(ref, error))
        except StorageError as error:
            failed = str(error)
    return Checked(ref, failed=failed)
