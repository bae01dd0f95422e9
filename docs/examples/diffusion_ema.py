"""Diffusion: a denoiser and its exponential moving average (EMA), from which one would draw samples.

$ torchrun --nproc-per-node 1 diffusion_ema.py
starting
step 10: loss ...
step 20: loss ...
step 30: loss ...
the average: loss ...

If you kill it and restart it, even on a different number of ranks, it continues after its newest checkpoint.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import casckpt
from casckpt.frontends.trainer import TrainState

STEPS, GLOBAL_BATCH, LEVELS = 30, 16, 50


class Denoiser(nn.Module):
    """Predicts the noise in points of a plane."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 2)

    def forward(self, points: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        """Return the noise. ``points``: [batch, 2]; ``level``: the noise level, [batch]."""
        noise: torch.Tensor = self.out(self.layers(torch.cat([points, level[:, None] / LEVELS], 1)))
        return noise


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw points on a circle, noise and noise levels for all ranks, and return this rank's share."""
    drawn = torch.Generator().manual_seed(step)  # depends only on the step, not on the number of ranks
    angle = 2 * math.pi * torch.rand(GLOBAL_BATCH, generator=drawn)
    noise = torch.randn(GLOBAL_BATCH, 2, generator=drawn)
    level = torch.randint(LEVELS, (GLOBAL_BATCH,), generator=drawn)
    points = torch.stack([angle.cos(), angle.sin()], 1)
    return points[rank::size], noise[rank::size], level[rank::size]


dist.init_process_group("gloo")  # "nccl" on GPUs
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
clean = torch.linspace(1.0, 0.02, LEVELS)  # the share of the signal at each level
model = DistributedDataParallel(Denoiser())
ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optim = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optim, 5e-3, STEPS)
models, train = {"model": model, "ema": ema}, TrainState(scheduler=scheduler)

with casckpt.Checkpointer("checkpoints", run="diffusion", save_interval=10, last_step=STEPS) as checkpointer:
    last = checkpointer.resume(models, optim, train)
    if rank == 0:
        print(f"resuming after step {last.step}" if last else "starting")
    for step in range(last.step + 1 if last else 1, STEPS + 1):
        points, noise, level = batch(step)
        signal = clean[level, None]
        loss = (model(signal.sqrt() * points + (1 - signal).sqrt() * noise, level) - noise).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        scheduler.step()
        ema.update_parameters(model.module)
        checkpointer.save_if_due(step, models, optim, train, metrics={"loss": loss})
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

points, noise, level = batch(0)
signal = clean[level, None]
with torch.no_grad():
    guess = ema(signal.sqrt() * points + (1 - signal).sqrt() * noise, level)
if rank == 0:
    print(f"the average: loss {(guess - noise).square().mean():.4f}")
dist.destroy_process_group()
