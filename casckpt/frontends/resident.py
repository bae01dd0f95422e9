"""Files that are mapped into memory, and how many of their pages stay there while a save goes over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from casckpt.plan.progress import Progress

RESIDENT_BYTES: Final = 256 << 20
"""So much of mapped files is resident at most, more or less."""


class Resident:
    """The progress of a save, which has the pages that were read let go every `RESIDENT_BYTES`.

    So memory is bounded for those too who count pages of files. Nothing was written to them, so nothing is lost:
    whoever needs one again has it from the page cache.
    """

    def __init__(self, progress: Progress, let_go: Callable[[], None]) -> None:
        self._progress = progress
        self._let_go = let_go
        self._since = 0

    def done(self, nbytes: int) -> None:
        """Called with the bytes just saved, by any thread."""
        self._progress(nbytes)
        self._since += nbytes
        if self._since >= RESIDENT_BYTES:
            self._since = 0
            self._let_go()
