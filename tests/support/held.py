"""Measures how much memory this process keeps for later saves."""

from __future__ import annotations

from casckpt.saving import encoder as kept


def held_bytes() -> int:
    """Return the bytes of cells and frames that this process keeps for all runs."""
    cells = [cell for one in kept._RUNS.get()._memories.values() for cell in one.held.values()]
    return sum(len(cell.plain) + sum(len(frame.data) for frame in cell.frames) for cell in cells)
