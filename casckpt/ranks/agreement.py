"""Checks that all ranks use the same checkpoint and the same store. Only rank 0 resolves references."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from casckpt.base.groups import grouped
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import Conflict
from casckpt.format.keys import commit_key, transaction_key
from casckpt.format.names import TxId
from casckpt.repository.repository import Repository

_SHOWN = 8
_LAG = 75  # seconds; by default NFS shows another host's new names after at most 60


def named(ref: str | Checkpoint) -> str:
    """Return a reference as a string, for comparison across ranks. Only rank 0 resolves words such as "latest"."""
    return ref if isinstance(ref, str) else repr(ref)


def check_same(given: Sequence[str]) -> None:
    """Raise Conflict on rank 0 unless the values of all ranks are equal. The message lists the values."""
    ranks_of = grouped(range(len(given)), lambda rank: given[rank])
    if len(ranks_of) > 1:
        texts = [f"{text[:200]} on {_ranks(ranks)}" for text, ranks in list(ranks_of.items())[:_SHOWN]]
        more = "; ..." if len(ranks_of) > _SHOWN else ""
        raise Conflict(
            f"ranks name different checkpoints: {'; '.join(texts)}{more}. Pass the same reference on every rank, or "
            "broadcast it from rank 0"
        )


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


@dataclass(frozen=True)
class StoreIdentity:
    """The identity of rank 0's store. Its ``url`` may be different on other hosts."""

    store_id: str
    url: str

    @classmethod
    def of(cls, repo: Repository) -> StoreIdentity:
        """Return the identity to send to the other ranks. Raises NotFound if there is no store."""
        return cls(repo.marker.store_id, repo.storage.url)

    def check(self, repo: Repository) -> None:
        """Raise Conflict if this rank uses a different store, or NotFound if there is no store at its location."""
        if repo.marker.store_id != self.store_id:
            repo.look_again()  # a different store may have replaced it since this rank read its marker
        if repo.marker.store_id != self.store_id:
            raise self._apart(repo, repo.marker.store_id)

    def check_shared(self, repo: Repository, txid: TxId, sleep: Callable[[float], None] = time.sleep) -> None:
        """Raise Conflict if this rank cannot see the save that rank 0 has begun, because its data would be lost.

        Ranks share a bucket if it has the same name. They may or may not share a folder, and they never share memory.
        If new names from other hosts may appear late, this waits for them.
        """
        for _ in range(_LAG if repo.storage.traits.stale else 0):
            if _shows(repo, txid):
                break
            sleep(1.0)
        if not repo.exists():
            raise self._apart(repo, "no store there")
        self.check(repo)
        if not _shows(repo, txid):
            raise self._apart(repo, "a copy of it")

    def _apart(self, repo: Repository, what: str) -> Conflict:
        return Conflict(
            f"this rank uses the store at {repo.storage.url} ({what}), but rank 0 uses the one at {self.url} "
            f"({self.store_id}): all ranks must share one store. A store in memory or on a local disk is a different "
            "store on each host: use a folder or a bucket that all ranks can reach"
        )


def _shows(repo: Repository, txid: TxId) -> bool:
    """Return whether this rank can see the save ``txid`` that rank 0 has begun."""
    keys = transaction_key(txid), commit_key(txid)  # the second exists if the save was revoked
    return repo.exists() and (repo.storage.traits.remote or any(repo.storage.size(key) is not None for key in keys))
