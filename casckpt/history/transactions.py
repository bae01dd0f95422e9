"""Transactions: saves in progress, their signs of life, and the revocation of dead transactions.

A transaction begins before its save determines which commits are live, and before it uploads anything. Its files are
removed only after its record is in commits/. gc relies on both rules (see "How objects are deleted" in
docs/format.md). Saves call `begin_save`, which ensures this order. Copies and rewrites call `join` or `begin`, and
then list all commits, because they may reuse blobs of any run.

A save commits with the first record of its own log. A rewrite commits with the next record of its checkpoint's log: its
slot. In both cases, the record that ends the transaction without a commit competes for the same key.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from casckpt.base.parallel import in_parallel
from casckpt.errors import CasckptError, Conflict, NotFound, Revoked, StorageError
from casckpt.format import records
from casckpt.format.keys import commit_key, parse_txid, transaction_key, uploader_folder
from casckpt.format.names import TxId
from casckpt.format.records import Began, Committed, FirstRecord, LaterRecord, Rewritten, Settings, SignOfLife
from casckpt.history.commits import Commit, commit, just_committed, keep, list_commits, names_in
from casckpt.history.ended import find
from casckpt.history.following import announce_lost, at_step, greatest, is_visible, look_at_all, newest_reusable
from casckpt.repository.caches import RunCache
from casckpt.repository.processes import is_dead, saved_here, this_process
from casckpt.repository.reading import check_requirements, read_record
from casckpt.repository.repository import Repository

PREFIX = "transactions/"
SIGN_OF_LIFE_SECONDS = 120.0
STOP_SECONDS = 30.0
CLEAN_UP_SECONDS = 10.0
_BESIDE = "casckpt-clean-up"
MAX_REASON_CHARACTERS = 500

_NOT_ANNOUNCED = "runs/ of %s was lost, or was not copied; casckpt reannounced all checkpoints of the store"

log = logging.getLogger(__name__)


class _Pulse:
    """Sends signs of life from a thread.

    A fork does not copy the thread, so a child does not send signs of life for its parent.
    """

    def __init__(self, repo: Repository, txid: TxId, joined: int | None) -> None:
        self.signs = joined or 0
        self._repo = repo
        self._txid = txid
        self._process = None if joined is None else this_process()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"casckpt-alive-{txid}", daemon=True)
        with suppress(RuntimeError):  # threads cannot start while the interpreter is exiting
            self._thread.start()

    def stop(self) -> None:
        """End the thread after its current sign of life. If the thread hangs, it continues to run."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)

    def let_go(self) -> None:
        """End the thread without waiting for it."""
        self._end.set()

    def _run(self) -> None:
        while not self._end.wait(SIGN_OF_LIFE_SECONDS):
            self.beat()

    def beat(self) -> None:
        """Send a sign of life."""
        self.signs += 1  # never use a number twice, because a failed put may have taken effect
        try:
            record = SignOfLife(txid=self._txid, time=self._repo.clock(), process=self._process)
            self._repo.put_record(transaction_key(self._txid, self.signs), record)
        except Conflict:
            log.debug("another process wrote sign of life %d of transaction %s", self.signs, self._txid)
        except CasckptError as error:
            log.warning("casckpt could not write sign of life %d of transaction %s: %s", self.signs, self._txid, error)


def run_beside(act: Callable[[], None]) -> None:
    """Call ``act`` in a thread that nobody waits for until the process ends, and then for at most 10 seconds."""
    with suppress(RuntimeError):  # threads cannot start while the interpreter is exiting
        threading.Thread(target=act, name=_BESIDE, daemon=True).start()


@atexit.register
def _finish() -> None:
    for thread in threading.enumerate():
        if thread.name == _BESIDE:
            thread.join(CLEAN_UP_SECONDS)


class Transaction:
    """A save in progress in this process. It sends signs of life until it ends or is garbage-collected.

    ``began``: the record under transactions/<txid>. ``joined``: the number of the last sign of life if another process
    began the transaction. Otherwise None. ``seen``: see `casckpt.history.announcements.announce`.
    """

    def __init__(self, repo: Repository, began: Began, *, joined: int | None = None, seen: int | None = None) -> None:
        self.began = began
        self.settings = Settings(created_at=0)  # `_allowed` replaces them with the store's settings
        self._seen = seen
        self.joined = joined is not None
        self._repo = repo
        self._has_committed = self._has_tried = False
        self._pulse = _Pulse(repo, began.txid, joined)
        weakref.finalize(self, self._pulse.let_go)
        if self.joined:
            self._pulse.beat()  # immediately, because a gc revokes the transaction if the process that began it is dead

    @property
    def txid(self) -> TxId:
        """The transaction's id, which is also the uploader of its objects."""
        return self.began.txid

    def commit(self, record: Committed) -> Commit:
        """Make the checkpoint visible, and end the transaction. The caller must put the manifest first.

        Returns the commit that is stored. If several processes copy one checkpoint in this transaction, a different
        process may have created this commit. gc removes files that this call cannot remove. Raises `Revoked` if
        the transaction has ended in a different way, and `StorageError`.
        """
        self._has_tried = True
        record = records.changed(record, store=self._repo.marker.store_id, who=self._repo.who)
        try:
            commit(self._repo, record, seen=self._seen)
        except Revoked:
            raise
        except Conflict:
            record = self._committed(record)
        except StorageError as error:
            # the answer may be lost, but not the record: a revoke competes for the same name, so only one of them is
            # stored
            self.abort(error)
            try:
                record = self._committed(record)
            except CasckptError:
                raise error from None
        if find(self._repo, self.txid) is not None:  # this process slept for a month
            raise Revoked(f"transaction {self.txid} was revoked long ago; save again", key=commit_key(self.txid))
        self._has_committed = True
        saved_here.add(record.manifest)
        self._pulse.stop()
        self._remove_files()
        return just_committed(record)

    def _committed(self, wanted: Committed) -> Committed:
        """Read the checkpoint's record, and make it durable. Raises `Revoked` if a different record is stored."""
        record = self._repo.get_record(commit_key(self.txid), FirstRecord)
        if isinstance(record, Committed) and record.manifest == wanted.manifest:
            self._repo.settle(commit_key(self.txid))
            return record
        raise Revoked(
            f"a different process already ended transaction {self.txid}; begin a new one", key=commit_key(self.txid)
        )

    def rewrite(self, record: Rewritten) -> None:
        """Give a checkpoint new places, and end the transaction, which has a slot. The caller must put the manifest.

        Raises `Conflict` if another record has the slot, and `StorageError`.
        """
        log, number = self.began.slot or (record.txid, 1)
        try:
            self._repo.put_record(commit_key(log, number), record)
        except CasckptError as error:  # the answer may be lost, but not the record: `revoke` competes for the same name
            if self.abort(error) or not self._has_slot():
                if isinstance(error, Conflict):
                    raise Conflict(f"{log} was not rewritten: another process changed it", key=error.key) from error
                raise
        if find(self._repo, log) is not None:  # this process slept for a month
            raise Conflict(f"{log} was not rewritten: it was purged", key=commit_key(log))
        self._has_committed = True
        self._pulse.stop()
        self._remove_files()

    def _has_slot(self) -> bool:
        with suppress(NotFound):
            return self.began.slot is not None and _holds_slot(self._repo, self.txid, self.began.slot)
        return False

    def close(self) -> None:
        """End the transaction after its record is in commits/. Remove its files, or leave them to gc after an error.

        Raises `Conflict` if the record is missing. Without the transaction's file, a gc would not wait for this save.
        """
        key = commit_key(self.txid)
        try:
            has_ended = self._repo.storage.size(key) is not None
        except StorageError as error:  # the save is complete; only its files remain
            log.info("the files of transaction %s remain until a gc removes them: %s", self.txid, error)
            self._pulse.stop()
            return
        if not has_ended:
            raise Conflict(f"transaction {self.txid} is still open: commit or abort it first", key=key)
        self._pulse.stop()
        self._remove_files()

    def abort(self, reason: str | BaseException) -> bool:
        """Create the `revoked` record. Return True if the transaction is now revoked, by this call or by a gc.

        Returns False if it was committed (the answer may have been lost), if the store was deleted, or if the storage
        fails. If the storage fails, a later gc revokes the transaction. Never raises a storage error, because callers
        run this while they handle a different error.

        A save in a folder then removes what it uploaded, beside the caller, unless ``reason`` is an interrupt. If there
        is no room to revoke it, it does so before it is revoked, because only this object could have committed it.
        """
        if self._has_committed:
            return False
        self._pulse.stop()
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        try:
            if not self._repo.fresh().exists():
                return False  # it was deleted, and a record would make its place look like a damaged store
            revoke(self._repo, self.txid, text, _slots(self.began))
            found = None if self._has_slot() else self._repo.get_record(commit_key(self.txid), FirstRecord)
        except CasckptError as error:
            log.warning("casckpt could not revoke transaction %s; a later gc revokes it: %s", self.txid, error)
            if isinstance(error, StorageError) and error.full and not self._has_tried:
                self._remove_uploads(reason, revoked=False)
            return False
        self._remove_files()
        if is_revoked := isinstance(found, records.RevokedRecord):
            self._remove_uploads(reason, revoked=True)
        return is_revoked

    def _remove_uploads(self, reason: str | BaseException, *, revoked: bool) -> None:
        """Start to remove the objects of this save.

        Another process may need the objects of a rewrite, or those of a copy that it may still commit.
        """
        is_own = self.began.slot is None and (revoked or self.began.manifest is None)
        is_interrupt = isinstance(reason, BaseException) and not isinstance(reason, Exception)
        if is_own and not is_interrupt and not self._repo.storage.traits.remote:
            run_beside(partial(self._clean_up, revoked))

    def _clean_up(self, revoked: bool) -> None:
        storage, folder, end = self._repo.storage, uploader_folder(self.txid), time.monotonic() + CLEAN_UP_SECONDS
        try:
            if revoked:
                self._repo.settle(commit_key(self.txid))  # durable before anything is deleted
            for entry in storage.list_folder(folder)[0]:
                if time.monotonic() > end:
                    return
                storage.delete(entry.key)
            storage.sweep(folder)
            if not revoked:
                revoke(self._repo, self.txid, "the disk was full")
                self._remove_files()
                storage.prepare()
        except CasckptError as error:
            log.info("the uploads of transaction %s remain until a gc removes them: %s", self.txid, error)

    def leave(self) -> None:
        """Leave the transaction open, so that another process can join it.

        Its uploads remain until a gc revokes it.
        """
        self._pulse.stop()

    def _remove_files(self) -> None:
        numbers = (*range(1, self._pulse.signs + 1), 0)
        try:
            for number in numbers:
                self._repo.storage.delete(transaction_key(self.txid, number))
        except CasckptError as error:  # for example if writers may not delete
            log.info("the files of transaction %s remain until a gc removes them: %s", self.txid, error)


@dataclass(frozen=True)
class OpenTransaction:
    """A transaction that has not ended. ``signs``: the number of its last sign of life, or 0 if there is none.

    ``began``: None if its file cannot be read. It is then unknown which record would commit it.
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
    slot: tuple[TxId, int] | None = None,
) -> Transaction:
    """Begin a transaction. Call this before you list live commits, and before any upload. See `begin_save`.

    ``after``: ids that must sort before the new one. ``seen``: the number of an announcement of the run. The new id
    also sorts after all transactions that were announced up to this number. ``slot``: for a rewrite, see `Began`.
    Raises `InvalidInput`, `StorageError`, and `Unsupported`. `Unsupported` is also raised if this version does not know
    one of the store's requirements for writers.
    """
    repo.declare_mirror()
    txid = repo.new_txid(run, step, after)
    began = Began(txid=txid, run=run, step=step, time=repo.clock(), process=this_process(), slot=slot)
    repo.put_record(transaction_key(txid), began)
    return _allowed(repo, Transaction(repo, began, seen=seen))


def begin_save(
    repo: Repository, run: str, step: int, *, overwrite: bool = False
) -> tuple[Transaction, Commit | None, list[Commit]]:
    """Begin a save. Return its transaction, the parent that it may reuse, and the visible commits that it replaces.

    The order of these steps makes gc safe:

    1. Find all announced transactions of the run (`look_at_all`), and check that the step is free.
    2. Note the number of the last announcement. The transaction claims to be later than all announcements up to it.
       Meanwhile, another thread may read more announcements. A number that is too low is safe. A number that is too
       high is not.
    3. Begin the transaction.
    4. Find the newest live commit. A gc that begins later waits for the transaction, so it does not delete the objects
       of a commit that is now live. A commit that was found before the transaction began might be purged, and its blobs
       deleted.

    Creates the store if it does not exist. Raises `Conflict` if the step exists, unless ``overwrite`` is set. Raises
    the errors of `begin`.
    """
    is_new = not repo.exists() and repo.create()
    announced = look_at_all(repo, run)
    if not is_new and announced.head < 0:
        announced = _restored_announcements(repo, run) or announced
    replaced = at_step(repo, announced, run, step, is_visible, skip_doubtful=True)
    if replaced and not overwrite:
        raise Conflict(
            f"{run}@{step} already exists ({replaced[-1].id}): save a different step or run, or overwrite it "
            "(overwrite=True, --overwrite)",
            checkpoints=(replaced[-1].id,),
        )
    seen = announced.head
    latest = greatest(repo, announced, run)
    transaction = begin(repo, run, step, after=[latest] if latest else [], seen=seen)
    try:
        return transaction, newest_reusable(repo, run), replaced
    except BaseException as error:
        transaction.abort(error)
        raise


def _restored_announcements(repo: Repository, run: str) -> RunCache | None:
    """Create or complete a store that does not show any announcement of ``run``.

    Return the announcements if any were added. If the store's folder was emptied, the marker is missing too. Without
    it, no reader would find a save there.
    """
    known = repo.marker
    if not repo.create(cell_bytes=known.cell_bytes, blob_bytes=known.blob_bytes) and announce_lost(repo):
        log.warning(_NOT_ANNOUNCED, repo.storage.url)
        return look_at_all(repo, run)
    return None


def join(repo: Repository, began: Began) -> Transaction | None:
    """Begin the transaction ``began``, or join it if another process has begun to copy the same checkpoint.

    Any number of processes may work in the same transaction. They upload the same blobs under the same names, and one
    of them commits. Returns None if the transaction has ended, or if its id belongs to a different transaction. Raises
    `StorageError`, and `Unsupported` in the same cases as `begin`.
    """
    repo.declare_mirror()
    key = transaction_key(began.txid)
    try:
        repo.put_record(key, began)
        joined = None
    except Conflict:
        found = _began(repo, began.txid)
        same = began.manifest, began.places
        if found is None or None in same or (found.manifest, found.places) != same:
            return None
        began, joined = found, _last_sign(repo, began.txid)
    # another process may have used the txid meanwhile, and gc may have deleted its log
    if repo.storage.size(commit_key(began.txid)) is None and find(repo, began.txid, young=True) is None:
        return _allowed(repo, Transaction(repo, began, joined=joined))
    if joined is None:
        with suppress(StorageError):  # the transaction had ended, so this file is useless; gc would also remove it
            repo.storage.delete(key)
    return None


def _allowed(repo: Repository, transaction: Transaction) -> Transaction:
    """Check that this version may write. A process that sets a requirement waits until all open transactions end."""
    try:
        transaction.settings = check_requirements(repo)
    except CasckptError as error:
        if transaction.joined:
            transaction.leave()
        else:
            transaction.abort(error)
        raise
    return transaction


def _last_sign(repo: Repository, txid: TxId) -> int:
    return max((number for of, number in names_in(repo, transaction_key(txid)) if of == txid), default=0)


def open_transactions(repo: Repository, names: Container[tuple[TxId, int]]) -> list[OpenTransaction]:
    """List the transactions that have not ended, oldest first. ``names``: records that exist (see `list_names`).

    The result may include transactions that ended after ``names`` were listed. Raises `StorageError`.
    """
    signs: dict[TxId, int] = {}
    for txid, number in names_in(repo, PREFIX):
        if (txid, 0) not in names:
            signs[txid] = max(signs.get(txid, 0), number)
    read = list(in_parallel(repo.storage.traits.requests, partial(_began, repo), sorted(signs)))
    found = (OpenTransaction(txid, began, signs[txid]) for txid, began in zip(sorted(signs), read, strict=True))
    return [one for one in found if not _has_ended(repo, one, names)]


def _has_ended(repo: Repository, one: OpenTransaction, names: Container[tuple[TxId, int]]) -> bool:
    """Return whether a transaction without a record of its own has ended: its slot is taken, or its file is gone."""
    if one.began is None:
        return repo.storage.size(transaction_key(one.txid)) is None or one.txid in list_commits(repo).recorded
    return one.began.slot is not None and one.began.slot in names


def _began(repo: Repository, txid: TxId) -> Began | None:
    found = read_record(repo, transaction_key(txid), Began)
    return found if isinstance(found, Began) and found.txid == txid else None


def has_died(repo: Repository, transaction: OpenTransaction) -> bool:
    """Return whether the process that began an open transaction, and the last one that joined it, are provably dead.

    Return False in case of doubt. Raises `StorageError`.
    """
    if transaction.began is None or not is_dead(transaction.began.process):
        return False
    if not transaction.signs:
        return True
    sign = read_record(repo, transaction_key(transaction.txid, transaction.signs), SignOfLife)
    return isinstance(sign, SignOfLife) and (sign.process is None or is_dead(sign.process))


def revoke(repo: Repository, txid: TxId, reason: str, slots: Iterable[tuple[TxId, int]] = ()) -> bool:
    """Revoke a transaction: create commits/<txid> as `revoked`. Return False if it has committed or already ended.

    ``slots``: for a rewrite, the records with which it may commit. They are filled first. This is safe at any time. In
    the worst case, a live save fails and is retried. Raises `StorageError`.
    """
    if any(_holds_slot(repo, txid, slot) for slot in slots if not keep(repo, *slot)):
        return False
    record = records.RevokedRecord(txid=txid, time=repo.clock(), reason=reason[:MAX_REASON_CHARACTERS])
    try:
        repo.put_record(commit_key(txid), record)
    except Conflict:
        return False
    return True


def end(repo: Repository, one: OpenTransaction, reason: str) -> bool:
    """Revoke an open transaction of any process, as `revoke` does.

    If its file cannot be read, it may be a rewrite of any checkpoint of its run and step. Its slot is then, at most,
    the next number of that checkpoint's log.
    """
    if one.began is not None:
        return revoke(repo, one.txid, reason, _slots(one.began))
    name = parse_txid(one.txid)
    of_run = (one for one in list_commits(repo).live() if parse_txid(one.txid).run_hash == name.run_hash)
    slots = [(commit.txid, commit.number + 1) for commit in of_run if commit.step == name.step]
    return revoke(repo, one.txid, reason, slots)


def _slots(began: Began) -> list[tuple[TxId, int]]:
    return [] if began.slot is None else [began.slot]


def _holds_slot(repo: Repository, txid: TxId, slot: tuple[TxId, int]) -> bool:
    """Return whether a rewrite has committed. If so, make its record durable.

    Raises `StorageError`, and `Damaged` if its slot cannot be read.
    """
    record = repo.get_record(commit_key(*slot), LaterRecord)
    has_committed = isinstance(record, Rewritten) and record.by == txid
    if has_committed:
        repo.settle(commit_key(*slot))
    return has_committed


def closed_files(repo: Repository, names: Container[tuple[TxId, int]]) -> tuple[dict[str, TxId], set[TxId]]:
    """Return the files of transactions that have ended, and the open transactions.

    Revokes rewrites that lost their slot. ``names``: durable records in commits/. Raises `StorageError`.
    """
    files = {transaction_key(*name): name[0] for name in names_in(repo, PREFIX)}
    opened = {txid for txid in files.values() if (txid, 0) not in names}
    for txid in sorted(opened):
        one = OpenTransaction(txid, _began(repo, txid), 0)
        if _has_ended(repo, one, names):
            if one.began is not None:
                end(repo, one, "another record has its slot")
            opened.discard(txid)
    return {key: txid for key, txid in files.items() if txid not in opened}, opened
