"""Decides what a training may do with a run: continue it, save a step again, and remove which of its checkpoints.

A run belongs to the program that continues it. If a program has not resumed or loaded a checkpoint of a run, for
example because somebody forgot a line, its saves and its retention must not remove what the run holds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Unpack

from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, Conflict, Mismatch, MissingKey
from casckpt.frontends.trainer.run_checkpoints import newest
from casckpt.frontends.training_state.contents import TRAIN
from casckpt.frontends.training_state.proof import prove
from casckpt.plan.retention import Rotation
from casckpt.store.store import Store
from casckpt.store.types import LoadArguments, loaded_here, saved_here

log = logging.getLogger(__name__)


class RunOwnership:
    """What a `Checkpointer` has saved and loaded of its run. Only the one on rank 0 is complete.

    ``rotation``: its retention rules. ``to_resume``: the call that resumes, for messages.
    ``removable``: the ids of the checkpoints that retention may remove: those that this object saved, or that were
    visible when it loaded one. ``went_back_to``: the id of the checkpoint that it loaded, if the run had a newer one
    and it has not saved since. ``replaces_unhealthy``: whether it skipped unhealthy checkpoints in its last `resume`,
    and so may replace them. ``is_over``: whether the training has ended, so that what it loads continues nothing.
    """

    def __init__(self, store: Store, run: str, rotation: Rotation) -> None:
        self.to_resume = "resume()"
        self.is_decided = self._continues = self.replaces_unhealthy = self.is_over = False
        self.removable, self.went_back_to = set[str](), set[str]()
        self._store, self._run, self._rotation = store, run, rotation
        self._saved, self._abandoned = set[str](), set[str]()
        self._loaded: str | None = None
        self._rest = ""  # "..": what it went back from goes on after the step that it reaches

    def reset(self) -> None:
        """Decide anew, because this object begins another training."""
        self.is_decided = self._continues = self.is_over = False

    def begin_again(self) -> None:
        """Let the training replace what this object has saved so far."""
        self._abandoned |= self._saved

    def note_save(self, saved: Checkpoint) -> None:
        """Note that this object has saved a checkpoint."""
        self._continues = True
        self.went_back_to.clear()
        self._saved.add(saved.id)
        self.removable.add(saved.id)

    def has_saved(self, id: str) -> bool:
        """Return whether this object has saved the checkpoint ``id``."""
        return id in self._saved

    def warn_if_idle(self) -> None:
        """Warn if this object only resumed what another one of this program has saved."""
        if self._loaded in saved_here and not self._saved:
            log.warning(
                "run %s of %s was resumed by the program that saved it, and then saved nothing. If this was another "
                "training, such as the next fold or trial, use a different run for each", self._run, self._store.url,
            )  # fmt: skip

    def may_replace(self, saved: Checkpoint) -> bool:
        """Return whether the training replaces ``saved``: it began again, or resumed from a healthy checkpoint."""
        return saved.id in self._abandoned or (self.replaces_unhealthy and saved.healthy is False)

    def note_load(self, loaded: Checkpoint, *, overwrites: bool) -> None:
        """Note that this object has loaded a checkpoint. Warn if its run has later steps, which saves may replace."""
        run = self._run
        last = newest(self._store, run)
        is_last = last is None or last.id == loaded.id
        visible = [] if is_last and self._rotation.changes_nothing else self._store.checkpoints(self._run)
        if loaded.run == run:
            self._loaded, self._continues = loaded.id, True
            self.removable.update(one.id for one in visible)
            self.went_back_to = set() if is_last else {loaded.id}
        later = [one.step for one in visible if one.step > loaded.step and not self.may_replace(one)]
        if last is not None and not is_last and later and not self.is_over:
            self._rest = ".."
            log.warning(
                "%s@%d was loaded, but run %s already has later steps (%d, up to %d). %s@latest stays step %d until "
                "this program saves, and a save of a step that exists %s. To go on from here, use a different run, or "
                "forget the later steps first: `casckpt forget %s %s@%d..%d`", loaded.run, loaded.step, run,
                len(later), max(later), run, last.step, "replaces it" if overwrites else "raises Conflict",
                self._store.url, run, min(later), max(later),
            )  # fmt: skip

    def was_loaded_here(self) -> bool:
        """Return whether this process has read tensors of the run, in any way."""
        with suppress(CasckptError):  # no store
            stores = [store for store, run in tuple(loaded_here) if run == self._run]
            return bool(stores) and self._store.marker.store_id in stores
        return False

    def decide(self, step: int, *, was_loaded: bool, overwrites: bool) -> None:
        """Decide once whether this object may save ``step`` and later ones. ``was_loaded``: by any rank's process.

        Raises Conflict if the run has this step or a later one that none of these programs has loaded. ``overwrites``:
        whether the user allows that.
        """
        found = [] if self._continues or newest(self._store, self._run) is None else self._store.checkpoints(self._run)
        foreign = [one for one in found if one.id not in saved_here]
        is_later = all(step > one.step for one in found)
        was_loaded = was_loaded and bool(foreign)  # a program may also load what it has saved to evaluate it
        if not (was_loaded or is_later or overwrites):
            last = max(found, key=lambda one: one.step)
            raise Conflict(
                f"run {self._run!r} of {self._store.url} already has {_counted(found)}, up to "
                f"{_about(last)}, and this training has loaded none. To continue the run, call {self.to_resume} first. "
                "Otherwise, use a different run",
                checkpoints=tuple(one.id for one in found),
            )
        if foreign and not was_loaded:
            log.warning(
                "run %s of %s already has %s, the newest is %s. This training has not loaded it, and saves step %d to "
                "the same run. If it does not continue that training, use a different run%s", self._run,
                self._store.url, _counted(found), _about(found[-1]), step, self._spared(),
            )  # fmt: skip
        elif found and self._spared():
            log.info("run %s has %s from before%s", self._run, _counted(found), self._spared())
        self.is_decided = True

    def find(self, step: int) -> Checkpoint | None:
        """Return the checkpoint of ``step``, if this object has loaded or saved it, or may replace it; else None.

        Raises Conflict for any other checkpoint.
        """
        try:
            found = self._store.get(f"{self._run}@{step}")
        except CasckptError:  # not found; the save raises any other error
            return None
        if found.id != self._loaded and found.id not in self._saved and not self.may_replace(found):
            raise Conflict(
                f"{_about(found)} already exists, and this training has not loaded it. If another job may be saving to "
                "this run, use a different run. Otherwise, forget it first: "
                f"`casckpt forget {self._store.url} {self._run}@{step}{self._rest}`",
                checkpoints=(found.id,),
            )
        return found

    def _spared(self) -> str:
        return "" if self._rotation.changes_nothing else ". Retention leaves them alone until a program resumes the run"


def _counted(found: Sequence[Checkpoint]) -> str:
    return f"{len(found)} checkpoint{'s' * (len(found) > 1)}"


def _about(checkpoint: Checkpoint) -> str:
    """Describe a checkpoint: its step, and who saved it when."""
    who = "this program" if checkpoint.id in saved_here else "another program"
    return f"{checkpoint.run}@{checkpoint.step} (saved by {who} at {checkpoint.created_at:%Y-%m-%d %H:%M} UTC)"


def differing_keys(
    store: Store, saved: Checkpoint, state: Mapping[str, Any], model: Any, **given: Unpack[LoadArguments]
) -> tuple[list[str], list[str]]:
    """Return the keys of models and optimizers that differ from ``saved``, and of what does not count.

    The train state and the options of groups, such as the learning rate, do not count: loops set them anew. Every rank
    makes the call with the state that it would save. ``given``: the arguments of the load of ``saved``.
    Raises the errors of `Store.compare`.
    """
    try:
        proof = prove(store, saved, state, model, excused={TRAIN: "may differ"}, as_stored=True, **given)
    except (Mismatch, MissingKey) as error:  # for example, because it was thinned
        return list(error.keys) or ["model"], []
    differing = sorted(proof.unproved)
    changed = [key for key in differing if "missing" not in proof.unproved[key]]
    minor = [key for key in changed if key.endswith(".param_groups")]
    minor += [key for key in differing if f"{key}.".startswith(f"{TRAIN}.")]
    return [key for key in differing if key not in minor], minor
