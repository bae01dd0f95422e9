"""A stored checkpoint in Megatron's terms: sharded tensors, shards of objects, and the common part.

Whichever front end wrote it: a tensor is a sharded tensor under its flat key, and what is no tensor is common. What
`save` of this front end wrote as a tensor of the common part is listed in `Notes`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, Unpack

from casckpt.base.lazy import cached_property
from casckpt.contents import manifests
from casckpt.contents.checkpoint import Checkpoint, warn_if_forgotten
from casckpt.contents.signatures import get_trusted
from casckpt.format.manifest import Manifest
from casckpt.format.sections.index import Entry
from casckpt.format.tree import Node, children, container, find, join, leaves
from casckpt.frontends.megatron.common import COMMON_NAME, NOTES_NAME, Notes, read
from casckpt.frontends.megatron.mapping import ShardedObject
from casckpt.frontends.megatron.nesting import merge
from casckpt.frontends.megatron.place import StoreRef
from casckpt.history.commits import Commit
from casckpt.loading.options import RankArguments
from casckpt.ranks.agreement import check_same
from casckpt.ranks.ranks import Ranks, everyone
from casckpt.store.store import Store
from casckpt.tensors.state import decode_tree, inflate
from casckpt.tensors.values import Shard

_STATE = "optimizer.state."
_OBJECT = re.compile(r".+/shard_[0-9.]*_[0-9.]*", re.DOTALL)

Facts: TypeAlias = tuple[Commit, Manifest, Notes, bytes | None]


@dataclass(frozen=True)
class MegatronCheckpoint:
    """One checkpoint. ``notes``: on its common part. ``file``: its common.pt, if any."""

    store: Store
    commit: Commit
    manifest: Manifest
    notes: Notes
    file: bytes | None

    @classmethod
    def read(cls, place: StoreRef, *, common: bool = False) -> MegatronCheckpoint:
        """The one at a place; ``common``: with its common.pt. Raises NotFound, Damaged, StorageError, Refused."""
        checkpoint = place.store.get(place.ref)
        warn_if_forgotten(checkpoint.commit)
        names = place.store.attachments(checkpoint)
        data = place.store.read_attachment(checkpoint, NOTES_NAME) if NOTES_NAME in names else None
        notes = Notes() if data is None else Notes.decoded(data)
        manifest = get_trusted(place.store.repository, checkpoint.commit)
        wanted = common and COMMON_NAME in names
        file = place.store.read_attachment(checkpoint, COMMON_NAME) if wanted else None
        return cls(place.store, checkpoint.commit, manifest, notes, file)

    @classmethod
    def together(cls, ranks: Ranks, locate: Callable[[], StoreRef], *, common: bool = False) -> MegatronCheckpoint:
        """The same on all ranks, which must name the same; read by rank 0.

        Each has a store of its own for what it loads.
        """
        places: list[StoreRef] = []

        def hello() -> str:
            places.append(locate())
            return places[0].ref

        def find(refs: Sequence[str]) -> list[Facts]:
            check_same(refs)
            found = cls.read(places[0], common=common)
            return everyone((found.commit, found.manifest, found.notes, found.file), ranks.size)

        facts = ranks.exchange(hello, find)
        stored = cls(places[0].store, *facts)
        if ranks.rank != 0:
            manifests.adopt(stored.store.repository, stored.commit, stored.manifest)
        return stored

    @property
    def checkpoint(self) -> Checkpoint:
        """Give what `Store.load` takes."""
        return Checkpoint(self.store.repository, self.commit)

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.commit.run}@{self.commit.step}"

    @cached_property
    def tensors(self) -> dict[str, Entry]:
        """The sharded tensors by key."""
        objects = (join((name, *path)) for name in self.objects for path, _ in leaves(self._nodes[name]))
        others = self.notes.tensors.union(objects)
        return {key: entry for key, entry in self.manifest.tensors.items() if key not in others}

    @cached_property
    def objects(self) -> dict[str, ShardedObject]:
        """The shards of objects, without data, by unique key."""
        names = (str(element) for element, _ in children(self._tree))
        return {name: ShardedObject.empty_from_unique_key(name) for name in names if is_object_key(name)}

    @cached_property
    def object_names(self) -> frozenset[str]:
        """The keys of all objects."""
        return frozenset(one.key for one in self.objects.values())

    @cached_property
    def common_keys(self) -> list[str]:
        """The flat keys of all leaves of the common part."""
        return [key for path, _ in leaves(self._without_objects) if (key := join(path)) not in self.tensors]

    @cached_property
    def _without_objects(self) -> Node:
        kept = {element: node for element, node in children(self._tree) if str(element) not in self.objects}
        made: Node = container(type(self._tree), kept, self._tree)
        return made

    @cached_property
    def _tree(self) -> Node:
        return decode_tree(self.manifest.body.tree)

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        return {str(element): node for element, node in children(self._tree)}

    def flat_keys(self) -> dict[str, str | None]:
        """The flat keys of all leaves, and of what is sharded its key."""
        keys: dict[str, str | None] = {join(path): None for path, _ in leaves(self._tree)}
        keys.update((key, key) for key in self.tensors)
        for name, one in self.objects.items():
            keys.update((join((name, *path)), one.key) for path, _ in leaves(self._nodes[name]))
        return keys

    def inflated(self, values: Mapping[str, Any]) -> dict[Any, Any]:
        """The whole state, nested as it was saved, of the leaves by flat key that are given, without the others."""
        return dict(inflate(self._tree, lambda key, _: values[key], lambda key: key in values))

    def tensor_key(self, key: str) -> str | None:
        """The flat key of a sharded tensor, for a key of Megatron's; None if there is none.

        What `save_model_and_optim_state` wrote is found by the names that Megatron gives parameters and their state.
        """
        if key in self.tensors:
            return key
        names = [f"model.{key}"]
        if key.startswith(_STATE):
            what, _, param = key.removeprefix(_STATE).partition(".")
            names.append(f"optim.state.{param}.{what}")
        return next((name for name in names if name in self.tensors), None)

    def object_key(self, wanted: Any) -> str | None:
        """The flat key of what a ShardedObject asks for; None if there is none.

        An object that is whole may also be plain data that another front end wrote under its key.
        """
        if wanted.unique_key in self.objects:
            return str(wanted.unique_key)
        alone = prod(wanted.global_shape) == 1 and find(self._tree, wanted.key) is not None
        return str(wanted.key) if alone and wanted.key not in self.tensors else None

    def ask_for(self, request: ReadRequest, key: str) -> Callable[[], Any]:
        """Let an object, a leaf or a container of the tree, be read; what gives its value after that."""
        node = self._nodes.get(key) or find(self._tree, key)
        if node is None or isinstance(node, int):
            label = request.add(key)
            return lambda: request.values[label]
        below = [join(path) for path, _ in leaves(node)]
        labels = {name: request.add(f"{key}.{name}") for name in below}
        return lambda: inflate(node, lambda name, _: request.values[labels[name]], lambda _: True)

    def common(self, values: Mapping[str, Any], allow_pickle: bool) -> dict[Any, Any]:
        """The common part, nested as it was saved, of its leaves by flat key; and of common.pt, if it has that."""
        tensors = self.tensors
        tree = inflate(self._without_objects, lambda key, _: values[key], lambda key: key not in tensors)
        found = {self.notes.names.get(key, key): value for key, value in tree.items()}
        return found if self.file is None else merge(found, read(self.file, self.where, allow_pickle))


class ReadRequest:
    """What is to be read of a checkpoint, each thing under a label of its own: its name, or one that begins with it."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._names: dict[str, str] = {}

    def add(self, name: str, into: Shard | None = None) -> str:
        """Read ``name``, a flat key, into a shard, or (None) as something new. The label under which it will be."""
        label = name
        while label in self.values:
            label = f"{label} (item {len(self.values)})"
        self.values[label], self._names[label] = into, name
        return label

    def run(self, stored: MegatronCheckpoint, **options: Unpack[RankArguments]) -> None:
        """Read it all. ``options``: as in `Store.load`. Raises what that raises."""
        stored.store.load(
            self.values, stored.checkpoint, rename=self._names.__getitem__, cast=True, unread="ignore", **options
        )


def read_values(stored: MegatronCheckpoint, keys: Iterable[str], *, allow_pickle: bool = False) -> dict[str, Any]:
    """Read flat keys as something new, for this process alone. Raises what `Store.load` raises."""
    request = ReadRequest()
    for key in keys:
        request.add(key)
    request.run(stored, no_dist=True, allow_pickle=allow_pickle)
    return request.values


def is_object_key(key: str) -> bool:
    """Tell whether it has the form of the unique key of a shard of an object."""
    return _OBJECT.fullmatch(key) is not None
