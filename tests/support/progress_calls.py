"""The calls that a progress function received."""

from __future__ import annotations


class ProgressCalls:
    """Receives calls as `casckpt.base.progress.Shown` specifies.

    ``done``, ``total``: the arguments of the last call. ``calls``: the number of calls.
    """

    def __init__(self) -> None:
        self.done = 0
        self.total: int | None = None
        self.calls = 0

    def __call__(self, done: int, total: int | None) -> None:
        assert done >= self.done
        self.done, self.total, self.calls = done, total, self.calls + 1
