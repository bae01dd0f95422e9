"""Repair of manifests, each put back from another store that holds the same checkpoint.

The body is the same everywhere, for its hash is the checkpoint's id. Where the blobs lie differs from store to store:
the catalogue of this host may know it, else they are looked for under the names that live checkpoints use, and what is
not there is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from casckpt.errors import CasckptError, Refused
from casckpt.format import manifest as format_manifest
from casckpt.format.keys import blob_key, manifest_key, uploader_folder
from casckpt.format.manifest import BlobRef, Manifest
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.repository import blobs, manifests
from casckpt.repository.commits import Commit, list_commits
from casckpt.repository.fetching import Spoilt, fetch
from casckpt.repository.repository import Repository
from casckpt.upkeep.repair.salvage import readable
from casckpt.upkeep.repair.verify import DamagedManifest
from casckpt.upkeep.stock import list_objects


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
    """Return the places in the catalogue, if it can be believed: nobody has put others there, and all is there."""
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
        for _, manifest in readable(source.fresh(), same):
            yield source, manifest


def _places(repo: Repository, commit: Commit, source: Repository, manifest: Manifest) -> list[BlobRef] | None:
    """Find the blobs of ``manifest`` in ``repo``, or copy them there; None if one cannot be had."""
    own = commit.committed.uploader
    there = manifests.locate(repo, list_commits(repo).live(), {ref.hash: ref for ref in manifest.blobs}, damaged=True)
    sizes = list_objects(repo)
    refs = []
    for ref in manifest.blobs:
        found = replace(ref, uploader=own)
        if blob_key(own, ref.hash) not in sizes:
            found = there.get(ref.hash, found)
            if ref.hash not in there and not _copy(repo, own, source, ref):
                return None
        refs.append(found)
    return refs


def _copy(repo: Repository, uploader: TxId, source: Repository, ref: BlobRef) -> bool:
    try:
        data = fetch(source.storage, ref, memoryview(bytearray(ref.size)))
    except (Spoilt, Refused):
        return False
    blobs.put(repo, uploader, ref.hash, data)
    repo.storage.settle(uploader_folder(uploader))
    return True
