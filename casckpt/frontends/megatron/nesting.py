"""Functions that map, merge, split and compare nested dicts and lists. Any other value, even a tuple, is a leaf.

The functions behave like those of ``megatron.core.dist_checkpointing.dict_utils``. Where its documentation and its code
differ, they follow the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch

from casckpt.frontends.megatron.errors import CheckpointingException

Nested: TypeAlias = Any
"""A dict or a list of leaves and of further dicts and lists."""
StateDict: TypeAlias = dict[str, Any]
CommonStateDict: TypeAlias = dict[str, Any]
ShardedStateDict: TypeAlias = dict[str, Any]
Path: TypeAlias = tuple[Any, ...]
Key: TypeAlias = Any

_SHOWN = 30


def _items(x: Nested) -> Iterable[tuple[Key, Any]]:
    return x.items() if isinstance(x, dict) else enumerate(x)


def nested_values(x: Nested) -> Iterator[Any]:
    """Yield all leaves in order. Empty containers have none."""
    return (value for _, _, value in nested_items_iter(x))


def nested_items_iter(x: Nested) -> Iterator[tuple[Nested, Key, Any]]:
    """Yield the (container, key or index, leaf) of every leaf, in order."""
    for key, value in _items(x):
        if isinstance(value, dict | list):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


def dict_map(f: Callable[[Any], Any], d: Nested) -> None:
    """Replace every leaf with ``f(leaf)``, in place."""
    dict_map_with_key(lambda _, value: f(value), d)


def dict_map_with_key(f: Callable[[Key, Any], Any], d: Nested) -> None:
    """Replace every leaf with ``f(key, leaf)``, in place. ``key`` is the innermost key, or the index in a list."""
    for container, key, value in nested_items_iter(d):
        container[key] = f(key, value)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Nested) -> Any:
    """Replace every leaf with ``f(leaf)``, in place, and return the container. For a leaf, return ``f(leaf)``."""
    if not isinstance(x, dict | list):
        return f(x)
    for key, value in _items(x):
        x[key] = dict_list_map_inplace(f, value)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Nested) -> Any:
    """Return a copy in new dicts and lists, with ``f(leaf)`` for every leaf."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], Any] = lambda x: x,
    value_fn: Callable[[Any], Any] = lambda x: x,
    reduce_fn: Callable[[list[Any]], Any] = lambda values: values,
) -> dict[Any, Any]:
    """Group ``value_fn(x)`` by ``key_fn(x)``, then reduce each group."""
    groups: dict[Any, list[Any]] = {}
    for x in xs:
        groups.setdefault(key_fn(x), []).append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}


def merge(x1: Nested, x2: Nested, key: Path = ()) -> Nested:
    """Merge ``x2`` into ``x1``, in place, and return ``x1``.

    Raises CheckpointingException (a ValueError), naming the path, if both have a leaf at the same position, even an
    equal one, or if two lists differ in length.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for k, value in x2.items():
            x1[k] = merge(x1[k], value, (*key, k)) if k in x1 else value
    elif isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise CheckpointingException(
                f"lists of {len(x1)} and {len(x2)} items cannot be merged, at {key}: a list must be entirely "
                "sharded or entirely plain, or each item must contain both kinds of values; use a dict"
            )
        x1[:] = [merge(value, other, (*key, i)) for i, (value, other) in enumerate(zip(x1, x2, strict=True))]
    else:
        raise CheckpointingException(
            f"there are two values for the same position, at {key}: {_text(x1)} and {_text(x2)}; rename one"
        )
    return x1


def extract_matching_values(
    x: Nested, predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Nested, Nested]:
    """Return (matching leaves, other leaves), each in the hierarchy of ``x``, without containers that lack such leaves.

    If a list loses items, the gaps are closed. With ``return_lists_as_dicts``, the list becomes a dict with the indices
    as keys. An empty container in a dict does not match; for one in a list, the predicate decides. Raises
    CheckpointingException (a ValueError) if ``x`` is neither a dict nor a list.
    """
    if not isinstance(x, dict | list):
        raise CheckpointingException(f"expected a dict or a list, not {type(x).__name__}")
    sides: tuple[dict[Key, Any], dict[Key, Any]] = ({}, {})
    for key, value in _items(x):
        if isinstance(value, dict | list) and value:
            for side, part in zip(sides, extract_matching_values(value, predicate, return_lists_as_dicts), strict=True):
                if part:
                    side[key] = part
        elif isinstance(x, dict) and isinstance(value, dict | list):
            sides[1][key] = {} if return_lists_as_dicts else type(value)()
        else:
            sides[0 if predicate(value) else 1][key] = value
    if isinstance(x, list) and not return_lists_as_dicts:
        return list(sides[0].values()), list(sides[1].values())
    return sides


def diff(x1: Any, x2: Any, prefix: Path = ()) -> tuple[list[Any], list[Any], list[Any]]:
    """Return (paths only in ``x1``, paths only in ``x2``, mismatches).

    A mismatch is (path, type in ``x1``, type in ``x2``). Items that only the longer of two lists has are listed by
    their index alone. Tensors are equal if all their elements are equal, and sharded values are equal if their data is
    equal.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        left: list[Any] = [(*prefix, key) for key in x1 if key not in x2]
        right: list[Any] = [(*prefix, key) for key in x2 if key not in x1]
        pairs = [(key, x1[key], x2[key]) for key in x1 if key in x2]
    elif isinstance(x1, list | tuple | np.ndarray) and type(x1) is type(x2):
        left = list(range(len(x1) - 1, len(x2) - 1, -1))
        right = list(range(len(x2) - 1, len(x1) - 1, -1))
        pairs = [(i, *values) for i, values in enumerate(zip(x1, x2, strict=False))]
    elif type(x1) is type(x2) and hasattr(x1, "replica_id") and hasattr(x1, "data"):
        left, right, pairs = [], [], [(type(x1), x1.data, x2.data)]
    else:
        return [], [], [] if _equal(x1, x2) else [(prefix, type(x1), type(x2))]
    mismatch: list[Any] = []
    for key, value, other in pairs:
        below = diff(value, other, (*prefix, key))
        left, right, mismatch = left + below[0], right + below[1], mismatch + below[2]
    return left, right, mismatch


def _equal(x1: Any, x2: Any) -> bool:
    if isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor):
        return x1.shape == x2.shape and bool(torch.all(x1.cpu() == x2.cpu()))
    try:
        return not bool(x1 != x2)
    except (RuntimeError, TypeError, ValueError):  # the comparison does not yield a single answer
        return False


def inspect_types(x: Any, prefix: Path = (), indent: int = 4) -> None:
    """Print the keys of a state dict as a tree, with the type and the first 30 characters of each leaf."""
    if not isinstance(x, dict | list):
        print(f"Tensor of shape {x.shape}" if isinstance(x, torch.Tensor) else f"[{type(x)}]: {_text(x)}")  # noqa: T201 - what it is for
        return
    print()  # noqa: T201 - as above
    mark = ">" if isinstance(x, dict) else "-"
    for key, value in _items(x):
        print(f"{' ' * indent * len(prefix)}{mark} {key}: ", end="")  # noqa: T201 - as above
        inspect_types(value, (*prefix, key), indent)


def _text(x: Any) -> str:
    text = str(x)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... (truncated)"
