"""The tree of a checkpoint: its nested state, with `TENSOR` or `OBJECT` in place of each leaf.

A leaf represents a tensor or an object that the manifest stores under the leaf's flat key, which is its path joined
with ".". The tree preserves what flat keys cannot: the difference between int and str keys, the order, the kinds of
containers, and empty containers.

It consists of dicts, OrderedDicts, defaultdicts, lists, tuples and `Wrapper` nodes, and is stored as plain data. Trees
are never modified: `rebuild` and `merge` create new containers.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeAlias

from casckpt.errors import InvalidInput, Refused
from casckpt.format import plain
from casckpt.format.forms import Form, check_form, decode_form
from casckpt.format.plain_codecs import Codec

TENSOR: Final = 0
OBJECT: Final = 1

Element: TypeAlias = str | int
Path: TypeAlias = tuple[Element, ...]
Leaf: TypeAlias = int
"""`TENSOR` or `OBJECT`."""
Node: TypeAlias = "Leaf | dict[Element, Node] | list[Node] | tuple[Node, ...] | Wrapper"


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A tensor that consists of other tensors, or is stored in parts.

    ``nodes``: the nodes of these tensors or parts, by name. ``form``: see `casckpt.format.forms`. If the form has a
    "kind", the nodes are the tensors that the wrapper consists of. Otherwise, they are its parts, each a tensor or a
    wrapper, and the name of a part is the number of its first element.

    It is not a dict, so code that looks for containers does not mistake it for one.
    """

    form: str
    nodes: Mapping[Element, Node]

    @property
    def fields(self) -> Form:
        """The fields of the form."""
        return decode_form(self.form)

    @property
    def in_parts(self) -> bool:
        """Whether the nodes are parts, which only a load with the same sharding can fill."""
        return "kind" not in self.fields

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self.fields["shape"])


_WRAPPER = plain.extension("wrapper", Wrapper, lambda node: (node.form, dict(node.nodes)), lambda pair: Wrapper(*pair))

_LEAVES = {TENSOR: "tensor", OBJECT: "object"}
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple)
_SURROGATE = re.compile("[\ud800-\udfff]")


def join(path: Sequence[Element]) -> str:
    """Join a path to its flat key."""
    return ".".join(map(str, path))


def show(path: Sequence[Element]) -> str:
    """Format a path the way a person would write it: ``['model']['layers'][0]``."""
    return "".join(f"[{element!r}]" for element in path)


def kind_of(node: Node) -> str:
    """Name the kind of a node: "tensor", "object", "dict", "list", ..."""
    if isinstance(node, int):
        return _LEAVES[node]
    return "wrapper" if isinstance(node, Wrapper) else type(node).__name__


def children(node: Node) -> Iterable[tuple[Element, Node]]:
    """Return a node's children, each with its path element. A leaf has none."""
    if isinstance(node, int):
        return ()
    if isinstance(node, dict):
        return node.items()
    return node.nodes.items() if isinstance(node, Wrapper) else enumerate(node)


def container(kind: type, items: Mapping[Element, Any], like: Any) -> Any:
    """Create a container of ``kind`` with the ``_metadata`` or default factory of ``like``."""
    if kind in _SEQUENCES:
        return kind(items.values())
    if kind is defaultdict:
        return defaultdict(like.default_factory, items)
    if kind is Wrapper:
        return Wrapper(like.form, items)
    made = kind(items)
    metadata = getattr(like, "_metadata", None) if kind is OrderedDict else None
    if metadata is not None:
        vars(made)["_metadata"] = metadata
    return made


def nodes(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Iterate over a node and all nodes in it with their paths, in order."""
    yield path, node
    for element, child in children(node):
        yield from nodes(child, (*path, element))


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    """Iterate over all leaves with their paths, in order."""
    return ((at, one) for at, one in nodes(node, path) if isinstance(one, int))


def units(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Iterate over all leaves, with each outermost wrapper in place of its leaves."""
    if isinstance(node, int | Wrapper):
        yield path, node
    else:
        for element, child in children(node):
            yield from units(child, (*path, element))


def closed(node: Node) -> Node:
    """Return a tree with a tensor leaf in place of each wrapper."""
    if isinstance(node, int | Wrapper):
        return node if isinstance(node, int) else TENSOR
    made: Node = container(type(node), {element: closed(child) for element, child in children(node)}, node)
    return made


def find(node: Node, key: str) -> Node | None:
    """Return the first node whose flat key is ``key``, or None if there is no such node."""
    for element, child in children(node):
        head = str(element)
        if head == key:
            return child
        found = find(child, key[len(head) + 1 :]) if key.startswith(f"{head}.") else None
        if found is not None:
            return found
    return None


# bytes


def encode_tree(node: Node, extensions: Sequence[Codec] = ()) -> bytes:
    """Encode a tree. Raises InvalidInput if ``_metadata`` is not plain data, or if the tree is nested too deeply."""
    return plain.encode(node, extensions=(*extensions, _WRAPPER), where="state")


def decode_tree(data: bytes | memoryview, extensions: Sequence[Codec] = ()) -> Node:
    """Decode the output of `encode_tree`. Raises Refused for any other bytes.

    Without ``extensions``, ``_metadata`` may have a `Tagged` where a higher layer stored its own types.
    """
    try:
        node: Node = plain.decode(data, extensions=(*extensions, _WRAPPER), strict=bool(extensions))
    except Refused as error:
        raise _refused(str(error)) from error
    _check(node)
    return node


def may_wrap(data: bytes) -> bool:
    """Return whether an encoded tree may have a wrapper. If it cannot, there is no need to decode it to find one."""
    return b"wrapper" in data


def wrappers_in(data: bytes) -> dict[str, Wrapper]:
    """Return the outermost wrappers of an encoded tree, by flat key."""
    found = units(decode_tree(data)) if may_wrap(data) else ()
    return {join(path): node for path, node in found if isinstance(node, Wrapper)}


def outer_keys(wrappers: Mapping[str, Wrapper]) -> dict[str, str]:
    """For each tensor in a wrapper, return the key of its outermost wrapper, by the tensor's flat key."""
    return {f"{key}.{join(path)}": key for key, node in wrappers.items() for path, _ in leaves(node)}


def _refused(why: str) -> Refused:
    return Refused(f"the tree of a checkpoint is invalid: {why}")


def _check(node: Node) -> None:
    if type(node) is int and node in _LEAVES:
        return
    if type(node) is Wrapper:
        check_form(node.form)
        if type(node.nodes) is not dict or not all(type(name) is str for name in node.nodes):
            raise _refused("the tensors of a wrapper are invalid")
    elif type(node) not in (*_MAPPINGS, *_SEQUENCES):
        raise _refused("a node is neither a leaf nor a container; a later version of casckpt may have written it")
    for element, child in children(node):
        if not _is_element(element):
            raise _refused(f"the keys of a {kind_of(node)} are invalid")
        _check(child)


def _is_element(element: Any) -> bool:
    if type(element) is str:
        return not _SURROGATE.search(element)
    return type(element) is int and -(2**63) <= element < 2**64


# of several ranks


def merge(trees: Sequence[Node]) -> Node:
    """Merge ``trees`` into one with all children: first the children of the first tree, then each tree's new ones.

    All items of ``_metadata`` are kept. Other properties of a container come from the first tree. Raises an
    InvalidInput that names the key if nodes with the same path differ in kind, or if two paths have the same flat key.
    """
    if not trees:
        raise InvalidInput("there is no tree to merge")
    merged = _merged(trees, ())
    _check_unique(merged)
    return merged


def _merged(nodes: Sequence[Node], path: Path) -> Node:
    first = nodes[0]
    kinds = list(dict.fromkeys(map(kind_of, nodes)))
    if len(kinds) > 1:
        key = join(path)
        raise InvalidInput(
            f"key {key!r} is of kind {kinds[0]} on one rank, but of kind {kinds[1]} on a different rank", key=key
        )
    if isinstance(first, int) or len(nodes) == 1:
        return first
    forms = {node.form for node in nodes if isinstance(node, Wrapper)}
    if len(forms) > 1:
        key = join(path)
        raise InvalidInput(f"key {key!r} is a wrapper with different forms on different ranks", key=key)
    grouped: dict[Element, list[Node]] = {}
    for node in nodes:
        for element, child in children(node):
            grouped.setdefault(element, []).append(child)
    merged = {element: _merged(group, (*path, element)) for element, group in grouped.items()}
    made: Node = container(type(first), merged, first)
    if isinstance(made, OrderedDict):
        _unite_metadata(made, nodes)
    return made


def _unite_metadata(made: OrderedDict[Element, Node], nodes: Sequence[Node]) -> None:
    given = [vars(node)["_metadata"] for node in nodes if vars(node)]
    if given and all(isinstance(metadata, dict) for metadata in given):
        united = vars(made)["_metadata"] = copy(given[0])
        for name, value in chain.from_iterable(metadata.items() for metadata in given):
            united.setdefault(name, value)


def _check_unique(tree: Node) -> None:
    paths: dict[str, Path] = {}
    for path, _ in leaves(tree):
        key = join(path)
        if paths.setdefault(key, path) != path:
            raise InvalidInput(
                f"{show(paths[key])} of one rank and {show(path)} of a different rank have the same flat key "
                f"{key!r}; rename one of them",
                key=key,
            )


# back to nested values

_DROPPED: Any = object()


Rewrap: TypeAlias = Callable[[str, Wrapper, Mapping[Element, Any]], Any]
"""A function of a wrapper's flat key, its node, and the values of its tensors by name."""


def rebuild(
    node: Node,
    leaf: Callable[[str, Leaf], Any],
    keep: Callable[[str], bool],
    rewrap: Rewrap = lambda key, node, values: values,
) -> Any:
    """Build a tree's nested value. ``leaf(flat key, leaf)`` returns the value of each leaf that ``keep`` selects.

    ``rewrap`` returns the value of a wrapper.

    For a container that was saved empty, ``keep`` receives the container's flat key. A container that loses all its
    children is dropped, unless it is the root. A list or tuple that loses some children becomes a dict of the
    remaining ones by index, so that no item moves to a different index.
    """
    value = _rebuilt(node, (), leaf, keep, rewrap)
    return {} if value is _DROPPED else value


def _rebuilt(
    node: Node, path: Path, leaf: Callable[[str, Leaf], Any], keep: Callable[[str], bool], rewrap: Rewrap
) -> Any:
    if isinstance(node, int):
        key = join(path)
        return leaf(key, node) if keep(key) else _DROPPED
    kept: dict[Element, Any] = {}
    for element, child in children(node):
        value = _rebuilt(child, (*path, element), leaf, keep, rewrap)
        if value is not _DROPPED:
            kept[element] = value
    if path and not kept and (any(children(node)) or not keep(join(path))):
        return _DROPPED
    if isinstance(node, Wrapper):
        return rewrap(join(path), node, kept)
    if isinstance(node, list | tuple) and len(kept) < len(node):
        return kept
    made = container(type(node), kept, node)
    if isinstance(made, OrderedDict):
        vars(made).update(deepcopy(vars(made)))  # torch modifies it, and the tree may be reused
    return made
