"""The saves of one store by one process: one after the other in the background, and what each leaves for the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from casckpt.checkpoint.background import Background
from casckpt.checkpoint.handle import Checkpoint
from casckpt.checkpoint.job import SaveJob, State, failing
from casckpt.checkpoint.leader import SaveMemory
from casckpt.checkpoint.prepare import Frozen, tensors_of
from casckpt.checkpoint.ranks import everyone, open_ranks
from casckpt.errors import Conflict, InvalidInput
from casckpt.repository.repository import Repository

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Saver:
    """What `casckpt.Store.save` and `casckpt.Store.save_async` run on; the arguments are theirs. Thread-safe."""

    def __init__(self, repo: Repository) -> None:
        self.background = Background()
        self._repo = repo
        self._memories: dict[str, SaveMemory] = {}

    def save(self, state: State, **arguments: Any) -> Checkpoint:
        """Save, and return once it is durable and visible."""
        job = self._job(state, **arguments)
        return job.run(job.prepare)

    def save_async(
        self, state: State, *, when_busy: str, process_group: ProcessGroup | None, no_dist: bool, **arguments: Any
    ) -> Future[Checkpoint]:
        """Copy the state, and save the copy in the background."""
        job = self._job(state, process_group=process_group, no_dist=no_dist, purpose="async", **arguments)
        if when_busy == "refuse":
            self._refuse_busy(process_group, no_dist=no_dist)
        with self.background.lock:
            self.background.wait()
            if when_busy not in ("wait", "refuse"):  # the other ranks are about to save
                job.ranks.fail(InvalidInput(f"when_busy={when_busy!r} is not known; give 'wait' or 'refuse'"))
            failed = self.background.unheard()
            prepared = failing(failed) if failed else job.snapshot(self.background.staging)
            future = self.background.submit(lambda: job.run(prepared))
        if failed is not None:  # the other ranks hear of it in their futures, if they have asked for the first
            future.exception()
            raise failed
        return future

    def _refuse_busy(self, process_group: ProcessGroup | None, *, no_dist: bool) -> None:
        def decide(busy: Sequence[bool]) -> Sequence[None]:
            if any(busy):
                raise Conflict("a save still runs in the background; wait for its future, or skip this one")
            return everyone(None, len(busy))

        ranks = open_ranks(process_group, no_dist=no_dist, purpose="busy")
        ranks.exchange(lambda: self.background.busy, decide)

    def warm_up(self, state: State, *, process_group: ProcessGroup | None, no_dist: bool) -> None:
        """Make the memory for the copy of such a state, and the connections between ranks."""
        job = self._job(state, process_group=process_group, no_dist=no_dist, purpose="async", allow_pickle=True)
        with self.background.lock:
            self.background.wait()
            self.background.staging.reserve(tensors_of(job.prepare()))

    def _job(
        self,
        state: State,
        *,
        process_group: ProcessGroup | None,
        no_dist: bool,
        allow_pickle: bool,
        attachments: Mapping[str, bytes] | None = None,
        frozen: Frozen = None,
        purpose: str = "main",
        **options: Any,
    ) -> SaveJob:
        ranks = open_ranks(process_group, no_dist=no_dist, purpose=purpose)
        memory = self._memories.setdefault(ranks.name, SaveMemory())
        return SaveJob(
            self._repo,
            ranks,
            memory,
            state,
            attachments,
            allow_pickle=allow_pickle,
            frozen=frozen,
            options=options,
        )
