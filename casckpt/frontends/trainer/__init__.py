"""Checkpoints for a training loop: when and what to save, retention, and resume.

::

    checkpointer = Checkpointer(store, run="sft", save_interval=500, max_checkpoints=3)
    train = TrainState(scheduler=scheduler, loader=loader)          # with the random generators of this rank
    last = checkpointer.resume(model, optim, train)                 # None: there is no checkpoint yet
    for step in range(last.step + 1 if last else 1, 10_001):
        ...
        checkpointer.save_if_due(step, model, optim, train)         # in the background
    checkpointer.close()

A checkpoint holds the model and the optimizer, with the names that `casckpt.frontends.training_state` uses. It also
holds each rank's train state as ``train.<rank>``.
"""

from __future__ import annotations

from casckpt.frontends.trainer.checkpointer import Checkpointer, CheckpointerConfig
from casckpt.frontends.trainer.last_save import SaveOnSignal
from casckpt.frontends.trainer.resumed import Resumed
from casckpt.frontends.trainer.saves import CheckpointEvent, SaveSummary
from casckpt.frontends.training_state.train_state import TrainState, restore_rng, rng_state

__all__ = [
    "CheckpointEvent",
    "Checkpointer",
    "CheckpointerConfig",
    "Resumed",
    "SaveOnSignal",
    "SaveSummary",
    "TrainState",
    "restore_rng",
    "rng_state",
]
