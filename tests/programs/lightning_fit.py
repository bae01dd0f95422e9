"""A script with Lightning's Trainer and casckpt's plug-in: the last checkpoint and the two best."""

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import casckpt
from casckpt.frontends.lightning import CasCheckpointCheck, CasCheckpointIO
from tests.programs.shared import ended, options, ran, starts

warnings.filterwarnings("default", message=".*exists and is not empty")


class Model(LightningModule):
    """Two layers and a schedule of the number of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.layers(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)]


class Print(Callback):
    """Prints the completed epochs."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        starts(trainer.current_epoch or None)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ran(trainer.current_epoch + 1, trainer.optimizers[0].param_groups[0]["lr"])


args = options()
seed_everything(0)
store = casckpt.open(args.store)
data = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=8)
trainer = Trainer(
    max_epochs=args.steps,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    plugins=[CasCheckpointIO(store, run="fit", async_save=True, gc=True)],
    callbacks=[
        CasCheckpointCheck(),
        ModelCheckpoint(dirpath=Path("pointers").absolute(), monitor="loss", save_top_k=2, save_last=True),
        Print(),
    ],
)
model = Model()
trainer.fit(model, data, ckpt_path="last" if args.resume else None)
ended(model.state_dict())
