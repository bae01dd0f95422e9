"""Work in lots: consecutive items that are worth doing, or that fit into memory, together; items by a key. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def lots(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Group items, in order, into lists of at most ``most`` in total; a larger item is alone. No list is empty."""
    lot: list[T] = []
    room = most
    for item in items:
        if lot and size(item) > room:
            yield lot
            lot, room = [], most
        lot.append(item)
        room -= size(item)
    if lot:
        yield lot


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by ``key``. The groups, and the items of each, are in the order of the items."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
