"""Small folders and files that training programs write. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from shutil import copytree
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.dcp import stock
from tests.support.hub_folders import FOLDERS
from tests.support.scripts import run_script
from tests.support.torchrun import as_accelerate_hears

Make = Callable[[Path], Path]
"""A function that lets a program write into a folder, and returns the path of the checkpoint in it.

It skips the test where the program is not installed.
"""


def _need(package: str) -> Any:
    return pytest.importorskip(package, reason=f"needs {package}")


class _Net(nn.Module):
    """A model with a frozen layer, buffers, and a weight of 128 KiB."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.frozen = nn.Linear(6, 256).requires_grad_(False)
            self.norm = nn.BatchNorm1d(256)
            self.head = nn.Linear(256, 128)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss as Hugging Face's Trainer expects it."""
        return {"loss": (self.head(self.norm(self.frozen(x))) - y).square().mean()}


def _rows() -> TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(8, 6, generator=drawn), torch.randn(8, 128, generator=drawn))


def _trained() -> tuple[_Net, torch.optim.AdamW]:
    model = _Net()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    model(*_rows().tensors)["loss"].backward()
    optimizer.step()
    return model, optimizer


def _state() -> dict[str, Any]:
    model, optimizer = _trained()
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


def _trainer(folder: Path) -> Path:
    _need("accelerate")
    hub = _need("transformers")
    arguments = hub.TrainingArguments(
        folder, max_steps=2, save_steps=2, per_device_train_batch_size=4, report_to="none", disable_tqdm=True,
        use_cpu=True,
    )  # fmt: skip
    rows = [{"x": x, "y": y} for x, y in zip(*_rows().tensors, strict=True)]
    hub.Trainer(_Net(), arguments, train_dataset=rows).train()
    return folder / "checkpoint-2"


def _accelerate(folder: Path) -> Path:
    accelerate = _need("accelerate")
    with as_accelerate_hears(0, 1):
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = _trained()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        accelerator.prepare(model, optimizer, schedule, DataLoader(_rows(), batch_size=4, shuffle=True))
        return Path(accelerator.save_state(str(folder / "checkpoint_0")))


def _lightning(folder: Path) -> Path:
    lightning = _need("lightning.pytorch")
    from tests.support import lightning_training

    trainer = lightning.Trainer(
        default_root_dir=folder, max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(lightning_training.Model(2048), lightning_training.data())
    return Path(trainer.checkpoint_callback.best_model_path)


def _torch_checkpointing(folder: Path) -> Path:
    theirs = _need("torch_checkpointing")
    storage = import_module("torch_checkpointing.storage.filesystem").LocalFileSystemStorageConfig(use_direct_io=False)
    saving = import_module("torch_checkpointing.config").SyncCheckpointSaverConfig()
    manager = theirs.CheckpointManager(theirs.CheckpointManager.Config(save=saving, storage_config=storage))
    manager.save(str(folder / "step_2"), _state())
    manager.close()
    return folder / "step_2"


def _megatron(folder: Path) -> Path:
    """Copy a folder that Megatron-core wrote on two ranks: it forks, and takes seconds."""
    return Path(copytree(Path(__file__).parents[1] / "data" / "torch_dist", folder / "iter_0000002"))


def _olmo(folder: Path) -> Path:
    """Save as OLMo-core's trainer does. Only the state to save is ours."""
    checkpointer = _need("olmo_core.train.checkpoint").Checkpointer(work_dir=folder / "work")
    module = mock.Mock(spec=["state_dict_to_save"], state_dict_to_save=_state)
    checkpointer.save(folder / "step2", module, {"global_step": 2, "epoch": 1})
    return folder / "step2"


def _nanogpt(folder: Path) -> Path:
    """Save as nanoGPT's train.py does."""
    model, optimizer = _trained()
    checkpoint = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "model_args": {"n_layer": 1, "bias": False},
        "iter_num": 2, "best_val_loss": torch.tensor(0.5), "config": {"out_dir": "out", "learning_rate": 0.01},
    }  # fmt: skip
    torch.save(checkpoint, folder / "ckpt.pt")
    return folder / "ckpt.pt"


def _deepspeed(stage: int) -> Make:
    def make(folder: Path) -> Path:
        _need("deepspeed")
        done = run_script("tests.support.deepspeed_training", folder / "out", str(stage), ranks=2)
        assert done.status == 0, done.told
        return folder / "out"

    return make


def _of_the_hub(name: str) -> Make:
    [row] = [row for row in FOLDERS if row.name == name]

    def make(folder: Path) -> Path:
        _need(row.library)
        row.make(folder / "model")
        return folder / "model"

    return make


PROGRAMS: dict[str, Make] = {
    "HF Trainer": _trainer,
    "Accelerate": _accelerate,
    "Lightning": _lightning,
    "DCP": lambda folder: stock(folder / "step-2", _state()),
    "torch_checkpointing": _torch_checkpointing,
    "Megatron-core": _megatron,
    "OLMo-core": _olmo,
    "peft": _of_the_hub("LoRA with a trained head"),
    "diffusers": _of_the_hub("DDPM pipeline"),
    "sentence-transformers": _of_the_hub("BERT with a dense layer"),
    "nanoGPT": _nanogpt,
    **{f"DeepSpeed ZeRO-{stage}": _deepspeed(stage) for stage in (1, 2, 3)},
}
STARTS_PROCESSES = {"Lightning", *(name for name in PROGRAMS if name.startswith("DeepSpeed"))}
"""The programs that start other processes. Lightning does when it is imported: it asks for fonts."""
