"""The storage writer for `torch.distributed.checkpoint.save` and `async_save`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from threading import local
from typing import Any
from uuid import uuid4

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as Protocol
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from casckpt.checkpoint.job import save_options
from casckpt.checkpoint.prepare import Frozen
from casckpt.checkpoint.ranks import this_rank
from casckpt.checkpoint.store import Dedup
from casckpt.errors import InvalidInput
from casckpt.format.keys import check_run, check_step
from casckpt.frontends.dcp.hooks import hook
from casckpt.frontends.dcp.ids import place_of, stamp
from casckpt.frontends.dcp.session import Session, Wish
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.plan.progress import Shown


class StorageWriter(Protocol):
    """``dcp.save(state_dict, storage_writer=StorageWriter(store, run="sft", step=100))``.

    ``store``: one, a path or a URL. ``step`` may be left out where each call says ``checkpoint_id="sft@100"``, "100"
    for the run of the writer, or a path, see `casckpt.frontends.dcp.ids`. The other arguments are those of
    `casckpt.Store.save`; ``attachments`` are the coordinator's. ``allow_pickle``: store planner data that are not
    plain, and values of `PickleFreeSavePlanner` that are not, as pickles.

    Pickles, for asynchronous saves by a process; may serve several threads at a time. Raises InvalidInput for
    arguments of no use; a save raises DCP's CheckpointException, on every rank, and leaves nothing visible.
    """

    def __init__(
        self,
        store: AnyStore,
        *,
        run: str = "default",
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        ephemeral: bool = False,
        attachments: Mapping[str, bytes] | None = None,
        frozen: Frozen = None,
        dedup: Dedup = "store",
        allow_pickle: bool = False,
        threads: int | None = None,
        progress: Shown | None = None,
    ) -> None:
        """See the class."""
        super().__init__()
        self._store = as_store(store)
        self._run = check_run(run)
        self._place = _Place(run, None if step is None else check_step(step))
        self._wish = Wish(attachments, frozen, allow_pickle)
        self._options: dict[str, Any] = {
            "metadata": metadata, "overwrite": overwrite, "ephemeral": ephemeral, "dedup": dedup, "threads": threads,
            "progress": progress, "check_replicas": False,
        }  # fmt: skip
        save_options(run=run, step=step or 0, **self._options)  # refused here rather than in a save
        self._here = _Here()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_here"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _here=_Here())

    @hook
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The next save goes to ``checkpoint_id``, in whichever thread or process it runs; None leaves it as it is.

        RUN@STEP, a step, or a path. Where threads save at a time, the next save of a thread goes where it said itself.
        """
        if checkpoint_id is not None:
            self._place = self._here.place = _Place(*place_of(checkpoint_id, self._run))

    @hook
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """A save begins, in this thread, to whose end all other calls are of it."""
        place = self._next
        place.used = True
        run, step = place.run, place.step
        if step is None:
            raise InvalidInput("the writer was given no step; give step=, or checkpoint_id='RUN@STEP' to each save")
        rank, alone = kwargs.get("rank", this_rank()), not kwargs.get("use_collectives", True)
        options = save_options(run=f"{run}/rank-{rank}" if alone else run, step=step, **self._options)
        self._here.session = Session(self._store.repository, options, self._wish, rank=rank, alone=alone)

    @hook
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See `Session.ask`."""
        return self._session.ask(plan)

    @hook
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See `Session.begin`."""
        return self._session.begin(plans)

    @hook
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See `Session.write`. It is done when this returns, so no failure can hide in the future."""
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._session.write(plan, planner))
        return future

    @hook
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See `Session.finish`. All ranks find the id of the checkpoint in ``metadata.storage_data``."""
        session = self._session
        session.finish(metadata, results)
        metadata.storage_data = {"checkpoint": session.checkpoint}
        stamp(metadata, session.options.run, session.options.step, session.txid)

    def storage_meta(self) -> StorageMeta | None:
        """For the planner: which checkpoint the next save makes. It has no transaction yet whose id could be told."""
        place = self._next
        return StorageMeta(checkpoint_id=f"{place.run}@{place.step}", save_id=str(uuid4()))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Is it RUN@STEP, a step, or a path that names a run?"""
        try:
            place_of(checkpoint_id, "default")
        except InvalidInput:
            return False
        return True

    @property
    def _next(self) -> _Place:
        """Where the next save of this thread goes: as it said itself, unless a save went there since."""
        mine = self._here.place
        return self._place if mine is None or mine.used else mine

    @property
    def _session(self) -> Session:
        if self._here.session is None:
            raise InvalidInput("a StorageWriter was used before set_up_storage_writer; pass it to dcp.save")
        return self._here.session


@dataclass
class _Place:
    """Where to save. ``used``: a save has gone there."""

    run: str
    step: int | None
    used: bool = False


class _Here(local):
    """What a thread does with a writer: a save runs in one thread, and several may run at a time.

    ``place``: what was said in it last. A thread that DCP starts for a save may have been told nothing.
    """

    place: _Place | None = None
    session: Session | None = None
