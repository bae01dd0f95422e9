"""FSDP: which part of each parameter this rank holds of a flat parameter, and how to look without gathering anything.

FullyShardedDataParallel joins the parameters of a module to a flat one, of which each rank has a stretch. With
use_orig_params=True the parameters are still there: as one-dimensional views into the stretch, empty where it has
nothing of them. From a forward until what follows it they may be whole, and of low precision; the stretch is not.

The names of attributes are those of torch: it has no public way to ask for them.
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
    """The elements [lo, hi), in row-major order, of a parameter of ``shape``: those that this rank holds.

    ``parameter``: the one that optimizers know. ``data``: the elements, where a load may put them. ``everywhere``: all
    of it is on every rank (NO_SHARD).
    """

    parameter: nn.Parameter
    data: torch.Tensor
    shape: Shape
    lo: int
    hi: int
    everywhere: bool

    def has_form(self, shape: Shape) -> bool:
        """Tell whether that is the shape of an optimizer's state for these elements."""
        return shape == (self.shape if self.everywhere else (self.hi - self.lo,))

    def shard(self, data: torch.Tensor) -> Shard:
        """``data``, as many elements as these, of a tensor of the parameter's shape. HYBRID_SHARD makes replicas."""
        return Shard(data, self.shape, flat=[(self.lo, self.hi)] if self.lo < self.hi else [], replicated=True)


def flat_parts(model: nn.Module) -> dict[int, FlatPart]:
    """The part of each parameter that FSDP shards, by the id() of the parameter and of what stands in its place now.

    Raises InvalidInput if they cannot be told apart (use_orig_params=False) or are in use, Unsupported for what no flat
    range of a whole is: parameters that are DTensors, or do not lie in row-major order.
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
    # a user may have given the parameter other memory, which FSDP takes over at the next forward
    data = parameter.detach()
    if data.numel() != hi - lo or data.dtype != stretch.dtype:
        data = stretch[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
    return FlatPart(parameter, data.view(shape) if everywhere else data, shape, lo, hi, everywhere)


def _check(handle: Any) -> None:
    names = ", ".join(map(repr, handle.flat_param._fqns[:3]))
    if not handle._use_orig_params:
        raise InvalidInput(
            f"FSDP joined {names}, ... to one parameter with use_orig_params=False, and their state in an optimizer "
            "cannot be told apart; wrap the model with use_orig_params=True"
        )
    if handle._training_state.name != "IDLE":
        raise InvalidInput(
            f"{names}, ... are in use by FSDP ({handle._training_state.name}); save and load outside forward, backward "
            "and summon_full_params"
        )
    if any(extension is not None for extension in handle.flat_param._param_extensions):
        raise Unsupported(
            f"FSDP joined {names}, ... of a tensor-parallel model to one parameter; shard it with "
            "torch.distributed.fsdp.fully_shard"
        )
    if handle.uses_sharded_strategy:
        _check_order(handle.flat_param)


def _check_order(flat: Any) -> None:
    """A parameter that does not lie in row-major order FSDP cuts in the order in which it lies."""
    for name, shape, stride in zip(flat._fqns, flat._shapes, flat._strides, strict=True):
        if not torch.empty_strided(shape, stride, device="meta").is_contiguous():
            raise Unsupported(
                f"FSDP shards {name!r} of shape {list(shape)} and strides {list(stride)}, which is not in row-major "
                "order; make it contiguous before it is wrapped (model.to(memory_format=torch.contiguous_format))",
                key=name,
            )


def _fsdp_modules(model: nn.Module) -> list[Any]:
    """Modules that FSDP wraps. Asked without importing it: where it is not loaded, there are none."""
    home = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return [one for one in model.modules() if home is not None and isinstance(one, home.FullyShardedDataParallel)]


def reshard(model: nn.Module) -> None:
    """Let go of whole parameters that FSDP and fully_shard still have from a forward. Talks to nobody."""
    home = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if home is not None and isinstance(module, home.FSDPModule):
            module.reshard()


def let_go(model: nn.Module) -> None:
    """`reshard`, and FSDP's too: it would use them again in the next forward, old as they are after a load."""
    reshard(model)
    for module in _fsdp_modules(model):
        if module._handle is not None and hasattr(module._handle.flat_param, "_local_shard"):
            from torch.distributed.fsdp._runtime_utils import _reshard

            _check(module._handle)
            _reshard(module, module._handle, module._handle.uses_sharded_strategy)


def full_dtypes(model: nn.Module) -> dict[int, torch.dtype]:
    """The dtype, by id(), that each buffer had before FSDP's mixed precision lowered it."""
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
    """Inside, state_dict and load_state_dict pass by FSDP, whatever state_dict_type is set: nothing is gathered."""
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
