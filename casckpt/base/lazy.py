"""Attributes that are computed when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801 - it stands for the one of functools
    """As that of functools, in Python 3.12 and later: without a lock.

    In Python 3.11 all instances of a class share one. So threads computed one after the other, and a child that was
    forked meanwhile waited for ever for a thread that it does not have. Of threads that compute at once the first one's
    value stays.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._name = ""
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> cached_property[T] | T:
        if instance is None:
            return self
        found: T = instance.__dict__.setdefault(self._name, self._compute(instance))
        return found
