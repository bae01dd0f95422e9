"""Tags: movable names for commits, as numbered generations; one that names nothing deletes the tag."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from casckpt.errors import CasckptError, Conflict, Damaged, NotFound, Refused
from casckpt.format.keys import check_tag, parse_tag, tag_key
from casckpt.format.names import ManifestId, TxId
from casckpt.format.records import TagRecord
from casckpt.repository.commits import Commit, list_commits, refresh, restore
from casckpt.repository.reading import Read, check_no_file, key_of, read_records
from casckpt.repository.repository import Repository
from casckpt.storage.base import ListedObject

PREFIX = "tags/"


@dataclass(frozen=True)
class Tag:
    """A movable name. ``generation``: its number in tags/<name>/. ``txid``, ``manifest``: of the commit it names."""

    name: str
    generation: int
    txid: TxId
    manifest: ManifestId


@dataclass(frozen=True)
class TagList:
    """All tags, and the names whose newest record cannot be read, and why."""

    tags: Mapping[str, Tag]
    damaged: Mapping[str, CasckptError]

    def raise_damage(self) -> None:
        """Raise the first of ``damaged``, saying what to do."""
        for name, error in self.damaged.items():
            advice = f"Set the tag anew, or delete it (`casckpt tag STORE --delete {name}`)"
            raise type(error)(f"{error}. {advice}", key=error.key) from error


def list_tags(repo: Repository, *, anew: bool = False) -> TagList:
    """Return a snapshot made by one LIST; a damaged record spoils its own tag alone. Raises `StorageError`.

    ``anew``: read every record, also those that the catalogue has.
    """
    return _read(repo, PREFIX, anew=anew)


def tags(repo: Repository, *, anew: bool = False) -> dict[str, Tag]:
    """Return all tags by name, sorted. ``anew``: as in `list_tags`.

    Raises `Damaged` or `Refused` if one cannot be read, for it protects a checkpoint from gc and policies, and nobody
    knows which; `StorageError`.
    """
    found = list_tags(repo, anew=anew)
    found.raise_damage()
    return dict(found.tags)


def get_tag(repo: Repository, name: str) -> Tag | None:
    """Read a tag; None if there is none. Raises `InvalidInput`, `Damaged`, `Refused`, `StorageError`."""
    found = _read(repo, f"{PREFIX}{check_tag(name)}/")
    found.raise_damage()
    return found.tags.get(name)


def set_tag(repo: Repository, name: str, commit: Commit) -> Tag:
    """Let ``name`` name ``commit``. A forgotten checkpoint is restored by that.

    Raises `InvalidInput` for a bad name; `Conflict` if the checkpoint was purged, if it is forgotten and cannot be
    restored, or if somebody else moved the tag at this instant; `StorageError`.
    """
    check_tag(name)
    if not commit.live:
        raise Conflict(f"{commit} was {commit.last}: it cannot be tagged", checkpoints=(commit.committed.manifest,))
    if commit.last == "forgotten":
        commit = restore(repo, commit)
    number, found = _newest(repo, name)
    before = found.tags.get(name)
    tag = _write(repo, name, number + 1, commit.txid, commit.id)
    # a gc lists tags before it purges: either it saw this one, or its purge is seen here
    now = refresh(repo, commit)
    if now.last == "purged":
        _write(repo, name, tag.generation + 1, before.txid if before else None, before.manifest if before else None)
        raise Conflict(f"{commit} was purged just now: it cannot be tagged", checkpoints=(commit.id,))
    if now.last == "forgotten":
        restore(repo, now)
    return tag


def delete_tag(repo: Repository, name: str) -> None:
    """Delete a tag, one that cannot be read too.

    Raises `NotFound` if there is none, `Conflict` if somebody else moved it at this instant.
    """
    check_tag(name)
    number, found = _newest(repo, name)
    if name not in found.tags and name not in found.damaged:
        raise no_tag(repo, name)
    _write(repo, name, number + 1, None, None)


def tags_of(found: Mapping[str, Tag], txid: TxId) -> list[str]:
    """Return the names of the tags on a commit, sorted."""
    return sorted(name for name, tag in found.items() if tag.txid == txid)


def no_tag(repo: Repository, name: str) -> NotFound:
    """Return the error that says which tags there are instead."""
    names = sorted(list_tags(repo).tags)
    near = difflib.get_close_matches(name, names, 5) or names[:5]
    there = f"there are: {', '.join(near)}" if near else "there are none; `casckpt tag STORE NAME REF` makes one"
    return NotFound(f"there is no tag {name!r} in {repo.storage.url}; {there}")


def _read(repo: Repository, prefix: str, *, anew: bool = False) -> TagList:
    return _read_newest(repo, prefix, _newest_entries(repo, prefix), anew=anew)


def _read_newest(
    repo: Repository, prefix: str, newest: Mapping[str, tuple[int, ListedObject]], *, anew: bool = False
) -> TagList:
    found = read_records(repo, prefix, [entry for _, entry in newest.values()], lambda _: TagRecord, anew=anew)
    tags: dict[str, Tag] = {}
    damaged: dict[str, CasckptError] = {}
    for name in sorted(newest):
        number, entry = newest[name]
        record = _checked(found[entry.key], name, entry.key)
        if isinstance(record, CasckptError):
            damaged[name] = record
        elif record.txid is not None and record.manifest is not None:
            tags[name] = Tag(name, number, record.txid, record.manifest)
    return TagList(tags, damaged)


def _newest_entries(repo: Repository, prefix: str) -> dict[str, tuple[int, ListedObject]]:
    """Return the highest generation of each tag, by name; also one that is missing, but that this host has seen."""
    seen = _seen(repo, prefix)
    newest: dict[str, tuple[int, ListedObject]] = {}
    for entry in repo.storage.list(prefix, known=parse_tag):
        key = parse_tag(entry.key)
        if key is None:
            check_no_file(repo.storage.url, entry, parse_tag)
        elif key[1] >= newest.get(key[0], (-1, entry))[0]:
            newest[key[0]] = (key[1], entry)
    if _lost(seen, newest):
        list_commits(repo)  # where commits are missing too, the whole store was put back, and what was seen is dropped
        lost = _lost(_seen(repo, prefix), newest)
        newest |= {name: (number, ListedObject(tag_key(name, number), -1)) for name, number in lost.items()}
    return newest


def _seen(repo: Repository, prefix: str) -> dict[str, int]:
    """Return the highest generation of each tag that this host has read. Ask before a listing: others go on learning.

    None ever goes. Where it is missing, tags/ was moved away, or is an older one: nobody knows what the tag protects.
    """
    keys = filter(None, (parse_tag(key_of(row)) for row in repo.catalogue.keys(prefix)))
    return dict(sorted(keys, key=lambda key: key[1]))


def _lost(seen: Mapping[str, int], newest: Mapping[str, tuple[int, ListedObject]]) -> dict[str, int]:
    return {name: number for name, number in seen.items() if name not in newest or newest[name][0] < number}


def _newest(repo: Repository, name: str) -> tuple[int, TagList]:
    """Return (number of the highest generation of a tag, -1 for none; what it says)."""
    folder = f"{PREFIX}{name}/"
    newest = _newest_entries(repo, folder)
    number = newest.get(name, (-1, None))[0]
    return number, _read_newest(repo, folder, newest)


def _write(repo: Repository, name: str, number: int, txid: TxId | None, manifest: ManifestId | None) -> Tag:
    record = TagRecord(name=name, time=repo.clock(), unique=repo.entropy(8).hex(), txid=txid, manifest=manifest)
    try:
        repo.put_record(tag_key(name, number), record)
    except Conflict as error:
        message = f"tag {name!r} was moved by somebody else at this instant; look at it, and try again"
        raise Conflict(message, key=error.key) from error
    return Tag(name, number, cast("TxId", txid), cast("ManifestId", manifest))


def _checked(record: Read, name: str, key: str) -> Read:
    if isinstance(record, NotFound):
        return Damaged(
            f"{key} is missing, which this host has read before. Put tags/ back, if it is elsewhere", key=key
        )
    if isinstance(record, CasckptError) or record.name == name:
        return record
    return Refused(f"{key} is not usable: it holds a record of tag {record.name[:100]!r}", key=key)
