"""What a manifest holds for one rank, by key."""

from __future__ import annotations

from collections.abc import Iterable

from casckpt.base.lazy import cached_property
from casckpt.errors import Damaged, Refused
from casckpt.format.manifest import Manifest
from casckpt.format.sections.index import PART, TENSOR, Entry, StoredObject
from casckpt.format.tree import TENSOR as TENSOR_LEAF
from casckpt.format.tree import Node, join, leaves
from casckpt.tensors.state import decode_tree


class Contents:
    """What a manifest holds for one rank: of values that each rank has for itself, its own, else that of rank 0."""

    def __init__(self, manifest: Manifest, rank: int) -> None:
        self.manifest = manifest
        self.entries: dict[tuple[str, str, int], Entry] = {}
        """By kind, key and index."""
        self.objects: dict[str, StoredObject] = {}
        self.per_rank: dict[str, list[int]] = {}
        """The ranks that saved a value of their own, by key."""
        for entry in manifest.entries:
            name = (entry.kind, entry.key, entry.index)
            if name not in self.entries or entry.rank == rank:
                self.entries[name] = entry
            if entry.rank is not None and entry.kind == TENSOR:
                self.per_rank.setdefault(entry.key, []).append(entry.rank)
        for one in manifest.objects:
            if one.rank is not None:
                self.per_rank.setdefault(one.key, []).append(one.rank)
            if one.key not in self.objects or one.rank == rank:
                self.objects[one.key] = one

    def ready(self, keys: Iterable[str]) -> None:
        """Fetch what the manifest says of these keys, in few reads, for all that follows to find it at hand."""
        entries, objects = [], []
        for key in keys:
            tensor, one = self.tensor(key), self.objects.get(key)
            entries += [] if tensor is None else [tensor]
            if one is not None:
                objects.append(one.number)
                entries += self.parts(one)
        self.manifest.ready([entry.number for entry in entries], objects)

    def tensor(self, key: str) -> Entry | None:
        """The entry of a tensor."""
        return self.entries.get((TENSOR, key, 0))

    def stored_tensor(self, key: str) -> Entry:
        """The same, of one that the tree names. Raises Refused if it is not there."""
        found = self.tensor(key)
        if found is None:
            raise lacking(self.manifest, key)
        return found

    @cached_property
    def tree(self) -> Node:
        """The containers that the leaves stand in."""
        return decode_tree(self.manifest.body.tree)

    def whole_tree(self) -> Node:
        """The tree, for whoever reads all of it. Raises Refused if it names a leaf that the manifest does not hold."""
        for path, leaf in leaves(self.tree):
            key = join(path)
            if self.tensor(key) is None if leaf == TENSOR_LEAF else key not in self.objects:
                raise lacking(self.manifest, key)
        return self.tree

    def keys(self) -> list[str]:
        """All keys of the state: tensors and objects."""
        return [key for kind, key, _ in self.entries if kind == TENSOR] + list(self.objects)

    def parts(self, one: StoredObject) -> list[Entry]:
        """The entries that hold the large buffers of an object."""
        try:
            return [self.entries[PART, one.key, index] for index in range(one.parts)]
        except KeyError as error:
            raise Damaged(f"a part of object {one.key!r} stands nowhere in the manifest", key=one.key) from error


def lacking(manifest: Manifest, key: str) -> Refused:
    """The error for a leaf of the tree of which nothing is stored."""
    return Refused(f"manifest {manifest.id} names {key!r} in its tree but holds nothing for it", key=key)
