"""The last few manifests, in memory: a save compares with the parent that was just written, a load follows a look."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from casckpt.format.names import ManifestId, TxId
from casckpt.storage.forking import PerProcess

if TYPE_CHECKING:
    from casckpt.format.manifest import Manifest

MAX_MANIFESTS = 8
MAX_BYTES = 256 << 20


class ManifestCache:
    """Least recently used ones go first; bounded by number and by bytes of the objects. Thread-safe."""

    def __init__(self) -> None:
        self._lock = PerProcess(threading.Lock)
        self._entries: OrderedDict[tuple[TxId, ManifestId], tuple[Manifest, int]] = OrderedDict()

    def get(self, uploader: TxId, manifest: ManifestId) -> Manifest | None:
        """The manifest, if it is held."""
        with self._lock.get():
            found = self._entries.get((uploader, manifest))
            if found is not None:
                self._entries.move_to_end((uploader, manifest))
        return found[0] if found else None

    def add(self, uploader: TxId, manifest: Manifest, nbytes: int) -> None:
        """Hold one of ``nbytes``; the newest stays whatever its size."""
        with self._lock.get():
            self._entries[uploader, manifest.id] = (manifest, nbytes)
            self._entries.move_to_end((uploader, manifest.id))
            while len(self._entries) > 1 and self._is_full():
                self._entries.popitem(last=False)

    def names(self) -> set[tuple[TxId, ManifestId]]:
        """Which are held."""
        with self._lock.get():
            return set(self._entries)

    def _is_full(self) -> bool:
        return len(self._entries) > MAX_MANIFESTS or sum(size for _, size in self._entries.values()) > MAX_BYTES
