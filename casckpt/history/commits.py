"""Commits: the numbered log of each transaction in commits/, folded; and the only ways to add to it."""

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
from casckpt.repository.reading import Read, key_of, read_records
from casckpt.repository.repository import Repository
from casckpt.repository.requirements import check_requirements
from casckpt.storage.base import ListedObject

__all__ = ["Commit", "CommitList", "just_committed"]  # beside what stands here: whoever reads logs needs them, too

PREFIX = "commits/"
LaterKind: TypeAlias = type[Forgotten] | type[Restored] | type[Purged]

Folded: TypeAlias = tuple[Mapping[str, Shown], "CommitList"]
"""What a listing showed of each key, and what all of its records say together."""

_NOT_WHAT_IT_WAS = (
    "the store at %s is not what it was: it has no %s any more, so it was put back from a copy, or lost records. What "
    "this host knew of it counts no more"
)
_AFTER = {
    "forgotten": ("committed", "restored"),
    "restored": ("forgotten", "replaced"),
    "purged": ("forgotten", "replaced"),
}
log = logging.getLogger(__name__)


def list_commits(repo: Repository, *, anew: bool = False) -> CommitList:
    """Return all transactions that ended: one LIST, and a read of each record that the catalogue lacks.

    ``anew``: read every record, also those that the catalogue has. Raises `NotFound` where there is no store,
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
        log.warning(_NOT_WHAT_IT_WAS, repo.storage.url, min(seen - now.keys()))
        repo.forget_all(keep_marker=not now)
        return list_commits(repo, anew=anew)
    logs = _read_logs(repo, _entries(now, touched), anew=anew)
    _add_linked(repo, listed, logs)
    listed = _look_again(repo, with_logs(listed, logs), logs)
    if not listed.damaged and all(commit_key(txid) in now and is_whole(log) for txid, log in logs.items()):
        repo.records.folded = (now, listed)  # else the next listing reads again what this one could not
    return listed


def _seen(repo: Repository, before: Mapping[str, Shown]) -> set[str]:
    """Return the keys in commits/ that this process or its host has seen. Ask before a listing: others go on learning.

    None ever goes: where one is missing, the store was put back from a copy, or lost it, or is another in its place.
    """
    own = {repo.last_commit} if repo.last_commit else set()
    if before:
        return own | before.keys()
    return own | {key_of(row) for row in repo.catalogue.keys(PREFIX)}


def list_names(repo: Repository) -> set[TxId]:
    """Return the ids of all transactions that ended: one LIST, no reads. Raises `StorageError`."""
    return {name[0] for entry in repo.storage.list(PREFIX, known=parse_log) if (name := parse_log(entry.key))}


def read_log(repo: Repository, txid: TxId) -> Commit | None:
    """Return what a transaction's log says now, read by its keys; None where it has no record.

    As good as a listing of commits/ that begins now. Raises `Damaged` or `Refused` as `refresh`, `StorageError`.
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
        return error


def refresh(repo: Repository, commit: Commit) -> Commit:
    """Return the commit as its log is now. Reads the records behind the one that ``commit`` knows.

    Of a rewrite the log of its base, too. Raises `Damaged` or `Refused` if the last one cannot be read, `StorageError`.
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
    number = commit.number
    while True:
        key = commit_key(commit.txid, number + 1)
        try:
            log[number + 1] = _checked(repo.get_record(key, LaterRecord), commit.txid, key)
        except (Damaged, Refused) as error:
            log[number + 1] = error
        except NotFound:
            break
        number += 1
    if number == commit.number:
        return commit
    if all(isinstance(record, Kept) for of, record in log.items() if of):
        return replace(commit, number=number)
    doubt = doubt_of(log)
    if doubt is not None:
        raise doubt
    return fold(commit.txid, log, commit) or commit


def follow(repo: Repository, commit: Commit) -> Commit:
    """Return what has replaced ``commit`` in the end, as logs read now have it; itself where nothing has.

    Where that is not visible, so it was at one instant: else what never was gone could seem to be. Raises as `refresh`.
    """
    chain = [commit]
    while (link := chain[-1].replaced) is not None and (other := read_log(repo, link[1])) is not None:
        chain.append(other)
    if chain[-1].visible or [refresh(repo, one) for one in chain] == chain:
        return chain[-1]
    return follow(repo, refresh(repo, commit))


def commit(repo: Repository, record: Committed, *, seen: int | None = None) -> None:
    """Make a checkpoint visible: announce it, and create commits/<txid>. Its own record, put before, is success.

    A rewrite is not visible by that; the record that makes it so is announced, too.

    ``seen``: see `casckpt.history.announcements.announce`. Raises `Revoked` if the transaction was revoked,
    `Conflict` if something else has its name, `StorageError` if the storage does not say: then the commit may still
    happen, until `casckpt.history.transactions.revoke` wins.
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
                f"the save of {record.run}@{record.step} was given up on before it ended ({found.reason}): "
                "a gc took it for dead, or it was aborted. Nothing of it is visible; save again"
            )
            raise Revoked(message, key=key) from None
        raise
    repo.last_commit = key
    for listener in repo.listeners:
        listener()


def gone(named: object, id: ManifestId, when: str, **attributes: object) -> Gone:
    """Return the error for a checkpoint that was purged, ``when`` in words."""
    return Gone(
        f"checkpoint {named} was purged {when}. Load another one (see `casckpt list`); lease=True, or Store.lease, "
        "keeps a checkpoint as long as it is read",
        checkpoints=(id,),
        **attributes,
    )


def append(repo: Repository, commit: Commit, kind: LaterKind) -> Commit:
    """Announce and add a record of ``kind``, and return the commit as it is then; as it is, if it is in that state.

    Of several that append at once exactly one wins. Raises `Conflict` if the log does not allow it, or if somebody
    else was first with another record; `StorageError`.
    """
    wanted = STATES[kind]
    _check_standing(commit, wanted)
    if _holds(commit, wanted):
        commit = refresh(repo, commit)
        if _holds(commit, wanted):
            return commit
    _check_allowed(commit, wanted)
    record, number = kind(txid=commit.txid, time=repo.clock()), commit.number + 1
    announce(repo, [(commit.txid, number)])
    try:
        repo.put_record(commit_key(commit.txid, number), record)
    except Conflict:
        now = refresh(repo, commit)
        if _holds(now, wanted):
            return now
        if (now.last, now.restored) == (commit.last, commit.restored):  # the number was taken, and no more
            return append(repo, now, kind)
        message = f"{commit} was {now.last} by somebody else just now, so it was not {wanted}; look again"
        raise Conflict(message, checkpoints=(commit.id,)) from None
    commit = replace(commit, last=wanted, number=number, changed_at=record.time)
    return replace(commit, restored=number, replaced=None) if kind is Restored else commit


def forget(repo: Repository, commit: Commit) -> Commit:
    """Make a checkpoint invisible, until it is restored or purged. A forgotten one is returned as it is.

    Raises `Conflict` if it was purged, `StorageError`.
    """
    return append(repo, commit, Forgotten)


def restore(repo: Repository, commit: Commit, *, as_read: bool = False, found: CommitList | None = None) -> Commit:
    """Make a forgotten checkpoint visible again, or one that was replaced. A visible one is returned as it is.

    ``as_read``: what took it away is the last record that ``commit`` knows, and nothing else is undone: for whoever
    takes back what he did himself. ``found``: a listing, of who restores many and has asked what is demanded of
    writers; None for a new one. Raises `Conflict` if it was purged, or if another checkpoint of its run and step is
    visible; with ``as_read`` also if somebody has taken it away since; `StorageError`.
    """
    if found is None:
        check_requirements(repo)
        found = list_commits(repo)
    now = found.commits.get(commit.txid, commit)
    check_restore(found, now)
    return append(repo, commit if as_read else now, Restored)


def check_restore(found: CommitList, commit: Commit) -> None:
    """Raise `Conflict` if ``commit`` cannot be restored by what was listed."""
    _check_standing(commit, "restored")
    if _holds(commit, "restored"):
        return
    _check_allowed(commit, "restored")
    twin = found.at(commit.run, commit.step)
    if twin is not None and not found.is_rewrite_of(twin, commit.txid):
        message = f"{commit} was not restored: {twin} is visible under the same run and step. Forget that one first"
        raise Conflict(message, checkpoints=(commit.id, twin.id))


def purge(repo: Repository, commit: Commit) -> Commit:
    """End a forgotten checkpoint, or one that was replaced: from now on gc may delete its bytes.

    A purged one is returned as it is. Raises `Conflict` if it is neither, `StorageError`.
    """
    return append(repo, commit, Purged)


def announce_all(repo: Repository, commits: Iterable[Commit]) -> None:
    """Announce at once what `append` is about to add to each log. Raises `StorageError`."""
    announce(repo, [(commit.txid, commit.number + 1) for commit in commits])


def keep(repo: Repository, txid: TxId, number: int) -> bool:
    """Take a number that was announced and never came: whoever may come yet finds it taken. False if it is by now.

    Safe at any time. Raises `StorageError`.
    """
    try:
        repo.put_record(commit_key(txid, number), Kept(txid=txid, time=repo.clock()))
    except Conflict:
        return False
    return True


def purge_unreadable(repo: Repository, txid: TxId) -> None:
    """End a transaction of which no first record can be read, so that gc works again.

    Raises `Conflict` if somebody else adds to its log at this instant, `StorageError`.
    """
    logs = (parse_log(entry.key) for entry in repo.storage.list(PREFIX, known=parse_log))
    number = max((log[1] for log in logs if log and log[0] == txid), default=0)
    announce(repo, [(txid, number + 1)])
    repo.put_record(commit_key(txid, number + 1), Purged(txid=txid, time=repo.clock()))


def _touched(before: Mapping[str, Shown], now: Mapping[str, Shown]) -> set[TxId]:
    """Return the transactions whose records are not those that an earlier listing showed. Of ten thousand, few are."""
    keys = {key for key, found in now.items() if before.get(key) != found} | (before.keys() - now.keys())
    return {name[0] for key in keys if (name := parse_log(key))}


def _entries(listed: Mapping[str, Shown], touched: Collection[TxId]) -> dict[ListedObject, tuple[TxId, int]]:
    """Return all records of the transactions, by what was listed of them; also lower ones, where those were not."""
    names = {
        ListedObject(key, *found): name
        for key, found in listed.items()
        if key[len(PREFIX) :].partition(".")[0] in touched and (name := parse_log(key))
    }
    for txid, highest in list(names.values()):
        for number in range(highest):
            if (key := commit_key(txid, number)) not in listed:  # put while the listing ran, or gone
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
    """Add the logs that those in ``logs`` speak of, and that the listing lacks: they were put while it ran, or gone."""
    while True:
        told = [record for log in logs.values() for record in log.values()]
        wanted = {record.by for record in told if isinstance(record, Replaced)}
        wanted |= {record.replaces[0] for record in told if isinstance(record, Committed) and record.replaces}
        wanted -= logs.keys() | listed.commits.keys()
        if not wanted:
            return
        logs.update({txid: _log_by_key(repo, txid) for txid in sorted(wanted)})


def _log_by_key(repo: Repository, txid: TxId) -> dict[int, Read]:
    log = {0: _record(repo, txid, commit_key(txid), FirstRecord)}
    while not isinstance(found := _record(repo, txid, commit_key(txid, len(log)), LaterRecord), NotFound):
        log[len(log)] = found
    return log


def _look_again(repo: Repository, listed: CommitList, logs: Collection[TxId]) -> CommitList:
    """Read the logs of rewritten checkpoints of which the listing shows nothing visible, until nothing is new.

    A listing takes its time: it may show that a rewrite was forgotten, and miss that its base was restored before. Only
    those that ``logs`` are of: the others were looked at before, and have not changed.
    """
    while True:
        now = {commit.txid: _again(repo, commit) for commit in _hidden(listed, logs)}
        # by their numbers: where a record is lost, a log that is read by its keys ends there, and says something else
        changed = {txid: commit for txid, commit in now.items() if commit.number > listed.commits[txid].number}
        if not changed:
            return listed
        for commit in list(changed.values()):
            if commit.replaced is not None and (other := read_log(repo, commit.replaced[1])) is not None:
                changed[other.txid] = other
        listed = all_judged({**listed.commits, **changed}, listed.damaged)


def _hidden(listed: CommitList, touched: Collection[TxId]) -> list[Commit]:
    """Return live commits of the ids that were rewritten, of which one was touched, and none is visible."""
    live = [commit for commit in listed.commits.values() if commit.live]
    ids = {one.id for one in live if one.txid in touched and (one.replaces or one.replaced)}
    ids -= {one.id for one in live if one.visible} if ids else set()
    return [one for one in live if one.id in ids] if ids else []


def _again(repo: Repository, commit: Commit) -> Commit:
    try:
        return refresh(repo, commit)
    except (Damaged, Refused):
        return commit


def _name(key: str) -> tuple[TxId, int]:
    name = parse_log(key)
    if name is None:
        raise Refused(f"not a key of the store: {key[:200]!r}")
    return name


def _kind(key: str) -> Any:
    return LaterRecord if _name(key)[1] else FirstRecord


def _checked(record: Read, txid: TxId, key: str) -> Read:
    """Return the record, if it belongs under its key."""
    if isinstance(record, CasckptError):
        return record
    if record.txid != txid:
        return Refused(f"{key} is not usable: it holds a record of transaction {record.txid}", key=key)
    name = parse_txid(txid)
    if isinstance(record, Committed) and (run_hash(record.run), record.step) != (name.run_hash, name.step):
        return Refused(f"{key} is not usable: it holds a record of {record.run}@{record.step}", key=key)
    return record


def _holds(commit: Commit, wanted: str) -> bool:
    return commit.last == wanted or (wanted == "restored" and commit.last == "committed")


def _check_standing(commit: Commit, wanted: str) -> None:
    """Of a rewrite that does not stand only a void one may be forgotten, and what was forgotten purged."""
    if commit.standing != STANDS and wanted != "purged" and (commit.standing, wanted) != (VOID, "forgotten"):
        raise Conflict(f"{commit} was not {wanted}: it is a rewrite that does not stand", checkpoints=(commit.id,))


def _check_allowed(commit: Commit, wanted: str) -> None:
    if commit.last in _AFTER[wanted]:
        return
    if commit.last == "purged":
        raise Conflict(f"{commit} was purged: it is gone for good", checkpoints=(commit.id,))
    if commit.last == "revoked":
        raise Conflict(f"transaction {commit.txid} was revoked: there is no checkpoint to change")
    if commit.last == "replaced":
        raise Conflict(f"{commit} has been rewritten, and was not {wanted}; look again", checkpoints=(commit.id,))
    raise Conflict(f"{commit} is {commit.last}, so it cannot be {wanted}; forget it first", checkpoints=(commit.id,))
