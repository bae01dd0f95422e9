"""Progress reports for long-running work."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final, TypeAlias

Shown: TypeAlias = Callable[[int, int | None], object]
"""Called with the number of finished bytes or objects, and with the total, which is None if it is not known yet.

Any thread may call it, but only one at a time.
"""


class Progress:
    """Counts finished work and reports it to ``shown``. ``also`` is called at each step."""

    def __init__(self, shown: Shown | None = None, also: Callable[[], None] | None = None) -> None:
        self._shown, self._also = shown, also
        self._done, self._total, self._is_whole = 0, 0, False
        self._lock = Lock()

    def __call__(self, done: int) -> None:
        """Add ``done`` to the number of finished bytes."""
        if self._also is not None:
            self._also()
        if self._shown is not None:
            with self._lock:
                self._done += done
                self._shown(self._done, self._total or None)

    def expect(self, more: int) -> None:
        """Add ``more`` bytes to the total."""
        if self._shown is not None and not self._is_whole:
            with self._lock:
                self._total += more
                self._shown(self._done, self._total or None)

    def of(self, total: int | None) -> Progress:
        """Set the total (None if unknown) and return self. Later calls to `expect` do not change the total."""
        self._is_whole = False
        self.expect(total or 0)
        self._is_whole = True
        return self

    def with_callback(self, also: Callable[[], None]) -> Progress:
        """Return a new Progress that reports to the same ``shown`` and calls ``also`` at each step."""
        return Progress(self._shown, also)


silent: Final = Progress()
"""A Progress that reports nothing."""
