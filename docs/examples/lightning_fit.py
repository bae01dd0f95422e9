"""Lightning with one plug-in, which stores the checkpoints of a model and its moving average in a store.

Needs casckpt[lightning].

$ python lightning_fit.py
trained to step 16; in the store: fit@4 fit@8 fit@12 fit@16

If you kill it and restart it, it continues after its newest checkpoint, and the losses are bit-identical.
"""

import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import casckpt
from casckpt.frontends.lightning import CasCheckpointCheck, CasCheckpointIO

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")  # Lightning warns about this small example


class Model(LightningModule):
    """Two layers, trained with a learning rate that decays."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = (self.layers(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its scheduler."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


torch.manual_seed(0)
store = casckpt.open("checkpoints")
data = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=8)

trainer = Trainer(
    max_epochs=4,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    plugins=[CasCheckpointIO(store, run="fit")],
    callbacks=[
        CasCheckpointCheck(),  # raises an error before the first batch if something cannot be saved
        EMAWeightAveraging(decay=0.9),
        ModelCheckpoint(dirpath="lightning", monitor="loss", save_top_k=-1, save_last=True),
    ],
)
trainer.fit(Model(), data, ckpt_path="last")  # or "best", a path, "fit@latest", tag:NAME; ignored at the first start
names = " ".join(f"{ckpt.run}@{ckpt.step}" for ckpt in store.checkpoints("fit"))
print(f"trained to step {trainer.global_step}; in the store: {names}")
