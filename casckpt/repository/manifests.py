"""Manifests as objects of a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from casckpt.errors import Conflict, Damaged, InvalidInput, NotFound, Refused, StorageError
from casckpt.format import manifest as format_manifest
from casckpt.format.keys import manifest_key
from casckpt.format.manifest import MAX_MANIFEST_BYTES, BlobRef, BlobUploaders, Manifest, ManifestBody
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.parallel import in_parallel
from casckpt.repository import blobs
from casckpt.repository.catalogue import ManifestSummary
from casckpt.repository.commits import Commit, list_commits, refresh
from casckpt.repository.repository import Repository
from casckpt.storage.base import AlreadyExists


def put(repo: Repository, uploader: TxId, body: ManifestBody, places: BlobUploaders) -> ManifestId:
    """Write a manifest, durably, under ``uploader``; one that is there already is ours. Its id.

    Raises `StorageError`, `InvalidInput` if it is too large or breaks the limits of the format.
    """
    found, data = format_manifest.encode(body, places)
    key = manifest_key(uploader, found)
    manifest = Manifest(found, body, places)  # refuses what nobody could read
    if len(data) > MAX_MANIFEST_BYTES:
        raise InvalidInput(f"the manifest of {body.run}@{body.step} is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        repo.storage.put(key, data)
    except AlreadyExists:
        if repo.storage.size(key) != len(data):
            raise StorageError(f"{key} is there with another size; save again", key=key) from None
    repo.manifests.add(uploader, manifest, len(data))
    return found


def get(repo: Repository, commit: Commit) -> Manifest:
    """Return the manifest of a checkpoint, verified; from memory if it was used just now.

    Raises `Damaged` if it is gone or not what was written, `Refused` if it is not usable, `Conflict` if the checkpoint
    was purged since ``commit`` was read; `StorageError`.
    """
    try:
        return _read(repo, commit)
    except Damaged:
        if commit.live and not refresh(repo, commit).live:
            message = f"checkpoint {commit} was purged just now; choose another one (`casckpt list`)"
            raise Conflict(message, checkpoints=(commit.id,)) from None
        raise


def _read(repo: Repository, commit: Commit) -> Manifest:
    uploader, found = commit.committed.uploader, commit.id
    held = repo.manifests.get(uploader, found)
    if held is not None:
        return held
    key = manifest_key(uploader, found)
    try:
        data = repo.storage.get(key, limit=MAX_MANIFEST_BYTES)
        manifest = format_manifest.decode(data, found)
    except (NotFound, Damaged) as error:
        why = "is gone" if isinstance(error, NotFound) else "is damaged"
        message = (
            f"the manifest of checkpoint {commit.run}@{commit.step} ({found}) {why}: {key}. "
            "Put it back with `casckpt repair`, or give it up: `casckpt forget`, and `casckpt gc --min-age 0`"
        )
        raise Damaged(message, key=key, checkpoints=(found,)) from error
    except Refused as error:
        raise Refused(f"checkpoint {commit.run}@{commit.step}: {error}", key=key, checkpoints=(found,)) from error
    repo.manifests.add(uploader, manifest, len(data))
    return manifest


def summary(repo: Repository, commit: Commit) -> ManifestSummary:
    """Return what a manifest names, from the catalogue or the store. Raises what `get` raises, never `Conflict`."""
    known = repo.catalogue.manifest(*_row(commit))
    if known is None:
        known = _summary(commit, _read(repo, commit))
        repo.catalogue.add_manifest(known)
    return known


def blobs_of(repo: Repository, commit: Commit) -> list[tuple[TxId, BlobHash, int]]:
    """Return (uploader, hash, bytes) of every blob of a checkpoint. Raises `Damaged`, `Refused`, `StorageError`."""
    return summary(repo, commit).blobs()


def learn(repo: Repository, commits: Iterable[Commit]) -> list[Commit]:
    """Bring the manifests that the catalogue lacks into it, several at once; the commits whose manifest can be read.

    One LIST of marks: a manifest that has one is read again, for a repair may have put it back with other places.
    Raises `StorageError`.
    """
    wanted = list(commits)
    marked = blobs.ever_marked(repo) if wanted else frozenset()
    reader = repo.fresh()

    def is_known(commit: Commit) -> bool:
        uploader, found, time = _row(commit)
        try:
            if (uploader, found) in marked:
                repo.catalogue.drop_manifest(uploader, found, time)
                repo.catalogue.add_manifest(_summary(commit, _read(reader, commit)))
            summary(repo, commit)
        except (Damaged, Refused):
            return False
        return True

    known = in_parallel(repo.storage.traits.requests, is_known, wanted)
    return [commit for commit, is_there in zip(wanted, known, strict=True) if is_there]


def locate(
    repo: Repository, commits: Iterable[Commit], wanted: Mapping[BlobHash, BlobRef], *, damaged: bool = False
) -> dict[BlobHash, BlobRef]:
    """Find out where ``repo`` has blobs: by hash, as far as one of ``commits``, which are live, names them.

    An orphan does not count, for a gc could delete it at any time. ``damaged``: one that is marked as damaged does.
    Raises `StorageError`.
    """
    marked = set() if damaged else blobs.damaged_marks(repo)
    heads = np.array([int.from_bytes(bytes.fromhex(name[:16]), "little") for name in wanted], dtype="<u8")
    found = (ref for commit in learn(repo, commits) for ref in _named(repo, commit, heads))
    return {
        ref.hash: ref
        for ref in found
        if ref.hash in wanted and wanted[ref.hash].size == ref.size and (ref.uploader, ref.hash) not in marked
    }


def _named(repo: Repository, commit: Commit, heads: npt.NDArray[np.uint64]) -> Iterator[BlobRef]:
    """Return the blobs of a checkpoint whose hash begins as one of ``heads``; all the others cost next to nothing."""
    known = summary(repo, commit)
    column = np.frombuffer(known.hashes, dtype="<u8").reshape(-1, 4)[:, 0]
    numbers = np.flatnonzero(np.isin(column, heads)).tolist()
    if numbers:
        named = known.blobs()
        for number in numbers:
            uploader, name, size = named[number]
            yield BlobRef(name, size, uploader)


def reindex(repo: Repository) -> int:
    """Make the catalogue anew from the store; how many live checkpoints it holds then.

    Checkpoints whose manifest cannot be read are left out: gc and verify tell of them. Raises `StorageError`, also
    where the catalogue cannot be written.
    """
    repo.catalogue.reindex()
    known = learn(repo, list_commits(repo).live())
    if repo.catalogue.is_off:
        raise StorageError(f"{repo.catalogue.path} cannot be written: make room there, or name another --cache-dir")
    return len(known)


def _row(commit: Commit) -> tuple[TxId, ManifestId, int]:
    """Return what the catalogue knows a manifest by."""
    return commit.committed.uploader, commit.id, commit.committed.time


def _summary(commit: Commit, manifest: Manifest) -> ManifestSummary:
    places, stored = manifest.places(), manifest.body.blobs
    return ManifestSummary(
        uploader=commit.committed.uploader,
        manifest=manifest.id,
        committed_at=commit.committed.time,
        tensors=len(manifest.tensors),
        nbytes=sum(entry.nbytes for entry in manifest.body.entries),
        hashes=stored.hashes,
        sizes=stored.sizes,
        uploaders=tuple(TxId(name) for name in places.uploaders),
        index=places.index,
    )
