"""What a gc does for those who follow runs, and for rewrites that were not finished.

An announcement whose record never came, because whoever announced it died, is looked after by every host at each look.
A record that nobody announced, because runs/ was lost or put back from an older copy, is not seen by them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress

from casckpt.errors import Conflict
from casckpt.format.keys import announcement_key, commit_key, parse_txid, transaction_key
from casckpt.format.names import TxId
from casckpt.format.records import Restored
from casckpt.history.announcements import announce, fill, look, read_back, runs
from casckpt.history.commits import CommitList, append, forget, keep, list_commits, refresh
from casckpt.history.folding import UNSETTLED, VOID
from casckpt.history.transactions import revoke
from casckpt.repository.caches import RunCache
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc.purge import thinned_though_claimed

_UNREADABLE = (
    "it is missing or damaged, and who follows its run lists all of commits/ instead. Put it back from a copy of the "
    "store; where it is missing, the next gc fills its place"
)
_UNANNOUNCED = "saves and `latest` do not see it, for it was not announced under runs/; the next gc announces it"

log = logging.getLogger(__name__)


def settle(repo: Repository, seconds: float) -> None:
    """Take each number that was announced ``seconds`` ago and never came, and announce what nobody has announced.

    Both are safe at any time: who comes after all finds the number taken, and announces the next one. Reads each
    announcement once ever per host. And restores what somebody thinned so long ago although a tag claims it. Raises
    `Damaged` or `Refused` if a tag cannot be read, `StorageError`.
    """
    listed = list_commits(repo)  # first: whatever it shows was announced before
    since = repo.clock() - round(1e6 * seconds)
    _settle_rewrites(repo, listed, since)
    for commit in thinned_though_claimed(repo, listed, since):
        log.warning("%s was thinned while it was tagged, by a process that died: it is whole again", commit)
        with suppress(Conflict):  # somebody else was first with another record
            append(repo, commit, Restored)
    for run in _hashes(repo, listed):
        look(repo, run)
        known = read_back(repo, run)
        for number in sorted(known.unreadable):
            fill(repo, run, number)
        for txid, number in _undecided(known, listed, since):
            if number:
                keep(repo, txid, number)
            elif repo.storage.size(transaction_key(txid)) is None:  # else it is revoked as one that shows no life
                revoke(repo, txid, "announced, and never committed")
        if missing := list(_unannounced(known, listed, run)):
            log.warning("%d records of run %s had not been announced; runs/ was not whole", len(missing), run)
            announce(repo, missing)


def _settle_rewrites(repo: Repository, listed: CommitList, since: int) -> None:
    """Take the number that a rewrite from before ``since`` wants and did not come for; forget rewrites that are void.

    Void is for ever, so nobody ever sees what is forgotten here.
    """
    for one in listed.live():
        is_old = one.standing == UNSETTLED and one.committed.time <= since
        if is_old and one.replaces is not None:
            keep(repo, *one.replaces)
        now = refresh(repo, one) if is_old else one
        if now.standing == VOID and now.last != "forgotten":
            with suppress(Conflict):
                forget(repo, now)


def faults(repo: Repository, listed: CommitList, *, anew: bool) -> list[tuple[str, str]]:
    """Return (key, what is wrong) of announcements, and of records of ``listed`` that lack one.

    ``anew``: read all of them, also those that this host has read. Raises `StorageError`.
    """
    found: list[tuple[str, str]] = []
    reader = repo.fresh()
    for run in _hashes(repo, listed):
        look(reader, run, anew=anew)
        known = read_back(reader, run)
        found += [(announcement_key(run, number), _UNREADABLE) for number in sorted(known.unreadable)]
        found += [(commit_key(*one), _UNANNOUNCED) for one in _unannounced(known, listed, run)]
    return found


def _hashes(repo: Repository, listed: CommitList) -> list[str]:
    return sorted({parse_txid(txid).run_hash for txid in listed.commits} | set(runs(repo)))


def _undecided(known: RunCache, listed: CommitList, since: int) -> Iterator[tuple[TxId, int]]:
    """Return (txid, number) of what was announced before ``since`` and is not listed, of each log the next one only."""
    for record in list(known.records.values()):  # other threads go on announcing
        for txid, number in record.announced if record is not None and record.time <= since else ():
            commit = listed.commits.get(txid)
            if txid not in listed.damaged and number == (0 if commit is None else commit.number + 1):
                yield txid, number


def _unannounced(known: RunCache, listed: CommitList, run: str) -> Iterator[tuple[TxId, int]]:
    for txid, commit in listed.commits.items():
        is_of_run = parse_txid(txid).run_hash == run and commit.last != "revoked"
        if is_of_run and known.announced.get(txid, -1) < commit.number:
            yield txid, commit.number
