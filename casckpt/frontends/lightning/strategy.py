"""`CasModelParallelStrategy`: a Lightning strategy that saves FSDP2 and tensor-parallel models to a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from casckpt.errors import InvalidInput
from casckpt.frontends.lightning.files import AnyPath, Pointer, RunFiles
from casckpt.frontends.lightning.io import may_differ, monitored
from casckpt.frontends.stores import AnyStore, advising, as_store
from casckpt.frontends.trainer import Checkpointer
from casckpt.frontends.trainer.saves import OnEvent
from casckpt.frontends.trainer.settings import TrainerArguments
from casckpt.frontends.training_state.contents import TRAIN, GroupOptions
from casckpt.frontends.training_state.proof import Proof
from casckpt.ranks.agreement import check_same
from casckpt.ranks.ranks import everyone, on_each, open_ranks
from casckpt.store.types import CheckReplicas, Owners

_EMA = "ema"
_NOT_PLAIN = ("state_dict", "optimizer_states", "current_model_state")
"""The keys of a Lightning checkpoint that are not saved. The live shards are saved instead."""


class CasModelParallelStrategy(ModelParallelStrategy):
    """A strategy for ``Trainer(strategy=...)``. Like ModelParallelStrategy, it does not use a CheckpointIO.

    Each rank writes and reads its own shards. Nothing is gathered, and a checkpoint can be loaded on a different
    number of ranks. If the trainer has a WeightAveraging callback, the strategy also saves the averaged model, below
    ``ema``, and loads it if the checkpoint has it. If a value cannot be saved, InvalidInput is raised before the first
    batch; for the optimizer's state, before the second batch. ``health``, ``check_replicas``, ``owners``: as for
    `Store.save`. ``cast``: as for `Checkpointer.load`. ``group_options``: the ``options`` of `Checkpointer.load`.
    ``on_event``, ``min_free``: as for `Checkpointer`. ``prove``: when a resumed training starts, after the
    ``on_train_start`` of callbacks and of the model, compare the live state with the checkpoint, as
    `Checkpointer.resume` does; ``proof`` has the result. ``options``: the options of ModelParallelStrategy.
    """

    def __init__(
        self,
        store: AnyStore,
        *,
        run: str,
        gc: bool = False,
        min_free: str | int | None = None,
        allow_pickle: bool = False,
        health: bool = False,
        cast: bool = False,
        check_replicas: CheckReplicas = "sample",
        owners: Owners = None,
        group_options: GroupOptions = "checkpoint",
        on_event: OnEvent | None = None,
        prove: bool = False,
        **options: Any,  # Lightning's own arguments, which depend on its version
    ) -> None:
        super().__init__(**options)
        self._book = RunFiles(as_store(store), run, gc=gc)
        self._cast, self._group_options, self._is_proving = cast, group_options, prove
        self._lineage: dict[str, Any] | None = None
        self._prove: Callable[..., Proof] | None = None
        self.proof: Proof | None = None
        self._settings: TrainerArguments = {
            "allow_pickle": allow_pickle, "health": health, "check_replicas": check_replicas, "owners": owners,
            "on_event": on_event, "min_free": min_free,
        }  # fmt: skip
        self._checks = self._checkpointer(run)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Not used. Setting it raises InvalidInput."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise InvalidInput(
            f"CasModelParallelStrategy saves checkpoints itself and does not use {type(io).__name__}; remove that "
            "plug-in"
        )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return an empty dict, because the live shards are saved instead."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an empty dict, because the live shards are saved instead."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: AnyPath, storage_options: Any = None) -> None:
        """Save a checkpoint, and write to ``filepath`` a file that names the checkpoint. Every rank makes the call."""
        if storage_options is not None:
            raise TypeError("save_checkpoint does not accept storage_options; pass them to casckpt.open instead")
        ranks, step = open_ranks(), int(checkpoint["global_step"])
        rest = _rest(checkpoint, _average(self._module()))
        optims = self.optimizers if "optimizer_states" in checkpoint else []

        def place(paths: list[str]) -> list[tuple[str, str | None, str, bool]]:
            pointer = Pointer(paths[0])
            return list(everyone((paths[0], pointer.read(), *self._book.place(pointer, step)), ranks.size))

        path, before, run, overwrite = ranks.exchange(lambda: str(filepath), place)
        saved = self._checkpointer(run).save(
            step, self._models(), optims or None, rest, overwrite=overwrite, metrics=monitored(checkpoint)
        )
        on_each(ranks, lambda: self._book.saved(Pointer(path), before, saved) if ranks.rank == 0 else None)

    @advising("ckpt_path", ("cast",))
    def load_checkpoint(self, checkpoint_path: AnyPath, weights_only: bool | None = None) -> dict[str, Any]:
        """Load into the model and the optimizers, and return the rest of the checkpoint. Every rank makes the call.

        ``checkpoint_path``: the path of a file, or a reference to a checkpoint in the store.
        """
        ranks = open_ranks()

        def find(paths: list[str]) -> list[str]:
            check_same(paths)
            return list(everyone(self._book.named(Pointer(paths[0])), ranks.size))

        ref = ranks.exchange(lambda: str(checkpoint_path), find)
        module = self._module()
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        optims = self.optimizers if fitting else None
        checkpointer = self._checkpointer(self._book.run)
        average = _average(module) if fitting else None
        has_average = average is not None and any(
            key.startswith(f"{_EMA}.") for key in self._book.store.get(ref).tensors
        )
        models = self._models() if has_average else module
        rest = checkpointer.load(
            ref, models, optims, load_optim_state=bool(optims), cast=self._cast, options=self._group_options
        )
        rest, self._lineage = rest or {}, checkpointer.lineage
        self._prove = partial(checkpointer.prove, models, optims) if self._is_proving and fitting else None
        if average is not None:  # the callback loads these; they have been filled by now
            source = average.module if has_average else module
            rest |= {"state_dict": source.state_dict(), "current_model_state": module.state_dict()}
        return {"state_dict": {}, **rest, "optimizer_states": [{} for _ in self.optimizers]}

    def remove_checkpoint(self, filepath: AnyPath) -> None:
        """Remove the file, and forget the checkpoint if no other file names it."""
        if self.is_global_zero:
            self._book.remove(Pointer(filepath))

    def on_train_start(self) -> None:
        """Raise InvalidInput if a value cannot be saved; see `Checkpointer.check`."""
        super().on_train_start()
        self._checks = self._checkpointer(self._book.run)
        self._check()
        if self._prove is not None:
            trainer = self._module().trainer
            self.proof, self._prove = self._prove(_Rest(trainer), excused=may_differ(trainer, TRAIN)), None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Repeat the check until the optimizer has state; see `on_train_start`."""
        super().on_train_batch_start(batch, batch_idx)
        self._check()

    def _check(self) -> None:
        self._checks.check_first_steps(self._module(), self.optimizers, _Rest(self._module().trainer))

    def teardown(self) -> None:
        """Wait for a running gc."""
        self._book.close()
        super().teardown()

    def _checkpointer(self, run: str) -> Checkpointer:
        made = Checkpointer(self._book.store, run=run, **self._settings)
        made.lineage = self._lineage
        made.ownership.is_decided = True  # Lightning names the file of each save, and nothing rotates
        return made

    def _models(self) -> Any:
        """Return the model, or a dict of the model and the averaged model."""
        module, average = self._module(), _average(self._module())
        return module if average is None else {"model": module, _EMA: average.module}

    def _module(self) -> Any:
        if self.lightning_module is None:
            raise InvalidInput("the strategy has no model yet; save and load through a Trainer")
        return self.lightning_module


def _average(module: Any) -> Any:
    """Return the averaged model of the WeightAveraging callback, or None if there is none (before Lightning 2.6)."""
    kind = getattr(callbacks, "WeightAveraging", ())
    found = [one for one in module.trainer.callbacks if isinstance(one, kind)]
    return found[0]._average_model if found else None


class _Rest:
    """The values that a Trainer saves in addition to the model and the optimizers. They are created on demand."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the state that Lightning would save now."""
        dumped = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        return _rest(dumped, _average(self._trainer.lightning_module))


def _rest(checkpoint: Mapping[str, Any], average: Any) -> dict[str, Any]:
    """Return what is saved beside the live shards. Raises InvalidInput if a hook put something in their place.

    ``average``: the averaged model, whose callback does so.
    """
    added = [name for name in _NOT_PLAIN if average is None and any(checkpoint.get(name, ()))]
    if added:
        raise InvalidInput(
            f"an on_save_checkpoint hook sets checkpoint[{added[0]!r}], but CasModelParallelStrategy saves the live "
            "shards instead. Choose another key in the hook, such as checkpoint['ema']"
        )
    return {name: value for name, value in checkpoint.items() if name not in _NOT_PLAIN}
