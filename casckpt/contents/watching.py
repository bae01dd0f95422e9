"""Watching a run: its new checkpoints, each once, in the order in which they were announced.

An announcement comes before its record, so what it tells of may not be there yet, for as long as it likes; then it is
asked for again, at longer and longer intervals. What is told was visible in a log that was read just then.
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
from casckpt.format.keys import announcement_key, commit_key, parse_log, parse_txid
from casckpt.format.names import ManifestId, TxId
from casckpt.history.announcements import look, read_back
from casckpt.history.commits import Commit, follow, list_commits, read_log
from casckpt.history.following import hidden_from, is_visible, newest, told_by
from casckpt.repository.caches import RunCache
from casckpt.repository.repository import Repository

START = "start"
LONGEST_PAUSE = 60.0  # seconds until a storage that has failed is asked again
_CHECK = 16  # polls until it is looked whether the store is still the same
_MOST = 32  # polls until what is not there yet is asked for again

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Notice:
    """A commit that is new and visible. ``late``: one that was saved later had been told, or was there before."""

    commit: Commit
    late: bool


@dataclass(slots=True)
class _Awaited:
    """``number``: of the record in its log that was announced. ``due``: at which poll it is looked at."""

    number: int
    due: int
    pause: int = 1


class Expected:
    """What was announced and is to be told, if it comes to that. Does no I/O.

    ``newest``: when the one began that was saved last of those that were told, or there before. ``polls``: the clock.
    """

    def __init__(self) -> None:
        self.newest: TxId | None = None
        self.polls = 0
        self._floor: TxId | None = None
        self._new: set[TxId] = set()  # what was announced, and has not been told
        self._awaited: dict[TxId, _Awaited] = {}
        self._told: set[ManifestId] = set()

    def begin_behind(self, commit: Commit) -> None:
        """Take a checkpoint for one that was told."""
        self.newest = commit.origin
        self._told.add(commit.id)

    def begin_anew(self) -> None:
        """Of all that is announced from now on, only what was begun after ``newest`` is new."""
        self._floor = self.newest

    def note(self, txid: TxId, number: int = 0) -> None:
        """Expect a record of a log. Only what was expected from its first record on is ever told."""
        if number == 0 and (self._floor is None or txid > self._floor):
            self._new.add(txid)
        if txid in self._new:
            held = self._awaited.get(txid)
            self._awaited[txid] = _Awaited(max(number, held.number if held else 0), self.polls)

    def due(self) -> list[TxId]:
        """Return what is to be looked at now, as it was announced."""
        return [txid for txid, one in self._awaited.items() if one.due <= self.polls]

    def latest(self) -> list[TxId]:
        """Return what is due and may be newer than ``newest``, the last first; the rest is dropped."""
        for txid in [txid for txid in self._awaited if self.newest is not None and txid <= self.newest]:
            self.drop(txid)
        return sorted(self.due(), reverse=True)

    def judge(self, txid: TxId, seen: Commit | None, stands: Commit | None) -> Commit | None:
        """Return what is to be told. ``seen``: the log of ``txid``, None for none; ``stands``: what has replaced it."""
        if seen is None or stands is None:
            self._wait(txid)
        elif self._is_over(seen) or stands.id in self._told:
            self.drop(txid)
        elif stands.visible:
            return stands
        elif seen.live and seen.number < self._awaited[txid].number:
            self._wait(txid)
        else:
            del self._awaited[txid]  # until a record more is announced, such as one that restores it
        return None

    def is_late(self, commit: Commit) -> bool:
        """Tell whether one that was saved later is known."""
        return self.newest is not None and commit.origin < self.newest

    def tell(self, txid: TxId, commit: Commit) -> Notice:
        """Never tell it again."""
        told = Notice(commit, self.is_late(commit))
        self.newest = max(self.newest or commit.origin, commit.origin)
        self._told.add(commit.id)
        self.drop(txid)
        return told

    def drop(self, txid: TxId) -> None:
        """Expect it no longer."""
        self._new.discard(txid)
        self._awaited.pop(txid, None)

    def _is_over(self, seen: Commit) -> bool:
        """A rewrite is as new as what it replaces."""
        return seen.last == "revoked" or (seen.replaces is not None and seen.replaces[0] not in self._new)

    def _wait(self, txid: TxId) -> None:
        one = self._awaited[txid]
        one.due, one.pause = self.polls + one.pause, min(2 * one.pause, _MOST)


class Watcher:
    """Reads the announcements of a run, and the logs of what is new; what goes wrong may be tried again at any time.

    ``after``: None for what is committed from now on, `START`, or a checkpoint, as it is or by a reference; it may be
    purged. ``latest_only``: only what was saved last by then. Raises `InvalidInput`, `NotFound` for a reference to
    nothing, `StorageError`. There need not be a store yet.
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
            return  # whatever comes is new
        if behind is not None:
            self._expected.begin_behind(behind)
        if after is None or latest_only:
            self._begin_at_head(tell=after is not None)
        elif behind is not None:
            self._begin_behind(behind)

    def _begin_at_head(self, *, tell: bool) -> None:
        """``tell``: the newest that is there, too, if it is new."""
        self._next = self._head + 1
        self._note_open()
        last = newest(self._repo, self._run, is_visible, skip_doubtful=True)
        if last is None:
            return
        if not tell:
            self._expected.begin_behind(last)
            return
        for txid in (last.txid, *([last.replaces[0]] if last.replaces else [])):
            self._expected.note(txid)

    def _begin_behind(self, commit: Commit) -> None:
        self._next = self._number_of(commit.origin if commit.replaces else commit.txid) + 1
        if not self._next:
            self._expected.begin_anew()
        self._note_open()

    def _note_open(self) -> None:
        """Expect the saves that are in progress: they may have been announced before."""
        names = (parse_log(entry.key) for entry in self._repo.storage.list("transactions/", known=parse_log))
        for txid in sorted({name[0] for name in names if name and parse_txid(name[0]).run_hash == self._hash}):
            if self._repo.storage.size(commit_key(txid)) is None:
                self._expected.note(txid)

    def _number_of(self, txid: TxId) -> int:
        """Return the number under which the first record of a log was announced, -1 for none."""
        low, count = self._head + 1, 1
        while low > 0:
            low, count = max(0, low - count), 2 * count
            known = read_back(self._repo, self._hash, low)
            found = [number for number in range(low, known.head + 1) if (txid, 0) in told_by(known, number)]
            if found:
                return found[0]
        return -1

    @property
    def _head(self) -> int:
        return -1 if self._known is None else self._known.head

    def next(self) -> Notice | None:
        """Return what is to be told next, None for nothing now. Raises `StorageError`, and what the marker raises."""
        if self._latest_only:
            self._poll()
            return self._tell_latest()
        found = self._tell_first()
        if found is None:
            self._poll()
            found = self._tell_first()
        return found

    def _poll(self) -> None:
        """One small request, and more only for what is new."""
        self._expected.polls += 1
        is_time = self._known is None or self._next <= self._head or self._expected.polls % _CHECK == 0
        if is_time or self._repo.storage.size(announcement_key(self._hash, self._head + 1)) is not None:
            self._read()

    def _read(self) -> None:
        try:
            known = look(self._repo, self._hash)
        except NotFound:
            return
        if self._known not in (None, known):  # another store is in its place, or an older copy of it
            self._next = 0
            self._expected.begin_anew()
        with known.lock.get():  # who adds an announcement raises the head before
            self._known = read_back(self._repo, self._hash, self._next)
            head = known.head
            announced = [one for number in range(self._next, head + 1) for one in told_by(known, number)]
        for one in announced:
            self._expected.note(*one)
        for txid in sorted(hidden_from(self._repo, self._hash, known, self._next)):
            if self._expected.newest is None or txid > self._expected.newest:
                self._expected.note(txid)
        self._next = head + 1

    def _tell_first(self) -> Notice | None:
        for txid in self._expected.due():
            commit = self._look(txid)
            if commit is not None:
                return self._expected.tell(txid, commit)
        return None

    def _tell_latest(self) -> Notice | None:
        best: tuple[TxId, Commit] | None = None
        for txid in self._expected.latest():
            if best is not None and best[1].origin >= txid:
                break
            commit = self._look(txid)
            if commit is not None and self._expected.is_late(commit):
                self._expected.drop(txid)  # a copy, which is older than its transaction
            elif commit is not None and (best is None or commit.order > best[1].order):
                best = txid, commit
        return None if best is None else self._expected.tell(*best)

    def _look(self, txid: TxId) -> Commit | None:
        try:
            seen = read_log(self._repo, txid)
            stands = seen if seen is None or seen.replaced is None else follow(self._repo, seen)
        except (Damaged, Refused) as error:
            log.warning("%s is left out: %s", txid, error)
            self._expected.drop(txid)
            return None
        return self._expected.judge(txid, seen, stands)


def watch(
    watcher: Watcher,
    *,
    poll: float,
    timeout: float | None,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Notice]:
    """Yield what is new, and ask again every ``poll`` seconds; end once nothing has come for ``timeout`` seconds.

    A storage that fails is asked again, less and less often. Raises `StorageError` where that is so at the end, and
    what the store's marker raises.
    """
    since, pause = now(), poll
    while True:
        failure: StorageError | None = None
        try:
            told = watcher.next()
        except StorageError as error:
            told, failure = None, error
            log.warning("the run is not watched for now; it is tried again: %s", error)
        if told is not None:
            yield told
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
        raise InvalidInput(f"{found} is not of run {run!r}; give one of its checkpoints")
    return found


def _resolved(repo: Repository, ref: str) -> Commit:
    """Return what a reference names, or named before that was forgotten or purged."""
    try:
        return resolve(repo, ref)
    except NotFound:
        ended = [one for one in list_commits(repo).commits.values() if one.last != "revoked"]
        named = [one for one in ended if ref == f"{one.run}@{one.step}" or one.id.startswith(ref.lower())]
        if not named:
            raise
        return max(named, key=lambda one: one.order)
