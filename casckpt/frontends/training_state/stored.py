"""`StoredTraining`: the model and the optimizer state in a checkpoint, and templates for loading the state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch.optim import ASGD, Optimizer

from casckpt.base.lazy import cached_property
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.errors import Mismatch, MissingKey
from casckpt.format.regions import Shape
from casckpt.format.sections.index import Entry
from casckpt.format.tree import Element, Leaf, Node, Wrapper, children, closed, find, join, leaves, nodes, units
from casckpt.loading.options import Rename, renamer
from casckpt.ranks.agreement import StoreIdentity
from casckpt.store.store import Store
from casckpt.store.types import Commit
from casckpt.tensors.memory import new_empty
from casckpt.tensors.objects import TORCH_EXTENSIONS
from casckpt.tensors.state import inflate

MODEL, OPTIM = "model", "optim"
GROUPS, STATE = f"{OPTIM}.param_groups", f"{OPTIM}.state"

_TOP = frozenset(("model", "optim", "train", "lightning", "transformers"))
"""The top-level keys of checkpoints that casckpt's front ends save."""

STEP_NAMES = frozenset(("step", "mu_product"))

Place: TypeAlias = Callable[[Element, str, Entry], Any]
"""A function that maps (parameter name, flat key below it, its entry) to the tensor or shard to fill."""

PlaceWrapper: TypeAlias = Callable[[Element, str, Wrapper], Any]
"""A function that maps (parameter name, flat key below it, its node) to the wrapper to fill."""

StoredGroups: TypeAlias = list[dict[str, Any]]
"""The groups of an optimizer, with parameter names."""


class StoredTraining:
    """A checkpoint: its keys, and the groups and state of its optimizers by parameter name.

    ``shares``: whether rank 0 shares its reads with other ranks. ``home``: the identity of rank 0's store.
    """

    def __init__(
        self,
        store: Store,
        commit: Commit,
        contents: Contents,
        *,
        shares: bool = False,
        home: StoreIdentity | None = None,
    ) -> None:
        self.store, self.commit, self.contents, self.shares, self.home = store, commit, contents, shares, home
        self.checkpoint = Checkpoint(store.repository, commit)
        self.where, self._tree = contents.where, contents.tree

    @classmethod
    def read(cls, store: Store, ref: str | Checkpoint) -> StoredTraining:
        """Read the checkpoint that ``ref`` names. Raises NotFound, Damaged and StorageError."""
        commit = store.get(ref).commit
        return cls(store, commit, Contents.open(store.repository, commit, extensions=TORCH_EXTENSIONS))

    @cached_property
    def keys(self) -> set[str]:
        """The flat keys of all leaves and containers."""
        return {join(path) for path, _ in nodes(self._tree) if path}

    def keys_below(self, prefix: str) -> list[str]:
        """Return the flat keys of leaves and wrappers below ``prefix``, with ``prefix`` removed."""
        start = f"{prefix}."
        keys = (join(path) for path, _ in units(self._tree))
        return [key.removeprefix(start) for key in keys if key.startswith(start)]

    def below(self, key: str) -> dict[Element, Node]:
        """Return the nodes in the container ``key``, or an empty dict if there is no such container."""
        node = find(self._tree, key)
        return {} if node is None else dict(children(node))

    def metadata(self, key: str) -> Mapping[str, Any]:
        """Return the ``_metadata`` of the state_dict at a key, with module versions. It is empty if it is not known."""
        found = getattr(find(self._tree, key) if key else self._tree, "_metadata", None)
        if isinstance(found, Mapping) or not key:
            return found if isinstance(found, Mapping) else {}
        above, _, last = key.rpartition(".")  # the key may be that of a module in a state_dict
        below = {path: value for path, value in self.metadata(above).items() if f"{path}.".startswith(f"{last}.")}
        return {path[len(last) + 1 :]: value for path, value in below.items()}

    @property
    def is_nested(self) -> bool:
        """Whether the layout is that of casckpt's front ends: a container "model" and no unknown top-level keys."""
        top = dict(children(self._tree))
        return not isinstance(top.get("model", 0), int) and _TOP.issuperset(map(str, top))

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """The shapes of all tensors and wrappers, by key."""
        inner, wrappers = self.contents.outer, self.contents.wrappers
        plain = {key: entry.shape for key, entry in self.contents.tensors.items() if key not in inner}
        return plain | {key: node.shape for key, node in wrappers.items()}

    def lacks(self, key: str) -> bool:
        """Return whether the checkpoint was thinned and lacks the tensor at a key."""
        entry = self.contents.tensors.get(key)
        return entry is not None and self.contents.manifest.lacks(entry)

    def bare_keys(self) -> list[str]:
        """Return the keys of all tensors and wrappers, except those in an optimizer or a train state."""
        return [key for key in self.shapes if not key.startswith(("optim.", "train."))]

    def beside_model(self, places: Collection[str]) -> list[str]:
        """Return the top-level tensors outside ``places`` if ``places`` has a top-level tensor; else an empty list."""
        alone = [str(element) for element, _ in children(self._tree) if str(element) in self.shapes]
        is_a_model = any(key in places for key in alone)
        return [key for key in alone if is_a_model and key not in places and not key.startswith("model.")]

    def weights(self) -> dict[str, Shape]:
        """Return the shapes of the tensors that may belong to a model, by key."""
        return {key: self.shapes[key] for key in self.bare_keys() if not self.lacks(key)}

    def empty_tensors(self, keys: Iterable[str]) -> list[torch.Tensor]:
        """Return an unfilled CPU tensor with the stored dtype and shape for each key."""
        return [new_empty(self.contents.tensors[key], torch.device("cpu")) for key in keys]

    def at_the_top(self) -> str:
        """Return the top-level names for a message."""
        names = [repr(element) for element, _ in children(self._tree)]
        return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")

    def has_optimizer(self, at: str = OPTIM) -> bool:
        """Return whether the checkpoint has an optimizer at the key ``at``."""
        return find(self._tree, f"{at}.param_groups") is not None

    def optimizer_at(self, key: str, rename: Rename) -> str:
        """Return the saved key of the optimizer ``key``: the renamed key if it has an optimizer, else ``key``."""
        renamed = renamer(rename)(f"{key}.param_groups").removesuffix(".param_groups")
        return renamed if self.has_optimizer(renamed) else key

    def read_groups(self, places: Collection[str], *, allow_pickle: bool) -> dict[str, Any]:
        """Read the values that `groups` takes, of the optimizers at these keys, all at once."""
        keys = [f"{at}.param_groups" for at in dict.fromkeys(places) if self.has_optimizer(at)]
        return self.values(keys, allow_pickle=allow_pickle) if keys else {}

    def groups(self, at: str, values: Mapping[str, Any]) -> StoredGroups:
        """Return the groups of the optimizer at ``at`` from the result of `read_groups`.

        Raises MissingKey if there is no optimizer, and Mismatch if its parameters were saved by number.
        """
        key = f"{at}.param_groups"
        if key not in values:
            raise MissingKey(
                f"{self.where} has no optimizer ({key}); it has {self.at_the_top()}. Load the model alone "
                "(optim=None; in a dict, leave the optimizer out), or choose a different checkpoint. Load a whole "
                "object by the name under which it was saved",
                keys=(key,),
            )
        value = values[key]
        usable = isinstance(value, list) and all(isinstance(group, Mapping) and "params" in group for group in value)
        if not usable or not all(isinstance(name, str) for group in value for name in group["params"]):
            raise Mismatch(
                f"{key} in {self.where} does not name its parameters (perhaps a plain optim.state_dict() was saved); "
                "read it with store.read",
                key=key,
            )
        groups: StoredGroups = value
        return groups

    def value(self, key: str, *, allow_pickle: bool) -> Any:
        """Read the value at a key, in this process only."""
        return self.values([key], allow_pickle=allow_pickle)[key]

    def values(self, keys: Iterable[str], *, allow_pickle: bool) -> dict[str, Any]:
        """Read the values at several keys, in this process only."""
        made = dict[str, Any].fromkeys(keys)
        self.store.load(made, self.checkpoint, no_dist=True, unread="ignore", allow_pickle=allow_pickle)
        return made

    def nodes(self, names: Mapping[str, Any], at: str = OPTIM) -> dict[Element, Node]:
        """Return the nodes of the optimizer state at ``at``: first the nodes of ``names``, then all others."""
        node = find(self._tree, f"{at}.state")
        others = self._at_the_top(names, f"{at}.state.") | self.below(f"{at}.state")
        nodes: dict[Element, Node] = {name: others.pop(name) for name in names if name in others}
        if not others:
            return nodes
        for name in names:  # a different front end may have nested the names
            below = None if name in nodes or node is None else find(node, name)
            if below is not None:
                nodes[name] = below
                others.pop(name.partition(".")[0], None)
        return nodes | others

    def _at_the_top(self, names: Mapping[str, Any], start: str) -> dict[Element, Node]:
        """Return the nodes of state that has flat keys at the top level, as in Megatron's layout."""
        nodes = dict[Element, dict[Element, Node]]()
        for element, node in children(self._tree):
            if str(element).startswith(start):
                key = str(element).removeprefix(start)
                name = _owner(key, names)
                nodes.setdefault(name, {})[key.removeprefix(f"{name}.")] = node
        return dict(nodes)

    def template(
        self,
        nodes: Mapping[Element, Node],
        place: Place,
        keep: Callable[[str], bool],
        at: str = OPTIM,
        wrap: PlaceWrapper = lambda name, key, node: None,
    ) -> dict[Element, Any]:
        """Return a template for `Store.load` with the flat keys of the state at ``at`` that ``keep`` selects.

        If ``wrap`` returns None, the load creates the wrapper.
        """
        filled: dict[Element, Any] = {}
        start = f"{at}.state."
        keys = (f"{start}{join((name, *path))}" for name, node in nodes.items() for path, _ in leaves(node))
        self.contents.ready(key for key in keys if key in self.contents.tensors)
        for name, node in nodes.items():
            prefix = f"{name}."

            def leaf(key: str, kind: Leaf, name: Element = name, prefix: str = prefix) -> Any:
                if (wrapper := self.contents.wrappers.get(start + key)) is not None:
                    for path, _ in leaves(wrapper):
                        self.contents.extents(self.contents.tensor(f"{start}{key}.{join(path)}"))
                    return wrap(name, key.removeprefix(prefix), wrapper)
                entry = self.contents.tensors.get(start + key)
                if entry is None:
                    return None
                self.contents.extents(entry)  # raises an error for a shape without stored data
                return place(name, key.removeprefix(prefix), entry)

            filled |= inflate({name: closed(node)}, leaf, keep)
        return filled


def _owner(key: str, names: Mapping[str, Any]) -> str:
    """Return the longest of ``names`` that is a parent of a flat key, or otherwise the key without its last part."""
    name = above = key.rpartition(".")[0]
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name or above


def steps_on_cpu(optim: Optimizer | None, options: Mapping[str, Any]) -> bool:
    """Return whether torch keeps step counts on the CPU for an optimizer with these group options."""
    return not (options.get("capturable") or options.get("fused") or isinstance(optim, ASGD))


def is_step(entry: Entry, key: str) -> bool:
    """Return whether an entry is a step count or a product over steps. Optimizers keep these on the CPU."""
    return entry.shape == () and key.rpartition(".")[2] in STEP_NAMES


def keeps_dtype(entry: Entry, key: str) -> bool:
    """Return whether the dtype is independent of the parameter's dtype, as for a step count or the rates of ASGD."""
    name = key.rpartition(".")[2]
    return name == "step" or (entry.shape == () and name in {*STEP_NAMES, "eta", "mu"})
