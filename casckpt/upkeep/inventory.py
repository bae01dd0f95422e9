"""An inventory of objects/. It lists only the folders that may have changed since this host's last inventory.

Only one save puts objects into a folder: the save whose transaction id names the folder. Only gc deletes objects from
the folder, and it never deletes an object that a live commit names. Suppose that a commit was read before a folder was
listed, and that it names exactly the objects in that folder. The folder then cannot change while this commit is live.
Such a commit is the **guard** of the folder. The catalogue stores the guard of each folder and the sums of the guarded
objects. `BlobUse` is an index of the blobs that live commits name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from casckpt.base.lazy import cached_property
from casckpt.base.parallel import in_parallel
from casckpt.contents import manifests
from casckpt.format import notes
from casckpt.format.keys import blob_key, manifest_key, parse_object
from casckpt.format.names import BlobHash, TxId
from casckpt.format.sections.columns import Ints
from casckpt.history.commits import Commit, CommitList
from casckpt.repository.repository import Repository
from casckpt.storage.base import ListedObject

BLOB = "safetensors"
_NOTE = "folders"
_TRIED = 3  # users of a folder to compare, newest first; older users rarely name the whole folder


class Sums(NamedTuple):
    """The counts and sizes of objects."""

    blobs: int = 0
    blob_bytes: int = 0
    manifests: int = 0
    manifest_bytes: int = 0


@dataclass(frozen=True)
class Inventory:
    """All objects.

    ``sizes``: the sizes in bytes, by key, of the objects without a guard. gc can delete only these objects.
    ``guarded``: sums of the other objects, by uploader. ``loose``: uploaders of the listed folders without a guard,
    including empty folders. ``foreign``: keys that casckpt did not create. gc ignores them.
    """

    sizes: Mapping[str, int] = field(default_factory=dict, repr=False)
    guarded: Mapping[TxId, Sums] = field(default_factory=dict, repr=False)
    foreign: Sequence[str] = ()
    loose: Sequence[TxId] = ()

    def total(self, but: Container[str] = ()) -> Sums:
        """Return the sums of all objects except those whose keys are in ``but``."""
        loose = ((key, size) for key, size in self.sizes.items() if key not in but)
        return Sums(*map(sum, zip(sums_of(loose), *self.guarded.values(), strict=True)))

    def has_manifest(self, key: str) -> bool:
        """Return whether this manifest exists. In a guarded folder, any manifest counts."""
        name = parse_object(key)
        guarded = None if name is None else self.guarded.get(name.uploader)
        return key in self.sizes or (guarded is not None and guarded.manifests > 0)


def sums_of(objects: Iterable[tuple[str, int]]) -> Sums:
    """Return the sums of objects that are passed as (key, bytes)."""
    counts = {True: [0, 0], False: [0, 0]}
    for key, size in objects:
        count = counts[key.endswith(BLOB)]
        count[0] += 1
        count[1] += size
    return Sums(*counts[True], *counts[False])


def list_objects(repo: Repository) -> dict[str, int]:
    """List all objects, with or without a guard. Returns sizes by key. Makes one LIST. Raises `StorageError`."""
    listed = repo.storage.list("objects/", known=parse_object)
    return {entry.key: entry.size for entry in listed if parse_object(entry.key) is not None}


class _Guarded(NamedTuple):
    guard: TxId
    sums: Sums


def list_unguarded(repo: Repository, commits: CommitList, *, as_purged: Container[TxId] = ()) -> Inventory:
    """List the objects without a guard. ``commits``: an earlier listing. ``as_purged``: places that cannot be guards.

    Reads the manifests that the catalogue lacks. Raises `StorageError`.
    """
    live = {one.places.txid: one for one in commits.placed() if one.txid not in commits.damaged}
    loose, folders = repo.storage.list_folder("objects")
    uploaders = {folder: TxId(folder.rpartition("/")[2]) for folder in folders}
    before = _load_guards(repo)
    kept = {name: before[name] for name in uploaders.values() if name in before and before[name].guard in live}
    held = {name: folder for name, folder in kept.items() if folder.guard not in as_purged}
    todo = [folder for folder in folders if uploaders[folder] not in held]
    guards = _Guards(repo, [commit for txid, commit in live.items() if txid not in as_purged] if todo else ())
    sizes: dict[str, int] = {}
    foreign, unguarded = [entry.key for entry in loose], []
    for folder, entries in zip(todo, _contents(repo, todo), strict=True):
        contents = {entry.key: entry.size for entry in entries}
        guard = guards.of(uploaders[folder], contents)
        if guard is None:
            foreign += [key for key in contents if parse_object(key) is None]
            sizes |= {key: size for key, size in contents.items() if parse_object(key) is not None}
            unguarded.append(uploaders[folder])
        else:
            held[uploaders[folder]] = _Guarded(guard, sums_of(contents.items()))
    if kept | held != before:
        rows = {uploader: (folder.guard, *folder.sums) for uploader, folder in (kept | held).items()}
        repo.catalogue.set_note(_NOTE, notes.encode(rows))
    return Inventory(sizes, {name: folder.sums for name, folder in held.items()}, tuple(sorted(foreign)), unguarded)


def _contents(repo: Repository, folders: Sequence[str]) -> Iterator[list[ListedObject]]:
    def list_one(folder: str) -> list[ListedObject]:
        return list(repo.storage.list(f"{folder}/", known=parse_object))

    return in_parallel(repo.storage.traits.parallel, list_one, folders, name="list")


class _Guards:
    """Finds a commit in ``live`` that names exactly the objects of a folder."""

    def __init__(self, repo: Repository, live: Sequence[Commit]) -> None:
        self._repo = repo
        self._readable = manifests.learn(repo, live)
        self._own = {commit.places.txid: commit for commit in self._readable}

    def of(self, uploader: TxId, contents: Mapping[str, int]) -> TxId | None:
        """Return the guard of the ``uploader``'s folder, which holds ``contents`` (sizes by key), or None."""
        own = [self._own[uploader]] if uploader in self._own else []
        users = (commit for some in (own, self._users.get(uploader, ())) for commit in some) if contents else ()
        return next((commit.places.txid for commit in users if self._names_exactly(commit, uploader, contents)), None)

    def _names_exactly(self, commit: Commit, uploader: TxId, contents: Mapping[str, int]) -> bool:
        """Return whether a commit names exactly ``contents`` in the ``uploader``'s folder."""
        blobs = manifests.blobs_of(self._repo, commit)
        named = {blob_key(owner, name): size for owner, name, size in blobs if owner == uploader}
        if commit.places.txid == uploader:
            own = manifest_key(uploader, commit.id)
            named[own] = contents.get(own, -1)
        return named == contents

    @cached_property
    def _users(self) -> Mapping[TxId, Sequence[Commit]]:
        """Return the newest commits that name blobs of each uploader."""
        users: dict[TxId, list[Commit]] = defaultdict(list)
        for commit in sorted(self._readable, key=lambda commit: commit.places.txid, reverse=True):
            for uploader in manifests.blob_list(self._repo, commit).uploaders:
                if len(users[uploader]) < _TRIED:
                    users[uploader].append(commit)
        return users


def _load_guards(repo: Repository) -> dict[TxId, _Guarded]:
    rows = notes.decode(repo.catalogue.note(_NOTE), notes.FOLDERS) or {}
    return {uploader: _Guarded(guard, Sums(*sums)) for uploader, (guard, *sums) in rows.items()}


class BlobUse:
    """The blobs that live checkpoints name. Each blob has a number and a count of the checkpoints that name it.

    ``refs``: (uploader, hash, bytes) of each blob. ``readable``: the checkpoints whose manifest can be read; the index
    leaves out all others. ``blobs``: the blob numbers of each checkpoint, by the transaction of its places.
    """

    def __init__(self, repo: Repository, live: Iterable[Commit]) -> None:
        """Read the manifests that the catalogue lacks. Raises `StorageError`."""
        self.readable = manifests.learn(repo, live)
        numbers: dict[tuple[TxId, BlobHash, int], int] = {}
        self.blobs: dict[TxId, Ints] = {}
        for commit in self.readable:
            own = [numbers.setdefault(blob, len(numbers)) for blob in manifests.blobs_of(repo, commit)]
            self.blobs[commit.places.txid] = np.unique(np.array(own, np.int64))
        self.refs = list(numbers)
        self.named = {(uploader, blob) for uploader, blob, _ in numbers}
        self.sizes = np.array([size for _, _, size in numbers], np.int64)
        self._users = self.used(self.readable)[1]

    def used(self, commits: Iterable[Commit]) -> tuple[Ints, Ints]:
        """Return the numbers of the blobs that ``commits`` name, and how many of them name each blob."""
        numbers = [self.blobs[one.places.txid] for one in commits if one.places.txid in self.blobs]
        return np.unique(np.concatenate([np.empty(0, np.int64), *numbers]), return_counts=True)

    def alone(self, commits: Iterable[Commit]) -> Sums:
        """Sum the sizes of the blobs that only ``commits`` use."""
        numbers, counts = self.used(commits)
        sizes = self.sizes[numbers[counts == self._users[numbers]]]
        return Sums(blobs=len(sizes), blob_bytes=int(sizes.sum()))
