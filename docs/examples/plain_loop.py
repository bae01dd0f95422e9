"""A training loop that resumes, saves in the background, and keeps its newest checkpoints and the best checkpoint.

$ python plain_loop.py
starting
step 20: loss ...
step 40: loss ...
step 60: loss ...
kept: train@20 train@40 train@60, best is train@60
$ python plain_loop.py
resuming after step 60
step 80: loss ...
kept: ... train@60 train@80, best is train@...
"""

import torch

import casckpt
from casckpt.frontends.trainer import Checkpointer, TrainState

torch.manual_seed(0)
inputs = torch.randn(256, 16)
targets = inputs.sum(dim=1, keepdim=True)

model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optim, gamma=0.99)
train = TrainState(scheduler=scheduler, best=float("inf"))  # and the random generators

store = casckpt.open("checkpoints")
with Checkpointer(store, run="train", save_interval=20, max_checkpoints=2, gc=True) as checkpointer:
    last = checkpointer.resume(model, optim, train)
    print(f"resuming after step {last.step}" if last else "starting")
    first = last.step + 1 if last else 1
    for step in range(first, first + 20 if last else 61):
        batch = torch.randint(256, (32,))
        loss = (model(inputs[batch]) - targets[batch]).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        scheduler.step()
        saving = checkpointer.save_if_due(step, model, optim, train, metrics={"loss": loss.item()})
        if saving is not None:
            print(f"step {step}: loss {loss.item():.4f}")
            if loss.item() < train["best"]:
                train["best"] = loss.item()
                store.tag("best", saving.result())  # a tag protects it from every retention rule

kept = " ".join(f"{ckpt.run}@{ckpt.step}" for ckpt in store.checkpoints("train"))
best = store.get("tag:best")
print(f"kept: {kept}, best is {best.run}@{best.step}")
