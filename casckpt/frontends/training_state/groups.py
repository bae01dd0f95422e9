"""Param groups: matches the parameters and options of an optimizer with those of a checkpoint.

A checkpoint has one list of groups for all ranks, even if the ranks have different parameters, as pipeline stages do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from casckpt.base.text import listed
from casckpt.errors import InvalidInput, Mismatch, MissingKey
from casckpt.frontends.training_state.optimizer import NamedParameter

_LOG = logging.getLogger("casckpt")

_ADDED_LATER = frozenset(("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"))
"""Options that torch added to existing optimizers. An older checkpoint lacks them."""

_NAMES = "param_names"  # names set by the user, which a load does not replace


@dataclass(frozen=True)
class Match:
    """The match between an optimizer and a saved one.

    ``saved``: the name of each parameter in the checkpoint, by the parameter's id(). ``origins``: the numbers of the
    saved groups that had the parameters of each group. ``options``: the options to set in each group. ``missing``: the
    names of parameters that the saved optimizer lacks. ``unused``: the names that only the saved optimizer has.
    """

    saved: dict[int, str]
    origins: list[list[int]]
    options: list[dict[str, Any]]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


def match(
    here: Sequence[Sequence[NamedParameter]],
    saved: Sequence[Mapping[str, Any]],
    saved_name: Callable[[str], str],
    *,
    keep_options: bool = False,
) -> Match:
    """Match parameters by name. The number and order of groups do not matter.

    ``saved_name``: a function that maps a name to its saved name. ``keep_options``: do not set any options. Raises
    Mismatch if tied names were saved separately, and InvalidInput if two parameters were saved as one.
    """
    group_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
    names: dict[int, str] = {}
    owners: dict[str, str] = {}
    missing = []
    for named in (member for group in here for member in group):
        matches = [name for name in dict.fromkeys(map(saved_name, named.names)) if name in group_of]
        if len(matches) > 1:
            raise Mismatch(
                f"{matches} are tied in this model, but not in the checkpoint: untie them", keys=tuple(matches)
            )
        if matches:
            names[id(named.parameter)] = matches[0]
            if owners.setdefault(matches[0], named.names[0]) != named.names[0]:
                raise InvalidInput(
                    f"rename maps two parameters of the optimizer, {owners[matches[0]]!r} and {named.names[0]!r}, to "
                    f"the saved {matches[0]!r}; map each to a different one, or load the model alone (optim=None; in "
                    "a dict, leave the optimizer out)",
                    key=matches[0],
                )
        else:
            missing.append(named.names[0])
    used = set(names.values())
    origins, options = [], []
    for number, group in enumerate(here):
        numbers = [group_of[names[id(named.parameter)]] for named in group if id(named.parameter) in names]
        origins.append(list(dict.fromkeys(numbers)))
        options.append({} if keep_options else _options(number, group, origins[-1], saved))
    return Match(names, origins, options, tuple(missing), tuple(name for name in group_of if name not in used))


def check(
    matched: Match, defaults: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], where: str
) -> None:
    """Raise MissingKey or Mismatch unless the checkpoint has all parameters and options of the optimizers.

    ``defaults``: the default options of each group's optimizer. `check_unused` checks for extra parameters in the
    checkpoint. It considers all ranks, because any of them may have these parameters.
    """
    if matched.missing:
        raise MissingKey(_other_parameters(where, matched.missing, matched.unused), keys=matched.missing)
    empty = [number for number, group in enumerate(saved) if not group["params"]]
    pairs = zip(defaults, matched.origins, strict=True)
    for known, group in ((known, saved[number]) for known, origins in pairs for number in (*origins, *empty)):
        lacking = [name for name in known if name not in group and name not in _ADDED_LATER]
        unknown = [name for name in group if name not in known and name not in ("params", _NAMES)]
        if lacking and unknown:
            raise Mismatch(
                f"the optimizer in {where} is of a different kind: it has the options {listed(unknown)}, but not "
                f"{listed(lacking)}. Create the kind of optimizer that was saved, or load the model alone (optim=None; "
                "in a dict, leave the optimizer out)",
                keys=tuple(lacking),
            )


def check_unused(unused: Sequence[str], where: str) -> None:
    """Raise Mismatch for names in the saved optimizer that no rank has."""
    if unused:
        raise Mismatch(_other_parameters(where, (), unused), keys=tuple(unused))


def _other_parameters(where: str, missing: Sequence[str], unused: Sequence[str]) -> str:
    lacks = f" It lacks {listed(missing)}." if missing else ""
    more = f" Only the checkpoint has {listed(unused)}." if unused else ""
    text = f"the optimizer in {where} has different parameters than this one.{lacks}{more}"
    if unused:
        return (
            f"{text} Add their groups first, as they were at the save (optim.add_param_group), or pass strict=False to "
            "load the parameters that both have"
        )
    return f"{text} Pass strict=False to load the parameters that both have"


def merged(groups_of_ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the merged groups of all ranks. Groups whose numbers and options are equal become one group."""
    united: list[dict[str, Any]] = []
    known: set[str] = set()
    for groups in groups_of_ranks:
        for number, group in enumerate(groups):
            new = [at for at, name in enumerate(group["params"]) if name not in known]
            known.update(group["params"])
            own = dict(group) | {key: [group[key][at] for at in new] for key in ("params", _NAMES) if key in group}
            if number < len(united) and _same(_without_parameters(united[number]), _without_parameters(own)):
                for key in ("params", _NAMES):
                    if key in own:
                        united[number][key] = [*united[number].get(key, []), *own[key]]
            elif new or not group["params"]:
                united.append(own)
    return united


def _options(
    number: int, group: Sequence[NamedParameter], origins: Sequence[int], saved: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the saved options for one group. ``origins``: the saved groups that had its parameters."""
    if not group and number < len(saved) and not saved[number]["params"]:
        origins = [number]
    if not origins:
        return {}
    first, *rest = [_without_parameters(saved[origin]) for origin in origins]
    agreed = {
        name: value for name, value in first.items() if all(name in one and _same(value, one[name]) for one in rest)
    }
    differing = sorted({name for options in (first, *rest) for name in options} - set(agreed))
    if differing:
        _LOG.warning(
            "the parameters of the optimizer's group %d were saved in the groups %s, which differ in %s: " "these "
            "options are left unchanged",
            number, list(origins), ", ".join(differing),
        )  # fmt: skip
    return agreed


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", _NAMES)}


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, list | tuple) and type(first) is type(second):
        return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(value, second[key]) for key, value in first.items())
    return type(first) is type(second) and bool(first == second)
