"""A small model that can be distributed across ranks in several ways, and the differences between two of its states."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.together import line
from tests.support.training import identical


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.up = nn.Linear(6, 10)  # the rows do not divide evenly
            self.norm = nn.BatchNorm1d(10)
            self.down = nn.Linear(10, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.tanh(self.norm(self.up(x)))) * 2
        return found


def build(kind: str, size: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with one kind of distribution, and its optimizer after two steps."""
    model: Any = Net(seed)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp2":
        fully_shard(model, mesh=line(size))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "tp-fsdp2":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(
            model,
            mesh["tp"],
            {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())},
        )
        fully_shard(model, mesh=mesh["dp"])
    optim = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    for step in range(2):
        optim.zero_grad()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optim.step()
    return model, optim


def state_of(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    found, optimizer = get_state_dict(model, optim)
    return {"model": found, "optim": optimizer}


def whole(state: Any) -> Any:
    """Return the state with whole tensors. Tuples become lists, because torch converts some tuples itself."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [whole(value) for value in state]
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def differing(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the paths at which two states differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = [key for key in one if key in other]
        odd = [f"{path}.{key}" for key in {*one, *other} - set(both)]
        return odd + [at for key in both for at in differing(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [at for i, (a, b) in enumerate(zip(one, other, strict=True)) for at in differing(a, b, f"{path}.{i}")]
    return [] if identical(one, other) else [path]
