"""Lightning: its checkpoints lie in a store, by one plug-in. Needs casckpt[lightning].

$ python lightning_fit.py
trained to step 8; in the store: fit@4 fit@8
resumed from step 8, trained to step 12
"""

import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import casckpt
from casckpt.frontends.lightning import CasCheckpointIO

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")  # Lightning's, about this small example


class Model(LightningModule):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """Give the loss."""
        loss: torch.Tensor = self.linear(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Give the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer(epochs: int) -> Trainer:
    """Make a trainer whose checkpoints go into the store."""
    return Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[CasCheckpointIO(store, run="fit")],  # this is all
        callbacks=[ModelCheckpoint(dirpath="lightning", monitor="loss", save_top_k=-1)],
    )


torch.manual_seed(0)
store = casckpt.open("checkpoints")
data = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=8)

first = trainer(epochs=2)
first.fit(Model(), data)
names = " ".join(f"{ckpt.run}@{ckpt.step}" for ckpt in store.checkpoints("fit"))
print(f"trained to step {first.global_step}; in the store: {names}")

begun = store.get("fit@latest").step
second = trainer(epochs=3)
second.fit(Model(), data, ckpt_path="fit@latest")  # or "last", "best", a path, tag:NAME
print(f"resumed from step {begun}, trained to step {second.global_step}")
