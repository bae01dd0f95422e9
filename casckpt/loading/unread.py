"""Finds and logs the parts of a checkpoint that a load did not read, such as a whole optimizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence

from casckpt.base.groups import grouped
from casckpt.base.text import is_news, listed
from casckpt.format.tree import Node, Path, children, join

log = logging.getLogger("casckpt")

EVERYTHING = ""
"""The whole checkpoint as a subtree. It is used if none of it was read."""

_GENERATOR = re.compile(r"(^|[._])(rng|random|generator)")


def left_unread(tree: Node, unread: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the largest containers that were not read, and single unread leaves of other containers, by flat key.

    If nothing at all was read, the first container is `EVERYTHING`. Top-level leaves count only if another top-level
    leaf was read, because a load of a model need not read an epoch.
    """
    dropped: list[str] = []
    leaves, left, containers = _unread_below(tree, (), frozenset(unread), dropped)
    return (EVERYTHING, *containers) if leaves and leaves == left else tuple(containers), tuple(dropped)


def _unread_below(node: Node, path: Path, unread: frozenset[str], dropped: list[str]) -> tuple[int, int, list[str]]:
    """Return the number of leaves and of unread leaves, and the largest unread containers, at or below ``path``."""
    if isinstance(node, int):
        return 1, int(join(path) in unread), []
    leaves, left, single = 0, 0, 0
    containers: list[str] = []
    own: list[str] = []
    for element, child in children(node):
        child_leaves, child_left, below = _unread_below(child, (*path, element), unread, dropped)
        leaves, left, containers = leaves + child_leaves, left + child_left, containers + below
        if isinstance(child, int):
            single += 1
            own += [join((*path, element))] if child_left else []
    if path and leaves and leaves == left:
        return leaves, left, [join(path)]
    if path or len(own) < single:
        dropped += own
    return leaves, left, containers


def is_within(key: str, subtree: str) -> bool:
    """Return whether a key is the root of a subtree, or is below it."""
    return key == subtree or key.startswith(f"{subtree}.")


def that_hold(subtrees: Collection[str], keys: Collection[str]) -> tuple[str, ...]:
    """Return the subtrees that contain at least one of the flat keys."""
    homes = {home for key in keys for home in prefixes(key)}
    return tuple(subtree for subtree in subtrees if subtree in homes)


def also_unread(asked: Sequence[str], subtrees: Collection[str]) -> list[bool]:
    """Return, for each subtree in ``asked``, whether this rank did not read it.

    ``subtrees``: the subtrees that this rank did not read.
    """
    own = frozenset(subtrees)
    return [not own.isdisjoint(prefixes(key)) for key in asked]


def prefixes(key: str) -> list[str]:
    """Return a flat key, and the keys of all containers that may hold it."""
    if key == EVERYTHING:
        return [EVERYTHING]
    parts = key.split(".")
    return [EVERYTHING, *(".".join(parts[:count]) for count in range(1, len(parts) + 1))]


def on_all(asked: Sequence[str], answers: Sequence[Sequence[bool]]) -> tuple[str, ...]:
    """Return the subtrees that no rank read. ``answers``: the result of `also_unread` on each rank."""
    return tuple(key for key, *left in zip(asked, *answers, strict=True) if all(left))


def is_generator(key: str) -> bool:
    """Return whether a key is the name of a random number generator."""
    return _GENERATOR.search(key) is not None


def warn_moved(run: str, step: int, holders: Mapping[str, Collection[int]], size: int) -> None:
    """Log, once for each run, the per-rank values that a different rank loads, or that no rank loads.

    ``holders``: the ranks that saved their own value, by key. ``size``: the number of ranks that load.
    """
    moved = [key for key, ranks in holders.items() if set(ranks) != set(range(size))]
    for ranks, keys in grouped(moved, lambda key: tuple(sorted(holders[key]))).items():
        without = [rank for rank in range(size) if rank not in ranks]
        left = [rank for rank in ranks[1:] if rank >= size]
        said = (
            [f"rank{'s' * (len(without) > 1)} {listed(without)} loaded the value of rank {ranks[0]}"] if without else []
        )
        said += [f"no rank loaded the value of rank{'s' * (len(left) > 1)} {listed(left)}"] if left else []
        if is_news(run, size, *ranks, *keys):
            log.warning("%s of %s@%d: %s", listed(keys), run, step, "; ".join(said))


def warn_unread(run: str, step: int, subtrees: Sequence[str], what_to_say: str) -> None:
    """Log the subtrees that were not read, once for each run.

    ``what_to_say``: the end of the message, which says how to disable it.
    """
    if subtrees and is_news(run, *subtrees):
        named = listed([key for key in subtrees if key != EVERYTHING])
        what = (
            f"read nothing (it has {named or 'no containers'})" if EVERYTHING in subtrees else f"did not read {named}"
        )
        log.warning("the load %s of %s@%d; if this is intended, %s", what, run, step, what_to_say)
