"""Accelerate: saves and loads all objects that an `Accelerator` has prepared as one checkpoint.

::

    checkpointer = AcceleratorCheckpointer(accelerator, store, run="sft", save_interval=500, max_checkpoints=3)
    last = checkpointer.resume()                        # instead of accelerator.load_state
    for step in range(last.step + 1 if last else 1, 10_001):
        ...
        checkpointer.save_if_due(step)                  # instead of accelerator.save_state
    checkpointer.close()

This module does not call the hooks of `save_state` and `load_state`, which write files to a folder and read them:
register what they save with `accelerator.register_for_checkpointing`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, Unpack

try:
    import accelerate
except ImportError as error:
    raise ImportError("casckpt.frontends.accelerate needs Accelerate: pip install 'casckpt[transformers]'") from error

from torch import nn

from casckpt.base.text import warn_once
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, Unsupported
from casckpt.frontends.files import AS_FILES
from casckpt.frontends.stores import AnyStore, advising
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.frontends.trainer.settings import DueArguments, StepArguments, TrainerArguments
from casckpt.frontends.training_state.contents import GroupOptions, Missing
from casckpt.frontends.training_state.names import parameter_names
from casckpt.frontends.training_state.parts import as_optimizers
from casckpt.store.types import Rename, Unread

log = logging.getLogger(__name__)

Hooks = Literal["refuse", "ignore"]

_OTHERS = ("DEEPSPEED", "MEGATRON_LM", "XLA")
_HOOKS = "_save_model_state_pre_hook", "_load_model_state_pre_hook"  # of an Accelerator
_LOST = (
    "%s@%d is in the middle of an accumulation: the gradients of %d of %d batches are not in the checkpoint, so "
    "the first optimizer step after a resume lacks them. To keep them, save when accelerator.sync_gradients is True"
)

_NOT_SAVED = "accumulated before the save, and not part of a checkpoint"


class AcceleratorCheckpointer:
    """A `Checkpointer` for the models, optimizers, schedulers, scaler, data loaders and registered objects.

    Prepare all of them first. Several models are saved as one, unless two of their parameters have the same name. In
    that case, the models are saved as ``model``, ``model_1``, ..., and their optimizers as ``optim``, ``optim_1``, ...
    The optimizers' parameters that are in no model are saved as another model, with the names ``bare_0``, ...
    Data loaders resume at the correct epoch. They also resume at the correct batch if Accelerate uses stateful data
    loaders. Otherwise, call `accelerator.skip_first_batches` yourself, as with `load_state`. As there, a save in the
    middle of an accumulation does not contain its gradients; a warning says so. ``hooks``: "refuse" raises Unsupported
    if the accelerator has hooks for `save_state` or `load_state`, here or in the first save after they were registered;
    "ignore" is for hooks that save nothing but prepared models, in another format. ``settings``: the settings of
    `Checkpointer`. With `LocalSGD`, pass ``check_replicas="off"``, because the models and optimizers of ranks differ.
    """

    def __init__(
        self,
        accelerator: accelerate.Accelerator,
        store: AnyStore,
        *,
        run: str,
        hooks: Hooks = "refuse",
        **settings: Unpack[TrainerArguments],
    ) -> None:
        kind = accelerator.distributed_type.name
        if kind in _OTHERS:
            raise Unsupported(f"{kind} models are not supported; save them with accelerator.save_state, and {AS_FILES}")
        self.accelerator = accelerator
        self._progress, self._has_warned = _Progress(accelerator, hooks), False
        self._progress.refuse_hooks()
        self.checkpointer = Checkpointer(store, run=run, **settings)

    def save(self, step: int, **options: Unpack[StepArguments]) -> Checkpoint:
        """See `Checkpointer.save`."""
        return self.checkpointer.save(step, *self._all(step), **options)

    def save_async(self, step: int, **options: Unpack[StepArguments]) -> Future[Checkpoint]:
        """See `Checkpointer.save_async`."""
        return self.checkpointer.save_async(step, *self._all(step), **options)

    def save_if_due(
        self, step: int, *, last: bool = False, **options: Unpack[DueArguments]
    ) -> Future[Checkpoint] | None:
        """See `Checkpointer.save_if_due`."""
        parts = self._all(step if last or self.checkpointer.due(step) else None)
        return self.checkpointer.save_if_due(step, *parts, last=last, **options)

    def check(self) -> None:
        """See `Checkpointer.check`."""
        self.checkpointer.check(*self._all())

    def resume(
        self,
        *,
        missing: Missing = "raise",
        unread: Unread = "warn",
        cast: bool = False,
        strict: bool | None = None,
        rename: Rename = None,
        options: GroupOptions = "checkpoint",
        prove: bool = False,
    ) -> Checkpoint | None:
        """Load the newest checkpoint of the run, if there is one. See `Checkpointer.resume`.

        A checkpoint from the middle of an accumulation is named in the log, and in the ``unproved`` of the proof.
        """
        found = self.checkpointer.resume(
            *self._all(), missing=missing, unread=unread, cast=cast, strict=strict, rename=rename, options=options,
            prove=prove,
        )  # fmt: skip
        resumed = self.checkpointer.resumed
        if resumed is not None and self._warn_of_lost(resumed.checkpoint.step) and resumed.proof is not None:
            proof = replace(resumed.proof, unproved={**resumed.proof.unproved, "gradients": _NOT_SAVED})
            self.checkpointer.resumed = replace(resumed, proof=proof)
        return found

    @advising("AcceleratorCheckpointer.load", ("cast",))
    def load(self, ref: str | Checkpoint, *, cast: bool = False) -> None:
        """Load a checkpoint, even one that contains only weights. ``cast``: see `Checkpointer.load`."""
        models, optimizers, train = self._all()
        state = self.checkpointer.load(ref, models, optimizers, cast=cast)
        if state is not None:
            train.load_state_dict(state)

    def close(self) -> None:
        """See `Checkpointer.close`."""
        self.checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.checkpointer.__exit__(kind, error, at)

    def _all(self, step: int | None = None) -> tuple[list[Any] | dict[str, Any], list[Any] | None, TrainState]:
        """Return the models, the optimizers, and everything else that has been prepared so far.

        ``step``: the step that is to be saved, which may be in the middle of an accumulation.
        """
        it: Any = self.accelerator
        if step is not None:
            self._warn_of_lost(step)
        named = {
            "scheduler": it._schedulers,
            "dataloader": [_Loader(one) for one in it._dataloaders],
            "object": it._custom_objects,
            "scaler": [] if it.scaler is None else [it.scaler],
        }
        parts = {f"{name}{number}": one for name, several in named.items() for number, one in enumerate(several)}
        train = TrainState(accelerator=self._progress, **parts)
        models, optimizers = list(it._models), [one.optimizer for one in it._optimizers]
        if not (parts or models or optimizers):
            raise InvalidInput("the accelerator has not prepared anything yet; call accelerator.prepare first")
        names = [parameter_names(model) for model in models]
        models += _bare(optimizers, names)
        if models and not _share_names(names):
            return models, optimizers, train
        return {**_numbered("model", models), **_numbered("optim", optimizers)}, None, train

    def _warn_of_lost(self, step: int) -> bool:
        """Return whether ``step`` is in the middle of an accumulation. If it is, log a warning once."""
        window: int = self.accelerator.gradient_state.num_steps
        batches: int = self.accelerator.step % window
        if batches and not self._has_warned:
            self._has_warned = True
            log.warning(_LOST, self.checkpointer.run, step, batches, window)
        return bool(batches)


def _bare(optimizers: Sequence[Any], names: Sequence[Mapping[int, Any]]) -> list[nn.Module]:
    """Return the optimizers' parameters that no model has, as one model, if there are any.

    ``names``: the `parameter_names` of the models.
    """
    groups = (group for one in as_optimizers(optimizers) for group in one.param_groups)
    bare = {id(one): one for group in groups for one in group["params"] if not any(id(one) in known for known in names)}
    if bare:
        warn_once(
            log,
            "%d parameters of the optimizers, of the shapes %s, are in no prepared model. They are saved as a model of "
            "their own. If they were replaced in a model, create the optimizer after that",
            len(bare), str([list(one.shape) for one in bare.values()][:8]),
        )  # fmt: skip
    module = nn.Module()
    module._parameters.update({f"bare_{number}": one for number, one in enumerate(bare.values())})
    return [module] if bare else []


def _share_names(names: Sequence[Mapping[int, Sequence[str]]]) -> bool:
    """Return whether two parameters have the same name."""
    owners: dict[str, int] = {}
    pairs = ((name, one) for known in names for one, several in known.items() for name in several)
    return any(owners.setdefault(name, one) != one for name, one in pairs)


def _numbered(name: str, several: Sequence[Any]) -> dict[str, Any]:
    return {f"{name}_{number}" if number else name: one for number, one in enumerate(several)}


class _Progress:
    """The accelerator's count of batches, which determines the batches at which optimizers step.

    Every save contains it, so it also refuses hooks that were registered late, on all ranks.
    """

    def __init__(self, accelerator: Any, hooks: Hooks) -> None:
        self._accelerator, self._hooks = accelerator, hooks

    def state_dict(self) -> dict[str, int]:
        """Return the count. Raises Unsupported."""
        self.refuse_hooks()
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the count."""
        self._accelerator.step = state["step"]

    def refuse_hooks(self) -> None:
        """Raise Unsupported if there are hooks, unless they are ignored."""
        hooks = [hook for name in _HOOKS for hook in getattr(self._accelerator, name, {}).values()]
        if hooks and self._hooks != "ignore":
            raise Unsupported(
                f"the accelerator has hooks for save_state or load_state, which casckpt does not call: "
                f"{', '.join(getattr(hook, '__qualname__', type(hook).__name__) for hook in hooks)}. For each object "
                "that they save beside prepared models, such as an EMA model, call "
                'accelerator.register_for_checkpointing. Then remove the hooks, or pass hooks="ignore"'
            )


class _Loader:
    """The part of a prepared data loader that is saved."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._stateful = bool(getattr(loader, "use_stateful_dataloader", False))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of completed epochs, and the position within the epoch if the loader tracks it."""
        inside = self._loader.state_dict() if self._stateful else None
        generator = getattr(self._loader, "synchronized_generator", None)
        drawn = None if generator is None else generator.get_state()
        return {"iteration": self._loader.iteration, "inside": inside, "generator": drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the epoch and the position."""
        self._loader.iteration = state["iteration"]
        if self._stateful and state["inside"] is not None:
            self._loader.load_state_dict(state["inside"])
        if state["generator"] is not None:
            self._loader.synchronized_generator.set_state(state["generator"])
