"""nanoGPT's train.py: evaluates and saves at the top of the loop, and draws each batch one step ahead."""

import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import casckpt
from casckpt.frontends.trainer import TrainState
from tests.programs.shared import ended, options, ran, starts

args = options(call="save_if_due")
max_iters = lr_decay_iters = args.steps
eval_interval, eval_iters, gradient_accumulation_steps, batch_size, block_size = 10, 2, 2, 4, 8
learning_rate, min_lr, warmup_iters, vocab_size = 1e-2, 1e-3, 5, 32
always_save_checkpoint = True

torch.manual_seed(1337)
data = {"train": torch.arange(2000).square() % vocab_size, "val": torch.arange(500).square() % vocab_size}


def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    ix = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([data[split][i : i + block_size] for i in ix])
    y = torch.stack([data[split][i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def estimate_loss() -> dict[str, torch.Tensor]:
    model.eval()
    out = {split: torch.stack([get_loss(*get_batch(split)) for _ in range(eval_iters)]).mean() for split in data}
    model.train()
    return out


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = nn.Sequential(nn.Embedding(vocab_size, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, vocab_size))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
train = TrainState(best_val_loss=1e9)
checkpointer = casckpt.Checkpointer(
    args.store, run="gpt", save_interval=eval_interval, last_step=max_iters, max_checkpoints=3, gc=True
)
last = checkpointer.resume(model, optimizer, train) if args.resume else None
iter_num = last.step if last else 0
starts(last.step if last else None)

X, Y = get_batch("train")  # fetch the very first batch
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    # evaluate the loss on train/val sets and write checkpoints
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        if losses["val"] < train["best_val_loss"] or always_save_checkpoint:
            train["best_val_loss"] = min(losses["val"].item(), train["best_val_loss"])
            if args.call == "save_if_due":
                checkpointer.save_if_due(iter_num, model, optimizer, train, metrics={"val": losses["val"]})
            elif iter_num > 0:
                checkpointer.save(iter_num, model, optimizer, train, metrics={"val": losses["val"]})

    for _ in range(gradient_accumulation_steps):
        loss = get_loss(X, Y) / gradient_accumulation_steps
        X, Y = get_batch("train")  # immediately prefetch the next batch
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    ran(iter_num, lr)
    iter_num += 1
    if iter_num > max_iters:
        break

checkpointer.close()
ended(model.state_dict())
