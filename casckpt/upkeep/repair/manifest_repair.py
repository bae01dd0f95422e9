"""Repair of manifests: put back to the byte, out of another store that holds the same checkpoint.

What was saved is the same everywhere; where the blobs lie differs from store to store. The catalogue of this host may
know it, else a guess is made, and the head that the commit record names tells whether it is right. Where none is, the
checkpoint is rewritten, with places that are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from casckpt.contents import blobs, manifests
from casckpt.errors import CasckptError, Conflict, Damaged, Gone, Refused
from casckpt.format.draft import placed
from casckpt.format.keys import manifest_key, parse_object, uploader_folder
from casckpt.format.manifest import Manifest
from casckpt.format.names import ManifestId, TxId
from casckpt.format.records import Committed
from casckpt.format.sections.blobs import BlobRef, encode_blobs
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.plan.lots import grouped
from casckpt.repository.fetching import Spoilt, fetch
from casckpt.repository.repository import Repository
from casckpt.upkeep.inventory import BLOB, list_objects
from casckpt.upkeep.repair.cell_sources import readable
from casckpt.upkeep.repair.verify import DamagedManifest
from casckpt.upkeep.rewrite import record_of, rewrite


def repair_manifests(
    repo: Repository, broken: Iterable[tuple[Commit, CasckptError]], sources: Sequence[Repository]
) -> tuple[list[ManifestId], list[tuple[Commit, DamagedManifest]]]:
    """Put back the manifests of ``broken``: the ids that are right again, and what was not put back."""
    mended, lost = [], []
    for commit, error in broken:
        if _mend(repo, commit, sources):
            mended.append(commit.id)
        else:
            lost.append((commit, DamagedManifest(commit.id, commit.run, commit.step, str(error))))
    return mended, lost


def _mend(repo: Repository, commit: Commit, sources: Sequence[Repository]) -> bool:
    for source, manifest in _holders(commit.id, sources):
        try:
            data = _same_bytes(repo, commit, manifest)
            if data is None:
                return _rewrite(repo, commit, source, manifest)
        except (Conflict, Damaged, Gone, Refused):  # of the source, or somebody forgot the checkpoint just now
            continue
        repo.storage.sweep(uploader_folder(commit.txid))  # of a repair that was killed
        repo.storage.replace(manifest_key(commit.txid, commit.id), data)
        return True
    return False


def _holders(wanted: ManifestId, sources: Sequence[Repository]) -> Iterator[tuple[Repository, Manifest]]:
    for source in sources:
        same = [commit for commit in list_commits(source).live() if commit.id == wanted]
        for _, manifest in readable(source.fresh(), same):
            yield source, manifest


def _same_bytes(repo: Repository, commit: Commit, manifest: Manifest) -> bytes | None:
    """Return the bytes that were lost, which have the head that the record names; None if they cannot be had."""
    wanted = commit.committed.head
    known = repo.catalogue.blobs(commit.txid, wanted)
    for lists in (manifest.blob_list.data, known, _guessed(repo, commit, manifest)):
        made = None if lists is None else placed(manifest, lists)
        if made is not None and made.head == wanted:
            return made.data
    return None


def _guessed(repo: Repository, commit: Commit, manifest: Manifest) -> bytes:
    """Guess where the blobs lie: under the checkpoint's own uploader, or wherever there is one of this name."""
    own = commit.txid
    names = (name for key in sorted(list_objects(repo)) if (name := parse_object(key)) and name.kind == BLOB)
    by_hash = grouped(names, lambda name: name.hash)
    places = ([name.uploader for name in by_hash.get(ref.hash, ())] for ref in manifest.blobs)
    found = (own if own in there or not there else there[0] for there in places)
    return encode_blobs(replace(ref, uploader=uploader) for ref, uploader in zip(manifest.blobs, found, strict=True))


def _rewrite(repo: Repository, commit: Commit, source: Repository, manifest: Manifest) -> bool:
    """Rewrite a checkpoint with places that are known. False if a blob of it cannot be had."""

    def save(txid: TxId, listed: CommitList) -> Committed | None:
        wanted = {ref.hash: ref for ref in manifest.blobs}
        others = [one for one in listed.live() if one.txid != commit.txid]
        there = manifests.locate(repo, others, wanted)
        missing = [ref for name, ref in wanted.items() if name not in there]
        if not all(_copy(repo, txid, source, ref) for ref in missing):
            return None
        repo.storage.settle(uploader_folder(txid))
        refs = [
            replace(ref, uploader=there[ref.hash].uploader if ref.hash in there else txid) for ref in manifest.blobs
        ]
        return record_of(repo, txid, commit, placed(manifest, encode_blobs(refs)))

    return rewrite(repo, commit, save) is not None


def _copy(repo: Repository, uploader: TxId, source: Repository, ref: BlobRef) -> bool:
    try:
        data = fetch(source.storage, ref, memoryview(bytearray(ref.size)))
    except (Spoilt, Refused):
        return False
    blobs.put(repo, uploader, ref.hash, data)
    return True
