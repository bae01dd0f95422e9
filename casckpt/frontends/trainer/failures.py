"""Saves in the background that failed: which are raised at the next save, and which only after several of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import Conflict, InvalidInput, Revoked

PATIENCE = 15 * 60 * 1_000_000
"""For so many microseconds saves may fail before one is made in the foreground."""


def will_repeat(error: BaseException) -> bool:
    """Tell whether the next save would fail alike: the state, an argument or a step that exists is the reason."""
    return isinstance(error, InvalidInput) or (isinstance(error, Conflict) and not isinstance(error, Revoked))


class HeardFuture(Future[Checkpoint]):
    """The future of a save. ``is_heard``: whether the caller has asked how it ended, and so knows of a failure."""

    is_heard = False

    def result(self, timeout: float | None = None) -> Checkpoint:
        """See `Future.result`."""
        self.is_heard = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `Future.exception`."""
        self.is_heard = True
        return super().exception(timeout)

    def unheard_exception(self) -> BaseException | None:
        """Wait for the end and return what the save raised, without telling the caller."""
        return super().exception()


class Failures:
    """The saves that failed since the last one that did not, on one rank. ``clock``: in microseconds.

    ``most``: so many in a row, over `PATIENCE`, are too many. None: they never are.
    """

    def __init__(self, most: int | None, clock: Callable[[], int]) -> None:
        self.count = 0
        self._most, self._clock, self._first = most, clock, 0

    def note(self, error: BaseException | None) -> None:
        """Note how a save ended. ``error``: None if it is durable."""
        if error is None:
            self.count = 0
            return
        if self.count == 0:
            self._first = self._clock()
        self.count += 1

    @property
    def too_many(self) -> bool:
        """Whether the next save is to be made in the foreground, and its failure raised."""
        if self._most is None or self.count < self._most:
            return False
        return self._clock() - self._first >= PATIENCE
