"""Shards optimizer state in the same way as the model's parameters."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from casckpt.frontends.megatron.errors import CheckpointingException
from casckpt.frontends.megatron.kinds import extract_sharded_tensors_and_factories, is_factory
from casckpt.frontends.megatron.mapping import LocalNonpersistentObject
from casckpt.frontends.megatron.nesting import Nested, nested_values
from casckpt.tensors.dtensors import is_dtensor, local_of
from casckpt.tensors.memory import has_memory

log = logging.getLogger(__name__)


def _memory(tensor: torch.Tensor | None) -> tuple[int, ...]:
    """Return the address of the tensor's elements and its shape, or () for a tensor without memory."""
    local = None if tensor is None else local_of(tensor)
    return () if local is None or not local.numel() or not has_memory(local) else (local.data_ptr(), *local.shape)


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.Tensor]) -> dict[int, int]:
    """Map ``id(parameter)`` to its number in the optimizer. A tied parameter has its first number."""
    numbers: dict[int, int] = {}
    for number, param in enumerate(optim_params_iter):
        numbers.setdefault(id(param), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: Nested, optim_params_iter: Iterable[torch.Tensor]
) -> dict[int, Any]:
    """Map each parameter's number in the optimizer to its ShardedTensor or factory in the model's state dict.

    Parameters are matched by identity, so the state dict must hold the parameters themselves (``keep_vars=True``), or
    the local part of a DTensor. Logs a warning if no parameter is found.
    """
    params = list(optim_params_iter)
    numbers = get_optim_param_to_id_map(params)
    # Each call of to_local creates a new tensor with the same memory.
    memories = {at: number for number, param in enumerate(params) if is_dtensor(param) and (at := _memory(param))}
    sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    by_number = {}
    for value in nested_values(sharded):
        number = numbers.get(id(value.data), memories.get(_memory(value.data)))
        if number is not None:
            by_number[number] = value
    if not by_number:
        log.warning(
            "no tensor of the model's state dict is a parameter of the optimizer; create the state dict with "
            "keep_vars=True, and "
            "transform parameters only with a ShardedTensorFactory"
        )
    return by_number


def make_sharded_optimizer_tensor(model_param: Any, optim_param: torch.Tensor, prefix: str) -> Any:
    """Return a copy of ``model_param`` with the key ``<prefix>.<its key>`` and the data of ``optim_param``.

    Raises CheckpointingException if the shape of ``optim_param`` differs from that of the parameter.
    """
    data, key = local_of(optim_param), f"{prefix}.{model_param.key}"
    if is_factory(model_param):
        return replace(model_param, key=key, data=data)
    if getattr(model_param, "flattened_range", None) is None and tuple(data.shape) != tuple(model_param.local_shape):
        raise CheckpointingException(
            f"{key!r} has shape {list(data.shape)}, but the parameter has shape {list(model_param.local_shape)}; "
            "put state of "
            "a different shape, such as 'step', into exclude_keys",
            key=key,
        )
    return replace(model_param, key=key, data=data, dtype=data.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: dict[str, Any], id_to_sharded_param_map: Mapping[int, Any], exclude_keys: Collection[str] = ()
) -> None:
    """Convert an optimizer's state dict to a sharded one, in place.

    The state ``name`` of a parameter gets the key ``optimizer.state.<name>.<key of the parameter>``, unless it is in
    ``exclude_keys``. The groups become copies whose ``params`` are not saved. Raises CheckpointingException (a
    ValueError) for the state of a parameter that the map lacks.
    """
    sharded: dict[Any, dict[str, Any]] = {}
    for number, state in optim_state_dict["state"].items():
        wanted = {name: value for name, value in state.items() if name not in exclude_keys}
        if wanted and number not in id_to_sharded_param_map:
            raise CheckpointingException(f"parameter {number} of the optimizer is not a sharded parameter of the model")
        sharded[number] = {
            name: make_sharded_optimizer_tensor(id_to_sharded_param_map[number], value, f"optimizer.state.{name}")
            for name, value in wanted.items()
        }
    groups = deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict["param_groups"], optim_state_dict["state"] = groups, sharded
