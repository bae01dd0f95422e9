"""Limits the resident pages of memory-mapped files while a save reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from casckpt.base.progress import Shown

RESIDENT_BYTES: Final = 256 << 20
"""The approximate maximum number of resident bytes of mapped files."""


def letting_go(shown: Shown | None, let_go: Callable[[], None]) -> Shown:
    """Return a progress function that also calls ``let_go`` every `RESIDENT_BYTES` to release pages that were read.

    This bounds memory usage as container limits count it. The pages are unmodified, so a later access rereads them.
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
