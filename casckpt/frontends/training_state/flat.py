"""The parts of parameters that this rank holds under FSDP. The functions do not make collective calls.

FullyShardedDataParallel joins the parameters of a module into a flat parameter, and each rank has a range of it. With
use_orig_params=True, the parameters are one-dimensional views into this range. A view is empty if the range does not
include any element of its parameter. After a forward pass, the parameters may be whole and in low precision. The range
itself is always sharded and in full precision.

This module reads private attributes of torch, because torch has no public API for this purpose.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from casckpt.errors import InvalidInput, Unsupported
from casckpt.format.regions import Shape
from casckpt.tensors.values import Shard

_HOOKS = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_HOME_OF_HOOKS = "torch.distributed.fsdp._state_dict_utils"


@dataclass(frozen=True)
class FlatPart:
    """This rank's elements [lo, hi), in row-major order, of a parameter with the shape ``shape``.

    ``parameter``: the parameter in the optimizer. ``data``: the memory of the elements, which a load may fill.
    ``everywhere``: whether every rank holds the whole parameter (NO_SHARD).
    """

    parameter: nn.Parameter
    data: torch.Tensor
    shape: Shape
    lo: int
    hi: int
    everywhere: bool

    def has_form(self, shape: Shape) -> bool:
        """Return whether ``shape`` is a shape of optimizer state for these elements."""
        return shape == (self.shape if self.everywhere else (self.hi - self.lo,))

    def shard(self, data: torch.Tensor) -> Shard:
        """Return ``data`` as a shard of a tensor with the parameter's shape.

        It is marked as replicated because, with HYBRID_SHARD, several ranks hold it.
        """
        return Shard(data, self.shape, flat=[(self.lo, self.hi)] if self.lo < self.hi else [], replicated=True)


def flat_parts(model: nn.Module) -> dict[int, FlatPart]:
    """Return the part of each sharded parameter.

    The keys are the id() of the parameter and of its current replacement. Raises InvalidInput if use_orig_params is
    False, or while FSDP uses the parameters. Raises Unsupported for parameters that are DTensors or are not in
    row-major order, because their parts are not flat ranges.
    """
    parts: dict[int, FlatPart] = {}
    for handle in [one._handle for one in _fsdp_modules(model) if one._handle is not None]:
        _check(handle)
        flat = handle.flat_param
        stretch = getattr(flat, "_local_shard", flat.data).detach()
        columns = zip(flat._params, flat._shard_param_infos, flat._shapes, flat._param_infos, strict=True)
        for parameter, info, shape, (name, module, _) in columns:
            part = _part(parameter, stretch, info, tuple(shape), not handle.uses_sharded_strategy)
            parts[id(parameter)] = parts[id(module._parameters.get(name, parameter))] = part
        for name, module, _, first_name, first_module, _ in flat._shared_param_infos:
            first = first_module._parameters[first_name]
            parts[id(module._parameters.get(name, first))] = parts[id(first)]
    return parts


def _part(parameter: nn.Parameter, stretch: torch.Tensor, info: Any, shape: Shape, everywhere: bool) -> FlatPart:
    if not info.in_shard:
        return FlatPart(parameter, stretch[:0], shape, 0, 0, everywhere)
    lo, hi = info.intra_param_start_idx, info.intra_param_end_idx + 1
    # if a user has replaced the parameter's data, FSDP uses the new data starting with the next forward pass
    data = parameter.detach()
    if data.numel() != hi - lo or data.dtype != stretch.dtype:
        data = stretch[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
    return FlatPart(parameter, data.view(shape) if everywhere else data, shape, lo, hi, everywhere)


def _check(handle: Any) -> None:
    names = ", ".join(map(repr, handle.flat_param._fqns[:3]))
    if not handle._use_orig_params:
        raise InvalidInput(
            f"FSDP joined {names}, ... into one parameter because use_orig_params is False, so their optimizer state "
            "cannot be separated; wrap the model with use_orig_params=True"
        )
    if handle._training_state.name != "IDLE":
        raise InvalidInput(
            f"FSDP is using {names}, ... ({handle._training_state.name}); save and load outside of forward, backward "
            "and summon_full_params"
        )
    if any(extension is not None for extension in handle.flat_param._param_extensions):
        raise Unsupported(
            f"FSDP joined {names}, ... of a tensor-parallel model into one parameter; shard the model with "
            "torch.distributed.fsdp.fully_shard"
        )
    if handle.uses_sharded_strategy:
        _check_order(handle.flat_param)


def _check_order(flat: Any) -> None:
    """Raise Unsupported for a parameter that is not in row-major order, because FSDP shards it in memory order."""
    for name, shape, stride in zip(flat._fqns, flat._shapes, flat._strides, strict=True):
        if not torch.empty_strided(shape, stride, device="meta").is_contiguous():
            raise Unsupported(
                f"FSDP shards {name!r} of shape {list(shape)} and strides {list(stride)}, which is not in row-major "
                "order; make it contiguous before it is wrapped (model.to(memory_format=torch.contiguous_format))",
                key=name,
            )


def _fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the FSDP modules, or an empty list if FSDP is not imported."""
    home = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return [one for one in model.modules() if home is not None and isinstance(one, home.FullyShardedDataParallel)]


def reshard(model: nn.Module) -> None:
    """Restore the sharded parameters that a forward pass has replaced, in fully_shard and Megatron-FSDP.

    The ranks do not communicate.
    """
    home = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if home is not None and isinstance(module, home.FSDPModule):
            module.reshard()
    for module in _megatron_modules(model):
        module._replace_param_with_distributed_if_needed()


def _megatron_modules(model: nn.Module) -> list[Any]:
    return [one for one in model.modules() if hasattr(one, "_replace_param_with_distributed_if_needed")]


def drop_gathered(model: nn.Module) -> None:
    """Let the next forward pass of Megatron-FSDP gather the parameters again, because a load has changed them."""
    for module in _megatron_modules(model):
        if module.data_parallel_sharding_strategy != "no_shard":
            module.synchronize_param_gather()


def let_go(model: nn.Module) -> None:
    """Call `reshard`, and also free the whole parameters of FSDP.

    Otherwise, the next forward pass would use the values from before a load.
    """
    reshard(model)
    for module in _fsdp_modules(model):
        if module._handle is not None and hasattr(module._handle.flat_param, "_local_shard"):
            from torch.distributed.fsdp._runtime_utils import _reshard

            _check(module._handle)
            _reshard(module, module._handle, module._handle.uses_sharded_strategy)


def full_dtypes(model: nn.Module) -> dict[int, torch.dtype]:
    """Map the id() of each buffer whose precision FSDP has lowered to its full-precision dtype."""
    dtypes: dict[int, torch.dtype] = {}
    for module in _fsdp_modules(model):
        if module._mixed_precision_enabled_for_buffers():
            from torch.distributed.fsdp._common_utils import clean_tensor_name

            for name, buffer in module.named_buffers():
                dtype = module._buffer_name_to_orig_dtype.get(clean_tensor_name(name), buffer.dtype)
                if dtype != buffer.dtype:
                    dtypes[id(buffer)] = dtype
    return dtypes


@contextmanager
def without_fsdp_hooks(model: nn.Module) -> Iterator[None]:
    """Disable gathering in state_dict and load_state_dict, regardless of FSDP's state_dict_type."""
    kept: list[tuple[nn.Module, str, Any]] = []
    try:
        for module in _fsdp_modules(model):
            for name in _HOOKS:
                hooks = vars(module)[name]
                kept.append((module, name, hooks))
                others = [(key, hook) for key, hook in hooks.items() if not _is_of_fsdp(hook)]
                vars(module)[name] = OrderedDict(others)
        yield
    finally:
        for module, name, hooks in kept:
            vars(module)[name] = hooks


def _is_of_fsdp(hook: Any) -> bool:
    return getattr(getattr(hook, "hook", hook), "__module__", "") == _HOME_OF_HOOKS
