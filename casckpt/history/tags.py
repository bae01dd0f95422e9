"""Tags: movable names for checkpoints, stored as numbered generations.

A generation without a target deletes the tag.

A tag names an id, and protects all commits of that id from gc. A tag may expire. gc honors an expired tag for one more
hour, because the clocks of other hosts may be behind.

Leases (`casckpt.history.leases`) are in a folder of their own, but are otherwise read and listed like expiring tags.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from casckpt.base.parallel import in_parallel
from casckpt.errors import CasckptError, Conflict, Damaged, InvalidInput, NotFound, Refused, StorageError
from casckpt.format.keys import check_tag, is_lease, parse_tag, tag_folder, tag_key
from casckpt.format.names import ManifestId, TxId
from casckpt.format.records import LeaseRecord, TagRecord
from casckpt.history.commits import Commit, CommitList, list_commits, record_tag, refresh, restore
from casckpt.history.folding import Places
from casckpt.repository.reading import Read, check_no_file, check_requirements, key_of, read_records
from casckpt.repository.repository import Repository
from casckpt.storage.base import ListedObject

log = logging.getLogger(__name__)

PREFIX, LEASES = "tags/", "leases/"
FOREIGN_CLOCKS = 3600 * 10**6
"""The number of microseconds by which another host's clock may be behind the clock of a gc."""


@dataclass(frozen=True)
class Tag:
    """A movable name, or a lease. ``generation``: its number in the folder of the name.

    ``txid``, ``manifest``: the transaction of the places on which it was set, and the id of the checkpoint.

    ``expires``: the last microsecond at which it is valid. None if it never expires. ``holder``: who set it, as
    user@host:pid. ``time``: when, in microseconds; 0 if this process has just set it.
    """

    name: str
    generation: int
    txid: TxId
    manifest: ManifestId
    expires: int | None = None
    holder: str = ""
    time: int = field(default=0, compare=False)


@dataclass(frozen=True)
class TagList:
    """All tags and leases, and the error for each one whose newest record cannot be read."""

    tags: Mapping[str, Tag]
    damaged: Mapping[str, CasckptError]

    def raise_damage(self) -> None:
        """Raise the first error in ``damaged``, with advice."""
        others = f" ({len(self.damaged) - 1} more tags have the same problem)" if len(self.damaged) > 1 else ""
        for name, error in self.damaged.items():
            advice = f"Set the tag again, or delete it (`casckpt tag STORE --delete {name}`)"
            if is_lease(name):
                advice = f"End the lease (`casckpt tag STORE --delete {name}`)"
            raise type(error)(f"{error}. {advice}{others}", key=error.key) from error


def list_tags(repo: Repository, *, anew: bool = False, slack: int = 0, listed: CommitList | None = None) -> TagList:
    """Return all tags and leases, by name. A damaged record affects only its own tag. Raises `StorageError`.

    Whoever looks for what prevents a purge calls this or `tags`, so that no process overlooks leases.

    ``anew``: read every record, even if it is in the catalogue. ``slack``: the number of microseconds for which
    expired tags still count. ``listed``: an earlier listing. A tag that it records but tags/ lacks counts as damaged.
    """
    # taken before the listing, because a listing may miss tags that are set or renewed while it runs
    since = repo.clock() - slack

    def read(prefix: str) -> TagList:
        return _read_newest(repo, prefix, _newest_entries(repo, prefix, listed), since, anew=anew)

    named, leased = in_parallel(repo.storage.traits.requests, read, (PREFIX, LEASES))
    return TagList(dict(sorted({**named.tags, **leased.tags}.items())), {**named.damaged, **leased.damaged})


def tags(repo: Repository, *, anew: bool = False, slack: int = 0, listed: CommitList | None = None) -> dict[str, Tag]:
    """Return all tags and leases, sorted by name. For the arguments, see `list_tags`.

    Raises `Damaged` or `Refused` if a tag cannot be read, because such a tag protects an unknown checkpoint from gc
    and policies. Raises `StorageError`.
    """
    found = list_tags(repo, anew=anew, slack=slack, listed=listed)
    found.raise_damage()
    return dict(found.tags)


def get_tag(repo: Repository, name: str) -> Tag | None:
    """Read a tag. Return None if it does not exist. Raises `InvalidInput`, `Damaged`, `Refused`, and `StorageError`."""
    prefix = f"{tag_folder(check_tag(name))}/"
    listed = _read_newest(repo, prefix, _newest_entries(repo, prefix), repo.clock())
    listed.raise_damage()
    return listed.tags.get(name)


def set_tag(repo: Repository, name: str, commit: Commit, *, within: str = "") -> Tag:
    """Set tag ``name`` on ``commit``. The tag never expires. If the checkpoint is forgotten, this restores it.

    Logs a warning if the tag was on another run, unless that is the run ``within`` or below it.

    This also brings back the places of ``commit`` if the checkpoint was thinned since then, because the tag protects
    all of their entries.

    Raises `InvalidInput` for an invalid name. Raises `Conflict` if the checkpoint was purged, if it is forgotten and
    cannot be restored, or if another process moved the tag at this moment. Raises `StorageError`.
    """
    check_new_tag(name)
    if not commit.live:
        raise Conflict(f"{commit} was {commit.last}, so it cannot be tagged", checkpoints=(commit.committed.manifest,))
    check_requirements(repo)
    if commit.last == "forgotten":
        commit = restore(repo, commit)
    listed = list_commits(repo)
    number, before = newest_generation(repo, name, listed)
    if commit.visible and (name, number) in commit.tagged and _is_on(before.tags.get(name), commit):
        return before.tags[name]
    tag = write_generation(repo, name, number + 1, commit)
    _warn_of_other_run(before.tags.get(name), listed, commit, within)
    # a rule reads the log, then lists tags, then takes the next number: either it saw this tag, or it is in the log now
    now = commit
    while True:
        now = refresh(repo, now)
        if not now.visible:
            now = list_commits(repo).of_id(commit.id) or now  # it may have been copied back
        if not now.live:
            take_back(repo, tag, before.tags.get(name))
            raise Conflict(f"{commit} was just purged, so it cannot be tagged", checkpoints=(commit.id,))
        try:
            if not now.visible or _needed(now, commit) != now.places:
                now = restore(repo, now.at(_needed(now, commit)))
            record_tag(repo, now, name, tag.generation)
            return tag
        except Conflict:
            if refresh(repo, now) == now:  # for example, another checkpoint took its run and step
                take_back(repo, tag, before.tags.get(name))
                raise


def _warn_of_other_run(old: Tag | None, listed: CommitList, commit: Commit, within: str) -> None:
    was = old and listed.of_id(old.manifest)
    if old and was and was.run != commit.run and not f"{was.run}/".startswith(f"{within}/"):
        log.warning(
            "tag %s moves from run %s to run %s, and no longer protects %s. If each run is to keep its own, put the "
            "name of the run into the tag", old.name, was.run, commit.run, was,
        )  # fmt: skip


def _is_on(tag: Tag | None, commit: Commit) -> bool:
    return tag is not None and (tag.txid, tag.expires) == (commit.places.txid, None)


def _needed(now: Commit, commit: Commit) -> Places:
    """Return the places that a tag on ``commit`` needs: the current ones, unless only others have all entries."""
    holds = (places for places in (now.places, *reversed(now.existing)) if places.holds(commit.places))
    return next(holds, now.places)


def check_new_tag(name: str) -> None:
    """Raise `InvalidInput` if a tag may not have this name."""
    if is_lease(check_tag(name)):
        raise InvalidInput(f"tag {name!r} is not a valid name, because leases have such names: choose a different one")


def delete_tag(repo: Repository, name: str) -> None:
    """Delete a tag or end a lease, even if it is unreadable. The holder of a lease notices this when it renews it.

    Raises `NotFound` if it does not exist, and `Conflict` if another process moved it at this moment.
    """
    check_tag(name)
    check_requirements(repo)
    number, found = newest_generation(repo, name, list_commits(repo))
    if name not in found.tags and name not in found.damaged:
        raise no_tag(repo, name)
    end_generation(repo, name, number + 1, found.tags.get(name))


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
    same = [commit for commit in listed.commits.values() if commit.last != "revoked" and commit.id == tag.manifest]
    return max(same, key=lambda commit: (commit.live, *commit.rank[:3], _has(commit, tag), commit.txid), default=None)


def _has(commit: Commit, tag: Tag) -> bool:
    return any(places.txid == tag.txid for places in (*commit.existing, *commit.ended))


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
    tags: dict[str, Tag] = {}
    damaged: dict[str, CasckptError] = {}
    for name, record in _newest_records(repo, prefix, newest, anew=anew).items():
        if isinstance(record, CasckptError):
            damaged[name] = record
        elif (tag := _tag(name, newest[name][0], record)) is not None and not _is_over(record, since):
            tags[name] = tag
    return TagList(tags, damaged)


def _newest_records(
    repo: Repository, prefix: str, newest: Mapping[str, tuple[int, ListedObject]], *, anew: bool = False
) -> dict[str, Read]:
    """Return the newest record of each tag, or the error raised while reading it, sorted by name."""
    of_leases = prefix.startswith(LEASES)
    kind = LeaseRecord if of_leases else TagRecord
    entries = [entry for _, entry in newest.values()]
    fetched = read_records(repo, prefix, entries, lambda _: kind, anew=anew, lasting=not of_leases)
    found = {}
    for name, (_, entry) in sorted(newest.items()):
        if isinstance(fetched[entry.key], NotFound) and _is_gone(repo, entry):
            continue  # it was deleted after the listing, so it was over
        found[name] = _checked(fetched[entry.key], name, entry.key)
    return found


def _is_over(record: TagRecord | LeaseRecord, since: int) -> bool:
    """Return whether a record deletes its tag, or expired before ``since``. A record that ends a lease also expires."""
    return record.txid is None if record.expires is None else record.expires < since


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

    A lease has no such generation: its generations are deleted, and no listing records them.

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
    folder = f"{tag_folder(name)}/"
    newest = _newest_entries(repo, folder, listed)
    return newest.get(name, (-1, None))[0], _read_newest(repo, folder, newest, 0)


def write_generation(repo: Repository, name: str, number: int, commit: Commit, *, expires: int | None = None) -> Tag:
    """Create a generation that names ``commit``, and return the tag. Raises `Conflict` if the number is taken."""
    tag = Tag(name, number, commit.places.txid, commit.id, expires, _holder(repo))
    _put(repo, tag)
    return tag


def end_generation(repo: Repository, name: str, number: int, before: Tag | None = None) -> None:
    """Create a generation that deletes the tag or ends the lease. Raises `Conflict` if the number is taken.

    ``before``: the lease, if it can be read. Until it would have expired, its holder's next renewal finds its number
    taken.
    """
    expires = before.expires if before else repo.clock()
    _create(repo, name, number, expires=expires if is_lease(name) else None, who=_holder(repo))


def end_lease(repo: Repository, lease: Tag) -> None:
    """Delete the generations of a lease that this process holds. If it may not, create one that ends the lease.

    Raises `Conflict` if another process has ended it, and `StorageError`.
    """
    try:
        for number in range(lease.generation + 1):  # the newest last, so that no older one counts again
            repo.storage.delete(tag_key(lease.name, number))
        repo.storage.sweep(tag_folder(lease.name))
    except StorageError:
        end_generation(repo, lease.name, lease.generation + 1, lease)


def _holder(repo: Repository) -> str:
    return f"{repo.who}:{os.getpid()}"


def take_back(repo: Repository, tag: Tag, before: Tag | None) -> None:
    """Undo a generation: reset the tag to its state ``before``, unless another process has moved it in the meantime."""
    number = tag.generation + 1
    with suppress(Conflict):
        if is_lease(tag.name):
            end_lease(repo, tag)
        elif before is None:
            end_generation(repo, tag.name, number)
        else:
            _put(repo, replace(before, generation=number))


def remove_old_generations(repo: Repository) -> None:
    """Delete all generations of each lease that is over, and all but the newest of each deleted or expired tag.

    The newest generation of a tag is kept permanently. Otherwise, its number would be reused, and a gc that paused in
    the meantime would delete the new generation. What still counts keeps its old generations, because a listing may
    miss a generation that is put while it runs. A lease that another process has ended is not over before it expires,
    because its holder may renew it until then. Raises `StorageError`.
    """
    since = repo.clock() - FOREIGN_CLOCKS  # before the listing, so that no renewal that it misses is on time
    for prefix, kept in ((PREFIX, 1), (LEASES, 0)):
        several = {name: numbers for name, numbers in _generations(repo, prefix).items() if len(numbers) > kept}
        newest = {name: max(numbers.items()) for name, numbers in several.items()}
        for name, record in _newest_records(repo, prefix, newest).items():
            if not isinstance(record, CasckptError) and _is_over(record, since):
                for number in sorted(several[name])[: len(several[name]) - kept]:
                    repo.storage.delete(tag_key(name, number))


def _put(repo: Repository, tag: Tag) -> None:
    named = {"txid": tag.txid, "manifest": tag.manifest, "who": tag.holder}
    _create(repo, tag.name, tag.generation, expires=tag.expires, **named)


def _create(repo: Repository, name: str, number: int, **fields: Any) -> None:
    fields["time"] = repo.clock()
    if not is_lease(name):
        fields |= {"name": name, "unique": repo.entropy(8).hex()}
    try:
        repo.put_record(tag_key(name, number), (LeaseRecord if is_lease(name) else TagRecord)(**fields))
    except Conflict as error:
        message = f"another process has just moved tag {name!r}: check the tag, and try again"
        raise Conflict(message, key=error.key) from error


def _tag(name: str, number: int, record: TagRecord | LeaseRecord) -> Tag | None:
    """Return the tag or lease of a record. Return None for a record that deletes the tag or ends the lease."""
    if record.txid is None or record.manifest is None:
        return None
    return Tag(name, number, record.txid, record.manifest, record.expires, record.who, record.time)


def _checked(record: Read, name: str, key: str) -> Read:
    if isinstance(record, NotFound):
        message = f"{key} is missing, although it was set. If tags/ was moved, or left out of a copy, restore it"
        return Damaged(message, key=key)
    if isinstance(record, CasckptError | LeaseRecord) or record.name == name:
        return record
    return Refused(f"{key} is not valid: it holds a record of tag {record.name[:100]!r}", key=key)
