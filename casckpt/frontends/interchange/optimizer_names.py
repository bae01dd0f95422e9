"""Finds names for the numbered parameters in an optimizer's state_dict.

Such a state identifies parameters only by their order in ``model.parameters()``, within each group. This module
compares the shapes in the state with the shapes in the model. It names parameters only if exactly one assignment is
possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch

from casckpt.errors import Mismatch
from casckpt.format.regions import Shape

Positions: TypeAlias = tuple[int, ...]
"""The number of named parameters of each group."""

Numbered: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any]]
"""An optimizer's state, and one of its groups."""

_SHAPED = (
    "exp_avg", "momentum_buffer", "square_avg", "exp_avg_sq", "exp_inf", "sum", "acc_delta", "ax", "prev", "grad_avg",
)  # fmt: skip
"""The names of states that have the shape of their parameter, in torch's optimizers and most others."""

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_MAX_WAYS = 10_000


def is_optimizer_state(value: Any) -> bool:
    """Return whether a value is an optimizer's state_dict."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list | tuple)
        and all(isinstance(group, Mapping) and "params" in group for group in value["param_groups"])
    )


def is_named(optimizers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the optimizers already name their parameters."""
    params = [param for optim in optimizers for group in optim["param_groups"] for param in group["params"]]
    return bool(params) and all(isinstance(param, str) for param in params)


def by_name(
    optimizers: Sequence[Mapping[str, Any]], model: Mapping[str, Any], parameter_names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Merge the states of a model's optimizers into one state by name, without copying the tensors.

    ``model``: its state_dict. ``parameter_names``: the names of all parameters, in order. Raises Mismatch if the names
    are ambiguous.
    """
    for optim in optimizers:
        others = [key for key in optim if key not in ("state", "param_groups")]
        if others:
            raise Mismatch(f"it holds {others[0]!r} in addition to state and param_groups")
        odd = optim["state"].keys() - {number for group in optim["param_groups"] for number in group["params"]}
        if odd:
            raise Mismatch(f"it has state under {next(iter(odd))!r}, but none of its groups contains that parameter")
    numbered = [(optim, group) for optim in optimizers for group in optim["param_groups"]]
    names = _given(numbered, parameter_names)
    if names is None:
        names = _names([[_shape(optim, number) for number in group["params"]] for optim, group in numbered], model)
    if names is None:
        raise Mismatch("the shapes of its parameters do not match those of the model, or match in several ways")
    _check(names, numbered, model)
    state: dict[Any, Any] = {}
    groups = []
    for (optim, group), own in zip(numbered, names, strict=True):
        groups.append({**group, "params": own})
        for number, name in zip(group["params"], own, strict=True):
            if number in optim["state"]:
                state[name] = optim["state"][number]
    return {"state": state, "param_groups": groups}


def _given(numbered: Sequence[Numbered], parameter_names: Sequence[str] | None) -> list[list[str]] | None:
    """Return the names by group, from the caller or from an optimizer that was created with named_parameters."""
    if parameter_names is None:
        given = [list(group.get("param_names", [])) for _, group in numbered]
        whole = all(len(own) == len(group["params"]) for own, (_, group) in zip(given, numbered, strict=True))
        return given if whole else None
    wanted, left = sum(len(group["params"]) for _, group in numbered), iter(parameter_names)
    if wanted != len(parameter_names) or len(set(parameter_names)) != wanted:
        raise Mismatch(f"it has {wanted} parameters, but parameter_names has {len(set(parameter_names))} names")
    return [list(islice(left, len(group["params"]))) for _, group in numbered]


def _check(names: Sequence[Sequence[str]], numbered: Sequence[Numbered], model: Mapping[str, Any]) -> None:
    for own, (optim, group) in zip(names, numbered, strict=True):
        for name, number in zip(own, group["params"], strict=True):
            shape = _shape(optim, number)
            if name not in model or (shape is not None and tuple(model[name].shape) != shape):
                raise Mismatch(f"it names {name!r}, but the model does not have a parameter of that name and shape")


def _shape(optim: Mapping[str, Any], number: Any) -> Shape | None:
    """Return the shape of a parameter according to its state, or None if the state does not reveal it."""
    state = optim["state"].get(number)
    values = [state[name] for name in _SHAPED if isinstance(state, Mapping) and name in state]
    shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
    return shapes[0] if shapes else None


def _candidates(model: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors that may be parameters, in the order of ``model.parameters()``. Tied parameters occur once."""
    seen = set()
    for name, value in model.items():
        if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] in _BUFFERS:
            continue
        place = (value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape))
        if (value.is_floating_point() or value.is_complex()) and (
            place not in seen or not value.numel() or not place[0]
        ):
            seen.add(place)
            yield name, tuple(value.shape)


def _names(groups: Sequence[Sequence[Shape | None]], model: Mapping[str, Any]) -> list[list[str]] | None:
    """Return the names of each group in the order of the model, if exactly one choice is possible."""
    wanted = sum(map(len, groups))
    candidates = list(_candidates(model))
    spare = len(candidates) - wanted
    # the number of assignments, and one assignment
    ways: dict[Positions, tuple[int, Any]] = {(0,) * len(groups): (1, None)}
    for at, (_, shape) in enumerate(candidates):
        following: dict[Positions, tuple[int, Any]] = {}
        for positions, (count, chosen) in ways.items():
            steps: list[tuple[Positions, int | None]] = list(_steps(positions, groups, shape))
            if at - sum(positions) < spare:  # the optimizer does not have this tensor, because it is a buffer or frozen
                steps.append((positions, None))
            for after, group in steps:
                known, _ = following.get(after, (0, None))
                following[after] = (known + count, (group, chosen))
        if len(following) > _MAX_WAYS:
            return None
        ways = following
    count, chosen = ways.get(tuple(map(len, groups)), (0, None))
    if count != 1:
        return None
    names: list[list[str]] = [[] for _ in groups]
    for name, _ in reversed(candidates):
        group, chosen = chosen
        if group is not None:
            names[group].append(name)
    return [own[::-1] for own in names]


def _steps(
    positions: Positions, groups: Sequence[Sequence[Shape | None]], shape: Shape
) -> Iterator[tuple[Positions, int | None]]:
    """Yield the groups whose next parameter may have this shape, with the positions after that parameter."""
    for number, (at, group) in enumerate(zip(positions, groups, strict=True)):
        if at < len(group) and group[at] in (None, shape):
            yield (*positions[:number], at + 1, *positions[number + 1 :]), number
