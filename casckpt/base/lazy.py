"""Attributes that are computed on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from functools import cached_property
else:

    class cached_property:  # noqa: N801 - named as in functools
        """Like `functools.cached_property` in Python 3.12 and later, which uses no lock.

        In Python 3.11, all instances of a class share a lock: threads wait for each other, and a child process that is
        forked in the meantime waits forever. If several threads compute the value concurrently, the first result is
        kept.
        """

        def __init__(self, compute):
            self._compute = compute
            self.__doc__ = compute.__doc__

        def __get__(self, instance, owner):
            if instance is None:
                return self
            return instance.__dict__.setdefault(self._compute.__name__, self._compute(instance))


__all__ = ["cached_property"]
