"""Which checkpoints name which blobs: what some of them use, and what nobody else does."""

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
    """The blobs that live checkpoints name, numbered, and how many name each.

    ``refs``: (uploader, hash, bytes) of each blob; ``names``: "uploader/hash". ``readable``: the checkpoints that
    count, whose manifests can be read; ``blobs``: the numbers of the blobs of each, by transaction.
    """

    def __init__(self, repo: Repository, live: Iterable[Commit]) -> None:
        """Read what the catalogue does not know. Raises `StorageError`."""
        self.readable = manifests.learn(repo, live)
        numbers: dict[tuple[TxId, BlobHash, int], int] = {}
        self.blobs: dict[TxId, Ints] = {}
        for commit in self.readable:
            mine = [numbers.setdefault(blob, len(numbers)) for blob in manifests.blobs_of(repo, commit)]
            self.blobs[commit.txid] = np.unique(np.array(mine, np.int64))
        self.refs = list(numbers)
        self.names = [f"{uploader}/{blob}" for uploader, blob, _ in numbers]
        self.named = {(uploader, blob) for uploader, blob, _ in numbers}
        self.sizes = np.array([size for _, _, size in numbers], np.int64)
        self._users = self.used(self.blobs)[1]

    def used(self, some: Iterable[TxId]) -> tuple[Ints, Ints]:
        """The numbers of the blobs that any of these names, and how many of these name each."""
        mine = [self.blobs[txid] for txid in some if txid in self.blobs]
        return np.unique(np.concatenate([np.empty(0, np.int64), *mine]), return_counts=True)

    def alone(self, some: Iterable[TxId]) -> Sums:
        """Sum up the blobs that nobody but these names."""
        numbers, counts = self.used(some)
        sizes = self.sizes[numbers[counts == self._users[numbers]]]
        return Sums(blobs=len(sizes), blob_bytes=int(sizes.sum()))

    def new(self, commits: Iterable[Commit]) -> Iterator[tuple[Commit, Ints]]:
        """Give of each of these the blobs that none before it names."""
        seen = np.zeros(len(self.refs), bool)
        for commit in commits:
            mine = self.blobs[commit.txid]
            yield commit, mine[~seen[mine]]
            seen[mine] = True

    def bytes_new(self) -> dict[TxId, int]:
        """Bytes of the blobs of each checkpoint that none before it names, in the order in which they were given."""
        return {commit.txid: int(self.sizes[new].sum()) for commit, new in self.new(self.readable)}
