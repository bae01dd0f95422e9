"""What a load left unread, and saying so: parts of a checkpoint that nobody asked for, such as a whole optimizer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from casckpt.format.tree import Node, Path, children, join

log = logging.getLogger("casckpt")

EVERYTHING = ""
"""Stands for the whole checkpoint among subtrees: nothing of it was read."""

_TOLD: set[tuple[str, tuple[str, ...]]] = set()
"""Of which run what was told: a loop of evaluations says it once."""


def unread_subtrees(tree: Node, unread: Collection[str]) -> tuple[str, ...]:
    """The largest containers of which nothing was read, by flat key; first `EVERYTHING`, if that is so of all."""
    if not unread:
        return ()
    keys = frozenset(unread)
    leaves, left, found = _look(tree, (), keys)
    return (EVERYTHING, *found) if leaves and leaves == left else tuple(found)


def _look(node: Node, path: Path, unread: frozenset[str]) -> tuple[int, int, list[str]]:
    """(leaves, unread leaves, the largest containers at or below ``path`` of which nothing was read)."""
    if isinstance(node, int):
        return 1, int(join(path) in unread), []
    leaves, left = 0, 0
    found: list[str] = []
    for element, child in children(node):
        child_leaves, child_left, below = _look(child, (*path, element), unread)
        leaves, left = leaves + child_leaves, left + child_left
        found += below
    if path and leaves and leaves == left:
        found = [join(path)]
    return leaves, left, found


def is_within(key: str, subtree: str) -> bool:
    """Whether it is that subtree, or below it."""
    return key == subtree or key.startswith(f"{subtree}.")


def that_hold(subtrees: Collection[str], keys: Collection[str]) -> tuple[str, ...]:
    """The subtrees that any of some flat keys lies in."""
    homes = {home for key in keys for home in _above(key)}
    return tuple(subtree for subtree in subtrees if subtree in homes)


def also_unread(asked: Sequence[str], subtrees: Collection[str]) -> list[bool]:
    """Of each subtree that another rank left unread: did this one leave it, which has these ``subtrees`` unread?"""
    mine = frozenset(subtrees)
    return [not mine.isdisjoint(_above(key)) for key in asked]


def _above(key: str) -> list[str]:
    """A flat key, and all that it may lie below."""
    if key == EVERYTHING:
        return [EVERYTHING]
    parts = key.split(".")
    return [EVERYTHING, *(".".join(parts[:count]) for count in range(1, len(parts) + 1))]


def on_all(asked: Sequence[str], told: Sequence[Sequence[bool]]) -> tuple[str, ...]:
    """The subtrees that all ranks left."""
    return tuple(key for key, *left in zip(asked, *told, strict=True) if all(left))


def tell(run: str, step: int, subtrees: Sequence[str], what_to_say: str) -> None:
    """Log that these were left unread, once of each run. ``what_to_say``: how a caller says that it is meant."""
    if not subtrees or (run, tuple(subtrees)) in _TOLD:
        return
    _TOLD.add((run, tuple(subtrees)))
    shown = [repr(key) for key in subtrees if key != EVERYTHING]
    named = ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
    what = f"nothing ({named or 'no key'} was asked for)" if EVERYTHING in subtrees else f"not {named}"
    log.warning("the load read %s of %s@%d; if that is meant, %s", what, run, step, what_to_say)
