"""Modules, optimizers and other objects with a state_dict, as values in the state of a save or load.

A higher layer converts them, because it needs the names of parameters. `casckpt` sets `home` to that module.
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
"""Imports and returns the module that converts objects. Set when `casckpt` is imported."""


def without_objects(ranks: Ranks, state: State, options: SaveOptions) -> tuple[State, SaveOptions]:
    """Return the arguments of a save with each object replaced by its state. Every rank makes the call."""
    import torch

    from casckpt.tensors.state import holds_object

    is_made = callable(state) and not isinstance(state, Mapping | torch.nn.Module)  # a model is callable too
    if not is_made and not holds_object(state):
        return state, options
    plain: tuple[State, SaveOptions] = home().save_objects(ranks, state, options)  # noqa: F821 - see above
    return plain


def _references(state: object, **_: object) -> int:
    return sys.getrefcount(state)


_DICT: dict[str, dict[str, Any]] = {"inside": {}}
UNHELD, _UNHELD_INSIDE = _references({}), sys.getrefcount(_DICT["inside"])
"""The reference counts of an argument that is a dict, and of a dict inside it, if no other code refers to them."""


def log_bare_optimizers(state: Any, missing: Sequence[str], *, is_held: bool) -> None:
    """Log each state_dict of an optimizer in ``state``, because filling it changes no optimizer.

    Logs a warning if the caller holds neither the dict nor the state (``is_held``), and so cannot load it.
    """
    for name in state if isinstance(state, Mapping) else ():
        if is_of_optimizer(state[name]) and f"{name}.param_groups" not in missing:
            is_lost = not is_held and sys.getrefcount(state[name]) <= _UNHELD_INSIDE
            log.log(logging.WARNING if is_lost else logging.INFO, _BARE, name, name, name)


def is_of_optimizer(value: Any) -> bool:
    """Return whether ``value`` is the state_dict of an optimizer, with numbered parameters in its groups."""
    groups = value.get("param_groups") if isinstance(value, Mapping) else None
    first = groups[0] if isinstance(groups, list) and groups else None
    return isinstance(first, Mapping) and any(type(one) is int for one in first.get("params", ()))
