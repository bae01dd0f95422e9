"""Deletes the logs of transactions that are over: gc lists them in commits/ended/, and then deletes them.

Without this, each save would leave four records for ever. A log is over if it says that its checkpoint was purged or
revoked, if no file in transactions/ has its run and step (a save or a rewrite that may still add a record), and if no
folder in objects/ belongs to it. Then a whole gc has run since it ended.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from casckpt.base.groups import in_batches
from casckpt.base.parallel import in_parallel
from casckpt.contents.signatures import list_signatures
from casckpt.format.keys import commit_key, parse_log, parse_txid
from casckpt.format.names import TxId
from casckpt.history.commits import Commit, CommitList
from casckpt.history.ended import MIN_AGE, PREFIX, is_older, line_of, write_list
from casckpt.history.transactions import PREFIX as TRANSACTIONS
from casckpt.repository.repository import Repository

FEWEST = 500
"""With fewer logs, the lists would be small, and they are never merged."""
_AT_ONCE = 1000  # transactions in one list

log = logging.getLogger(__name__)


def drop_logs(repo: Repository, listed: CommitList, erased: Collection[TxId] = ()) -> CommitList:
    """Delete the logs that have been over for a month, if there are many. Return the listing without them.

    Keeps the newest log of each run, so that later saves sort after it. ``erased``: purged transactions whose logs are
    deleted without delay, even if they are few. If they began within the last month, only their first records are
    deleted, which hold names, metadata and metrics; a later gc deletes the others. This is safe at any time. Raises
    `StorageError`.
    """
    since = repo.clock() - MIN_AGE
    ended = [one for one in listed.commits.values() if not one.live and (one.changed_at < since or one.txid in erased)]
    due = list(_due(repo, listed, ended, erased)) if erased or len(ended) >= FEWEST else []
    if erased or len(due) >= FEWEST:
        for batch in in_batches(due, lambda one: 1 + len(line_of(one).places), _AT_ONCE):
            write_list(repo, lines := {one.txid: line_of(one) for one in batch})
            names = {(one.txid, number) for one in batch for number in range(one.number + 1)}
            kept = {txid: one for txid, one in listed.commits.items() if txid not in lines}
            listed = replace(listed, commits=kept, over={**listed.over, **lines}, late=listed.late | names)
    late = [commit_key(*name) for name in sorted(listed.late) if name[1] == 0 or is_older(repo, name[0], MIN_AGE)]
    if late:
        repo.storage.settle(PREFIX.rstrip("/"))  # a gc that wrote a list may have died before the list was durable
        log.info("%s: deleting %d records of logs that are over", repo.storage.url, len(late))
        for _ in in_parallel(repo.storage.traits.parallel, repo.storage.delete, late, name="gc"):
            pass
    return listed


def _due(repo: Repository, listed: CommitList, ended: Iterable[Commit], erased: Collection[TxId]) -> Iterator[Commit]:
    """Yield those of the ``ended`` commits whose logs may be deleted. Looks for what may still need them."""
    newest = {parse_txid(txid).run_hash: txid for txid in sorted(listed.commits)}
    files = (parse_log(entry.key) for entry in repo.storage.list(TRANSACTIONS, known=parse_log))
    opened = {(of.run_hash, of.step) for name in files if name is not None for of in [parse_txid(name[0])]}
    uploaders = {TxId(folder.rpartition("/")[2]) for folder in repo.storage.list_folder("objects")[1]}
    signed = set(list_signatures(repo).values())
    since = repo.clock() - MIN_AGE
    for one in sorted(ended, key=lambda one: one.txid):
        name = parse_txid(one.txid)
        is_old = one.changed_at < since and is_older(repo, one.txid, MIN_AGE) and newest[name.run_hash] != one.txid
        is_free = (name.run_hash, name.step) not in opened and uploaders.isdisjoint([one.txid, *line_of(one).places])
        is_due = is_old if one.last == "revoked" else (is_old or one.txid in erased) and one.id not in signed
        if is_free and is_due:
            yield one
