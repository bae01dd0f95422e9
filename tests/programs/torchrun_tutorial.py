"""multigpu_torchrun.py of PyTorch's DDP series: a snapshot holds the epoch that it ended, which a restart repeats."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import casckpt
from tests.programs.shared import ended, options, ran, starts


class Trainer:
    def __init__(
        self,
        model: torch.nn.Module,
        train_data: Any,
        optimizer: torch.optim.Optimizer,
        checkpointer: casckpt.Checkpointer,
    ) -> None:
        self.train_data = train_data
        self.optimizer = optimizer
        self.epochs_run = 0
        self.checkpointer = checkpointer
        self.model = DistributedDataParallel(model)
        last = self._load_snapshot() if args.resume else None
        starts(last.step if last else None)

    def _load_snapshot(self) -> casckpt.Checkpoint | None:
        snapshot = self.checkpointer.resume(self.model, self.optimizer)
        if snapshot:
            self.epochs_run = snapshot.step
        return snapshot

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch: int) -> None:
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def _save_snapshot(self, epoch: int) -> None:
        if args.call == "save_if_due":
            self.checkpointer.save_if_due(epoch, self.model, self.optimizer)
        else:
            self.checkpointer.save(epoch, self.model, self.optimizer)

    def train(self, max_epochs: int) -> None:
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            self._save_snapshot(epoch)  # on every rank, where the tutorial asks for rank 0
            ran(epoch, self.optimizer.param_groups[0]["lr"])


args = options(call="save_if_due")
dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.rand(32, 20), torch.rand(32, 1))
loader = DataLoader(dataset, batch_size=4, shuffle=False, sampler=DistributedSampler(dataset))
net = torch.nn.Linear(20, 1)
with casckpt.Checkpointer(args.store, run="snapshot", save_interval=1, max_checkpoints=3, gc=True) as checkpointer:
    trainer = Trainer(net, loader, torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9), checkpointer)
    trainer.train(args.steps + 1)  # so that the last epoch is --steps, as in the other programs
ended(net.state_dict())
dist.destroy_process_group()
