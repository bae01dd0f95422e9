"""timm's train.py: epochs, an average of the weights, a schedule of the epoch's number, the last and the best kept."""

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import casckpt
from casckpt.frontends.trainer import TrainState
from tests.programs.shared import ended, options, ran, starts


class ModelEma(nn.Module):
    """An average of a model's weights and buffers."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for average, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            if average.is_floating_point():
                average.lerp_(value, 1.0 - self.decay)
            else:
                average.copy_(value)


class CosineScheduler:
    """Sets the rate of an epoch from its number, as timm's schedulers do. timm does not save it."""

    def __init__(self, optimizer: torch.optim.Optimizer, t_initial: int, lr_min: float, warmup_t: int) -> None:
        self.optimizer, self.t_initial, self.lr_min, self.warmup_t = optimizer, t_initial, lr_min, warmup_t
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.step(0)

    def step(self, epoch: int) -> None:
        for group in self.optimizer.param_groups:
            base = group["initial_lr"]
            if epoch < self.warmup_t:
                group["lr"] = base * (epoch + 1) / (self.warmup_t + 1)
            else:
                done = min(1.0, epoch / self.t_initial)
                group["lr"] = self.lr_min + 0.5 * (base - self.lr_min) * (1 + math.cos(math.pi * done))


def batches(epoch: int | None) -> Any:
    if epoch is None:
        return zip(images.split(16), labels.split(16), strict=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    return zip(images[order].split(16), labels[order].split(16), strict=True)


def train_one_epoch(epoch: int) -> None:
    model.train()
    for batch, target in batches(epoch):
        loss = cross_entropy(model(batch), target, label_smoothing=0.1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        model_ema.update(model)


@torch.no_grad()
def validate(network: nn.Module) -> dict[str, float]:
    network.eval()
    losses = [cross_entropy(network(batch), target) for batch, target in batches(None)]
    return {"loss": torch.stack(losses).mean().item()}


args = options()
num_epochs = args.steps + 1  # so that the last epoch is --steps, as in the other programs
torch.manual_seed(42)
images, labels = torch.randn(64, 12), torch.randint(5, (64,))
model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.05)
scaler = torch.amp.GradScaler("cpu", enabled=False)
model_ema = ModelEma(model, decay=0.9)
lr_scheduler = CosineScheduler(optimizer, t_initial=num_epochs, lr_min=1e-4, warmup_t=2)

models = {"model": model, "ema": model_ema.module}
train = TrainState(loss_scaler=scaler)
with casckpt.Checkpointer(
    args.store, run="timm", save_interval=1, max_checkpoints=1, keep={"keep_best": ["loss:3"]}, gc=True
) as saver:
    last = saver.resume(models, optimizer, train) if args.resume else None
    starts(last.step if last else None)
    start_epoch = last.step + 1 if last else 0
    if start_epoch > 0:
        lr_scheduler.step(start_epoch)
    for epoch in range(start_epoch, num_epochs):
        rate = optimizer.param_groups[0]["lr"]
        train_one_epoch(epoch)
        eval_metrics = validate(model_ema.module)
        lr_scheduler.step(epoch + 1)
        saver.save_if_due(epoch, models, optimizer, train, metrics=eval_metrics)
        ran(epoch, rate)
ended({**model.state_dict(), **{f"ema.{name}": value for name, value in model_ema.module.state_dict().items()}})
