"""PyTorch's ImageNet example: a save after each epoch, a copy of the best, StepLR, and a shuffled loader."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import casckpt
from casckpt.frontends.trainer import Checkpointer, TrainState
from tests.programs.shared import ended, options, ran, starts


def train_epoch() -> None:
    model.train()
    for images, target in train_loader:
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def validate() -> float:
    model.eval()
    correct = sum((model(images).argmax(1) == target).sum().item() for images, target in val_loader)
    return 100.0 * correct / len(dataset)


args = options()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 12), torch.randint(4, (64,)))
train_loader, val_loader = DataLoader(dataset, batch_size=16, shuffle=True), DataLoader(dataset, batch_size=64)
model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=args.steps // 3, gamma=0.1)

store = casckpt.open(args.store)
checkpointer = Checkpointer(store, run="resnet", max_checkpoints=3, gc=True)
train = TrainState(scheduler=scheduler, best_acc1=0.0, arch="resnet")
start_epoch = 0
starting = checkpointer.resume(model, optimizer, train) if args.resume else None  # instead of args.resume, a path
if starting:
    start_epoch = starting.step
starts(starting.step if starting else None)
for epoch in range(start_epoch, args.steps):
    train_epoch()
    acc1 = validate()
    scheduler.step()
    is_best = acc1 > train["best_acc1"]
    train["best_acc1"] = max(acc1, train["best_acc1"])
    saved = checkpointer.save(epoch + 1, model, optimizer, train, metrics={"acc1": acc1})
    if is_best:
        store.tag("best", saved)  # instead of a copy, model_best.pth.tar
    ran(epoch + 1, scheduler.get_last_lr()[0])
checkpointer.close()
ended(model.state_dict())
