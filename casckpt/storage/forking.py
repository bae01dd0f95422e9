"""Values that must not be shared with a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value that each process makes anew: a lock may be held, a connection may be in use, at the instant of a fork.

    What a fork copied stays referenced in the child, and so is never closed there: closing it could disturb the parent.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}

    def get(self) -> T:
        """Return the value of this process; threads that ask at once get the same one."""
        pid = os.getpid()
        found = self._values.get(pid)
        return self._values.setdefault(pid, self._make()) if found is None else found
