"""Lists and revokes saves in progress, gives up saves whose record is lost, and finds the commits of other stores."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from casckpt.base.text import few
from casckpt.base.units import time_of
from casckpt.errors import Conflict, Damaged, NotFound
from casckpt.format.keys import commit_key, parse_object, parse_txid
from casckpt.format.names import TxId
from casckpt.format.records import Process
from casckpt.history.commits import Commit, list_commits, list_names, names_in, purge_unreadable
from casckpt.history.ended import is_list
from casckpt.history.transactions import PREFIX as TRANSACTIONS
from casckpt.history.transactions import OpenTransaction, end, has_died, open_transactions, revoke
from casckpt.repository.processes import is_dead, this_process
from casckpt.repository.reading import PREFIX as SETTINGS
from casckpt.repository.repository import Repository
from casckpt.upkeep.inventory import list_objects

RESTORE = (
    "Restore commits/ from a copy of the store, or mount its disk. If the store was copied by hand while these saves "
    "ran, repeat the copy, which brings the records. If another store has the checkpoints, such as the mirror, copy "
    "them back: `casckpt copy MIRROR STORE`"
)
_NAMED_AT_MOST = 3


def about_unreadable(name: TxId) -> str:
    """Return what to do about a name in `CommitList.damaged`."""
    give_up = (
        f"give up the checkpoint with `casckpt transactions STORE --give-up {name}`. If `casckpt list` still shows the "
        "checkpoint, first `casckpt copy STORE OTHER REF`, and afterwards copy it back: `casckpt copy OTHER STORE REF`"
    )
    without = "delete it: it only lists checkpoints that are gone" if is_list(name) else give_up
    return f"Restore the file from a copy of the store, or {without}"


def lost_records(repo: Repository, keys: Iterable[str], ended: Container[TxId] = ()) -> list[TxId]:
    """Return the transactions that have a manifest among the listed ``keys`` but do not have a record.

    ``ended``: transactions that have a record. Lists transactions/ and commits/ only if a different transaction has a
    manifest. Raises `StorageError`.
    """
    names = (parse_object(key) for key in keys)
    doubtful = {name.uploader for name in names if name is not None and name.kind == "manifest"}
    doubtful = {txid for txid in doubtful if txid not in ended}
    if not doubtful:
        return []
    saving = {txid for txid, _ in names_in(repo, TRANSACTIONS)}
    doubtful -= saving | {txid for txid, _ in list_names(repo)}  # a save that ends meanwhile is in one of them
    return sorted(doubtful - list_commits(repo).recorded) if doubtful else []


def check_recorded(repo: Repository, keys: Iterable[str], ended: Container[TxId]) -> None:
    """Raise `Damaged` if gc would delete a manifest whose record is lost.

    Takes the same arguments as `lost_records`.
    """
    lost = lost_records(repo, keys, ended)
    if lost:
        shown = few(list(map(commit_key, lost)), _NAMED_AT_MOST)
        raise Damaged(
            f"gc deletes nothing, because records are missing from {repo.storage.url}: {shown}. "
            f"Manifests under objects/ have no record in commits/ or transactions/. {RESTORE}. Only if nothing has "
            "them, give up their checkpoints for good: `casckpt transactions STORE --give-up TXID`",
            key=commit_key(lost[0]),
        )


def foreign_commits(repo: Repository, commits: Iterable[Commit]) -> list[Commit]:
    """Return the ``commits`` that were made in another store, whose files were put into this one."""
    return [commit for commit in commits if commit.committed.store != repo.marker.store_id]


def why_foreign(commits: Sequence[Commit]) -> str:
    """Describe commits of other stores, and what to do about them."""
    more = f" and {len(commits) - 1} more (`casckpt verify` lists them)" if commits[1:] else ""
    return (
        f"{commits[0]}{more} came from another store, whose files were put into this one. Copy what you need by its id "
        "into a store of its own (`casckpt copy STORE DST ID`), then forget it here (`casckpt forget STORE ID`)"
    )


def check_settings(repo: Repository) -> None:
    """Raise `Damaged` if settings/ is gone, although this host has seen it: the settings may have named a mirror."""
    if repo.newest_settings()[0] < 0 and repo.catalogue.keys(SETTINGS):
        raise Damaged(
            f"nothing was forgotten or deleted, because settings/ of {repo.storage.url} is missing. Restore it from a "
            "copy of the store, or make the settings again, for example `casckpt settings STORE --set mirror=URL`",
            key=SETTINGS,
        )


def check_own(repo: Repository, commits: Iterable[Commit]) -> None:
    """Raise `Damaged` if any of the ``commits`` came from another store: a rule must not count them unnoticed."""
    if foreign := foreign_commits(repo, commits):
        ids = tuple(commit.id for commit in foreign)
        raise Damaged(f"nothing was forgotten or deleted, because {why_foreign(foreign)}", checkpoints=ids)


@dataclass(frozen=True, slots=True)
class SaveInProgress:
    """A transaction that has not ended.

    ``run``, ``host`` and ``pid`` are None if its record cannot be read. ``signs_of_life``: how many signs of life the
    save has shown. ``alive``: None if this host cannot tell.
    """

    txid: TxId
    run: str | None
    step: int
    since: datetime
    signs_of_life: int
    host: str | None = None
    pid: int | None = None
    alive: bool | None = None


def saves_in_progress(repo: Repository) -> list[SaveInProgress]:
    """List the saves in progress, oldest first. Raises `NotFound` if there is no store, and `StorageError`."""
    repo.check_exists()  # a missing store is an error, not an empty list
    return [_described(repo, transaction) for transaction in open_transactions(repo, list_names(repo))]


def _described(repo: Repository, transaction: OpenTransaction) -> SaveInProgress:
    name = parse_txid(transaction.txid)
    if transaction.began is None:
        return SaveInProgress(transaction.txid, None, name.step, name.time, transaction.signs)
    process = transaction.began.process
    alive = _alive(process)
    if alive is False and not has_died(repo, transaction):
        alive = None  # another process joined the copy and continues it
    since = time_of(transaction.began.time)
    return SaveInProgress(
        transaction.txid, transaction.began.run, name.step, since, transaction.signs, process.host, process.pid, alive
    )


def _alive(process: Process) -> bool | None:
    if is_dead(process):
        return False
    here = this_process()
    same = bool(here.boot_id) and (process.boot_id, process.pid_namespace) == (here.boot_id, here.pid_namespace)
    return True if same else None


def revoke_save(repo: Repository, txid: TxId) -> None:
    """Revoke a save in progress, so that it never becomes visible.

    Raises `Conflict` if it has ended, and `NotFound`.
    """
    names = list_names(repo)
    opened = {one.txid: one for one in open_transactions(repo, names)}
    if (txid, 0) not in names and txid not in opened:
        raise NotFound(f"there is no save {txid} in progress; `casckpt transactions STORE` lists the saves in progress")
    if txid not in opened or not end(repo, opened[txid], "revoked manually"):
        raise Conflict(f"save {txid} has already ended; `casckpt list STORE` shows whether it was committed")


def give_up(repo: Repository, txid: TxId) -> None:
    """End a transaction whose record is lost or unreadable. Raises `Conflict` if it can be read, and `NotFound`."""
    listed = list_commits(repo, anew=True)
    if txid in listed.damaged:
        purge_unreadable(repo, txid)
    elif txid in listed.commits:
        raise Conflict(f"the records of {txid} can be read; `casckpt forget` hides its checkpoint")
    elif txid not in lost_records(repo, list_objects(repo)) or not revoke(repo, txid, "lost, and given up manually"):
        raise NotFound(
            f"{txid} is not a transaction with an unreadable record; `casckpt verify STORE` lists such transactions"
        )
