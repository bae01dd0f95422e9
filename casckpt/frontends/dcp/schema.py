"""Converts DCP's metadata to a casckpt tree, and back.

DCP flattens a state as casckpt does, with three differences. It descends into dicts with keys of any type, and
converts the keys to strings. It descends into a list only if the list holds a tensor or a dict. A tuple is always one
value. As a result, one leaf in casckpt may become several in DCP (`param_groups`), and a container in casckpt may be a
single value in DCP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from casckpt.errors import InvalidInput
from casckpt.format.tree import TENSOR, Element, Node, Path, children, join, leaves

NOTE: Final = "dcp"
"""The name of the note in a manifest; see `Note`."""

Opaque: Final = object()
"""A placeholder for a value that is not decoded."""


@dataclass(frozen=True)
class Value:
    """A non-tensor value in DCP: the value at ``key``, or ``value`` if it is already known."""

    key: str
    value: Any = Opaque


@dataclass
class Schema:
    """A checkpoint's structure for DCP: the keys of tensors, the other values, and the paths of both in the state."""

    tensors: list[str] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


def schema_of(tree: Node, value_at: Callable[[str], Any]) -> Schema:
    """Flatten a state as DCP's default planner does. ``value_at``: returns the object at a flat key, or `Opaque`."""
    walk = _Walk(value_at)
    walk.node(tree, (), ())
    return walk.found


class _Walk:
    """A single call to `schema_of`."""

    def __init__(self, value_at: Callable[[str], Any]) -> None:
        self.value_at = value_at
        self.found = Schema()

    def node(self, node: Node, path: Path, home: Path) -> None:
        """Add a node. ``path``: its path for DCP, with numeric keys as strings. ``home``: its path in the tree."""
        key = join(home)
        if isinstance(node, int):
            if node == TENSOR:
                self.found.tensors.append(key)
                self.found.paths[key] = path
            else:
                self._value(self.value_at(key), path, key)
        elif path and not self._opens(node, home):
            self._add(path, Value(key))
        else:
            for element, child in children(node):
                step = element if isinstance(node, list) else str(element)
                self.node(child, (*path, step), (*home, element))

    def _value(self, value: Any, path: Path, key: str) -> None:
        steps = _steps(value)
        if steps is None:
            self._add(path, Value(key, value))
            return
        for step, child in steps:
            self._value(child, (*path, step), key)

    def _add(self, path: Path, value: Value) -> None:
        self.found.values[join(path)] = value
        self.found.paths[join(path)] = path

    def _opens(self, node: Node, home: Path) -> bool:
        """Return whether DCP descends into a list with this node, or into the node itself if it is a container."""
        if isinstance(node, int):
            return node == TENSOR or _steps(self.value_at(join(home))) is not None
        if isinstance(node, list):
            return any(self._opens(child, (*home, element)) for element, child in enumerate(node))
        return isinstance(node, dict)


def is_one_value(value: Any) -> bool:
    """Return whether DCP keeps a value without tensors as a single value."""
    return _steps(value) is None


def _steps(value: Any) -> Iterator[tuple[Element, Any]] | None:
    """Return the children into which DCP flattens a value without tensors. Return None if DCP keeps it as one value."""
    if isinstance(value, Mapping):
        return ((str(key), child) for key, child in value.items())
    if isinstance(value, list) and not all(is_one_value(item) for item in value):
        return ((index, child) for index, child in enumerate(value))
    return None


# from DCP's metadata to a tree


class _Branch(dict[Element, Any]):
    """The nodes and branches below an element."""


def path_of(key: str, planner_data: Any) -> Path:
    """Return a key's path from the planner data. If the planner data is invalid, the key is the path's only element."""
    path = planner_data.get(key) if isinstance(planner_data, Mapping) else None
    if not isinstance(path, tuple) or not path or not all(type(element) in (str, int) for element in path):
        return (key,)
    return path if type(path[0]) is str and join(path) == key else (key,)


def tree_of(nodes: Mapping[str, tuple[Path, Node]]) -> Node:
    """Build the tree from each key's path and node. Raises InvalidInput if one node is inside another."""
    root = _Branch()
    for key, (path, node) in nodes.items():
        at = root
        for element in path[:-1]:
            below = at.setdefault(element, _Branch())
            if not isinstance(below, _Branch):
                raise _contradiction(key)
            at = below
        if path[-1] in at:
            raise _contradiction(key)
        at[path[-1]] = node
    return _built(root)


def check_keys(tree: Node) -> None:
    """Raise InvalidInput if two leaves of a tree have the same flat key."""
    seen: set[str] = set()
    for path, _ in leaves(tree):
        key = join(path)
        if key in seen:
            raise InvalidInput(f"two leaves of the state have the same flat key {key!r}; rename one", key=key)
        seen.add(key)


def _contradiction(key: str) -> InvalidInput:
    return InvalidInput(f"{key!r} contains another key of the state, or is contained in one; rename it", key=key)


def _built(branch: _Branch) -> Node:
    """Build a dict, or a list if the elements are the consecutive numbers from 0. DCP has no empty containers."""
    items: dict[Element, Node] = {
        el: _built(node) if isinstance(node, _Branch) else node for el, node in branch.items()
    }
    if items and items.keys() == set(range(len(items))):
        return [items[index] for index in range(len(items))]
    return items
