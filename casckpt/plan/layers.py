"""Groups tensors by layer, for reports on models with thousands of tensors. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

MOST: Final = 40
"""The maximum number of groups that a report shows."""


def layer_of(key: str, width: int = 1) -> str:
    """Return a key's group: the key up to its first number ("model.layers.3"), or without its last element.

    ``width``: the number of layers in one group ("model.layers.0-3").
    """
    elements = key.split(".")
    for place, element in enumerate(elements):
        if element.isdecimal() and place:
            return ".".join((*elements[:place], _span(int(element), width)))
    return ".".join(elements[:-1] or elements)


def _span(number: int, width: int) -> str:
    first = number - number % width
    return f"{first}-{first + width - 1}" if width > 1 else str(number)


def group(keys: Iterable[str], most: int = MOST) -> dict[str, str]:
    """Return the group of each key, in key order, with at most ``most`` groups in total.

    If there are more layers, neighboring layers share a group. If there are still too many groups, keys with the same
    first two elements share a group, and if necessary, keys with the same first element. As a last resort, the last
    groups become "...".
    """
    keys, groups = list(keys), dict[str, str]()
    for width in (1, 2, 4, 8, 16, 32, 64):
        groups = {key: layer_of(key, width) for key in keys}
        if len(set(groups.values())) <= most:
            return groups
    for elements in (2, 1):
        groups = {key: ".".join(key.split(".")[:elements]) for key in keys}
        if len(set(groups.values())) <= most:
            return groups
    kept = list(dict.fromkeys(groups.values()))[: most - 1]
    return {key: name if name in kept else "..." for key, name in groups.items()}


def summed(nbytes: Mapping[str, int], groups: Mapping[str, str]) -> dict[str, int]:
    """Sum the bytes of the keys by group. Skip keys that have no group."""
    total: dict[str, int] = {}
    for key, size in nbytes.items():
        if key in groups:
            total[groups[key]] = total.get(groups[key], 0) + size
    return total
