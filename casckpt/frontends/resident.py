"""Files that are mapped into memory, and how many of their pages stay there while a save goes over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from casckpt.plan.progress import Shown

RESIDENT_BYTES: Final = 256 << 20
"""So much of mapped files is resident at most, more or less."""


class Resident:
    """The progress of a save, which has the pages that were read let go every `RESIDENT_BYTES`.

    So memory is bounded for those too who count pages of files. Nothing was written to them, so nothing is lost:
    whoever needs one again has it from the page cache.
    """

    def __init__(self, shown: Shown | None, let_go: Callable[[], None]) -> None:
        self._shown = shown
        self._let_go = let_go
        self._let_go_at = RESIDENT_BYTES

    def done(self, done: int, total: int | None) -> None:
        """The progress of the save: see `Shown`."""
        if self._shown is not None:
            self._shown(done, total)
        if done >= self._let_go_at:
            self._let_go_at = done + RESIDENT_BYTES
            self._let_go()
