"""Values that must not be shared with a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value that each process makes for itself, because a lock or a connection may be in use at the time of a fork.

    The child keeps a reference to the parent's value. So it never closes this value, which could disturb the parent.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}

    def get(self) -> T:
        """Return the value of this process. All threads get the same one."""
        pid = os.getpid()
        value = self._values.get(pid)
        return self._values.setdefault(pid, self._make()) if value is None else value
