"""The saves of one process into one store. At most one save runs in the background at any time."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import torch

from casckpt.base.cycle_collector import collector_paused
from casckpt.base.exit_status import ReportedFuture, unreported
from casckpt.base.parallel import usable_threads
from casckpt.base.text import is_news
from casckpt.base.units import format_size
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, Conflict, StorageError
from casckpt.format.sections.tables import bytes_of
from casckpt.ranks.ranks import Ranks, everyone, exchange_keeping, open_ranks
from casckpt.repository.processes import saving_here
from casckpt.repository.repository import Repository
from casckpt.saving.leader import GroupMemory
from casckpt.saving.options import SaveOptions
from casckpt.saving.prepare import Prepared, bytes_shared, prepare, snapshot, tensors_of
from casckpt.saving.replicas import memory_of
from casckpt.saving.save import compare, save
from casckpt.saving.staging_budget import Copy, shortages
from casckpt.storage.local.reader import headroom
from casckpt.tensors.staging import Staging

log = logging.getLogger(__name__)

_THREAD = "casckpt-async"
_LASTING = frozenset((errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG))
"""Operating system errors that recur until somebody changes the path, the permissions or the mount."""


class SaveFuture(ReportedFuture[Checkpoint]):
    """The future of a save in the background.

    It cannot be cancelled, because the other ranks would keep waiting for this rank. ``bytes_copied``: the size of this
    rank's copy of the state.
    """

    bytes_copied = 0


class Background:
    """The thread that runs a save, and the memory for one copy of a state."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._last: SaveFuture | None = None
        self._lock, self._is_beginning = threading.RLock(), False

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Wait until no save is running, and let no other call begin one. Raises Conflict in a signal handler."""
        with self._lock:
            if self._is_beginning:  # this thread holds the lock, and would wait for itself
                raise Conflict(
                    "save_async was interrupted, and called again by a signal handler: only set a flag in the handler"
                )
            self._is_beginning = True
            try:
                self.wait()
                yield
            finally:
                self._is_beginning = False

    def wait(self) -> None:
        """Wait until no save is running."""
        if self._last is not None:
            wait([self._last])

    def unreported(self) -> BaseException | None:
        """Return the last save's error, but only once, and only if no caller has queried its future."""
        last = self._last
        return None if last is None or last.awaited or last.name not in unreported else last.exception()

    def submit(self, call: Callable[[], Checkpoint], name: tuple[str, str, int], *, here: bool = False) -> SaveFuture:
        """Run ``call`` in a new thread. Make this call within `beginning`.

        ``name``: its key in `saving_here`, from before the thread starts, because Ctrl-C may end this call at any time.
        ``here``: run it in the caller's thread, as if no thread can start. Ctrl-C then interrupts it.
        """
        future, begun = SaveFuture(), threading.Lock()

        def run() -> None:
            if begun.acquire(blocking=False):
                future.take(call)

        try:
            saving_here[name] = self._last = future
            future.add_done_callback(lambda _: saving_here.pop(name, None))
            with suppress(RuntimeError):
                if not here:
                    threading.Thread(target=run, name=_THREAD).start()
                    return future
            future.take(call, Exception)
        except BaseException as error:
            if not future.done() and begun.acquire(blocking=False):  # no thread has begun the save, and none will
                future.set_exception(error)
                future.exception()  # this thread reports it
            raise
        return future


def _end_saves() -> None:
    """Wait for all running saves."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join()


# `atexit` runs too late: Python has already stopped all thread pools by then, and bucket clients need them. Python
# calls the functions that are registered here in reverse order.
with suppress(AttributeError, RuntimeError):  # the function is private, and the interpreter may be exiting already
    threading._register_atexit(_end_saves)  # type: ignore[attr-defined] # see above


State: TypeAlias = Mapping[Any, Any] | Callable[[], Mapping[Any, Any]]
"""The state to save, or a function that returns it. If the function raises, every rank raises."""
WithoutObjects: TypeAlias = Callable[[Ranks, State, SaveOptions], tuple[State, SaveOptions]]
"""See `casckpt.store.objects.without_objects`, which is in a higher layer."""


class Saver:
    """The implementation of `casckpt.Store.save` and `casckpt.Store.save_async`. Thread-safe."""

    def __init__(self, repo: Repository, without_objects: WithoutObjects) -> None:
        self.background = Background()
        self._repo, self._without_objects = repo, without_objects
        self._memories: dict[str, GroupMemory] = {}

    def save(self, state: State, options: SaveOptions) -> Checkpoint:
        """Save the state. Return when the checkpoint is durable and visible."""
        ranks = open_ranks(options.process_group, no_dist=options.no_dist)
        state, options = self._without_objects(ranks, state, options)
        try:
            checked = options.checked()
        except CasckptError as error:
            ranks.fail(error)
        memory = self._memory(ranks)
        return Checkpoint(self._repo, save(self._repo, ranks, memory, lambda: _prepare(state, checked, ranks), checked))

    def save_async(self, state: State, options: SaveOptions) -> Future[Checkpoint]:
        """Check the arguments on all ranks, copy the state, and save the copy in the background.

        If a copy does not fit on any rank, all ranks save the state itself before the call returns.
        """
        with self.background.beginning():
            ranks = open_ranks(options.process_group, no_dist=options.no_dist, purpose="async")
            begun, staging = time.monotonic(), self.background.staging
            checked, prepared, fits = self._checked(state, ranks, options, copies=True)
            if not fits:
                staging.release()
            copied = self._copy(prepared, ranks, checked.threads) if fits else lambda: prepared
            memory = self._memory(ranks)
            future = self.background.submit(
                lambda: Checkpoint(self._repo, save(self._repo, ranks, memory, copied, checked)),
                (self._repo.storage.url, checked.run, checked.step), here=not fits,
            )  # fmt: skip
            future.bytes_copied = staging.used if fits else 0
            if not fits and ranks.rank == 0:
                seconds = time.monotonic() - begun
                log.info("the save of %s@%d ran in the foreground for %.1f s", checked.run, checked.step, seconds)
            return future

    def check(self, state: State, options: SaveOptions) -> int:
        """Do everything that a save does before its first write. Every rank must make this call.

        Return, on rank 0, the size of the state in bytes. Tensors that share memory there count once.
        """
        ranks = open_ranks(options.process_group, no_dist=options.no_dist)
        checked, prepared, _ = self._checked(state, ranks, options)
        streams = prepared.streams
        if ranks.size > 1:
            memory = GroupMemory(memory_of(self._repo.storage.url, ranks.group))
            streams = compare(self._repo, ranks, memory, prepared, checked)
        return max(0, bytes_of(streams) - bytes_shared(prepared))

    def warm_up(self, state: State, options: SaveOptions) -> None:
        """Allocate memory for a copy of the state, and connect the ranks."""
        ranks = open_ranks(options.process_group, no_dist=options.no_dist, purpose="async")
        with self.background.beginning():
            state, options = self._without_objects(ranks, state, options)

            def check() -> tuple[Sequence[torch.Tensor], Copy]:
                tensors = tensors_of(_prepare(state, options, ranks))
                return tensors, self._copy_size(tensors, ranks)

            def compare_sizes(_: object, copies: Sequence[Copy]) -> Sequence[bool]:
                return everyone(not any(shortages(copies)), ranks.size)

            tensors, fits = exchange_keeping(ranks, check, compare_sizes)
            if fits:
                self.background.staging.reserve(tensors)

    def _checked(
        self, state: State, ranks: Ranks, options: SaveOptions, *, copies: bool = False
    ) -> tuple[SaveOptions, Prepared, bool]:
        """Check the arguments, every leaf and the store's path. If a check fails on one rank, all raise the error.

        If the previous save failed and no caller has queried its future, raise its error. ``copies``: create the store
        if it does not exist. Return also whether the copies of all ranks fit.
        """
        state, options = self._without_objects(ranks, state, options)

        def check() -> tuple[tuple[SaveOptions, Prepared], Copy]:
            if failed := self.background.unreported():
                raise failed
            checked = options.checked()
            prepared = _prepare(state, checked, ranks)
            if ranks.rank == 0:
                self._check_path(create=copies)
            return (checked, prepared), self._copy_size(tensors_of(prepared) if copies else (), ranks)

        def compare_sizes(_: object, found: Sequence[Copy]) -> Sequence[bool]:
            lacking = list(shortages(found))
            if lacking and is_news("foreground", self._repo.storage.url):
                total, most, rank = max(lacking)
                log.warning(
                    "the save of %s@%d runs in the foreground, because the copies on the host of rank %d would take "
                    "%s, and may take %s: free memory there, or open the store with staging_bytes=%d or more. This is "
                    "logged once", options.run, options.step, rank, format_size(total), format_size(most), total,
                )  # fmt: skip
            return everyone(not lacking, ranks.size)

        (checked, prepared), fits = exchange_keeping(ranks, check, compare_sizes)
        return checked, prepared, fits

    def _copy_size(self, tensors: Sequence[torch.Tensor], ranks: Ranks) -> Copy:
        """Return the memory for a copy of ``tensors``."""
        staging, host = self.background.staging, self._repo.host if ranks.size > 1 else ""
        if need := staging.lacks(tensors):
            return Copy(host, need, staging.nbytes, self._repo.staging_bytes, headroom())
        return Copy(host, staging.nbytes, staging.nbytes)

    def _check_path(self, *, create: bool) -> None:
        """Raise the error if the store cannot be at its path. Skip errors that may be temporary: a save raises them."""
        try:
            if not self._repo.is_there():
                if create:
                    self._repo.create()
                else:
                    next(self._repo.storage.list("commits/"), None)  # raises NotFound if there is no bucket
        except StorageError as error:
            if getattr(error.__cause__, "errno", None) in _LASTING:
                raise

    def _copy(self, prepared: Prepared, ranks: Ranks, threads: int | None) -> Callable[[], Prepared]:
        """Copy all data. Return a function that returns the copy.

        If copying fails on one of several ranks, the function raises the error, inside an exchange.
        """
        copied = Future[Prepared]()
        try:
            copied.set_result(snapshot(prepared, self.background.staging, usable_threads(threads)))
        except Exception as error:
            if ranks.size == 1 and not isinstance(error, CasckptError):  # it may come from a signal handler
                raise
            copied.set_exception(error)
        return copied.result

    def _memory(self, ranks: Ranks) -> GroupMemory:
        return self._memories.setdefault(ranks.name, GroupMemory(memory_of(self._repo.storage.url, ranks.group)))


def _prepare(state: Any, options: SaveOptions, ranks: Ranks) -> Prepared:
    """See `casckpt.saving.prepare.prepare`."""
    with collector_paused():
        return prepare(
            state, options.attachments, rank=ranks.rank, size=ranks.size, allow_pickle=options.allow_pickle,
            frozen=options.frozen, owners=options.owners,
        )  # fmt: skip
