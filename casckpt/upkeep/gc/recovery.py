"""Recovery at the end of a gc: announcements without records, commits without an announcement, and old logs.

If a process dies before it creates an announced record, every later read makes an additional request. A commit without
an announcement is invisible to readers of runs. Such commits exist if runs/ was lost or was restored from an older
copy.

Each save leaves four records, which would stay for ever. Recovery lists the logs of transactions that are over in
commits/ended/, and then deletes them. A log is over if it says that its checkpoint was purged or revoked, if no file in
transactions/ has its run and step (a save or a rewrite that may still add a record), and if no folder in objects/
belongs to it. Then a whole gc has run since it ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from casckpt.base.groups import grouped, in_batches
from casckpt.base.parallel import in_parallel
from casckpt.contents.signatures import list_signatures
from casckpt.errors import Conflict, StorageError
from casckpt.format.keys import announcement_key, commit_key, parse_txid, transaction_key
from casckpt.format.names import TxId
from casckpt.history.announcements import announce, fill, look, read_back, remove_over, runs
from casckpt.history.commits import Commit, CommitList, bring_back, keep, list_commits, names_in
from casckpt.history.ended import MIN_AGE, PREFIX, is_older, line_of, write_list
from casckpt.history.transactions import PREFIX as TRANSACTIONS
from casckpt.history.transactions import revoke
from casckpt.repository.caches import RunCache
from casckpt.repository.repository import Repository
from casckpt.storage.failures import noting, unless_full
from casckpt.upkeep.gc.purge import thinned_though_claimed

_UNREADABLE = (
    "it is missing or damaged, so readers of its run list all of commits/ instead. Restore it from a copy of the "
    "store. If it is missing, the next gc fills the gap"
)
_UNANNOUNCED = "saves and `latest` do not see it, because runs/ does not announce it; the next gc announces it"

FEWEST = 500
"""With fewer logs, the lists would be small, and they are never merged."""
_AT_ONCE = 1000  # transactions in one list

log = logging.getLogger(__name__)


def settle(repo: Repository, seconds: float, refused: list[StorageError]) -> CommitList:
    """Fill each number that was announced at least ``seconds`` ago and has no record.

    Announce commits without an announcement. Also brings back checkpoints that were thinned at least ``seconds`` ago
    although a tag protects them. This is safe at any time: a late process finds that its number is taken, and announces
    the next number. Each host reads each announcement only once. Ends, and notes it in ``refused``, if this user may
    not write a record. Also ends if there is no room for one. Returns the first listing that it makes; the same commits
    are live afterwards. Raises `Damaged` or `Refused` if a tag cannot be read, and `StorageError`.
    """
    listed = list_commits(repo)  # list commits first: each listed record was already announced
    since = repo.clock() - round(1e6 * seconds)
    with noting(refused), unless_full():
        listed = drop_logs(repo, listed)
        for commit in thinned_though_claimed(repo, listed, since):
            log.warning("%s was thinned by a process that died, although it has a tag; gc restores it", commit)
            with suppress(Conflict):  # another process restored it first
                bring_back(repo, commit.at(commit.current or commit.places), commit.places)
        for run, saved in sorted(_by_run(repo, listed).items()):
            look(repo, run)
            known = read_back(repo, run)
            for number in sorted(known.unreadable):
                fill(repo, run, number)
            for txid, number in _undecided(known, listed, since):
                if number:
                    keep(repo, txid, number)
                elif repo.storage.size(transaction_key(txid)) is None:
                    # otherwise, gc revokes the transaction if it shows no sign of life
                    revoke(repo, txid, "announced but never committed")
            if missing := _unannounced(known, saved):
                log.warning("%d commits of run %s were not announced; runs/ was incomplete", len(missing), run)
                announce(repo, [(txid, 0) for txid in missing])
            remove_over(repo, run, listed.over)
    return listed


def drop_logs(repo: Repository, listed: CommitList) -> CommitList:
    """Delete the logs that have been over for a month, if there are many. Return the listing without them.

    Keeps the newest log of each run, so that later saves sort after it. This is safe at any time. Raises
    `StorageError`.
    """
    since = repo.clock() - MIN_AGE
    ended = [one for one in listed.commits.values() if not one.live and one.changed_at < since]
    due = list(_due(repo, listed, ended)) if len(ended) >= FEWEST else []
    if len(due) >= FEWEST:
        for batch in in_batches(due, lambda one: 1 + len(line_of(one).places), _AT_ONCE):
            write_list(repo, lines := {one.txid: line_of(one) for one in batch})
            names = {(one.txid, number) for one in batch for number in range(one.number + 1)}
            kept = {txid: one for txid, one in listed.commits.items() if txid not in lines}
            listed = replace(listed, commits=kept, over={**listed.over, **lines}, late=listed.late | names)
    late = [commit_key(*name) for name in sorted(listed.late) if is_older(repo, name[0], MIN_AGE)]
    if late:
        repo.storage.settle(PREFIX.rstrip("/"))  # a gc that wrote a list may have died before the list was durable
        log.info("%s: deleting %d records of logs that are over", repo.storage.url, len(late))
        for _ in in_parallel(repo.storage.traits.parallel, repo.storage.delete, late, name="gc"):
            pass
    return listed


def _due(repo: Repository, listed: CommitList, ended: Iterable[Commit]) -> Iterator[Commit]:
    """Yield those of the ``ended`` commits whose logs may be deleted. Looks for what may still need them."""
    newest = {parse_txid(txid).run_hash: txid for txid in sorted(listed.commits)}
    files = (parse_txid(txid) for txid, _ in names_in(repo, TRANSACTIONS))
    opened = {(name.run_hash, name.step) for name in files}
    uploaders = {TxId(folder.rpartition("/")[2]) for folder in repo.storage.list_folder("objects")[1]}
    signed = set(list_signatures(repo).values())
    for one in sorted(ended, key=lambda one: one.txid):
        name = parse_txid(one.txid)
        is_old = is_older(repo, one.txid, MIN_AGE) and newest[name.run_hash] != one.txid
        is_free = (name.run_hash, name.step) not in opened and uploaders.isdisjoint([one.txid, *line_of(one).places])
        if is_old and is_free and (one.last == "revoked" or one.id not in signed):
            yield one


def faults(repo: Repository, listed: CommitList, *, anew: bool) -> list[tuple[str, str]]:
    """Return (key, problem) of unreadable announcements, and of commits in ``listed`` without an announcement.

    ``anew``: also reread announcements that this host has read before. Raises `StorageError`.
    """
    problems: list[tuple[str, str]] = []
    reader = repo.fresh()
    for run, saved in sorted(_by_run(repo, listed).items()):
        look(reader, run, anew=anew)
        known = read_back(reader, run)
        problems += [(announcement_key(run, number), _UNREADABLE) for number in sorted(known.unreadable)]
        problems += [(commit_key(txid), _UNANNOUNCED) for txid in _unannounced(known, saved)]
    return problems


def _by_run(repo: Repository, listed: CommitList) -> dict[str, list[TxId]]:
    """Return the transactions with a commit, by the hash of their run, also for runs that only have announcements."""
    saved = (txid for txid, one in listed.commits.items() if one.last != "revoked")
    return {run: [] for run in runs(repo)} | grouped(saved, lambda txid: parse_txid(txid).run_hash)


def _undecided(known: RunCache, listed: CommitList, since: int) -> Iterator[tuple[TxId, int]]:
    """Yield the (txid, number) of each log's next record if it was announced before ``since`` but is not listed."""
    for record in list(known.records.values()):  # a copy, because other threads may add announcements
        for txid, number in record.announced if record is not None and record.time <= since else ():
            commit = listed.commits.get(txid)
            is_known = txid not in listed.damaged and txid not in listed.over
            if is_known and number == (0 if commit is None else commit.number + 1):
                yield txid, number


def _unannounced(known: RunCache, saved: Iterable[TxId]) -> list[TxId]:
    return [txid for txid in saved if txid not in known.announced]
