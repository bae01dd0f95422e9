"""The content of a manifest for one rank, by key."""

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
    """The content of a manifest for one rank. Of values that each rank saved, it is the rank's own, else rank 0's."""

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
        for stored in manifest.objects:
            if stored.rank is not None:
                self.per_rank.setdefault(stored.key, []).append(stored.rank)
            if stored.key not in self.objects or stored.rank == rank:
                self.objects[stored.key] = stored

    def ready(self, keys: Iterable[str]) -> None:
        """Fetch the parts of the manifest for these keys in few reads, before they are used."""
        entries, objects = [], []
        for key in keys:
            tensor, stored = self.tensor(key), self.objects.get(key)
            entries += [] if tensor is None else [tensor]
            if stored is not None:
                objects.append(stored.number)
                entries += self.parts(stored)
        self.manifest.ready([entry.number for entry in entries], objects)

    def tensor(self, key: str) -> Entry | None:
        """The entry of a tensor."""
        return self.entries.get((TENSOR, key, 0))

    def stored_tensor(self, key: str) -> Entry:
        """The entry of a tensor that the tree names. Raises Refused if there is none."""
        entry = self.tensor(key)
        if entry is None:
            raise lacking(self.manifest, key)
        return entry

    @cached_property
    def tree(self) -> Node:
        """The nested containers of the state, with its leaves."""
        return decode_tree(self.manifest.body.tree)

    def whole_tree(self) -> Node:
        """The tree, checked as a whole. Raises Refused if it names a leaf that the manifest does not hold."""
        for path, leaf in leaves(self.tree):
            key = join(path)
            if self.tensor(key) is None if leaf == TENSOR_LEAF else key not in self.objects:
                raise lacking(self.manifest, key)
        return self.tree

    def keys(self) -> list[str]:
        """All keys of the state: tensors and objects."""
        return [key for kind, key, _ in self.entries if kind == TENSOR] + list(self.objects)

    def parts(self, stored: StoredObject) -> list[Entry]:
        """The entries that hold the large buffers of an object."""
        try:
            return [self.entries[PART, stored.key, index] for index in range(stored.parts)]
        except KeyError as error:
            raise Damaged(f"the manifest lacks a part of object {stored.key!r}", key=stored.key) from error


def lacking(manifest: Manifest, key: str) -> Refused:
    """The error for a leaf of the tree that is not stored."""
    return Refused(f"manifest {manifest.id} names {key!r} in its tree but holds nothing for it", key=key)
