"""The contents of a checkpoint by key: tensors, objects and attachments, and the tree that nests them.

Works without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from casckpt.base.lazy import cached_property
from casckpt.contents import manifests
from casckpt.contents.signatures import get_trusted
from casckpt.errors import Damaged, InvalidInput, Refused
from casckpt.format.extents import ExtentTable
from casckpt.format.manifest import Manifest
from casckpt.format.plain_codecs import Codec
from casckpt.format.regions import whole
from casckpt.format.sections.index import ATTACHMENT, PART, TENSOR, Entry, StoredObject
from casckpt.format.sections.recipe import NOTE as RECIPE
from casckpt.format.tree import TENSOR as TENSOR_LEAF
from casckpt.format.tree import Node, Wrapper, decode_tree, join, leaves
from casckpt.history.commits import Commit
from casckpt.plan.reads import covers
from casckpt.repository.repository import Repository


class Contents:
    """The contents of a checkpoint for one rank.

    If each rank saved its own value, the contents include this rank's value, or rank 0's value if this rank has none.
    ``extensions``: types that the tree may contain in addition to plain data, such as torch types.
    """

    def __init__(self, manifest: Manifest, rank: int = 0, extensions: Sequence[Codec] = ()) -> None:
        self.manifest, self._extensions = manifest, extensions
        self.tensors: dict[str, Entry] = {}
        """The tensor entries, by key."""
        self.objects: dict[str, StoredObject] = {}
        self.attachments: dict[str, StoredObject | Entry] = {one.key: one for one in manifest.body.attachments}
        """The attachments, by name. Large attachments are entries."""
        self.per_rank: dict[str, list[int]] = {}
        """The ranks that saved their own value, by key."""
        self._parts: dict[tuple[str, int], Entry] = {}
        self._single = bytearray(len(manifest.entries))
        for entry in manifest.entries:
            self._add(entry, is_own=entry.rank == rank)
        for stored in manifest.objects:
            if stored.rank is not None:
                self.per_rank.setdefault(stored.key, []).append(stored.rank)
            if stored.key not in self.objects or stored.rank == rank:
                self.objects[stored.key] = stored

    def _add(self, entry: Entry, *, is_own: bool) -> None:
        key = entry.key
        if entry.kind == TENSOR:
            if key not in self.tensors or is_own:
                self.tensors[key] = entry
            if entry.rank is not None:
                self.per_rank.setdefault(key, []).append(entry.rank)
        elif entry.kind == ATTACHMENT:
            self.attachments.setdefault(key, entry)
        elif entry.kind == PART and ((key, entry.index) not in self._parts or is_own):
            self._parts[key, entry.index] = entry

    @classmethod
    def open(cls, repo: Repository, commit: Commit, rank: int = 0, extensions: Sequence[Codec] = ()) -> Self:
        """Read the contents of a checkpoint. Raises the errors of `casckpt.contents.signatures.get_trusted`."""
        return cls(get_trusted(repo, commit), rank, extensions)

    def adopt(self, repo: Repository, commit: Commit) -> None:
        """Cache the manifest that another rank has sent. Its missing parts are read from ``repo``."""
        manifests.adopt(repo, commit, self.manifest)

    @property
    def where(self) -> str:
        """The checkpoint as RUN@STEP, for messages."""
        return f"{self.manifest.body.run}@{self.manifest.body.step}"

    def keys(self) -> list[str]:
        """Return all keys of the state: tensors and objects."""
        return [*self.tensors, *self.objects]

    def tensor(self, key: str) -> Entry:
        """Return the entry of a tensor that the tree names. Raises Refused if it does not exist."""
        if key not in self.tensors:
            raise self.lacks(key)
        return self.tensors[key]

    def lacks(self, key: str) -> Refused:
        """Return the error for a tree leaf that is not stored."""
        return Refused(f"manifest {self.manifest.id} names {key!r} in its tree, but has no entry for it", key=key)

    def parts(self, stored: StoredObject) -> list[Entry]:
        """Return the entries that hold the large buffers of an object."""
        try:
            return [self._parts[stored.key, index] for index in range(stored.parts)]
        except KeyError as error:
            raise Damaged(f"the manifest lacks a part of object {stored.key!r}", key=stored.key) from error

    @cached_property
    def tree(self) -> Node:
        """The nested containers of the state, and its leaves. Raises the error of `check_loads`."""
        self.check_loads()
        return decode_tree(self.manifest.body.tree, self._extensions)

    def check_loads(self) -> None:
        """Raise InvalidInput for the files of another program."""
        if RECIPE in self.manifest.body.notes:
            raise InvalidInput(
                f"{self.where} holds the files of another program: get them back with `casckpt export --format files`. "
                "For its tensors, import these without --format files"
            )

    @property
    def wrappers(self) -> dict[str, Wrapper]:
        """The outermost wrappers, by key."""
        return self.manifest.wrappers

    @property
    def outer(self) -> dict[str, str]:
        """For each tensor in a wrapper, the key of that wrapper, by the tensor's key."""
        return self.manifest.outer

    def is_in_parts(self, key: str) -> bool:
        """Return whether a key is a wrapper that is stored in parts."""
        return key in self.wrappers and self.wrappers[key].in_parts

    def check_no_wrappers(self, program: str) -> None:
        """Raise InvalidInput if the checkpoint has wrappers, which ``program`` cannot hold."""
        for key in self.wrappers:
            raise InvalidInput(
                f"{key!r} in {self.where} consists of other tensors, which {program} cannot hold; load it with "
                "store.load",
                key=key,
            )

    def whole_tree(self) -> Node:
        """Return the tree. Raises Refused if it names a leaf that the manifest does not have."""
        for path, leaf in leaves(self.tree):
            key = join(path)
            if key not in (self.tensors if leaf == TENSOR_LEAF else self.objects):
                raise self.lacks(key)
        return self.tree

    def ready(self, keys: Iterable[str]) -> None:
        """Fetch the manifest's parts for these keys, in few reads. Call this before you use the keys."""
        numbers, objects = list[int](), list[int]()
        for key in keys:
            if (entry := self.tensors.get(key)) is not None:
                numbers.append(entry.number)
            if (stored := self.objects.get(key)) is not None:
                objects.append(stored.number)
                numbers += [part.number for part in self.parts(stored)]
        self.manifest.ready(numbers, objects)
        rows = np.array(numbers, np.int64)
        np.frombuffer(self._single, np.bool_)[rows] = self.manifest.whole_cells(rows).is_whole

    def is_single_cell(self, entry: Entry) -> bool:
        """Return whether an entry is known to be complete, because it is a single cell. Call `ready` first."""
        return self._single[entry.number] != 0

    def extents(self, entry: Entry) -> ExtentTable:
        """Return the extents of a complete entry. Call this before you allocate memory for the entry.

        Raises Damaged for an entry with holes, because its shape may be hostile. Raises the errors of
        `Manifest.extents`.
        """
        table = self.manifest.extents(entry)
        if not covers(table, whole(entry.shape)):
            raise Damaged(f"{self.where} holds only a part of {entry.key!r} ({entry.nbytes} bytes)", key=entry.key)
        return table

    def check_whole(self, entries: Sequence[Entry]) -> None:
        """Raise the errors of `extents` for all entries, with few reads."""
        self.manifest.ready([entry.number for entry in entries], ())
        for entry in entries:
            self.extents(entry)
