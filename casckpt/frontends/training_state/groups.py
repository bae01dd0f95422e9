"""Param groups: which parameter of an optimizer is which of a checkpoint, and which options go to which group.

Groups of several ranks are one list in a checkpoint, also where ranks have other parameters each (pipeline stages).
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
"""Options that torch gave to optimizers which were there before: a checkpoint may well lack them."""

_NAMES = "param_names"  # what the user called the parameters of the group: for the groups that are there, not the saved


@dataclass(frozen=True)
class Match:
    """``saved``: the name in the checkpoint of each parameter, by its id(). ``options``: of each group here, to be set.

    ``missing``: own names of parameters that the checkpoint's optimizer lacks; ``unused``: names that only it has.
    """

    saved: dict[int, str]
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
    """Match by name, whatever the number and order of groups. ``saved_name``: what a name here was when it was saved.

    ``keep_options``: no option of a group here is to be set.
    Raises Mismatch where tied names were saved apart, InvalidInput where two parameters here were one.
    """
    group_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
    names: dict[int, str] = {}
    owners: dict[str, str] = {}
    missing = []
    for one in (member for group in here for member in group):
        hits = [name for name in dict.fromkeys(map(saved_name, one.names)) if name in group_of]
        if len(hits) > 1:
            raise Mismatch(f"{hits} are one parameter here, but were several in the checkpoint", keys=tuple(hits))
        if hits:
            names[id(one.parameter)] = hits[0]
            if owners.setdefault(hits[0], one.names[0]) != one.names[0]:
                raise InvalidInput(
                    f"rename gives the saved {hits[0]!r} for two parameters of the optimizer, {owners[hits[0]]!r} and "
                    f"{one.names[0]!r}; map each to one of its own, or load the model alone (optim=None; from a "
                    "dict, leave the optimizer out)",
                    key=hits[0],
                )
        else:
            missing.append(one.names[0])
    used = set(names.values())
    options = []
    for number, group in enumerate(here):
        origins = [group_of[names[id(one.parameter)]] for one in group if id(one.parameter) in names]
        options.append({} if keep_options else _options(number, group, list(dict.fromkeys(origins)), saved))
    return Match(names, options, tuple(missing), tuple(name for name in group_of if name not in used))


def check(found: Match, defaults: Mapping[str, Any], saved: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise MissingKey or Mismatch, naming parameters or options, unless the checkpoint has all that is here.

    That nothing else is in it, `check_unused` is for: another rank may have it.
    """
    if found.missing:
        raise MissingKey(_other_parameters(where, found.missing, found.unused), keys=found.missing)
    unused = frozenset(found.unused)
    for group in (one for one in saved if not one["params"] or not unused.issuperset(one["params"])):
        lacking = [name for name in defaults if name not in group and name not in _ADDED_LATER]
        unknown = [name for name in group if name not in defaults and name not in ("params", _NAMES)]
        if lacking and unknown:
            raise Mismatch(
                f"the optimizer in {where} is of another kind: it has the options {listed(unknown)}, but not "
                f"{listed(lacking)}. Make the same optimizer as was saved, or load the model alone (optim=None; from a "
                "dict, leave the optimizer out)",
                keys=tuple(lacking),
            )


def check_unused(unused: Sequence[str], where: str) -> None:
    """Raise Mismatch if there is a name in the checkpoint's optimizer that nobody has."""
    if unused:
        raise Mismatch(_other_parameters(where, (), unused), keys=tuple(unused))


def _other_parameters(where: str, missing: Sequence[str], unused: Sequence[str]) -> str:
    lacks = f" It lacks {listed(missing)}." if missing else ""
    more = f" Only it has {listed(unused)}." if unused else ""
    return (
        f"the optimizer in {where} has other parameters than this one.{lacks}{more} Pass strict=False to load what "
        "both have"
    )


def merged(groups_of_ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The groups of ranks that have other parameters each: those of one number and with the same options are one."""
    found: list[dict[str, Any]] = []
    known: set[str] = set()
    for groups in groups_of_ranks:
        for number, group in enumerate(groups):
            new = [at for at, name in enumerate(group["params"]) if name not in known]
            known.update(group["params"])
            mine = dict(group) | {key: [group[key][at] for at in new] for key in ("params", _NAMES) if key in group}
            if number < len(found) and _same(_without_parameters(found[number]), _without_parameters(mine)):
                for key in ("params", _NAMES):
                    if key in mine:
                        found[number][key] = [*found[number].get(key, []), *mine[key]]
            elif new or not group["params"]:
                found.append(mine)
    return found


def _options(
    number: int, group: Sequence[NamedParameter], origins: Sequence[int], saved: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The saved options of one group here, whose parameters were in the groups ``origins``."""
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
            "group %d of the optimizer had its parameters in groups %s when it was saved, which differ in %s: "
            "these options stay as they are here",
            number, list(origins), ", ".join(differing),
        )  # fmt: skip
    return agreed


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", _NAMES)}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    return type(one) is type(other) and bool(one == other)
