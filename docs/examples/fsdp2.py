"""FSDP2 under torchrun: each rank saves and loads its own shards, and the number of ranks may change.

$ torchrun --nproc-per-node 2 fsdp2.py
2 ranks: starting
2 ranks: saved step 30, ... MiB on 2 ranks

If you kill it and restart it on any number of ranks, it continues after its newest checkpoint.

$ torchrun --nproc-per-node 1 fsdp2.py
1 ranks: resuming after step 10, which 2 ranks saved
1 ranks: saved step 30, ... MiB on 1 ranks
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from casckpt.frontends.trainer import Checkpointer, TrainState

STEPS, GLOBAL_BATCH = 30, 8

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, size = dist.get_rank(), dist.get_world_size()


def say(text: str) -> None:
    """Print on rank 0."""
    if rank == 0:
        print(f"{size} ranks: {text}", flush=True)


torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
mesh = init_device_mesh("cpu", (size,))  # "cuda" on GPUs
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optim = torch.optim.AdamW(model.parameters())
train = TrainState(ranks=size)

with Checkpointer("checkpoints", run="fsdp2", save_interval=5, last_step=STEPS) as checkpointer:  # on every rank
    last = checkpointer.resume(model, optim, train)
    say(f"resuming after step {last.step}, which {train['ranks']} ranks saved" if last else "starting")
    train["ranks"] = size
    for step in range(last.step + 1 if last else 1, STEPS + 1):
        batch = torch.randn(GLOBAL_BATCH, 256, generator=torch.Generator().manual_seed(step))  # the batch for all ranks
        model(batch[rank::size]).square().mean().backward()
        optim.step()
        optim.zero_grad()
        checkpointer.save_if_due(step, model, optim, train)
    checkpointer.wait()
    newest = checkpointer.latest_checkpoint()
    say(f"saved step {newest.step}, {newest.stats.bytes_total >> 20} MiB on {size} ranks")

dist.destroy_process_group()
