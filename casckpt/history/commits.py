"""Reads the logs in commits/, and appends to them. No other module does so."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from casckpt.base.names import run_hash
from casckpt.base.parallel import in_parallel
from casckpt.errors import CasckptError, Conflict, Damaged, Gone, NotFound, Refused, Revoked
from casckpt.format import records
from casckpt.format.keys import commit_key, parse_log, parse_txid
from casckpt.format.names import ManifestId, TxId
from casckpt.format.records import (
    Committed,
    FirstRecord,
    Forgotten,
    Kept,
    LaterRecord,
    Purged,
    Replaced,
    Restored,
)
from casckpt.history.announcements import announce
from casckpt.history.folding import (
    STANDS,
    STATES,
    VOID,
    Commit,
    CommitList,
    all_judged,
    doubt_of,
    fold,
    is_whole,
    judged,
    just_committed,
    with_logs,
)
from casckpt.repository.caches import Shown, shown
from casckpt.repository.reading import Read, check_requirements, detached, key_of, read_records
from casckpt.repository.repository import Repository
from casckpt.storage.base import ListedObject

__all__ = ["Commit", "CommitList", "just_committed"]  # reexported, because readers of logs need them

PREFIX = "commits/"
LaterKind: TypeAlias = type[Forgotten] | type[Restored] | type[Purged]

Folded: TypeAlias = tuple[Mapping[str, Shown], "CommitList"]
"""The properties of each key in a listing, and the commits that follow from the records."""

_CHANGED = (
    "the store at %s was restored from a copy, or lost records: %s is gone. casckpt discards everything that it "
    "cached about the store on this host"
)
_AFTER = {
    "forgotten": ("committed", "restored"),
    "restored": ("forgotten", "replaced"),
    "purged": ("forgotten", "replaced"),
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
    if last and not touched:
        return listed
    if not seen <= now.keys():
        log.warning(_CHANGED, repo.storage.url, min(seen - now.keys()))
        repo.forget_all(keep_marker=not now)
        return list_commits(repo, anew=anew)
    logs = _read_logs(repo, _entries(now, touched), anew=anew)
    _add_linked(repo, listed, logs)
    listed = _look_again(repo, with_logs(listed, logs), logs)
    if not listed.damaged and all(commit_key(txid) in now and is_whole(log) for txid, log in logs.items()):
        repo.records.folded = (now, listed)  # otherwise, the next listing rereads the missing records
    return listed


def _seen(repo: Repository, before: Mapping[str, Shown]) -> set[str]:
    """Return the keys in commits/ that this process or its host has seen. Call this before a listing, not after it.

    Keys are never deleted. If one is missing, the store was restored from a copy, lost the key, or was replaced by a
    different store.
    """
    own = {repo.last_commit} if repo.last_commit else set()
    if before:
        return own | before.keys()
    return own | {key_of(row) for row in repo.catalogue.keys(PREFIX)}


def list_names(repo: Repository) -> set[TxId]:
    """Return the ids of all transactions that have ended. Takes one LIST, and no reads. Raises `StorageError`."""
    return {name[0] for entry in repo.storage.list(PREFIX, known=parse_log) if (name := parse_log(entry.key))}


def read_log(repo: Repository, txid: TxId) -> Commit | None:
    """Return the current commit of a transaction, read from its log. Return None if it does not have a record.

    The result is the same as that of a listing that begins now. Raises `Damaged` or `Refused` in the same cases as
    `refresh`, and `StorageError`.
    """
    keys = [(commit_key(txid), FirstRecord), (commit_key(txid, 1), LaterRecord)]
    first, second = in_parallel(repo.storage.traits.requests, lambda key: _record(repo, txid, *key), keys)
    if isinstance(first, NotFound):
        return None
    if isinstance(first, CasckptError):
        raise first
    commit = fold(txid, {0: first})
    is_all = commit is None or (isinstance(second, NotFound) and commit.replaces is None)
    return commit if commit is None or is_all else refresh(repo, commit)


def _record(repo: Repository, txid: TxId, key: str, kind: Any) -> Read:
    try:
        return _checked(repo.get_record(key, kind), txid, key)
    except (NotFound, Damaged, Refused) as error:
        return detached(error)


def refresh(repo: Repository, commit: Commit) -> Commit:
    """Return the current state of the commit. Reads only records after the last one that ``commit`` includes.

    For a rewrite, also reads the base's log. Raises `Damaged` or `Refused` if the last record cannot be read, and
    `StorageError`.
    """
    commit = _refreshed(repo, commit)
    if commit.replaces is None or commit.standing == VOID:
        return commit
    commit, doubt = judged(commit, read_log(repo, commit.replaces[0]))
    if doubt is not None:
        raise doubt
    return commit


def _refreshed(repo: Repository, commit: Commit) -> Commit:
    log: dict[int, Read] = {0: commit.first}
    log |= _records_behind(repo, commit.txid, commit.number)
    number = max(log)
    if number <= commit.number:
        return commit
    if all(isinstance(record, Kept) for of, record in log.items() if of):
        return replace(commit, number=number)
    doubt = doubt_of(log)
    if doubt is not None:
        raise doubt
    return fold(commit.txid, log, commit) or commit


def follow(repo: Repository, commit: Commit) -> Commit:
    """Follow the commits that have replaced ``commit``, in the current logs.

    Return the last one, or ``commit`` itself.

    If the result is not visible, this call has verified that there was a moment at which all logs were as it read them.
    Without this check, a checkpoint that was always visible could appear to be gone. Raises the errors of `refresh`.
    """
    chain = [commit]
    while (link := chain[-1].replaced) is not None and (other := read_log(repo, link[1])) is not None:
        chain.append(other)
    if chain[-1].visible or [refresh(repo, one) for one in chain] == chain:
        return chain[-1]
    return follow(repo, refresh(repo, commit))


def commit(repo: Repository, record: Committed, *, seen: int | None = None) -> None:
    """Make a checkpoint visible: announce it, and create commits/<txid>. An equal existing record counts as success.

    A rewrite does not become visible yet. This call also announces the record that will make it visible.

    ``seen``: see `casckpt.history.announcements.announce`. Raises `Revoked` if the transaction was revoked, and
    `Conflict` if a different record already has its name. Raises `StorageError` if the storage does not answer. In this
    case, the commit may still happen, unless `casckpt.history.transactions.revoke` creates its record first.
    """
    key = commit_key(record.txid)
    replaced = [] if record.replaces is None else [record.replaces]
    announce(repo, [(record.txid, 0), *replaced], seen=seen)
    try:
        repo.put_record(key, record)
    except Conflict:
        found = repo.get_record(key, FirstRecord)
        if isinstance(found, records.RevokedRecord):
            message = (
                f"the save of {record.run}@{record.step} was revoked before it finished ({found.reason}): gc "
                "assumed that the save was dead, or the save was aborted. No part of it is visible; save again"
            )
            raise Revoked(message, key=key) from None
        raise
    repo.last_commit = key
    for listener in repo.listeners:
        listener()


def gone(named: object, id: ManifestId, when: str, **attributes: object) -> Gone:
    """Return the error for a purged checkpoint. ``when``: the part of the message that says when it was purged."""
    return Gone(
        f"checkpoint {named} was purged {when}. Load a different one (see `casckpt list`); lease=True, or Store.lease, "
        "keeps a checkpoint while it is being read",
        checkpoints=(id,),
        **attributes,
    )


def append(repo: Repository, commit: Commit, kind: LaterKind) -> Commit:
    """Announce and append a record of ``kind``, unless the commit is already in that state. Return the new commit.

    If several processes append at the same time, exactly one of them wins. Raises `Conflict` if the log does not allow
    the record, or if another process appended a different record first. Raises `StorageError`.
    """
    wanted = STATES[kind]
    _check_standing(commit, wanted)
    if _holds(commit, wanted):
        commit = refresh(repo, commit)
        if _holds(commit, wanted):
            return commit
    _check_allowed(commit, wanted)
    record, number = kind(txid=commit.txid, time=repo.clock(), who=repo.who), commit.number + 1
    announce(repo, [(commit.txid, number)])
    try:
        repo.put_record(commit_key(commit.txid, number), record)
    except Conflict:
        now = refresh(repo, commit)
        if _holds(now, wanted):
            return now
        if (now.last, now.restored) == (commit.last, commit.restored):  # only the number was used
            return append(repo, now, kind)
        message = f"{commit} was not {wanted}: another process has just {now.last} it; check the checkpoint's state"
        raise Conflict(message, checkpoints=(commit.id,)) from None
    commit = replace(commit, last=wanted, number=number, changed_at=record.time, who=record.who)
    return replace(commit, restored=number, replaced=None) if kind is Restored else commit


def forget(repo: Repository, commit: Commit) -> Commit:
    """Hide a checkpoint until it is restored or purged. Returns a forgotten checkpoint unchanged.

    Raises `Conflict` if it was purged, and `StorageError`.
    """
    return append(repo, commit, Forgotten)


def restore(repo: Repository, commit: Commit, *, as_read: bool = False, listed: CommitList | None = None) -> Commit:
    """Make a forgotten or replaced checkpoint visible again. Returns a visible checkpoint unchanged.

    ``as_read``: undo only the last record that ``commit`` includes. This is for callers that undo their own change.
    ``listed``: a listing, for callers that restore many checkpoints and have checked the requirements. None makes a
    new listing. Raises `Conflict` if the checkpoint was purged, or if another checkpoint of its run and step is
    visible. With ``as_read``, also raises `Conflict` if another process has hidden it in the meantime. Raises
    `StorageError`.
    """
    if listed is None:
        check_requirements(repo)
        listed = list_commits(repo)
    now = listed.commits.get(commit.txid, commit)
    check_restore(listed, now)
    return append(repo, commit if as_read else now, Restored)


def check_restore(listed: CommitList, commit: Commit) -> None:
    """Raise `Conflict` if, according to a listing, ``commit`` cannot be restored."""
    _check_standing(commit, "restored")
    if _holds(commit, "restored"):
        return
    _check_allowed(commit, "restored")
    twin = listed.at(commit.run, commit.step)
    if twin is not None and not listed.is_rewrite_of(twin, commit.txid):
        message = f"{commit} was not restored: {twin} is visible under the same run and step. Forget that one first"
        raise Conflict(message, checkpoints=(commit.id, twin.id))


def purge(repo: Repository, commit: Commit) -> Commit:
    """Purge a forgotten or replaced checkpoint, so that gc may delete its bytes. Returns a purged checkpoint unchanged.

    Raises `Conflict` if it is neither forgotten nor replaced, and `StorageError`.
    """
    return append(repo, commit, Purged)


def announce_all(repo: Repository, commits: Iterable[Commit]) -> None:
    """Announce the next record of each log, all in one go, before `append` adds these records.

    Raises `StorageError`.
    """
    announce(repo, [(commit.txid, commit.number + 1) for commit in commits])


def keep(repo: Repository, txid: TxId, number: int) -> bool:
    """Fill an announced number with a `kept` record, which blocks late writers. Return False if it has a record.

    This is safe at any time. Raises `StorageError`.
    """
    try:
        repo.put_record(commit_key(txid, number), Kept(txid=txid, time=repo.clock()))
    except Conflict:
        return False
    return True


def record_tag(repo: Repository, commit: Commit, name: str, generation: int) -> None:
    """Record that this generation of a tag was set on ``commit``, so that a gc notices if tags/ is lost.

    The record revokes a transaction that never began: every version reads it, and none acts on it. Raises
    `StorageError`.
    """
    txid, reason = repo.new_txid(commit.run, commit.step), f"no save, but a record that tag {name} was set"
    record = records.RevokedRecord(txid=txid, time=repo.clock(), reason=reason, tagged=(name, generation))
    repo.put_record(commit_key(txid), record)


def purge_unreadable(repo: Repository, txid: TxId) -> None:
    """Purge a transaction with an unreadable first record, so that gc can delete objects again.

    Raises `Conflict` if another process appends to its log at this moment, and `StorageError`.
    """
    logs = (parse_log(entry.key) for entry in repo.storage.list(PREFIX, known=parse_log))
    number = max((log[1] for log in logs if log and log[0] == txid), default=0)
    announce(repo, [(txid, number + 1)])
    repo.put_record(commit_key(txid, number + 1), Purged(txid=txid, time=repo.clock(), who=repo.who))


def _touched(before: Mapping[str, Shown], now: Mapping[str, Shown]) -> set[TxId]:
    """Return the transactions with records that an earlier listing showed differently, or not at all."""
    keys = {key for key, found in now.items() if before.get(key) != found} | (before.keys() - now.keys())
    return {name[0] for key in keys if (name := parse_log(key))}


def _entries(listed: Mapping[str, Shown], touched: Collection[TxId]) -> dict[ListedObject, tuple[TxId, int]]:
    """Return all records of ``touched`` transactions, by listed object. Include lower numbers that were not listed."""
    names = {
        ListedObject(key, *found): name
        for key, found in listed.items()
        if key[len(PREFIX) :].partition(".")[0] in touched and (name := parse_log(key))
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
    found = read_records(repo, PREFIX, names, _kind, anew=anew)
    for entry, (txid, number) in names.items():
        if not (number and entry.size < 0 and isinstance(found[entry.key], NotFound)):
            logs[txid][number] = _checked(found[entry.key], txid, entry.key)
    return logs


def _add_linked(repo: Repository, listed: CommitList, logs: dict[TxId, dict[int, Read]]) -> None:
    """Add logs that ``logs`` refer to and the listing lacks. Such logs were created during the listing, or deleted."""
    while True:
        records = [record for log in logs.values() for record in log.values()]
        wanted = {record.by for record in records if isinstance(record, Replaced)}
        wanted |= {record.replaces[0] for record in records if isinstance(record, Committed) and record.replaces}
        wanted -= logs.keys() | listed.commits.keys()
        if not wanted:
            return
        for txid in sorted(wanted):
            logs[txid] = {0: _record(repo, txid, commit_key(txid), FirstRecord)} | _records_behind(repo, txid, 0)


def _records_behind(repo: Repository, txid: TxId, number: int) -> dict[int, Read]:
    """Read the records of a log after ``number``, by their keys."""
    records = dict[int, Read]()
    while True:
        number += 1
        record = _record(repo, txid, commit_key(txid, number), LaterRecord)
        if isinstance(record, NotFound):
            return records
        records[number] = record


def _look_again(repo: Repository, listed: CommitList, logs: Collection[TxId]) -> CommitList:
    """Reread the logs of rewritten checkpoints that the listing shows as hidden, until there is no new record.

    A listing is not atomic. It may show that a rewrite was forgotten, but miss that its base was restored before that.
    Only checkpoints with a log in ``logs`` are read, because all others were checked before and have not changed.
    """
    while True:
        now = {commit.txid: _again(repo, commit) for commit in _hidden(listed, logs)}
        # only a higher number is a change: a log that is read by key ends early if a record is lost
        changed = {txid: commit for txid, commit in now.items() if commit.number > listed.commits[txid].number}
        if not changed:
            return listed
        for commit in list(changed.values()):
            if commit.replaced is not None and (other := read_log(repo, commit.replaced[1])) is not None:
                changed[other.txid] = other
        listed = all_judged({**listed.commits, **changed}, listed.damaged)


def _hidden(listed: CommitList, touched: Collection[TxId]) -> list[Commit]:
    """Return the live commits of rewritten ids that have no visible commit, if any of their commits was touched."""
    live = [commit for commit in listed.commits.values() if commit.live]
    ids = {one.id for one in live if one.txid in touched and (one.replaces or one.replaced)}
    ids -= {one.id for one in live if one.visible} if ids else set()
    return [one for one in live if one.id in ids] if ids else []


def _again(repo: Repository, commit: Commit) -> Commit:
    try:
        return refresh(repo, commit)
    except (Damaged, Refused):
        return commit


def _kind(key: str) -> Any:
    name = parse_log(key)
    if name is None:
        raise Refused(f"not a store key: {key[:200]!r}")
    return LaterRecord if name[1] else FirstRecord


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


def _check_standing(commit: Commit, wanted: str) -> None:
    """Raise `Conflict` for a rewrite that does not stand, unless the new record purges it or forgets a void rewrite."""
    if commit.standing != STANDS and wanted != "purged" and (commit.standing, wanted) != (VOID, "forgotten"):
        raise Conflict(f"{commit} was not {wanted}: it is a rewrite that did not take effect", checkpoints=(commit.id,))


def _check_allowed(commit: Commit, wanted: str) -> None:
    if commit.last in _AFTER[wanted]:
        return
    if commit.last == "purged":
        raise Conflict(f"{commit} was purged: it is gone for good", checkpoints=(commit.id,))
    if commit.last == "revoked":
        raise Conflict(f"transaction {commit.txid} was revoked, so there is no checkpoint to change")
    if commit.last == "replaced":
        raise Conflict(
            f"{commit} was not {wanted}: it has been rewritten; resolve the reference again", checkpoints=(commit.id,)
        )
    raise Conflict(f"{commit} is {commit.last}, so it cannot be {wanted}: forget it first", checkpoints=(commit.id,))
