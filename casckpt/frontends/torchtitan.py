"""torchtitan: a checkpoint manager that saves to a store.

::

    config.checkpoint = CasCheckpointManager.Config(enable=True, store="s3://bucket/ckpts", run="sft", interval=500)

The fields of torchtitan's own Config have the same meaning: `interval`, `keep_latest_k` (of the run's checkpoints),
`enable_first_step_checkpoint`, `last_save_model_only`, `export_dtype`, `exclude_from_loading`, `load_step`,
`load_only`. Model and optimizers are stored by parameter name, so any front end can load them. Each rank's data
loader, scheduler, trainer and random generators are its train state.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

try:
    from torchtitan.components.checkpointer.base import BaseCheckpointManager
except ImportError as error:
    raise ImportError("casckpt.frontends.torchtitan needs torchtitan 0.3: pip install 'casckpt[torchtitan]'") from error

from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, NotFound, Unsupported
from casckpt.frontends.stores import advising
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.frontends.trainer.settings import TrainerArguments
from casckpt.frontends.training_state.model import model_state
from casckpt.frontends.training_state.parts import as_model
from casckpt.frontends.training_state.proof import Proof
from casckpt.store.opening import open as open_store

OPTIMIZER = "optimizer"  # the names in torchtitan
PARTS = ("lr_scheduler", "dataloader")


class CasCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]  # torchtitan has no types
    """A checkpoint manager, built by ``config.checkpoint.build``. Every rank makes the same calls."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]  # see above
        """torchtitan's settings, and the settings for the store.

        ``store``: a path or URL; "" means the folder ``folder`` inside the dump folder. ``initial_load_ref``: the
        checkpoint in the store to start from if the run has none (replaces ``initial_load_path``). ``rename``: maps
        regular expressions for the model's keys, ``model.<name>``, to their keys in ``initial_load_ref``; see
        `casckpt.Store.load`. ``async_save``: save in the background. ``fixed_steps``: steps that are always saved and
        kept. ``gc``, ``min_free``, ``throttle``, ``pre_download``, ``health``, ``check_replicas``: see `Checkpointer`.
        ``cast``, ``options``: see its `load`. ``prove``: after a load, compare the live state with the checkpoint, as
        its `resume` does; the manager's ``proof`` has the result. ``mirror``, ``sign_with``, ``require_signature`` (""
        and () for none): see `casckpt.open`.
        """

        store: str = ""
        run: str = "default"
        initial_load_ref: str | None = None
        rename: dict[str, str] = field(default_factory=dict)
        async_save: bool = True
        fixed_steps: tuple[int, ...] = ()
        gc: bool = False
        min_free: str | None = None
        throttle: int | None = None
        pre_download: bool = False
        health: bool = False
        cast: bool = False
        prove: bool = False
        options: Literal["checkpoint", "keep"] = "checkpoint"
        check_replicas: Literal["raise", "sample", "off"] = "sample"
        mirror: str = ""
        sign_with: str = ""
        require_signature: tuple[str, ...] = ()

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Future[Checkpoint] | None = None
        self.proof: Proof | None = None
        if not self.enable:
            return
        _refuse(config)
        self.config, self.model_parts, self.optimizers = config, model_parts, list(optimizers)
        given = states | dict(zip(PARTS, (lr_schedulers, dataloader), strict=True))
        self.states = {name: part for name, part in given.items() if part is not None}
        unknown = [name for name in config.exclude_from_loading if name not in (OPTIMIZER, *given)]
        if unknown:
            raise InvalidInput(
                f"exclude_from_loading names {unknown[0]!r}, which does not exist; choose from {[OPTIMIZER, *given]}"
            )
        store = open_store(
            config.store or os.path.join(base_folder, config.folder),
            mirror=config.mirror or None,
            sign_with=config.sign_with or None,
            require_signature=config.require_signature or None,
        )
        self.checkpointer = Checkpointer(
            store,
            run=config.run,
            max_checkpoints=config.keep_latest_k or None,
            save_interval=config.interval,
            **{name: getattr(config, name) for name in _SETTINGS},
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        first = curr_step == 1 and self.config.enable_first_step_checkpoint
        if self.config.load_only:
            return False
        if not (first or last_step or self.checkpointer.due(curr_step)):
            self.checkpointer.start(curr_step)
            self._check()
            return False
        if last_step and self.config.last_save_model_only:
            self.checkpointer.save(curr_step, _Weights(self.model_parts, self.config.export_dtype))
            return True
        self.save_future = self.checkpointer.save_async(
            curr_step, self.model_parts, self.optimizers, TrainState(**self.states)
        )
        if last_step or not self.config.async_save:
            self._wait_for_saving()
        return True

    def _check(self) -> None:
        if not self.config.load_only:
            self.checkpointer.check_first_steps(self.model_parts, self.optimizers, TrainState(**self.states))

    def _load(self, step: int = -1) -> bool:
        found = self._load_newest(step)
        self._check()
        return found

    def _load_newest(self, step: int) -> bool:
        ref = self._ref(step)
        if ref is None:
            return False
        own = isinstance(ref, Checkpoint)  # from this run, so it must contain everything
        model_only = ref.step == 0 if isinstance(ref, Checkpoint) else self.config.initial_load_model_only
        excluded = set(self.config.exclude_from_loading)
        optims = None if model_only or OPTIMIZER in excluded else self.optimizers
        needed = True if own and not model_only else None
        call, takes = ("A load from its own run", ("cast",)) if own else ("The manager", ("cast", "rename"))
        with advising(call, takes):
            loaded = self.checkpointer.load(
                ref, self.model_parts, optims, load_optim_state=needed if optims else None,
                load_trainer_state=False if model_only else needed, cast=self.config.cast,
                options=self.config.options, rename=None if own else self.config.rename,
            )  # fmt: skip
        if loaded is not None:
            wanted = {name: part for name, part in self.states.items() if name not in excluded}
            TrainState(**wanted).load_state_dict(loaded)
        if self.config.prove:
            train = None if loaded is None else TrainState(**self.states)
            left = {f"train.{name}": "excluded from loading" for name in excluded}
            self.proof = self.checkpointer.prove(self.model_parts, optims, train, excused=left)
        return True

    def _ref(self, step: int) -> Checkpoint | str | None:
        """Return the checkpoint to load: one from the run, or the initial one if the run has none."""
        found = self.checkpointer.newest_of_all_ranks(None if step == -1 else step)
        if found is None and step != -1:
            raise NotFound(f"run {self.config.run} has no step {step}; `casckpt list` shows its steps")
        return found or self.config.initial_load_ref

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: the state was copied when `save` returned."""

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self.checkpointer.wait()

    def _close(self) -> None:
        if hasattr(self, "checkpointer"):  # the constructor may have failed
            self.checkpointer.close()


_SETTINGS = CasCheckpointManager.Config.__annotations__.keys() & TrainerArguments.__annotations__.keys()


class _Weights:
    """Only the weights of a model, in a different dtype, as an object that a `Checkpointer` can save."""

    def __init__(self, parts: list[nn.Module], dtype: str) -> None:
        self._parts, self._dtype = parts, getattr(torch, dtype)

    def state_dict_to_save(self) -> dict[str, Any]:
        """Return the weights in the chosen dtype. Shards remain shards."""
        state = model_state(as_model(self._parts))
        return {"model": {name: self._converted(value) for name, value in state.items()}}

    def _converted(self, value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().to(self._dtype) if floating and value.dtype != self._dtype else value


def _refuse(config: CasCheckpointManager.Config) -> None:
    """Raise Unsupported for settings that this manager does not support."""
    instead = {
        "initial_load_path": "initial_load_ref, a checkpoint in the store",
        "initial_load_in_hf": "casckpt import, and initial_load_ref",
        "last_save_in_hf": "casckpt export --format safetensors",
        "create_seed_checkpoint": "a save of step 0 on one process",
    }
    for name, advice in instead.items():
        if getattr(config, name):
            raise Unsupported(f"checkpoint.{name} does not work with a store; use {advice}")
