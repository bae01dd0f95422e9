"""Tags that expire, and leases: such tags under names of their own, renewed by their holder as long as it lives.

Who holds one has put it first, then read the log of the checkpoint, and found it visible. A gc reads `forgotten`, then
its clock, then lists tags, then takes the very next number of the log. So one of the two sees the other, and no clock
decides but about the end. If that comes too early, a reader gets a NotFound, and nothing else happens.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Self

from casckpt.base.durations import time_of
from casckpt.errors import CasckptError, Conflict, InvalidInput, NotFound
from casckpt.format.keys import check_tag
from casckpt.history.commits import Commit, list_commits, refresh
from casckpt.history.tags import Tag, end_generation, newest_generation, take_back, write_generation
from casckpt.repository.repository import Repository
from casckpt.repository.requirements import check_requirements
from casckpt.storage.forking import PerProcess

STOP_SECONDS = 30.0
_KEPT = 256  # names of each store
_GENERATIONS = 256  # of a name, before it is left: each lease lists them
_RENEWALS, _ATTEMPTS = 3, 30  # in the time of a lease: how often it is renewed, and tried again where that fails

log = logging.getLogger(__name__)
_ended = PerProcess[dict[str, deque[tuple[str, int]]]](dict)
"""Names of leases that this process has ended, and the generation with which, by the URL of the store.

Each name leaves a record there for ever.
"""


def hold(
    repo: Repository, name: str, commit: Commit, seconds: float, *, behind: int | None = None
) -> tuple[Tag, Commit]:
    """Let ``name`` name ``commit`` for so long from now; the tag, and the commit that is visible.

    Raises `NotFound` if the checkpoint is not visible once the tag is set; then that is what it was before.
    `InvalidInput`, `Conflict` if somebody else moved the tag at this instant, or since generation ``behind``,
    `StorageError`.
    """
    check_tag(name)
    if not seconds > 0:
        raise InvalidInput("a tag that has expired at once names nothing: give a longer time")
    check_requirements(repo)
    if not commit.visible and not (now := _visible(repo, commit)).visible:  # each tag leaves a record
        raise _not_visible(now)
    number, found = newest_generation(repo, name)
    if behind is not None and (number != behind or found.tags or found.damaged):
        raise Conflict(f"tag {name!r} was moved by somebody else", key=f"tags/{name}/{number}")
    tag = write_generation(repo, name, number + 1, commit, expires=_end(repo, seconds))
    return tag, _granted(repo, tag, commit, found.tags.get(name))


def renew(repo: Repository, tag: Tag, commit: Commit, seconds: float) -> tuple[Tag, Commit]:
    """Let the lease ``tag``, as it was last granted, go on for so long from now. One that was over is granted anew.

    Raises `Conflict` if somebody else has ended or moved it, and as `hold`.
    """
    number, found = newest_generation(repo, tag.name)
    now = found.tags.get(tag.name)
    if now is None or now.unique != tag.unique:
        raise Conflict(f"{tag.name!r} was ended or moved by somebody else; take another lease")
    end = _end(repo, seconds)
    made = write_generation(repo, tag.name, number + 1, commit, expires=end, unique=tag.unique)
    if tag.expires is not None and repo.clock() <= tag.expires:  # it counted until this one was there
        return made, commit
    return made, _granted(repo, made, commit, None)


def _end(repo: Repository, seconds: float) -> int:
    return repo.clock() + round(seconds * 1e6)


def _granted(repo: Repository, tag: Tag, commit: Commit, before: Tag | None) -> Commit:
    """Return what is visible of the checkpoint, now that the tag is there. Raises `NotFound` if nothing is."""
    found = _visible(repo, commit)
    if not found.visible:
        take_back(repo, tag, before)
        raise _not_visible(found)
    return found


def _visible(repo: Repository, commit: Commit) -> Commit:
    """Return this commit as it is now, or another one of its checkpoint, if that is visible, and it is not."""
    now = refresh(repo, commit)
    other = None if now.visible else list_commits(repo).of_id(commit.id)
    return other if other is not None and other.visible else now


def _not_visible(now: Commit) -> NotFound:
    more = f"; `casckpt restore STORE {now.id[:16]}` makes it visible again" if now.live else ""
    return NotFound(f"{now} was {now.last}, and only what is visible can be held{more}", checkpoints=(now.id,))


def _held(repo: Repository, commit: Commit, seconds: float) -> tuple[Tag, Commit]:
    """Hold by a name that this process has ended, if nobody has used that since; else by a new one."""
    with suppress(KeyError, IndexError, Conflict):
        name, end = _ended.get()[repo.storage.url].pop()
        return hold(repo, name, commit, seconds, behind=end)
    return hold(repo, f"lease-{repo.entropy(8).hex()}", commit, seconds)


class Lease:
    """Holds a checkpoint: whatever is forgotten meanwhile, its bytes stay, until the block ends or this process dies.

    ``seconds``: for which it holds by itself. A thread renews it three times as often, and writes to the log what goes
    wrong. A forked child neither renews nor ends it.
    """

    def __init__(self, repo: Repository, commit: Commit, seconds: float) -> None:
        self._repo = repo
        self._seconds = seconds
        self._pid = os.getpid()
        self._over = threading.Event()
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
            log.warning("%s was not ended, and ends by itself at %s: %s", self._what, self._until, failure)

    def _run(self) -> None:
        pause = self._seconds / _RENEWALS
        while not self._over.wait(pause):
            pause = self._seconds / (_RENEWALS if self.renew() else _ATTEMPTS)

    def renew(self) -> bool:
        """Let it go on from now; False, and a word in the log, if that failed: for good, or it may be tried again."""
        try:
            self._tag, self.commit = renew(self._repo, self._tag, self.commit, self._seconds)
        except (Conflict, NotFound) as error:
            log.error("%s is lost, and the checkpoint may be purged: %s", self._what, error)
            self._over.set()
            return False
        except CasckptError as error:
            log.warning("%s, which ends at %s, was not renewed; it is tried again: %s", self._what, self._until, error)
            return False
        return True

    @property
    def _what(self) -> str:
        return f"lease {self._tag.name} on {self.commit}"

    @property
    def _until(self) -> str:
        return f"{time_of(self._tag.expires or 0):%Y-%m-%d %H:%M:%S} UTC"
