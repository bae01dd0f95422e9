"""The saves of one store by one process: one after the other in the background, and what each leaves for the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, get_args

from casckpt.base.cycle_collector import collecting_later
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, Conflict, InvalidInput
from casckpt.ranks.ranks import Ranks, everyone, on_each, open_ranks
from casckpt.repository.repository import Repository
from casckpt.saving.background import Background
from casckpt.saving.leader import SaveMemory
from casckpt.saving.options import SaveOptions, WhenBusy
from casckpt.saving.prepare import Prepared, prepare, snapshot, tensors_of
from casckpt.saving.replicas import memory_of
from casckpt.saving.save import compare, save

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

State: TypeAlias = Mapping[Any, Any] | Callable[[], Mapping[Any, Any]]
"""What is to be saved, or what makes it: then what goes wrong in the making reaches all ranks."""


class Saver:
    """What `casckpt.Store.save` and `casckpt.Store.save_async` run on. Thread-safe."""

    def __init__(self, repo: Repository) -> None:
        self.background = Background()
        self._repo = repo
        self._memories: dict[str, SaveMemory] = {}

    def save(self, state: State, options: SaveOptions) -> Checkpoint:
        """Save, and return once it is durable and visible."""
        ranks = open_ranks(options.process_group, no_dist=options.no_dist)
        try:
            checked = options.checked()
        except CasckptError as error:
            ranks.fail(error)
        return self._run(ranks, checked, lambda: _prepare(state, ranks, checked))

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

    def warm_up(self, state: State, *, process_group: ProcessGroup | None, no_dist: bool) -> None:
        """Make the memory for the copy of such a state, and the connections between ranks."""
        ranks = open_ranks(process_group, no_dist=no_dist, purpose="async")
        with self.background.lock:
            self.background.wait()
            prepared = _prepare(state, ranks, SaveOptions(step=0, allow_pickle=True))
            self.background.staging.reserve(tensors_of(prepared))

    def _looked_at(
        self, state: State, ranks: Ranks, options: SaveOptions, when_busy: WhenBusy
    ) -> tuple[SaveOptions, Prepared]:
        """The arguments and every leaf, checked, before anything is copied. What one rank raises here, all raise.

        So does what the save before failed with, if nobody asked its future.
        """

        def look() -> tuple[SaveOptions, Prepared]:
            if when_busy not in get_args(WhenBusy):
                raise InvalidInput(f"when_busy={when_busy!r} is not known; give 'wait' or 'refuse'")
            if failed := self.background.unheard():
                raise failed
            checked = options.checked()
            return checked, _prepare(state, ranks, checked)

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


def _prepare(state: Any, ranks: Ranks, options: SaveOptions) -> Prepared:
    """Look at every leaf; see `casckpt.saving.prepare.prepare`."""
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
