"""DDP with BatchNorm, and stochastic weight averaging (SWA) over the second half of the training.

$ torchrun --nproc-per-node 2 ddp_swa.py
starting
step 10: loss ..., 0 models averaged
step 20: loss ..., 10 models averaged

If you kill it and restart it, it continues after its newest checkpoint, and the losses are bit-identical.
The log warns once that the batch statistics differ across ranks. A checkpoint holds those of rank 0, which DDP also
uses in the next step.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

import casckpt
from casckpt.frontends.trainer import TrainState

STEPS, SWA_START = 20, 10

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
images, labels = torch.randn(64, 3, 8, 8), torch.randint(4, (64,))
model = DistributedDataParallel(
    nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(576, 4))
)
swa = AveragedModel(model.module)
optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optim, SWA_START)
swa_scheduler = SWALR(optim, swa_lr=0.02, anneal_epochs=4)
models = {"model": model, "swa": swa}
train = TrainState(scheduler=scheduler, swa_scheduler=swa_scheduler)  # and each rank's random generators
torch.manual_seed(rank)  # each rank draws its own batches and dropout

with casckpt.Checkpointer("checkpoints", run="swa", save_interval=5, last_step=STEPS) as checkpointer:
    last = checkpointer.resume(models, optim, train)
    if rank == 0:
        print(f"resuming after step {last.step}" if last else "starting")
    for step in range(last.step + 1 if last else 1, STEPS + 1):
        drawn = torch.randint(64, (8,))
        loss = nn.functional.cross_entropy(model(images[drawn]), labels[drawn])
        optim.zero_grad()
        loss.backward()
        optim.step()
        if step > SWA_START:
            swa.update_parameters(model.module)
            swa_scheduler.step()
        else:
            scheduler.step()
        checkpointer.save_if_due(step, models, optim, train, metrics={"loss": loss})
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {int(swa.n_averaged)} models averaged")

update_bn(images.split(8), swa)  # compute the batch statistics for the averaged weights
dist.destroy_process_group()
