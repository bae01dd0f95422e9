"""Files that are mapped into memory, and how many of their pages stay there while a save goes over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from casckpt.base.progress import Shown

RESIDENT_BYTES: Final = 256 << 20
"""So much of mapped files is resident at most, more or less."""


def letting_go(shown: Shown | None, let_go: Callable[[], None]) -> Shown:
    """The progress of a save, which has the pages that were read let go every `RESIDENT_BYTES`.

    So memory is bounded for those too who count pages of files. Nothing was written to them, so nothing is lost:
    whoever needs one again has it from the page cache.
    """
    next_at = RESIDENT_BYTES

    def show(done: int, total: int | None) -> None:
        nonlocal next_at
        if shown is not None:
            shown(done, total)
        if done >= next_at:
            next_at = done + RESIDENT_BYTES
            let_go()

    return show
