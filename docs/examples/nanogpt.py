"""nanoGPT's training loop: a small GPT with DDP, warmup and decay, and batches that depend only on the step.

$ torchrun --nproc-per-node 1 nanogpt.py
starting
step 10: loss ..., rate 0.0090
step 20: loss ..., rate 0.0035
step 30: loss ..., rate 0.0000

If you kill it and restart it, even on a different number of ranks, it continues after its newest checkpoint.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import casckpt

STEPS, GLOBAL_BATCH, CONTEXT, VOCABULARY = 30, 8, 8, 32


class GPT(nn.Module):
    """Two layers of width 16, with a head that is tied to the embedding."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits. ``ids``: [batch, context]."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the batch of a step for all ranks, and return this rank's share: inputs and targets."""
    starts = torch.randint(len(text) - CONTEXT, (GLOBAL_BATCH,), generator=torch.Generator().manual_seed(step))
    ids = torch.stack([text[start : start + CONTEXT + 1] for start in starts[rank::size]])
    return ids[:, :-1], ids[:, 1:]


def rate(step: int) -> float:
    """Return the learning rate, which warms up for 5 steps and then decays."""
    return 1e-2 * min(step / 5, 0.5 + 0.5 * math.cos(math.pi * (step - 5) / (STEPS - 5)))


dist.init_process_group("gloo")  # "nccl" on GPUs
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
text = torch.arange(1000).square() % VOCABULARY
model = DistributedDataParallel(GPT())
optim = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)

with casckpt.Checkpointer(
    "checkpoints", run="nanogpt", save_interval=10, last_step=STEPS, max_checkpoints=3, gc=True
) as checkpointer:
    last = checkpointer.resume(model, optim)
    if rank == 0:
        print(f"resuming after step {last.step}" if last else "starting")
    for step in range(last.step + 1 if last else 1, STEPS + 1):
        for group in optim.param_groups:
            group["lr"] = rate(step)
        inputs, targets = batch(step)
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optim.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        checkpointer.save_if_due(step, model, optim, metrics={"loss": loss})
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, rate {rate(step):.4f}")

dist.destroy_process_group()
