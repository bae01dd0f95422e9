"""Locates and reads single cells of manifests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from casckpt.format.encodings.frames import decode_chain
from casckpt.format.extents import StoredCell
from casckpt.format.keys import blob_key
from casckpt.format.manifest import Manifest
from casckpt.repository.repository import Repository


@dataclass(frozen=True, slots=True)
class Located:
    """A cell of a manifest. ``keys``: the keys of the blobs that contain the cell and its bases, by blob number."""

    repo: Repository = field(repr=False)
    keys: Mapping[int, str]
    cell: StoredCell

    def read(self) -> bytearray:
        """Read the cell, and decode it if it is encoded. Raises Refused for a bad frame, and the errors of reading."""
        return decode_chain(self.cell, self.stored)

    def stored(self, cell: StoredCell) -> bytearray:
        """Read the stored bytes of ``cell``, which is this cell or one of its bases. Raises the errors of reading."""
        data = bytearray(cell.stored)
        with self.repo.storage.open(self.keys[cell.blob]) as reader:
            reader.read_into(cell.offset, [memoryview(data)])
        return data


def locate(repo: Repository, manifest: Manifest, cell: StoredCell) -> Located:
    """Return the location of a cell of a manifest of ``repo``."""
    refs = {link.blob: manifest.blob(link.blob) for link in cell.chain}
    return Located(repo, {number: blob_key(ref.uploader, ref.hash) for number, ref in refs.items()}, cell)
