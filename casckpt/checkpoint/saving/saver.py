"""The saves of one store by one process: one after the other in the background, and what each leaves for the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeAlias, get_args

from casckpt.checkpoint.cycle_collector import collecting_later
from casckpt.checkpoint.handle import Checkpoint
from casckpt.checkpoint.ranks import Ranks, everyone, on_each, open_ranks
from casckpt.checkpoint.saving.background import Background
from casckpt.checkpoint.saving.leader import SaveMemory
from casckpt.checkpoint.saving.options import SaveOptions, WhenBusy
from casckpt.checkpoint.saving.prepare import Prepared, prepare, snapshot, tensors_of
from casckpt.checkpoint.saving.replicas import memory_of
from casckpt.checkpoint.saving.save import compare, save
from casckpt.errors import CasckptError, Conflict, InvalidInput
from casckpt.repository.repository import Repository

State: TypeAlias = Mapping[Any, Any] | Callable[[], Mapping[Any, Any]]
"""What is to be saved, or what makes it: then what goes wrong in the making reaches all ranks."""
WithoutObjects: TypeAlias = Callable[[Ranks, State, SaveOptions], tuple[State, SaveOptions]]
"""See `casckpt.store.objects.without_objects`, which lies above."""


class Saver:
    """What `casckpt.Store.save` and `casckpt.Store.save_async` run on. Thread-safe."""

    def __init__(self, repo: Repository, without_objects: WithoutObjects) -> None:
        self.background = Background()
        self._repo, self._without_objects = repo, without_objects
        self._memories: dict[str, SaveMemory] = {}

    def save(self, state: State, options: SaveOptions) -> Checkpoint:
        """Save, and return once it is durable and visible."""
        ranks = open_ranks(options.process_group, no_dist=options.no_dist)
        state, options = self._without_objects(ranks, state, options)
        try:
            checked = options.checked()
        except CasckptError as error:
            ranks.fail(error)
        return self._run(ranks, checked, lambda: _prepare(state, checked, ranks))

    def save_async(self, state: State, options: SaveOptions, when_busy: WhenBusy) -> Future[Checkpoint]:
        """Check all that is given, on all ranks; copy the state, and save the copy in the background."""
        if when_busy == "refuse":
            self._refuse_busy(options)
        with self.background.lock:
            self.background.wait()
            ranks = open_ranks(options.process_group, no_dist=options.no_dist, purpose="async")
            checked, prepared = self._looked_at(state, ranks, options, when_busy)
            copied = self._copied(prepared)
            return self.background.submit(lambda: self._run(ranks, checked, copied))

    def check(self, state: State, options: SaveOptions) -> None:
        """Do what a save does before it writes anything; on every rank."""
        ranks = open_ranks(options.process_group, no_dist=options.no_dist)
        checked, prepared = self._looked_at(state, ranks, options, "wait")
        if ranks.size > 1:
            memory = SaveMemory(memory_of(self._repo.storage.url, ranks.group))
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

    def _run(self, ranks: Ranks, checked: SaveOptions, prepared: Callable[[], Prepared]) -> Checkpoint:
        """Save; on every rank."""
        replicas = memory_of(self._repo.storage.url, ranks.group)
        memory = self._memories.setdefault(ranks.name, SaveMemory(replicas))
        return Checkpoint(self._repo, save(self._repo, ranks, memory, prepared, checked))


def _prepare(state: Any, options: SaveOptions, ranks: Ranks) -> Prepared:
    """Look at every leaf; see `casckpt.checkpoint.saving.prepare.prepare`."""
    with collecting_later():
        return prepare(
            state, options.attachments, rank=ranks.rank, size=ranks.size, allow_pickle=options.allow_pickle,
            frozen=options.frozen, owners=options.owners,
        )  # fmt: skip


def _failing(error: BaseException) -> Callable[[], Prepared]:
    """What raises ``error`` in place of preparing."""

    def fail() -> NoReturn:
        raise error

    return fail
