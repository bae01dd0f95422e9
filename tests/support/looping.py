"""A real training loop on several ranks, with FSDP2, dropout, a scheduler, a stateful data loader, and a diary.

Only the checkpoint determines the training: the same steps from the same checkpoint yield the same bits.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from casckpt.frontends.trainer import Checkpointer, TrainState
from tests.support.saves import small_folder

SAMPLES, GLOBAL_BATCH, FEATURES = 120, 12, 16


class Loader:
    """Samples in a different order in each epoch. Any number of ranks can share each batch."""

    def __init__(self) -> None:
        self._drawn = torch.Generator().manual_seed(5)
        self._order, self._at = torch.randperm(SAMPLES, generator=self._drawn), 0

    def batch(self) -> torch.Tensor:
        """Return the next samples for all ranks."""
        if self._at == SAMPLES:
            self._order, self._at = torch.randperm(SAMPLES, generator=self._drawn), 0
        self._at += GLOBAL_BATCH
        return self._order[self._at - GLOBAL_BATCH : self._at]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn.get_state(), "order": self._order, "at": self._at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn.set_state(state["drawn"])
        self._order, self._at = state["order"], state["at"]


def sharded_model(size: int) -> nn.Sequential:
    """Return blocks with dropout, sharded over all ranks. Their values do not depend on the number of ranks."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(FEATURES, 24), nn.Dropout(0.2), nn.Tanh(), nn.Linear(24, 17), nn.Dropout(0.2), nn.Linear(17, 1)
    )
    mesh = init_device_mesh("cpu", (size,))
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    return model


@dataclass(frozen=True)
class Plan:
    """One attempt to train ``run`` up to ``steps``.

    ``base``: the checkpoint to start from if the run has none. ``seconds``: the time after which processes are killed,
    or None. ``victim``: the only rank that is killed, or None for all ranks. ``background``: whether saves run in the
    background. ``at_risk``: the checkpointer's `max_steps_at_risk`.
    """

    path: Path
    run: str
    steps: int
    every: int
    base: str | None = None
    seconds: float | None = None
    victim: int | None = None
    background: bool = True
    at_risk: int | None = None

    @property
    def most_lost(self) -> int:
        """The largest number of steps that a kill may lose."""
        if not self.background:
            return self.every
        return 2 * self.every if self.at_risk is None else self.at_risk

    def diary(self, rank: int) -> Path:
        return self.path / f"{self.run}-{rank}.jsonl"


def train_on(rank: int, size: int, plan: Plan) -> int:
    """Run the loop of one rank. Return the step that it resumed from, or 0."""
    deadly = plan.seconds is not None and plan.victim in (None, rank)
    with killed_after(plan.seconds if deadly else None):
        return _loop(rank, size, plan)


@contextmanager
def killed_after(seconds: float | None) -> Iterator[None]:
    """Kill this process with SIGKILL if the block runs longer than ``seconds``."""
    timer = threading.Timer(seconds or 0.0, os.kill, (os.getpid(), signal.SIGKILL))
    if seconds is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _loop(rank: int, size: int, plan: Plan) -> int:
    model = sharded_model(size)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.steps)
    loader = Loader()
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    state = TrainState(schedule=schedule, loader=loader)
    checkpointer = Checkpointer(
        small_folder(plan.path / "store"), run=plan.run, save_interval=plan.every, max_checkpoints=2,
        max_steps_at_risk=plan.at_risk,
    )  # fmt: skip
    found = checkpointer.resume(model, optimizer, state)
    start = found.step if found else 0
    if found is None and plan.base is not None:
        state.load_state_dict(checkpointer.load(plan.base, model, optimizer, load_trainer_state=True))
        start = int(plan.base.rpartition("@")[2])
    with plan.diary(rank).open("a") as diary:
        diary.write(json.dumps({"from": start, "most_lost": plan.most_lost}) + "\n")
        for step in range(start + 1, plan.steps + 1):
            samples, loss = _step(rank, size, model, optimizer, loader)
            schedule.step()
            diary.write(json.dumps({"step": step, "loss": loss, "samples": samples}) + "\n")
            diary.flush()
            saving = checkpointer.save_if_due(step, model, optimizer, state)
            if saving is not None and not plan.background:
                checkpointer.wait()
    checkpointer.close()
    return start


def _step(rank: int, size: int, model: nn.Module, optimizer: optim.Optimizer, loader: Loader) -> tuple[list[int], str]:
    """Train one step. Return the samples of this rank, and the exact bits of the loss over all ranks."""
    mine = loader.batch()[rank::size]
    inputs = torch.stack([torch.randn(FEATURES, generator=torch.Generator().manual_seed(int(one))) for one in mine])
    noise = random.random()  # Python's own generator must be restored, too
    loss = (model(inputs) - inputs.sum(1, keepdim=True) * noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return mine.tolist(), float(total).hex()


@dataclass(frozen=True)
class Diary:
    """The records that all ranks wrote about a run, over all attempts.

    ``losses``, ``samples``: all distinct values by step. There is only one value per step if all attempts agree.
    ``lost``: for each attempt, how many steps of the previous one it repeats, and how many it may repeat.
    """

    losses: dict[int, set[str]]
    samples: dict[int, set[tuple[int, ...]]]
    lost: list[tuple[int, int]]

    @classmethod
    def read(cls, plan: Plan, size: int) -> Diary:
        """Read the records of all ranks."""
        found = cls(defaultdict(set), defaultdict(set), [])
        for rank in range(size):
            found._read(rank, [json.loads(line) for line in plan.diary(rank).read_text().splitlines()])
        return found

    def _read(self, rank: int, lines: list[dict[str, Any]]) -> None:
        done, most = 0, 0
        for line in lines:
            if "from" in line:
                self.lost.append((done - line["from"], most))
                done, most = line["from"], line["most_lost"]
            else:
                done = line["step"]
                self.losses[done].add(line["loss"])
                self.samples[done].add((rank, *line["samples"]))


def expected_samples(steps: int, size: int) -> dict[int, set[tuple[int, ...]]]:
    """Return the samples that the ranks are expected to draw."""
    loader = Loader()
    batches = [loader.batch() for _ in range(steps)]
    shares = {step: [batch[rank::size].tolist() for rank in range(size)] for step, batch in enumerate(batches, 1)}
    return {step: {(rank, *share) for rank, share in enumerate(mine)} for step, mine in shares.items()}
