"""Whether checkpoints are safe in a store's mirror. gc, rotation, statistics and the mirror ask this each time.

A checkpoint is safe once a copy in the mirror has had all entries that the checkpoint has here. After that, what
happens to the copy is the mirror's own affair. Only a checkpoint that was restored here is safe no longer than the
mirror has these entries, because the mirror may have purged its copy before.

No answer is remembered, because an older snapshot or a different store may take the mirror's place. The transactions of
copies form a sequence, so gc finds them by key. Whoever asks about many checkpoints lists the mirror's commits instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from casckpt.base.parallel import in_parallel
from casckpt.errors import CasckptError, Damaged, Refused
from casckpt.format.keys import copied_txid, transaction_key
from casckpt.history.commits import PREFIX, Commit, CommitList, list_commits, read_log, refresh
from casckpt.history.ended import find
from casckpt.history.folding import Places
from casckpt.repository.repository import Repository
from casckpt.storage import brief, open_storage

log = logging.getLogger(__name__)
_MOST_COPIES = 1000  # of one checkpoint; a store that has more is broken


@dataclass(frozen=True)
class MirrorLag:
    """The lag of a mirror. ``checkpoints``: the number of checkpoints that are not yet safe in the mirror.

    ``bytes``: the size of the blobs that the saves of these checkpoints wrote. ``seconds``: the time since the oldest
    of these commits. ``error``: the error of this process's last attempt, or why the mirror cannot be asked (no
    checkpoint counts as safe then), or "".
    """

    checkpoints: int
    bytes: int
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer of a mirror. ``unsafe``: the checkpoints that are not safe there, as `unsafe_in` returns them.

    ``found``: whether a store is there. None if it cannot be asked, or need not be asked. ``problem``: why it did not
    answer, or "".
    """

    unsafe: Sequence[Commit] = ()
    found: bool | None = None
    problem: str = ""


def ask(repo: Repository, commits: Iterable[Commit], *, many: bool = False) -> Answer:
    """Ask the mirror that the settings name, if there is one, whether ``commits`` are safe there.

    The records that say so are then durable. If the mirror cannot be asked, nothing is safe. Uses the storage with
    which the store was opened, or the environment's credentials, and does not wait long for a server. ``many``: ask
    with one listing, whose answer is for people to read. Raises `StorageError` if the store itself fails.
    """
    wanted = list(commits)
    if not (wanted or many):
        return Answer()
    settings = repo.settings
    url, thinned = settings.mirror, bool(settings.mirror_thinned)
    wanted = [commit for commit in wanted if _needed(commit, thinned=thinned)]
    if url is None or not (wanted or many):
        return Answer()
    try:
        there = _open(repo, url)
        if not there.exists():
            return Answer(wanted, found=False, problem=f"there is no store at the mirror {url}")
        listed = list_commits(there) if many else None
        unsafe = unsafe_in(there, wanted, thinned=thinned, listed=listed)
        if not many and not there.storage.traits.remote:
            there.storage.settle(PREFIX.rstrip("/"))
            unsafe = unsafe_in(there, wanted, thinned=thinned)  # again: it may have lost power before
    except CasckptError as error:
        return Answer(wanted, problem=f"casckpt cannot ask the mirror {url} ({error})")
    return Answer(unsafe, found=True)


def _open(repo: Repository, url: str) -> Repository:
    opened = repo.mirror
    storage = opened if opened is not None and opened.url == url else open_storage(url)
    return replace(repo, storage=brief(storage), mirror=None)


def unsafe_in(
    there: Repository, commits: Iterable[Commit], *, thinned: bool, listed: CommitList | None = None
) -> list[Commit]:
    """Return the ``commits`` that are not safe in the mirror ``there``, each at the fullest places that it lacks.

    The caller must have read ``commits`` before. ``thinned``: whether the mirror may lack what was thinned here.
    ``listed``: a listing of the mirror (None: ask by key, with one small request for most checkpoints). Raises
    `StorageError`.
    """
    wanted = list(commits)
    lacking = in_parallel(there.storage.traits.requests, partial(_lacking, there, thinned, listed), wanted)
    return [
        min(
            (commit.at(one) for one in places),
            key=lambda one: (one.dropped.entries if one.dropped else 0, bool(one.shown)),
        )
        for commit, places in zip(wanted, lacking, strict=True)
        if places
    ]


def _needed(commit: Commit, *, thinned: bool) -> list[Places]:
    """Return the places whose entries the mirror must have.

    A commit at old places is to be trimmed, so these are the places with entries that the current ones lack.
    """
    now = commit.current
    wanted = [one for one in commit.existing if not thinned or one == now]
    return wanted if now is None or not commit.is_old_places else [one for one in wanted if not now.holds(one)]


def _lacking(there: Repository, thinned: bool, listed: CommitList | None, commit: Commit) -> list[Places]:
    """Return those of the needed places that the mirror lacks."""
    left = _needed(commit, thinned=thinned)
    for copy in _copies(there, commit, listed) if left else ():
        held = [one for one in _counted(commit, copy) if one.record.manifest == commit.id]
        left = [one for one in left if not any(other.holds(one) for other in held)]
        if not left:
            break
    return left


def _counted(commit: Commit, copy: Commit) -> tuple[Places, ...]:
    """Return the places of a copy that count.

    After a restore here, a copy that was forgotten there before does not count, because the mirror will purge it.
    """
    if not commit.restored:
        return *copy.existing, *copy.ended
    was_hidden = commit.last == "restored" and copy.last == "forgotten" and copy.changed_at < commit.changed_at
    return () if was_hidden else copy.existing


def _copies(there: Repository, commit: Commit, listed: CommitList | None) -> Iterator[Commit]:
    """Yield the copies of a checkpoint. By key, yield each one first as it was when it was committed, if that counts.

    A transaction that is still open, or whose log cannot be read, is not the last one: later copies have higher
    numbers.
    """
    for number in range(_MOST_COPIES):
        txid = copied_txid(commit.txid, number)
        if listed is not None and txid in listed.damaged:
            continue
        try:
            copy = read_log(there, txid, later=False) if listed is None else listed.commits.get(txid)
        except (Damaged, Refused):
            continue
        over = find(there, txid, young=copy is None) if listed is None else listed.over.get(txid)
        if over is not None and over.was_whole:
            yield replace(commit, existing=(), ended=(*commit.existing, *commit.ended))
        elif over is None and copy is not None:
            if listed is None and not commit.restored:
                yield copy
            with suppress(Damaged, Refused):
                yield copy if listed is not None else refresh(there, copy)
        elif over is None and there.storage.size(transaction_key(txid)) is None:
            return


def lag_of(repo: Repository, error: str = "") -> MirrorLag:
    """Return the mirror's lag. ``error``: see `MirrorLag`. Raises `StorageError` if the store itself fails."""
    answer = ask(repo, list_commits(repo).live(), many=True)
    behind = [commit.committed for commit in answer.unsafe]
    return MirrorLag(
        checkpoints=len(behind),
        bytes=sum(record.bytes_written for record in behind),
        seconds=max(0.0, (repo.clock() - min(record.time for record in behind)) / 1e6) if behind else 0.0,
        error=error or answer.problem,
    )
