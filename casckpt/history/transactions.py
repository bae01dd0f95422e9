"""Transactions: saves in progress, their signs of life, and how one that is dead is given up on.

A transaction is begun before its save asks what lives or uploads anything, and its files go only after a record stands
in commits/: what a gc relies on (see "How objects are deleted" in docs/format.md).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass

from casckpt.errors import CasckptError, Conflict, Damaged, NotFound, Refused, Revoked, StorageError
from casckpt.format import records
from casckpt.format.keys import commit_key, parse_log, transaction_key
from casckpt.format.names import TxId
from casckpt.format.records import Began, Committed, FirstRecord, Settings, SignOfLife
from casckpt.history.commits import Commit, commit, just_committed
from casckpt.repository.processes import is_dead, this_process
from casckpt.repository.repository import Repository
from casckpt.repository.requirements import check_requirements

PREFIX = "transactions/"
SIGN_OF_LIFE_SECONDS = 120.0
STOP_SECONDS = 30.0
MAX_REASON_CHARACTERS = 500

log = logging.getLogger(__name__)


class _Pulse:
    """Signs of life from a thread of this process: a fork does not copy it, so a child never beats for its parent."""

    def __init__(self, repo: Repository, txid: TxId, seconds: float, joined: int | None) -> None:
        self.signs = joined or 0
        self._repo = repo
        self._txid = txid
        self._seconds = seconds
        self._process = None if joined is None else this_process()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"casckpt-alive-{txid}", daemon=True)
        with suppress(RuntimeError):  # no thread can be had while the interpreter ends; the process itself is a sign
            self._thread.start()

    def stop(self) -> None:
        """End the thread, after the sign that it may be giving; one that hangs is left behind."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)

    def let_go(self) -> None:
        """End the thread without waiting for it."""
        self._end.set()

    def _run(self) -> None:
        while not self._end.wait(self._seconds):
            self.beat()

    def beat(self) -> None:
        """Give a sign."""
        self.signs += 1  # a number is never tried twice: the put of one that failed may have happened
        try:
            record = SignOfLife(txid=self._txid, time=self._repo.clock(), process=self._process)
            self._repo.put_record(transaction_key(self._txid, self.signs), record)
        except Conflict:
            log.debug("sign of life %d of transaction %s was given by another process", self.signs, self._txid)
        except CasckptError as error:
            log.warning("sign of life %d of transaction %s was not written: %s", self.signs, self._txid, error)


class Transaction:
    """A save in progress of this process, which gives signs of life until it ends, or until nobody refers to it.

    ``began``: the record under transactions/<txid>. ``joined``: the number of the last sign of life of one that another
    process has begun, None for one of our own. ``seen``: see `casckpt.history.announcements.announce`.
    """

    def __init__(
        self,
        repo: Repository,
        began: Began,
        *,
        seconds: float = SIGN_OF_LIFE_SECONDS,
        joined: int | None = None,
        seen: int | None = None,
    ) -> None:
        self.began = began
        self.settings = Settings(created_at=0)  # of the store, as they are once it is open
        self._seen = seen
        self.joined = joined is not None
        self._repo = repo
        self._has_committed = False
        self._pulse = _Pulse(repo, began.txid, seconds, joined)
        weakref.finalize(self, self._pulse.let_go)
        if self.joined:
            self._pulse.beat()  # at once: the process that has begun it may be dead, which a gc would act on

    @property
    def txid(self) -> TxId:
        """Its id, under which it uploads too."""
        return self.began.txid

    def commit(self, record: Committed) -> Commit:
        """Make the checkpoint visible, once its manifest was put, and end the transaction.

        Returns the commit that stands, which another process made where several copy one checkpoint in this
        transaction. Files that cannot be removed are left to gc. Raises `Revoked` if the transaction has ended
        otherwise, `StorageError`.
        """
        try:
            commit(self._repo, record, seen=self._seen)
        except Revoked:
            raise
        except Conflict:
            record = self._committed(record)
        except StorageError as error:
            # The answer may be lost, not the record: revoking races for the same name, so now one of them stands.
            self.abort(f"{type(error).__name__}: {error}")
            try:
                record = self._committed(record)
            except CasckptError:
                raise error from None
        self._has_committed = True
        self._pulse.stop()
        self._remove_files()
        return just_committed(record)

    def _committed(self, wanted: Committed) -> Committed:
        """Read the record of the checkpoint, if it stands, and see that it stays. Raises `Revoked` if another does."""
        found = self._repo.get_record(commit_key(self.txid), FirstRecord)
        if isinstance(found, Committed) and found.manifest == wanted.manifest:
            self._repo.settle(commit_key(self.txid))
            return found
        raise Revoked(f"transaction {self.txid} has ended otherwise; begin another one", key=commit_key(self.txid))

    def close(self) -> None:
        """End it, after its record stands in commits/: its files are removed, or left to gc where the storage fails.

        Raises `Conflict` if there is no such record: without its file, a gc would not wait for this save.
        """
        key = commit_key(self.txid)
        try:
            has_ended = self._repo.storage.size(key) is not None
        except StorageError as error:  # the save is done, this is tidying up
            log.info("files of transaction %s are left to gc: %s", self.txid, error)
            self._pulse.stop()
            return
        if not has_ended:
            raise Conflict(f"transaction {self.txid} is still open: commit or abort it first", key=key)
        self._pulse.stop()
        self._remove_files()

    def abort(self, reason: str) -> bool:
        """Give it up: create its `revoked` record. True if it is revoked now, by this call or by a gc.

        False if it was committed (after all, where the answer got lost), or if the storage does not say: then a later
        gc ends it. Never raises an error of the storage: it is called while another one is on its way.
        """
        if self._has_committed:
            return False
        self._pulse.stop()
        try:
            revoke(self._repo, self.txid, reason)
            found = self._repo.get_record(commit_key(self.txid), FirstRecord)
        except CasckptError as error:
            log.warning("transaction %s was not revoked, a later gc will do that: %s", self.txid, error)
            return False
        self._remove_files()
        return isinstance(found, records.RevokedRecord)

    def leave(self) -> None:
        """Leave it open, for another process to join: what was uploaded stays as long as nobody gives up on it."""
        self._pulse.stop()

    def _remove_files(self) -> None:
        numbers = (*range(1, self._pulse.signs + 1), 0)
        try:
            for number in numbers:
                self._repo.storage.delete(transaction_key(self.txid, number))
        except CasckptError as error:  # as where writers may not delete
            log.info("files of transaction %s are left to gc: %s", self.txid, error)


@dataclass(frozen=True)
class OpenTransaction:
    """A transaction without a record in commits/. ``signs``: the highest number of a sign of life, 0 for none.

    ``began`` is None where its file cannot be read.
    """

    txid: TxId
    began: Began | None
    signs: int


def begin(
    repo: Repository,
    run: str,
    step: int,
    *,
    after: Iterable[TxId] = (),
    seen: int | None = None,
    seconds: float = SIGN_OF_LIFE_SECONDS,
) -> Transaction:
    """Begin a save: before it asks what lives, and before it uploads anything.

    ``after``: ids that the new one sorts behind; ``seen``: all that were announced up to this number of the run are
    among them. ``seconds``: between signs of life. Raises `InvalidInput`, `StorageError`, `Unsupported`, also where the
    store demands of writers what this version does not know.
    """
    repo.declare_mirror()
    txid = repo.new_txid(run, step, after)
    began = Began(txid=txid, run=run, step=step, time=repo.clock(), process=this_process())
    repo.put_record(transaction_key(txid), began)
    return _allowed(repo, Transaction(repo, began, seconds=seconds, seen=seen))


def join(repo: Repository, began: Began, *, seconds: float = SIGN_OF_LIFE_SECONDS) -> Transaction | None:
    """Begin the transaction ``began``, or go on with it, if another process has begun the copy of the same checkpoint.

    Any number of processes may work on one at the same time: they upload the same blobs under the same names, and one
    of them commits. None if the transaction has ended, or is something else. Raises `StorageError`, `Unsupported` as
    `begin`.
    """
    repo.declare_mirror()
    key = transaction_key(began.txid)
    try:
        repo.put_record(key, began)
        joined = None
    except Conflict:
        found = _began(repo, began.txid)
        if found is None or found.manifest != began.manifest or began.manifest is None:
            return None
        began, joined = found, _last_sign(repo, began.txid)
    if repo.storage.size(commit_key(began.txid)) is None:
        return _allowed(repo, Transaction(repo, began, seconds=seconds, joined=joined))
    if joined is None:
        with suppress(StorageError):  # it had ended before: this file is of no use to anybody, and gc removes it too
            repo.storage.delete(key)
    return None


def _allowed(repo: Repository, one: Transaction) -> Transaction:
    """Ask whether this version may write: now that it is open, so that who demands more waits for its end."""
    try:
        one.settings = check_requirements(repo)
    except CasckptError as error:
        if one.joined:
            one.leave()
        else:
            one.abort(f"{type(error).__name__}: {error}")
        raise
    return one


def _last_sign(repo: Repository, txid: TxId) -> int:
    names = (parse_log(entry.key) for entry in repo.storage.list(transaction_key(txid), known=parse_log))
    return max((name[1] for name in names if name is not None and name[0] == txid), default=0)


def open_transactions(repo: Repository, closed: Container[TxId]) -> list[OpenTransaction]:
    """List the transactions that are not ``closed`` (that have no record in commits/), oldest first.

    One that ended after ``closed`` was listed may be among them: who waits lists commits/ again. Raises `StorageError`.
    """
    signs: dict[TxId, int] = {}
    for entry in repo.storage.list(PREFIX, known=parse_log):
        name = parse_log(entry.key)
        if name is not None and name[0] not in closed:
            signs[name[0]] = max(signs.get(name[0], 0), name[1])
    return [OpenTransaction(txid, _began(repo, txid), signs[txid]) for txid in sorted(signs)]


def _began(repo: Repository, txid: TxId) -> Began | None:
    try:
        found: Began = repo.get_record(transaction_key(txid), Began)
    except (NotFound, Damaged, Refused):
        return None
    return found if found.txid == txid else None


def has_died(repo: Repository, one: OpenTransaction) -> bool:
    """Tell whether provably no process works on an open transaction: neither its first one nor the last that joined.

    False wherever there is doubt. Raises `StorageError`.
    """
    if one.began is None or not is_dead(one.began.process):
        return False
    if not one.signs:
        return True
    try:
        sign: SignOfLife = repo.get_record(transaction_key(one.txid, one.signs), SignOfLife)
    except (NotFound, Damaged, Refused):
        return False
    return sign.process is None or is_dead(sign.process)


def revoke(repo: Repository, txid: TxId, reason: str) -> bool:
    """Give up on a transaction: create commits/<txid> as `revoked`. False if a record stood there first.

    Safe at any time: at worst a live save fails, and is made again. Raises `StorageError`.
    """
    record = records.RevokedRecord(txid=txid, time=repo.clock(), reason=reason[:MAX_REASON_CHARACTERS])
    try:
        repo.put_record(commit_key(txid), record)
    except Conflict:
        return False
    return True


def remove_closed(repo: Repository, closed: Container[TxId]) -> int:
    """Remove the files of transactions that are ``closed`` (that have a record in commits/); how many files.

    Raises `StorageError`.
    """
    names = ((entry.key, parse_log(entry.key)) for entry in repo.storage.list(PREFIX, known=parse_log))
    done = [key for key, name in names if name is not None and name[0] in closed]
    for key in done:
        repo.storage.delete(key)
    return len(done)
