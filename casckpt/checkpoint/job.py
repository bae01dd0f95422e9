"""One call of `casckpt.Store.save`: its arguments, checked where all ranks learn of it, and what it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import torch

from casckpt.checkpoint.garbage import collecting_later
from casckpt.checkpoint.handle import Checkpoint
from casckpt.checkpoint.leader import SaveMemory, SaveOptions
from casckpt.checkpoint.prepare import Frozen, Prepared, prepare, snapshot
from casckpt.checkpoint.ranks import Ranks
from casckpt.checkpoint.save import save
from casckpt.checkpoint.workers import usable_threads
from casckpt.errors import CasckptError, InvalidInput
from casckpt.format.keys import check_run, check_step
from casckpt.plan.progress import Progress, Shown
from casckpt.repository.repository import Repository
from casckpt.tensors.staging import Staging

State: TypeAlias = Mapping[Any, Any] | Callable[[], Mapping[Any, Any]]
"""What is to be saved, or what makes it: then what goes wrong in the making reaches all ranks."""


@dataclass
class SaveJob:
    """A save that was asked for. ``options``: the arguments that `SaveOptions` is made of."""

    repo: Repository
    ranks: Ranks
    memory: SaveMemory
    state: State
    attachments: Mapping[str, bytes] | None
    allow_pickle: bool
    frozen: Frozen = field(kw_only=True)
    options: Mapping[str, Any] = field(kw_only=True)

    def prepare(self) -> Prepared:
        """Look at every leaf; see `casckpt.checkpoint.prepare.prepare`."""
        state: Any = self.state
        if callable(state) and not isinstance(state, Mapping | torch.nn.Module):  # what a model does is its forward
            state = state()
        with collecting_later():
            return prepare(
                state,
                self.attachments,
                rank=self.ranks.rank,
                allow_pickle=self.allow_pickle,
                frozen=self.frozen,
            )

    def snapshot(self, staging: Staging) -> Callable[[], Prepared]:
        """`prepare` with copies of all data, made now. Errors are raised by the call, where all ranks learn of them."""
        try:
            copied = snapshot(self.prepare(), staging)
        except CasckptError as error:
            return failing(error)
        return lambda: copied

    def run(self, prepared: Callable[[], Prepared]) -> Checkpoint:
        """Save; on every rank."""
        try:
            options = save_options(**self.options)
        except CasckptError as error:
            self.ranks.fail(error)
        return Checkpoint(self.repo, save(self.repo, self.ranks, self.memory, prepared, options))


def failing(error: BaseException) -> Callable[[], Prepared]:
    """What raises ``error`` in place of preparing."""

    def fail() -> NoReturn:
        raise error

    return fail


def save_options(
    *,
    run: str,
    step: int,
    metadata: Mapping[str, Any] | None,
    dedup: str,
    threads: int | None,
    progress: Shown | None,
    **rest: bool,
) -> SaveOptions:
    """The arguments of a save, checked. Raises InvalidInput."""
    if dedup not in ("store", "run"):
        raise InvalidInput(f"dedup={dedup!r} is not known; give 'store' or 'run'")
    return SaveOptions(
        run=check_run(run),
        step=check_step(step),
        metadata=metadata or {},
        overwrite=bool(rest["overwrite"]),
        ephemeral=bool(rest["ephemeral"]),
        check_replicas=bool(rest["check_replicas"]),
        dedup=dedup,
        threads=usable_threads(threads),
        torch_version=str(torch.__version__),
        progress=Progress(progress),
    )
