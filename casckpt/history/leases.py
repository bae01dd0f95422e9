"""Tags that expire, and leases. A lease is an expiring tag with a unique name that its holder renews.

A holder first puts the tag, then reads the checkpoint's log and finds the checkpoint visible. A gc reads `forgotten`,
then its clock, then lists the tags, and then takes the next log number. Therefore, at least one of them sees the
other's record. Clocks only determine when a tag expires. If a tag expires too early, a reader raises NotFound, and
nothing else happens.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Self

from casckpt.base.units import time_of
from casckpt.errors import CasckptError, Conflict, InvalidInput, NotFound
from casckpt.format.keys import check_tag
from casckpt.history.commits import Commit, CommitList, list_commits, record_tag, refresh
from casckpt.history.tags import Tag, end_generation, newest_generation, take_back, write_generation
from casckpt.repository.reading import check_requirements
from casckpt.repository.repository import Clock, Repository
from casckpt.storage.forking import PerProcess

STOP_SECONDS = 30.0
_KEPT = 256  # the number of names that are kept for each store
_GENERATIONS = 256  # the maximum per name; after that, leases use a new name, because each lists all generations
_RENEWALS, _ATTEMPTS = 3, 30  # per lease duration: the renewals, and the attempts after a failure

log = logging.getLogger(__name__)
_ended = PerProcess[dict[str, deque[tuple[str, int]]]](dict)
"""The names of leases that this process has ended, with their last generation, by store URL.

Leases reuse these names, because each name permanently leaves a record in the store.
"""


def hold(
    repo: Repository, name: str, commit: Commit, seconds: float, *, behind: int | None = None,
    listed: CommitList | None = None,
) -> tuple[Tag, Commit]:  # fmt: skip
    """Set tag ``name`` on ``commit`` for ``seconds``. Return the tag, and the checkpoint's visible commit.

    Raises `NotFound` if the checkpoint is not visible after the tag is set. In this case, the tag's previous state is
    restored. Raises `Conflict` if another process moved the tag at this moment, or since generation ``behind``. Raises
    `InvalidInput` and `StorageError`. ``listed``: as in `list_tags`, for names that a permanent tag may have had.
    """
    check_tag(name)
    if not seconds > 0:
        raise InvalidInput("a tag cannot expire immediately: pass a time above 0")
    check_requirements(repo)
    if not commit.visible and not (now := _visible(repo, commit)).visible:  # each tag leaves a record
        raise _not_visible(now)
    number, found = newest_generation(repo, name, listed)
    if behind is not None and (number != behind or found.tags or found.damaged):
        raise Conflict(f"tag {name!r} was moved by another process", key=f"tags/{name}/{number}")
    tag = write_generation(repo, name, number + 1, commit, expires=_end(repo.clock, seconds))
    while True:
        now = _granted(repo, tag, commit, found.tags.get(name))
        if name.startswith("lease-"):
            return tag, now
        with suppress(Conflict):  # another process has just changed the checkpoint
            return tag, record_tag(repo, now, name, tag.generation)


def renew(repo: Repository, tag: Tag, commit: Commit, seconds: float, clock: Clock | None = None) -> tuple[Tag, Commit]:
    """Renew a lease for ``seconds``. ``tag``: the lease as it was last granted. ``clock``: instead of the repository's.

    A lease that has expired is granted again.

    Raises `Conflict` if another process has ended or moved the lease, and the errors of `hold`.
    """
    number, found = newest_generation(repo, tag.name)
    now = found.tags.get(tag.name)
    if now is None or now.unique != tag.unique:
        raise Conflict(f"another process ended or moved {tag.name!r}: create a new lease")
    clock = clock or repo.clock
    end = _end(clock, seconds)
    made = write_generation(repo, tag.name, number + 1, commit, expires=end, unique=tag.unique)
    if tag.expires is not None and clock() <= tag.expires:  # the old tag was still valid when the new one was set
        return made, commit
    return made, _granted(repo, made, commit, None)


def _end(clock: Clock, seconds: float) -> int:
    return clock() + round(seconds * 1e6)


def _never_set_back(clock: Clock) -> Clock:
    """Return a clock for one lease, which does not end early if this host's time is set back meanwhile."""
    begun, since = clock(), time.monotonic()
    return lambda: max(clock(), begun + round(1e6 * (time.monotonic() - since)))


def _granted(repo: Repository, tag: Tag, commit: Commit, before: Tag | None) -> Commit:
    """Return the checkpoint's visible commit, now that the tag is set. Raises `NotFound` if there is none."""
    now = _visible(repo, commit)
    if not now.visible:
        take_back(repo, tag, before)
        raise _not_visible(now)
    return now


def _visible(repo: Repository, commit: Commit) -> Commit:
    """Return the current state of this commit, or a different commit of its checkpoint if only that one is visible."""
    now = refresh(repo, commit)
    other = None if now.visible else list_commits(repo).of_id(commit.id)
    return other if other is not None and other.visible else now


def _not_visible(now: Commit) -> NotFound:
    more = f"; `casckpt restore STORE {now.id[:16]}` makes it visible again" if now.live else ""
    return NotFound(f"{now} was {now.last}, and only a visible checkpoint can be leased{more}", checkpoints=(now.id,))


def _held(repo: Repository, commit: Commit, seconds: float) -> tuple[Tag, Commit]:
    """Hold a checkpoint.

    Reuse a name whose lease this process has ended, if no other process has used the name since then.
    """
    with suppress(KeyError, IndexError, Conflict):
        name, end = _ended.get()[repo.storage.url].pop()
        return hold(repo, name, commit, seconds, behind=end)
    return hold(repo, f"lease-{repo.entropy(8).hex()}", commit, seconds)


class Lease:
    """Holds a checkpoint until the ``with`` block ends. Until then, gc keeps its bytes, even if it is forgotten.

    ``seconds``: the time after which the lease expires if it is not renewed, for example because this process has died.
    A thread renews it three times in this period, and logs errors. A forked child neither renews nor ends it.
    """

    def __init__(self, repo: Repository, commit: Commit, seconds: float) -> None:
        self._repo = repo
        self._seconds = seconds
        self._pid = os.getpid()
        self._over = threading.Event()
        self._clock = _never_set_back(repo.clock)
        self._tag, self.commit = _held(repo, commit, seconds)
        self._thread = threading.Thread(target=self._run, name=f"casckpt-{self._tag.name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if os.getpid() != self._pid:
            return
        was_lost = self._over.is_set()
        self._over.set()
        self._thread.join(STOP_SECONDS)
        if was_lost:
            return
        try:
            number, found = newest_generation(self._repo, self._tag.name)
            if found.tags.keys() == {self._tag.name} and found.tags[self._tag.name].unique == self._tag.unique:
                end_generation(self._repo, self._tag.name, number + 1)
                if number + 1 < _GENERATIONS and not self._thread.is_alive():
                    ended = _ended.get().setdefault(self._repo.storage.url, deque(maxlen=_KEPT))
                    ended.append((self._tag.name, number + 1))
        except CasckptError as failure:
            log.warning("casckpt could not end %s; it expires at %s: %s", self._what, self._until, failure)

    def _run(self) -> None:
        pause = self._seconds / _RENEWALS
        while not self._over.wait(pause):
            pause = self._seconds / (_RENEWALS if self.renew() else _ATTEMPTS)

    def renew(self) -> bool:
        """Renew the lease. If this fails, log the error and return False."""
        try:
            self._tag, self.commit = renew(self._repo, self._tag, self.commit, self._seconds, self._clock)
        except (Conflict, NotFound) as error:
            log.error("%s was lost, so the checkpoint may be purged: %s", self._what, error)
            self._over.set()
            return False
        except CasckptError as error:
            log.warning(
                "casckpt could not renew %s and will retry; it expires at %s: %s",
                self._what,
                self._until,
                error,
            )
            return False
        return True

    @property
    def _what(self) -> str:
        return f"lease {self._tag.name} on {self.commit}"

    @property
    def _until(self) -> str:
        return f"{time_of(self._tag.expires or 0):%Y-%m-%d %H:%M:%S} UTC"
