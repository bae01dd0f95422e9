"""Watches a run, and yields each new checkpoint once, in announcement order.

An announcement is written before its record, so the record may be missing for an unlimited time. In this case, the
watcher rereads it at increasing intervals. It yields a checkpoint only if the checkpoint's log, read at that time,
shows that it is visible.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from casckpt.base.names import check_run, run_hash
from casckpt.contents.refs import resolve
from casckpt.errors import Damaged, InvalidInput, NotFound, Refused, StorageError
from casckpt.format.keys import announcement_key, commit_key
from casckpt.format.names import ManifestId, TxId
from casckpt.history.announcements import look, read_back
from casckpt.history.commits import Commit, list_commits, read_log
from casckpt.history.ended import find
from casckpt.history.following import announced_by, hidden_from, is_visible, newest, open_names
from casckpt.repository.caches import RunCache
from casckpt.repository.repository import Repository

START = "start"
LONGEST_PAUSE = 60.0  # the longest time in seconds between two attempts while storage fails
_CHECK = 16  # the number of polls between two checks that the store is still the same
_MOST = 32  # the maximum number of polls before a missing record is reread

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Notice:
    """A new, visible commit. ``late``: whether a later save was already yielded or visible."""

    commit: Commit
    late: bool


@dataclass(slots=True)
class _Awaited:
    """An announced record that does not exist yet. ``number``: its number in the log.

    ``due``: the number of the poll that reads it.
    """

    number: int
    due: int
    pause: int = 1


class Expected:
    """Decides which announced commits are yielded, and when their logs are read. Performs no I/O.

    ``newest``: the latest save that was yielded, or that was visible at the start. ``polls``: the number
    of polls. This number serves as a clock.
    """

    def __init__(self) -> None:
        self.newest: TxId | None = None
        self.polls = 0
        self._floor: TxId | None = None
        self._new: set[TxId] = set()  # announced, but not yielded yet
        self._awaited: dict[TxId, _Awaited] = {}
        self._yielded: set[ManifestId] = set()

    def begin_behind(self, commit: Commit) -> None:
        """Treat a checkpoint as already yielded."""
        self.newest = commit.txid
        self._yielded.add(commit.id)

    def begin_anew(self) -> None:
        """From now on, treat an announced transaction as new only if it began after ``newest``."""
        self._floor = self.newest

    def note(self, txid: TxId, number: int = 0) -> None:
        """Note that a record of a log is expected. A commit is yielded only if its first record was expected."""
        if number == 0 and (self._floor is None or txid > self._floor):
            self._new.add(txid)
        if txid in self._new:
            held = self._awaited.get(txid)
            self._awaited[txid] = _Awaited(max(number, held.number if held else 0), self.polls)

    def due(self) -> list[TxId]:
        """Return the transactions whose logs must be read now, in announcement order."""
        return [txid for txid, awaited in self._awaited.items() if awaited.due <= self.polls]

    def latest(self) -> list[TxId]:
        """Return the due transactions that may be newer than ``newest``, latest first. Drop the older ones."""
        for txid in [txid for txid in self._awaited if self.newest is not None and txid <= self.newest]:
            self.drop(txid)
        return sorted(self.due(), reverse=True)

    def judge(self, txid: TxId, seen: Commit | None) -> Commit | None:
        """Return the commit to yield, or None. ``seen``: the commit from the log of ``txid``."""
        if seen is None:
            self._wait(txid)
        elif seen.last == "revoked" or seen.id in self._yielded:
            self.drop(txid)
        elif seen.visible:
            return seen
        elif seen.live and seen.number < self._awaited[txid].number:
            self._wait(txid)
        else:
            del self._awaited[txid]  # until another record is announced, such as one that restores it
        return None

    def is_late(self, commit: Commit) -> bool:
        """Return whether a later save is known."""
        return self.newest is not None and commit.txid < self.newest

    def take(self, txid: TxId, commit: Commit) -> Notice:
        """Return the notice for a commit, and record that the commit was yielded."""
        notice = Notice(commit, self.is_late(commit))
        self.newest = max(self.newest or commit.txid, commit.txid)
        self._yielded.add(commit.id)
        self.drop(txid)
        return notice

    def drop(self, txid: TxId) -> None:
        """Stop waiting for a transaction."""
        self._new.discard(txid)
        self._awaited.pop(txid, None)

    def _wait(self, txid: TxId) -> None:
        awaited = self._awaited[txid]
        awaited.due, awaited.pause = self.polls + awaited.pause, min(2 * awaited.pause, _MOST)


class Watcher:
    """Reads the announcements of a run and the logs of new transactions. A failed call can be retried at any time.

    ``after``: None to begin with the next commit, `START` to begin with the first commit, or a checkpoint or reference
    to begin after it. This checkpoint may have been purged. ``latest_only``: return only the latest save at each call.
    The store need not exist yet. Raises `NotFound` for a reference to a missing checkpoint. Raises `InvalidInput` and
    `StorageError`.
    """

    def __init__(self, repo: Repository, run: str, after: str | Commit | None = None, *, latest_only: bool) -> None:
        self._repo, self._run, self._hash = repo, check_run(run), run_hash(run)
        self._latest_only = latest_only
        self._known: RunCache | None = None
        self._next = 0
        self._expected = Expected()
        behind = None if after is None or after == START else _referred(repo, run, after)
        try:
            self._known = look(repo, self._hash)
        except NotFound:
            return  # every checkpoint is new
        if behind is not None:
            self._expected.begin_behind(behind)
        if after is None or latest_only:
            self._begin_at_head(with_newest=after is not None)
        elif behind is not None:
            self._begin_behind(behind)

    def _begin_at_head(self, *, with_newest: bool) -> None:
        """Start the watch after the current announcements.

        ``with_newest``: whether to also yield the newest visible checkpoint if it is new.
        """
        self._next = self._head + 1
        self._note_open()
        last = newest(self._repo, self._run, is_visible, skip_doubtful=True)
        if last is None:
            return
        if with_newest:
            self._expected.note(last.txid)
        else:
            self._expected.begin_behind(last)

    def _begin_behind(self, commit: Commit) -> None:
        self._next = self._number_of(commit.txid) + 1
        if not self._next and not self._is_over(commit.txid):
            self._expected.begin_anew()
        self._note_open()

    def _is_over(self, txid: TxId) -> bool:
        """Return whether gc has deleted a log, and its announcement with all earlier ones."""
        return not self._repo.runs[self._hash].unreadable and find(self._repo, txid, young=True) is not None

    def _note_open(self) -> None:
        """Treat the saves in progress as expected, because they may already be announced."""
        for txid in sorted(open_names(self._repo, self._hash)):
            if self._repo.storage.size(commit_key(txid)) is None:
                self._expected.note(txid)

    def _number_of(self, txid: TxId) -> int:
        """Return the number of the announcement of a log's first record, or -1 if there is none."""
        low, count = self._head + 1, 1
        known = self._repo.runs[self._hash]
        while low > known.low:
            low, count = max(known.low, low - count), 2 * count
            known = read_back(self._repo, self._hash, low)
            numbers = [number for number in range(low, known.head + 1) if (txid, 0) in announced_by(known, number)]
            if numbers:
                return numbers[0]
        return -1

    @property
    def _head(self) -> int:
        return -1 if self._known is None else self._known.head

    def next(self) -> Notice | None:
        """Return the next notice, or None if there is none at present.

        Raises `StorageError`, and the errors that occur when the marker is read.
        """
        if self._latest_only:
            self._poll()
            return self._take_latest()
        notice = self._take_first()
        if notice is None:
            self._poll()
            notice = self._take_first()
        return notice

    def _poll(self) -> None:
        """Check for new announcements. This takes one small request if there are none."""
        self._expected.polls += 1
        is_time = self._known is None or self._next <= self._head or self._expected.polls % _CHECK == 0
        if is_time or self._repo.storage.size(announcement_key(self._hash, self._head + 1)) is not None:
            self._read()

    def _read(self) -> None:
        try:
            known = look(self._repo, self._hash)
        except NotFound:
            return
        if self._known not in (None, known):  # a different store, or an older copy of this one, is at the URL
            self._next = 0
            self._expected.begin_anew()
        with known.lock.get():  # otherwise, another thread could advance the head in the meantime
            self._known = read_back(self._repo, self._hash, self._next)
            head = known.head
            announced = [record for number in range(self._next, head + 1) for record in announced_by(known, number)]
        for txid, of_log in announced:
            self._expected.note(txid, of_log)
        for txid in sorted(hidden_from(self._repo, self._hash, known, self._next)):
            if self._expected.newest is None or txid > self._expected.newest:
                self._expected.note(txid)
        self._next = head + 1

    def _take_first(self) -> Notice | None:
        for txid in self._expected.due():
            commit = self._read_commit(txid)
            if commit is not None:
                return self._expected.take(txid, commit)
        return None

    def _take_latest(self) -> Notice | None:
        best: tuple[TxId, Commit] | None = None
        for txid in self._expected.latest():
            if best is not None and best[1].txid >= txid:
                break
            commit = self._read_commit(txid)
            if commit is not None and self._expected.is_late(commit):
                self._expected.drop(txid)  # this is a copy, whose checkpoint is older than its transaction
            elif commit is not None and (best is None or commit.txid > best[1].txid):
                best = txid, commit
        return None if best is None else self._expected.take(*best)

    def _read_commit(self, txid: TxId) -> Commit | None:
        try:
            seen = read_log(self._repo, txid)
        except (Damaged, Refused) as error:
            log.warning("skipping %s: %s", txid, error)
            self._expected.drop(txid)
            return None
        return self._expected.judge(txid, seen)


def watch(
    watcher: Watcher,
    *,
    poll: float,
    timeout: float | None,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Notice]:
    """Yield new commits, and poll every ``poll`` seconds. End after ``timeout`` seconds without a new commit.

    If the storage fails, retries at increasing intervals. Raises `StorageError` if it still fails at the end. Raises
    the errors that occur when the store's marker is read.
    """
    since, pause = now(), poll
    while True:
        failure: StorageError | None = None
        try:
            notice = watcher.next()
        except StorageError as error:
            notice, failure = None, error
            log.warning("casckpt cannot watch the run now, but will retry: %s", error)
        if notice is not None:
            yield notice
            since, pause = now(), poll
            continue
        left = math.inf if timeout is None else since + timeout - now()
        if left <= 0 and failure is not None:
            raise failure
        if left <= 0:
            return
        pause = min(2 * pause, max(poll, LONGEST_PAUSE)) if failure else poll
        sleep(min(pause, left))


def _referred(repo: Repository, run: str, after: str | Commit) -> Commit:
    found = after if isinstance(after, Commit) else _resolved(repo, after)
    if found.run != run:
        raise InvalidInput(f"{found} does not belong to run {run!r}: pass a checkpoint of this run")
    return found


def _resolved(repo: Repository, ref: str) -> Commit:
    """Return the commit that a reference names, or that it named before the commit was forgotten or purged."""
    try:
        return resolve(repo, ref)
    except NotFound:
        every = [commit for commit in list_commits(repo).commits.values() if commit.last != "revoked"]
        named = [one for one in every if ref == f"{one.run}@{one.step}" or one.id.startswith(ref.lower())]
        if not named:
            raise
        return max(named, key=lambda commit: commit.txid)
