"""The files of a checkpoint, read as `casckpt serve` sends them."""

from __future__ import annotations

import casckpt
from casckpt.contents.checkpoint import Checkpoint
from casckpt.frontends.serve.folders import FileSpan, ServedFolders
from casckpt.frontends.serve.sending import WINDOW_BYTES, RangeReader


def served(store: casckpt.Store, ref: str | Checkpoint = "latest") -> dict[str, bytes]:
    """Return the bytes of each file, by path."""
    folder = ServedFolders(store, None, None).of(store.get(ref))
    found: dict[str, bytes] = {}
    for name, file in folder.files.items():
        reader = RangeReader(store.repository, folder, file, FileSpan(0, file.nbytes))
        found[name] = bytes(reader.head)
        while window := reader.next():
            found[name] += reader.read(window, memoryview(bytearray(WINDOW_BYTES)))
    return found
