"""The training run of `casckpt demo`: a small, mostly frozen model that is saved three times.

`tools/demo` has a larger one.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from casckpt.contents.checkpoint import Checkpoint
from casckpt.store.store import Store

RUN: Final = "demo"
STEPS: Final = (10, 20, 30)
_WIDTH = 512
_SEED = 0


class Training:
    """A frozen backbone and a head that learns to copy one of its inputs.

    A subclass can train a different model: it creates ``model`` and ``optimizer``, and computes the loss.
    """

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(_SEED)
        layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(4)]
        model = torch.nn.ModuleDict({"backbone": torch.nn.Sequential(*layers), "head": torch.nn.Linear(_WIDTH, 1)})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=self.random) / _WIDTH**0.5)
        model["backbone"].requires_grad_(False)
        self.begin(model)

    def begin(self, model: torch.nn.Module) -> None:
        """Prepare to train the parameters of ``model`` that are not frozen."""
        self.model, self.step = model, 0
        self.optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)

    def loss(self) -> torch.Tensor:
        """Compute the loss of one step."""
        inputs = torch.randn(16, _WIDTH, generator=self.random)
        layers: Any = self.model
        predicted: torch.Tensor = layers["head"](layers["backbone"](inputs))
        return (predicted - inputs[:, :1]).square().mean()

    def train(self, until: int) -> float:
        """Train up to a step, and return the last loss."""
        loss = torch.zeros(())
        while self.step < until:
            loss = self.loss()
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            self.optimizer.step()
            self.step += 1
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """Return the state to save."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict(), "step": self.step}


def train_and_save(store: Store, training: Training) -> list[Checkpoint]:
    """Train, and save at each of `STEPS`."""
    saved = []
    for step in STEPS:
        loss = training.train(step)
        saved.append(store.save(training.state(), run=RUN, step=step, metadata={"loss": round(loss, 4)}))
    return saved


def loads_exactly(store: Store, ref: str, training: Training) -> bool:
    """Repeat the training up to the step of ``ref``, load that checkpoint into zeros, and compare every bit."""
    training.train(store.get(ref).step)
    expected = {key: tensor.clone() for key, tensor in training.model.state_dict().items()}
    blank = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    store.load({"model": blank}, ref, unread="ignore")
    return all(torch.equal(blank[key], tensor) for key, tensor in expected.items())
