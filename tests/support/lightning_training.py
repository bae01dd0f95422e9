"""A Lightning training run that tests save and resume."""

# ruff: noqa: E402 - optional packages are imported first

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning.pytorch", reason="needs casckpt[lightning]")
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from casckpt.frontends.lightning import CasCheckpointIO
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore


class Model(LightningModule):
    """A model with a frozen part, a trained part, a scheduler and hyperparameters."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.backbone = nn.Linear(16, width).requires_grad_(False)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(width, 1))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        inputs, targets = batch
        loss: torch.Tensor = (self.head(self.backbone(inputs)) - targets).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


class Losses(Callback):
    """Records all losses bit for bit. Each step has its own seed."""

    def __init__(self) -> None:
        self.found: dict[int, str] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(1000 + trainer.global_step)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found[trainer.global_step] = float(outputs["loss"]).hex()


def data() -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 16, generator=drawn)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)


def trainer(folder: Path, io: CasCheckpointIO, *callbacks: Any, epochs: int = 4, **options: Any) -> Trainer:
    return Trainer(
        default_root_dir=folder, max_epochs=epochs, plugins=[io], callbacks=list(callbacks), accelerator="cpu",
        logger=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


class Slow:
    """A store whose saves wait for a signal from the test."""

    def __init__(self, folder: Path) -> None:
        self.faulty = FaultyStore(LocalStore(folder))
        self.store = Store(Repository(self.faulty))
