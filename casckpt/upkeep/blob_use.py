"""An index of the blobs that live checkpoints use. `usage`, `footprint`, `history`, `thin` and `gc` use it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from casckpt.contents import manifests
from casckpt.format.columns import Ints
from casckpt.format.names import BlobHash, TxId
from casckpt.history.commits import Commit
from casckpt.repository.repository import Repository
from casckpt.upkeep.inventory import Sums


class BlobUse:
    """The blobs that live checkpoints name. Each blob has a number and a count of the checkpoints that name it.

    ``refs``: (uploader, hash, bytes) of each blob. ``names``: "uploader/hash" of each blob. ``readable``: the
    checkpoints whose manifest can be read; the index leaves out all others. ``blobs``: the blob numbers of each
    checkpoint, by transaction.
    """

    def __init__(self, repo: Repository, live: Iterable[Commit]) -> None:
        """Read the manifests that the catalogue lacks. Raises `StorageError`."""
        self.readable = manifests.learn(repo, live)
        numbers: dict[tuple[TxId, BlobHash, int], int] = {}
        self.blobs: dict[TxId, Ints] = {}
        for commit in self.readable:
            own = [numbers.setdefault(blob, len(numbers)) for blob in manifests.blobs_of(repo, commit)]
            self.blobs[commit.txid] = np.unique(np.array(own, np.int64))
        self.refs = list(numbers)
        self.names = [f"{uploader}/{blob}" for uploader, blob, _ in numbers]
        self.named = {(uploader, blob) for uploader, blob, _ in numbers}
        self.sizes = np.array([size for _, _, size in numbers], np.int64)
        self._users = self.used(self.blobs)[1]

    def used(self, txids: Iterable[TxId]) -> tuple[Ints, Ints]:
        """Return the numbers of the blobs that ``txids`` name, and how many of these transactions name each blob."""
        numbers = [self.blobs[txid] for txid in txids if txid in self.blobs]
        return np.unique(np.concatenate([np.empty(0, np.int64), *numbers]), return_counts=True)

    def alone(self, txids: Iterable[TxId]) -> Sums:
        """Sum the sizes of the blobs that only ``txids`` use."""
        numbers, counts = self.used(txids)
        sizes = self.sizes[numbers[counts == self._users[numbers]]]
        return Sums(blobs=len(sizes), blob_bytes=int(sizes.sum()))

    def new(self, commits: Iterable[Commit]) -> Iterator[tuple[Commit, Ints]]:
        """Yield each commit with the numbers of the blobs that no earlier commit in ``commits`` names."""
        seen = np.zeros(len(self.refs), bool)
        for commit in commits:
            own = self.blobs[commit.txid]
            yield commit, own[~seen[own]]
            seen[own] = True

    def bytes_new(self) -> dict[TxId, int]:
        """Return, in ``readable`` order, the size of the blobs that no earlier checkpoint names."""
        return {commit.txid: int(self.sizes[new].sum()) for commit, new in self.new(self.readable)}
