"""Transformers: saves each checkpoint folder of a `Trainer` to a store, and restores such folders.

::

    Trainer(..., callbacks=[CasCheckpointCallback(store, run="sft", max_checkpoints=3)])
    trainer.train(resume_from_checkpoint=restore_checkpoint(store, "sft@latest", "out"))

With ``save_total_limit=1``, the disk holds one folder. The store holds only what changed between checkpoints, so a
frozen backbone is stored once. As in every front end, the weights are stored under ``model``, and the optimizer under
``optim`` by parameter name. Other files become attachments.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import torch
from safetensors.torch import save_file
from transformers import TrainerCallback

from casckpt.base.lazy import cached_property
from casckpt.base.names import HUB_FILE, LATEST, check_attachment_name
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, Mismatch, NotFound, Unsupported
from casckpt.frontends.files import AS_FILES
from casckpt.frontends.interchange.new_files import new_folder
from casckpt.frontends.interchange.safetensors.importing import Maps
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.trainer import Checkpointer, CheckpointerConfig
from casckpt.frontends.trainer.run_checkpoints import tell_missing
from casckpt.frontends.trainer.settings import TrainerArguments
from casckpt.frontends.training_state import unshard_optim_state
from casckpt.frontends.training_state.hub_config import ADAPTER_STEM, files_below, hub_names
from casckpt.frontends.training_state.names import Parameters
from casckpt.frontends.training_state.optimizer import states_to_save
from casckpt.frontends.training_state.proof import Proof, prove
from casckpt.frontends.training_state.stored import StoredTraining
from casckpt.ranks.ranks import on_each, open_ranks, this_rank
from casckpt.store.store import Store

log = logging.getLogger(__name__)

HOME = "transformers"
OPTIMIZER, RNG = "optimizer.pt", re.compile(r"rng_state(_\d+)?\.pth")
STATE = "trainer_state.json"
_SAFETENSORS = ".safetensors"
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_MODEL = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_WHEN = {"save_interval", "last_step", "ephemeral_save_interval", "ephemeral_cooldown", "max_steps_at_risk"}
_MAX_FILE = 256 << 20  # bytes; the limit for files that are not safetensors
_FILES = "files of the trainer, which are not compared"
_FOREIGN = ("pytorch_model_fsdp", "optimizer_", "optimizer.bin", "global_step", "pytorch_model.bin")
_USE_ANOTHER = f"save with casckpt.frontends.trainer.Checkpointer in your own training loop, or {AS_FILES}"


class CasCheckpointCallback(TrainerCallback):
    """A callback for ``Trainer(callbacks=[...])``.

    ``settings``: the settings of `CheckpointerConfig`, except those that decide when to save. Retention applies to the
    store. The metrics of a checkpoint are the values that the trainer logged at its step, so ``keep={"keep_best":
    "eval_loss:3"}`` keeps the three best checkpoints.

    ``async_save``: save in the background, one save at a time. Errors are raised as in `Checkpointer.save_async`, and
    at the end of the training.

    ``prove``: before the first step after a resume, compare rank 0's model and optimizer with the checkpoint of that
    step in the run; ``proof`` has the result. To compare what the trainer would save, the weights are first written to
    a temporary folder.

    FSDP and DeepSpeed folders raise Unsupported: use `casckpt.frontends.trainer` or `casckpt import` instead.
    """

    def __init__(
        self,
        store: AnyStore,
        *,
        run: str,
        async_save: bool = False,
        prove: bool = False,
        **settings: Unpack[TrainerArguments],
    ) -> None:
        self.config = config_of(run, settings)
        self.store = as_store(store)
        self._async = async_save
        self._is_step_checked = False
        self._is_proving, self._is_resumed = prove, False
        self.proof: Proof | None = None

    @cached_property
    def checkpointer(self) -> Checkpointer:
        """The checkpointer. It is created on first use, when the ranks are connected."""
        return self.config.build(self.store)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        """Raise Unsupported or InvalidInput if the folders or the optimizer of this training run cannot be saved."""
        for name in ("fsdp", "deepspeed"):
            if getattr(args, name, None):
                raise Unsupported(f"the checkpoint folders of a Trainer with {name} are not supported; {_USE_ANOTHER}")
        self._check(args, kwargs)
        self._is_resumed = state.global_step > 0
        self.checkpointer.ownership.reset()
        if args.auto_find_batch_size:
            self.checkpointer.begin_again()
        self.checkpointer.ownership.to_resume = "train(resume_from_checkpoint=...)"
        self.checkpointer.start(state.global_step + 1, loaded=state.global_step or None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        """Prove a resume before its first step."""
        if self._is_proving and self._is_resumed:
            self._is_resumed, is_first = False, this_rank() == 0
            self.proof = on_each(open_ranks(), lambda: self._prove(state.global_step, kwargs) if is_first else None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        """Raise InvalidInput after the first step if the optimizer's new state cannot be saved."""
        if not self._is_step_checked:
            self._is_step_checked = True
            self._check(args, kwargs)

    def _check(self, args: Any, given: Mapping[str, Any]) -> None:
        """Check the optimizer before the trainer writes a folder. Every rank makes the call."""
        if not args.save_only_model:
            self.checkpointer.check(_Folder(None, given.get("model"), given.get("optimizer")))

    def _prove(self, step: int, given: Mapping[str, Any]) -> Proof | None:
        """Compare the folder that the trainer would write now with the checkpoint of ``step``. Rank 0 makes the call.

        If there is no such checkpoint, return None and log a warning.
        """
        try:
            stored = StoredTraining.read(self.store, f"{self.config.run}@{step}")
        except NotFound as error:
            log.warning("the resume is not proved: %s", error)
            return None
        model, optimizer = given["model"], given["optimizer"]
        with TemporaryDirectory(prefix="casckpt-proof-") as folder:
            _write_model(model, Path(folder))
            state = _Folder(Path(folder), model, optimizer).state_dict_to_save()
            if stored.has_optimizer():
                state |= _Folder(None, model, optimizer).state_dict_to_save()
            excused = {f"{HOME}.rng": _FILES}
            return prove(
                self.store, stored.checkpoint, state, model, excused=excused, by_name=True, no_dist=True,
                allow_pickle=self.config.allow_pickle, threads=self.config.load_threads,
            )  # fmt: skip

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        """Save the folder that the trainer has just written. Every rank makes the call.

        Rank 0 has most of the files.
        """
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        contents = _Folder(folder, kwargs.get("model"), kwargs.get("optimizer"))
        step, metadata = state.global_step, {"epoch": state.epoch}
        save = self.checkpointer.save_async if self._async else self.checkpointer.save
        save(step, contents, attachments=contents.attachments, metadata=metadata, metrics=logged_metrics(state, step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        """Wait for the background save, and raise its error if it failed."""
        self.checkpointer.close()


def config_of(run: str, settings: TrainerArguments) -> CheckpointerConfig:
    """Return the config of a checkpointer. Raises InvalidInput for settings that decide when to save."""
    useless = sorted(_WHEN & settings.keys())
    if useless:
        raise InvalidInput(
            f"{useless[0]} has no effect here: save_strategy and save_steps of the Trainer determine when to save"
        )
    return CheckpointerConfig(run=run, **settings)


def logged_metrics(state: Any, step: int) -> dict[str, Any]:
    """Return the values that were logged at a step."""
    logged = [one for one in getattr(state, "log_history", None) or () if one.get("step") == step]
    return {name: value for one in logged for name, value in one.items() if name not in ("step", "epoch")}


def _write_model(model: Any, folder: Path) -> None:
    """Write the weights to files, as the trainer does."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


class _Folder:
    """A folder as an object that a `Checkpointer` can save. If ``folder`` is None, it contains only the optimizer.

    ``attachments``: set by `state_dict_to_save`, because all ranks raise the errors of that method.
    """

    def __init__(self, folder: Path | None, model: Any, optimizer: Any) -> None:
        self._folder, self._model = folder, model
        self._optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps the optimizer
        self.attachments: dict[str, bytes] = {}

    def state_dict_to_save(self) -> dict[str, Any]:
        """Return the whole folder on rank 0, and this rank's random generators on every rank."""
        rank = this_rank()
        if self._folder is None:
            return self._optimizer_state() if rank == 0 else {}
        rng = {name: path.read_bytes() for name, path in files_below(self._folder) if _is_of(name, rank)}
        if rank != 0:
            return {HOME: {"rng": rng}}
        self.attachments |= _attachments(self._folder) | _adapter_names(self._folder)
        _refuse_foreign(self._folder)
        state: dict[str, Any] = {"model": {}, HOME: {"rng": rng, "files": {}, "tensors": {}}}
        for name, path in [one for one in files_below(self._folder) if one[0].endswith(_SAFETENSORS)]:
            maps = Maps(None)
            said = maps.add_all([path])
            state[HOME]["files"][name] = {"names": list(maps.state), "metadata": said}
            home = state["model"] if _MODEL.fullmatch(name) else state[HOME]["tensors"].setdefault(name, {})
            home.update(maps.state)
        if (self._folder / OPTIMIZER).is_file():
            state |= self._optimizer_state()
        return state

    def _optimizer_state(self) -> dict[str, Any]:
        if self._optimizer is None:
            return {}
        return {"optim": states_to_save(Parameters.of(self._model), [self._optimizer])}


def restore_checkpoint(
    store: AnyStore,
    ref: str | Checkpoint,
    output_dir: str | os.PathLike[str],
    *,
    force: bool = False,
    allow_pickle: bool = False,
) -> str | None:
    """Write the folder ``output_dir/checkpoint-STEP`` with the contents that the trainer wrote, and return its path.

    If ``ref`` is ``RUN@latest`` and the run has no checkpoint, return None. The trainer then starts from the
    beginning. Pass the result to ``trainer.train(resume_from_checkpoint=...)``. If ``output_dir`` is itself named
    ``checkpoint-<number>``, the files are written directly into it. One process per file system makes the call. An
    existing folder is replaced if it has the same ``trainer_state.json``, which shows that an earlier start of the job
    left it. ``force``: replace any folder. ``allow_pickle``: as for `Store.read`; a checkpoint that was saved with it
    may need it. Raises Refused for a pickle without ``allow_pickle``, NotFound, Conflict if the folder has different
    contents, Mismatch for a checkpoint that was not saved by `CasCheckpointCallback`, and Damaged. After an error, no
    folder with the final name exists.
    """
    opened = as_store(store)
    try:
        stored = StoredTraining.read(opened, ref)
    except NotFound as error:
        run, _, at = str(ref).rpartition("@")
        if at != LATEST:
            raise
        tell_missing(opened, run, error)
        return None
    if not stored.keys_below(f"{HOME}.files"):
        raise Mismatch(
            f"{stored.where} was not saved from a Transformers folder; use casckpt export to write its weights"
        )
    about = opened.read(stored.checkpoint, keys=[f"{HOME}.files*", f"{HOME}.rng*"])[HOME]
    target = Path(output_dir)
    if not _CHECKPOINT.fullmatch(target.name):
        target /= f"checkpoint-{stored.commit.step}"
    force = force or _is_its_folder(opened, stored.checkpoint, target)
    with new_folder(target, force=force, stale=lambda name: True, last=[STATE]) as folder:
        for name in opened.attachments(stored.checkpoint).keys() - {HUB_FILE}:
            path_within(folder, name).write_bytes(opened.read_attachment(stored.checkpoint, name))
        for name, data in about.get("rng", {}).items():
            path_within(folder, name).write_bytes(data)
        for name, file in about["files"].items():
            tensors = _read(opened, stored, name, file["names"])
            save_file(tensors, path_within(folder, name), metadata=dict(file["metadata"]) or None)
        if stored.has_optimizer():
            torch.save(unshard_optim_state(opened, stored.checkpoint, allow_pickle=allow_pickle), folder / OPTIMIZER)
    return str(target)


def _is_its_folder(store: Store, checkpoint: Checkpoint, folder: Path) -> bool:
    """Return whether the checkpoint was saved from this folder, as after a restart of the job on the same disk."""
    path = folder / STATE
    saved = STATE in store.attachments(checkpoint)
    return saved and path.is_file() and path.read_bytes() == store.read_attachment(checkpoint, STATE)


def _read(store: Store, stored: StoredTraining, name: str, names: list[str]) -> dict[str, torch.Tensor]:
    """Read the tensors of one file in file order."""
    prefix = "model" if _MODEL.fullmatch(name) else f"{HOME}.tensors.{name}"
    tensors = dict(zip(names, stored.empty_tensors(f"{prefix}.{key}" for key in names), strict=True))
    whole = {"model": tensors} if prefix == "model" else {HOME: {"tensors": {name: tensors}}}
    store.load(whole, stored.checkpoint, no_dist=True, unread="ignore")
    return tensors


def _is_of(name: str, rank: int) -> bool:
    """Return whether ``name`` is the file with the random state of ``rank``.

    Other ranks may still be writing their states, perhaps elsewhere.
    """
    found = RNG.fullmatch(name)
    return found is not None and int((found[1] or "_0")[1:]) == rank


def _attachments(folder: Path) -> dict[str, bytes]:
    """Return all other files by name. Raises NotFound, and InvalidInput if a file is too large."""
    if not folder.is_dir():
        raise NotFound(
            f"{folder} does not exist: either the trainer removed it, or it writes elsewhere (in a hyperparameter "
            "search?)"
        )
    attachments = {}
    for name, path in files_below(folder):
        if name.endswith(_SAFETENSORS) or name == OPTIMIZER or RNG.fullmatch(name):
            continue
        if path.stat().st_size > _MAX_FILE:
            raise InvalidInput(
                f"{path} is larger than {_MAX_FILE >> 20} MiB and is not a safetensors file; keep it elsewhere"
            )
        attachments[name] = path.read_bytes()
    return attachments


def _adapter_names(folder: Path) -> dict[str, bytes]:
    """Return the attachment that allows an export of the folder's adapters under their original file names."""
    stems = [name.removesuffix(_SAFETENSORS) for name, _ in files_below(folder) if name.endswith(_SAFETENSORS)]
    adapters = [stem for stem in stems if stem.rpartition("/")[2] == ADAPTER_STEM]
    return hub_names({stem: {"strip_prefix": f"{HOME}.tensors.{stem}{_SAFETENSORS}"} for stem in adapters})


def _refuse_foreign(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name.startswith(_FOREIGN):
            raise Unsupported(
                f"{path} is from FSDP or DeepSpeed, or is a pickled model, which is not supported; {_USE_ANOTHER}"
            )


def path_within(folder: Path, name: str) -> Path:
    """Return the path of an attachment in ``folder``, and create its parent folder."""
    path = folder / check_attachment_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
