"""Cells of the previous save in host memory, as bases for the frames of the next one.

What is kept is a copy of the buffer that was hashed, never of the caller's memory, and it counts only where its digest
is that of the cell in the manifest. So whatever happened in between (a save that failed, a run that was rolled back, or
resumed elsewhere) a cell that is of no use is not used.
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
"""Which elements a cell holds: [lo, hi) of a box of a stream."""


class HeldFrame(NamedTuple):
    """A frame that was decoded and compared. ``base``: the digest of what undoing it gives."""

    data: bytes
    base: CellDigest


@dataclass(frozen=True, slots=True)
class HeldCell:
    """The bytes of one version of a cell. ``frames``: those by which it was saved, its own first, down to its key."""

    digest: CellDigest
    plain: bytearray
    frames: tuple[HeldFrame, ...] = ()


@dataclass
class PreviousCells:
    """The cells that one process saved of one run."""

    _cells: dict[CellName, HeldCell] = field(default_factory=dict)

    def only(self, names: Container[CellName]) -> None:
        """Give up all but these: the state has others no more, or they are cut in another way."""
        for name in [name for name in list(self._cells) if name not in names]:
            self.take(name)

    def take(self, name: CellName) -> HeldCell | None:
        """Take out what is held of a cell: it is the caller's alone, to be changed in place, until he puts it back.

        So neither another save in another thread nor one after an error finds bytes that are being changed.
        """
        return self._cells.pop(name, None)

    def put(self, name: CellName, cell: HeldCell) -> None:
        """Keep these bytes themselves."""
        self._cells[name] = cell

    def keep(self, name: CellName, digest: CellDigest, plain: memoryview, frames: tuple[HeldFrame, ...] = ()) -> None:
        """Keep a copy of the bytes of a cell, in the memory of what is held of it."""
        held = self.take(name)
        buffer = bytearray(plain.nbytes) if held is None or len(held.plain) != plain.nbytes else held.plain
        copy_bytes(memoryview(buffer), plain)
        self.put(name, HeldCell(digest, buffer, frames))
