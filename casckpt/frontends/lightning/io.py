"""`CasCheckpointIO`: an implementation of Lightning's CheckpointIO that saves to a store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from casckpt.base.exit_status import ReportedFuture, futures
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, InvalidInput
from casckpt.frontends.interchange.new_files import new_file
from casckpt.frontends.lightning.files import AnyPath, Pointer, RunFiles
from casckpt.frontends.stores import AnyStore, as_store, check_foreign
from casckpt.frontends.trainer.space import space_of
from casckpt.frontends.training_state.proof import Proof, prove
from casckpt.frontends.training_state.settings import RECIPE, replaced_in, shown
from casckpt.ranks.ranks import on_each, open_ranks
from casckpt.store.types import Compress, ReadArguments, SaveArguments
from casckpt.tensors.values import OfObjects

log = logging.getLogger(__name__)

WEIGHTS, REST = "model", "lightning"


class CasCheckpointIO(CheckpointIO):
    """A plug-in for ``Trainer(plugins=[...])`` and ``Fabric(plugins=[...])``.

    The step is Lightning's global step. If a step has a second file (such as ``last.ckpt`` next to one of the best),
    that file becomes a checkpoint of the run ``<run>/<file name>``, which takes no extra space.

    ``async_save``: save in the background, one at a time. A removal waits for the save, so that ``save_top_k`` is
    respected. Errors are logged, and raised at the end of a fit. Before and after a fit, a Trainer saves in the
    foreground. A Fabric has no end, so the error of its last save is reported when the program ends. Do not wrap this
    plug-in in Lightning's own AsyncCheckpointIO.
    ``gc``: run a gc after a removal, and when a save meets a full disk. ``min_free``: as for `Checkpointer`.
    ``allow_pickle``: for hyperparameters and callback states that are not plain data.
    ``compress``, ``health``: as for `Store.save`.
    """

    def __init__(
        self,
        store: AnyStore,
        *,
        run: str,
        async_save: bool = False,
        gc: bool = False,
        min_free: str | int | None = None,
        allow_pickle: bool = False,
        threads: int | None = None,
        compress: Compress | None = None,
        health: bool = False,
    ) -> None:
        self.store = as_store(store)
        self._run_files = RunFiles(self.store, run, gc=gc)
        self._async = async_save
        self._reads: ReadArguments = {"allow_pickle": allow_pickle, "threads": threads}
        self._saves: SaveArguments = {
            "no_dist": True, "allow_pickle": allow_pickle, "threads": threads, "compress": compress, "health": health,
            "space": space_of(self.store, run, gc=gc, min_free=min_free),
        }  # fmt: skip
        self._torch_io = TorchCheckpointIO()
        self._loaded: Checkpoint | None = None
        self._is_checked = False
        self._waiting: list[ReportedFuture[Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_waiting": []}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: AnyPath, storage_options: Any = None) -> None:
        """Save a Lightning checkpoint, and write to ``path`` a file that names it. Rank 0 makes the call."""
        if storage_options is not None:
            raise TypeError("save_checkpoint does not accept storage_options; pass them to casckpt.open instead")
        self._settle()
        pointer = Pointer(path)
        before = pointer.read()
        state, step = to_state(checkpoint), self._step_of(checkpoint)
        run, overwrite = self._run_files.place(pointer, step)
        options = self._options(checkpoint)
        options["overwrite"] = overwrite
        try:
            if not self._async or not is_training(checkpoint):
                self._run_files.saved(pointer, before, self.store.save(state, run=run, step=step, **options))
                return
            saving = self.store.save_async(state, run=run, step=step, **options)
        except InvalidInput as error:
            if not self._is_checked and "global_step" in checkpoint:  # saved by a Trainer, which has callbacks
                error.add_note("Trainer(callbacks=[CasCheckpointCheck(), ...]) raises this before the first batch")
            raise
        if before is None:
            pointer.write({"run": run, "step": step})  # reserves the name
        self._later(lambda: self._finish(pointer, before, saving), after=saving)

    def check(self, checkpoint: dict[str, Any]) -> None:
        """Raise the errors that `save_checkpoint` would raise before it writes anything. Rank 0 makes the call."""
        self._is_checked = True
        self.store.check(to_state(checkpoint), run=self._run_files.run, **self._options(checkpoint))

    def _options(self, checkpoint: Mapping[str, Any]) -> SaveArguments:
        lineage = None if self._loaded is None else self._loaded.child_lineage
        return {**self._saves, "metrics": monitored(checkpoint), "lineage": lineage}

    def prove(self, checkpoint: Mapping[str, Any], model: Any, excused: Mapping[str, str]) -> Proof | None:
        """Compare the state that Lightning would save now with the checkpoint that was loaded. Rank 0 makes the call.

        ``excused``: why values may differ, by the beginning of their keys. Returns None, and logs a warning, if
        Lightning wrote the loaded file itself. Raises Mismatch, which names the keys, if anything else differs.
        """
        if self._loaded is None:
            log.warning("the resume is not proved, because Lightning wrote the file itself, and it is not in a store")
            return None
        state = to_state(checkpoint)
        return prove(self.store, self._loaded, state, model, excused=excused, no_dist=True, **self._reads)

    def load_checkpoint(
        self, path: AnyPath, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint that the file at ``path`` names, or read the file if Lightning itself wrote it.

        ``path`` may also be a reference to a checkpoint in the store. ``weights_only`` applies only to files that
        Lightning wrote. Pickles in a store are not loaded unless ``allow_pickle`` was set. Every rank makes the call.
        Raises NotFound, which is a FileNotFoundError. Raises Unsigned for a file that Lightning wrote if the store was
        opened with ``require_signature``. First waits for the saves in the background of all plug-ins of this process.
        """
        self._settle()
        wait(tuple(futures))
        pointer = Pointer(path)
        if pointer.is_foreign():
            check_foreign(self.store, path)
            self._loaded = None
            more = {} if map_location is None else {"map_location": map_location}
            return self._torch_io.load_checkpoint(Path(path), weights_only=weights_only, **more)
        device = map_location if isinstance(map_location, str | torch.device) else "cpu"
        self._loaded = self.store.get(self._run_files.named(pointer))
        return from_state(self.store.read(self._loaded, device=device, **self._reads))

    def remove_checkpoint(self, path: AnyPath) -> None:
        """Remove the file, and forget the checkpoint if no other file names it."""
        if self._waiting:
            self._later(lambda: self._remove(Pointer(path)), after=self._waiting[-1])
        else:
            self._remove(Pointer(path))

    def teardown(self) -> None:
        """Wait for the saves and removals in the background.

        Raises the first of their errors unless it has already been logged. Others are reported when the program ends.
        """
        waiting, self._waiting = self._waiting, []
        wait(waiting)
        self._run_files.close()
        for one in waiting:
            one.result()

    # inside

    def _step_of(self, checkpoint: Mapping[str, Any]) -> int:
        """Return the global step of a Trainer. A Fabric does not have one, so return the next unused number."""
        if isinstance(checkpoint.get("global_step"), int):
            return int(checkpoint["global_step"])
        return max((one.step + 1 for one in self._run_files.checkpoints()), default=0)

    def _finish(self, pointer: Pointer, before: str | None, saving: Future[Checkpoint]) -> None:
        try:
            saved = saving.result()
        except CasckptError:
            if before is None:
                pointer.delete()
            raise
        self._run_files.saved(pointer, before, saved)

    def _remove(self, pointer: Pointer) -> None:
        if pointer.is_foreign():
            self._torch_io.remove_checkpoint(Path(pointer.path))
        else:
            self._run_files.remove(pointer)

    def _later(self, call: Callable[[], Any], *, after: Future[Any]) -> None:
        """Make a call in the thread of a save, once ``after`` is done."""
        self._waiting.append(ReportedFuture())
        self._waiting[-1].follow(after, call)

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        for error in filter(None, (one.exception() for one in waiting if not one.is_inherited)):
            log.error("a save or removal in the background failed: %s", error)


class CasCheckpointCheck(Callback):
    """A callback for ``Trainer(callbacks=[...])``. Use it with `CasCheckpointIO`, which Lightning calls only for saves.

    If a value cannot be saved, the callback raises InvalidInput on every rank: for the optimizer's state after the
    first step, and for all other values before the first batch. ``prove``: when a resumed training starts, compare
    rank 0's live state with the checkpoint, as `Checkpointer.resume` does; ``proof`` has the result. To include what
    other callbacks change when the training starts, put this callback last. If a resume replaces settings of
    schedulers, such as their length, the log names them.
    """

    def __init__(self, *, prove: bool = False) -> None:
        self._is_proving = prove
        self._saved: Any = ()
        self.proof: Proof | None = None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Note the saved schedulers."""
        self._saved = checkpoint.get("lr_schedulers", ())

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Log a warning if the checkpoint will replace settings of schedulers."""
        live = [config.scheduler for config in trainer.lr_scheduler_configs]
        replaced = replaced_in(live, self._saved, "lr_schedulers")
        if replaced and trainer.is_global_zero:
            log.warning("the checkpoint replaces settings of schedulers: %s. See %s", shown(replaced), RECIPE)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Check the state when the training starts."""
        self._begun: int | None = trainer.global_step
        self._check(trainer, pl_module if self._is_proving and trainer.ckpt_path else None)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        """Repeat the check after the optimizer's first step."""
        if self._begun is not None and trainer.global_step > self._begun:
            self._begun = None
            self._check(trainer)

    def _check(self, trainer: Trainer, proving: Any = None) -> None:
        """Check the state. If the model ``proving`` is given, also prove the resume."""
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        io = trainer.strategy.checkpoint_io
        if isinstance(io, CasCheckpointIO):
            on_each(open_ranks(), lambda: io.check(checkpoint) if trainer.is_global_zero else None)
            if proving is not None:
                why, is_first = may_differ(trainer, REST), trainer.is_global_zero
                self.proof = on_each(open_ranks(), lambda: io.prove(checkpoint, proving, why) if is_first else None)


def may_differ(trainer: Any, at: str) -> dict[str, str]:
    """Return why values of a resumed trainer may differ, by the beginning of their keys. ``at``: where they are."""
    loops = dict.fromkeys((f"{at}.loops", f"{at}.epoch"), "counted on by Lightning's loops when they continue")
    own = [one.state_key for one in trainer.callbacks if isinstance(one, ModelCheckpoint | Timer)]
    return loops | {f"{at}.callbacks.{key}": "not restored completely by its callback" for key in own}


def to_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state to save for a Lightning checkpoint."""
    rest = dict(checkpoint)
    weights = rest.pop("state_dict", None)
    return OfObjects({REST: rest} if weights is None else {WEIGHTS: weights, REST: rest})


def is_training(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether a Trainer saves within an epoch, so that it later calls `teardown`; True for a Fabric."""
    try:
        epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
        return bool(epochs["ready"] > epochs["completed"])
    except (KeyError, TypeError):
        return True


def monitored(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the current values by which Lightning's callbacks choose checkpoints."""
    states = (one for one in (checkpoint.get("callbacks") or {}).values() if isinstance(one, Mapping))
    found = ((one.get("monitor"), one.get("current_score")) for one in states)
    return {name: score for name, score in found if isinstance(name, str) and score is not None}


def from_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Lightning checkpoint. If a different front end saved ``state``, it contains only the weights."""
    if REST not in state:
        return {"state_dict": dict(state.get(WEIGHTS, state))}
    found = dict(state[REST])
    return {**found, "state_dict": state[WEIGHTS]} if WEIGHTS in state else found


def restore_checkpoint(
    store: AnyStore, ref: str | Checkpoint, path: AnyPath, *, force: bool = False, allow_pickle: bool = False
) -> Path:
    """Write a checkpoint as a Lightning file, for code that reads such files directly.

    ``force``: replace an existing file. ``allow_pickle``: as for `Store.read`. Raises NotFound, Conflict and Refused.
    """
    checkpoint = from_state(as_store(store).read(ref, allow_pickle=allow_pickle))
    target = Path(path)
    with new_file(target, force=force) as temporary:
        torch.save(checkpoint, temporary)
    return target
