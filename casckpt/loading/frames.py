"""The frames of a load, which are read together and then decoded.

If a cell is wrong, its frames are reread and decoded again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from threading import Condition

from casckpt.errors import NotFound, Refused, StorageError
from casckpt.format.encodings.frames import decode, decoded
from casckpt.format.extents import StoredCell
from casckpt.format.manifest import Manifest
from casckpt.loading.blob_readers import BlobReader, Lost
from casckpt.loading.planned_reads import Item, PlannedRead
from casckpt.plan.reads import Batch
from casckpt.plan.routes import Link, links
from casckpt.repository.fetching import explain
from casckpt.repository.repository import Repository
from casckpt.storage.base import Reader, ShortObject
from casckpt.tensors.memory import copy_bytes


class Lot:
    """The frames of cells that are decoded together. They remain in memory until the last of these cells is decoded.

    The first threads that need the frames read them, so no thread waits for a read that has not begun. ``frames``: the
    reads of the frames. ``users``: the number of batches that need these frames. ``decoded``: if it is set, it receives
    the frames that were used.
    """

    def __init__(
        self, frames: Sequence[Batch[Item]] = (), users: int = 0, decoded: dict[Link, bytes] | None = None
    ) -> None:
        self._unread, self._decoded, self._has_frames = deque(frames), decoded, bool(frames)
        self._reading, self._failed, self._users = 0, False, users
        self._held: dict[tuple[int, int], memoryview] = {}
        self._changed = Condition()

    def fetch(self, read: Callable[[Batch[Item]], memoryview]) -> bool:
        """Read all frames. Return False if another thread failed to read one. Raises the errors of ``read``."""
        if not self._has_frames:
            return True
        while (batch := self._next()) is not None:
            frames: Sequence[tuple[tuple[int, int], memoryview]] | None = None
            try:
                data = read(batch)
                frames = [((batch.blob, at), data[at - batch.offset :][:nbytes]) for at, nbytes, _ in batch.items]
            finally:
                self._has_read(frames)
        with self._changed:
            self._changed.wait_for(lambda: not self._reading)
            return not self._failed

    def _next(self) -> Batch[Item] | None:
        with self._changed:
            if not self._unread or self._failed:
                return None
            self._reading += 1
            return self._unread.popleft()

    def _has_read(self, frames: Sequence[tuple[tuple[int, int], memoryview]] | None) -> None:
        with self._changed:
            self._reading -= 1
            self._failed |= frames is None
            self._held.update(frames or ())
            self._changed.notify_all()

    def decode(self, item: PlannedRead, root: memoryview, into: memoryview) -> None:
        """Decode a cell. ``root``: the stored bytes of its root. It may be the same memory as ``into``.

        Raises InvalidInput.
        """
        if item.root.frame is not None:
            decode(root, into, None)
        elif root is not into:
            copy_bytes(into, root)
        for cell in item.frames:
            frame = self._held[cell.blob, cell.offset]
            decode(frame, into, into)
            if self._decoded is not None:
                self._decoded[next(links(cell))] = bytes(frame)

    def done(self) -> None:
        """Record that one batch is done. After the last batch, free the memory."""
        if not self._has_frames:
            return
        with self._changed:
            self._users -= 1
            if not self._users:
                self._held.clear()


def decode_again(
    repo: Repository, manifest: Manifest, cell: StoredCell, key: str, *, what: str = "a cell"
) -> bytearray:
    """Reread and decode a cell and all its bases. Compare each of them with its digest.

    This corrects errors that exist only in a cache. Raises `Lost` for the first wrong cell, and StorageError.
    """
    base, below = None, cell.base
    if below is not None:
        base = decode_again(repo, manifest, below, key, what="a base of a cell")
    with closing(BlobReader(repo, manifest.blob(cell.blob), shared=False, keep=False)) as slot:
        while True:
            reader: Reader | None = None
            try:
                reader = slot.reader()
                stored = bytearray(cell.stored)
                reader.read_into(cell.offset, [memoryview(stored)])
                return decoded(cell, stored, None if base is None else bytearray(base))
            except (NotFound, ShortObject, StorageError, Refused) as error:
                if slot.distrust(reader):
                    continue
                if isinstance(error, StorageError):
                    raise
                why = explain(slot.ref, error)
                if isinstance(error, Refused):
                    why = f"its bytes {cell.offset} to {cell.offset + cell.stored}, {what}, are not what was written"
                    if cell.frame is not None:
                        why += f", or are not a frame of it ({error}; run `casckpt verify --decode` to find out)"
                raise Lost(slot.ref, key, why) from error
