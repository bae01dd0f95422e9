"""Settings: the plain values that a program passes to constructors, and that a load replaces with the saved ones."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TypeAlias

import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from casckpt.errors import InvalidInput
from casckpt.format.tree import children
from casckpt.frontends.training_state.objects import is_optimizer
from casckpt.frontends.training_state.parts import AnyOptimizer, as_optimizers
from casckpt.frontends.training_state.stored import OPTIM
from casckpt.frontends.training_state.train_state import TrainState, plain_state
from casckpt.tensors.state import holds_object, is_object

Replaced: TypeAlias = Mapping[str, tuple[Any, Any]]
"""Settings that differ from the checkpoint's, as (given, saved) by flat key."""
Found: TypeAlias = tuple[str, Any, Any]
"""An object in a train state: its flat key, the object, and its saved state or None."""

_POSITIONS = frozenset(("last_epoch", "epoch", "step", "iteration", "params", "rank", "schedulers"))
"""Parameters of constructors that classes change while they run, or that are not settings."""
_DERIVED = {"OneCycleLR": ("_schedule_phases", "_anneal_func_type"), "CyclicLR": ("total_size", "step_ratio")}
"""What schedulers compute from parameters that they do not keep."""
_OF_GROUPS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""The options that schedulers add to a group and do not change."""
RECIPE = '"Train for longer, or with another schedule" in docs/resume.md'
_ODD = "(not plain data)"


def settings_of(model: Any, optim: AnyOptimizer | None, *, train_state: Any) -> dict[str, Any]:
    """Return the settings of the optimizers by key, such as "optim.param_groups.0.lr". Raises InvalidInput.

    They do not include what the schedulers in ``train_state`` change, but a scheduler's initial rate.
    """
    optims = {key: [one] for key, one in model.items() if is_optimizer(one)} if isinstance(model, Mapping) else {}
    scheduled, found = [one.optimizer for _, one, _ in schedules_in(train_state)], dict[str, Any]()
    for at, several in (optims | {OPTIM: as_optimizers(optim)} if optim is not None else optims).items():
        groups = [(getattr(one, "optimizer", one), group) for one in several for group in one.param_groups]
        for number, (one, group) in enumerate(groups):
            moved = {"betas", "momentum"} if "max_momentum" in group else set[str]()  # a scheduler cycles them
            if "initial_lr" in group or any(one is other for other in scheduled):
                moved.add("lr")
            for name in (_OF_GROUPS | {*one.defaults}) & group.keys() - moved:
                if (value := _plain(group[name])) != _ODD:
                    found[f"{at}.param_groups.{number}.{name}"] = value
    return found


def objects_in(value: Any, saved: Any = None, key: str = "train") -> Iterator[Found]:
    """Yield the objects in a train state, without Accelerate's wrappers of schedulers. ``saved``: its saved state."""
    if is_object(value) and not isinstance(value, TrainState):
        yield key, getattr(value, "scheduler", value), saved
    elif holds_object(value):
        there = {} if saved is None else dict(children(saved))
        for name, child in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from objects_in(child, there.get(name), f"{key}.{name}")


def schedules_in(train_state: Any, saved: Any = None) -> list[Found]:
    """Return the schedulers of `objects_in`, and other objects that set the rates of an optimizer."""
    return [(at, one, there) for at, one, there in objects_in(train_state, saved) if hasattr(one, "optimizer")]


def replaced_in(value: Any, saved: Any, key: str = "train", *, kept: Collection[str] = ()) -> Replaced:
    """Return the settings of the objects in a train state that differ from the saved ones, except those in ``kept``."""
    found = [(at, one, there) for at, one, there in objects_in(value, saved, key) if at not in kept]
    return {name: pair for at, one, there in found for name, pair in _differing(one, there, at).items()}


def _differing(one: Any, saved: Any, key: str, also: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the settings of an object, and of the schedulers in it, that differ from the saved ones.

    ``also``: a name that counts as a setting.
    """
    found, there = dict[str, tuple[Any, Any]](), saved if isinstance(saved, Mapping) else {}
    names = [name for name in there if name == also or _is_setting(type(one), name)]
    state = plain_state(one, key) if names else {}
    for name in (name for name in names if name in state):
        pair = _plain(state[name]), _plain(there[name])
        if pair[0] != pair[1] and _ODD not in pair:
            found[f"{key}.{name}"] = pair
    inner = zip(getattr(one, "_schedulers", ()), there.get("_schedulers", ()), strict=False)
    for number, pair in enumerate(inner):
        found |= _differing(*pair, f"{key}._schedulers.{number}", also)
    return found


def check_schedules(train_state: Any, saved: Any) -> None:
    """Raise InvalidInput if a scheduler has other settings than the saved one, and cannot continue with them.

    A SWALR, and two schedulers of one optimizer, cannot continue at all.
    """
    found = schedules_in(train_state, saved)
    optims = [one.optimizer for _, one, _ in found]
    for at, one, there in found:
        mine, is_alone = _differing(one, there, at, "base_lrs"), optims.count(one.optimizer) == 1
        if not is_alone or isinstance(one, SWALR) or (mine and not _is_function_of_position(one)):
            raise InvalidInput(
                f'options="keep" cannot continue {at!r}, a {type(one).__name__} whose position alone does not '
                f'determine the rate{": " * bool(mine)}{shown(mine)}. Resume without options="keep", then follow '
                f"{RECIPE}",
                key=at,
            )


def shown(replaced: Replaced) -> str:
    """Format the settings of one object for a message."""
    pairs = ((key.rpartition(".")[2], pair) for key, pair in replaced.items())
    return ", ".join(
        f"{name}={given!r:.60} was given, but the checkpoint has {saved!r:.60}" for name, (given, saved) in pairs
    )


@contextmanager
def replacing(train_state: Any, saved: Any, *, keeps: bool) -> Iterator[tuple[Replaced, list[str], list[str]]]:
    """Yield what a load of a train state replaces: the settings, by key.

    Also yield the keys of the schedulers that continue as they were given, at the position that the load sets
    (``keeps``), and of the objects that stay as they are, because their saved state is empty.
    """
    kept = {at: (one, one.state_dict()) for at, one, there in schedules_in(train_state, saved) if keeps and there}
    empty = [at for at, one, there in objects_in(train_state, saved) if there == {} and plain_state(one, at)]
    yield replaced_in(train_state, saved, kept=kept), [*kept], empty
    for one, given in kept.values():
        if _is_function_of_position(one):
            one.load_state_dict({**given, "last_epoch": one.last_epoch})
            with warnings.catch_warnings(action="ignore"):  # the optimizer takes no step here
                one.step(one.last_epoch)
        elif not isinstance(one, ReduceLROnPlateau):  # which only reduces the given rate
            for group, rate in zip(one.optimizer.param_groups, getattr(one, "_last_lr", ()), strict=False):
                group["lr"] = rate


def _is_function_of_position(schedule: Any) -> bool:
    owner = next((kind for kind in type(schedule).__mro__ if "get_lr" in vars(kind)), object)
    return owner is LambdaLR or "_get_closed_form_lr" in vars(owner)


@cache
def _parameters_of(kind: type) -> frozenset[str]:
    """Return the names of the parameters of a class's constructor."""
    with suppress(ValueError, TypeError):  # a constructor in C
        return frozenset(inspect.signature(kind.__init__).parameters)  # type: ignore[misc] # of each class
    return frozenset()


def _is_setting(kind: type, name: Any) -> bool:
    bare = str(name).removeprefix("_")
    names = {bare, bare.removesuffix("s")}
    return name in _DERIVED.get(kind.__name__, ()) or bool(names & _parameters_of(kind) and not names & _POSITIONS)


def _plain(value: Any) -> Any:
    """Return a plain value in a form that compares equal after a load; `_ODD` for any other."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.7g}")  # float32 precision
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value if isinstance(value, bool | int | str | None) else _ODD
