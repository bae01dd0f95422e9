"""The training of `casckpt demo`: a model of a few megabytes, most of it frozen, saved three times. Needs no data."""

from __future__ import annotations

from typing import Any, Final

import torch

from casckpt.checkpoint.handle import Checkpoint
from casckpt.checkpoint.store import Store

RUN: Final = "demo"
STEPS: Final = (10, 20, 30)
_WIDTH = 512
_SEED = 0


class Training:
    """A frozen backbone and a head that learns to copy one of its inputs."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(_SEED)
        layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(4)]
        self.model = torch.nn.ModuleDict({"backbone": torch.nn.Sequential(*layers), "head": torch.nn.Linear(_WIDTH, 1)})
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=self._random) / _WIDTH**0.5)
        self.model["backbone"].requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model["head"].parameters(), lr=1e-2)
        self.step = 0

    def train(self, until: int) -> float:
        """Train up to a step; the last loss."""
        loss = torch.zeros(())
        while self.step < until:
            inputs = torch.randn(16, _WIDTH, generator=self._random)
            loss = (self.model["head"](self.model["backbone"](inputs)) - inputs[:, :1]).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict(), "step": self.step}


def train_and_save(store: Store) -> list[Checkpoint]:
    """Train, and save at each of `STEPS`."""
    training = Training()
    saved = []
    for step in STEPS:
        loss = training.train(step)
        saved.append(store.save(training.state(), run=RUN, step=step, metadata={"loss": round(loss, 4)}))
    return saved


def loads_exactly(store: Store, ref: str) -> bool:
    """Train anew up to the step of ``ref``, load it into zeros, and compare every bit."""
    training = Training()
    training.train(store.get(ref).step)
    expected = {key: tensor.clone() for key, tensor in training.model.state_dict().items()}
    blank = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    store.load({"model": blank}, ref, unread="ignore")
    return all(torch.equal(blank[key], tensor) for key, tensor in expected.items())
