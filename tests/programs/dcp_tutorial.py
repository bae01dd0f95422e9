"""PyTorch's "Getting Started with Distributed Checkpoint": an AppState, FSDP2, and dcp.save with casckpt's writer."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import casckpt
from casckpt.errors import NotFound
from casckpt.frontends.dcp import StorageReader, StorageWriter
from tests.programs.shared import ended, options, ran, starts


class AppState(Stateful):
    """The model and the optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def newest() -> int:
    try:
        return store.get("fsdp@latest").step
    except NotFound:  # the first job
        return 0


args = options()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
store = casckpt.open(args.store)

start = newest() if args.resume else 0
if start:
    dcp.load({"app": AppState(model, optimizer)}, storage_reader=StorageReader(store, f"fsdp@{start}"))
starts(start or None)
for step in range(start + 1, args.steps + 1):
    inputs = torch.rand(8, 16, generator=torch.Generator().manual_seed(step * 2 + dist.get_rank()))
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
    if step % 10 == 0:
        dcp.save({"app": AppState(model, optimizer)}, storage_writer=StorageWriter(store, run="fsdp", step=step))
    ran(step, optimizer.param_groups[0]["lr"])

ended(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
dist.destroy_process_group()
