"""Settings: the plain values that a program passes to constructors, and that a load replaces with the saved ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import SWALR

from casckpt.errors import InvalidInput
from casckpt.format.tree import children
from casckpt.frontends.training_state.train_state import plain_state
from casckpt.tensors.state import holds_object, is_object

Replaced: TypeAlias = Mapping[str, tuple[Any, Any]]
"""Settings that differ from the checkpoint's, as (given, saved) by flat key."""
Read: TypeAlias = Callable[[str], Any] | None
"""A function that reads the saved value at a key. None: the saved state is a value, not a node of a tree."""

_POSITIONS = frozenset(("last_epoch", "epoch", "step", "iteration", "params", "rank"))
"""Parameters of constructors that classes change while they run, or that are not settings."""
_DERIVED = {"OneCycleLR": ("_schedule_phases", "_anneal_func_type"), "CyclicLR": ("total_size", "step_ratio")}
"""What schedulers compute from parameters that they do not keep."""
_OF_GROUPS = frozenset(("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"))
"""The rate of a group, and the options that schedulers add to it and do not change."""
_WAYS = ("get_lr", "_get_closed_form_lr")
RECIPE = '"Train for longer, or with another schedule" in docs/training.md'
_ODD = "(not plain data)"


def settings_of_groups(optims: Sequence[Any], at: str, train_state: Any) -> dict[str, Any]:
    """Return the settings of all groups of the optimizers by key. ``at``: the key of the groups.

    They do not include what the schedulers in ``train_state`` change, but the initial rate.
    """
    found, inner = dict[str, Any](), [getattr(optim, "optimizer", optim) for optim in optims]
    groups = [(one, moved_by(train_state, one), group) for one in inner for group in one.param_groups]
    for number, (one, moved, group) in enumerate(groups):
        for name in {*group} - moved - ({"lr"} if "initial_lr" in group else set()):
            is_one = name in _OF_GROUPS or _is_setting(type(one), name)
            if is_one and (value := _plain(group[name])) != _ODD:
                found[f"{at}.{number}.{name}"] = value
    return found


def replaced_in(value: Any, saved: Any, key: str, read: Read = None, *, rates: bool = False) -> dict[str, Any]:
    """Return the settings of the objects in ``value`` that differ from the saved ones, as (given, saved) by key.

    ``saved``: the node of the checkpoint's tree, or the value itself. ``rates``: compare the base rates too.
    """
    found = dict[str, Any]()
    for at, one, there, read_there in objects_in(value, saved, key, read):
        names = [name for name in there if _is_setting(type(one), name) or (rates and name == "base_lrs")]
        state = plain_state(one, at) if names else {}
        for name in (name for name in names if name in state):
            inner, path = getattr(one, str(name), None), f"{at}.{name}"
            nested, values = holds_object([inner]), (state[name], read_there(path) if read_there else there[name])
            if nested:
                found |= replaced_in(inner, there[name], path, read_there, rates=rates)
            pair: tuple[Any, ...] = tuple(map(len if nested else _plain, values))
            if pair[0] != pair[1] and _ODD not in pair:
                found[path] = pair
    return found


def objects_in(value: Any, saved: Any, key: str, read: Read = None) -> Iterator[tuple[str, Any, Any, Read]]:
    """Yield the objects in ``value`` that were saved as dicts: key, object, the saved dict, and how to read its items.

    The arguments and the result are as for `replaced_in`. Accelerate's wrappers of schedulers are removed.
    """
    if not holds_object([value]):
        return
    if read is not None and isinstance(saved, int):
        saved, read = read(key), None
    if not is_object(value):
        there = dict(children(saved))
        for name, child in value.items() if isinstance(value, Mapping) else enumerate(value):
            if name in there:
                yield from objects_in(child, there[name], f"{key}.{name}", read)
    elif isinstance(saved, Mapping):
        yield key, getattr(value, "scheduler", value), saved, read


def moved_by(value: Any, optim: Any) -> set[str]:
    """Return the options of an optimizer that the schedulers in ``value`` change in each step."""
    if isinstance(value, Mapping | list | tuple):
        return {
            name for one in (value.values() if isinstance(value, Mapping) else value) for name in moved_by(one, optim)
        }
    inner = getattr(value, "scheduler", value)
    if getattr(inner, "optimizer", None) is not optim:
        return set()
    cycled = {"betas", "momentum"} if getattr(inner, "cycle_momentum", False) else set()
    return {"lr"} | cycled | moved_by(getattr(inner, "_schedulers", ()), optim)


@dataclass
class Compared:
    """What a resume learns about its train state before anything is loaded.

    ``replaced``: the settings that it replaces. ``schedules``: the keys of the schedulers. ``changed``: of these, the
    schedulers that keep their settings or base rates, which differ. ``empty``: the objects whose saved state is empty.
    """

    replaced: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    schedules: dict[str, Any] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)

    def look(self, train_state: Any, saved: Any, key: str, read: Read, *, keep: bool) -> None:
        """Compare a train state with the saved one. The arguments are those of `replaced_in`.

        ``keep``: the resume keeps the options of the optimizers. Raises InvalidInput if a scheduler with other settings
        cannot continue with them.
        """
        for at, one, there, _ in objects_in(train_state, saved, key, read):
            if hasattr(one, "optimizer") and hasattr(one, "step"):
                self.schedules[at] = one
            if not there and plain_state(one, at):
                self.empty.append(at)
        self.replaced |= replaced_in(train_state, saved, key, read, rates=keep)
        for at, one in self.schedules.items() if keep else ():
            mine = {name: self.replaced.pop(name) for name in [*self.replaced] if name.startswith(f"{at}.")}
            is_alone = sum(one.optimizer is other.optimizer for other in self.schedules.values()) == 1
            if (mine or isinstance(one, SWALR)) and not (is_alone and _is_function_of_position(one)):
                raise InvalidInput(
                    f'options="keep" cannot continue {at!r}, a {type(one).__name__} whose position alone does not '
                    f'determine the rate: {shown(mine) or "swa_lr may differ"}. Resume without options="keep", then '
                    f"follow {RECIPE}",
                    key=at,
                )
            self.changed += [at] * bool(mine)


def shown(replaced: Replaced) -> str:
    """Format the settings of one object for a message."""
    pairs = ((key.rpartition(".")[2], pair) for key, pair in replaced.items())
    return ", ".join(
        f"{name}={given!r:.60} was given, but the checkpoint has {saved!r:.60}" for name, (given, saved) in pairs
    )


def _is_function_of_position(schedule: Any) -> bool:
    names = [getattr(getattr(type(schedule), name, None), "__qualname__", "").rpartition(".")[0] for name in _WAYS]
    return names[0] in (names[1], LambdaLR.__name__)


class GoingOn:
    """A scheduler that continues at the position that a load sets.

    ``is_changed``: with its own settings and base rates instead of the saved ones.
    """

    def __init__(self, schedule: Any, *, is_changed: bool) -> None:
        state = schedule.state_dict() if is_changed else {}
        self._given = {k: v for k, v in state.items() if _is_setting(type(schedule), k) or k == "base_lrs"}
        self._schedule = schedule

    def go_on(self) -> None:
        """Restore the settings after the load, and set the rates of the optimizer."""
        it, rates = self._schedule, getattr(self._schedule, "_last_lr", ())
        if not hasattr(it, "base_lrs") and not hasattr(it, "_schedulers"):  # it only reduces the given rate
            return
        if self._given:
            it.load_state_dict({**it.state_dict(), **self._given})
            rates = it._last_lr = (
                [base * of(it.last_epoch) for of, base in zip(it.lr_lambdas, it.base_lrs, strict=True)]
                if isinstance(it, LambdaLR)
                else it._get_closed_form_lr()
            )
        for group, rate in zip(it.optimizer.param_groups, rates, strict=False):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


@cache
def _parameters_of(kind: type) -> frozenset[str]:
    """Return the names of the parameters of a class's constructors, those of its bases included."""
    names = set[str]()
    for one in kind.__mro__:
        with suppress(ValueError, TypeError):  # a constructor in C
            names |= {*inspect.signature(one.__init__).parameters}  # type: ignore[misc] # of each class
    return frozenset(names)


def _is_setting(kind: type, name: Any) -> bool:
    bare = str(name).removeprefix("_")
    names = {bare, bare.removesuffix("s")}
    return name in _DERIVED.get(kind.__name__, ()) or bool(names & _parameters_of(kind) and not names & _POSITIONS)


def _plain(value: Any) -> Any:
    """Return a plain value in a form that compares equal after a load; `_ODD` for any other."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.7g}")  # float32 precision
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value if isinstance(value, bool | int | str | None) else _ODD
