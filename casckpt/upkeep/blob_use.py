"""An index of the blobs that live checkpoints use. `sizes`, `thin` and `gc` use it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from casckpt.contents import manifests
from casckpt.format.names import BlobHash, TxId
from casckpt.format.sections.columns import Ints
from casckpt.history.commits import Commit
from casckpt.repository.repository import Repository
from casckpt.upkeep.inventory import Sums


class BlobUse:
    """The blobs that live checkpoints name. Each blob has a number and a count of the checkpoints that name it.

    ``refs``: (uploader, hash, bytes) of each blob. ``names``: "uploader/hash" of each blob. ``readable``: the
    checkpoints whose manifest can be read; the index leaves out all others. ``blobs``: the blob numbers of each
    checkpoint, by the transaction of its places.
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
        self.names = [f"{uploader}/{blob}" for uploader, blob, _ in numbers]
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

    def new(self, commits: Iterable[Commit]) -> Iterator[tuple[Commit, Ints]]:
        """Yield each commit with the numbers of the blobs that no earlier commit in ``commits`` names."""
        seen = np.zeros(len(self.refs), bool)
        for commit in commits:
            own = self.blobs[commit.places.txid]
            yield commit, own[~seen[own]]
            seen[own] = True

    def bytes_new(self) -> dict[TxId, int]:
        """Return, in ``readable`` order, the size of the blobs that no earlier checkpoint names."""
        return {commit.places.txid: int(self.sizes[new].sum()) for commit, new in self.new(self.readable)}
