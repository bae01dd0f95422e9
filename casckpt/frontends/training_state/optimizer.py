"""Saves and loads the state of an optimizer by parameter name, without running an optimizer step.

The module also lists the names of the state that torch's own optimizers keep for a parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from casckpt.errors import InvalidInput, Mismatch
from casckpt.format import tree
from casckpt.frontends.training_state.holding import Holding
from casckpt.frontends.training_state.names import Parameters
from casckpt.tensors.state import check_nesting, decode_tree, encode_tree, flatten, inflate

_TREE = "tree"


@dataclass(frozen=True)
class NamedParameter:
    """A parameter of an optimizer. ``names``: its plain names, with the main name first."""

    parameter: torch.Tensor
    names: tuple[str, ...]


def local_optimizer(optim: Optimizer) -> Optimizer:
    """Return the optimizer that a `ZeroRedundancyOptimizer` has on this rank; any other ``optim`` unchanged.

    Raises InvalidInput if ``overlap_with_ddp`` is True, because there is no inner `torch.optim.Optimizer` in that
    case.
    """
    zero: Any = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is None or not isinstance(optim, zero.ZeroRedundancyOptimizer):
        return optim
    inner = getattr(optim, "optim", None)
    if not isinstance(inner, Optimizer):
        raise InvalidInput(
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True has no state_dict for this rank; create it "
            "without overlap_with_ddp"
        )
    for group, shown in zip(inner.param_groups, optim.param_groups, strict=True):  # the first thing that a step does
        group.update({name: value for name, value in shown.items() if name != "params"})
    return inner


def named_groups(parameters: Parameters, optim: Optimizer) -> list[list[NamedParameter]]:
    """Return the parameters of each group. ``parameters``: those of the model.

    Raises InvalidInput for a parameter that is not in the model, and for state that contains itself.
    """
    groups, names = [], parameters.names
    for number, group in enumerate(optim.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise InvalidInput(
                    f"parameter {position} of group {number} of the optimizer, of shape {list(parameter.shape)}, is "
                    "not in the model; pass the model that the optimizer was created for, and create the optimizer "
                    "after replacing parts of the model. If it represents one optimizer per layer, pass the list of "
                    "these optimizers, or pass none (optim=None; in a Trainer: save_only_model=True)"
                )
        groups.append([NamedParameter(parameter, names[id(parameter)]) for parameter in group["params"]])
    known = {one.parameter: one.names[0] for group in groups for one in group}
    for key, value in optim.state.items():
        check_nesting(value, f"the optimizer's state of {known.get(key, key)!r:.200}")
    return groups


def states_to_save(parameters: Parameters, optims: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the merged state of several optimizers, with live tensors.

    The result is ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``. A tensor of which this rank
    has a part becomes a `Shard`. ``parameters``: those of the model. Raises InvalidInput for a parameter that is not in
    the model, for an optimizer with additional state, and for two optimizers with the same parameter.
    """
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    taken = set[str]()
    for optim in optims:
        saved = _state_to_save(parameters, optim)
        own = [name for group in saved["param_groups"] for name in group["params"]]
        twice = [name for name in own if name in taken]
        if twice or state.keys() & saved["state"].keys():
            name = twice[0] if twice else str(next(iter(state.keys() & saved["state"].keys())))
            raise InvalidInput(
                f"two optimizers have the parameter {name!r}, but only one state can be stored for it: pass one of "
                "them by a name of its own, such as TrainState(second=optim)",
                key=name,
            )
        state |= saved["state"]
        groups += saved["param_groups"]
        taken.update(own)
    return {"state": state, "param_groups": groups}


def _state_to_save(parameters: Parameters, optim: Optimizer) -> dict[str, Any]:
    optim = local_optimizer(optim)
    groups = named_groups(parameters, optim)
    saved = _state_of(optim, groups)
    state = saved["state"]
    for named in (member for group in groups for member in group):
        name = named.names[0]
        holding = Holding(name, named.parameter, parameters.parts.get(id(named.parameter)))
        if name in state:
            state[name] = holding.as_saved(state[name])
        if holding.is_nothing:
            state.pop(name, None)
    return saved


def _state_of(optim: Optimizer, groups: Sequence[Sequence[NamedParameter]]) -> dict[str, Any]:
    owned = {id(one.parameter) for group in groups for one in group}
    keys: list[Any] = list(optim.state)  # torch declares them as tensors, but allows any key
    for key in keys:
        if isinstance(key, torch.Tensor) and id(key) not in owned:
            raise InvalidInput(
                f"the optimizer has state for a tensor of shape {list(key.shape)} that is not in any of its groups; "
                "remove that state"
            )
    packed = optim.state_dict()
    others = [key for key in packed if key not in ("state", "param_groups")]
    if others:
        raise InvalidInput(
            f"the state_dict of {type(optim).__name__} contains {others}, in addition to state and param_groups. "
            "Such values cannot be stored by name. Leave optim out, and save the optimizer as an object: put it "
            "in a TrainState, or save its state_dict() with store.save"
        )
    _check_inner(optim, packed["state"])
    return _by_name(packed, groups)


def _check_inner(optim: Optimizer, state: Mapping[Any, Any]) -> None:
    """Raise InvalidInput if another optimizer inside ``optim`` has state that ``state`` does not contain."""
    held = {id(tensor) for _, tensor in tensors_below(state, "")}
    for name, inner in vars(optim).items():
        own = inner.state.values() if isinstance(inner, Optimizer) else ()
        if any(id(tensor) not in held for _, tensor in tensors_below([*own], "")):
            raise InvalidInput(
                f"the state_dict of {type(optim).__name__} does not contain the state of the optimizer inside it; pass "
                f"that one, optim.{name}, here and to resume"
            )


def _by_name(packed: Mapping[str, Any], groups: Sequence[Sequence[NamedParameter]]) -> dict[str, Any]:
    names: dict[Any, str] = {}
    named = []
    for group, members in zip(packed["param_groups"], groups, strict=True):
        own = [one.names[0] for one in members]
        names.update(zip(group["params"], own, strict=True))
        named.append({**group, "params": own})
    state: dict[Any, Any] = {}
    for key, value in packed["state"].items():
        name = names.get(key, key)
        if name in state or (key not in names and name in names.values()):
            raise InvalidInput(f"the optimizer has two states with the name {name!r}", key=str(name))
        state[name] = value
    return {"state": state, "param_groups": named}


def by_number(state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Convert a state by name to the state by number that `torch.optim.Optimizer.load_state_dict` accepts."""
    numbers: dict[Any, int] = {}
    numbered = []
    for group in groups:
        mine = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
        numbered.append({**group, "params": mine})
    return {"state": {numbers.get(name, name): value for name, value in state.items()}, "param_groups": numbered}


def flatten_optimizer_state(model: nn.Module, optim: Optimizer) -> dict[str, Any]:
    """Return the state of ``optim`` as one flat dict of live tensors and plain data.

    Keys are ``state.<parameter>.<what>``, ``param_groups`` (``param_groups.<index>.<option>`` if an option is a tensor)
    and ``tree``, bytes that describe lists and empty containers for `unflatten_optimizer_state`.
    """
    optim = local_optimizer(optim)
    flat = flatten(_state_of(optim, named_groups(Parameters.of(model), optim)))
    whole = (leaf.unit for leaf in flat.leaves.values())  # wrappers are not opened here
    return {leaf.key: leaf.value for leaf in whole} | {_TREE: encode_tree(tree.closed(flat.tree))}


def unflatten_optimizer_state(flat: Mapping[str, Any], *, by_name: bool = False) -> dict[str, Any]:
    """Return ``{"state": {id: {...}}, "param_groups": [...]}``, the inverse of `flatten_optimizer_state`.

    ``optim.load_state_dict`` accepts the result. ``by_name``: use parameter names instead of ids. Raises InvalidInput
    if ``flat`` is not a complete result of `flatten_optimizer_state`.
    """
    if not isinstance(flat.get(_TREE), bytes):
        raise InvalidInput(
            f"the flat state lacks the key {_TREE!r} of flatten_optimizer_state; pass its complete result"
        )
    node = decode_tree(flat[_TREE])
    lacking = [tree.join(path) for path, _ in tree.leaves(node) if tree.join(path) not in flat]
    if lacking:
        raise InvalidInput(f"the flat state lacks {lacking[0]!r}; pass the complete result of flatten_optimizer_state")
    state: dict[str, Any] = inflate(node, lambda key, leaf: flat[key], lambda key: True)
    return state if by_name else by_number(state["state"], state["param_groups"])


def tensors_below(value: Any, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a nested value, with their flat keys."""
    if isinstance(value, torch.Tensor):
        yield key, value
    elif isinstance(value, Mapping):
        for element, child in value.items():
            yield from tensors_below(child, f"{key}.{element}")
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from tensors_below(child, f"{key}.{index}")


def install(optim: Optimizer, state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Set the state of ``optim`` and the options of its groups.

    ``state``: the state by parameter, or by any other key of the optimizer's state. The optimizer keeps the tensors in
    ``state`` without copying them. Tensors and numbers among the options are copied into the existing tensors if they
    fit, because a captured CUDA graph reads a learning rate from a fixed address, and torchao accepts only a tensor.
    """
    whole, optim = optim, local_optimizer(optim)
    pairs, filled = list(zip(optim.param_groups, groups, strict=True)), set[int]()
    options = [{name: _taken_over(old.get(name), value, filled) for name, value in new.items()} for old, new in pairs]
    numbers = {one: number for number, one in enumerate(one for group in optim.param_groups for one in group["params"])}
    numbered = []
    for old, new in zip(optim.param_groups, options, strict=True):
        # a checkpoint of a different version may lack options
        kept = {name: value for name, value in old.items() if name not in new and name != "params"}
        numbered.append({**kept, **new, "params": [numbers[one] for one in old["params"]]})
    if getattr(optim.load_state_dict, "__func__", None) is Optimizer.load_state_dict:
        # torch neither copies nor converts state if its key is not a number
        optim.load_state_dict({"state": dict(state), "param_groups": numbered})
    else:
        optim.load_state_dict({"state": {numbers.get(k, k): v for k, v in state.items()}, "param_groups": numbered})
        for key, value in state.items():
            optim.state[key] = _unconverted(value, optim.state.get(key))
    for group, new in zip(optim.param_groups, options, strict=True):
        group.update({name: value for name, value in new.items() if name in group and any(tensors_below(value, ""))})
    if whole is not optim:  # a ZeroRedundancyOptimizer steps with its own options
        for shown, group in zip(whole.param_groups, optim.param_groups, strict=True):
            shown.update({name: value for name, value in group.items() if name != "params"})


def _taken_over(old: Any, new: Any, filled: set[int]) -> Any:
    """Return the value of an option: ``old`` with the value of ``new`` if that fits, and otherwise ``new``.

    ``filled``: the ids of the tensors that earlier calls have filled. Groups that share a tensor may have different
    saved values.
    """
    if isinstance(new, list | tuple) and isinstance(old, list | tuple) and len(old) == len(new):
        return type(new)([_taken_over(one, other, filled) for one, other in zip(old, new, strict=True)])
    if not isinstance(old, torch.Tensor) or old is new:
        return new
    if old.numel() == 1 and (type(new) is int or (type(new) is float and old.is_floating_point())):
        new = torch.full_like(old, new, requires_grad=False)
    if not isinstance(new, torch.Tensor) or old.shape != new.shape or old.dtype != new.dtype:
        return new
    if id(old) in filled and not torch.equal(old, new.to(old.device)):
        return new
    filled.add(id(old))
    old.detach().copy_(new)
    return old


def _unconverted(saved: Any, loaded: Any) -> Any:
    """Return the state that the optimizer loaded, with the saved tensors in place of converted or copied ones."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return saved if saved.shape == loaded.shape else loaded
    if isinstance(saved, Mapping) and isinstance(loaded, dict):
        loaded.update({key: _unconverted(saved[key], value) for key, value in loaded.items() if key in saved})
        return loaded
    if type(saved) is type(loaded) and isinstance(saved, list | tuple) and len(saved) == len(loaded):
        return type(saved)([_unconverted(one, other) for one, other in zip(saved, loaded, strict=True)])
    return saved if type(saved) is type(loaded) else loaded


_ALWAYS = {
    "Adadelta": "step square_avg acc_delta",
    "Adafactor": "step",
    "Adagrad": "step sum",
    "Adam": "step exp_avg exp_avg_sq",
    "AdamW": "step exp_avg exp_avg_sq",
    "Adamax": "step exp_avg exp_inf",
    "ASGD": "step eta mu ax",
    "LBFGS": "func_evals n_iter",
    "Muon": "momentum_buffer",
    "NAdam": "step mu_product exp_avg exp_avg_sq",
    "RAdam": "step exp_avg exp_avg_sq",
    "RMSprop": "step square_avg",
    "Rprop": "step prev step_size",
    "SGD": "",
    "SparseAdam": "step exp_avg exp_avg_sq",
}
_AT_TIMES = {
    "Adafactor": "row_var col_var variance",
    "LBFGS": "al d t old_dirs old_stps ro H_diag prev_flat_grad prev_loss",
    "SGD": "momentum_buffer",
}
_WITH = {  # the state that each option requires
    "Adam": {"amsgrad": "max_exp_avg_sq"},
    "AdamW": {"amsgrad": "max_exp_avg_sq"},
    "RMSprop": {"centered": "grad_avg", "momentum": "momentum_buffer"},
}


@dataclass(frozen=True)
class StateKind:
    """A kind of optimizer. ``name``: the torch.optim class that defines its step."""

    name: str

    @classmethod
    def of(cls, optim: Optimizer) -> StateKind | None:
        """Return the kind of ``optim``; None if it defines its own step."""
        step = type(optim).step
        name = step.__qualname__.partition(".")[0]
        is_torchs = f"{step.__module__}.".startswith("torch.optim.")
        return cls(name) if is_torchs and name in _ALWAYS else None

    def needs(self, options: Mapping[str, Any]) -> set[str]:
        """Return the state names that a step requires with these group options."""
        optional = _WITH.get(self.name, {})
        return {*_ALWAYS[self.name].split(), *(name for option, name in optional.items() if options.get(option))}

    def keeps(self) -> set[str]:
        """Return all state names that the optimizer may keep."""
        optional = _WITH.get(self.name, {})
        return {*_ALWAYS[self.name].split(), *_AT_TIMES.get(self.name, "").split(), *optional.values()}

    def check(self, saved: Collection[str], options: Mapping[str, Any], key: str, where: str) -> None:
        """Raise Mismatch if the names ``saved`` are not enough for a step, or belong to a different kind.

        ``key``: the parameter that the state belongs to.
        """
        names = set(saved)
        lacking = sorted(self.needs(options) - names)
        others = () if names <= self.keeps() else map(StateKind, _ALWAYS)
        kinds = [kind.name for kind in others if kind.needs({}) <= names <= kind.keeps()]
        is_other = bool(kinds) and names != {"step"}  # user code may also count steps
        if lacking or is_other:
            found = f"it lacks {', '.join(map(repr, lacking))}" if lacking else f"it belongs to {' or '.join(kinds)}"
            raise Mismatch(
                f"the optimizer state of {key!r} in {where} does not fit {self.name}: {found}. Create the kind of "
                "optimizer that was saved, with the same options, or load the model alone (optim=None; in a dict, "
                "leave the optimizer out)",
                key=key,
            )
