"""How the manifest of a checkpoint is put back from another store that holds the same checkpoint.

The body is the same everywhere, for its hash is the checkpoint's id. Where the blobs lie differs from store to store:
the catalogue of this host may know it, else they are looked for under the names that live checkpoints use, and what is
not there is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from casckpt.errors import CasckptError, NotFound, Refused
from casckpt.format import manifest as format_manifest
from casckpt.format.digest import hex_digest
from casckpt.format.keys import blob_key, manifest_key, uploader_folder
from casckpt.format.manifest import BlobRef, Manifest
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.repository import blobs
from casckpt.repository.commits import Commit, list_commits
from casckpt.repository.repository import Repository
from casckpt.repository.salvage import readable
from casckpt.repository.stock import list_objects
from casckpt.repository.verify import DamagedManifest


def repair_manifests(
    repo: Repository, broken: Iterable[tuple[Commit, CasckptError]], sources: Sequence[Repository]
) -> tuple[list[ManifestId], list[DamagedManifest]]:
    """Put back the manifests of ``broken``: the ids that are right again, and what is still broken."""
    mended, lost = [], []
    for commit, error in broken:
        if _mend(repo, commit, sources):
            mended.append(commit.id)
        else:
            lost.append(DamagedManifest(commit.id, commit.run, commit.step, str(error)))
    return mended, lost


def _mend(repo: Repository, commit: Commit, sources: Sequence[Repository]) -> bool:
    """Put back one. It is marked before places are looked for: from then on nobody takes them from a cache."""
    key = manifest_key(commit.committed.uploader, commit.id)
    mark = commit.committed.uploader, BlobHash(commit.id)
    held = _held(repo, commit)
    for source, manifest in _holders(commit.id, sources):
        blobs.mark_damaged(repo, *mark, "the manifest is gone or damaged")
        refs = held or _places(repo, commit, source, manifest)
        if refs is not None:
            _, places = format_manifest.packed_blobs(refs)
            found, data = format_manifest.encode(manifest.body, places)
            if found == commit.id:
                repo.storage.sweep(uploader_folder(commit.committed.uploader))  # of a repair that was killed
                repo.storage.replace(key, data)
                blobs.mark_repaired(repo, *mark, "put back from another store")
                return True
    return False


def _held(repo: Repository, commit: Commit) -> list[BlobRef] | None:
    """The places as the catalogue has them, if it can be believed: nobody has put others there, and all is there."""
    own = commit.committed.uploader
    known = repo.catalogue.manifest(own, commit.id, commit.committed.time)
    if known is None or (own, commit.id) in blobs.ever_marked(repo):
        return None
    refs = [BlobRef(blob, size, uploader) for uploader, blob, size in known.blobs()]
    sizes = list_objects(repo)
    return refs if all(sizes.get(blob_key(ref.uploader, ref.hash)) == ref.size for ref in refs) else None


def _holders(wanted: ManifestId, sources: Sequence[Repository]) -> Iterator[tuple[Repository, Manifest]]:
    for source in sources:
        same = [commit for commit in list_commits(source).live() if commit.id == wanted]
        for _, manifest in readable(replace(source), same):
            yield source, manifest


def _places(repo: Repository, commit: Commit, source: Repository, manifest: Manifest) -> list[BlobRef] | None:
    """Where the blobs of ``manifest`` lie in ``repo``; None if one can neither be found nor copied."""
    own = commit.committed.uploader
    there = _named(repo)
    sizes = list_objects(repo)
    refs = []
    for ref in manifest.blobs:
        uploader = own if blob_key(own, ref.hash) in sizes else there.get(ref.hash)
        if uploader is None and _copy(repo, own, source, ref):
            uploader = own
        if uploader is None:
            return None
        refs.append(BlobRef(ref.hash, ref.size, uploader))
    return refs


def _named(repo: Repository) -> dict[str, TxId]:
    """Whose folder holds each blob that a live checkpoint names. An orphan could be deleted by a gc at any time."""
    commits = list_commits(repo).live()
    reader = replace(repo)  # with no manifest in memory
    return {ref.hash: ref.uploader for _, manifest in readable(reader, commits) for ref in manifest.blobs}


def _copy(repo: Repository, uploader: TxId, source: Repository, ref: BlobRef) -> bool:
    try:
        data = source.storage.get(blob_key(ref.uploader, ref.hash), limit=ref.size)
    except (NotFound, Refused):
        return False
    if hex_digest(data) != ref.hash:
        return False
    blobs.put(repo, uploader, ref.hash, data)
    repo.storage.settle(uploader_folder(uploader))
    return True
