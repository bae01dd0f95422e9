"""Values that must not be shared with a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value that each process creates for itself, because a lock or connection may be in use when the process forks.

    The child keeps a reference to the parent's value so that garbage collection never closes it, which could disrupt
    the parent.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}

    def get(self) -> T:
        """Return this process's value, which all its threads share."""
        pid = os.getpid()
        value = self._values.get(pid)
        return self._values.setdefault(pid, self._make()) if value is None else value
