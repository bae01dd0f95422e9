"""Notes under mirrored/ about the commits that are safe in a store's mirror, for the mirror and gc.

A note is valid until the checkpoint is restored, because the mirror may have forgotten and purged its copy by then.

A store's settings name its mirror, so gc knows the mirror on every host. Before gc relies on the notes, it reads the
creation time of the store at the mirror's URL. A note does not count if no store is there (a deleted folder, an
unmounted disk), or if the store is newer than the note. If gc cannot reach the mirror, the notes count, because gc
does not need the mirror's credentials.

A note also names the transaction of the copy. Records in commits/ are never deleted. Therefore, if the mirror has no
record of this transaction, an older snapshot of the mirror or a different store is in its place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

from casckpt.base.parallel import in_parallel
from casckpt.errors import CasckptError, Conflict, Damaged, NotFound, Refused, StorageError
from casckpt.format.keys import MARKER, commit_key, mirrored_key, parse_mirrored
from casckpt.format.names import TxId
from casckpt.format.records import MAX_RECORD_BYTES, Mirrored, decode_marker
from casckpt.history.commits import Commit, list_commits
from casckpt.repository.reading import Read, read_records
from casckpt.repository.repository import Repository
from casckpt.storage import ObjectStore, open_storage

PREFIX = "mirrored/"
NO_STORE = math.inf
"""Creation time of a store that does not exist: all notes are older."""
HasCopies: TypeAlias = Callable[[Collection[TxId]], Collection[TxId]]
"""A function that returns which of the given transactions the mirror has a record of."""
_SHORT_TIMEOUTS = {"request_timeout": 10.0, "call_timeout": 20.0}  # if the mirror does not answer, the notes count

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MirrorLag:
    """The lag of a mirror. ``checkpoints``: the number of checkpoints that are not yet safe in the mirror.

    ``bytes``: the size of the blobs that the saves of these checkpoints wrote. ``seconds``: the time since the oldest
    of these commits. ``error``: the error of this process's last attempt, or "" if there was none.
    """

    checkpoints: int
    bytes: int
    seconds: float
    error: str = ""


def mirror_to_wait_for(repo: Repository) -> str | None:
    """Return the URL of the mirror that gc waits for, as named in the settings.

    Raises `Damaged` if the settings are lost, because gc would then delete checkpoints that are not safe in the mirror.
    Raises `StorageError`.
    """
    generation, settings = repo.newest_settings()
    if generation < 0 and (noted := next(iter(repo.storage.list(PREFIX, known=parse_mirrored)), None)):
        raise Damaged(
            f"gc deletes nothing, because settings/ of {repo.storage.url} is missing, and {noted.key} shows "
            "that the store had a mirror. Restore settings/ from a copy of the store, or save with the mirror "
            "again (casckpt.open with mirror=URL)",
            key="settings/",
        )
    return settings.mirror


def made_at(storage: ObjectStore) -> float:
    """Return the creation time of the store in ``storage``, in microseconds. Older notes refer to a different store.

    Returns `NO_STORE` if there is none. Raises `Damaged`, `Refused`, and `StorageError`.
    """
    try:
        return decode_marker(storage.get(MARKER, limit=MAX_RECORD_BYTES)).created_at
    except NotFound:
        return NO_STORE


def mirror_made_at(repo: Repository, mirror: str, *, near: bool = False) -> float | None:
    """Return the creation time of the store at ``mirror``. Warn and return None if it is unknown.

    Makes one small request. Uses the mirror with which ``repo`` was opened, or else the environment's credentials. An
    unreadable folder counts as no store, because a folder does not need credentials. ``near``: do not send requests to
    a server; return None if the mirror is on a server.
    """
    is_remote = True
    try:
        storage = _storage_of(repo, mirror)
        is_remote = storage.traits.remote
        return None if near and is_remote else made_at(storage)
    except CasckptError as error:
        counts = ", so gc relies on the notes about it" if is_remote else ""
        log.warning("casckpt cannot reach the mirror %s%s: %s", mirror, counts, error)
        return None if is_remote else NO_STORE


def _storage_of(repo: Repository, mirror: str) -> ObjectStore:
    if repo.mirror is not None and repo.mirror.url == mirror:
        return repo.mirror
    storage = open_storage(mirror)
    return open_storage(mirror, _SHORT_TIMEOUTS) if storage.traits.remote else storage


def needed_in_mirror(repo: Repository) -> list[Commit]:
    """Return the commits that the mirror must have according to the settings, oldest first. Raises `StorageError`."""
    return list_commits(repo).live()


def copies_at(repo: Repository, mirror: str) -> HasCopies:
    """Return a function that looks up copies in ``mirror``. If the mirror does not answer, it counts all as present."""
    storage = _storage_of(repo, mirror)

    def those_there(txids: Collection[TxId]) -> Collection[TxId]:
        keys = map(commit_key, txids)
        try:
            sizes = list(in_parallel(storage.traits.requests, storage.size, keys))
        except CasckptError as error:
            log.warning("casckpt cannot look up copies in %s, so gc relies on the notes about it: %s", mirror, error)
            return txids
        return {txid for txid, size in zip(txids, sizes, strict=True) if size is not None}

    return those_there


def unmirrored(
    repo: Repository, commits: Iterable[Commit], mirror: str | None, made: float = 0, has: HasCopies | None = None
) -> list[Commit]:
    """Return the ``commits`` that no note marks as safe in ``mirror``. Return no commits if ``mirror`` is None.

    Notes from before ``made`` do not count, nor do notes about copies that ``has``, if it is passed, does not return.
    Makes one LIST, and a small read for each note that is new to this host. Raises `StorageError`.
    """
    wanted = list(commits)
    if mirror is None or not wanted:
        return []
    there = {entry.key: entry for entry in repo.storage.list(PREFIX, known=parse_mirrored)}
    noted = [commit for commit in wanted if key_of_note(commit) in there]
    records = read_records(repo, PREFIX, [there[key_of_note(commit)] for commit in noted], lambda _: Mirrored)

    def counted(commits: Sequence[Commit], records: Iterable[Read]) -> set[TxId]:
        read = zip(commits, records, strict=True)
        copies = {one.txid: found.copy for one, found in read if _says(found, one, mirror, made)}
        named = {copy for copy in copies.values() if copy is not None}
        known = {None, *(has(named) if has and named else named)}
        return {txid for txid, copy in copies.items() if copy in known}

    safe = counted(noted, [records[key_of_note(commit)] for commit in noted])
    doubtful = [commit for commit in noted if commit.txid not in safe]
    # the note is about an earlier mirror, or was replaced since this host read it
    again = in_parallel(repo.storage.traits.requests, lambda commit: _note_of(repo, commit), doubtful)
    safe |= counted(doubtful, again)
    return [commit for commit in wanted if commit.txid not in safe]


def key_of_note(commit: Commit) -> str:
    """Return the key of a commit's valid note, which depends on the last restore."""
    return mirrored_key(commit.txid, commit.restored)


def lag_of(repo: Repository, commits: Iterable[Commit], error: str = "") -> MirrorLag:
    """Return the mirror's lag for these live commits. Raises `StorageError`."""
    behind = unmirrored(repo, commits, repo.settings.mirror)
    oldest = min((commit.committed.time for commit in behind), default=None)
    return MirrorLag(
        checkpoints=len(behind),
        bytes=sum(commit.committed.bytes_written for commit in behind),
        seconds=0.0 if oldest is None else max(0.0, (repo.clock() - oldest) / 1e6),
        error=error,
    )


def note(repo: Repository, commit: Commit, mirror: str, copy: Commit | None = None) -> None:
    """Note that ``commit`` is safe in the store at ``mirror``, as ``copy`` (None: unknown).

    The caller must read ``commit`` before it checks this. Raises `StorageError`.
    """
    key = key_of_note(commit)
    record = Mirrored(txid=commit.txid, time=repo.clock(), mirror=mirror, copy=None if copy is None else copy.txid)
    try:
        repo.put_record(key, record)
    except Conflict:
        if _says(_note_of(repo, commit), commit, mirror):
            return
        repo.storage.delete(key)  # a note about an earlier mirror
        repo.put_record(key, record)


def take_back(repo: Repository, commits: Iterable[Commit]) -> None:
    """Delete the notes about ``commits``. Log a warning if this writer has no permission to delete.

    Raises `StorageError`.
    """
    noted = {entry.key for entry in repo.storage.list(PREFIX, known=parse_mirrored)}
    try:
        for key in [key_of_note(commit) for commit in commits if key_of_note(commit) in noted]:
            repo.storage.delete(key)
    except StorageError as error:
        log.warning(
            "casckpt cannot delete the notes about an earlier mirror, so gc waits until a copy deletes them: %s", error
        )


def _note_of(repo: Repository, commit: Commit) -> Read:
    """Return the note about a commit as it is now, or the error raised while reading it."""
    try:
        return repo.get_record(key_of_note(commit), Mirrored)
    except (NotFound, Damaged, Refused) as error:
        return error


def _says(record: Read, commit: Commit, mirror: str, made: float = 0) -> TypeGuard[Mirrored]:
    if not isinstance(record, Mirrored):
        return False
    return (record.txid, record.mirror) == (commit.txid, mirror) and record.time >= made
