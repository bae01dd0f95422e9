"""The saves of one process into one store: one after the other, in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, NoReturn, TypeAlias, get_args

from casckpt.base.cycle_collector import collector_paused
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, Conflict, InvalidInput
from casckpt.ranks.ranks import Ranks, everyone, on_each, open_ranks
from casckpt.repository.repository import Repository
from casckpt.saving.exit_status import unheard
from casckpt.saving.leader import GroupMemory
from casckpt.saving.options import SaveOptions, WhenBusy
from casckpt.saving.prepare import Prepared, prepare, snapshot, tensors_of
from casckpt.saving.replicas import memory_of
from casckpt.saving.save import compare, save
from casckpt.tensors.staging import Staging


class SaveFuture(Future[Checkpoint]):
    """The checkpoint to be. It cannot be cancelled: other ranks would wait for this one."""

    def __init__(self) -> None:
        super().__init__()
        self.name = object()
        self.awaited = False  # whoever waits hears of a failure, though perhaps not yet
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """The checkpoint, once it is durable and visible. Raises what the save raised."""
        self.awaited = True
        try:
            return super().result(timeout)
        finally:
            self._heard()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the save raised, if it did."""
        self.awaited = True
        try:
            return super().exception(timeout)
        finally:
            self._heard()

    def _heard(self) -> None:
        if self.done():
            unheard.pop(self.name, None)
        self.awaited = False


class Background:
    """One thread at a time, and the memory for one copy of a state, for one process. ``lock``: held to begin a save."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.staging = Staging()
        self._last: SaveFuture | None = None

    @property
    def busy(self) -> bool:
        """Whether a save runs."""
        return self._last is not None and not self._last.done()

    def wait(self) -> None:
        """Until no save runs."""
        if self._last is not None:
            wait([self._last])

    def unheard(self) -> BaseException | None:
        """The error of the save that was waited for, if nobody has asked its future; once."""
        last = self._last
        return None if last is None or last.awaited or last.name not in unheard else last.exception()

    def submit(self, call: Callable[[], Checkpoint]) -> SaveFuture:
        """Run ``call``; after `wait`. Where no thread is to be had, the caller runs it."""
        future = self._last = SaveFuture()

        def run() -> None:
            try:
                found = call()
            except BaseException as error:  # noqa: BLE001 - the future raises it
                unheard[future.name] = str(error)
                future.set_exception(error)
            else:
                future.set_result(found)

        try:
            _Saving(target=run, name="casckpt-async").start()
        except RuntimeError:
            run()
        return future


class _Saving(threading.Thread):
    """A save in the background; a program that ends waits for it."""


def _end_saves() -> None:
    """The program ends: let what still runs end before."""
    for thread in threading.enumerate():
        if isinstance(thread, _Saving):
            thread.join()


# Not by `atexit`, which comes when Python has waited for the threads itself; and before it does that, it forbids all
# pools of threads to work on, without which the clients of buckets cannot. Of these functions the last one goes first.
with suppress(AttributeError, RuntimeError):  # nobody promised that there is this one; or the program is ending already
    threading._register_atexit(_end_saves)  # type: ignore[attr-defined] # see above


State: TypeAlias = Mapping[Any, Any] | Callable[[], Mapping[Any, Any]]
"""What is to be saved, or what makes it: then what goes wrong in the making reaches all ranks."""
WithoutObjects: TypeAlias = Callable[[Ranks, State, SaveOptions], tuple[State, SaveOptions]]
"""See `casckpt.store.objects.without_objects`, which lies above."""


class Saver:
    """What `casckpt.Store.save` and `casckpt.Store.save_async` run on. Thread-safe."""

    def __init__(self, repo: Repository, without_objects: WithoutObjects) -> None:
        self.background = Background()
        self._repo, self._without_objects = repo, without_objects
        self._memories: dict[str, GroupMemory] = {}

    def save(self, state: State, options: SaveOptions) -> Checkpoint:
        """Save, and return once it is durable and visible."""
        ranks = open_ranks(options.process_group, no_dist=options.no_dist)
        state, options = self._without_objects(ranks, state, options)
        try:
            checked = options.checked()
        except CasckptError as error:
            ranks.fail(error)
        memory = self._memory(ranks)
        return Checkpoint(self._repo, save(self._repo, ranks, memory, lambda: _prepare(state, checked, ranks), checked))

    def save_async(self, state: State, options: SaveOptions, when_busy: WhenBusy) -> Future[Checkpoint]:
        """Check all that is given, on all ranks; copy the state, and save the copy in the background."""
        if when_busy == "refuse":
            self._refuse_busy(options)
        with self.background.lock:
            self.background.wait()
            ranks = open_ranks(options.process_group, no_dist=options.no_dist, purpose="async")
            checked, prepared = self._looked_at(state, ranks, options, when_busy)
            copied = self._copied(prepared)
            memory = self._memory(ranks)
            return self.background.submit(
                lambda: Checkpoint(self._repo, save(self._repo, ranks, memory, copied, checked))
            )

    def check(self, state: State, options: SaveOptions) -> None:
        """Do what a save does before it writes anything; on every rank."""
        ranks = open_ranks(options.process_group, no_dist=options.no_dist)
        checked, prepared = self._looked_at(state, ranks, options, "wait")
        if ranks.size > 1:
            memory = GroupMemory(memory_of(self._repo.storage.url, ranks.group))
            compare(self._repo, ranks, memory, prepared, checked)

    def _refuse_busy(self, options: SaveOptions) -> None:
        def decide(busy: Sequence[bool]) -> Sequence[None]:
            if any(busy):
                raise Conflict("a save still runs in the background; wait for its future, or skip this one")
            return everyone(None, len(busy))

        ranks = open_ranks(options.process_group, no_dist=options.no_dist, purpose="busy")
        ranks.exchange(lambda: self.background.busy, decide)

    def warm_up(self, state: State, options: SaveOptions) -> None:
        """Make the memory for the copy of such a state, and the connections between ranks."""
        ranks = open_ranks(options.process_group, no_dist=options.no_dist, purpose="async")
        with self.background.lock:
            self.background.wait()
            state, options = self._without_objects(ranks, state, options)
            prepared = on_each(ranks, lambda: _prepare(state, options, ranks))
            self.background.staging.reserve(tensors_of(prepared))

    def _looked_at(
        self, state: State, ranks: Ranks, options: SaveOptions, when_busy: WhenBusy
    ) -> tuple[SaveOptions, Prepared]:
        """The arguments and every leaf, checked, before anything is copied. What one rank raises here, all raise.

        So does what the save before failed with, if nobody asked its future.
        """
        state, options = self._without_objects(ranks, state, options)

        def look() -> tuple[SaveOptions, Prepared]:
            if when_busy not in get_args(WhenBusy):
                raise InvalidInput(f"when_busy={when_busy!r} is not known; give 'wait' or 'refuse'")
            if failed := self.background.unheard():
                raise failed
            checked = options.checked()
            return checked, _prepare(state, checked, ranks)

        return on_each(ranks, look)

    def _copied(self, prepared: Prepared) -> Callable[[], Prepared]:
        """What gives copies of all data, made now, or raises what went wrong, where all ranks learn of it."""
        try:
            copied = snapshot(prepared, self.background.staging)
        except CasckptError as error:
            return _failing(error)
        return lambda: copied

    def _memory(self, ranks: Ranks) -> GroupMemory:
        return self._memories.setdefault(ranks.name, GroupMemory(memory_of(self._repo.storage.url, ranks.group)))


def _prepare(state: Any, options: SaveOptions, ranks: Ranks) -> Prepared:
    """Look at every leaf; see `casckpt.saving.prepare.prepare`."""
    with collector_paused():
        return prepare(
            state, options.attachments, rank=ranks.rank, size=ranks.size, allow_pickle=options.allow_pickle,
            frozen=options.frozen, owners=options.owners,
        )  # fmt: skip


def _failing(error: BaseException) -> Callable[[], Prepared]:
    """What raises ``error`` in place of preparing."""

    def fail() -> NoReturn:
        raise error

    return fail
