"""Pure functions that group items: consecutive items up to a total size, or items by key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def in_batches(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Split items, in order, into lists whose total ``size`` is at most ``most``.

    A larger item gets its own list.
    """
    batch: list[T] = []
    room = most
    for item in items:
        if batch and size(item) > room:
            yield batch
            batch, room = [], most
        batch.append(item)
        room -= size(item)
    if batch:
        yield batch


def runs(items: Iterable[T], continues: Callable[[list[T], T], bool]) -> Iterator[list[T]]:
    """Split items, in order, into lists. ``continues``: returns whether an item belongs to the preceding list."""
    run: list[T] = []
    for item in items:
        if run and not continues(run, item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by ``key``. Groups, and the items within them, keep their original order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
