"""Records of what is safe in the mirror of a store, under mirrored/, and what a gc asks of them.

A record counts until the checkpoint is restored the next time: the mirror was told to forget it before, and may have
purged it since.

The settings of a store name its mirror; so a gc knows of it that was started by somebody else, on another host. It
looks when the store there was made before it goes by the records. A folder that was deleted, or whose disk is not
mounted, holds none of what they say; nor does a store that was made since, in the place of another. Where it may not
look, they count all the same: a gc needs no credentials of the mirror.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

from casckpt.base.parallel import in_parallel
from casckpt.errors import CasckptError, Conflict, Damaged, NotFound, Refused, StorageError
from casckpt.format.keys import MARKER, mirrored_key, parse_mirrored
from casckpt.format.records import MAX_RECORD_BYTES, Mirrored, decode_marker
from casckpt.history.commits import Commit, list_commits
from casckpt.repository.reading import Read, read_records
from casckpt.repository.repository import Repository
from casckpt.storage import ObjectStore, open_storage

PREFIX = "mirrored/"
NO_STORE = math.inf
"""When a store was made that is not there: all notes are older."""
_SHORTLY = {"request_timeout": 10.0, "call_timeout": 20.0}  # nobody waits for long, as the notes count all the same

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MirrorLag:
    """How far a mirror is behind. ``checkpoints``: that are not safe there yet.

    ``bytes``: of blobs that their saves wrote. ``seconds``: since the oldest of them was committed. ``error``: why the
    last attempt of this process failed, "" if it did not.
    """

    checkpoints: int
    bytes: int
    seconds: float
    error: str = ""


def mirror_to_wait_for(repo: Repository) -> str | None:
    """Return the URL of the mirror that a gc waits for, as the settings have it.

    Raises `Damaged` where they are lost: what is not safe in the mirror yet would be deleted; `StorageError`.
    """
    generation, settings = repo.newest_settings()
    if generation < 0 and (noted := next(iter(repo.storage.list(PREFIX, known=parse_mirrored)), None)):
        raise Damaged(
            f"gc deletes nothing: settings/ of {repo.storage.url} is lost: {noted.key} says that there was a mirror. "
            "Put settings/ back from a copy of the store, or save with the mirror again (casckpt.open with mirror=URL)",
            key="settings/",
        )
    return settings.mirror


def made_at(storage: ObjectStore) -> float:
    """Return when the store there was made, in microseconds: what is noted of before tells of another one.

    `NO_STORE` where there is none: all that is noted is older. Raises `Damaged`, `Refused`, `StorageError`.
    """
    try:
        return decode_marker(storage.get(MARKER, limit=MAX_RECORD_BYTES)).created_at
    except NotFound:
        return NO_STORE


def mirror_made_at(repo: Repository, mirror: str, *, near: bool = False) -> float | None:
    """Return when the store at ``mirror`` was made: one small request. None, and a warning, where that cannot be seen.

    With what ``repo`` was opened with to reach it, else with what the environment gives. A folder that cannot be looked
    at is none: no credentials are missing there. ``near``: nobody may wait for a server; None, too, where there is one.
    """
    is_remote = True
    try:
        storage = _storage_of(repo, mirror)
        is_remote = storage.traits.remote
        return None if near and is_remote else made_at(storage)
    except CasckptError as error:
        counts = ", so what is noted of it counts" if is_remote else ""
        log.warning("nobody can tell whether the mirror %s is there%s: %s", mirror, counts, error)
        return None if is_remote else NO_STORE


def _storage_of(repo: Repository, mirror: str) -> ObjectStore:
    if repo.mirror is not None and repo.mirror.url == mirror:
        return repo.mirror
    found = open_storage(mirror)
    return open_storage(mirror, _SHORTLY) if found.traits.remote else found


def needed_in_mirror(repo: Repository) -> list[Commit]:
    """Return the commits that are to be in the mirror, as the settings have it, oldest first. Raises `StorageError`."""
    return list_commits(repo).needed(loses=bool(repo.settings.mirror_thinned))


def unmirrored(repo: Repository, commits: Iterable[Commit], mirror: str | None, made: float = 0) -> list[Commit]:
    """Return those of ``commits`` not known to be safe in ``mirror``, which the settings name; none, if that is None.

    What was noted before ``made`` does not count. One LIST, and a small read for each record that this host has not
    seen. Raises `StorageError`.
    """
    wanted = list(commits)
    if mirror is None or not wanted:
        return []
    there = {entry.key: entry for entry in repo.storage.list(PREFIX, known=parse_mirrored)}
    noted = [commit for commit in wanted if key_of_note(commit) in there]
    found = read_records(repo, PREFIX, [there[key_of_note(commit)] for commit in noted], lambda _: Mirrored)
    doubtful = [commit for commit in noted if not _says(found[key_of_note(commit)], commit, mirror, made)]
    # of a mirror that the store had before; or the record was created anew since this host saw it
    again = in_parallel(repo.storage.traits.requests, lambda commit: _is_noted(repo, commit, mirror, made), doubtful)
    safe = {commit.txid for commit in noted}
    safe -= {commit.txid for commit, says in zip(doubtful, again, strict=True) if not says}
    return [commit for commit in wanted if commit.txid not in safe]


def key_of_note(commit: Commit) -> str:
    """Return the key of the note on a commit that counts, as the log of that is now."""
    return mirrored_key(commit.txid, commit.restored)


def lag_of(repo: Repository, commits: Iterable[Commit], error: str = "") -> MirrorLag:
    """Return how far the mirror is behind of these, which are live. Raises `StorageError`."""
    behind = unmirrored(repo, commits, repo.settings.mirror)
    oldest = min((commit.committed.time for commit in behind), default=None)
    return MirrorLag(
        checkpoints=len(behind),
        bytes=sum(commit.committed.bytes_written for commit in behind),
        seconds=0.0 if oldest is None else max(0.0, (repo.clock() - oldest) / 1e6),
        error=error,
    )


def note(repo: Repository, commit: Commit, mirror: str) -> None:
    """Write down that ``commit``, which was read before that was seen, is safe in the store at ``mirror``.

    Raises `StorageError`.
    """
    key = key_of_note(commit)
    record = Mirrored(txid=commit.txid, time=repo.clock(), mirror=mirror)
    try:
        repo.put_record(key, record)
    except Conflict:
        if _is_noted(repo, commit, mirror):
            return
        repo.storage.delete(key)  # of a mirror that the store had before
        repo.put_record(key, record)


def take_back(repo: Repository, commits: Iterable[Commit]) -> None:
    """Take back what `note` wrote down of ``commits``. Raises `StorageError`, but not where writers may not delete."""
    noted = {entry.key for entry in repo.storage.list(PREFIX, known=parse_mirrored)}
    try:
        for key in [key_of_note(commit) for commit in commits if key_of_note(commit) in noted]:
            repo.storage.delete(key)
    except StorageError as error:
        log.warning("notes of an earlier mirror cannot be taken back, so a gc waits until a copy can: %s", error)


def _is_noted(repo: Repository, commit: Commit, mirror: str, made: float = 0) -> bool:
    """Tell whether the note is in the store now."""
    try:
        found: Mirrored = repo.get_record(key_of_note(commit), Mirrored)
    except (NotFound, Damaged, Refused):
        return False
    return _says(found, commit, mirror, made)


def _says(record: Read, commit: Commit, mirror: str, made: float) -> bool:
    if not isinstance(record, Mirrored):
        return False
    return (record.txid, record.mirror) == (commit.txid, mirror) and record.time >= made
