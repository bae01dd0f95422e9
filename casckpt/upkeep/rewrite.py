"""Rewrites: a second commit of a checkpoint, with its cells in different blobs. The id then names the new commit.

A rewrite replaces its base commit when a `replaced` record takes the next number in the base's log. The rewriting
process takes this number from its listing of commits. Therefore, if several processes forget or rewrite the checkpoint
at the same time, exactly one of them succeeds. The other processes forget their own commits. A put whose response was
lost may still take effect later. In that case, the process fills the number itself before it raises an error. If the
process has died, gc fills the number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from casckpt.contents import manifests
from casckpt.errors import CasckptError, Conflict, StorageError
from casckpt.format.keys import commit_key
from casckpt.format.manifest import Encoded
from casckpt.format.names import TxId
from casckpt.format.records import Committed, Replaced, changed
from casckpt.history.commits import Commit, CommitList, forget, keep, list_commits, refresh
from casckpt.history.folding import VOID
from casckpt.history.transactions import begin
from casckpt.repository.repository import Repository

log = logging.getLogger(__name__)


def rewrite(repo: Repository, base: Commit, save: Callable[[TxId, CommitList], Committed | None]) -> Commit | None:
    """Commit the result of ``save`` in place of ``base``. If ``save`` returns None, change nothing and return None.

    The transaction begins before ``save`` receives a listing of commits. Therefore, ``save`` may reuse the blobs that
    these commits name. It returns the record for the new blobs. The new manifest must contain all entries of ``base``,
    except those that the record lists as dropped.

    Raises `Conflict` if ``base`` is no longer visible, or if another process changed it first. Raises `StorageError`;
    the rewrite may still have been committed.
    """
    transaction = begin(repo, base.run, base.step, after=[base.txid])
    try:
        listed = list_commits(repo)
        now = listed.commits.get(base.txid)
        if now is None or not now.visible or now.txid in listed.damaged:
            raise Conflict(f"{base} cannot be rewritten, because it was forgotten, purged or rewritten in the meantime")
        record = save(transaction.txid, listed)
        if record is None:
            transaction.abort("damaged bytes cannot be recovered")
            return None
        made = transaction.commit(changed(record, replaces=(now.txid, now.number + 1), origin=now.origin))
    except BaseException as error:
        transaction.abort(f"the rewrite failed: {error}")
        raise
    return _replace(repo, now, made)


def record_of(repo: Repository, txid: TxId, commit: Commit, made: Encoded) -> Committed:
    """Upload a manifest. Return the record for a rewrite of ``commit`` with this manifest. Raises `StorageError`."""
    manifests.put_encoded(repo, txid, made)
    places = {"txid": txid, "head": made.head, "manifest_bytes": len(made.data)}
    return changed(commit.committed, time=repo.clock(), **places)


def _replace(repo: Repository, base: Commit, made: Commit) -> Commit:
    """Create the record that makes ``made`` visible. Raises `Conflict` if its number is taken, and `StorageError`."""
    number = base.number + 1
    failed: CasckptError = Conflict(f"{base} was not rewritten: another process changed it", checkpoints=(base.id,))
    try:
        repo.put_record(commit_key(base.txid, number), Replaced(txid=base.txid, time=repo.clock(), by=made.txid))
    except Conflict:
        pass
    except StorageError as error:
        failed = error
        keep(repo, base.txid, number)
    now = refresh(repo, made)
    if now.standing != VOID:
        return now
    try:
        forget(repo, now)
    except CasckptError as error:
        log.warning("casckpt could not forget the unfinished rewrite of %s, so a gc will: %s", now, error)
    raise failed
