"""What a load left unread, and saying so: parts of a checkpoint that nobody asked for, such as a whole optimizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence

from casckpt.base.groups import grouped
from casckpt.base.text import listed
from casckpt.format.tree import Node, Path, children, join

log = logging.getLogger("casckpt")

EVERYTHING = ""
"""Stands for the whole checkpoint among subtrees: nothing of it was read."""

_GENERATOR = re.compile(r"(^|[._])(rng|random|generator)")
_TOLD: set[tuple[str, tuple[str, ...]]] = set()
"""Of which run what was told: a loop of evaluations says it once."""


def left_unread(tree: Node, unread: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The largest containers of which nothing was read, and single leaves of other containers, by flat key.

    The first container is `EVERYTHING`, if that is so of all. Leaves at the top count only beside another one that was
    read: who loads a model does not ask for an epoch.
    """
    dropped: list[str] = []
    leaves, left, found = _look(tree, (), frozenset(unread), dropped)
    return (EVERYTHING, *found) if leaves and leaves == left else tuple(found), tuple(dropped)


def _look(node: Node, path: Path, unread: frozenset[str], dropped: list[str]) -> tuple[int, int, list[str]]:
    """(leaves, unread leaves, the largest containers at or below ``path`` of which nothing was read)."""
    if isinstance(node, int):
        return 1, int(join(path) in unread), []
    leaves, left, single = 0, 0, 0
    found: list[str] = []
    own: list[str] = []
    for element, child in children(node):
        child_leaves, child_left, below = _look(child, (*path, element), unread, dropped)
        leaves, left, found = leaves + child_leaves, left + child_left, found + below
        if isinstance(child, int):
            single += 1
            own += [join((*path, element))] if child_left else []
    if path and leaves and leaves == left:
        return leaves, left, [join(path)]
    if path or len(own) < single:
        dropped += own
    return leaves, left, found


def is_within(key: str, subtree: str) -> bool:
    """Whether it is that subtree, or below it."""
    return key == subtree or key.startswith(f"{subtree}.")


def that_hold(subtrees: Collection[str], keys: Collection[str]) -> tuple[str, ...]:
    """The subtrees that any of some flat keys lies in."""
    homes = {home for key in keys for home in prefixes(key)}
    return tuple(subtree for subtree in subtrees if subtree in homes)


def also_unread(asked: Sequence[str], subtrees: Collection[str]) -> list[bool]:
    """Of each subtree that another rank left unread: did this one leave it, which has these ``subtrees`` unread?"""
    mine = frozenset(subtrees)
    return [not mine.isdisjoint(prefixes(key)) for key in asked]


def prefixes(key: str) -> list[str]:
    """A flat key, and all that it may lie below."""
    if key == EVERYTHING:
        return [EVERYTHING]
    parts = key.split(".")
    return [EVERYTHING, *(".".join(parts[:count]) for count in range(1, len(parts) + 1))]


def on_all(asked: Sequence[str], told: Sequence[Sequence[bool]]) -> tuple[str, ...]:
    """The subtrees that all ranks left."""
    return tuple(key for key, *left in zip(asked, *told, strict=True) if all(left))


def is_generator(key: str) -> bool:
    """Tell whether a key is of a random generator, by its name."""
    return _GENERATOR.search(key) is not None


def warn_moved(run: str, step: int, holders: Mapping[str, Collection[int]], size: int) -> None:
    """Log which values per rank go to other ranks than saved them, or to none, once of each run.

    ``holders``: the ranks that saved a value of their own, by key. ``size``: how many ranks load.
    """
    moved = [key for key, ranks in holders.items() if set(ranks) != set(range(size))]
    for ranks, keys in grouped(moved, lambda key: tuple(sorted(holders[key]))).items():
        without = [rank for rank in range(size) if rank not in ranks]
        left = [rank for rank in ranks[1:] if rank >= size]
        said = [f"rank{'s' * (len(without) > 1)} {listed(without)} took what rank {ranks[0]} saved"] if without else []
        said += [f"what rank{'s' * (len(left) > 1)} {listed(left)} saved was not taken"] if left else []
        if _is_news(run, (f"{size}", *map(str, ranks), *keys)):
            log.warning("%s of %s@%d: %s", listed(keys), run, step, "; ".join(said))


def warn_unread(run: str, step: int, subtrees: Sequence[str], what_to_say: str) -> None:
    """Log that these were left unread, once of each run. ``what_to_say``: how a caller says that it is meant."""
    if subtrees and _is_news(run, tuple(subtrees)):
        named = listed([key for key in subtrees if key != EVERYTHING])
        what = (
            f"read nothing (it has {named or 'no containers'})" if EVERYTHING in subtrees else f"did not read {named}"
        )
        log.warning("the load %s of %s@%d; if that is meant, %s", what, run, step, what_to_say)


def _is_news(run: str, what: tuple[str, ...]) -> bool:
    """Whether this was not said of the run before; from now on it was."""
    is_new = (run, what) not in _TOLD
    _TOLD.add((run, what))
    return is_new
