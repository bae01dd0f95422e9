"""The stock of objects/, listed without what cannot have changed since this host last looked.

Only the save whose uploader a folder belongs to puts into it, and only a gc deletes from it, never what a live commit
names. So if a commit that was listed before a folder names just what the folder held, no more and no less, that stays
as it was for as long as the commit lives: the save had ended, for what is named was committed, and no gc may touch it.
This commit is the **guard** of the folder; the catalogue keeps it with the sums of what it guards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field

from casckpt.base.lazy import cached_property
from casckpt.base.parallel import in_parallel
from casckpt.contents import manifests
from casckpt.format import notes
from casckpt.format.keys import blob_key, manifest_key, parse_object
from casckpt.format.names import TxId
from casckpt.history.commits import Commit, CommitList
from casckpt.repository.repository import Repository
from casckpt.storage.base import ListedObject

BLOB = "safetensors"
_NOTE = "folders"
_TRIED = 3  # users of a folder, the newest first: an old one that has all of it is rare, and costs a look each time


@dataclass(frozen=True, slots=True)
class Sums:
    """Numbers and bytes of objects."""

    blobs: int = 0
    blob_bytes: int = 0
    manifests: int = 0
    manifest_bytes: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.blobs + other.blobs,
            self.blob_bytes + other.blob_bytes,
            self.manifests + other.manifests,
            self.manifest_bytes + other.manifest_bytes,
        )


@dataclass(frozen=True)
class Inventory:
    """All objects. ``sizes``: bytes by key of those that nobody guards, the only ones that a gc may delete.

    ``guarded``: sums of the others, by uploader. ``loose``: uploaders of folders that were listed and have no guard,
    empty ones too. ``foreign``: keys that no casckpt made; they are left alone.
    """

    sizes: Mapping[str, int] = field(default_factory=dict, repr=False)
    guarded: Mapping[TxId, Sums] = field(default_factory=dict, repr=False)
    foreign: Sequence[str] = ()
    loose: Sequence[TxId] = ()

    def total(self, but: Container[str] = ()) -> Sums:
        """Sum up all objects without those whose keys are in ``but``."""
        loose = ((key, size) for key, size in self.sizes.items() if key not in but)
        return sum(self.guarded.values(), sums_of(loose))

    def has_manifest(self, key: str) -> bool:
        """Tell whether this manifest is there; of a guarded folder, whether it has any."""
        name = parse_object(key)
        guarded = None if name is None else self.guarded.get(name.uploader)
        return key in self.sizes or (guarded is not None and guarded.manifests > 0)


def sums_of(objects: Iterable[tuple[str, int]]) -> Sums:
    """Sum up objects: (key, bytes) of each."""
    counts = {True: [0, 0], False: [0, 0]}
    for key, size in objects:
        count = counts[key.endswith(BLOB)]
        count[0] += 1
        count[1] += size
    return Sums(*counts[True], *counts[False])


def list_objects(repo: Repository) -> dict[str, int]:
    """List all objects, guarded or not, as they are now: bytes by key. One LIST. Raises `StorageError`."""
    listed = repo.storage.list("objects/", known=parse_object)
    return {entry.key: entry.size for entry in listed if parse_object(entry.key) is not None}


@dataclass(frozen=True)
class _Guarded:
    guard: TxId
    sums: Sums


def list_unguarded(repo: Repository, commits: CommitList, *, as_purged: Container[TxId] = ()) -> Inventory:
    """List what is not guarded. ``commits`` were listed before. ``as_purged``: live ones that guard nothing any more.

    Reads the manifests that the catalogue lacks. Raises `StorageError`.
    """
    live = {one.txid: one for one in commits.live() if one.txid not in commits.damaged}
    loose, folders = repo.storage.list_folder("objects")
    uploaders = {folder: TxId(folder.rpartition("/")[2]) for folder in folders}
    before = _kept(repo)
    kept = {name: before[name] for name in uploaders.values() if name in before and before[name].guard in live}
    held = {name: one for name, one in kept.items() if one.guard not in as_purged}
    todo = [folder for folder in folders if uploaders[folder] not in held]
    guards = _Guards(repo, [one for txid, one in live.items() if txid not in as_purged] if todo else ())
    sizes: dict[str, int] = {}
    foreign, unguarded = [entry.key for entry in loose], []
    for folder, entries in zip(todo, _contents(repo, todo), strict=True):
        found = {entry.key: entry.size for entry in entries}
        guard = guards.of(uploaders[folder], found)
        if guard is None:
            foreign += [key for key in found if parse_object(key) is None]
            sizes |= found
            unguarded.append(uploaders[folder])
        else:
            held[uploaders[folder]] = _Guarded(guard, sums_of(found.items()))
    if kept | held != before:
        _keep(repo, kept | held)
    for key in foreign:
        sizes.pop(key, None)
    return Inventory(sizes, {name: one.sums for name, one in held.items()}, tuple(sorted(foreign)), unguarded)


def _contents(repo: Repository, folders: Sequence[str]) -> Iterator[list[ListedObject]]:
    def list_one(folder: str) -> list[ListedObject]:
        return list(repo.storage.list(f"{folder}/", known=parse_object))

    return in_parallel(repo.storage.traits.parallel, list_one, folders, name="list")


class _Guards:
    """Finds a commit, of ``live`` ones, that names all of a folder."""

    def __init__(self, repo: Repository, live: Sequence[Commit]) -> None:
        self._repo = repo
        self._readable = manifests.learn(repo, live)
        self._own = {commit.txid: commit for commit in self._readable}

    def of(self, uploader: TxId, found: Mapping[str, int]) -> TxId | None:
        """Find the guard of the folder of ``uploader``, which holds ``found`` (bytes by key); None if it has none."""
        fitting = (one for one in self._users_of(uploader) if self._names_just(one, uploader, found))
        return next((commit.txid for commit in fitting), None) if found else None

    def _users_of(self, uploader: TxId) -> Iterator[Commit]:
        if uploader in self._own:
            yield self._own[uploader]
        yield from self._users.get(uploader, ())

    def _names_just(self, commit: Commit, uploader: TxId, found: Mapping[str, int]) -> bool:
        """Tell whether ``found`` is what a commit names in the folder of ``uploader``, no more and no less."""
        blobs = manifests.blobs_of(self._repo, commit)
        named = {blob_key(owner, name): size for owner, name, size in blobs if owner == uploader}
        if commit.txid == uploader:
            own = manifest_key(uploader, commit.id)
            named[own] = found.get(own, -1)
        return named == found

    @cached_property
    def _users(self) -> Mapping[TxId, Sequence[Commit]]:
        """Of each uploader the newest commits that name something of it."""
        found: dict[TxId, list[Commit]] = defaultdict(list)
        for commit in sorted(self._readable, key=lambda one: one.txid, reverse=True):
            for uploader in manifests.blob_list(self._repo, commit).uploaders:
                if len(found[uploader]) < _TRIED:
                    found[uploader].append(commit)
        return found


def _kept(repo: Repository) -> dict[TxId, _Guarded]:
    rows = notes.decode(repo.catalogue.note(_NOTE), notes.FOLDERS) or {}
    return {uploader: _Guarded(guard, Sums(*sums)) for uploader, (guard, *sums) in rows.items()}


def _keep(repo: Repository, guarded: Mapping[TxId, _Guarded]) -> None:
    rows = {uploader: (one.guard, *astuple(one.sums)) for uploader, one in guarded.items()}
    repo.catalogue.set_note(_NOTE, notes.encode(rows))
