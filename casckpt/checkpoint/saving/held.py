"""Cells as they were last saved, kept in host memory: what the next save tells its frames from.

What is kept is a copy of the buffer that was hashed, never of the caller's memory, and it counts only where its digest
is that of the cell in the manifest. So whatever happened in between (a save that failed, a run that was rolled back, or
resumed elsewhere) a cell that is of no use is not used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from casckpt.format.names import CellDigest
from casckpt.format.regions import Box
from casckpt.format.sections.index import Name
from casckpt.tensors.memory import copy_bytes

CellName: TypeAlias = tuple[Name, Box, int, int]
"""Which elements a cell holds: [lo, hi) of a box of a stream."""


@dataclass(slots=True)
class HeldCell:
    """The bytes of one version of a cell. ``frames``: those by which it was saved, its own first, down to its key."""

    digest: CellDigest
    plain: bytearray
    frames: tuple[bytes, ...]


@dataclass
class HeldCells:
    """The cells of one rank. ``run``: whose they are; those of another run take their place."""

    run: str = ""
    _cells: dict[CellName, HeldCell] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that they take."""
        return sum(len(one.plain) + sum(map(len, one.frames)) for one in self._cells.values())

    def begin(self, run: str) -> None:
        """Keep cells of ``run`` from now on."""
        if run != self.run:
            self._cells.clear()
            self.run = run

    def find(self, name: CellName, digest: CellDigest) -> HeldCell | None:
        """Find the bytes of a cell, if they are those with this digest."""
        held = self._cells.get(name)
        return held if held is not None and held.digest == digest else None

    def keep(self, name: CellName, digest: CellDigest, plain: memoryview, frames: tuple[bytes, ...] = ()) -> None:
        """Keep a copy of the bytes of a cell, in the memory of its last version."""
        held = self._cells.get(name)
        if held is None or len(held.plain) != plain.nbytes:
            self._cells[name] = HeldCell(digest, bytearray(plain), frames)
            return
        copy_bytes(memoryview(held.plain), plain)
        held.digest, held.frames = digest, frames

    def take(self, name: CellName, cell: HeldCell) -> None:
        """Keep these bytes themselves."""
        self._cells[name] = cell

    def drop(self, name: CellName) -> None:
        """Keep nothing of a cell."""
        self._cells.pop(name, None)
