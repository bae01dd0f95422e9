"""Following runs: their newest checkpoint, and those of a step, from announcements and logs instead of all of commits/.

An announcement only says which transactions there may be; what became of one is read from its own log, anew each time.
So what is returned here was live after the call began, as a listing of commits/ that begins then would have it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from casckpt.base.names import run_hash
from casckpt.base.parallel import in_parallel
from casckpt.errors import Damaged, Refused
from casckpt.format.keys import parse_txid
from casckpt.format.names import TxId
from casckpt.history.announcements import Announcement, announce, are_there_any, look, read_back, runs
from casckpt.history.commits import Commit, follow, list_commits, list_names, read_log
from casckpt.repository.caches import RunCache
from casckpt.repository.repository import Repository

MANY_RUNS = 100
"""Beyond it one listing of commits/ costs less than a few requests for each run."""

log = logging.getLogger(__name__)

Wanted = Callable[[Commit], bool]


def is_live(commit: Commit) -> bool:
    """Committed and not purged."""
    return commit.live


def is_visible(commit: Commit) -> bool:
    """Live and not forgotten."""
    return commit.visible


def look_at_all(repo: Repository, run: str) -> RunCache:
    """`look`, and read all announcements of the run: each once ever per host. Raises as `look`."""
    hashed = run_hash(run)
    look(repo, hashed)
    return read_back(repo, hashed)


def announce_lost(repo: Repository) -> bool:
    """Announce all that commits/ shows, where nothing is announced at all: runs/ was lost, or left out of a copy.

    A gc does that for single records. False where there is nothing to be told. Raises `StorageError`.
    """
    if are_there_any(repo):
        return False
    lost = [commit for commit in list_commits(repo).commits.values() if commit.last != "revoked"]
    announce(repo, [(commit.txid, commit.number) for commit in lost])
    return bool(lost)


def newest(repo: Repository, run: str, wanted: Wanted, *, skip_doubtful: bool = False) -> Commit | None:
    """Return the one of ``run`` that was saved last of those that are ``wanted``; None if there is none.

    A handful of requests, however long the run is, as long as what was announced last was saved last.
    ``skip_doubtful``: leave out those whose log cannot be read, else that raises `Damaged` or `Refused`. `NotFound`
    where there is no store, `StorageError`.
    """
    hashed = run_hash(run)
    return _newest(repo, hashed, look(repo, hashed), wanted, skip_doubtful=skip_doubtful)


def newest_reusable(repo: Repository, run: str, *, anew: bool = False) -> Commit | None:
    """Return the live one of ``run`` that was saved last, never one whose state is in doubt. Raises `StorageError`.

    What it says of a commit holds now, but one that was announced since `look_at_all` may be missing. ``anew``: look.
    """
    hashed = run_hash(run)
    known = look(repo, hashed) if anew else repo.runs[hashed]
    return _newest(repo, hashed, known, is_live, skip_doubtful=True)


def newest_of_runs(
    repo: Repository, wanted: Wanted, *, but: str | None = None, skip_doubtful: bool = False
) -> list[Commit]:
    """Return the newest of each run, as `newest` does, the newest of all first; without the run ``but``.

    ``skip_doubtful``: leave out those whose log cannot be read.
    """
    hashes = [run for run in runs(repo) if but is None or run != run_hash(but)]
    if len(hashes) > MANY_RUNS:
        listed = list_commits(repo)
        left_out = listed.damaged if skip_doubtful else {}
        every = (commit for commit in listed.live() if commit.run != but and commit.txid not in left_out)
        found = list({commit.run: commit for commit in every if wanted(commit)}.values())
    else:
        each = in_parallel(
            repo.storage.traits.requests,
            lambda run: _newest(repo, run, look(repo, run), wanted, skip_doubtful=skip_doubtful),
            hashes,
        )
        found = [commit for commit in each if commit is not None]
    return sorted(found, key=lambda commit: commit.order, reverse=True)


def at_step(
    repo: Repository, known: RunCache, run: str, step: int, wanted: Wanted, *, skip_doubtful: bool = False
) -> list[Commit]:
    """Return those of a step that are ``wanted``, oldest first, of what `look_at_all` has read; logs are read now.

    ``skip_doubtful``: leave out those whose log cannot be read, else that raises as in `newest`.
    """
    hidden = (txid for txid in hidden_from(repo, run_hash(run), known, 0) if parse_txid(txid).step == step)
    logs = (_logs_of(repo, known, txid, skip_doubtful=skip_doubtful) for txid in {*known.at.get(step, ()), *hidden})
    found = {commit.txid: commit for some in logs for commit in some if wanted(commit)}
    return sorted(found.values(), key=lambda commit: commit.order)


def greatest(repo: Repository, known: RunCache, run: str) -> TxId | None:
    """Return the greatest transaction that `look_at_all` has read of; None if there is none. Raises `StorageError`."""
    hidden = hidden_from(repo, run_hash(run), known, 0)
    return max([*hidden, *([] if known.newest is None else [known.newest])], default=None)


def _newest(
    repo: Repository, run: str, known: RunCache, wanted: Wanted, *, skip_doubtful: bool = False
) -> Commit | None:
    """Read announcements downwards from the head, until what is further down can only be of earlier transactions.

    A rewrite is later than what it rewrites, and counts as of that time; so one that is found is not the end.
    """
    low, count, tried = known.head + 1, 1, set[TxId]()
    best: Commit | None = None
    while low > 0:
        low, count = max(0, low - count), 2 * count
        known = read_back(repo, run, low)
        bound = _bound(known, low)
        found = {txid for number in range(low, known.head + 1) for txid, _ in told_by(known, number)}
        for txid in sorted((found | hidden_from(repo, run, known, low)) - tried, reverse=True):
            if low > 0 and (bound is None or txid < bound):
                break
            tried.add(txid)
            logs = _logs_of(repo, known, txid, skip_doubtful=skip_doubtful)
            best = max((one for one in (*logs, best) if one and wanted(one)), key=lambda one: one.order, default=None)
            if best is not None and best.origin >= txid:
                return best
        if best is not None and bound is not None and best.origin >= bound:
            return best
    return best


def told_by(known: RunCache, number: int) -> Sequence[Announcement]:
    """Return what an announcement tells of that was read; nothing where it could not be."""
    record = known.records.get(number)
    return () if record is None else record.announced


def _bound(known: RunCache, low: int) -> TxId | None:
    """Return what is later than all that was announced below ``low``, as far as a save that looked there says so."""
    found = (known.records.get(number) for number in range(low, known.head + 1))
    saves = (one for one in found if one is not None and one.seen is not None and one.seen >= low - 1)
    return max((txid for one in saves for txid, _ in one.announced), default=None)


def hidden_from(repo: Repository, run: str, known: RunCache, low: int) -> set[TxId]:
    """Return what announcements from ``low`` on may have told of that cannot be read: whatever has a record.

    ``run``: its hash. A listing, where there is any such announcement. Raises `StorageError`.
    """
    if max(known.unreadable, default=-1) < low:
        return set()
    return {txid for txid in list_names(repo) if parse_txid(txid).run_hash == run}


def _logs_of(repo: Repository, known: RunCache, txid: TxId, *, skip_doubtful: bool) -> list[Commit]:
    """Read a log, unless it has ended: that is for ever; and what it was replaced by. One without a record may get one.

    What is announced is read one by one: a rewrite may not stand yet when it is read, and its base be replaced then.
    """
    if txid in known.ended:
        return []
    try:
        commit = read_log(repo, txid)
        found = [] if commit is None else [commit]
        found += [] if commit is None or commit.replaced is None else [follow(repo, commit)]
    except (Damaged, Refused) as error:
        if not skip_doubtful:
            raise
        log.warning("%s is left out: %s", txid, error)
        return []
    if commit is not None and not commit.live:
        known.ended.add(txid)
    return found
