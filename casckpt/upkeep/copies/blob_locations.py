"""A cache of blob locations in a target store, for copies of many checkpoints.

A manifest's blobs never change, so each manifest is read only once. Its checkpoint may be purged, so each call needs a
new listing.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from casckpt.contents import blobs, manifests
from casckpt.format.names import BlobHash, TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import CommitList
from casckpt.repository.repository import Repository


class BlobLocations:
    """A cached `casckpt.contents.manifests.locate`, for repeated lookups of the blobs ``names``."""

    def __init__(self, repo: Repository, names: AbstractSet[BlobHash]) -> None:
        self._repo = repo
        self._names = names
        self._seen: set[TxId] = set()
        self._found: dict[BlobHash, tuple[TxId, BlobRef]] = {}

    def locate(self, listed: CommitList, wanted: Mapping[BlobHash, BlobRef]) -> dict[BlobHash, BlobRef]:
        """Return the locations of the blobs that a live commit of ``listed`` names. Raises `StorageError`."""
        live = {commit.txid: commit for commit in listed.live()}
        for commit in manifests.learn(self._repo, [one for txid, one in live.items() if txid not in self._seen]):
            self._seen.add(commit.txid)
            blobs_of = manifests.blobs_of(self._repo, commit)
            refs = (BlobRef(name, size, uploader) for uploader, name, size in blobs_of if name in self._names)
            self._found |= {ref.hash: (commit.txid, ref) for ref in refs}
        named = {name: self._found[name] for name in wanted if name in self._found}
        marked = blobs.damaged_marks(self._repo) if named else set[tuple[TxId, BlobHash]]()
        if any(txid not in live or (ref.uploader, ref.hash) in marked for txid, ref in named.values()):
            return manifests.locate(self._repo, live.values(), wanted)  # another location may still be readable
        return {name: ref for name, (_, ref) in named.items() if ref.size == wanted[name].size}
