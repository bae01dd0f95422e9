"""Finds the newest checkpoints of runs, and the checkpoints of a step, from announcements and logs, without a listing.

An announcement only says which transactions may exist. Each call reads a transaction's state from its own log.
Therefore, the results are the same as those of a listing of commits/ that begins when the call begins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from casckpt.base.names import run_hash
from casckpt.base.parallel import in_parallel
from casckpt.errors import Damaged, Refused
from casckpt.format import notes
from casckpt.format.keys import parse_txid
from casckpt.format.names import TxId
from casckpt.history.announcements import Announcement, announce, are_there_any, look, names_note, read_back, runs
from casckpt.history.commits import Commit, in_order, list_commits, list_names, names_in, read_log
from casckpt.repository.caches import RunCache
from casckpt.repository.repository import Repository

MANY_RUNS = 100
"""Above this number of runs, one listing of commits/ costs less than a few requests for each run."""

MANY_ANNOUNCEMENTS = 1000
"""Above this number of unread announcements of a run, one listing of names costs less."""

log = logging.getLogger(__name__)

Wanted = Callable[[Commit], bool]


def is_live(commit: Commit) -> bool:
    """Return whether a commit is committed and not purged."""
    return commit.live


def is_visible(commit: Commit) -> bool:
    """Return whether a commit is live and not forgotten."""
    return commit.visible


def look_at_all(repo: Repository, run: str) -> RunCache:
    """Call `look`, and find every transaction of the run that has been announced up to the head.

    Each host reads each announcement once. If there are many that it has not read, it lists names instead: first
    transactions/, then commits/. These names include every transaction that was announced before. So a save that has
    read none of these announcements may still claim to be later than all of them (``seen``).

    Proof: a transaction's file is in transactions/ before its first announcement, and until commits/ has its record.
    Therefore, either the file exists throughout the first listing, or the record exists before the second one begins.
    Later records are announced only for transactions that have a record. The names say nothing about a state, which is
    in the logs.

    Raises the errors of `look`.
    """
    hashed = run_hash(run)
    known = look(repo, hashed)
    with known.lock.get():
        head = known.head
        if len(known.unread(known.floor)) > MANY_ANNOUNCEMENTS:
            names = open_names(repo, hashed)
            names |= _of_run((txid for txid, _ in list_names(repo)), hashed)
            known.add_names(names, head)
            repo.catalogue.set_note(names_note(hashed), notes.encode((head, sorted(names))))
    return read_back(repo, hashed, known.floor)


def announce_lost(repo: Repository) -> bool:
    """Announce all records in commits/ if no announcement exists, because runs/ was lost or was not copied.

    gc does the same for individual records. Returns False if nothing was announced. Raises `StorageError`.
    """
    if are_there_any(repo):
        return False
    lost = [commit for commit in list_commits(repo).commits.values() if commit.last != "revoked"]
    if not lost or are_there_any(repo):  # another process has begun the first save, which it announced before
        return False
    announce(repo, [(commit.txid, 0) for commit in lost])
    return True


def newest(repo: Repository, run: str, wanted: Wanted, *, skip_doubtful: bool = False) -> Commit | None:
    """Return the latest ``wanted`` save of ``run``, or None if there is none. See `in_order`.

    If saves were announced in order, this takes a few requests, regardless of the length of the run. ``skip_doubtful``:
    skip commits whose log cannot be read. Otherwise, such a log raises `Damaged` or `Refused`. Raises `NotFound` if the
    store does not exist, and `StorageError`.
    """
    return _newest_or_fuller(repo, run_hash(run), wanted, skip_doubtful=skip_doubtful)


def newest_reusable(repo: Repository, run: str, *, anew: bool = False) -> Commit | None:
    """Return the latest live save of ``run`` whose state is certain. Raises `StorageError`.

    This call reads the current state of the commit. It may miss a commit that was announced after `look_at_all`,
    unless ``anew`` is set.
    """
    hashed = run_hash(run)
    known = look(repo, hashed) if anew else repo.runs[hashed]
    return _newest(repo, hashed, known, is_live, skip_doubtful=True)


def newest_of_runs(
    repo: Repository, wanted: Wanted, *, but: str | None = None, skip_doubtful: bool = False
) -> list[Commit]:
    """Return the newest commit of each run except ``but``, as `newest` does. The newest of them all comes first.

    ``skip_doubtful``: skip commits whose log cannot be read.
    """
    hashes = [run for run in runs(repo) if but is None or run != run_hash(but)]
    if len(hashes) > MANY_RUNS:
        listed = list_commits(repo)
        left_out = listed.damaged if skip_doubtful else {}
        every = (commit for commit in listed.live() if commit.run != but and commit.txid not in left_out)
        chosen = list({commit.run: commit for commit in every if wanted(commit)}.values())
    else:
        each = in_parallel(
            repo.storage.traits.requests,
            lambda run: _newest_or_fuller(repo, run, wanted, skip_doubtful=skip_doubtful),
            hashes,
        )
        chosen = [commit for commit in each if commit is not None]
    return sorted(chosen, key=lambda commit: commit.txid, reverse=True)


def at_step(
    repo: Repository, known: RunCache, run: str, step: int, wanted: Wanted, *, skip_doubtful: bool = False
) -> list[Commit]:
    """Return the ``wanted`` commits of a step, as `in_order` sorts them.

    ``known``: the announcements that `look_at_all` has read. Reads the current logs. ``skip_doubtful``: skip commits
    whose log cannot be read. Otherwise, raises the errors of `newest`.
    """
    hidden = (txid for txid in hidden_from(repo, run_hash(run), known, 0) if parse_txid(txid).step == step)
    logs = (_log_of(repo, known, txid, skip_doubtful=skip_doubtful) for txid in {*known.at.get(step, ()), *hidden})
    return in_order(commit for commit in logs if commit and wanted(commit))


def greatest(repo: Repository, known: RunCache, run: str) -> TxId | None:
    """Return the latest transaction that `look_at_all` has read, or None if there is none. Raises `StorageError`."""
    hidden = hidden_from(repo, run_hash(run), known, 0)
    return max([*hidden, *([] if known.newest is None else [known.newest])], default=None)


def _newest_or_fuller(repo: Repository, hashed: str, wanted: Wanted, *, skip_doubtful: bool) -> Commit | None:
    """Return the newest ``wanted`` commit or, if it was thinned, the fullest one of the same checkpoint."""
    found = _newest(repo, hashed, look(repo, hashed), wanted, skip_doubtful=skip_doubtful)
    if found is None or not found.lacking:
        return found
    twins = at_step(repo, look_at_all(repo, found.run), found.run, found.step, wanted, skip_doubtful=skip_doubtful)
    return next((commit for commit in reversed(twins) if commit.id == found.id), found)


def _newest(
    repo: Repository, run: str, known: RunCache, wanted: Wanted, *, skip_doubtful: bool = False
) -> Commit | None:
    """Read announcements downwards from the head, until the remaining ones can only name earlier transactions."""
    low, count, tried = known.head + 1, 1, set[TxId]()
    best: Commit | None = None
    while low > known.low:
        low, count = max(known.low, low - count), 2 * count
        known = read_back(repo, run, low)
        bound = _bound(known, low)
        found = {txid for number in range(low, known.head + 1) for txid, _ in announced_by(known, number)}
        for txid in sorted((found | hidden_from(repo, run, known, low)) - tried, reverse=True):
            if low > known.low and (bound is None or txid < bound):
                break
            tried.add(txid)
            commit = _log_of(repo, known, txid, skip_doubtful=skip_doubtful)
            if commit is not None and wanted(commit) and (best is None or commit.txid > best.txid):
                best = commit
            if best is not None and best.txid >= txid:
                return best
        if best is not None and bound is not None and best.txid >= bound:
            return best
    return best


def announced_by(known: RunCache, number: int) -> Sequence[Announcement]:
    """Return the records that an announcement names. Return an empty sequence if it could not be read."""
    record = known.records.get(number)
    return () if record is None else record.announced


def _bound(known: RunCache, low: int) -> TxId | None:
    """Return a transaction that is later than all transactions announced below ``low``, or None.

    This follows from saves that had read those announcements when they began.
    """
    read = (known.records.get(number) for number in range(low, known.head + 1))
    saves = (one for one in read if one is not None and one.seen is not None and one.seen >= low - 1)
    return max((txid for save in saves for txid, _ in save.announced), default=None)


def hidden_from(repo: Repository, run: str, known: RunCache, low: int) -> set[TxId]:
    """Return what unreadable announcements from ``low`` on may name: all transactions of the run that have a record.

    ``run``: the hash of the run. Makes a listing if there is such an announcement. Raises `StorageError`.
    """
    if max(known.unreadable, default=-1) < low:
        return set()
    return _of_run((txid for txid, _ in list_names(repo)), run)


def open_names(repo: Repository, run: str) -> set[TxId]:
    """Return the transactions of a run (its hash) that have files in transactions/. Raises `StorageError`."""
    return _of_run((txid for txid, _ in names_in(repo, "transactions/")), run)


def _of_run(txids: Iterable[TxId], run: str) -> set[TxId]:
    return {txid for txid in txids if parse_txid(txid).run_hash == run}


def _log_of(repo: Repository, known: RunCache, txid: TxId, *, skip_doubtful: bool) -> Commit | None:
    """Read the log of a commit. A log that has ended is not reread."""
    if txid in known.ended:
        return None
    try:
        commit = read_log(repo, txid)
    except (Damaged, Refused) as error:
        if not skip_doubtful:
            raise
        log.warning("skipping %s: %s", txid, error)
        return None
    if commit is not None and not commit.live:
        known.ended.add(txid)
    return commit
