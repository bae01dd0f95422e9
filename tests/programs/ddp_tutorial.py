"""PyTorch's "Getting Started with DDP": its demo of checkpoints, in processes that the program itself starts."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import casckpt
from casckpt.frontends.trainer import TrainState
from tests.programs.shared import ended, options, ran, starts
from tests.support.servers import free_ports


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


def demo_checkpoint(rank: int, world_size: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    args = options()
    torch.manual_seed(0)
    ddp_model = DistributedDataParallel(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.01, momentum=0.9)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    torch.manual_seed(rank)
    train = TrainState(scheduler=scheduler)
    with casckpt.Checkpointer(
        args.store, run="demo", save_interval=10, last_step=args.steps, max_checkpoints=3, gc=True
    ) as checkpointer:
        last = checkpointer.resume(ddp_model, optimizer, train) if args.resume else None
        starts(last.step if last else None)
        for step in range(last.step + 1 if last else 1, args.steps + 1):
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(torch.randn(20, 10)), torch.randn(20, 5))
            loss.backward()
            optimizer.step()
            scheduler.step()
            checkpointer.save_if_due(step, ddp_model, optimizer, train, metrics={"loss": loss})
            ran(step, scheduler.get_last_lr()[0])
    ended(ddp_model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    # the tutorial spawns; a fork costs no second import of torch
    mp.start_processes(demo_checkpoint, args=(2, free_ports(1)[0]), nprocs=2, join=True, start_method="fork")
