"""The result of a resume: the restored parts, and the skipped parts with the reasons."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from casckpt.base.groups import grouped
from casckpt.base.text import listed
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput
from casckpt.frontends.training_state.contents import TRAIN, LoadRequest, Missing
from casckpt.frontends.training_state.proof import NOT_THERE, Proof
from casckpt.frontends.training_state.settings import RECIPE, Replaced, replacing, schedules_in, settings_of, shown
from casckpt.frontends.training_state.stored import GROUPS, OPTIM
from casckpt.frontends.training_state.train_state import (
    RNG,
    TrainState,
    as_parts,
    check_apart,
    check_fillable,
    fill,
    noted,
)
from casckpt.ranks.ranks import everyone

log = logging.getLogger("casckpt")

_NOT_HERE = "only in the checkpoint, not read"
_NOT_GIVEN = 'in the checkpoint, but not passed to resume; to ignore this, pass unread="ignore"'
_NO_OPTIMIZER = "the checkpoint has no optimizer that can be loaded: the given optimizer is left unchanged"
_NO_TRAIN = "the checkpoint has no train state: the given train state is left unchanged"
_RESIZED = (
    "different shape in the checkpoint, left unchanged; to keep the saved values, load into the old size, then resize, "
    "and create the optimizer after that"
)
_KEPT = 'options="keep": all options are left unchanged; schedulers set the learning rate to their position'
_GOES_ON = 'options="keep": the given schedule continues at the saved position'
_EMPTY = "its saved state is empty, left unchanged"
_IN_LIST = re.compile(r"\.\d+(?=\.|$)")  # a list of plain states is stored as one value
_OF_OPTIM = 'options="keep" keeps what was given, and refuses if a scheduler of the train state cannot continue'
_OF_TRAIN = f"to use what was given, set it again after the resume; for a schedule, see {RECIPE}"


@dataclass(frozen=True)
class Resumed:
    """The result of `Checkpointer.resume`. The log shows its string form.

    ``checkpoint``: the loaded checkpoint. ``restored``: which of "model", "optim" and "train" were restored,
    completely or in part. ``left``: why parts were not restored or not read, by flat key ("optim.state.head.bias",
    "train.scheduler"). ``replaced``: the settings that differ from the checkpoint's, as (given, saved) by key
    ("train.scheduler.T_max", "optim.param_groups.0.lr"; "initial_lr" if a scheduler changes the rate). ``proof``: the
    result of ``prove=True``.
    """

    checkpoint: Checkpoint
    restored: tuple[str, ...]
    left: Mapping[str, str]
    replaced: Replaced
    proof: Proof | None = None

    def __str__(self) -> str:
        return "\n  ".join([self._loaded, *self._settings.values()])

    @property
    def _loaded(self) -> str:
        saved = self.checkpoint
        left = [f"left: {listed(keys)} ({why})" for why, keys in grouped(self.left, self.left.__getitem__).items()]
        return "\n  ".join(
            [f"resumed {', '.join(self.restored)} from {saved.run}@{saved.step} of {saved.repo.storage.url}", *left]
        )

    @property
    def _settings(self) -> dict[str, str]:
        """What is said about the replaced settings, by the key of their object."""
        by_object = grouped(self.replaced, lambda key: key.rpartition(".")[0])
        return {
            at: f"replaced: {at!r} ({shown({key: self.replaced[key] for key in keys})}; "
            f"{_OF_TRAIN if at.startswith(TRAIN) else _OF_OPTIM})"
            for at, keys in by_object.items()
        }

    def log(self, train_state: Any = None) -> None:
        """Log the result, and what was replaced in each object. ``train_state``: the given train state.

        A message is a warning if parts were skipped that the caller wanted, or if the settings or the initial rate of
        a scheduler were replaced. Other replaced settings do not cause a warning, because some loops set them in each
        step.
        """
        log.log(
            logging.WARNING if {*self.left.values()} - {_KEPT, _GOES_ON, _EMPTY} else logging.INFO, "%s", self._loaded
        )
        schedules = tuple(f"{at}." for at, _, _ in schedules_in(train_state))
        for at, text in self._settings.items():
            is_odd = f"{at}.initial_lr" in self.replaced or f"{at}.".startswith(schedules)
            log.log(logging.WARNING if is_odd else logging.INFO, "%s", text)


def excuses(loaded: Checkpoint, given: Collection[str], wanted: LoadRequest) -> dict[str, str]:
    """Return why live values may differ from the checkpoint, by key or by the beginning of keys.

    ``given``: the keys of the live state.
    """
    kept = dict.fromkeys((f"{name}.param_groups" for name in given), _KEPT) if wanted.options == "keep" else {}
    unread = dict.fromkeys((*loaded.unread_subtrees, *loaded.unread_keys), _NOT_HERE)
    unread |= {name: _NOT_GIVEN for name in (OPTIM, TRAIN) if name not in given}
    left = _left_by(loaded, given)
    return kept | unread | left | {key.partition(".")[0]: why for key, why in left.items() if why == _NO_OPTIMIZER}


def _left_by(loaded: Checkpoint, given: Collection[str]) -> dict[str, str]:
    """Return why a load left keys of the live state unchanged."""
    left = dict.fromkeys(loaded.missing_keys, NOT_THERE) | dict.fromkeys(loaded.mismatched_keys, _RESIZED)
    return left | {key: _NO_OPTIMIZER for key in (f"{name}.param_groups" for name in given) if key in left}


Outcome: TypeAlias = tuple[tuple[str, ...], dict[str, str], dict[str, tuple[Any, Any]]]
"""The values of ``restored``, ``left`` and ``replaced`` in `Resumed`, on one rank or on all ranks."""


def of_all_ranks(found: Sequence[Outcome]) -> Sequence[Outcome]:
    """Return the outcome of all ranks: given keys that any rank skipped, and saved keys that all ranks skipped."""
    everywhere = set(found[0][1]).intersection(*(left for _, left, _ in found))
    left = {k: why for _, mine, _ in found for k, why in mine.items() if why != _NOT_HERE or k in everywhere}
    restored = tuple(dict.fromkeys(name for names, _, _ in found for name in names))
    return everyone((restored, left, {k: v for _, _, replaced in found for k, v in replaced.items()}), len(found))


def check_given(train_state: Any, missing: Any, *optimized: Any) -> dict[str, Any]:
    """Check the arguments of a resume. Raises InvalidInput if the train state or ``missing`` is invalid.

    ``optimized``: the model and the optimizer. Return the result of `settings_of` for them.
    """
    if missing not in get_args(Missing):
        raise InvalidInput(f'missing={missing!r:.80} is not valid; pass "raise" or "warn"')
    check_fillable(train_state)
    return settings_of(*optimized, train_state=train_state)


def outcome_of(
    loaded: Checkpoint,
    given: Collection[str],
    wanted: LoadRequest,
    state: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    *optimized: Any,
) -> Outcome:
    """Set the train state to ``state``, unless it is None. Return the outcome of the load on this rank.

    ``given``: the keys of the template. ``optimized``: the model and the optimizer. ``settings``: the result of
    `settings_of` for them before the load. Raises the errors of the train state's ``load_state_dict``.
    """
    left, replaced = _left_by(loaded, given), dict[str, tuple[Any, Any]]()
    absent = [name for name in given if f"{name}.param_groups" in left]
    restored = [name for name in given if name not in (TRAIN, *absent, *loaded.unread_subtrees)]
    if OPTIM in restored and wanted.options == "keep":
        left[GROUPS] = _KEPT
    if wanted.given["unread"] == "warn":
        inside = tuple(f"{key}." for key in (*loaded.unread_subtrees, *({TRAIN} & {*given})))
        unread = (key for key in (*loaded.unread_subtrees, *loaded.unread_keys) if not key.startswith(inside))
        not_given = {OPTIM, TRAIN}.difference(given)
        left |= {key: _NOT_GIVEN if key in not_given else _NOT_HERE for key in unread if key not in left}
    if wanted.train_state is not None and state is None:
        left[TRAIN] = _NO_TRAIN
    elif state is not None:
        with noted(f"loaded by then: {listed(restored)}"):
            replaced |= _set(wanted.train_state, state, wanted, left, optimized[0])
        restored.append(TRAIN)
    for key, value in settings_of(*optimized, train_state=wanted.train_state).items():
        before = settings.get(key, settings.get(key.replace(".initial_lr", ".lr"), value))
        if before != value:
            replaced[key] = (before, value)
    return tuple(restored), left, replaced


def set_loaded(wanted: LoadRequest, state: Mapping[str, Any], model: Any) -> Outcome:
    """Set the train state of a load to ``state``. Return the outcome on this rank, for the train state alone."""
    left = dict[str, str]()
    with noted("loaded by then: the model and the optimizer"):
        return (TRAIN,), left, dict(_set(wanted.train_state, state, wanted, left, model))


def _set(train_state: Any, state: Mapping[str, Any], wanted: LoadRequest, left: dict[str, str], model: Any) -> Replaced:
    """Set a train state. Return the settings that this replaces. ``left`` receives why parts were skipped or changed.

    A dict is filled in place. It also receives the parts that only the checkpoint has.
    """
    check_apart(train_state, state, model, TRAIN)
    parts = as_parts(train_state)
    with replacing(train_state, state, keeps=wanted.options == "keep") as (replaced, kept, empty):
        if parts is None:
            fill(train_state, state, TRAIN)
        else:
            left |= {f"{TRAIN}.{name}": why for name, why in _set_parts(parts, train_state, state, wanted).items()}
    for why, keys in ((_GOES_ON, kept), (_EMPTY, empty)):
        left |= dict.fromkeys((_IN_LIST.split(key)[0] for key in keys), why)
    return replaced


def _set_parts(parts: TrainState, train_state: Any, state: Mapping[str, Any], wanted: LoadRequest) -> dict[str, str]:
    """Set the parts of a train state. Return a reason for each skipped part."""
    left = dict.fromkeys(parts.set_parts(state, strict=wanted.missing != "warn"), NOT_THERE)
    beside = [name for name in state if name not in parts]
    if parts is not train_state:
        train_state.update({name: state[name] for name in beside})
    elif wanted.given["unread"] == "warn":
        left |= dict.fromkeys((name for name in beside if name != RNG), _NOT_HERE)
    return left
