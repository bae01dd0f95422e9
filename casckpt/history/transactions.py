"""Transactions: saves in progress, their signs of life, and the revoking of dead ones.

A transaction begins before its save reads which commits are live, and before it uploads anything. Its files are removed
only after its record is in commits/. gc relies on both (see "How objects are deleted" in docs/format.md). Saves call
`begin_save`, which keeps this order. Copies and rewrites call `join` or `begin`, and then list all commits, because
they may reuse the blobs of all runs.
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
from casckpt.history.following import announce_lost, at_step, greatest, is_visible, look_at_all, newest_reusable
from casckpt.repository.caches import RunCache
from casckpt.repository.processes import is_dead, this_process
from casckpt.repository.repository import Repository
from casckpt.repository.requirements import check_requirements

PREFIX = "transactions/"
SIGN_OF_LIFE_SECONDS = 120.0
STOP_SECONDS = 30.0
MAX_REASON_CHARACTERS = 500

_NEW_STORE = "the store at %s is gone, with its checkpoints (deleted? unmounted?); this save creates a new store there"
_NOT_ANNOUNCED = "runs/ of %s was lost, or left out of a copy; casckpt announced all checkpoints of the store again"

log = logging.getLogger(__name__)


class _Pulse:
    """Gives signs of life from a thread. A fork does not copy the thread, so a child gives none for its parent."""

    def __init__(self, repo: Repository, txid: TxId, seconds: float, joined: int | None) -> None:
        self.signs = joined or 0
        self._repo = repo
        self._txid = txid
        self._seconds = seconds
        self._process = None if joined is None else this_process()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"casckpt-alive-{txid}", daemon=True)
        with suppress(RuntimeError):  # no thread can start while the interpreter ends
            self._thread.start()

    def stop(self) -> None:
        """End the thread after its current sign of life. A thread that hangs keeps running."""
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
        """Give a sign of life."""
        self.signs += 1  # never use a number twice: a put that failed may have taken effect
        try:
            record = SignOfLife(txid=self._txid, time=self._repo.clock(), process=self._process)
            self._repo.put_record(transaction_key(self._txid, self.signs), record)
        except Conflict:
            log.debug("another process gave sign of life %d of transaction %s", self.signs, self._txid)
        except CasckptError as error:
            log.warning("sign of life %d of transaction %s was not written: %s", self.signs, self._txid, error)


class Transaction:
    """A save in progress of this process. It gives signs of life until it ends or is garbage-collected.

    ``began``: the record under transactions/<txid>. ``joined``: the number of the last sign of life if another
    process has begun the transaction, otherwise None. ``seen``: see `casckpt.history.announcements.announce`.
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
        self.settings = Settings(created_at=0)  # `_allowed` sets those of the store
        self._seen = seen
        self.joined = joined is not None
        self._repo = repo
        self._has_committed = False
        self._pulse = _Pulse(repo, began.txid, seconds, joined)
        weakref.finalize(self, self._pulse.let_go)
        if self.joined:
            self._pulse.beat()  # at once: if the process that began it is dead, a gc would revoke it

    @property
    def txid(self) -> TxId:
        """Its id, which is also the uploader of its objects."""
        return self.began.txid

    def commit(self, record: Committed) -> Commit:
        """Make the checkpoint visible after its manifest was put, and end the transaction.

        Returns the commit that stands. If several processes copy one checkpoint in this transaction, another
        one may have made it. gc removes files that this call cannot remove. Raises `Revoked` if the transaction
        has ended otherwise, `StorageError`.
        """
        try:
            commit(self._repo, record, seen=self._seen)
        except Revoked:
            raise
        except Conflict:
            record = self._committed(record)
        except StorageError as error:
            # the answer may be lost, not the record: a revoke competes for the same name, so exactly one of them stands
            self.abort(error)
            try:
                record = self._committed(record)
            except CasckptError:
                raise error from None
        self._has_committed = True
        self._pulse.stop()
        self._remove_files()
        return just_committed(record)

    def _committed(self, wanted: Committed) -> Committed:
        """Read the record of the checkpoint, and make it durable. Raises `Revoked` if another record stands."""
        record = self._repo.get_record(commit_key(self.txid), FirstRecord)
        if isinstance(record, Committed) and record.manifest == wanted.manifest:
            self._repo.settle(commit_key(self.txid))
            return record
        raise Revoked(f"transaction {self.txid} has ended otherwise; begin a new one", key=commit_key(self.txid))

    def close(self) -> None:
        """End the transaction after its record is in commits/: remove its files, or leave them to gc on an error.

        Raises `Conflict` if the record is missing, because without the file of the transaction a gc would not
        wait for this save.
        """
        key = commit_key(self.txid)
        try:
            has_ended = self._repo.storage.size(key) is not None
        except StorageError as error:  # the save is done; only its files are left
            log.info("files of transaction %s are left to gc: %s", self.txid, error)
            self._pulse.stop()
            return
        if not has_ended:
            raise Conflict(f"transaction {self.txid} is still open: commit or abort it first", key=key)
        self._pulse.stop()
        self._remove_files()

    def abort(self, reason: str | BaseException) -> bool:
        """Create the `revoked` record. Return True if the transaction is revoked now, by this call or by a gc.

        Returns False if it was committed (the answer may have been lost), or if the storage fails; then a later
        gc ends it. Raises no error of the storage, because callers run it while they handle another error.
        """
        if self._has_committed:
            return False
        self._pulse.stop()
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        try:
            revoke(self._repo, self.txid, text)
            found = self._repo.get_record(commit_key(self.txid), FirstRecord)
        except CasckptError as error:
            log.warning("transaction %s was not revoked; a later gc revokes it: %s", self.txid, error)
            return False
        self._remove_files()
        return isinstance(found, records.RevokedRecord)

    def leave(self) -> None:
        """Leave the transaction open, so that another process can join it. Its uploads stay until a gc revokes it."""
        self._pulse.stop()

    def _remove_files(self) -> None:
        numbers = (*range(1, self._pulse.signs + 1), 0)
        try:
            for number in numbers:
                self._repo.storage.delete(transaction_key(self.txid, number))
        except CasckptError as error:  # for example if writers may not delete
            log.info("files of transaction %s are left to gc: %s", self.txid, error)


@dataclass(frozen=True)
class OpenTransaction:
    """A transaction without a record in commits/. ``signs``: the highest number of a sign of life, 0 for none.

    ``began``: None if its file cannot be read.
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
    """Begin a transaction. Call it before the listing of live commits, and before any upload; see `begin_save`.

    ``after``: ids that must sort before the new one. ``seen``: the number of an announcement of the run; ``after``
    covers all that were announced up to it. ``seconds``: between signs of life. Raises `InvalidInput`,
    `StorageError`, and `Unsupported`, also if this version does not know a requirement of the store on writers.
    """
    repo.declare_mirror()
    txid = repo.new_txid(run, step, after)
    began = Began(txid=txid, run=run, step=step, time=repo.clock(), process=this_process())
    repo.put_record(transaction_key(txid), began)
    return _allowed(repo, Transaction(repo, began, seconds=seconds, seen=seen))


def begin_save(
    repo: Repository, run: str, step: int, *, overwrite: bool = False
) -> tuple[Transaction, Commit | None, list[Commit]]:
    """Begin a save. Return its transaction, the parent that it may reuse, and the visible commits that it replaces.

    The order of the steps makes gc safe:

    1. Read the announcements of the run, and check that the step is free.
    2. Note the number of the last announcement. The transaction claims to be later than all up to that one. Another
       thread may read on meanwhile; a number that is too low is safe, one that is too high is not.
    3. Begin the transaction.
    4. Find the newest live commit. A gc that begins later waits for the transaction, so it does not delete the
       objects of a commit that is live now. A commit that was found before the transaction began may be purged, and
       its blobs deleted.

    Creates the store if there is none. Raises `Conflict` if the step exists, unless ``overwrite`` is set; and as
    `begin`.
    """
    is_new = not repo.exists() and repo.create()
    announced = look_at_all(repo, run)
    if not is_new and announced.head < 0:
        announced = _restored_announcements(repo, run) or announced
    replaced = at_step(repo, announced, run, step, is_visible, skip_doubtful=True)
    if replaced and not overwrite:
        raise Conflict(
            f"{run}@{step} exists already ({replaced[-1].id}); save another step, or overwrite it "
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
    """Create or complete a store that shows no announcement of ``run``. Return the announcements if any were added.

    An emptied folder has no marker either, so no reader would find a save in it.
    """
    known = repo.marker
    if repo.create(cell_bytes=known.cell_bytes, blob_bytes=known.blob_bytes):
        log.warning(_NEW_STORE, repo.storage.url)
    elif announce_lost(repo):
        log.warning(_NOT_ANNOUNCED, repo.storage.url)
        return look_at_all(repo, run)
    return None


def join(repo: Repository, began: Began, *, seconds: float = SIGN_OF_LIFE_SECONDS) -> Transaction | None:
    """Begin the transaction ``began``, or join it if another process has begun the copy of the same checkpoint.

    Any number of processes may work in one transaction: they upload the same blobs under the same names, and one of
    them commits. Returns None if the transaction has ended, or is another one. Raises `StorageError`, `Unsupported`
    as `begin`.
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
        with suppress(StorageError):  # it had ended before, so this file is of no use; gc removes it too
            repo.storage.delete(key)
    return None


def _allowed(repo: Repository, transaction: Transaction) -> Transaction:
    """Check that this version may write. A process that sets a requirement waits until open transactions end."""
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
    names = (parse_log(entry.key) for entry in repo.storage.list(transaction_key(txid), known=parse_log))
    return max((name[1] for name in names if name is not None and name[0] == txid), default=0)


def open_transactions(repo: Repository, closed: Container[TxId]) -> list[OpenTransaction]:
    """List the transactions that are not ``closed`` (have no record in commits/), oldest first.

    The result may include a transaction that ended after ``closed`` was listed. Raises `StorageError`.
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


def has_died(repo: Repository, transaction: OpenTransaction) -> bool:
    """Return whether the process that began an open transaction and the last one that joined it are provably dead.

    False in case of doubt. Raises `StorageError`.
    """
    if transaction.began is None or not is_dead(transaction.began.process):
        return False
    if not transaction.signs:
        return True
    try:
        sign: SignOfLife = repo.get_record(transaction_key(transaction.txid, transaction.signs), SignOfLife)
    except (NotFound, Damaged, Refused):
        return False
    return sign.process is None or is_dead(sign.process)


def revoke(repo: Repository, txid: TxId, reason: str) -> bool:
    """Revoke a transaction: create commits/<txid> as `revoked`. False if it already has a record.

    Safe at any time: at worst a live save fails and is repeated. Raises `StorageError`.
    """
    record = records.RevokedRecord(txid=txid, time=repo.clock(), reason=reason[:MAX_REASON_CHARACTERS])
    try:
        repo.put_record(commit_key(txid), record)
    except Conflict:
        return False
    return True


def remove_closed(repo: Repository, closed: Container[TxId]) -> int:
    """Remove the files of ``closed`` transactions (those with a record in commits/). Return the number of files.

    Raises `StorageError`.
    """
    names = ((entry.key, parse_log(entry.key)) for entry in repo.storage.list(PREFIX, known=parse_log))
    done = [key for key, name in names if name is not None and name[0] in closed]
    for key in done:
        repo.storage.delete(key)
    return len(done)
