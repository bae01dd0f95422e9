"""Rewrites: a checkpoint committed once more, with other places. From one instant on its id means the new commit.

That instant is the creation of the `replaced` record at the next number of the base's log, as it was when commits were
listed. So of all who would change the checkpoint one wins, be it to forget it or to rewrite it. Who has lost forgets
what he made. A put without an answer is not lost: the record may arrive later. So who has none takes the number himself
before he gives up, and a gc does that for those who died.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from casckpt.contents import manifests
from casckpt.errors import CasckptError, Conflict, StorageError
from casckpt.format.draft import Encoded
from casckpt.format.keys import commit_key
from casckpt.format.names import TxId
from casckpt.format.records import Committed, Replaced, changed
from casckpt.history.commits import Commit, CommitList, forget, keep, list_commits, refresh
from casckpt.history.folding import VOID
from casckpt.history.transactions import begin
from casckpt.repository.repository import Repository

log = logging.getLogger(__name__)


def rewrite(repo: Repository, base: Commit, save: Callable[[TxId, CommitList], Committed | None]) -> Commit | None:
    """Let what ``save`` puts under a transaction stand for ``base``; None, and nothing happens, if it puts nothing.

    The transaction has begun before the commits were listed that ``save`` is told: it may reuse what they name. What it
    returns is what `Committed` says of the new places, and must lack no entry of ``base`` that it does not tell of.

    Raises `Conflict` if ``base`` is not visible any more, or if somebody else was first to change it; `StorageError`,
    after which the rewrite may stand all the same.
    """
    transaction = begin(repo, base.run, base.step, after=[base.txid])
    try:
        listed = list_commits(repo)
        now = listed.commits.get(base.txid)
        if now is None or not now.visible or now.txid in listed.damaged:
            raise Conflict(f"{base} is not what its id means any more: there is nothing to rewrite")
        record = save(transaction.txid, listed)
        if record is None:
            transaction.abort("bytes that are damaged cannot be had again")
            return None
        made = transaction.commit(changed(record, replaces=(now.txid, now.number + 1), origin=now.origin))
    except BaseException as error:
        transaction.abort(f"the rewrite failed: {error}")
        raise
    return _replace(repo, now, made)


def record_of(repo: Repository, txid: TxId, commit: Commit, made: Encoded) -> Committed:
    """Put a manifest, and return the record of a rewrite of ``commit`` that has it. Raises `StorageError`."""
    manifests.put_encoded(repo, txid, made)
    places = {"txid": txid, "head": made.head, "manifest_bytes": len(made.data)}
    return changed(commit.committed, time=repo.clock(), **places)


def _replace(repo: Repository, base: Commit, made: Commit) -> Commit:
    """Create the record that lets ``made`` stand. Raises `Conflict` if its number is taken, `StorageError`."""
    number = base.number + 1
    failed: CasckptError = Conflict(f"{base} was changed by somebody else, and not rewritten", checkpoints=(base.id,))
    try:
        repo.put_record(commit_key(base.txid, number), Replaced(txid=base.txid, time=repo.clock(), by=made.txid))
    except Conflict:
        pass
    except StorageError as error:
        failed = error
        keep(repo, base.txid, number)
    now = refresh(repo, made)
    if now.standing == VOID:
        _forget(repo, now)
        raise failed
    return now


def _forget(repo: Repository, made: Commit) -> None:
    try:
        forget(repo, made)
    except CasckptError as error:
        log.warning("what was made of %s is left to gc: %s", made, error)
