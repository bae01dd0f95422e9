"""Which checkpoints are safe in the mirror of a store: the records under mirrored/, and what a gc asks of them.

The settings of a store name its mirror; so a gc knows of it that was started by somebody else, on another host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from casckpt.errors import Conflict, Damaged, NotFound, Refused
from casckpt.format.keys import mirrored_key, parse_mirrored
from casckpt.format.records import Mirrored, encode
from casckpt.repository.commits import Commit
from casckpt.repository.reading import each
from casckpt.repository.repository import Repository
from casckpt.storage.base import Entry

PREFIX = "mirrored/"


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


def unmirrored(repo: Repository, commits: Iterable[Commit], mirror: str | None) -> list[Commit]:
    """Those of ``commits`` that are not known to be safe in ``mirror``, which the settings name; none, if that is None.

    One LIST, and a small read for each record that this process has not seen. Raises `StorageError`.
    """
    wanted = list(commits)
    if mirror is None or not wanted:
        return []
    there = {parse_mirrored(entry.key): entry for entry in repo.storage.list(PREFIX)}
    known = each(repo.storage, lambda commit: _is_safe(repo, there.get(commit.txid), mirror), wanted)
    return [commit for commit, safe in zip(wanted, known, strict=True) if not safe]


def lag_of(repo: Repository, commits: Iterable[Commit], error: str = "") -> MirrorLag:
    """How far the mirror is behind of these, which are live. Raises `StorageError`."""
    behind = unmirrored(repo, commits, repo.settings.mirror)
    oldest = min((commit.committed.time for commit in behind), default=None)
    return MirrorLag(
        checkpoints=len(behind),
        bytes=sum(commit.committed.bytes_written for commit in behind),
        seconds=0.0 if oldest is None else max(0.0, (repo.clock() - oldest) / 1e6),
        error=error,
    )


def note(repo: Repository, commit: Commit, mirror: str) -> None:
    """Write down that ``commit`` is safe in the store at ``mirror``. Raises `StorageError`."""
    key = mirrored_key(commit.txid)
    record = Mirrored(txid=commit.txid, time=repo.clock(), mirror=mirror)
    try:
        repo.put_record(key, record)
    except Conflict:
        if _names(repo, key, mirror):
            return
        repo.storage.delete(key)  # of a mirror that the store had before
        repo.put_record(key, record)
    repo.records.add(key, len(encode(record)), record)


def _is_safe(repo: Repository, entry: Entry | None, mirror: str) -> bool:
    if entry is None:
        return False
    held = repo.records.get(entry.key, entry.size)
    return held.mirror == mirror if isinstance(held, Mirrored) else _names(repo, entry.key, mirror)


def _names(repo: Repository, key: str, mirror: str) -> bool:
    try:
        found: Mirrored = repo.get_record(key, Mirrored)
    except (NotFound, Damaged, Refused):
        return False
    repo.records.add(key, len(encode(found)), found)
    return found.mirror == mirror and key == mirrored_key(found.txid)
