"""What a load left unread, and saying so: parts of a checkpoint that nobody asked for, such as a whole optimizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from casckpt.format.tree import Node, Path, children, join

log = logging.getLogger("casckpt")

EVERYTHING = ""
"""Stands for the whole checkpoint among subtrees: nothing of it was read."""

_SHOWN = 5
_GENERATOR = re.compile(r"(^|[._])(rng|random|generator)")
_TOLD: set[tuple[str, tuple[str, ...]]] = set()
"""Of which run what was told: a loop of evaluations says it once."""


def left_unread(tree: Node, unread: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The largest containers of which nothing was read, and single leaves of other containers, by flat key.

    The first container is `EVERYTHING`, if that is so of all. Leaves at the top count only beside another one that was
    read: who loads a model does not ask for an epoch.
    """
    if not unread:
        return (), ()
    dropped: list[str] = []
    leaves, left, found = _look(tree, (), frozenset(unread), dropped)
    return (EVERYTHING, *found) if leaves and leaves == left else tuple(found), tuple(dropped)


def _look(node: Node, path: Path, unread: frozenset[str], dropped: list[str]) -> tuple[int, int, list[str]]:
    """(leaves, unread leaves, the largest containers at or below ``path`` of which nothing was read)."""
    if isinstance(node, int):
        return 1, int(join(path) in unread), []
    leaves, left = 0, 0
    found: list[str] = []
    own: list[str] = []
    single = 0
    for element, child in children(node):
        child_leaves, child_left, below = _look(child, (*path, element), unread, dropped)
        leaves, left = leaves + child_leaves, left + child_left
        found += below
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


def is_generator(key: str) -> bool:
    """Tell whether a key is of a random generator, by its name."""
    return _GENERATOR.search(key) is not None


def warn_moved(run: str, step: int, holders: Mapping[str, Collection[int]], size: int) -> None:
    """Log which values per rank go to other ranks than saved them, or to none, once of each run.

    ``holders``: the ranks that saved a value of their own, by key. ``size``: how many ranks load.
    """
    moved: dict[tuple[int, ...], list[str]] = {}
    for key, ranks in holders.items():
        if set(ranks) != set(range(size)):
            moved.setdefault(tuple(sorted(ranks)), []).append(key)
    for ranks, keys in moved.items():
        if (run, told := (f"{size}", *map(str, ranks), *keys)) in _TOLD:
            continue
        _TOLD.add((run, told))
        without = [rank for rank in range(size) if rank not in ranks]
        left = [rank for rank in ranks if rank >= size and rank != ranks[0]]
        took = [f"ranks {_some(without)} took what rank {ranks[0]} saved"] if without else []
        log.warning(
            "%s of %s@%d: %s", _some(map(repr, keys)), run, step,
            "; ".join([*took, *([f"what ranks {_some(left)} saved was not taken"] if left else [])]),
        )  # fmt: skip


def _some(names: Iterable[object]) -> str:
    shown = [str(name) for name in names]
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


def tell(run: str, step: int, subtrees: Sequence[str], what_to_say: str) -> None:
    """Log that these were left unread, once of each run. ``what_to_say``: how a caller says that it is meant."""
    if not subtrees or (run, tuple(subtrees)) in _TOLD:
        return
    _TOLD.add((run, tuple(subtrees)))
    named = _some(repr(key) for key in subtrees if key != EVERYTHING)
    what = f"nothing ({named or 'no key'} was asked for)" if EVERYTHING in subtrees else f"not {named}"
    log.warning("the load read %s of %s@%d; if that is meant, %s", what, run, step, what_to_say)
