"""Tags: movable names for checkpoints, as numbered generations; one that names nothing deletes the tag.

A tag may end by itself (`casckpt.history.leases`); then it names nothing any more. It names an id: commits of that
id answer to it, and none of them is purged as long as the tag counts for a gc, which is an hour longer than for others,
as their clocks may be behind.
"""

from __future__ import annotations

import difflib
import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from casckpt.errors import CasckptError, Conflict, Damaged, NotFound, Refused
from casckpt.format.keys import check_tag, parse_tag, tag_key
from casckpt.format.names import ManifestId, TxId
from casckpt.format.records import TagRecord
from casckpt.history.commits import Commit, CommitList, list_commits, refresh, restore
from casckpt.repository.reading import Read, check_no_file, key_of, read_records
from casckpt.repository.repository import Repository
from casckpt.repository.requirements import check_requirements
from casckpt.storage.base import ListedObject

PREFIX = "tags/"
FOREIGN_CLOCKS = 3600 * 10**6
"""Microseconds by which the clock of another host may be behind that of a gc."""


@dataclass(frozen=True)
class Tag:
    """A movable name. ``generation``: its number in tags/<name>/. ``txid``, ``manifest``: of the commit it was set on.

    ``expires``: its last microsecond, None for a tag without an end. ``holder``: host:pid of who set it. ``unique``:
    one text in all generations of one lease.
    """

    name: str
    generation: int
    txid: TxId
    manifest: ManifestId
    expires: int | None = None
    holder: str = ""
    unique: str = ""


@dataclass(frozen=True)
class TagList:
    """All tags, and the names whose newest record cannot be read, and why."""

    tags: Mapping[str, Tag]
    damaged: Mapping[str, CasckptError]

    def raise_damage(self) -> None:
        """Raise the first of ``damaged``, saying what to do."""
        for name, error in self.damaged.items():
            advice = f"Set the tag again, or delete it (`casckpt tag STORE --delete {name}`)"
            raise type(error)(f"{error}. {advice}", key=error.key) from error


def list_tags(repo: Repository, *, anew: bool = False, slack: int = 0) -> TagList:
    """Return a snapshot made by one LIST; a damaged record spoils its own tag alone. Raises `StorageError`.

    ``anew``: read every record, also those that the catalogue has. ``slack``: microseconds that tags count beyond their
    end.
    """
    since = repo.clock() - slack  # read before the listing: what is set or renewed while that runs may not be in it
    return _read(repo, PREFIX, since, anew=anew)


def tags(repo: Repository, *, anew: bool = False, slack: int = 0) -> dict[str, Tag]:
    """Return all tags by name, sorted. ``anew``, ``slack``: as in `list_tags`.

    Raises `Damaged` or `Refused` if one cannot be read, for it protects a checkpoint from gc and policies, and nobody
    knows which; `StorageError`.
    """
    found = list_tags(repo, anew=anew, slack=slack)
    found.raise_damage()
    return dict(found.tags)


def get_tag(repo: Repository, name: str) -> Tag | None:
    """Read a tag; None if there is none. Raises `InvalidInput`, `Damaged`, `Refused`, `StorageError`."""
    found = _read(repo, f"{PREFIX}{check_tag(name)}/", repo.clock())
    found.raise_damage()
    return found.tags.get(name)


def set_tag(repo: Repository, name: str, commit: Commit) -> Tag:
    """Let ``name`` name ``commit``, without an end. A forgotten checkpoint is restored by that.

    So is one that is thinned at this instant: all is named that ``commit`` has.

    Raises `InvalidInput` for a bad name; `Conflict` if the checkpoint was purged, if it is forgotten and cannot be
    restored, or if somebody else moved the tag at this instant; `StorageError`.
    """
    check_tag(name)
    if not commit.live:
        raise Conflict(f"{commit} was {commit.last}: it cannot be tagged", checkpoints=(commit.committed.manifest,))
    check_requirements(repo)
    if commit.last == "forgotten":
        commit = restore(repo, commit)
    number, found = newest_generation(repo, name)
    tag = write_generation(repo, name, number + 1, commit)
    # a gc lists tags before it purges: either it saw this one, or its purge is seen here
    now = refresh(repo, commit)
    if not now.visible:
        now = list_commits(repo).of_id(commit.id) or now  # it may have been rewritten
    if not now.live:
        take_back(repo, tag, found.tags.get(name))
        raise Conflict(f"{commit} was purged just now: it cannot be tagged", checkpoints=(commit.id,))
    if not now.visible:
        try:
            restore(repo, now)
        except Conflict:  # its place was taken at this instant
            take_back(repo, tag, found.tags.get(name))
            raise
    elif now.txid != commit.txid and now.dropped not in (None, commit.dropped):
        with suppress(Conflict):  # it was purged: what is left is tagged
            restore(repo, commit)
    return tag


def delete_tag(repo: Repository, name: str) -> None:
    """Delete a tag, one that cannot be read too.

    Raises `NotFound` if there is none, `Conflict` if somebody else moved it at this instant.
    """
    check_tag(name)
    check_requirements(repo)
    number, found = newest_generation(repo, name)
    if name not in found.tags and name not in found.damaged:
        raise no_tag(repo, name)
    end_generation(repo, name, number + 1)


def tags_of(found: Mapping[str, Tag], id: ManifestId) -> list[str]:
    """Return the names of the tags on a checkpoint, sorted."""
    return sorted(name for name, tag in found.items() if tag.manifest == id)


def tagged_txids(found: Mapping[str, Tag], commits: Iterable[Commit]) -> set[TxId]:
    """Return which of ``commits`` (revoked ones are not among them) a tag names."""
    named = {tag.manifest for tag in found.values()}
    return {commit.txid for commit in commits if commit.id in named}


def named_by(tag: Tag, listed: CommitList) -> Commit | None:
    """Return the commit that a tag names: of its id, visible before forgotten ones, and those before purged ones.

    Of several the one it was set on.
    """
    same = [commit for commit in listed.live() if commit.id == tag.manifest]
    found = listed.commits.get(tag.txid)
    return max(same, key=lambda commit: (*commit.rank[:3], commit is found, commit.order), default=found)


def no_tag(repo: Repository, name: str) -> NotFound:
    """Return the error that says which tags there are instead."""
    names = sorted(list_tags(repo).tags)
    near = difflib.get_close_matches(name, names, 5) or names[:5]
    there = f"there are: {', '.join(near)}" if near else "there are none; `casckpt tag STORE NAME REF` makes one"
    return NotFound(f"there is no tag {name!r} in {repo.storage.url}; {there}")


def _read(repo: Repository, prefix: str, since: int, *, anew: bool = False) -> TagList:
    return _read_newest(repo, prefix, _newest_entries(repo, prefix), since, anew=anew)


def _read_newest(
    repo: Repository, prefix: str, newest: Mapping[str, tuple[int, ListedObject]], since: int, *, anew: bool = False
) -> TagList:
    """Read the records. ``since``: tags that end before are left out."""
    found = read_records(repo, prefix, [entry for _, entry in newest.values()], lambda _: TagRecord, anew=anew)
    tags: dict[str, Tag] = {}
    damaged: dict[str, CasckptError] = {}
    for name in sorted(newest):
        number, entry = newest[name]
        if isinstance(found[entry.key], NotFound) and _is_gone(repo, entry):
            continue  # it was listed, and deleted since: what is deleted was over
        record = _checked(found[entry.key], name, entry.key)
        if isinstance(record, CasckptError):
            damaged[name] = record
        elif (tag := _tag(number, record)) is not None and (tag.expires is None or tag.expires >= since):
            tags[name] = tag
    return TagList(tags, damaged)


def _is_gone(repo: Repository, entry: ListedObject) -> bool:
    """Tell whether what was listed is so no more; one that is, and cannot be read, is damage."""
    return entry.size >= 0 and not any(one.key == entry.key for one in repo.storage.list(entry.key, known=parse_tag))


def _newest_entries(repo: Repository, prefix: str) -> dict[str, tuple[int, ListedObject]]:
    """Return the highest generation of each tag, by name; also one that is missing, but that this host has seen."""
    return {name: max(found.items()) for name, found in _generations(repo, prefix).items()}


def _generations(repo: Repository, prefix: str) -> dict[str, dict[int, ListedObject]]:
    """Return all generations of each tag, by name and number; also the highest that this host has seen."""
    seen = _seen(repo, prefix)
    found: dict[str, dict[int, ListedObject]] = defaultdict(dict)
    for entry in repo.storage.list(prefix, known=parse_tag):
        key = parse_tag(entry.key)
        if key is None:
            check_no_file(repo.storage.url, entry, parse_tag)
        else:
            found[key[0]][key[1]] = entry
    if _lost(seen, found):
        list_commits(repo)  # where commits are missing too, the whole store was put back, and what was seen is dropped
        for name, number in _lost(_seen(repo, prefix), found).items():
            found[name][number] = ListedObject(tag_key(name, number), -1)
    return found


def _seen(repo: Repository, prefix: str) -> dict[str, int]:
    """Return the highest generation of each tag that this host has read. Ask before a listing: others go on learning.

    The newest of a name never goes. Where it is missing, tags/ was moved away, or is an older one: nobody knows what
    the tag protects.
    """
    keys = filter(None, (parse_tag(key_of(row)) for row in repo.catalogue.keys(prefix)))
    return dict(sorted(keys, key=lambda key: key[1]))


def _lost(seen: Mapping[str, int], found: Mapping[str, Mapping[int, ListedObject]]) -> dict[str, int]:
    return {name: number for name, number in seen.items() if number > max(found.get(name, ()), default=-1)}


def newest_generation(repo: Repository, name: str) -> tuple[int, TagList]:
    """Return (number of the highest generation of a tag, -1 for none; what it says, over or not)."""
    folder = f"{PREFIX}{name}/"
    newest = _newest_entries(repo, folder)
    number = newest.get(name, (-1, None))[0]
    return number, _read_newest(repo, folder, newest, 0)


def write_generation(
    repo: Repository, name: str, number: int, commit: Commit, *, expires: int | None = None, unique: str = ""
) -> Tag:
    """Create a generation that names ``commit``; what it says. Raises `Conflict` if the number is taken."""
    holder = f"{socket.gethostname()}:{os.getpid()}"
    tag = Tag(name, number, commit.txid, commit.id, expires, holder, unique or repo.entropy(8).hex())
    _put(repo, tag)
    return tag


def end_generation(repo: Repository, name: str, number: int) -> None:
    """Create a generation that deletes the tag. Raises `Conflict` if the number is taken."""
    _create(repo, number, TagRecord(name=name, time=repo.clock(), unique=repo.entropy(8).hex()))


def take_back(repo: Repository, tag: Tag, before: Tag | None) -> None:
    """Undo a generation that was not to be: the tag is what it was ``before``, unless somebody has moved it since."""
    number = tag.generation + 1
    with suppress(Conflict):
        if before is None:
            end_generation(repo, tag.name, number)
        else:
            _put(repo, replace(before, generation=number))


def remove_old_generations(repo: Repository) -> None:
    """Delete the generations behind the newest one of each tag that is over. The newest stays, for ever.

    Else its number would be used again, and one who slept meanwhile would delete that. And a listing may miss what is
    put while it runs: it must find what was newest before, unless that is over too. Raises `StorageError`.
    """
    since = repo.clock() - FOREIGN_CLOCKS
    several = {name: found for name, found in _generations(repo, PREFIX).items() if len(found) > 1}
    counting = _read_newest(repo, PREFIX, {name: max(found.items()) for name, found in several.items()}, since)
    for name in several.keys() - counting.tags.keys() - counting.damaged.keys():
        for number in sorted(several[name])[:-1]:
            repo.storage.delete(tag_key(name, number))


def _put(repo: Repository, tag: Tag) -> None:
    record = TagRecord(
        name=tag.name, time=repo.clock(), unique=tag.unique, txid=tag.txid, manifest=tag.manifest, expires=tag.expires,
        holder=tag.holder,
    )  # fmt: skip
    _create(repo, tag.generation, record)


def _create(repo: Repository, number: int, record: TagRecord) -> None:
    try:
        repo.put_record(tag_key(record.name, number), record)
    except Conflict as error:
        message = f"tag {record.name!r} was moved by somebody else at this instant; look at it, and try again"
        raise Conflict(message, key=error.key) from error


def _tag(number: int, record: TagRecord) -> Tag | None:
    """Return what a record says; None for one that deletes the tag."""
    if record.txid is None or record.manifest is None:
        return None
    return Tag(record.name, number, record.txid, record.manifest, record.expires, record.holder, record.unique)


def _checked(record: Read, name: str, key: str) -> Read:
    if isinstance(record, NotFound):
        return Damaged(
            f"{key} is missing, which this host has read before. Put tags/ back, if it is elsewhere", key=key
        )
    if isinstance(record, CasckptError) or record.name == name:
        return record
    return Refused(f"{key} is not usable: it holds a record of tag {record.name[:100]!r}", key=key)
