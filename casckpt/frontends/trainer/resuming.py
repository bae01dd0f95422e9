"""A resume: it restores all that it is given, or says so."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal, TypeAlias, get_args

from casckpt.checkpoint.loading.load_plan import Unread
from casckpt.errors import InvalidInput
from casckpt.frontends.trainer.contents import Wanted
from casckpt.frontends.trainer.train_state import TrainState

log = logging.getLogger("casckpt")

Missing: TypeAlias = Literal["raise", "warn"]


def is_to_be_set(train_state: Any, missing: Any) -> bool:
    """Look for a train state to set. Raises InvalidInput for one that cannot be, and for another ``missing``."""
    if missing not in get_args(Missing):
        raise InvalidInput(f'missing={missing!r:.80} is not usable; give "raise" or "warn"')
    if not isinstance(train_state, MutableMapping | None) and not hasattr(train_state, "load_state_dict"):
        kind = type(train_state).__name__
        raise InvalidInput(f"a {kind} cannot be set: give resume a TrainState or a dict, or take what load gives")
    return train_state is not None


def to_resume(
    optimizer: bool, train_state: bool, missing: Missing, unread: Unread, *, pre_download: bool, cast: bool
) -> Wanted:
    """What a resume asks for that is given an optimizer, or a train state. One that is not given is left unread."""
    demand = True if missing == "raise" else None
    return Wanted(
        optim=demand if optimizer else None,
        train=demand if train_state else None,
        pre_download=pre_download,
        unread=unread,
        cast=cast,
        is_train_state_set=train_state,
        whole=missing == "raise",
        lenient=missing == "warn",
    )


def set_train_state(train_state: Any, state: Mapping[str, Any] | None, where: str, missing: Missing) -> None:
    """Set ``train_state``, if there is one, to what was loaded. Raises what its load_state_dict raises.

    A dict is filled in place, and gets what only the checkpoint has.
    """
    if train_state is None:
        return
    if state is None:
        log.warning("%s holds no train state: the one that was given stays as it is", where)
    elif not hasattr(train_state, "load_state_dict"):
        parts = TrainState(rng=False)
        parts.data = train_state
        set_train_state(parts, {name: state[name] for name in state if name in train_state}, where, missing)
        train_state.update({name: value for name, value in state.items() if name not in train_state})
    elif missing == "warn" and isinstance(train_state, TrainState):
        left = train_state.load_state_dict(state, strict=False)
        if left:
            log.warning("the train state of %s has no %s: they stay as they are", where, ", ".join(map(repr, left)))
    else:
        train_state.load_state_dict(state)
