"""The storage writer for `torch.distributed.checkpoint.save` and `async_save`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from threading import local
from typing import Any, Unpack
from uuid import uuid4

import torch
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as Protocol
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from casckpt.base.names import check_keywords, check_new_run, check_step
from casckpt.errors import InvalidInput
from casckpt.frontends.dcp.ids import hook, is_usable, place_of, stamp
from casckpt.frontends.dcp.session import WriterSession
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.ranks.ranks import this_rank
from casckpt.saving.options import SaveOptions, WriterArguments


class StorageWriter(Protocol):
    """``dcp.save(state_dict, storage_writer=StorageWriter(store, run="sft", step=100))``.

    ``store``: a Store, a path or a URL. You may omit ``step`` if each call passes ``checkpoint_id="sft@100"``, "100"
    for the writer's run, or a path; see `casckpt.frontends.dcp.ids`. For the other arguments, see
    `casckpt.Store.save`. Only the coordinator's ``attachments`` are saved. ``allow_pickle``: if planner data or values
    from `PickleFreeSavePlanner` are not plain data, store them as pickles.

    A writer can be pickled, for asynchronous saves in a separate process, and several threads can share it. Raises
    InvalidInput for invalid arguments. A failed save raises DCP's CheckpointException on every rank, and none of it
    becomes visible.
    """

    def __init__(
        self, store: AnyStore, *, run: str = "default", step: int | None = None, **options: Unpack[WriterArguments]
    ) -> None:
        """See the class for the arguments."""
        super().__init__()
        self._store = as_store(store)
        self._run = check_new_run(run)
        self._place = _Target(run, None if step is None else check_step(step))
        check_keywords("StorageWriter", options, WriterArguments)
        self._options = SaveOptions(run=run, step=step or 0, **options).checked()  # raises here, before a save
        self._here = _Here()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_here"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _here=_Here())

    @hook
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the target of the next save, in any thread or process: RUN@STEP, a step, or a path. None has no effect.

        If several threads save at the same time, each thread's next save uses the target that the thread itself has
        set.
        """
        if checkpoint_id is not None:
            self._place = self._here.place = _Target(*place_of(checkpoint_id, self._run))

    @hook
    def set_up_storage_writer(
        self,
        is_coordinator: bool,
        *args: object,
        rank: int | None = None,
        use_collectives: bool = True,
        **kwargs: object,
    ) -> None:
        """Begin a save in this thread. All further calls belong to this save until it ends."""
        place = self._next
        place.used = True
        run, step = place.run, place.step
        if step is None:
            raise InvalidInput(
                "the StorageWriter has no step; pass it step=, or pass checkpoint_id='RUN@STEP' to each save"
            )
        rank, alone = this_rank() if rank is None else rank, not use_collectives
        options = replace(self._options, run=f"{run}/rank-{rank}" if alone else run, step=step).checked()
        self._here.session = WriterSession(self._store.repository, options, rank=rank, alone=alone)

    @hook
    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return self._session.local_plan(plan)

    @hook
    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return self._session.begin(plans)

    @hook
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See `WriterSession.write`. The future is always done, so it cannot hide an error."""
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._session.write(plan, planner))
        return future

    @hook
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See `WriterSession.finish`. Also put the checkpoint's id into ``metadata.storage_data``."""
        session = self._session
        txid = session.finish(metadata, results)
        metadata.storage_data = {"checkpoint": session.checkpoint}
        stamp(metadata, session.options.run, session.options.step, txid)

    def storage_meta(self) -> StorageMeta | None:
        """Return the name of the next checkpoint for the planner.

        ``save_id`` is random, because no transaction exists yet.
        """
        place = self._next
        return StorageMeta(checkpoint_id=f"{place.run}@{place.step}", save_id=str(uuid4()))

    if torch.__version__ < "2.7":  # DCP copies only tensors on a GPU for a background save, unless the writer does so
        _synchronize_after_execute = should_synchronize_after_execute = False
        synchronize_staging = staging.BlockingAsyncStager.synchronize_staging

        def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            """Return a copy of the state on the CPU."""
            old: Any = staging
            empty = old._create_cpu_state_dict(state_dict)
            copied: dict[str, Any] = old._copy_state_dict(state_dict, empty, type_check=False)
            return copied

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether an id is RUN@STEP, a step, or a path that names a run."""
        return is_usable(place_of, checkpoint_id)

    @property
    def _next(self) -> _Target:
        """Return the target of this thread's next save: the thread's own target, unless a save has already used it."""
        own = self._here.place
        return self._place if own is None or own.used else own

    @property
    def _session(self) -> WriterSession:
        if self._here.session is None:
            raise InvalidInput(
                "a StorageWriter was used before set_up_storage_writer was called; pass the writer to dcp.save"
            )
        return self._here.session


@dataclass
class _Target:
    """The target of a save. ``used``: whether a save has already used it."""

    run: str
    step: int | None
    used: bool = False


class _Here(local):
    """A writer's state in one thread. Each save runs in one thread, and several saves may run at the same time.

    ``place``: the last target that was set in the thread; None in a thread that DCP has started for a save.
    """

    place: _Target | None = None
    session: WriterSession | None = None
