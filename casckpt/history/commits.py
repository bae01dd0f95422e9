"""Reads the logs in commits/, and appends to them. No other module does so."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

from casckpt.base.names import run_hash
from casckpt.base.parallel import in_parallel
from casckpt.errors import CasckptError, Conflict, Gone, NotFound, Refused, Revoked
from casckpt.format import records
from casckpt.format.keys import commit_key, parse_log, parse_txid
from casckpt.format.names import ManifestId, TxId
from casckpt.format.records import (
    Back,
    Committed,
    FirstRecord,
    Forgotten,
    Kept,
    LaterRecord,
    Purged,
    Restored,
    TaggedRecord,
    Trimmed,
)
from casckpt.history import ended
from casckpt.history.announcements import announce
from casckpt.history.folding import (
    STATES,
    Commit,
    CommitList,
    Places,
    doubt_of,
    fold,
    in_order,
    just_committed,
    with_logs,
)
from casckpt.repository.caches import Shown, shown
from casckpt.repository.reading import Read, check_requirements, key_of, read_record, read_records
from casckpt.repository.repository import Repository
from casckpt.storage.base import ListedObject

__all__ = ["Commit", "CommitList", "in_order", "just_committed"]  # reexported, because readers of logs need them

PREFIX = "commits/"
LaterKind: TypeAlias = type[Forgotten] | type[Restored] | type[Purged]
Change: TypeAlias = Forgotten | Restored | Purged | Back | Trimmed | TaggedRecord

Folded: TypeAlias = tuple[Mapping[str, Shown], "CommitList"]
"""The properties of each key in a listing, and the commits that follow from the records."""

_CHANGED = (
    "the store at %s was restored from a copy, or lost records: %s is gone. casckpt discards everything that it "
    "cached about the store on this host"
)
_AFTER = {
    "forgotten": ("committed", "restored"),
    "restored": ("forgotten",),
    "purged": ("forgotten",),
}
log = logging.getLogger(__name__)


def list_commits(repo: Repository, *, anew: bool = False) -> CommitList:
    """Return all transactions that have ended. Takes one LIST, and one read for each record that the catalogue lacks.

    ``anew``: read every record, even if it is in the catalogue. Raises `NotFound` if the store does not exist, and
    `StorageError`.
    """
    last: Folded | None = None if anew else repo.records.folded
    before, listed = last or ({}, CommitList({}, {}))
    seen = _seen(repo, before)
    now = {entry.key: shown(entry) for entry in repo.storage.list(PREFIX, known=parse_log)}
    touched = _touched(before, now)
    if last and now == before:
        return listed
    lists = ended.read_lists(repo, _new(before, now), anew=anew)
    over = {**listed.over, **lists.over}
    gone = {key for key in seen - now.keys() if _txid_of(key) not in over}
    if gone and not lists.damaged:
        log.warning(_CHANGED, repo.storage.url, min(gone))
        repo.forget_all(keep_marker=not now)
        return list_commits(repo, anew=anew)
    if deleted := {_txid_of(key) for key in seen - now.keys() - gone}:
        repo.catalogue.remove_records([(commit_key(txid), f"{commit_key(txid)}/") for txid in deleted])
    logs = _read_logs(repo, _entries(now, touched - over.keys()), anew=anew)
    if any(isinstance(record, NotFound) for log in logs.values() for record in log.values()) and not all(
        entry.key in now for entry in repo.storage.list(ended.PREFIX)
    ):  # gc has deleted them since
        return list_commits(repo, anew=anew)
    late = {name for key in (now if over else ()) if _txid_of(key) in over and (name := parse_log(key))}
    listed = with_logs(CommitList(listed.commits, lists.damaged, over, frozenset(late)), logs)
    is_whole = not any(isinstance(record, CasckptError) for log in logs.values() for record in log.values())
    if is_whole and not listed.damaged:
        repo.records.folded = (now, listed)  # otherwise, the next listing rereads the missing records
    return listed


def _seen(repo: Repository, before: Mapping[str, Shown]) -> set[str]:
    """Return the keys in commits/ that this process or its host has seen. Call this before a listing, not after it.

    Only logs that commits/ended/ lists are deleted. If another key is missing, the store was restored from a copy,
    lost the key, or was replaced by a different store.
    """
    own = {repo.last_commit} if repo.last_commit else set()
    if before:
        return own | before.keys()
    return own | {key_of(row) for row in repo.catalogue.keys(PREFIX)}


def list_names(repo: Repository) -> set[tuple[TxId, int]]:
    """Return the names (txid, number) of all records. Takes one LIST, and no reads. Raises `StorageError`."""
    return set(names_in(repo, PREFIX))


def names_in(repo: Repository, prefix: str) -> Iterator[tuple[TxId, int]]:
    """Yield the names (txid, number) of the files of transactions under ``prefix``. Raises `StorageError`."""
    listed = repo.storage.list(prefix, known=parse_log)
    return (name for entry in listed if (name := parse_log(entry.key)))


def read_log(repo: Repository, txid: TxId, *, later: bool = True) -> Commit | None:
    """Return the current commit of a transaction, read from its log. Return None if it does not have a record.

    The result is the same as that of a listing that begins now. A log that is over, and that gc has deleted or is
    deleting, counts as revoked. ``later``: False reads only the first record, and returns the commit as it was then,
    even if the log is over. Raises `Damaged` or `Refused` in the same cases as `refresh`, and `StorageError`.
    """
    keys = [(commit_key(txid), FirstRecord), (commit_key(txid, 1), LaterRecord)][: 2 if later else 1]
    first, *second = in_parallel(repo.storage.traits.requests, lambda key: _record(repo, txid, *key), keys)
    if isinstance(first, CasckptError) and not isinstance(first, NotFound):
        raise first
    commit = None if isinstance(first, NotFound) else fold({0: first})
    if commit is not None and not all(isinstance(record, NotFound) for record in second):
        return refresh(repo, commit)
    if later and (commit is None or commit.live) and ended.find(repo, txid) is not None:
        return fold({0: records.RevokedRecord(txid=txid, time=repo.clock(), reason="gc has deleted its log")})
    return commit


def _record(repo: Repository, txid: TxId, key: str, kind: Any) -> Read:
    return _checked(read_record(repo, key, kind), txid, key)


def refresh(repo: Repository, commit: Commit) -> Commit:
    """Return the current state of the commit, at its current places. Reads only records after ``commit.number``.

    Raises `Damaged` or `Refused` if one of them cannot be read, and `StorageError`.
    """
    commit = replace(commit, shown=None)
    log = {0: commit.first, **_records_behind(repo, commit.txid, commit.number)}
    doubt = doubt_of(log, commit.number)
    if doubt is not None:
        raise doubt
    now = fold(log, commit) or commit
    return _as_purged(repo, now) if now.live and ended.find(repo, commit.txid) is not None else now


def _as_purged(repo: Repository, commit: Commit) -> Commit:
    last = Purged(txid=commit.txid, time=repo.clock(), who="")
    return fold({0: commit.first, commit.number + 1: last}, commit) or commit


def exists(repo: Repository, commit: Commit) -> bool:
    """Return whether these places of the commit still exist, according to its log. Raises the errors of `refresh`."""
    return commit.places in refresh(repo, commit).existing


def commit(repo: Repository, record: Committed, *, seen: int | None = None) -> None:
    """Make a checkpoint visible: announce it, and create commits/<txid>. An equal existing record counts as success.

    ``seen``: see `casckpt.history.announcements.announce`. Raises `Revoked` if the transaction was revoked, and
    `Conflict` if a different record already has its name. Raises `StorageError` if the storage does not answer. In this
    case, the commit may still happen, unless `casckpt.history.transactions.revoke` creates its record first.
    """
    key = commit_key(record.txid)
    announce(repo, [(record.txid, 0)], seen=seen)
    try:
        repo.put_record(key, record)
    except Conflict:
        reason = "gc has deleted its log since"
        with suppress(NotFound):
            found = repo.get_record(key, FirstRecord)
            if not isinstance(found, records.RevokedRecord):
                raise
            reason = found.reason
        message = (
            f"the save of {record.run}@{record.step} was revoked before it finished ({reason}): gc assumed that the "
            "save was dead, or the save was aborted. No part of it is visible; save again"
        )
        raise Revoked(message, key=key) from None
    repo.last_commit = key
    for listener in repo.listeners:
        listener()


def gone(named: object, id: ManifestId, when: str, **attributes: object) -> Gone:
    """Return the error for a purged checkpoint. ``when``: the part of the message that says when it was purged."""
    return Gone(
        f"checkpoint {named} was purged {when}. Load a different one (see `casckpt list`); Store.lease keeps a "
        "checkpoint while it is being read",
        checkpoints=(id,),
        **attributes,
    )


def append(repo: Repository, commit: Commit, kind: LaterKind) -> Commit:
    """Append a record of ``kind``, unless the commit is already in that state. Return the new commit.

    If several processes append at the same time, exactly one of them wins. Raises `Conflict` if the log does not allow
    the record, or if another process appended a different record first. Raises `StorageError`.
    """
    wanted = STATES[kind]
    if _holds(commit, wanted):
        commit = refresh(repo, commit)
        if _holds(commit, wanted):
            return commit
    _check_allowed(commit, wanted)
    try:
        return add(repo, commit, kind(txid=commit.txid, time=repo.clock(), who=repo.who))
    except Conflict:
        now = refresh(repo, commit)
        if _holds(now, wanted):
            return now
        what = now.last if now.last != commit.last else "changed"
        message = f"{commit} was not {wanted}: another process has just {what} it; check the checkpoint's state"
        raise Conflict(message, checkpoints=(commit.id,)) from None


def add(repo: Repository, commit: Commit, record: Change) -> Commit:
    """Create the record right after those that ``commit`` includes, and return the new commit.

    Raises `Conflict` if another process has changed the commit, and `StorageError`.
    """
    number = commit.number + 1
    if isinstance(record, Restored):
        announce(repo, [(commit.txid, number)])
    try:
        repo.put_record(commit_key(commit.txid, number), record)
    except Conflict:
        now = refresh(repo, commit)
        if now == replace(commit, number=now.number, shown=None):  # only the number was used
            return add(repo, now, record)
        raise Conflict(f"another process has just changed {commit}", checkpoints=(commit.id,)) from None
    is_late = isinstance(record, Restored | Back | TaggedRecord) and ended.find(repo, commit.txid) is not None
    if is_late:  # this process slept
        raise Conflict(f"{commit} was purged: it is gone for good", checkpoints=(commit.id,))
    return fold({0: commit.first, number: record}, replace(commit, shown=None)) or commit


def forget(repo: Repository, commit: Commit) -> Commit:
    """Hide a checkpoint until it is restored or purged. Returns a forgotten checkpoint unchanged.

    Raises `Conflict` if it was purged, and `StorageError`.
    """
    return append(repo, commit, Forgotten)


def restore(repo: Repository, commit: Commit, *, listed: CommitList | None = None) -> Commit:
    """Make a forgotten checkpoint visible again. If ``commit`` has older places, make them the current ones.

    Returns a visible checkpoint unchanged.

    ``listed``: a listing, for callers that restore many checkpoints and have checked the requirements. None makes a
    new listing. Raises `Conflict` if the checkpoint was purged, or if another checkpoint of its run and step is
    visible. Raises `StorageError`.
    """
    if listed is None:
        check_requirements(repo)
        listed = list_commits(repo)
    now = listed.commits.get(commit.txid, commit)
    check_restore(listed, now)
    if now.live and commit.places != now.current and commit.places in now.existing:
        now = bring_back(repo, now, commit.places)
    return append(repo, now, Restored)


def bring_back(repo: Repository, commit: Commit, places: Places) -> Commit:
    """Make older places the current ones again, such as those from before the checkpoint was thinned.

    Raises `Conflict` if they no longer exist, or if another process changed the checkpoint first. Raises
    `StorageError`.
    """
    if places not in commit.existing:
        raise Conflict(f"the older places of {commit} were purged: they are gone for good", checkpoints=(commit.id,))
    if places == commit.current:
        return commit
    return add(repo, commit, Back(txid=commit.txid, time=repo.clock(), who=repo.who, to=places.txid))


def trim(repo: Repository, commit: Commit) -> Commit:
    """End all places of a checkpoint but the current ones, so that gc may delete their bytes.

    Raises `Conflict` if another process changed the checkpoint first, and `StorageError`.
    """
    return add(repo, commit, Trimmed(txid=commit.txid, time=repo.clock(), who=repo.who))


def check_restore(listed: CommitList, commit: Commit) -> None:
    """Raise `Conflict` if, according to a listing, ``commit`` cannot be restored."""
    if _holds(commit, "restored"):
        return
    _check_allowed(commit, "restored")
    twin = listed.at(commit.run, commit.step)
    if twin is not None:
        message = f"{commit} was not restored: {twin} is visible under the same run and step. Forget that one first"
        raise Conflict(message, checkpoints=(commit.id, twin.id))


def purge(repo: Repository, commit: Commit) -> Commit:
    """Purge a forgotten checkpoint, so that gc may delete its bytes. Returns a purged checkpoint unchanged.

    Raises `Conflict` if it is not forgotten, and `StorageError`.
    """
    return append(repo, commit, Purged)


def keep(repo: Repository, txid: TxId, number: int) -> bool:
    """Fill a free number with a `kept` record, which blocks late writers. Return False if it has a record.

    This is safe at any time. Raises `StorageError`.
    """
    try:
        repo.put_record(commit_key(txid, number), Kept(txid=txid, time=repo.clock()))
    except Conflict:
        return False
    return True


def record_tag(repo: Repository, commit: Commit, name: str, generation: int) -> Commit:
    """Record that this generation of a tag was set on ``commit``, so that a gc notices if tags/ is lost.

    Raises `Conflict` if another process changed the commit first, and `StorageError`.
    """
    return add(repo, commit, TaggedRecord(txid=commit.txid, time=repo.clock(), name=name, generation=generation))


def purge_unreadable(repo: Repository, txid: TxId) -> None:
    """Purge a transaction with an unreadable record, so that gc can delete objects again.

    Raises `Conflict` if another process appends to its log at this moment, and `StorageError`.
    """
    number = max((number for of, number in names_in(repo, PREFIX) if of == txid), default=0)
    repo.put_record(commit_key(txid, number + 1), Purged(txid=txid, time=repo.clock(), who=repo.who))


def _touched(before: Mapping[str, Shown], now: Mapping[str, Shown]) -> set[TxId]:
    """Return the transactions with records that an earlier listing showed differently, or not at all."""
    keys = {key for key, found in now.items() if before.get(key) != found} | (before.keys() - now.keys())
    return {name[0] for key in keys if (name := parse_log(key))}


def _new(before: Mapping[str, Shown], now: Mapping[str, Shown]) -> list[ListedObject]:
    return [ListedObject(key, *found) for key, found in now.items() if before.get(key) != found]


def _txid_of(key: str) -> TxId:
    return TxId(key[len(PREFIX) :].partition(".")[0])


def _entries(listed: Mapping[str, Shown], touched: Collection[TxId]) -> dict[ListedObject, tuple[TxId, int]]:
    """Return all records of ``touched`` transactions, by listed object. Include lower numbers that were not listed."""
    names = {
        ListedObject(key, *found): name
        for key, found in listed.items()
        if _txid_of(key) in touched and (name := parse_log(key))
    }
    for txid, highest in list(names.values()):
        for number in range(highest):
            if (key := commit_key(txid, number)) not in listed:  # it was put during the listing, or is gone
                names[ListedObject(key, -1)] = (txid, number)
    return names


def _read_logs(
    repo: Repository, names: Mapping[ListedObject, tuple[TxId, int]], *, anew: bool
) -> dict[TxId, dict[int, Read]]:
    logs: dict[TxId, dict[int, Read]] = defaultdict(dict)
    kinds = {entry.key: LaterRecord if number else FirstRecord for entry, (_, number) in names.items()}
    found = read_records(repo, PREFIX, names, kinds.__getitem__, anew=anew)
    for entry, (txid, number) in names.items():
        if not (number and entry.size < 0 and isinstance(found[entry.key], NotFound)):
            logs[txid][number] = _checked(found[entry.key], txid, entry.key)
    return logs


def _records_behind(repo: Repository, txid: TxId, number: int) -> dict[int, Read]:
    """Read the records of a log after ``number``, by their keys."""
    records = dict[int, Read]()
    while True:
        number += 1
        record = _record(repo, txid, commit_key(txid, number), LaterRecord)
        if isinstance(record, NotFound):
            return records
        records[number] = record


def _checked(record: Read, txid: TxId, key: str) -> Read:
    """Return the record, or an error if it does not belong to its key."""
    if isinstance(record, CasckptError):
        return record
    if record.txid != txid:
        return Refused(f"{key} is not valid: it holds a record of transaction {record.txid}", key=key)
    name = parse_txid(txid)
    if isinstance(record, Committed) and (run_hash(record.run), record.step) != (name.run_hash, name.step):
        return Refused(f"{key} is not valid: it holds a record of {record.run}@{record.step}", key=key)
    return record


def _holds(commit: Commit, wanted: str) -> bool:
    return commit.last == wanted or (wanted == "restored" and commit.last == "committed")


def _check_allowed(commit: Commit, wanted: str) -> None:
    if commit.last in _AFTER[wanted]:
        return
    if commit.last == "purged":
        raise Conflict(f"{commit} was purged: it is gone for good", checkpoints=(commit.id,))
    if commit.last == "revoked":
        raise Conflict(f"transaction {commit.txid} was revoked, so there is no checkpoint to change")
    raise Conflict(f"{commit} is {commit.last}, so it cannot be {wanted}: forget it first", checkpoints=(commit.id,))
