"""Compares a state with the checkpoint of its step, to decide what a second save of the step means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import Mismatch, MissingKey
from casckpt.frontends.trainer.settings import StepArguments
from casckpt.frontends.training_state.contents import TRAIN
from casckpt.frontends.training_state.proof import prove
from casckpt.store.store import Store
from casckpt.store.types import LoadArguments


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


def unsaved_labels(store: Store, saved: Checkpoint, options: StepArguments) -> list[str]:
    """Return in which respects the options of a save say more than ``saved``, such as ["metrics", "health mark"]."""
    given: Mapping[str, Any] = options
    has = {"metrics": saved.metrics, "metadata": saved.metadata or {}, "attachments": store.attachments(saved)}
    named = {name: value.keys() for name, value in given.items() if isinstance(value, Mapping)}
    labels = [name for name, there in has.items() if named.get(name, set[str]()) - there.keys()]
    labels += ["health mark"] if given.get("healthy") not in (None, saved.healthy) else []
    return [*labels, "permanence"] if saved.ephemeral and not given.get("ephemeral") else labels
