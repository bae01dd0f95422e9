"""Whole objects in a saved or loaded state: modules, optimizers, and others with a state_dict.

Names of an optimizer's parameters come from the front ends, which lie above the store, so `casckpt` sets `home`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from casckpt.ranks.ranks import Ranks
    from casckpt.saving.options import SaveOptions
    from casckpt.saving.saver import State

log = logging.getLogger("casckpt")

_BARE = (
    "%r was filled, but is a state_dict: no optimizer changes until its load_state_dict is called with it. Keep the "
    "state in a variable, and call optim.load_state_dict(state[%r]) after the load; or save the optimizer itself "
    'beside its module, as in store.save({"model": model, "%s": optim}, step=step), and load it so'
)

home: Callable[[], Any]
"""Imports and returns the module that replaces objects by their state. `casckpt` sets it when it is imported."""


def without_objects(ranks: Ranks, state: State, options: SaveOptions) -> tuple[State, SaveOptions]:
    """Return the arguments of a save, with each object replaced by its state. Every rank makes the call."""
    import torch

    from casckpt.tensors.state import holds_object

    is_made = callable(state) and not isinstance(state, Mapping | torch.nn.Module)  # what a model does is its forward
    if not is_made and not holds_object(state):
        return state, options
    plain: tuple[State, SaveOptions] = home().save_objects(ranks, state, options)  # noqa: F821 - see above
    return plain


def _references(state: object, **_: object) -> int:
    return sys.getrefcount(state)


_DICT: dict[str, dict[str, Any]] = {"inside": {}}
UNHELD, _UNHELD_INSIDE = _references({}), sys.getrefcount(_DICT["inside"])
"""Reference counts of a dict, and of a dict in it, inside a function whose caller keeps no reference to it."""


def warn_unloaded_optimizers(state: Any, missing: Sequence[str], *, is_held: bool) -> None:
    """Log each state_dict of an optimizer in ``state``: filling it changes no optimizer.

    It is a warning, unless the caller still holds the dict or the state (``is_held``) and so may load it.
    """
    for name in state if isinstance(state, Mapping) else ():
        if is_of_optimizer(state[name]) and f"{name}.param_groups" not in missing:
            is_lost = not is_held and sys.getrefcount(state[name]) <= _UNHELD_INSIDE
            log.log(logging.WARNING if is_lost else logging.INFO, _BARE, name, name, name)


def is_of_optimizer(value: Any) -> bool:
    """Return whether it is the state_dict of an optimizer: its groups hold numbers of parameters."""
    groups = value.get("param_groups") if isinstance(value, Mapping) else None
    first = groups[0] if isinstance(groups, list) and groups else None
    return isinstance(first, Mapping) and any(type(one) is int for one in first.get("params", ()))
