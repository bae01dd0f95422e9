"""Where a store has blobs, remembered while many checkpoints are copied into it.

What a manifest names never changes, so each is looked at once. Whether its checkpoint lives is asked of a listing each
time: that is what may have changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from casckpt.contents import blobs, manifests
from casckpt.format.names import BlobHash, TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit, CommitList
from casckpt.repository.repository import Repository


class BlobLocations:
    """The same as `casckpt.contents.manifests.locate`, for several questions about blobs of ``names``."""

    def __init__(self, repo: Repository, names: AbstractSet[BlobHash]) -> None:
        self._repo = repo
        self._names = names
        self._seen: set[TxId] = set()
        self._found: dict[BlobHash, tuple[TxId, BlobRef]] = {}

    def locate(self, listed: CommitList, wanted: Mapping[BlobHash, BlobRef]) -> dict[BlobHash, BlobRef]:
        """Find out where the store has blobs that a live one of ``listed`` names. Raises `StorageError`."""
        live = {commit.txid: commit for commit in listed.live()}
        self._look([commit for txid, commit in live.items() if txid not in self._seen])
        named = {name: self._found[name] for name in wanted if name in self._found}
        marked = blobs.damaged_marks(self._repo) if named else set[tuple[TxId, BlobHash]]()
        if any(txid not in live or (ref.uploader, ref.hash) in marked for txid, ref in named.values()):
            return manifests.locate(self._repo, live.values(), wanted)  # it may have another place that counts
        return {name: ref for name, (_, ref) in named.items() if ref.size == wanted[name].size}

    def _look(self, commits: list[Commit]) -> None:
        for commit in manifests.learn(self._repo, commits):
            self._seen.add(commit.txid)
            for uploader, name, size in manifests.blobs_of(self._repo, commit):
                if name in self._names:
                    self._found[name] = commit.txid, BlobRef(name, size, uploader)
