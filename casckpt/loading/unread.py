"""The parts of a checkpoint that a load leaves unread, such as a whole optimizer, and the warnings about them."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence

from casckpt.format.tree import Node, Path, children, join, listed
from casckpt.plan.lots import grouped

log = logging.getLogger("casckpt")

EVERYTHING = ""
"""As a subtree: the whole checkpoint, of which nothing was read."""

_GENERATOR = re.compile(r"(^|[._])(rng|random|generator)")
_LOGGED: set[tuple[str, tuple[str, ...]]] = set()
"""The warnings that were logged, by run: a loop of evaluations logs each of them once."""


def left_unread(tree: Node, unread: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the flat keys of the largest unread containers, and of the unread leaves of other containers.

    If nothing was read, the first container is `EVERYTHING`. A leaf at the top counts only if another leaf at the top
    was read: a load of a model does not ask for an epoch.
    """
    dropped: list[str] = []
    leaves, left, found = _walk(tree, (), frozenset(unread), dropped)
    return (EVERYTHING, *found) if leaves and leaves == left else tuple(found), tuple(dropped)


def _walk(node: Node, path: Path, unread: frozenset[str], dropped: list[str]) -> tuple[int, int, list[str]]:
    """Return the number of leaves, of unread leaves, and the largest unread containers at or below ``path``."""
    if isinstance(node, int):
        return 1, int(join(path) in unread), []
    leaves, left, single = 0, 0, 0
    containers: list[str] = []
    own: list[str] = []
    for element, child in children(node):
        child_leaves, child_left, below = _walk(child, (*path, element), unread, dropped)
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
    """Tell whether ``key`` is ``subtree`` or lies below it."""
    return key == subtree or key.startswith(f"{subtree}.")


def that_hold(subtrees: Collection[str], keys: Collection[str]) -> tuple[str, ...]:
    """Return the ``subtrees`` that contain any of the flat ``keys``."""
    homes = {home for key in keys for home in prefixes(key)}
    return tuple(subtree for subtree in subtrees if subtree in homes)


def also_unread(asked: Sequence[str], subtrees: Collection[str]) -> list[bool]:
    """Tell for each subtree in ``asked`` whether this rank, which left ``subtrees`` unread, left it unread as well."""
    mine = frozenset(subtrees)
    return [not mine.isdisjoint(prefixes(key)) for key in asked]


def prefixes(key: str) -> list[str]:
    """Return a flat key and the flat keys of all containers that it may lie in."""
    if key == EVERYTHING:
        return [EVERYTHING]
    parts = key.split(".")
    return [EVERYTHING, *(".".join(parts[:count]) for count in range(1, len(parts) + 1))]


def on_all(asked: Sequence[str], answers: Sequence[Sequence[bool]]) -> tuple[str, ...]:
    """Return the subtrees in ``asked`` that all ranks left unread. ``answers``: `also_unread` of each rank."""
    return tuple(key for key, *left in zip(asked, *answers, strict=True) if all(left))


def is_generator(key: str) -> bool:
    """Tell by its name whether a key is that of a random generator."""
    return _GENERATOR.search(key) is not None


def warn_moved(run: str, step: int, holders: Mapping[str, Collection[int]], size: int) -> None:
    """Log once for each run which ranks load the values of other ranks, and which values no rank loads.

    ``holders``: by key, the ranks that saved a value of their own. ``size``: the number of ranks that load.
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
    """Log once for each run that ``subtrees`` were not read. ``what_to_say``: the way to silence the warning."""
    if subtrees and _is_news(run, tuple(subtrees)):
        named = listed([key for key in subtrees if key != EVERYTHING])
        what = (
            f"read nothing (it has {named or 'no containers'})" if EVERYTHING in subtrees else f"did not read {named}"
        )
        log.warning("the load %s of %s@%d; if that is meant, %s", what, run, step, what_to_say)


def _is_news(run: str, what: tuple[str, ...]) -> bool:
    """Tell whether this is the first call for ``run`` and ``what``."""
    is_new = (run, what) not in _LOGGED
    _LOGGED.add((run, what))
    return is_new
