"""The optimizer state in a checkpoint, and a template of it that a load can fill."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from torch.optim import ASGD, Optimizer

from casckpt.base.lazy import cached_property
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.signatures import get_trusted
from casckpt.errors import Damaged, Mismatch, MissingKey
from casckpt.format.manifest import Manifest
from casckpt.format.regions import Shape, whole
from casckpt.format.sections.index import Entry
from casckpt.format.tree import Element, Leaf, Node, children, find, join, leaves
from casckpt.history.commits import Commit
from casckpt.loading.arguments import Rename, renamer
from casckpt.loading.fit import saved_shapes
from casckpt.plan.reads import covers
from casckpt.store.store import Store
from casckpt.tensors.state import decode_tree, inflate

MODEL, OPTIM = "model", "optim"
GROUPS, STATE = f"{OPTIM}.param_groups", f"{OPTIM}.state"

_TOP = frozenset(("model", "optim", "train", "lightning", "transformers"))
"""What front ends of casckpt save at the top of a checkpoint."""

_STEP_NAMES = frozenset(("step", "mu_product"))

Place: TypeAlias = Callable[[Element, str, Entry], Any]
"""(name of the parameter, flat key below it, what is stored) -> the tensor, or shard, to fill."""

StoredGroups: TypeAlias = list[dict[str, Any]]
"""The groups of an optimizer, with their parameters by name."""


class StoredTraining:
    """One checkpoint: its keys, and its optimizer's groups and state by name."""

    def __init__(self, store: Store, commit: Commit, manifest: Manifest) -> None:
        self.store = store
        self.commit, self.manifest = commit, manifest
        self.checkpoint = Checkpoint(store.repository, commit)
        self.where = f"{commit.run}@{commit.step}"
        self._tree = decode_tree(manifest.body.tree)

    @classmethod
    def read(cls, store: Store, ref: str | Checkpoint) -> StoredTraining:
        """The one that ``ref`` names. Raises NotFound, Damaged, StorageError."""
        commit = store.get(ref).commit
        return cls(store, commit, get_trusted(store.repository, commit))

    @cached_property
    def keys(self) -> set[str]:
        """The flat keys of all leaves, and of all that they lie in."""
        return {join(path[:length]) for path, _ in leaves(self._tree) for length in range(1, len(path) + 1)}

    def keys_below(self, prefix: str) -> list[str]:
        """The flat keys below ``prefix``, without it."""
        start = f"{prefix}."
        keys = (join(path) for path, _ in leaves(self._tree))
        return [key.removeprefix(start) for key in keys if key.startswith(start)]

    def below(self, key: str) -> dict[Element, Node]:
        """What stands in the container ``key``; nothing if there is none."""
        node = find(self._tree, key)
        return {} if node is None else dict(children(node))

    @property
    def is_nested(self) -> bool:
        """Whether it is laid out as front ends of casckpt do it: a container "model", beside others of theirs only."""
        top = dict(children(self._tree))
        return not isinstance(top.get("model", 0), int) and _TOP.issuperset(map(str, top))

    def bare_keys(self) -> list[str]:
        """The keys of tensors at the top, and below what stands there, but for those of an optimizer and its like."""
        return [key for key in self.manifest.tensors if not key.startswith(("optim.", "train."))]

    def beside_model(self, places: Collection[str]) -> list[str]:
        """The keys of tensors that stand alone at the top, as names of one model do, if any of ``places`` does."""
        top = [str(element) for element, node in children(self._tree) if isinstance(node, int)]
        alone = [key for key in top if key in self.manifest.tensors]
        is_a_model = any(key in places for key in alone)
        return [key for key in alone if is_a_model and key not in places and not key.startswith("model.")]

    def weights(self) -> dict[str, Shape]:
        """The shapes of the tensors that may be of a model, by key."""
        shapes = saved_shapes(self.manifest)
        return {key: shapes[key] for key in self.bare_keys() if key in shapes}

    def at_the_top(self) -> str:
        """The names at the top of it, for a message."""
        names = [repr(element) for element, _ in children(self._tree)]
        return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")

    def has_optimizer(self, at: str = OPTIM) -> bool:
        """Whether an optimizer was saved along, under the key ``at``."""
        return find(self._tree, f"{at}.param_groups") is not None

    def optimizer_at(self, key: str, rename: Rename) -> str:
        """Where it has the optimizer ``key``: where ``rename`` puts its ``param_groups``, if one is there."""
        renamed = renamer(rename)(f"{key}.param_groups").removesuffix(".param_groups")
        return renamed if self.has_optimizer(renamed) else key

    def groups(self, at: str = OPTIM, *, allow_pickle: bool = False) -> StoredGroups:
        """The groups of the optimizer at ``at``, with their parameters by name.

        Raises MissingKey if there are none, Mismatch if they were saved by number.
        """
        key = f"{at}.param_groups"
        if not self.has_optimizer(at):
            raise MissingKey(
                f"{self.where} holds no optimizer ({key}), but {self.at_the_top()}; load the model alone "
                "(optim=None; from a dict, leave the optimizer out), or choose another checkpoint. A whole object goes "
                "by the name that it was saved under",
                keys=(key,),
            )
        found = self.value(key, allow_pickle=allow_pickle)
        usable = isinstance(found, list) and all(isinstance(group, Mapping) and "params" in group for group in found)
        if not usable or not all(isinstance(name, str) for group in found for name in group["params"]):
            raise Mismatch(
                f"{key} of {self.where} does not name its parameters (a plain optim.state_dict() was saved?); "
                "read it with store.read",
                key=key,
            )
        groups: StoredGroups = found
        return groups

    def value(self, key: str, *, allow_pickle: bool) -> Any:
        """What stands at a key; this process reads it alone."""
        made: dict[str, Any] = {key: None}
        self.store.load(made, self.checkpoint, no_dist=True, unread="ignore", allow_pickle=allow_pickle)
        return made[key]

    def nodes(self, names: Mapping[str, Any], at: str = OPTIM) -> dict[Element, Node]:
        """The part of the tree for each of ``names`` that has state at ``at``, and for what else stands beside them."""
        node = find(self._tree, f"{at}.state")
        others = self._at_the_top(names, f"{at}.state.") | self.below(f"{at}.state")
        nodes: dict[Element, Node] = {name: others.pop(name) for name in names if name in others}
        if not others:
            return nodes
        for name in names:  # nested by another front end, perhaps
            below = None if name in nodes or node is None else find(node, name)
            if below is not None:
                nodes[name] = below
                others.pop(name.partition(".")[0], None)
        return nodes | others

    def _at_the_top(self, names: Mapping[str, Any], start: str) -> dict[Element, Node]:
        """The same of state that stands at the top of the tree by its flat keys, as Megatron style leaves it."""
        found = dict[Element, dict[Element, Node]]()
        for element, node in children(self._tree):
            if str(element).startswith(start):
                key = str(element).removeprefix(start)
                name = _owner(key, names)
                found.setdefault(name, {})[key.removeprefix(f"{name}.")] = node
        return dict(found)

    def template(
        self, nodes: Mapping[Element, Node], place: Place, keep: Callable[[str], bool], at: str = OPTIM
    ) -> dict[Element, Any]:
        """State to be filled by `Store.load`: the flat keys below the ``state`` of ``at`` that ``keep`` answers for."""
        filled: dict[Element, Any] = {}
        keys = (f"{at}.state.{join((name, *path))}" for name, node in nodes.items() for path, _ in leaves(node))
        self.manifest.ready([entry.number for key in keys if (entry := self.manifest.tensors.get(key))], ())
        for name, node in nodes.items():
            prefix = f"{name}."

            def leaf(key: str, kind: Leaf, name: Element = name, prefix: str = prefix) -> Any:
                entry = self.manifest.tensors.get(f"{at}.state.{key}")
                return None if entry is None else place(name, key.removeprefix(prefix), self._whole(entry))

            filled |= inflate({name: node}, leaf, keep)
        return filled

    def _whole(self, entry: Entry) -> Entry:
        """Before memory is asked for: a shape that nothing stands behind is caught here."""
        if not covers(self.manifest.extents(entry), whole(entry.shape)):
            raise Damaged(f"{self.where} holds {entry.key!r} ({entry.nbytes} bytes) only in part", key=entry.key)
        return entry


def _owner(key: str, names: Mapping[str, Any]) -> str:
    """The longest of ``names`` that a flat key lies below; all but its last part if there is none."""
    name = above = key.rpartition(".")[0]
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name or above


def steps_on_cpu(optim: Optimizer | None, options: Mapping[str, Any]) -> bool:
    """Whether an optimizer counts steps on the CPU, given a group's options: torch's rule, and its one exception."""
    return not (options.get("capturable") or options.get("fused") or isinstance(optim, ASGD))


def is_step(entry: Entry, key: str) -> bool:
    """Whether it is a count of steps, or a product over them: optimizers keep those on the CPU unless told not to."""
    return entry.shape == () and key.rpartition(".")[2] in _STEP_NAMES


def keeps_dtype(entry: Entry, key: str) -> bool:
    """Whether an optimizer keeps it in the same dtype whatever that of the parameter: a count, or ASGD's rates."""
    name = key.rpartition(".")[2]
    return name == "step" or (entry.shape == () and name in {*_STEP_NAMES, "eta", "mu"})
