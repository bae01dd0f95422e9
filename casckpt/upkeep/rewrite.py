"""Rewrites: give a checkpoint new places. Its id, its log, and everything else about it stay.

A rewrite reads the checkpoint's log, and takes the next number as its slot. Its transaction names the slot when it
begins, and commits by creating the `rewritten` record there. Whatever else takes the slot, such as a forget or another
rewrite, makes the rewrite fail.
"""

from __future__ import annotations

from collections.abc import Callable

from casckpt.contents import manifests
from casckpt.errors import Conflict
from casckpt.format.manifest import Encoded
from casckpt.format.names import TxId
from casckpt.format.records import Rewritten
from casckpt.history.commits import Commit, refresh
from casckpt.history.folding import OF_PLACES
from casckpt.history.transactions import begin
from casckpt.repository.repository import Repository


def rewrite(repo: Repository, base: Commit, save: Callable[[TxId], Rewritten]) -> Commit:
    """Make the result of ``save`` the current places of ``base``, and return the new commit.

    ``save`` runs in the transaction whose id it receives. If it names blobs of other checkpoints, it must list commits
    first. It returns the record for the manifest that it has put. This manifest must contain all entries of ``base``,
    except those that the record lists as dropped.

    Raises `Conflict` if ``base`` is not visible, or if another process has changed it since ``base`` was read. Raises
    `StorageError`; the rewrite may still have been committed.
    """
    transaction = begin(repo, base.run, base.step, after=[base.txid], slot=(base.txid, base.number + 1))
    try:
        if not base.visible or refresh(repo, base) != base:
            raise Conflict(f"{base} was not rewritten: another process changed it", checkpoints=(base.id,))
        transaction.rewrite(save(transaction.txid))
    except BaseException as error:
        transaction.abort(f"the rewrite failed: {error}")
        raise
    return refresh(repo, base)


def rewritten(repo: Repository, txid: TxId, commit: Commit, made: Encoded, **statistics: int) -> Rewritten:
    """Upload a manifest. Return the record that makes it the places of ``commit``. Raises `StorageError`."""
    manifests.put_encoded(repo, txid, made, may_prepare=True)
    before = {name: getattr(commit.committed, name) for name in OF_PLACES}
    new = {"head": made.head, "manifest_bytes": len(made.data), **statistics}
    return Rewritten(txid=commit.txid, time=repo.clock(), who=repo.who, by=txid, **before | new)
