"""A stored checkpoint in Megatron's terms: sharded tensors, shards of objects, and the common part.

In a checkpoint from any front end, each tensor is a sharded tensor under its flat key, and all other values are
common. `Notes` lists the tensors that this front end's `save` wrote as part of the common part.

This module also contains the functions that read without a sharded state dict, such as `load_common_state_dict`. Each
process reads independently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, Unpack

import torch

from casckpt.base.lazy import cached_property
from casckpt.contents.checkpoint import Checkpoint, warn_if_forgotten
from casckpt.contents.contents import Contents
from casckpt.format.manifest import Manifest
from casckpt.format.sections.index import Entry
from casckpt.format.tree import Node, children, container, find, join, leaves
from casckpt.frontends.megatron.common import COMMON_NAME, NOTES_NAME, Notes, read
from casckpt.frontends.megatron.errors import ShardedKeyMissing, checkpointing_errors
from casckpt.frontends.megatron.kinds import is_sharded_object
from casckpt.frontends.megatron.mapping import ShardedObject, ShardedTensor
from casckpt.frontends.megatron.nesting import Nested, dict_list_map_inplace, merge, nested_values
from casckpt.frontends.megatron.place import CheckpointDir, StoreRef, place_of
from casckpt.loading.options import RankArguments
from casckpt.ranks.agreement import check_same
from casckpt.ranks.ranks import Ranks, everyone, exchange_keeping
from casckpt.store.store import Store
from casckpt.store.types import Commit
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.objects import TORCH_EXTENSIONS
from casckpt.tensors.state import inflate
from casckpt.tensors.values import Shard

_STATE = "optimizer.state."
_OBJECT = re.compile(r".+/shard_[0-9.]*_[0-9.]*", re.DOTALL)
COMMON_OBJECT = "common_state/shard_0_1"  # of Megatron-core from 0.19 on, in place of common.pt

Facts: TypeAlias = tuple[Commit, Manifest, Notes, bytes | None]


@dataclass(frozen=True)
class MegatronCheckpoint:
    """A checkpoint. ``notes``: notes on its common part. ``file``: the contents of its common.pt, or None."""

    store: Store
    commit: Commit
    contents: Contents
    notes: Notes
    file: bytes | None

    @classmethod
    def read(cls, place: StoreRef, *, common: bool = False) -> MegatronCheckpoint:
        """Read a checkpoint. ``common``: also read common.pt. Raises NotFound, Damaged, Refused or StorageError."""
        checkpoint = place.store.get(place.ref)
        warn_if_forgotten(checkpoint.commit)
        names = place.store.attachments(checkpoint)
        data = place.store.read_attachment(checkpoint, NOTES_NAME) if NOTES_NAME in names else None
        notes = Notes() if data is None else Notes.decoded(data)
        contents = Contents.open(place.store.repository, checkpoint.commit, extensions=TORCH_EXTENSIONS)
        wanted = common and COMMON_NAME in names
        file = place.store.read_attachment(checkpoint, COMMON_NAME) if wanted else None
        return cls(place.store, checkpoint.commit, contents, notes, file)

    @classmethod
    def together(cls, ranks: Ranks, locate: Callable[[], StoreRef], *, common: bool = False) -> MegatronCheckpoint:
        """Read the checkpoint on rank 0 for all ranks. All ranks must name the same checkpoint.

        Each rank loads through its own store.
        """

        def hello() -> tuple[StoreRef, str]:
            place = locate()
            return place, place.ref

        def find(place: StoreRef, refs: Sequence[str]) -> list[Facts]:
            check_same(refs)
            stored = cls.read(place, common=common)
            return everyone((stored.commit, stored.contents.manifest, stored.notes, stored.file), ranks.size)

        place, (commit, manifest, notes, file) = exchange_keeping(ranks, hello, find)
        contents = Contents(manifest, extensions=TORCH_EXTENSIONS)
        if ranks.rank != 0:
            contents.adopt(place.store.repository, commit)
        return cls(place.store, commit, contents, notes, file)

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint to pass to `Store.load`."""
        return Checkpoint(self.store.repository, self.commit)

    @property
    def where(self) -> str:
        """RUN@STEP, for messages."""
        return f"{self.commit.run}@{self.commit.step}"

    @cached_property
    def tensors(self) -> dict[str, Entry]:
        """The sharded tensors by key."""
        objects = (
            join((name, *path)) for name, node in self._nodes.items() if is_object_key(name) for path, _ in leaves(node)
        )
        others = self.notes.tensors.union(objects)
        return {key: entry for key, entry in self.contents.tensors.items() if key not in others}

    @cached_property
    def objects(self) -> dict[str, ShardedObject]:
        """The shards of all objects, without data, by unique key."""
        names = (name for name in self._nodes if is_object_key(name) and name != COMMON_OBJECT)
        return {name: ShardedObject.empty_from_unique_key(name) for name in names}

    @cached_property
    def object_names(self) -> frozenset[str]:
        """The keys of all objects."""
        return frozenset(shard.key for shard in self.objects.values())

    @cached_property
    def common_keys(self) -> list[str]:
        """The flat keys of all leaves of the common part."""
        return [key for path, _ in leaves(self._without_objects) if (key := join(path)) not in self.tensors]

    @cached_property
    def _without_objects(self) -> Node:
        kept = {element: node for element, node in children(self.contents.tree) if str(element) not in self.objects}
        made: Node = container(type(self.contents.tree), kept, self.contents.tree)
        return made

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        return {str(element): node for element, node in children(self.contents.tree)}

    def flat_keys(self) -> dict[str, str | None]:
        """Map the flat key of each leaf to the key of its sharded value, or to None."""
        keys: dict[str, str | None] = {join(path): None for path, _ in leaves(self.contents.tree)}
        keys.update((key, key) for key in self.tensors)
        for name, shard in self.objects.items():
            keys.update((join((name, *path)), shard.key) for path, _ in leaves(self._nodes[name]))
        return keys

    def inflated(self, values: Mapping[str, Any]) -> dict[Any, Any]:
        """Return the state, nested as it was saved, with only the leaves in ``values`` (by flat key)."""
        return dict(inflate(self.contents.tree, lambda key, _: values[key], lambda key: key in values))

    def tensor_key(self, key: str) -> str | None:
        """Return the flat key of the sharded tensor for a Megatron key, or None.

        Tensors that `save_model_and_optim_state` wrote can be found under Megatron's names for parameters and their
        state.
        """
        if key in self.tensors:
            return key
        names = [f"model.{key}"]
        if key.startswith(_STATE):
            what, _, param = key.removeprefix(_STATE).partition(".")
            names.append(f"optim.state.{param}.{what}")
        return next((name for name in names if name in self.tensors), None)

    def object_key(self, wanted: Any) -> str | None:
        """Return the flat key of the value for a ShardedObject, or None.

        The value for an object with a single shard may also be plain data that another front end wrote under its key.
        """
        if wanted.unique_key in self.objects:
            return str(wanted.unique_key)
        alone = prod(wanted.global_shape) == 1 and find(self.contents.tree, wanted.key) is not None
        return str(wanted.key) if alone and wanted.key not in self.tensors else None

    def ask_for(self, request: ReadRequest, key: str) -> Callable[[], Any]:
        """Request an object, which may be a leaf or a container.

        Return a function that returns its value after the read.
        """
        node = self._nodes.get(key) or find(self.contents.tree, key)
        if node is None or isinstance(node, int):
            label = request.add(key)
            return lambda: request.values[label]
        below = [join(path) for path, _ in leaves(node)]
        labels = {name: request.add(f"{key}.{name}") for name in below}
        return lambda: inflate(node, lambda name, _: request.values[labels[name]], lambda _: True)

    def common(self, values: Mapping[str, Any], allow_pickle: bool) -> dict[Any, Any]:
        """Return the common part, nested as it was saved, from common.pt and ``values``: its leaves by flat key."""
        tensors = self.tensors
        tree = inflate(self._without_objects, lambda key, _: values[key], lambda key: key not in tensors)
        common: dict[Any, Any] = tree.pop(COMMON_OBJECT, {})
        merge(common, {self.notes.names.get(key, key): value for key, value in tree.items()})
        return common if self.file is None else merge(common, read(self.file, self.where, allow_pickle))


class ReadRequest:
    """Values to read from a checkpoint. Each has its own label, which begins with its name."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._names: dict[str, str] = {}

    def add(self, name: str, into: Shard | None = None) -> str:
        """Request the flat key ``name`` and return its label.

        ``into``: the shard to read into, or None for new memory.
        """
        label = name
        while label in self.values:
            label = f"{label} (item {len(self.values)})"
        self.values[label], self._names[label] = into, name
        return label

    def run(self, stored: MegatronCheckpoint, **options: Unpack[RankArguments]) -> None:
        """Read all requested values. ``options``: those of `Store.load`. Raises the errors of `Store.load`."""
        stored.store.load(
            self.values, stored.checkpoint, rename=self._names.__getitem__, cast=True, unread="ignore", **options
        )


def read_values(stored: MegatronCheckpoint, keys: Iterable[str], *, allow_pickle: bool = False) -> dict[str, Any]:
    """Read flat keys into new memory, only in this process. Raises the errors of `Store.load`."""
    request = ReadRequest()
    for key in keys:
        request.add(key)
    request.run(stored, no_dist=True, allow_pickle=allow_pickle)
    return request.values


def is_object_key(key: str) -> bool:
    """Return whether the key has the format of an object shard's unique key."""
    return _OBJECT.fullmatch(key) is not None


CONTENT_METADATA = "content_metadata"


def load_common_state_dict(checkpoint_dir: CheckpointDir, *, allow_pickle: bool = False) -> dict[Any, Any]:
    """Load the common part: all values that are not sharded, nested as they were saved.

    Raises CheckpointingException (also a NotFound) if there is no checkpoint, or for a pickle without ``allow_pickle``.
    """
    with checkpointing_errors():
        return read_common(MegatronCheckpoint.read(place_of(checkpoint_dir), common=True), allow_pickle)


def read_common(stored: MegatronCheckpoint, allow_pickle: bool) -> dict[Any, Any]:
    """See `load_common_state_dict`."""
    return stored.common(read_values(stored, stored.common_keys, allow_pickle=allow_pickle), allow_pickle)


def load_content_metadata(
    checkpoint_dir: CheckpointDir | None = None,
    *,
    preloaded_state_dict: dict[str, Any] | None = None,
    allow_pickle: bool = False,
) -> dict[str, Any] | None:
    """Return the ``content_metadata`` that was passed to `save`, or None.

    It is read from a checkpoint or a loaded state dict. Raises the errors of `load_common_state_dict`.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ValueError("pass a checkpoint_dir, or a preloaded_state_dict")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir, allow_pickle=allow_pickle)
    return preloaded_state_dict.get(CONTENT_METADATA)


def load_plain_tensors(checkpoint_dir: CheckpointDir) -> dict[str, torch.Tensor]:
    """Load each whole sharded tensor into new memory, by key, without the common part."""
    with checkpointing_errors():
        stored = MegatronCheckpoint.read(place_of(checkpoint_dir))
        return read_values(stored, stored.tensors)


def load_tensors_metadata(checkpoint_dir: CheckpointDir, sharded_strategy: Any = None) -> dict[str, ShardedTensor]:
    """Return the shape and dtype of each sharded tensor, by key, as a whole ShardedTensor without data."""
    with checkpointing_errors():
        return tensors_metadata(MegatronCheckpoint.read(place_of(checkpoint_dir)))


def tensors_metadata(stored: MegatronCheckpoint, kind: Any = ShardedTensor) -> dict[str, Any]:
    """See `load_tensors_metadata`. ``kind``: the class of the result."""
    metadata = {}
    for key, entry in stored.tensors.items():
        whole = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="meta")
        metadata[key] = kind.from_rank_offsets(key, whole).without_data()
    return metadata


def load_sharded_metadata(
    checkpoint_dir: CheckpointDir, sharded_strategy: Any = None, common_strategy: Any = None
) -> dict[str, ShardedTensor | ShardedObject]:
    """Return the result of `load_tensors_metadata`, and a ShardedObject without data for each shard, by unique key."""
    with checkpointing_errors():
        stored = MegatronCheckpoint.read(place_of(checkpoint_dir))
        return {**tensors_metadata(stored), **stored.objects}


def load_sharded_objects(
    sharded_state_dict: Nested, checkpoint_dir: CheckpointDir, *, allow_pickle: bool = False
) -> None:
    """Replace every ShardedObject in a state dict with its value, in place. Other values are unchanged.

    Raises CheckpointingException (also a MissingKey), naming the key and the shard, before anything changes.
    """
    with checkpointing_errors():
        stored = MegatronCheckpoint.read(place_of(checkpoint_dir))
        request = ReadRequest()
        wanted = [value for value in nested_values(sharded_state_dict) if is_sharded_object(value)]
        values = {id(value): stored.ask_for(request, object_key(stored, value)) for value in wanted}
        request.run(stored, no_dist=True, allow_pickle=allow_pickle)
    dict_list_map_inplace(lambda x: values[id(x)]() if id(x) in values else x, sharded_state_dict)


def object_key(stored: MegatronCheckpoint, wanted: Any) -> str:
    """Return the flat key of the value for a ShardedObject. Raises ShardedKeyMissing, naming the key and the shard."""
    key = stored.object_key(wanted)
    if key is None:
        shards = [shard for shard in stored.objects.values() if shard.key == wanted.key]
        have = [f"{shard.global_offset} of {shard.global_shape}" for shard in shards]
        raise ShardedKeyMissing(
            f"{stored.where} lacks the object {wanted.key!r} at {wanted.global_offset} of {wanted.global_shape}; "
            + (f"it has the object at {', '.join(have[:5])}" if have else "it has no object with that key"),
            key=wanted.key,
            keys=(wanted.unique_key,),
        )
    return key
