"""The memory that this process keeps for its next saves."""

from __future__ import annotations

from casckpt.saving import encoder as kept


def held_bytes() -> int:
    """Bytes of the cells that it keeps of all runs, and of their frames."""
    cells = [cell for one in kept._RUNS.get()._memories.values() for cell in one.held._cells.values()]
    return sum(len(cell.plain) + sum(len(frame.data) for frame in cell.frames) for cell in cells)
