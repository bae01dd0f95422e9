"""Handles modules, optimizers and other objects with a state_dict as values in the state of a save or load.

A module in a higher layer converts them, because the conversion needs parameter names. `casckpt` sets `home` to that
module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from casckpt.ranks.ranks import Ranks
    from casckpt.repository.repository import Repository
    from casckpt.saving.options import SaveOptions
    from casckpt.saving.saver import Saver, State

log = logging.getLogger("casckpt")

_BARE = (
    "%r was filled, but it is a state_dict: no optimizer changes until you pass it to load_state_dict. Keep the "
    "state in a variable, and call optim.load_state_dict(state[%r]) after the load. Or save the optimizer itself "
    'with its module, as in store.save({"model": model, "%s": optim}, step=step), and load it the same way'
)

home: Callable[[], Any]
"""A function that imports and returns the module that converts objects. The `casckpt` module sets it on import."""


def without_objects(ranks: Ranks, state: State, options: SaveOptions) -> tuple[State, SaveOptions]:
    """Return a save's arguments with each object replaced by its state. Every rank must make the call."""
    import torch

    from casckpt.tensors.state import holds_object

    is_made = callable(state) and not isinstance(state, Mapping | torch.nn.Module)  # a model is callable too
    if not is_made and not holds_object(state):
        return state, options
    plain: tuple[State, SaveOptions] = home().save_objects(ranks, state, options)  # noqa: F821 - see above
    return plain


def saver_of(repository: Repository) -> Saver:
    """Return a new saver for a store, which converts the objects in a state."""
    from casckpt.saving.saver import Saver

    return Saver(repository, without_objects)


def log_bare_optimizers(state: Any, missing: Sequence[str]) -> None:
    """Log each optimizer state_dict in ``state``, because filling it does not change any optimizer.

    The message is no warning, because a caller who passes the dict to an optimizer afterwards does nothing wrong.
    """
    for name in state.keys() if isinstance(state, Mapping) else ():
        if is_of_optimizer(state[name]) and f"{name}.param_groups" not in missing:
            log.info(_BARE, name, name, name)


def is_of_optimizer(value: Any) -> bool:
    """Return whether ``value`` is an optimizer state_dict with numbered parameters in its groups."""
    groups = value.get("param_groups") if isinstance(value, Mapping) else None
    first = groups[0] if isinstance(groups, list) and groups else None
    return isinstance(first, Mapping) and any(type(one) is int for one in first.get("params", ()))
