"""Megatron-FSDP on CPUs. It is written for GPUs, so its calls to CUDA do nothing here.

Streams and overlap, NCCL's buffers and FP8 do not run on CPUs. Sharding, gathering and the optimizer are real.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class _Stream:
    """Stub: a CUDA stream or event. Everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, *args: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True


@contextmanager
def without_cuda() -> Iterator[Any]:
    """Stub: CUDA does nothing. Yield Megatron-FSDP, imported as if Megatron-core were not installed.

    Megatron-FSDP would use the older config of an installed Megatron-core, which lacks arguments.
    """
    stubs = {
        "Stream": _Stream, "Event": _Stream, "current_stream": _Stream, "stream": nullcontext,
        "current_device": lambda: 0, "synchronize": lambda *args: None, "empty_cache": lambda: None,
    }  # fmt: skip
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-FSDP, about devices, and torch, about deprecated collectives
        for name, stub in stubs.items():
            stack.enter_context(patch.object(torch.cuda, name, stub))
        stack.enter_context(patch.object(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor))
        yield _imported()


def _imported() -> Any:
    if "megatron_fsdp" in sys.modules:
        return sys.modules["megatron_fsdp"]
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "megatron"}
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(["megatron", *hidden]))
    try:
        return import_module("megatron_fsdp")
    finally:
        del sys.modules["megatron"]
        sys.modules.update(hidden)


def megatron_fsdp(
    model: nn.Module,
    make_optimizer: Any,
    strategy: str,
    *,
    units: Any = (nn.Linear,),
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> tuple[Any, Optimizer]:
    """Shard a model and its optimizer over all ranks. Call it inside `without_cuda`."""
    fully_shard: Any = sys.modules["megatron_fsdp"].fully_shard
    given = {
        "device_mesh": init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("fsdp", "tp")),
        "dp_shard_dim": "fsdp", "tp_dim": "tp", "fsdp_unit_modules": list(units), "zero_dp_strategy": strategy,
        "device": torch.device("cpu"), "calculate_per_token_loss": True, "overlap_grad_reduce": False,
        "overlap_param_gather": strategy != "no_shard",
    }  # fmt: skip
    found: tuple[Any, Optimizer] = fully_shard(model, make_optimizer(model.parameters()), **(given | options))
    return found


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor. The parts lie in the order of the ranks, in the first dimension."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    local = tensor.to_local().detach()
    if all(placement.is_replicate() for placement in tensor.placements):
        return local.clone()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local.clone())
    return torch.cat([part.view(-1) for part in parts]).view(tensor.shape)
