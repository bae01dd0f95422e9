"""The mirror of a store: a thread that copies each commit into another store in the background.

The two stores show the remaining work: the live commits that are not safe in the mirror
(`casckpt.upkeep.copies.mirrored`). Therefore, a program may end or die at any time, and the next process that opens the
store with its mirror continues the work. On each host, only one process copies at a time. Several hosts share the work.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from casckpt.errors import CasckptError, Conflict, Damaged, Gone, Refused, StorageError
from casckpt.history.commits import Commit, CommitList, forget, list_commits
from casckpt.repository.processes import alone_on_this_host
from casckpt.repository.repository import Repository
from casckpt.storage.forking import PerProcess
from casckpt.upkeep.copies.mirrored import MirrorLag, lag_of, unsafe_in
from casckpt.upkeep.copies.replication import Work, copy_signatures, replicate
from casckpt.upkeep.thin import thin_alike

JOBS = 4
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0  # seconds until the next attempt after a failed pass

log = logging.getLogger(__name__)


@dataclass
class _State:
    """The state of a mirror in one process.

    ``asked``: number of the latest requested pass. ``done``: number of the last finished pass. ``pause``: seconds until
    the next attempt, if the last one failed.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    thread: threading.Thread | None = None
    asked: int = 0
    done: int = 0
    error: CasckptError | None = None
    pause: float = FIRST_PAUSE
    stopped: bool = False


class Mirror:
    """Copies all commits of ``repo`` into ``target``. Thread-safe; works in forked children."""

    def __init__(self, repo: Repository, target: Repository) -> None:
        self.target = target
        self._repo = repo
        self._state = PerProcess(_State)
        repo.listeners.append(self.wake)

    def wake(self) -> None:
        """Start copying new commits in the background."""
        state = self._state.get()
        with state.changed:
            state.asked += 1
            if state.thread is None and not state.stopped:
                state.thread = threading.Thread(target=self._run, args=(state,), name="casckpt-mirror", daemon=True)
                state.thread.start()
            state.changed.notify_all()

    def lag(self) -> MirrorLag:
        """Return the mirror's lag, from listings of both stores. Raises `StorageError` if the store itself fails."""
        error = self._state.get().error
        if not self._repo.exists():
            return MirrorLag(0, 0, 0.0)
        return lag_of(self._repo, "" if error is None else str(error))

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all current commits are safe in the mirror.

        Makes one more attempt. If it fails, raises the error that prevents the copy. Raises `StorageError` after
        ``timeout`` seconds.
        """
        self.wake()
        state = self._state.get()
        with state.changed:
            wanted = state.asked
            if not state.changed.wait_for(lambda: state.done >= wanted or state.stopped, timeout):
                raise StorageError(
                    f"{self.target.storage.url} is not up to date after {timeout} seconds. Copying continues in the "
                    "background. If this program ends first, the next `casckpt.open` of the store continues the "
                    "copies"
                )
            if state.error is not None:
                raise type(state.error)(str(state.error), **state.error.__dict__) from state.error

    def stop(self) -> None:
        """End the thread after its current checkpoint. The next process that opens the store continues the work."""
        state = self._state.get()
        with state.changed:
            state.stopped = True
            state.changed.notify_all()

    def _run(self, state: _State) -> None:
        ended: CasckptError = StorageError("the mirror thread failed; its traceback is on stderr")
        try:
            while self._pass(state):
                pass
        finally:  # release callers that wait for the ended thread; the next `wake` starts another thread
            with state.changed:
                state.thread, state.done, state.error = None, state.asked, state.error or ended
                state.changed.notify_all()

    def _pass(self, state: _State) -> bool:
        """Wait for `wake` or the time of the next attempt, then catch up. Return False if the thread must end."""
        with state.changed:
            retry = state.pause if isinstance(state.error, StorageError) else None
            state.changed.wait_for(lambda: state.stopped or state.asked > state.done, retry)
            if state.stopped:
                return False
            asked = state.asked
        error = self._attempt(state)
        with state.changed:
            state.done, state.error = asked, error
            state.pause = min(2 * state.pause, LONGEST_PAUSE) if error else FIRST_PAUSE
            state.changed.notify_all()
        return True

    def _attempt(self, state: _State) -> CasckptError | None:
        """Make one pass, and return its error, or None if there is none."""
        try:
            if not self._repo.exists():
                return None
            with alone_on_this_host(self._repo.catalogue.path.with_name("mirror.lock")):
                return self._catch_up(state)
        except CasckptError as error:
            log.warning("%s is behind; the mirror will retry the copy: %s", self.target.storage.url, error)
            return error

    def _catch_up(self, state: _State) -> CasckptError | None:
        """Copy all commits that are not yet safe, oldest first. If some are not copied, return the last error.

        Raises `StorageError`.
        """
        self._repo.declare_mirror()
        listed, thinned = list_commits(self._repo), bool(self._repo.settings.mirror_thinned)
        needed, there = listed.live(), list_commits(self.target) if self.target.exists() else CommitList({}, {})
        behind = unsafe_in(self.target, needed, thinned=thinned, listed=there)
        if behind:
            sizes = self._repo.marker
            self.target.create(cell_bytes=sizes.cell_bytes, blob_bytes=sizes.blob_bytes)
            copy_signatures(self._repo, self.target, {commit.id for commit in needed})
        failed: CasckptError | None = None
        for commit in behind:
            if state.stopped:
                break
            try:
                self._copy(commit)
            except (Conflict, Gone) as error:  # purged meanwhile, or revoked by a gc of the mirror
                log.info("%s", error)
            except (Damaged, Refused) as error:
                log.error("%s is not mirrored: %s", commit, error)
                failed = error
        thin = [commit for commit in listed.visible() if commit.dropped is not None] if thinned else []
        if thin:
            thin_alike(self.target, thin)
        return failed

    def _copy(self, commit: Commit) -> None:
        """Copy a commit, and forget the copy if the commit is forgotten. Then, the mirror's own retention applies."""
        copy = replicate(self._repo, self.target, commit, Work(jobs=JOBS, for_mirror=True))
        if commit.last == "forgotten":
            forget(self.target, copy)
