"""Plain names of parameters: their names in the model without wrappers for parallelism or compilation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from casckpt.errors import InvalidInput
from casckpt.frontends.training_state.flat import FlatPart, flat_parts, reshard
from casckpt.frontends.training_state.parts import Parts

WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "megatron_fsdp.megatron_fsdp.MegatronFSDP": "module",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp.MegatronFSDP": "module",
}
"""Wrapper classes and the attributes of their wrapped modules.

They are given by name, because some imports take seconds.
"""


def class_names(value: Any) -> list[str]:
    """Return the names of the class of ``value`` and of its bases, with their modules."""
    return [f"{base.__module__}.{base.__qualname__}" for base in type(value).__mro__]


def wrapped_child(module: nn.Module) -> str | None:
    """Return the name of the wrapped child of a wrapper; None for any other module."""
    return next((WRAPPERS[name] for name in class_names(module) if name in WRAPPERS), None)


def _child(module: nn.Module, name: str) -> nn.Module | None:
    return module._modules[name] if name in module._modules else None  # noqa: SIM401 - that of TorchScript has no get()


def unwrapped_model(model: Any) -> Any:
    """Return the model inside wrappers. Return any other value unchanged."""
    while isinstance(model, nn.Module) and (child := wrapped_child(model)) is not None:
        model = _child(model, child)
    return model


def plain_name(model: nn.Module, name: str) -> str:
    """Return the name of a parameter, buffer or module of ``model`` without the parts that wrappers add.

    The function follows the modules from the root, so a user's submodule named ``module`` keeps its name. A hook of
    the wrapper may have already removed the wrapper's part. The number of a part in `Parts` is also removed.
    """
    module: nn.Module | None = model
    rest = name.split(".")
    plain: list[str] = []
    while rest and module is not None:
        if isinstance(module, Parts):
            module = _child(module, rest.pop(0))
            continue
        child = wrapped_child(module)
        if child is None:
            plain.append(rest.pop(0))
            module = _child(module, plain[-1])
        else:
            rest = rest[1:] if rest[0] == child else rest
            module = _child(module, child)
    return ".".join(plain + rest)


def parameter_names(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Return a dict that maps the id() of each parameter to its plain names.

    A tied parameter has several, with its main name first. While FSDP replaces a parameter with the whole parameter,
    the replacement has the same names.
    """
    reshard(model)
    parts = flat_parts(model)
    names: dict[int, tuple[str, ...]] = {}
    owners: dict[str, int] = {}
    for raw, shown in model.named_parameters(remove_duplicate=False):
        parameter = parts[id(shown)].parameter if id(shown) in parts else shown
        name = plain_name(model, raw)
        if owners.setdefault(name, id(parameter)) != id(parameter):
            raise InvalidInput(f"two parameters of the model have the plain name {name!r}; rename one", key=name)
        known = names.get(id(parameter), ())
        names[id(parameter)] = known if name in known else (*known, name)
    return names


@dataclass(frozen=True)
class Parameters:
    """The `parameter_names` and the `flat_parts` of a model, which are the same for all of its optimizers."""

    names: Mapping[int, tuple[str, ...]]
    parts: Mapping[int, FlatPart]

    @classmethod
    def of(cls, model: nn.Module) -> Parameters:
        """Walk ``model`` once. Raises the errors of both functions."""
        return cls(parameter_names(model), flat_parts(model))

    @classmethod
    def joined(cls, by_key: Mapping[str, Parameters]) -> Parameters:
        """Return the parameters of modules by key. If there are several modules, each name begins with the key."""
        if len(by_key) == 1:
            return next(iter(by_key.values()))
        names: dict[int, tuple[str, ...]] = {}
        for key, one in by_key.items():
            for number, own in one.names.items():
                names[number] = (*names.get(number, ()), *(f"{key}.{name}" for name in own))
        return cls(names, {number: part for one in by_key.values() for number, part in one.parts.items()})
