"""A resume: it restores all that it is given, or says so."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from casckpt.base.groups import grouped
from casckpt.base.text import listed
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput
from casckpt.frontends.trainer.contents import OPTIM, TRAIN, Missing, Wanted
from casckpt.frontends.trainer.train_state import RNG, TrainState
from casckpt.frontends.training_state.stored import GROUPS
from casckpt.ranks.ranks import everyone

log = logging.getLogger("casckpt")

_NOT_THERE = "not in the checkpoint, stays as it is"
_NOT_HERE = "only in the checkpoint, not read"
_NOT_GIVEN = 'in the checkpoint, but not passed to resume; if that is meant, pass unread="ignore"'
_NO_OPTIMIZER = "the checkpoint holds no optimizer that can be loaded: the one that was given stays as it is"
_NO_TRAIN = "the checkpoint holds no train state: the one that was given stays as it is"
_RESIZED = (
    "of another shape in the checkpoint, stays as it is; to keep what was saved, load into the old size, then resize"
)
_KEPT = 'options="keep": the learning rate and all other options stay as they are'
_RATES = "set to the base rates of the checkpoint, from which its next step may compute the learning rate"


@dataclass(frozen=True)
class Resumed:
    """What `Checkpointer.resume` did. Its text is what the log shows.

    ``checkpoint``: what was loaded. ``restored``: which of "model", "optim" and "train", as a whole or in part.
    ``left``: what was not restored, or not read, and why, by flat key ("optim.state.head.bias", "train.scheduler").
    """

    checkpoint: Checkpoint
    restored: tuple[str, ...]
    left: Mapping[str, str]

    def __str__(self) -> str:
        by_reason = grouped(self.left, lambda key: self.left[key])
        saved = self.checkpoint
        head = f"resumed {', '.join(self.restored)} from {saved.run}@{saved.step} of {saved.repo.storage.url}"
        return "\n  ".join([head, *(f"left: {listed(keys)} ({why})" for why, keys in by_reason.items())])

    def log(self) -> None:
        """Log it, as a warning if anything was left that was not asked to be."""
        log.log(logging.WARNING if {*self.left.values()} - {_KEPT} else logging.INFO, "%s", self)


Outcome: TypeAlias = tuple[tuple[str, ...], dict[str, str]]
"""``restored`` and ``left`` of `Resumed`, on one rank or on all."""


def of_all_ranks(found: Sequence[Outcome]) -> Sequence[Outcome]:
    """What the ranks did together: what any of them has left, but of the checkpoint only what all have left."""
    everywhere = set(found[0][1]).intersection(*(left for _, left in found))
    left = {k: why for _, mine in found for k, why in mine.items() if why != _NOT_HERE or k in everywhere}
    restored = tuple(dict.fromkeys(name for names, _ in found for name in names))
    return everyone((restored, left), len(found))


def check_given(train_state: Any, missing: Any) -> None:
    """Raise InvalidInput for a train state that cannot be set, and for another ``missing``."""
    if missing not in get_args(Missing):
        raise InvalidInput(f'missing={missing!r:.80} is not usable; give "raise" or "warn"')
    if not isinstance(train_state, MutableMapping | None) and not hasattr(train_state, "load_state_dict"):
        kind = type(train_state).__name__
        raise InvalidInput(f"a {kind} cannot be set: give resume a TrainState or a dict, or take what load gives")


def outcome_of(
    loaded: Checkpoint, given: Collection[str], wanted: Wanted, train_state: Any, state: Mapping[str, Any] | None
) -> Outcome:
    """Set ``train_state``, if there is one, to the ``state`` that was loaded; say what this rank did with ``loaded``.

    ``given``: the keys of what it is to fill. Raises what ``load_state_dict`` of the train state raises.
    """
    left = dict.fromkeys(loaded.missing_keys, _NOT_THERE) | dict.fromkeys(loaded.mismatched_keys, _RESIZED)
    absent = [name for name in given if f"{name}.param_groups" in left]
    left |= {f"{name}.param_groups": _NO_OPTIMIZER for name in absent}
    restored = [name for name in given if name not in (TRAIN, *absent, *loaded.unread_subtrees)]
    if OPTIM in restored and wanted.options == "keep":
        left[GROUPS] = _KEPT
    if wanted.given.unread == "warn":
        inside = tuple(f"{key}." for key in (*loaded.unread_subtrees, *({TRAIN} & {*given})))
        unread = (key for key in (*loaded.unread_subtrees, *loaded.unread_keys) if not key.startswith(inside))
        not_given = {OPTIM, TRAIN}.difference(given)
        left |= {key: _NOT_GIVEN if key in not_given else _NOT_HERE for key in unread if key not in left}
    if train_state is not None and state is None:
        left[TRAIN] = _NO_TRAIN
    elif state is not None:
        restored.append(TRAIN)
        left |= {f"{TRAIN}.{name}": why for name, why in _set(train_state, state, wanted).items()}
    return tuple(restored), left


def _set(train_state: Any, state: Mapping[str, Any], wanted: Wanted) -> dict[str, str]:
    """Set a train state; its parts, and those of ``state``, that were left, or need a word, and why.

    A dict is filled in place, and gets what only the checkpoint has.
    """
    if not hasattr(train_state, "load_state_dict"):
        parts = TrainState(rng=False)
        parts.data = train_state
        left = {name: why for name, why in _set(parts, state, wanted).items() if name in train_state}
        train_state.update({name: value for name, value in state.items() if name not in train_state})
        return left
    if not isinstance(train_state, TrainState):
        train_state.load_state_dict(state)
        return {}
    left = dict.fromkeys(train_state.set_parts(state, strict=wanted.missing != "warn"), _NOT_THERE)
    if wanted.given.unread == "warn":
        left |= dict.fromkeys((name for name in state if name not in train_state and name != RNG), _NOT_HERE)
    if wanted.options == "keep":
        left |= {name: _RATES for name, part in train_state.items() if name in state and hasattr(part, "base_lrs")}
    return left
