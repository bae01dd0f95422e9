"""One rank of a job that trains, saves, and resumes. It works with each of the libraries."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import casckpt
from casckpt.frontends.trainer import Checkpointer, CheckpointEvent, SaveOnSignal, TrainState
from soaking.books import Books, Wrong
from soaking.weeks.ledger import NEWEST, RUN, Ledger, digests

WIDTH, CLASSES = 601, 37  # no number of ranks divides them


class Net(nn.Module):
    """A frozen part, a part in which few numbers change at each step, and a part that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.body = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        found: torch.Tensor = self.head(torch.tanh(self.body(self.backbone(x).bfloat16())).float())
        return found


def build(ranks: int) -> tuple[Net, torch.optim.Optimizer]:
    """Return the model and its optimizer, sharded unless there is one rank."""
    torch.manual_seed(0)
    model = Net()
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for part in (model.backbone, model.body, model.head):
            fully_shard(part, mesh=mesh)
    trained = [one for one in model.parameters() if one.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-4, foreach=False)


def whole(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, str]:
    """Return the digests of all tensors, under the keys of a checkpoint. Every rank makes the call."""

    def gathered(value: Any) -> Any:
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    state = {
        name: {key: gathered(value) for key, value in optim.state[one].items()}
        for name, one in model.named_parameters()
        if one in optim.state
    }
    weights = {name: gathered(value) for name, value in model.state_dict().items()}
    return digests({"model": weights, "optim": {"state": state}})


class Job:
    """The work of one rank. ``asked``: what the driver has asked for."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self.asked, self.number, self.is_first = asked, asked["number"], asked["rank"] == 0
        self.began = time.monotonic()
        self.books = Books(Path(asked["folder"]))
        self.model, self.optim = build(asked["ranks"])
        self.state = TrainState(counted=0)

    def run(self) -> None:
        """Resume, train and save."""
        asked = self.asked
        if Path(casckpt.__file__).parents[1].name != asked["library"]:
            raise Wrong(f"job {self.number} is for the library {asked['library']}, and uses {casckpt.__file__}")
        store = casckpt.open(asked["store"], mirror=asked["mirror"], sign_with=asked["key_file"])
        given: Any = {"max_checkpoints": NEWEST, "keep": asked["keep"], **asked["more"]}
        given |= {"save_interval": 1, "gc": True, "compress": "auto"}
        with (
            Checkpointer(store, run=RUN, on_event=self._note, **given) as checkpointer,
            SaveOnSignal(checkpointer) as stop,
        ):
            first = self._resume(checkpointer)
            for step in range(first, first + asked["saves"]):
                loss = self._train(step)
                self._begin(step, loss)
                checkpointer.save_if_due(
                    step, self.model, self.optim, self.state, metrics={"loss": loss}, metadata={"job": self.number}
                )
                stop.check(step, self.model, self.optim, self.state)
                time.sleep(asked["interval"])

    def _resume(self, checkpointer: Checkpointer) -> int:
        """Continue with the newest checkpoint, and compare it with the books. Return the next step."""
        last = checkpointer.resume(self.model, self.optim, self.state, prove=self.asked["prove"])
        found = whole(self.model, self.optim)
        step = last.step if last else 0
        if step < self.asked["least"]:
            raise Wrong(f"job {self.number} continues after step {step}, but {self.asked['least']} was saved")
        if last and self.is_first:
            job = last.metadata["job"]
            begun = Ledger(self.books).check(step, job, found)
            if self.state["counted"] != step:
                raise Wrong(f"the train state of {RUN}@{step} is that of step {self.state['counted']}")
            self.books.note("resumed", job=self.number, step=step, of=job, ranks=begun["ranks"], by=self.asked["ranks"])
        return step + 1

    def _train(self, step: int) -> float:
        """Make a step. Return the loss, which is drawn, because it must be the same on all ranks."""
        drawn = torch.Generator().manual_seed(1_000_003 * self.number + step)
        self.model(torch.randn(8, WIDTH, generator=drawn)).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()
        self.state["counted"] = step
        return 1 + torch.rand((), generator=drawn).item() - step / 1e5

    def _begin(self, step: int, loss: float) -> None:
        found, asked = whole(self.model, self.optim), self.asked
        if self.is_first:
            known = {name: asked[name] for name in ("ranks", "key", "library")}
            self.books.note("begun", step=step, job=self.number, loss=loss, **known, digests=found)

    def _note(self, event: CheckpointEvent) -> None:
        """Record what happened to a checkpoint, on rank 0."""
        if event.kind == "saved" and event.checkpoint:
            one = event.checkpoint
            created = one.created_at.timestamp()
            known = {"step": one.step, "id": one.id, "created": created, "loss": one.metrics["loss"]}
            self.books.note("saved", job=self.number, **known)
            at = self.asked["at"] + time.monotonic() - self.began
            self.books.note("costs", step=one.step, at=at, **event.figures)
        elif event.kind == "failed":
            full = bool(getattr(event.error, "full", False))
            self.books.note("failed", step=event.step, job=self.number, full=full, why=event.reason)
        elif event.kind == "forgotten":
            self.books.note("forgotten", step=event.step, job=self.number)


def train(asked: Mapping[str, Any]) -> None:
    """Run one rank of a job. Without a process group if there is one rank."""
    if asked["ranks"] > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{asked['rendezvous']}", rank=asked["rank"], world_size=asked["ranks"]
        )
    Job(asked).run()
    if dist.is_initialized():
        dist.destroy_process_group()
