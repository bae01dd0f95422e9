"""How those who wait are told how far something is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int], None]
"""Called with what was done since the last call, in bytes or objects; by any thread."""


def silent(done: int) -> None:
    """For nobody."""
