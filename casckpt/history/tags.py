"""Tags: movable names for checkpoints, stored as numbered generations.

A generation without a target deletes the tag.

A tag names an id, and protects all commits of that id from gc. A tag may expire (`casckpt.history.leases`). gc honors
an expired tag for one more hour, because the clocks of other hosts may be behind.
"""

from __future__ import annotations

import difflib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from casckpt.errors import CasckptError, Conflict, Damaged, NotFound, Refused
from casckpt.format.keys import check_tag, parse_tag, tag_key
from casckpt.format.names import ManifestId, TxId
from casckpt.format.records import TagRecord
from casckpt.history.commits import Commit, CommitList, list_commits, record_tag, refresh, restore
from casckpt.repository.reading import Read, check_no_file, check_requirements, key_of, read_records
from casckpt.repository.repository import Repository
from casckpt.storage.base import ListedObject

PREFIX = "tags/"
FOREIGN_CLOCKS = 3600 * 10**6
"""The number of microseconds by which another host's clock may be behind the clock of a gc."""


@dataclass(frozen=True)
class Tag:
    """A movable name. ``generation``: its number in tags/<name>/.

    ``txid``, ``manifest``: those of the commit on which it was set.

    ``expires``: the last microsecond at which it is valid. None if it never expires. ``holder``: who set it, as
    user@host:pid. ``unique``: a string that is the same in all generations of a lease.
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
    """All tags, and the error for each tag whose newest record cannot be read."""

    tags: Mapping[str, Tag]
    damaged: Mapping[str, CasckptError]

    def raise_damage(self) -> None:
        """Raise the first error in ``damaged``, with advice."""
        others = f" ({len(self.damaged) - 1} more tags have the same problem)" if len(self.damaged) > 1 else ""
        for name, error in self.damaged.items():
            advice = f"Set the tag again, or delete it (`casckpt tag STORE --delete {name}`)"
            raise type(error)(f"{error}. {advice}{others}", key=error.key) from error


def list_tags(repo: Repository, *, anew: bool = False, slack: int = 0, listed: CommitList | None = None) -> TagList:
    """Return all tags, with one LIST. A damaged record affects only its own tag. Raises `StorageError`.

    ``anew``: read every record, even if it is in the catalogue. ``slack``: the number of microseconds for which
    expired tags still count. ``listed``: an earlier listing. A tag that it records but tags/ lacks counts as damaged.
    """
    # taken before the listing, because a listing may miss tags that are set or renewed while it runs
    since = repo.clock() - slack
    return _read_newest(repo, PREFIX, _newest_entries(repo, PREFIX, listed), since, anew=anew)


def tags(repo: Repository, *, anew: bool = False, slack: int = 0, listed: CommitList | None = None) -> dict[str, Tag]:
    """Return all tags, sorted by name. For the arguments, see `list_tags`.

    Raises `Damaged` or `Refused` if a tag cannot be read, because such a tag protects an unknown checkpoint from gc
    and policies. Raises `StorageError`.
    """
    found = list_tags(repo, anew=anew, slack=slack, listed=listed)
    found.raise_damage()
    return dict(found.tags)


def get_tag(repo: Repository, name: str) -> Tag | None:
    """Read a tag. Return None if it does not exist. Raises `InvalidInput`, `Damaged`, `Refused`, and `StorageError`."""
    prefix = f"{PREFIX}{check_tag(name)}/"
    listed = _read_newest(repo, prefix, _newest_entries(repo, prefix), repo.clock())
    listed.raise_damage()
    return listed.tags.get(name)


def set_tag(repo: Repository, name: str, commit: Commit) -> Tag:
    """Set tag ``name`` on ``commit``. The tag never expires. If the checkpoint is forgotten, this restores it.

    This also restores a checkpoint that is being thinned at this moment, because the tag protects all entries of
    ``commit``.

    Raises `InvalidInput` for an invalid name. Raises `Conflict` if the checkpoint was purged, if it is forgotten and
    cannot be restored, or if another process moved the tag at this moment. Raises `StorageError`.
    """
    check_tag(name)
    if not commit.live:
        raise Conflict(f"{commit} was {commit.last}, so it cannot be tagged", checkpoints=(commit.committed.manifest,))
    check_requirements(repo)
    if commit.last == "forgotten":
        commit = restore(repo, commit)
    number, before = newest_generation(repo, name, list_commits(repo))
    tag = write_generation(repo, name, number + 1, commit)
    # a gc lists tags before it purges: either the gc saw this tag, or this call sees its purge
    now = refresh(repo, commit)
    if not now.visible:
        now = list_commits(repo).of_id(commit.id) or now  # it may have been rewritten
    if not now.live:
        take_back(repo, tag, before.tags.get(name))
        raise Conflict(f"{commit} was just purged, so it cannot be tagged", checkpoints=(commit.id,))
    if not now.visible:
        try:
            restore(repo, now)
        except Conflict:  # another checkpoint took its run and step at this moment
            take_back(repo, tag, before.tags.get(name))
            raise
    elif now.txid != commit.txid and now.dropped not in (None, commit.dropped):
        with suppress(Conflict):  # the old commit was purged, so the tag names the thinned one
            restore(repo, commit)
    record_tag(repo, commit, name, tag.generation)  # last: a recorded generation must exist
    return tag


def delete_tag(repo: Repository, name: str) -> None:
    """Delete a tag, even if it is unreadable.

    Raises `NotFound` if it does not exist, and `Conflict` if another process moved it at this moment.
    """
    check_tag(name)
    check_requirements(repo)
    number, found = newest_generation(repo, name, list_commits(repo))
    if name not in found.tags and name not in found.damaged:
        raise no_tag(repo, name)
    end_generation(repo, name, number + 1)


def tags_of(found: Mapping[str, Tag], id: ManifestId) -> list[str]:
    """Return the names of the tags on a checkpoint, sorted."""
    return sorted(name for name, tag in found.items() if tag.manifest == id)


def tagged_txids(found: Mapping[str, Tag], commits: Iterable[Commit]) -> set[TxId]:
    """Return the transactions of those ``commits`` that a tag names.

    ``commits`` must not include revoked transactions.
    """
    named = {tag.manifest for tag in found.values()}
    return {commit.txid for commit in commits if commit.id in named}


def named_by(tag: Tag, listed: CommitList) -> Commit | None:
    """Return the commit that a tag names by id: preferably a visible one, otherwise a forgotten, then a purged one.

    If several commits rank equally, the commit on which the tag was set is returned.
    """
    same = [commit for commit in listed.live() if commit.id == tag.manifest]
    target = listed.commits.get(tag.txid)
    return max(same, key=lambda commit: (*commit.rank[:3], commit is target, commit.order), default=target)


def no_tag(repo: Repository, name: str) -> NotFound:
    """Return the error for a missing tag. It lists tags that exist."""
    names = sorted(list_tags(repo).tags)
    near = difflib.get_close_matches(name, names, 5) or names[:5]
    there = f"existing tags: {', '.join(near)}" if near else "there are none; `casckpt tag STORE NAME REF` creates one"
    return NotFound(f"there is no tag {name!r} in {repo.storage.url}; {there}")


def _read_newest(
    repo: Repository, prefix: str, newest: Mapping[str, tuple[int, ListedObject]], since: int, *, anew: bool = False
) -> TagList:
    """Read the newest records. ``since``: omit tags that expire before this time."""
    fetched = read_records(repo, prefix, [entry for _, entry in newest.values()], lambda _: TagRecord, anew=anew)
    tags: dict[str, Tag] = {}
    damaged: dict[str, CasckptError] = {}
    for name in sorted(newest):
        number, entry = newest[name]
        if isinstance(fetched[entry.key], NotFound) and _is_gone(repo, entry):
            continue  # it was deleted after the listing, so it had expired
        record = _checked(fetched[entry.key], name, entry.key)
        if isinstance(record, CasckptError):
            damaged[name] = record
        elif (tag := _tag(number, record)) is not None and (tag.expires is None or tag.expires >= since):
            tags[name] = tag
    return TagList(tags, damaged)


def _is_gone(repo: Repository, entry: ListedObject) -> bool:
    """Return whether a record was deleted after the listing. If it was not, an unreadable record is damaged."""
    return entry.size >= 0 and not any(one.key == entry.key for one in repo.storage.list(entry.key, known=parse_tag))


def _newest_entries(
    repo: Repository, prefix: str, listed: CommitList | None = None
) -> dict[str, tuple[int, ListedObject]]:
    """Return the highest generation of each tag, by name. Include missing generations, as `_generations` does."""
    return {name: max(found.items()) for name, found in _generations(repo, prefix, listed).items()}


def _generations(
    repo: Repository, prefix: str, listed: CommitList | None = None, *, again: bool = True
) -> dict[str, dict[int, ListedObject]]:
    """Return all generations of each tag, by name and number. Include the highest one that `_seen` returns.

    ``again``: if that one is missing, list again. A listing may miss both a new generation and an old one that was
    deleted because of it.
    """
    seen = _seen(repo, prefix, listed)
    generations: dict[str, dict[int, ListedObject]] = defaultdict(dict)
    for entry in repo.storage.list(prefix, known=parse_tag):
        key = parse_tag(entry.key)
        if key is None:
            check_no_file(repo.storage.url, entry, parse_tag)
        else:
            generations[key[0]][key[1]] = entry
    lost = _lost(seen, generations)
    if lost and again:
        # this drops the caches if commits are missing too, because the store was then restored from a copy
        list_commits(repo)
        return _generations(repo, prefix, listed, again=False)
    for name, number in lost.items():
        generations[name][number] = ListedObject(tag_key(name, number), -1)
    return generations


def _seen(repo: Repository, prefix: str, listed: CommitList | None) -> dict[str, int]:
    """Return the highest generation of each tag that this host has read, or that ``listed`` records.

    Call this before a listing, not after it. The newest generation of a name is never deleted. If it is missing, tags/
    was moved or restored from a copy, and it is unknown which checkpoint the tag protects.
    """
    keys = filter(None, (parse_tag(key_of(row)) for row in repo.catalogue.keys(prefix)))
    others = (key for key in (listed.recorded_tags if listed else {}).items() if tag_key(*key).startswith(prefix))
    return dict(sorted([*keys, *others], key=lambda key: key[1]))


def _lost(seen: Mapping[str, int], found: Mapping[str, Mapping[int, ListedObject]]) -> dict[str, int]:
    return {name: number for name, number in seen.items() if number > max(found.get(name, ()), default=-1)}


def newest_generation(repo: Repository, name: str, listed: CommitList | None = None) -> tuple[int, TagList]:
    """Return the highest generation of a tag (-1 if there is none), and its contents, even if the tag has expired.

    ``listed``: as in `list_tags`.
    """
    folder = f"{PREFIX}{name}/"
    newest = _newest_entries(repo, folder, listed)
    return newest.get(name, (-1, None))[0], _read_newest(repo, folder, newest, 0)


def write_generation(
    repo: Repository, name: str, number: int, commit: Commit, *, expires: int | None = None, unique: str = ""
) -> Tag:
    """Create a generation that names ``commit``, and return the tag. Raises `Conflict` if the number is taken."""
    tag = Tag(name, number, commit.txid, commit.id, expires, _holder(repo), unique or repo.entropy(8).hex())
    _put(repo, tag)
    return tag


def end_generation(repo: Repository, name: str, number: int) -> None:
    """Create a generation that deletes the tag. Raises `Conflict` if the number is taken."""
    record = TagRecord(name=name, time=repo.clock(), unique=repo.entropy(8).hex(), who=_holder(repo))
    _create(repo, number, record)


def _holder(repo: Repository) -> str:
    return f"{repo.who}:{os.getpid()}"


def take_back(repo: Repository, tag: Tag, before: Tag | None) -> None:
    """Undo a generation: reset the tag to its state ``before``, unless another process has moved it in the meantime."""
    number = tag.generation + 1
    with suppress(Conflict):
        if before is None:
            end_generation(repo, tag.name, number)
        else:
            _put(repo, replace(before, generation=number))


def remove_old_generations(repo: Repository) -> None:
    """Delete all but the newest generation of each tag that is deleted or has expired. The newest is kept permanently.

    Otherwise, its number would be reused, and a gc that paused in the meantime would delete the new generation. A tag
    that still counts keeps its old generations, because a listing may miss a generation that is put while it runs.
    Raises `StorageError`.
    """
    since = repo.clock() - FOREIGN_CLOCKS
    several = {name: numbers for name, numbers in _generations(repo, PREFIX).items() if len(numbers) > 1}
    counting = _read_newest(repo, PREFIX, {name: max(numbers.items()) for name, numbers in several.items()}, since)
    for name in several.keys() - counting.tags.keys() - counting.damaged.keys():
        for number in sorted(several[name])[:-1]:
            repo.storage.delete(tag_key(name, number))


def _put(repo: Repository, tag: Tag) -> None:
    record = TagRecord(
        name=tag.name, time=repo.clock(), unique=tag.unique, txid=tag.txid, manifest=tag.manifest, expires=tag.expires,
        who=tag.holder,
    )  # fmt: skip
    _create(repo, tag.generation, record)


def _create(repo: Repository, number: int, record: TagRecord) -> None:
    try:
        repo.put_record(tag_key(record.name, number), record)
    except Conflict as error:
        message = f"another process has just moved tag {record.name!r}: check the tag, and try again"
        raise Conflict(message, key=error.key) from error


def _tag(number: int, record: TagRecord) -> Tag | None:
    """Return the tag of a record. Return None for a record that deletes the tag."""
    if record.txid is None or record.manifest is None:
        return None
    return Tag(record.name, number, record.txid, record.manifest, record.expires, record.who, record.unique)


def _checked(record: Read, name: str, key: str) -> Read:
    if isinstance(record, NotFound):
        message = f"{key} is missing, although it was set. If tags/ was moved, or left out of a copy, restore it"
        return Damaged(message, key=key)
    if isinstance(record, CasckptError) or record.name == name:
        return record
    return Refused(f"{key} is not valid: it holds a record of tag {record.name[:100]!r}", key=key)
