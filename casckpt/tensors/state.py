"""Converts nested states to flat leaves and a tree, and back.

`flatten` always splits mappings. It splits lists and tuples only if they contain a tensor, a whole object or a
`PerRank`. Every other value is a single leaf. A Counter or a defaultdict without tensors is also a single leaf, which
preserves its type. A wrapper (see `casckpt.tensors.kinds`) is opened into the tensors that it consists of.
"""

from __future__ import annotations

import random
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import NoneType
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader

from casckpt.errors import InvalidInput
from casckpt.format import plain, tree
from casckpt.format.forms import encode_form
from casckpt.format.light import LightStruct
from casckpt.format.sections.index import MAX_KEY_CHARACTERS
from casckpt.format.tree import OBJECT, TENSOR, Element, Node, Path, Wrapper, container, join, show
from casckpt.tensors.dtensors import is_dtensor
from casckpt.tensors.foreign import is_megatron_tensor
from casckpt.tensors.kinds import PLAIN
from casckpt.tensors.objects import TORCH_EXTENSIONS
from casckpt.tensors.values import OfObjects, PerRank, Shard
from casckpt.tensors.wrappers import Opened, Wrapped, opened, restored

IsWhole: TypeAlias = Callable[[str, Mapping[Any, Any]], bool]


class LeafValue(LightStruct, frozen=True):
    """One leaf of a state. ``value``: the value, unwrapped from its `PerRank`.

    ``per_rank``: whether it was in a `PerRank`. ``outer``: the wrapper that consists of this tensor.
    """

    key: str
    path: Path
    value: Any
    is_tensor: bool
    per_rank: bool
    outer: LeafValue | None = None

    @property
    def unit(self) -> LeafValue:
        """The wrapper that consists of this tensor, or else the leaf itself."""
        return self.outer or self


@dataclass(frozen=True)
class FlatState:
    """The leaves by flat key, in the order of the state, and the tree that describes their nesting."""

    leaves: dict[str, LeafValue]
    tree: Node
    unkept: dict[type, Path] = field(default_factory=dict)
    """The classes of mappings that the tree does not preserve, each with an example path."""
    whole: list[str] = field(default_factory=list)
    """The keys of the mappings that are leaves because ``is_whole`` chose them."""
    wrappers: dict[str, Wrapper] = field(default_factory=dict)
    """The nodes of wrappers, by flat key."""


def flatten(
    state: Any,
    *,
    objects: bool = False,
    is_whole: IsWhole = lambda key, value: False,
    apart: Callable[[str], bool] = lambda key: False,
) -> FlatState:
    """Flatten ``state``, a mapping (or a `PerRank` of one), into leaves and a tree.

    Tensors are torch.Tensor (including DTensor), `Shard`, lists of `Shard` and Megatron-style sharded tensors, and with
    ``objects``, also whole objects; in that case, wrappers are not opened. ``is_whole`` chooses, by flat key, mappings
    without tensors that become a single leaf. ``apart`` chooses, by flat key, sharded tensors that are opened as parts
    (see `casckpt.tensors.wrappers.opened`). Nothing is copied. Raises an InvalidInput that names the path for a state
    that is not a mapping, contains itself or is nested too deeply, for keys that cannot be stored, and for two paths
    with the same flat key.
    """
    _check_state(state)
    flattener = _Flattener(is_whole, apart, objects=objects)
    return replace(flattener.flat, tree=flattener.node(_as_dict(state), (), "", False))


def is_object(value: Any) -> bool:
    """Return whether ``value`` is a whole object, whose state is saved in its place.

    Whole objects are generators and objects with a state_dict. A DataLoader without a state_dict also counts, but it
    is rejected when its state is needed.
    """
    return isinstance(value, (*GENERATORS, DataLoader)) or (
        hasattr(value, "state_dict") and not isinstance(value, torch.Tensor | type)
    )


def holds_object(state: Any) -> bool:
    """Return whether the containers of ``state`` include a whole object at any level."""
    is_container = isinstance(state, _CONTAINERS) and not isinstance(state, OfObjects)
    return is_container and any(is_object(item) for item in _within(state, _PLAIN_VALUES) if item is not state)


def is_part(value: Any) -> bool:
    """Return whether a tensor leaf may be a part of a global tensor."""
    return is_dtensor(value) or not isinstance(value, torch.Tensor)


inflate = partial(tree.rebuild, rewrap=restored)
encode_tree = partial(tree.encode_tree, extensions=TORCH_EXTENSIONS)
decode_tree = partial(tree.decode_tree, extensions=TORCH_EXTENSIONS)


def replace_leaves(state: Any, values: Mapping[str, Any]) -> None:
    """Put ``values`` (by flat key, for leaves or whole containers) into ``state``, in place.

    Dicts and lists are modified, tuples are replaced in their container, and a value in a `PerRank` remains in one.
    Raises InvalidInput, before anything changes, for a key that the state lacks or that is in an immutable mapping.
    """
    for write in _writes(state, values):
        write()


def check_replaceable(state: Any, keys: Iterable[str]) -> None:
    """Raise the InvalidInput that `replace_leaves` would raise for these keys, without changing anything."""
    _writes(state, {key: object() for key in keys})


def _writes(state: Any, values: Mapping[str, Any]) -> list[Callable[[], None]]:
    _check_state(state)
    if not values:
        return []
    writer = _Writer(values)
    writer.replaced(state, ())
    missing = [key for key in values if key not in writer.replaced_keys]
    if missing:
        raise InvalidInput(f"cannot set key {missing[0]!r}: the state does not have it", keys=tuple(missing))
    return writer.writes


def _as_dict(state: Any) -> Any:
    """Return a TensorDict as a dict that holds its own tensors and plain values. Return any other state unchanged.

    Raises InvalidInput if it makes its tensors anew in each call, because a load could not fill them.
    """
    if not (isinstance(state, Mapping) and hasattr(state, "batch_size") and hasattr(state, "to_dict")):
        return state
    whole: Mapping[str, Any] = state.to_dict()
    again = {id(value) for value in _within(state.to_dict())}
    if any(isinstance(value, torch.Tensor) and id(value) not in again for value in _within(whole)):
        name = type(state).__name__
        raise InvalidInput(f'a {name} cannot be the state itself; pass it by name, as {{"data": data}}')
    return whole


def _check_state(state: Any) -> None:
    inner = state.value if isinstance(state, PerRank) else state
    if not isinstance(inner, Mapping):
        what = 'it by name, as {"model": model}' if hasattr(inner, "state_dict") else "a mapping"
        raise InvalidInput(f"a state must be a mapping of names to values, not a {type(inner).__name__}; pass {what}")


def check_nesting(value: Any, name: str) -> None:
    """Raise InvalidInput, with the position in ``name``, if containers contain themselves or are nested too deeply.

    Each mapping, list and tuple is visited once.
    """
    if isinstance(value, _CONTAINERS):
        _check_nesting(value, name, (), set(), {})


_MAPPINGS = (dict, Mapping)  # the first type is faster to check
_CONTAINERS = (*_MAPPINGS, list, tuple)
_ATOMS = frozenset((NoneType, bool, int, float, str, bytes))
_PLAIN_VALUES = _ATOMS | {*PLAIN}
_STRIDED = torch.strided
_TENSORS = (torch.Tensor, Shard, Wrapped)  # a tuple, because a union would be rebuilt for each leaf


def _check_nesting(value: Any, name: str, path: Path, above: set[int], seen: dict[int, Any]) -> None:
    if id(value) in above or len(path) >= plain.MAX_DEPTH:
        raise _endless(f"{name}{show(path[:8])}", join(path))
    if id(value) in seen:
        return
    above.add(id(value))
    for element, child in value.items() if isinstance(value, Mapping) else enumerate(value):
        if isinstance(child, _CONTAINERS):
            _check_nesting(child, name, (*path, element), above, seen)
    above.remove(id(value))
    seen[id(value)] = value  # keeps the value alive so that its id is not reused


def _endless(place: str, key: str) -> InvalidInput:
    return InvalidInput(f"{place}...: it contains itself or is nested more than {plain.MAX_DEPTH} levels deep", key=key)


def _is_tensor(value: Any) -> bool:
    if isinstance(value, _TENSORS) or is_megatron_tensor(value):
        return True
    return type(value) is list and bool(value) and all(isinstance(item, Shard) for item in value)


def _holds_tensor(value: Any) -> bool:
    """Return whether a value is or contains a tensor, a whole object or a `PerRank`."""
    return any(isinstance(item, PerRank) or _is_tensor(item) or is_object(item) for item in _within(value))


def _within(value: Any, omitted: Container[type] = _ATOMS) -> Iterator[Any]:
    """Yield ``value`` and all values inside it, except values of ``omitted`` types. Yield each container only once."""
    seen: dict[int, Any] = {}  # keeps the values alive so that ids are not reused
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if type(item) in omitted or id(item) in seen:
            continue
        yield item
        if isinstance(item, PerRank):
            waiting.append(item.value)
        elif isinstance(item, _CONTAINERS):
            seen[id(item)] = item
            waiting.extend(item.values() if isinstance(item, _MAPPINGS) else item)


def _kind(value: Any, path: Path) -> type | None:
    """Return a container's type in the tree, or None for a leaf."""
    if isinstance(value, _MAPPINGS):
        return _mapping_kind(value, path)
    if not isinstance(value, list | tuple) or not _holds_tensor(value):
        return None
    if type(value) not in (list, tuple):
        raise InvalidInput(
            f"state{show(path)}: a {type(value).__qualname__} cannot hold tensors; pass a list, a tuple or a dict",
            key=join(path),
        )
    return type(value)


def _mapping_kind(value: Mapping[Any, Any], path: Path) -> type | None:
    odd = [key for key in value.keys() if type(key) is not str and not _is_element(key)]  # noqa: SIM118 - a TensorDict iterates over its rows
    is_default = type(value) is defaultdict and _has_plain_factory(value)
    counts = type(value) is Counter or is_default
    if (odd or counts) and path and not _holds_tensor(value):
        return None
    if odd:
        raise InvalidInput(
            f"state{show(path)}: the key {odd[0]!r:.80} is neither a string nor a 64-bit int, which the keys of the "
            f"state and of mappings with tensors must be; rename it",
            key=join(path),
        )
    if is_default:
        return defaultdict
    return OrderedDict if isinstance(value, OrderedDict) else dict


GENERATORS = (torch.Generator, random.Random)


def _is_element(key: Any) -> bool:
    return type(key) is str or (type(key) is int and -(2**63) <= key < 2**63)


def _has_plain_factory(value: defaultdict[Any, Any]) -> bool:
    try:
        plain.encode(defaultdict(value.default_factory))
    except InvalidInput:
        return False
    return True


def _children(value: Any) -> list[tuple[Element, Any]]:
    return list(value.items() if isinstance(value, _MAPPINGS) else enumerate(value))


class _Flattener:
    """A single call to `flatten`. ``flat``: its result, without the tree."""

    def __init__(self, is_whole: IsWhole, apart: Callable[[str], bool], *, objects: bool) -> None:
        self.is_whole, self.apart, self.objects = is_whole, apart, objects
        self.flat = FlatState({}, {})
        self.open: set[int] = set()

    def node(self, value: Any, path: Path, key: str, per_rank: bool) -> Node:
        """Return the node for a value, and add its leaves."""
        if isinstance(value, PerRank):
            return self.node(value.value, path, key, True)
        is_dict = type(value) is dict  # like most containers
        is_tensor = not is_dict and (_is_tensor(value) or (self.objects and bool(path) and is_object(value)))
        kind = None if is_tensor else _kind(value, path)
        check_key(key)
        if kind and path and isinstance(value, _MAPPINGS) and self.is_whole(key, value) and not _holds_tensor(value):
            self.flat.whole.append(key)
            kind = None
        if kind is None:
            leaf = LeafValue(key, path, value, is_tensor, per_rank)
            if is_tensor and (type(value) not in PLAIN or value.layout is not _STRIDED) and not self.objects:
                return self._tensor(leaf)
            self._add(leaf)
            return TENSOR if is_tensor else OBJECT
        if id(value) in self.open or len(path) >= plain.MAX_DEPTH:
            raise _endless(f"state{show(path[:8])}", key)
        if path and type(value) not in (kind, dict):
            self.flat.unkept.setdefault(type(value), path)
        self.open.add(id(value))
        children: dict[Element, Node] = {}
        start = f"{key}." if path else ""
        leaves = self.flat.leaves
        for element, child in _children(value):
            below, name = (*path, element), f"{start}{element}"
            if type(child) in PLAIN and child.layout is _STRIDED:  # a fast path for most leaves
                leaf = LeafValue(check_key(name), below, child, True, per_rank)
                if not name or leaves.setdefault(name, leaf) is not leaf:
                    self._add(leaf)  # raises an error
                children[element] = TENSOR
            else:
                children[element] = self.node(child, below, name, per_rank)
        self.open.remove(id(value))
        node: Node = container(kind, children, value)
        return node

    def _tensor(self, leaf: LeafValue) -> Node:
        """Return the node of a tensor that may be a wrapper."""
        found = opened(leaf.key, leaf.value, apart=self.apart(leaf.key))
        if found is None:
            self._add(leaf)
            return TENSOR
        node = self.flat.wrappers[leaf.key] = self._opened(found, leaf.path, leaf)
        return node

    def _opened(self, wrapper: Opened, path: Path, outer: LeafValue) -> Wrapper:
        nodes: dict[Element, Node] = {}
        for name, part in wrapper.parts.items():
            below = (*path, name)
            if isinstance(part, Opened):
                nodes[name] = self._opened(part, below, outer)
            else:
                nodes[name] = TENSOR
                self._add(LeafValue(check_key(join(below)), below, part, True, outer.per_rank, outer))
        return Wrapper(encode_form(wrapper.form), nodes)

    def _add(self, leaf: LeafValue) -> None:
        if not leaf.key:
            raise InvalidInput("the key of a leaf in the state is an empty string; give it a name", key="")
        other = self.flat.leaves.setdefault(leaf.key, leaf)
        if other is not leaf:
            raise InvalidInput(
                f"state{show(other.path)} and state{show(leaf.path)} have the same flat key {leaf.key!r}; rename one "
                f"of them",
                key=leaf.key,
            )


_UNFIT = re.compile("[\0\ud800-\udfff]")


def check_key(key: str) -> str:
    """Return ``key``. Raises InvalidInput if a manifest cannot hold it as a flat key."""
    if len(key) > MAX_KEY_CHARACTERS:
        raise InvalidInput(f"key {key[:80]!r}... has {len(key)} characters, more than {MAX_KEY_CHARACTERS}", key=key)
    if (not key.isascii() or "\0" in key) and _UNFIT.search(key):
        raise InvalidInput(f"key {key!r:.200} contains a NUL or a lone surrogate; rename it", key=key)
    return key


class _Writer:
    """A single call to `replace_leaves`. It collects the writes, so that either all or none of them are made."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.replaced_keys: set[str] = set()
        self.writes: list[Callable[[], None]] = []

    def replaced(self, value: Any, path: Path) -> Any:
        """Return the value for ``path``: a new value, or ``value`` itself, with its writes collected."""
        if isinstance(value, PerRank):
            inner = self.replaced(value.value, path)
            return value if inner is value.value else PerRank(inner)
        key = join(path)
        if path and key in self.values:
            self.replaced_keys.add(key)
            return self.values[key]
        kind = None if _is_tensor(value) else _kind(value, path)
        if kind is None:
            return value
        if len(path) >= plain.MAX_DEPTH:
            raise InvalidInput(f"the state is nested more than {plain.MAX_DEPTH} levels deep", key=key)
        children = []
        for element, child in _children(value):
            children.append((element, child, self.replaced(child, (*path, element))))
        changed = {element: new for element, child, new in children if new is not child}
        if not changed or kind is tuple:
            return tuple(new for _, _, new in children) if changed else value
        if not isinstance(value, MutableMapping | list) or getattr(value, "is_locked", False):  # a TensorDict may be
            raise InvalidInput(
                f"state{show(path)}: a {type(value).__qualname__} cannot be modified; pass a dict", key=key
            )
        self.writes.append(partial(_write, value, changed))
        return value


def _write(container: Any, changed: Mapping[Any, Any]) -> None:
    for element, value in changed.items():
        container[element] = value
