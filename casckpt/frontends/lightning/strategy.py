"""`CasModelParallelStrategy`: Lightning's strategy for FSDP2 and tensor parallel models on a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from casckpt.errors import InvalidInput
from casckpt.frontends.lightning.files import RunFiles
from casckpt.frontends.lightning.io import monitored
from casckpt.frontends.lightning.pointer import AnyPath, Pointer
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.trainer import Checkpointer
from casckpt.frontends.trainer.settings import TrainerArguments
from casckpt.frontends.training_state.contents import GroupOptions
from casckpt.ranks.agreement import check_same
from casckpt.ranks.ranks import everyone, on_each, open_ranks
from casckpt.store.types import CheckReplicas, Owners

_EMA = "ema"
_NOT_PLAIN = ("state_dict", "optimizer_states", "current_model_state")
"""Keys of a Lightning checkpoint in place of which the live shards are saved."""


class CasModelParallelStrategy(ModelParallelStrategy):
    """A strategy for ``Trainer(strategy=...)``. Like ModelParallelStrategy it uses no CheckpointIO.

    Each rank writes and reads its own shards. Nothing is gathered, and a checkpoint loads on another number of ranks.
    With a WeightAveraging callback it saves the averaged model below ``ema``, and loads it if the checkpoint has it.
    Raises InvalidInput before the first batch if a value cannot be saved, and before the second one for the optimizer.
    ``health``, ``check_replicas``, ``owners``: as for `Store.save`. ``cast``: as for `Checkpointer.load`.
    ``group_options``: the ``options`` of `Checkpointer.load`. ``options``: those of ModelParallelStrategy.
    """

    def __init__(
        self,
        store: AnyStore,
        *,
        run: str,
        gc: bool = False,
        allow_pickle: bool = False,
        health: bool = False,
        cast: bool = False,
        check_replicas: CheckReplicas = "sample",
        owners: Owners = None,
        group_options: GroupOptions = "checkpoint",
        **options: Any,  # Lightning's own arguments, which depend on its version
    ) -> None:
        super().__init__(**options)
        self._book = RunFiles(as_store(store), run, gc=gc)
        self._cast, self._group_options = cast, group_options
        self._settings: TrainerArguments = {
            "allow_pickle": allow_pickle, "health": health, "check_replicas": check_replicas, "owners": owners
        }  # fmt: skip
        self._checks = self._checkpointer(run)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Not used: setting it raises InvalidInput."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise InvalidInput(
            f"CasModelParallelStrategy saves by itself and does not use {type(io).__name__}; leave that plug-in out"
        )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: the live shards are saved."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return nothing: the live shards are saved."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: AnyPath, storage_options: Any = None) -> None:
        """Save, and write a file that names the checkpoint to ``filepath``. Every rank makes the call."""
        if storage_options is not None:
            raise InvalidInput("storage_options of save_checkpoint go to casckpt.open; leave them out here")
        ranks, step = open_ranks(), int(checkpoint["global_step"])
        rest = _rest(checkpoint)
        optims = self.optimizers if "optimizer_states" in checkpoint else []

        def place(paths: list[str]) -> list[tuple[str, str | None, str, bool]]:
            pointer = Pointer(paths[0])
            return list(everyone((paths[0], pointer.read(), *self._book.place(pointer, step)), ranks.size))

        path, before, run, overwrite = ranks.exchange(lambda: str(filepath), place)
        saved = self._checkpointer(run).save(
            step, self._models(), optims or None, rest, overwrite=overwrite, metrics=monitored(checkpoint)
        )
        on_each(ranks, lambda: self._book.saved(Pointer(path), before, saved) if ranks.rank == 0 else None)

    def load_checkpoint(self, checkpoint_path: AnyPath, weights_only: bool | None = None) -> dict[str, Any]:
        """Load into model and optimizers, and return the rest of the checkpoint. Every rank makes the call.

        ``checkpoint_path``: the path of a file, or a reference into the store.
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
        rest = rest or {}
        if average is not None:  # the callback loads these, which are filled by now
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

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Check again until the optimizer has state; see `on_train_start`."""
        super().on_train_batch_start(batch, batch_idx)
        self._check()

    def _check(self) -> None:
        self._checks.check_first_steps(self._module(), self.optimizers, _Rest(self._module().trainer))

    def teardown(self) -> None:
        """Wait for a running gc."""
        self._book.close()
        super().teardown()

    def _checkpointer(self, run: str) -> Checkpointer:
        return Checkpointer(self._book.store, run=run, **self._settings)

    def _models(self) -> Any:
        """Return the model, or a dict of the model and the averaged model."""
        module, average = self._module(), _average(self._module())
        return module if average is None else {"model": module, _EMA: average.module}

    def _module(self) -> Any:
        if self.lightning_module is None:
            raise InvalidInput("the strategy has no model yet; let a Trainer save and load")
        return self.lightning_module


def _average(module: Any) -> Any:
    """Return the averaged model of the WeightAveraging callback; None without one, as in Lightning before 2.6."""
    kind = getattr(callbacks, "WeightAveraging", ())
    found = [one for one in module.trainer.callbacks if isinstance(one, kind)]
    return found[0]._average_model if found else None


class _Rest:
    """The values that a Trainer saves in addition to model and optimizers, created on demand."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the state that Lightning would save now."""
        return _rest(self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False))


def _rest(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in checkpoint.items() if name not in _NOT_PLAIN}
