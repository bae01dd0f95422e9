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

from casckpt.errors import InvalidInput, Refused
from casckpt.format import plain
from casckpt.format.manifest import Manifest
from casckpt.format.tree import TENSOR, Element, Node, Path, children, join, leaves
from casckpt.tensors.objects import TORCH_EXTENSIONS, decode_object, encode_object

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
    """Flatten a state as DCP's default planner does.

    ``value_at``: a function that returns the object at a flat key, or `Opaque`.
    """
    walk = _Walk(value_at)
    walk.node(tree, (), ())
    return walk.found


class _Walk:
    """The state of a single call to `schema_of`."""

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
        """Return whether DCP descends into a list that holds this node or, for a container, into the node itself."""
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


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor that one rank saved alone, under its own key. Offset and shape are in elements."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Note:
    """The values that DCP must receive unchanged in a load.

    ``keys``: the keys of tensors and other values, if DCP's default planner would flatten the state differently;
    otherwise None. ``planner_data``: set together with ``keys``. ``opaque``: the keys of values that are stored as a
    planner's bytes. ``chunks``: the shapes and parts of the tensors, if one rank saved without the others.
    """

    keys: list[str] | None = None
    planner_data: Any = None
    opaque: frozenset[str] = frozenset()
    chunks: Mapping[str, tuple[tuple[int, ...], list[Chunk]]] = field(default_factory=dict)

    def encoded(self, *, allow_pickle: bool) -> dict[str, bytes]:
        """Encode the note for a manifest. Return an empty dict for an empty note.

        Raises InvalidInput if the planner data is not plain data, unless ``allow_pickle`` is set.
        """
        if self == Note():
            return {}
        try:
            data, pickled = encode_object("planner_data", self.planner_data, allow_pickle)
        except InvalidInput as error:
            raise InvalidInput(
                f"the planner's {error}. A checkpoint includes the planner's data: pass allow_pickle=True to "
                "StorageWriter",
                key="planner_data",
            ) from error
        chunks = {key: (shape, [(c.key, c.offset, c.shape) for c in parts]) for key, (shape, parts) in
                  self.chunks.items()}  # fmt: skip
        return {NOTE: plain.encode((self.keys, data, pickled, sorted(self.opaque), chunks))}


def read_note(manifest: Manifest, *, allow_pickle: bool) -> Note:
    """Return a manifest's note, or an empty note. Raises Refused for an invalid note, and InvalidInput for a pickle."""
    data = manifest.body.notes.get(NOTE)
    if data is None:
        return Note()
    try:
        keys, planner, pickled, opaque, chunks = plain.decode(data, extensions=TORCH_EXTENSIONS, strict=True)
        parts = {key: (tuple(shape), [Chunk(*part) for part in of_key]) for key, (shape, of_key) in chunks.items()}
        note = Note(None if keys is None else list(keys), None, frozenset(opaque), parts)
    except (ValueError, TypeError, AttributeError) as error:
        raise Refused(f"manifest {manifest.id} has an invalid note for DCP: {error}") from error
    planner_data = decode_object("planner_data", planner, bool(pickled), allow_pickle)
    return Note(note.keys, planner_data, note.opaque, note.chunks)
