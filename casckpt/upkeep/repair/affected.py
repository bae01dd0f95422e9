"""Finds the keys and checkpoints that need a damaged blob."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from casckpt.contents import manifests
from casckpt.errors import Damaged, Gone, Refused
from casckpt.format.manifest import Manifest
from casckpt.format.names import BlobHash, TxId
from casckpt.history.commits import Commit, exists
from casckpt.repository.repository import Repository
from casckpt.upkeep.repair.blob_check import Checked


@dataclass(frozen=True)
class DamagedBlob:
    """A damaged blob, with the keys and checkpoints that need it.

    ``keys``: tensors, objects and attachments with bytes in the blob, intact or not. ``checkpoints``: ids of the live
    checkpoints with such keys. ``needed_by``: one commit for each of these.
    """

    blob: BlobHash
    uploader: TxId
    keys: tuple[str, ...]
    checkpoints: tuple[str, ...]
    why: str
    needed_by: tuple[Commit, ...] = ()


@dataclass
class _Users:
    """The keys and checkpoints that need a wrong blob."""

    blob: Checked
    keys: set[str] = field(default_factory=set)
    needed_by: list[Commit] = field(default_factory=list)


def describe(repo: Repository, commits: Sequence[Commit], wrong: Sequence[Checked]) -> list[DamagedBlob]:
    """Return what needs the ``wrong`` blobs. Omit blobs that only purged checkpoints and trimmed places used.

    Raises `StorageError`.
    """
    every = {(one.ref.uploader, one.ref.hash): _Users(one) for one in wrong}
    used = set[tuple[TxId, BlobHash]]()
    for commit in commits if every else ():
        try:
            manifest = manifests.get(repo, commit)
            names = {number: (ref.uploader, ref.hash) for number, ref in enumerate(manifest.blobs)}
            names = {number: name for number, name in names.items() if name in every}
            if not names or not exists(repo, commit):
                continue
            keys = keys_of(manifest, names)
        except (Damaged, Gone, Refused):
            continue
        used.update(names.values())
        for number, name in names.items():
            if keys[number]:
                every[name].keys |= keys[number]
                every[name].needed_by.append(commit)
    return [_described(every[name]) for name in sorted(used)]


def keys_of(manifest: Manifest, wanted: Iterable[int]) -> dict[int, set[str]]:
    """Return the keys of the entries that need each blob in ``wanted`` (numbers). Raises the errors of reading."""
    keys: dict[int, set[str]] = {number: set() for number in wanted}
    manifest.ready(objects=())
    for entry in manifest.held:
        try:
            links = (link for extent in manifest.extents(entry).extents for link in extent.chain)
            needed = {link.blob for link in links} & keys.keys()
        except (Damaged, Refused):
            needed = set(keys)  # unreadable extents, so the entry may need each of the blobs
        for number in needed:
            keys[number].add(entry.key)
    return keys


def _described(users: _Users) -> DamagedBlob:
    ref, needed_by = users.blob.ref, tuple(users.needed_by)
    ids = tuple(commit.id for commit in needed_by)
    return DamagedBlob(ref.hash, ref.uploader, tuple(sorted(users.keys)), ids, users.blob.why, needed_by)
