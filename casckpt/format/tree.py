"""The tree of a checkpoint: the skeleton that puts flattened keys back into nested containers.

A leaf stands for a tensor or an object that the manifest holds under the leaf's flat key: the elements of its path,
joined by ".". The tree keeps what a flat key cannot: int and str keys apart, order, kinds of containers, empty ones.

Stored as msgpack: a leaf is 0 (tensor) or 1 (object), a container ``[kind, extra, key, child, key, child, ...]``.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import msgspec

from casckpt.errors import InvalidInput, Refused
from casckpt.format import plain

MAX_DEPTH = 200
TENSOR, OBJECT = "tensor", "object"
DICT, ORDERED, DEFAULT, LIST, TUPLE = "dict", "OrderedDict", "defaultdict", "list", "tuple"
KINDS = frozenset((DICT, ORDERED, DEFAULT, LIST, TUPLE))
_LEAVES = (TENSOR, OBJECT)

Element: TypeAlias = str | int
Path: TypeAlias = tuple[Element, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """``kind``: "tensor" or "object"."""

    kind: str


@dataclass(frozen=True, slots=True)
class Container:
    """``kind``: one of `KINDS`. ``extra``: plain data that the children do not show, or nothing.

    It is the ``_metadata`` of an OrderedDict (of a module's state_dict), and an empty defaultdict with the factory.
    """

    kind: str
    children: tuple[tuple[Element, Node], ...] = ()
    extra: bytes = b""


Node: TypeAlias = Leaf | Container


def join(path: Sequence[Element]) -> str:
    """Join a path to its flat key."""
    return ".".join(map(str, path))


def show(path: Sequence[Element]) -> str:
    """Format a path as a person would write it: ``['model']['layers'][0]``."""
    return "".join(f"[{element!r}]" for element in path)


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    """Iterate over every leaf with its path, in order."""
    if isinstance(node, Leaf):
        yield path, node
        return
    for element, child in node.children:
        yield from leaves(child, (*path, element))


def find(node: Node, key: str) -> Node | None:
    """Return the first node whose flat key is ``key``; None if there is none."""
    if isinstance(node, Leaf):
        return None
    for element, child in node.children:
        head = str(element)
        if head == key:
            return child
        found = find(child, key[len(head) + 1 :]) if key.startswith(f"{head}.") else None
        if found is not None:
            return found
    return None


# bytes


def encode_tree(node: Node) -> bytes:
    """Encode a tree. Raises InvalidInput if it is nested more than MAX_DEPTH deep."""
    return msgspec.msgpack.encode(_wire(node, 0))


def _wire(node: Node, depth: int) -> Any:
    if isinstance(node, Leaf):
        return _LEAVES.index(node.kind)
    if depth >= MAX_DEPTH:
        raise InvalidInput(f"the state is nested more than {MAX_DEPTH} levels deep; flatten it")
    wire: list[Any] = [node.kind, node.extra]
    for element, child in node.children:
        wire.append(element)
        wire.append(_wire(child, depth + 1))
    return wire


def decode_tree(data: bytes | memoryview) -> Node:
    """Decode what `encode_tree` made. Raises Refused for any other bytes."""
    try:
        return _node(msgspec.msgpack.decode(data), 0)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(str(error)) from error


def _refused(why: str) -> Refused:
    return Refused(f"the tree of a checkpoint is not usable: {why}")


def _node(wire: Any, depth: int) -> Node:
    if type(wire) is int and 0 <= wire < len(_LEAVES):
        return Leaf(_LEAVES[wire])
    if type(wire) is not list or len(wire) < 2 or len(wire) % 2 or depth >= MAX_DEPTH:
        raise _refused("a node is neither a leaf nor a container, or it is nested too deep")
    kind, extra, *rest = wire
    if type(kind) is not str or kind not in KINDS or type(extra) is not bytes:
        raise _refused("it has a container of an unknown kind; was it written by a later version of casckpt?")
    elements = rest[::2]
    _check_elements(kind, elements)
    children = []
    for element, child in zip(elements, rest[1::2], strict=True):
        children.append((element, _node(child, depth + 1)))
    return Container(kind, tuple(children), extra)


def _check_elements(kind: str, elements: list[Any]) -> None:
    wanted = (int,) if kind in (LIST, TUPLE) else (str, int)
    if any(type(element) not in wanted for element in elements) or len(set(elements)) != len(elements):
        raise _refused(f"the keys of a {kind} are not usable")
    if kind in (LIST, TUPLE) and elements != sorted(elements):
        raise _refused(f"the items of a {kind} are out of order")


# of several ranks


def merge(trees: Sequence[Node], extensions: Sequence[plain.Extension] = ()) -> Node:
    """Merge ``trees`` into one with every child: those of the first in its order, then the new ones of each.

    Where ranks differ in ``extra``, the first one's wins, but the entries of all are kept in a ``_metadata``
    (``extensions``: what `plain` needs to read that). Raises InvalidInput, naming the key, if a path is one kind of
    node here and another there, or if two paths of different trees have one flat key.
    """
    different = list({encode_tree(node): node for node in trees}.values())
    if not different:
        raise InvalidInput("there is no tree to merge")
    if len(different) == 1:
        return different[0]
    merged = _merged(different, (), extensions)
    _check_unique(merged)
    return merged


def _merged(nodes: Sequence[Node], path: Path, extensions: Sequence[plain.Extension]) -> Node:
    first = nodes[0]
    if len(nodes) == 1:
        return first
    kinds = list(dict.fromkeys(f"{type(node).__name__.lower()} of kind {node.kind}" for node in nodes))
    if len(kinds) > 1:
        key = join(path)
        raise InvalidInput(f"key {key!r} is a {kinds[0]} on one rank and a {kinds[1]} on another", key=key)
    containers = [node for node in nodes if isinstance(node, Container)]
    if not containers:
        return first
    grouped: dict[Element, list[Node]] = {}
    for container in containers:
        for element, child in container.children:
            grouped.setdefault(element, []).append(child)
    children = []
    for element, group in grouped.items():
        children.append((element, _merged(group, (*path, element), extensions)))
    if first.kind in (LIST, TUPLE):
        children.sort(key=itemgetter(0))
    return Container(first.kind, tuple(children), _merged_extra(first.kind, [c.extra for c in containers], extensions))


def _merged_extra(kind: str, extras: Sequence[bytes], extensions: Sequence[plain.Extension]) -> bytes:
    given = list(dict.fromkeys(extra for extra in extras if extra))
    if kind != ORDERED or len(given) < 2:
        return given[0] if given else b""
    found = [plain.decode(extra, extensions=extensions, strict=True) for extra in given]
    if not all(isinstance(metadata, dict) for metadata in found):
        return given[0]
    united = found[0]
    for metadata in found[1:]:
        for name, value in metadata.items():
            united.setdefault(name, value)
    return plain.encode(united, extensions=extensions)


def _check_unique(tree: Node) -> None:
    paths: dict[str, Path] = {}
    for path, _ in leaves(tree):
        key = join(path)
        if paths.setdefault(key, path) != path:
            raise InvalidInput(
                f"{show(paths[key])} of one rank and {show(path)} of another have one flat key {key!r}; rename one",
                key=key,
            )


# back to nested values

_DROPPED: Any = object()


def rebuild(
    node: Node,
    leaf: Callable[[str, Leaf], Any],
    keep: Callable[[str], bool],
    extensions: Sequence[plain.Extension] = (),
) -> Any:
    """Build the nested value of a tree. ``leaf(flat key, leaf)`` gives the value of each leaf that ``keep`` selects.

    A container that was saved empty is asked for by its own flat key. One that loses all its children is dropped
    with them (the root never). A list or tuple that loses some comes back as a dict of the rest by index: closing the
    gaps would give items the place of others. Raises Refused if ``extra`` of a container is not usable.
    """
    value = _rebuilt(node, (), leaf, keep, extensions)
    if value is not _DROPPED or isinstance(node, Leaf):
        return {} if value is _DROPPED else value
    return _container(Container(node.kind, (), node.extra), [], extensions)


def _rebuilt(
    node: Node,
    path: Path,
    leaf: Callable[[str, Leaf], Any],
    keep: Callable[[str], bool],
    extensions: Sequence[plain.Extension],
) -> Any:
    if isinstance(node, Leaf):
        key = join(path)
        return leaf(key, node) if keep(key) else _DROPPED
    found = []
    for element, child in node.children:
        value = _rebuilt(child, (*path, element), leaf, keep, extensions)
        if value is not _DROPPED:
            found.append((element, value))
    if not found and (node.children or not keep(join(path))):
        return _DROPPED
    return _container(node, found, extensions)


def _container(node: Container, items: list[tuple[Element, Any]], extensions: Sequence[plain.Extension]) -> Any:
    if node.kind in (LIST, TUPLE):
        if [element for element, _ in items] != list(range(len(node.children))):
            return dict(items)
        values = [value for _, value in items]
        return values if node.kind == LIST else tuple(values)
    extra = plain.decode(node.extra, extensions=extensions) if node.extra else None
    if node.kind == ORDERED:
        ordered = OrderedDict(items)
        if node.extra:
            vars(ordered)["_metadata"] = extra
        return ordered
    if node.kind == DEFAULT and isinstance(extra, defaultdict):
        return defaultdict(extra.default_factory, items)
    return dict(items)
