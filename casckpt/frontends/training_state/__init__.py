"""Saves and loads a model and its optimizer as one checkpoint, by parameter name.

::

    save_model_and_optim_state("ckpts", model, optim, run="sft", step=100)
    load_model_and_optim_state("ckpts", "sft@latest", model, optim)       # in place; the optimizer may be new
    weights = unshard_model_state("ckpts", "sft@latest")                  # {name: tensor}, without a model

A checkpoint has the keys ``model.<name>``, ``optim.state.<name>.<what>`` and ``optim.param_groups``. The last is a
list of groups whose ``params`` are names. A plain name is a name in the model without its wrappers.

The package does not use torch's `get_state_dict` and `set_state_dict`. With a new optimizer, these functions run a
step, which increments its step count and decays weights. `Optimizer.load_state_dict` converts the state of a bfloat16
parameter to bfloat16.
"""

from __future__ import annotations

from casckpt.frontends.training_state.contents import load_model_and_optim_state, save_model_and_optim_state
from casckpt.frontends.training_state.hub_config import hub_files
from casckpt.frontends.training_state.optimizer import flatten_optimizer_state, unflatten_optimizer_state
from casckpt.frontends.training_state.unshard import unshard_model_state, unshard_optim_state

__all__ = [
    "flatten_optimizer_state",
    "hub_files",
    "load_model_and_optim_state",
    "save_model_and_optim_state",
    "unflatten_optimizer_state",
    "unshard_model_state",
    "unshard_optim_state",
]
