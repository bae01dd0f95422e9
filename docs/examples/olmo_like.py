"""A trainer in the style of OLMo-core: a train module defines what is saved, and the trainer holds the rest.

$ torchrun --nproc-per-node 2 olmo_like.py
step 10: loss ..., 640 tokens seen
step 20: loss ..., 1280 tokens seen
step 30: loss ..., 1920 tokens seen

If you kill it and restart it, even on a different number of ranks, it continues after its newest checkpoint.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from casckpt.frontends.trainer import Checkpointer

STEPS, GLOBAL_BATCH, LENGTH, VOCABULARY = 30, 8, 8, 32


class TrainModule:
    """The model and its optimizer, sharded. The three state methods have the same signatures as in OLMo-core."""

    options = dcp.StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 32))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))  # "cuda" on GPUs
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def state_dict_to_save(self) -> dict[str, Any]:
        """Return the state that a checkpoint should hold."""
        model, optim = dcp.get_state_dict(self.model, self.optim, options=self.options)
        return {"model": model, "optim": optim}

    def state_dict_to_load(self, metadata: object) -> dict[str, Any]:
        """Return the state that a load should fill."""
        return self.state_dict_to_save()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Apply the state that a load has filled."""
        dcp.set_state_dict(
            self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"],
            options=self.options,
        )  # fmt: skip

    def train_batch(self, ids: torch.Tensor) -> torch.Tensor:
        """Train on this rank's share of a batch."""
        loss = cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        return loss.detach()


class Trainer:
    """The training loop and its state: the position in the data, and the number of tokens seen."""

    def __init__(self, module: TrainModule) -> None:
        self.module, self.global_step, self.tokens_seen = module, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"global_step": self.global_step, "tokens_seen": self.tokens_seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self.global_step, self.tokens_seen = state["global_step"], state["tokens_seen"]

    def batch(self) -> torch.Tensor:
        """Return this rank's share of a step's batch. The whole batch does not depend on the number of ranks."""
        drawn = torch.randint(1000, (GLOBAL_BATCH, 1), generator=torch.Generator().manual_seed(self.global_step))
        whole = (drawn + torch.arange(LENGTH + 1)).square() % VOCABULARY
        return whole[dist.get_rank() :: dist.get_world_size()]

    def fit(self) -> None:
        """Train up to the last step."""
        with Checkpointer("checkpoints", run="olmo", save_interval=10, last_step=STEPS) as checkpointer:
            checkpointer.resume(self.module, train_state=self)
            while self.global_step < STEPS:
                self.global_step += 1
                loss = self.module.train_batch(self.batch())
                self.tokens_seen += GLOBAL_BATCH * LENGTH
                checkpointer.save_if_due(self.global_step, self.module, train_state=self, metrics={"loss": loss})
                if dist.get_rank() == 0 and self.global_step % 10 == 0:
                    print(f"step {self.global_step}: loss {loss:.4f}, {self.tokens_seen} tokens seen")


dist.init_process_group("gloo")  # "nccl" on GPUs
Trainer(TrainModule()).fit()
dist.destroy_process_group()
