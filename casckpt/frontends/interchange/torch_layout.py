"""The contents of a training script's one file, in the layout in which every front end saves and loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from casckpt.errors import Mismatch
from casckpt.frontends.interchange.optimizer_names import by_name, is_named, is_optimizer_state

MODELS = ("model", "state_dict", "model_state_dict", "model_state", "net", "network", "weights")
OPTIMIZERS = (
    "optimizer", "optim", "optimizer_states", "optimizer_state_dict", "optim_state_dict", "optimizer_state",
    "optimizers", "opt",
)  # fmt: skip
_LIGHTNING = "pytorch-lightning_version"
_WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class TorchState:
    """A state to save. ``notes``: what of it is not in the layout, and why."""

    state: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def laid_out(state: Mapping[str, Any], parameter_names: Sequence[str] | None = None) -> TorchState:
    """Weights under ``model``, optimizers as one under ``optim`` by the names of parameters, the rest as train state.

    Where the optimizer cannot be told by names, all stays as it is, and a note says why. A state without an optimizer
    stays as it is. Of a file of Lightning the rest is where `casckpt.frontends.lightning` looks for it.
    ``parameter_names``: of the optimizer's parameters, in order, where their shapes do not tell. Raises Mismatch if
    these do not fit.
    """
    if is_optimizer_state(state) and not is_named([state]):
        return TorchState(state, (_note("the optimizer", "there is no model beside it that could give names"),))
    name = next((name for name in OPTIMIZERS if name in state), "")
    home = next((home for home in MODELS if _is_model(state.get(home))), None)
    optimizers = _optimizers(state.get(name))
    as_it_is = state if home is None or _LIGHTNING not in state else _of_lightning(state, home)
    if not optimizers or is_named(optimizers):
        return TorchState(as_it_is)
    if home is None:
        return TorchState(state, (_note(repr(name), f"none of {', '.join(MODELS)} is a model's state_dict"),))
    model = state[home] if _LIGHTNING in state else _unwrapped(state[home])
    try:
        optim = by_name(optimizers, model, parameter_names)
    except Mismatch as error:
        if parameter_names is not None:
            raise
        return TorchState(as_it_is, (_note(repr(name), str(error), "Import again with parameter_names=, or load"),))
    if _LIGHTNING in state:
        return TorchState({**as_it_is, "optim": optim})
    rest = {key: value for key, value in state.items() if key not in (name, home)}
    return TorchState({"model": model, "optim": optim} | ({"train": {0: rest}} if rest else {}))


def _of_lightning(state: Mapping[str, Any], home: str) -> Mapping[str, Any]:
    """Where `casckpt.frontends.lightning` looks for it: all of the file, optimizers included, beside the weights."""
    return {"model": state[home], "lightning": {key: value for key, value in state.items() if key != home}}


def _note(what: str, why: str, advice: str = "Load") -> str:
    return (
        f"{what} counts its parameters, and is stored as it is, without their names ({why}): no resume will find "
        f"it. {advice} it with store.read and optim.load_state_dict"
    )


def _optimizers(value: Any) -> Sequence[Mapping[str, Any]]:
    """One, or several, if that is what it is."""
    found = [value] if is_optimizer_state(value) else value
    found = list(found.values()) if isinstance(found, Mapping) else found
    several = isinstance(found, list | tuple) and all(is_optimizer_state(one) for one in found)
    return list(found) if several else []


def _is_model(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(one, torch.Tensor) for one in value.values())


def _unwrapped(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state_dict under plain names: without what DistributedDataParallel and torch.compile put before all of them."""
    for prefix in _WRAPPERS * 2:
        if all(str(key).startswith(prefix) for key in model):
            model = {str(key).removeprefix(prefix): value for key, value in model.items()}
    return model
