"""The cells of the previous save, in host memory. They serve as bases for the frames of the next save.

This module holds copies of the hashed buffers, never the caller's memory. A save uses a cell only if its digest is in
the manifest. Therefore, these cells remain correct after a failed save, a rollback of the run, or a resume on a
different host.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from casckpt.format.names import CellDigest
from casckpt.format.regions import Box
from casckpt.format.sections.index import Name
from casckpt.tensors.memory import copy_bytes

CellName: TypeAlias = tuple[Name, Box, int, int]
"""The elements of a cell: the range [lo, hi) of a box in a stream."""


class HeldFrame(NamedTuple):
    """A frame that was decoded and compared. ``base``: the digest of the cell that `undo` restores."""

    data: bytes
    base: CellDigest


@dataclass(frozen=True, slots=True)
class HeldCell:
    """The bytes of one version of a cell. ``frames``: the chain that encodes it, beginning with its own frame."""

    digest: CellDigest
    plain: bytearray
    frames: tuple[HeldFrame, ...] = ()


@dataclass
class PreviousCells:
    """The cells of one run that one process saved."""

    _cells: dict[CellName, HeldCell] = field(default_factory=dict)

    def only(self, names: Container[CellName]) -> None:
        """Drop all cells except those in ``names``. The state no longer has the others, or divides them differently."""
        for name in [name for name in list(self._cells) if name not in names]:
            self.take(name)

    def take(self, name: CellName) -> HeldCell | None:
        """Remove a cell and return it. The caller may change it in place and put it back.

        Removal ensures that a save in another thread, or a save after an error, never sees partly changed bytes.
        """
        return self._cells.pop(name, None)

    def put(self, name: CellName, cell: HeldCell) -> None:
        """Keep a cell without copying it."""
        self._cells[name] = cell

    def keep(self, name: CellName, digest: CellDigest, plain: memoryview, frames: tuple[HeldFrame, ...] = ()) -> None:
        """Keep a copy of a cell's bytes. Reuses the memory of the held version."""
        held = self.take(name)
        buffer = bytearray(plain.nbytes) if held is None or len(held.plain) != plain.nbytes else held.plain
        copy_bytes(memoryview(buffer), plain)
        self.put(name, HeldCell(digest, buffer, frames))
