"""`CasTrainerMixin`: a Transformers `Trainer` that saves its training run to a store and resumes from it.

::

    class MyTrainer(CasTrainerMixin, SFTTrainer): ...

    trainer = MyTrainer(..., store="/data/checkpoints", run="sft")
    trainer.train(resume_from_checkpoint=True)  # starts a new training run if the run has no checkpoint

The trainer works as usual, except that its checkpoint folder is replaced by a temporary folder of this process, into
which trainers write small files such as trainer_state.json. These files become attachments. The mixin saves and loads
the tensors itself, so that each rank writes its own part, and any number of ranks can resume.
"""

from __future__ import annotations

import json
import logging
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import get_last_checkpoint

from casckpt.base.lazy import cached_property
from casckpt.base.names import LATEST, check_keywords, is_reference
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, Mismatch, NotFound, Unsupported
from casckpt.frontends.files import AS_FILES
from casckpt.frontends.stores import AnyStore, advising, as_store
from casckpt.frontends.trainer import Checkpointer, CheckpointerConfig, SaveOnSignal
from casckpt.frontends.trainer.run_checkpoints import newest
from casckpt.frontends.trainer.settings import TrainerArguments
from casckpt.frontends.training_state.hub_config import files_below, hub_files
from casckpt.frontends.training_state.proof import Proof
from casckpt.frontends.training_state.train_state import RNG, TrainState, restore_rng
from casckpt.frontends.transformers.callback import STATE, CasCheckpointCallback, config_of, logged_metrics, path_within
from casckpt.ranks.agreement import check_same
from casckpt.ranks.ranks import everyone, on_each, open_ranks
from casckpt.store.types import Commit

log = logging.getLogger(__name__)

_FILES, _BATCH = "trainer_files", "trainer_batch"  # metadata keys
_USED = (
    "_get_output_dir", "_init_training_state", "_load_best_model", "_load_from_checkpoint",
    "_load_optimizer_and_scheduler", "_load_rng_state", "_save_checkpoint", "_save_optimizer_and_scheduler",
    "_save_rng_state", "_save_scaler", "create_accelerator_and_postprocess",
)  # fmt: skip
"""The private methods of `Trainer` that the mixin replaces, in addition to public ones."""


class CasTrainerMixin(Trainer):
    """A base class for trainers: ``class MyTrainer(CasTrainerMixin, SFTTrainer)``. It must be the first base.

    ``store``, ``run``: where to save. ``async_save``: save in the background, one save at a time. ``signals``: if any
    rank receives one of these, all ranks save the current step and exit. ``signal_every``: compare with the other
    ranks only at steps that are a multiple of this number. ``settings``: the settings of `CheckpointerConfig`, except
    those that determine when to save. ``prove``: before the first step after a resume, compare the live state with the
    checkpoint, as `Checkpointer.resume` does; ``trainer.proof`` has the result.

    ``save_strategy`` and ``save_steps`` in the training arguments determine when to save. ``save_total_limit`` is the
    number of checkpoints to keep. If the trainer knows the best one (``metric_for_best_model``), it is kept in addition
    to these. The metrics of a checkpoint are the values that were logged at its step.

    The model may be replicated by DDP, or sharded by FSDP2 or tensor parallelism (``DistributedConfig``). Raises
    InvalidInput and Unsupported for arguments that cannot work.
    """

    model: Any
    args: Any
    state: Any
    proof: Proof | None

    def __init__(
        self,
        *args: Any,
        store: AnyStore,
        run: str,
        async_save: bool = True,
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        signal_every: int = 1,
        settings: TrainerArguments | None = None,
        prove: bool = False,
        **kwargs: Any,
    ) -> None:
        absent = [name for name in _USED if not hasattr(Trainer, name)]
        if absent:
            raise Unsupported(f"this version of Transformers has no Trainer.{absent[0]}: upgrade Transformers")
        check_keywords("CheckpointerConfig", settings or {}, TrainerArguments)
        self._store, self._run, self._is_async = as_store(store), run, async_save
        self._signals, self._signal_every = tuple(signals), signal_every
        self._settings, self._signal = settings or {}, 0
        self._is_proving, self.proof = prove, None
        self._resumed: _Resumed | None = None
        changed = self._changed = list[tuple[Any, bool]]()
        try:
            super().__init__(*args, **kwargs)
        finally:
            for arguments, save_only_model in changed:
                arguments.save_only_model = save_only_model
        self._check_arguments()
        self.add_callback(_Watch(self))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise InvalidInput for a class whose other bases would not get the arguments of the mixin."""
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[: cls.__mro__.index(CasTrainerMixin)]:
            if issubclass(base, Trainer) and not issubclass(base, CasTrainerMixin):
                raise InvalidInput(
                    f"CasTrainerMixin must come before {base.__name__}: write class {cls.__name__}(CasTrainerMixin, "
                    f"{base.__name__})"
                )

    def create_accelerator_and_postprocess(self) -> None:
        """Make `Trainer` accept a model that is sharded when loaded. `Trainer` itself cannot save its optimizer."""
        super().create_accelerator_and_postprocess()
        self._changed.append((self.args, self.args.save_only_model))
        self.args.save_only_model = True

    def _check_arguments(self) -> None:
        args = self.args
        engines = {
            "DeepSpeed": self.is_deepspeed_enabled,
            "XLA": self.is_fsdp_xla_enabled,
            "hub_strategy other than 'end'": args.push_to_hub and args.hub_strategy != "end",
            "save_on_each_node": args.save_on_each_node,
            "enable_jit_checkpoint (the mixin itself saves on SIGTERM)": args.enable_jit_checkpoint,
            "CasCheckpointCallback": any(
                isinstance(one, CasCheckpointCallback) for one in self.callback_handler.callbacks
            ),
        }
        for what in (name for name, is_used in engines.items() if is_used):
            raise Unsupported(
                f"CasTrainerMixin does not work with {what}; leave it out, or use Trainer alone, and {AS_FILES}"
            )
        self._warn_of_overrides()
        SaveOnSignal(self.checkpointer, self._signals, every=self._signal_every)  # raises InvalidInput, as for settings

    def _warn_of_overrides(self) -> None:
        """Warn about methods of other classes that write files into a checkpoint folder, and are not called."""
        base: Any = super()
        several: Any = self._save, base._save_optimizer_and_scheduler, base._save_rng_state, base._save_scaler
        for method in (*several, base.save_model):
            if method.__func__ is not getattr(Trainer, method.__name__) and self.args.should_save:
                log.warning(
                    "a checkpoint does not contain what %s writes, because casckpt stores the state itself: write "
                    "other files in _save_checkpoint", method.__qualname__,
                )  # fmt: skip

    @cached_property
    def _config(self) -> CheckpointerConfig:
        settings = self._settings
        limit, is_best_loaded = self.args.save_total_limit, self.args.load_best_model_at_end
        if settings.keys() & {"keep", "max_checkpoints"} and (limit is not None or is_best_loaded):
            raise InvalidInput(
                "keep and max_checkpoints cannot be combined with save_total_limit or load_best_model_at_end: pass "
                "save_total_limit alone"
            )
        if limit is not None:
            settings = {**settings, "keep": limit}
        return config_of(self._run, settings)

    @cached_property
    def checkpointer(self) -> Checkpointer:
        """The checkpointer. It is created on first use, when the ranks are connected."""
        return self._config.build(self._store)

    # saving

    @cached_property
    def _scratch(self) -> Path:
        """The temporary folder of this process."""
        folder = mkdtemp(prefix="casckpt-trainer-")
        finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._scratch / "saving")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint. Every rank makes the call. After a signal, save in the foreground and exit."""
        try:
            self._find_best()
            # if one rank cannot write its files, all ranks raise its error
            files, attachments = on_each(open_ranks(), lambda: self._write_files(model, trial))
            save = self.checkpointer.save if self._signal or not self._is_async else self.checkpointer.save_async
            save(
                self.state.global_step, self.model, self._optim(), self._train_state(), attachments=attachments,
                metadata={"epoch": self.state.epoch, _FILES: files, _BATCH: self._batch},
                metrics=logged_metrics(self.state, self.state.global_step),
            )  # fmt: skip
        finally:
            shutil.rmtree(self._get_output_dir(trial), ignore_errors=True)
        if self._signal:
            raise SystemExit(128 + self._signal)

    def _find_best(self) -> None:
        """Name the best checkpoint, which may have been saved before its evaluation, and let the next rotation keep it.

        Every rank makes the call, before a save. As in `Trainer`, a best step that was not saved changes nothing.
        """
        state, best = self.state, self.state.best_global_step
        is_new = best and best != state.global_step and state.best_model_checkpoint != f"{self._run}@{best}"
        if is_new and self.checkpointer.newest_of_all_ranks(best) is not None:
            state.best_model_checkpoint = f"{self._run}@{best}"
        run, _, step = (state.best_model_checkpoint or "").rpartition("@")
        if run == self._run and self.args.save_total_limit is not None:
            config, rotation = self.checkpointer.config, self.checkpointer._rotation
            self.checkpointer._rotation = replace(rotation, fixed=frozenset({*(config.fixed_steps or ()), int(step)}))

    def _write_files(self, model: Any, trial: Any) -> tuple[list[str], dict[str, bytes]]:
        """Let the trainer write its small files. On rank 0, return their names and all attachments."""
        super()._save_checkpoint(model, trial)
        state, step = self.state, self.state.global_step
        if state.best_global_step == step:
            state.best_model_checkpoint = f"{self._run}@{step}"
        if not self.args.should_save:
            return [], {}
        folder = Path(self._get_output_dir(trial), f"checkpoint-{step}")
        state.save_to_json(str(folder / STATE))
        files = {name: path.read_bytes() for name, path in files_below(folder)}
        return sorted(files), self._processor_files | files

    @property
    def _batch(self) -> int:
        """The number of examples in one step, over all ranks."""
        return int(self.get_total_train_batch_size(self.args))

    def _optim(self) -> Any:
        if self.args.save_only_model:
            return None
        return getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps the optimizer

    def _train_state(self) -> TrainState | None:
        if self.args.save_only_model:
            return None
        parts = {"scheduler": self.lr_scheduler, "scaler": getattr(self.accelerator, "scaler", None)}
        return TrainState(rng=True, **{name: part for name, part in parts.items() if part is not None})

    @cached_property
    def _processor_files(self) -> dict[str, bytes]:
        """The files of the tokenizer or processor."""
        return hub_files(None, self.processing_class)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model into a folder, as `Trainer` does. Of these files, a checkpoint has the training arguments."""
        if _internal_call and output_dir is not None:  # None: for a push to the hub
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            if self.args.should_save:
                torch.save(self.args, Path(output_dir, TRAINING_ARGS_NAME))
        else:
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Do nothing: `Checkpointer` saves the optimizer and the scheduler."""

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: the scaler is part of the train state."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: the random generators are part of the train state."""

    # resuming

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train as `Trainer.train` does.

        ``resume_from_checkpoint``: True for the newest checkpoint of the run, if there is one; a reference to a
        checkpoint in the store ("sft@100"); or a folder that a plain `Trainer` saved. Every rank loads the same
        checkpoint.
        """
        if trial is not None:
            raise Unsupported("CasTrainerMixin does not search hyperparameters; train each trial in a separate run")
        signals = self._signals
        if signals and threading.current_thread() is not threading.main_thread():
            log.warning("a signal does not trigger a save, because the training does not run in the main thread")
            signals = ()
        with self.checkpointer, SaveOnSignal(self.checkpointer, signals, every=self._signal_every) as self._received:
            self._signal = 0
            self.checkpointer.ownership.reset()
            folder = self._find(resume_from_checkpoint)
            return super().train(folder, trial, ignore_keys_for_eval, **kwargs)

    def _find(self, given: Any) -> str | None:
        """Return the folder from which `Trainer` resumes, with the small files of the checkpoint."""
        self._resumed = None
        if given is None or given is False:
            return None
        if given is not True and given and Path(given).is_dir():
            return str(given)
        ranks, wanted = open_ranks(), f"{self._run}@{LATEST}" if given is True else str(given)

        def find(named: Sequence[str]) -> Sequence[tuple[Commit, dict[str, bytes]] | None]:
            check_same(named)
            if not is_reference(wanted):
                raise NotFound(
                    f"the folder {wanted!r} does not exist; pass the path of an existing folder, or a reference such "
                    f"as {self._run}@{LATEST}"
                )
            found = self._newest() if given is True else self._store.get(wanted)
            return everyone(None if found is None else (found.commit, self._small_files(found)), ranks.size)

        answer = ranks.exchange(lambda: wanted, find)
        if answer is None:
            return None
        commit, files = answer
        folder = self._scratch / "resuming" / f"checkpoint-{commit.step}"
        shutil.rmtree(folder.parent, ignore_errors=True)
        for name, data in files.items():
            path_within(folder, name).write_bytes(data)
        state = json.loads(files[STATE])
        best = state.pop("best_model_checkpoint", None)  # Trainer would look for a folder
        (folder / STATE).write_text(json.dumps(state))
        self._resumed = _Resumed(str(folder), Checkpoint(self._store.repository, commit), best)
        return str(folder)

    def _newest(self) -> Checkpoint | None:
        found = newest(self._store, self._run, tell=True)
        if found is not None:
            return found
        output = Path(self.args.output_dir)
        last: Any = get_last_checkpoint
        folder = last(output) if output.is_dir() else None
        if folder is not None:
            log.warning(
                "run %s has no checkpoint, so the training starts from the beginning; a plain Trainer saved %s: to "
                "continue from it, pass resume_from_checkpoint=%r", self._run, folder, folder,
            )  # fmt: skip
        return None

    def _small_files(self, checkpoint: Checkpoint) -> dict[str, bytes]:
        names = (checkpoint.metadata or {}).get(_FILES)
        if not isinstance(names, list) or STATE not in names:
            raise Mismatch(
                f"{checkpoint.run}@{checkpoint.step} was not saved by a CasTrainerMixin. For a checkpoint of "
                "CasCheckpointCallback, pass the folder that restore_checkpoint returns"
            )
        return {name: self._store.read_attachment(checkpoint, name) for name in names}

    def _resumed_from(self, folder: str | None) -> _Resumed | None:
        return self._resumed if self._resumed is not None and folder == self._resumed.folder else None

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        counts: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        if self._resumed is not None:
            self.state.best_model_checkpoint = self._resumed.best
            self._warn_of_batch(self._resumed.checkpoint)
        return counts

    def _warn_of_batch(self, checkpoint: Checkpoint) -> None:
        """Log a warning if this run uses a different number of examples in each step.

        `Trainer` may have chosen the number itself (``auto_find_batch_size``).
        """
        saved = (checkpoint.metadata or {}).get(_BATCH) if self.args.should_save else self._batch
        if saved != self._batch:
            log.warning(
                "%s@%d was saved with %s examples in each step, but this run uses %d: the checkpoint's epoch "
                "continues at the same step, so some examples are repeated or skipped", checkpoint.run, checkpoint.step,
                saved, self._batch,
            )  # fmt: skip

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """For a checkpoint in the store, load nothing: `_load_optimizer_and_scheduler` also loads the model."""
        if self._resumed_from(resume_from_checkpoint) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    @advising("resume_from_checkpoint")
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load everything. `Trainer` calls this method when the model and the optimizer are wrapped."""
        resumed = self._resumed_from(checkpoint)
        if resumed is not None:
            train, optim = self._train_state(), self._optim()
            has_optimizer = optim is not None
            state = self.checkpointer.load(
                resumed.checkpoint, self.model, optim, load_optim_state=has_optimizer, load_trainer_state=has_optimizer
            )
            if train is not None:
                resumed.generators = state.pop(RNG)
                TrainState(rng=False, **train).load_state_dict(state)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set the random generators, and prove the resume. `Trainer` calls this last, after it has skipped batches."""
        found = self._resumed_from(checkpoint)
        if found is None:
            super()._load_rng_state(checkpoint)
            return
        if found.generators is not None:
            restore_rng(found.generators)
        if self._is_proving:
            self.proof = self.checkpointer.prove(self.model, self._optim(), self._train_state())

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if Path(best).is_dir():  # of a plain Trainer
            super()._load_best_model()
            return
        self.checkpointer.wait()
        self.checkpointer.ownership.is_over = True
        log.info("loading the best model, %s (score: %s)", best, self.state.best_metric)
        try:
            self.checkpointer.load(best, self.model, load_optim_state=False, load_trainer_state=False)
        except NotFound as error:
            log.warning("the model of the last step is left unchanged, because the best one is gone: %s", error)

    # inside a step

    def _check_first_steps(self) -> None:
        self.checkpointer.check_first_steps(self.model, self._optim(), self._train_state(), warm_up=self._is_async)


@dataclass
class _Resumed:
    """The checkpoint that training resumed from, and the temporary folder with its small files.

    ``best``: the reference to the best checkpoint before it. ``generators``: the state of this rank's generators.
    """

    folder: str
    checkpoint: Checkpoint
    best: str | None
    generators: Mapping[str, Any] | None = None


class _Watch(TrainerCallback):
    """The last callback of a trainer. It checks the first steps, and whether any rank received a signal."""

    def __init__(self, trainer: CasTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        self._trainer.checkpointer.ownership.to_resume = "train(resume_from_checkpoint=True)"
        if args.auto_find_batch_size:
            self._trainer.checkpointer.begin_again()
        self._trainer.checkpointer.start(state.global_step + 1)
        self._trainer._check_first_steps()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        trainer = self._trainer
        trainer._signal = trainer._received.received(state.global_step) if trainer._signals else 0
        if trainer._signal:
            control.should_save = control.should_training_stop = True
        else:
            trainer._check_first_steps()
