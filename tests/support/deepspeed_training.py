"""A DeepSpeed training on CPUs, as a program that saves one checkpoint: ``FOLDER STAGE``. Each needs new processes."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import torch
from torch import nn


def main(folder: str, stage: int) -> None:
    """Train for two steps with all ranks, and save."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["WORLD_SIZE"]}
    deepspeed = import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 256).requires_grad_(False), nn.LayerNorm(256), nn.Linear(256, 128))
    optimizer = torch.optim.AdamW(model[1:].parameters(), lr=0.01)
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config | {"zero_allow_untested_optimizer": True}
    )
    for step in range(2):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).square().sum())
        engine.step()
    engine.save_checkpoint(folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
