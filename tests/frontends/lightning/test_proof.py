"""Lightning: ``prove=True`` compares the live state with the checkpoint when a resumed training starts."""

# ruff: noqa: E402 - skip before importing optional packages

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

lightning = pytest.importorskip("lightning.pytorch", reason="needs casckpt[lightning]")
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, Timer

from casckpt.errors import Mismatch
from casckpt.frontends.lightning import CasCheckpointCheck, CasCheckpointIO
from casckpt.frontends.training_state.proof import Proof
from casckpt.store.store import Store
from tests.frontends.lightning.test_strategy import Averaging, fitted
from tests.support.lightning_training import Losses, Model, data, trainer
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import small, small_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning and its imports warn about devices, loggers and workers


class Counts(Callback):
    """A callback with a state."""

    count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict["count"]


class Sick(Callback):
    """A callback that changes the state when the training starts."""

    def __init__(self, act: Callable[[Any], object]) -> None:
        self.act = act

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            self.act(trainer)


def fit(store: Store, folder: Path, *callbacks: Any, epochs: int = 3, path: str | None = "sft@8") -> Proof | None:
    """Train, and return the proof of the resume."""
    check = CasCheckpointCheck(prove=True)
    io = CasCheckpointIO(store, run="sft")
    keeping = ModelCheckpoint(folder / "files", save_top_k=-1, every_n_epochs=1, monitor="loss")
    trainer(folder, io, Counts(), *callbacks, check, keeping, epochs=epochs).fit(Model(), data(), ckpt_path=path)
    return check.proof


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with the checkpoints of two epochs."""
    store = small()
    assert fit(store, tmp_path_factory.mktemp("first"), epochs=2, path=None) is None
    return store


def moment(trainer: Any) -> torch.Tensor:
    found: torch.Tensor = trainer.optimizers[0].state[trainer.lightning_module.head[1].weight]["exp_avg"]
    return found


def count_a_step(trainer: Any) -> None:
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
    progress.optimizer.step.total.completed += 1


REST = "lightning"
WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "a layer is initialized again": (
        lambda it: it.lightning_module.head[1].reset_parameters(), "model.head.1.weight"
    ),
    "a frozen layer is replaced by zeros": (
        lambda it: it.lightning_module.backbone.weight.zero_(), "model.backbone.weight"
    ),
    "the optimizer has no state": (lambda it: it.optimizers[0].state.clear(), f"{REST}.optimizer_states"),
    "a moment of the optimizer is reset": (lambda it: moment(it).zero_(), f"{REST}.optimizer_states.0.state.0.exp_avg"),
    "the learning rate is set by hand": (
        lambda it: it.optimizers[0].param_groups[0].update(lr=1.0), f"{REST}.optimizer_states.0.param_groups"
    ),
    "the scheduler starts again": (
        lambda it: setattr(it.lr_scheduler_configs[0].scheduler, "last_epoch", 0), f"{REST}.lr_schedulers"
    ),
    "a callback starts again": (
        lambda it: setattr(next(one for one in it.callbacks if isinstance(one, Counts)), "count", 0),
        f"{REST}.callbacks.Counts.count",
    ),
    "the number of the step differs": (count_a_step, f"{REST}.global_step"),
    "the hyperparameters differ": (
        lambda it: it.lightning_module.hparams.update(width=9), f"{REST}.hyper_parameters.width"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_a_callback_changed_before_the_first_step_is_found(saved: Store, tmp_path: Path, name: str) -> None:
    act, key = WRONG[name]
    losses = Losses()
    with pytest.raises(Mismatch, match="after the resume") as caught:
        fit(saved, tmp_path, Sick(act), losses)
    assert any(found.startswith(key) for found in caught.value.keys), caught.value.keys
    assert losses.found == {}


def test_a_resume_that_restores_everything_is_proved(tmp_path: Path) -> None:
    store = small()
    fit(store, tmp_path / "first", epochs=2, path=None)
    proof = fit(store, tmp_path / "second")  # a different folder, so ModelCheckpoint does not restore its files
    assert proof is not None
    assert all(".callbacks.ModelCheckpoint" in key for key in proof.unproved if key in store.get("sft@8").tensors)
    assert {key.split("{")[0].split(".")[1] for key in proof.unproved} <= {"loops", "epoch", "callbacks"}
    assert all("ModelCheckpoint" in key for key in proof.unproved if ".callbacks." in key)
    assert store.get("sft@12").lineage["resumed_from"]["step"] == 8


def test_callbacks_of_lightning_are_proved_or_listed(tmp_path: Path) -> None:
    def more() -> list[Any]:
        return [Timer(), EMAWeightAveraging(decay=0.5)]

    store = small()
    fit(store, tmp_path, *more(), epochs=2, path=None)
    proof = fit(store, tmp_path, *more())
    assert proof is not None
    listed = {key for key in proof.unproved if not key.startswith((f"{REST}.loops.", f"{REST}.callbacks.ModelC"))}
    assert listed - {f"{REST}.epoch"} == {f"{REST}.callbacks.Timer.time_elapsed.train"}


def test_a_file_that_lightning_wrote_cannot_be_proved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "plain.ckpt"
    plain = lightning.Trainer(
        default_root_dir=tmp_path, max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Counts()],
    )  # fmt: skip
    plain.fit(Model(), data())
    plain.save_checkpoint(path)
    assert fit(small(), tmp_path, epochs=2, path=str(path)) is None
    assert "the resume is not proved, because Lightning wrote the file itself" in caplog.text


def first_bias(trainer: Any) -> Any:
    return trainer.lightning_module.net[0].bias


def change_shard_of_rank_1(trainer: Any, *, rank: int) -> None:
    if rank == 1:
        first_bias(trainer).to_local().add_(1)


SHARDED: dict[str, tuple[Callable[..., object], str]] = {
    "one rank changes its shard": (change_shard_of_rank_1, "model.net.0.bias"),
    "the optimizer has no state": (
        lambda it, rank: it.optimizers[0].state.clear(), "optim.state.net.0.bias.exp_avg"
    ),
    "a step of the optimizer is counted twice": (
        lambda it, rank: it.optimizers[0].state[first_bias(it)]["step"].add_(1), "optim.state.net.0.bias.step"
    ),
    "the learning rate is set by hand": (
        lambda it, rank: it.optimizers[0].param_groups[0].update(lr=1.0), "optim.param_groups"
    ),
    "the number of the step differs": (lambda it, rank: count_a_step(it), "train.1.global_step"),
    "a callback of one rank starts again": (
        lambda it, rank: setattr(it.callbacks[0], "count", 6 + rank), "train.1.callbacks.Counts.count"
    ),
}  # fmt: skip


def sharded(rank: int, size: int, folder: Path, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        callbacks = [Counts(), Sick(partial(SHARDED[name][0], rank=rank))]
        result = outcome_of(partial(fitted, rank, size, folder, 3, "sft@6", callbacks=callbacks, prove=True))
        found[name] = sorted(result.keys) if isinstance(result, Mismatch) else type(result).__name__
    fitted(rank, size, folder, 3, "sft@6", callbacks=[Counts()], prove=True)
    return found


def test_wrong_resumes_of_sharded_training_are_found_on_all_ranks(tmp_path: Path, ranks: Pool, full: bool) -> None:
    """By default, test those of one rank and one of all ranks."""
    names = list(SHARDED) if full else [list(SHARDED)[number] for number in (0, 1, -1)]
    small_folder(tmp_path / "store")
    ranks.run(2, fitted, tmp_path, 2, callbacks=[Counts()])
    first, second = ranks.run(2, sharded, tmp_path, names)
    assert first == second
    assert all(SHARDED[name][1] in first[name] for name in names), first


def averaged(rank: int, size: int, folder: Path, epochs: int, path: str | None) -> None:
    fitted(rank, size, folder, epochs, path, callbacks=[Averaging()], prove=path is not None)


def test_an_averaged_model_is_proved(tmp_path: Path, ranks: Pool) -> None:
    small_folder(tmp_path / "store")
    ranks.run(2, averaged, tmp_path, 2, None)
    ranks.run(2, averaged, tmp_path, 3, "sft@6")
