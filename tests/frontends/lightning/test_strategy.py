"""Lightning on several ranks: a model sharded with FSDP2 is saved in shards, and resumes on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning.pytorch", reason="needs casckpt[lightning]")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.swa_utils import AveragedModel

import casckpt
from casckpt.errors import InvalidInput, Mismatch
from casckpt.frontends.lightning import CasCheckpointCheck, CasCheckpointIO, CasModelParallelStrategy
from tests.support.ranks import JobFailed, Pool, comes_last, outcome_of
from tests.support.saves import small_folder, steps
from tests.support.torch_versions import needs_torch
from tests.support.torchrun import as_torchrun_says


class Model(LightningModule):
    """A model that is sharded across all ranks. Its input depends only on the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 1))
        self.losses: dict[int, str] = {}

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        assert self.device_mesh is not None
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        x = torch.full((4, 8), 0.1 * self.global_step)
        loss: torch.Tensor = self.net(x).square().mean()
        self.losses[self.global_step] = float(loss.detach()).hex()
        return loss

    def train_dataloader(self) -> list[int]:
        return list(range(3))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fitted(
    rank: int,
    size: int,
    folder: Path,
    epochs: int,
    path: str | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    prove: bool = False,
    **options: Any,
) -> dict[int, str]:
    with as_torchrun_says(rank, size):
        model = Model()
        strategy = CasModelParallelStrategy(
            folder / "store", run="sft", health=True, prove=prove,
            data_parallel_size=size, tensor_parallel_size=1, process_group_backend="gloo",
        )  # fmt: skip
        keeping = [*callbacks, ModelCheckpoint(folder / "files", save_top_k=-1, save_last=True, **options)]
        trainer = Trainer(
            accelerator="cpu", devices=size, strategy=strategy, max_epochs=epochs, callbacks=keeping, logger=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
            use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(model, ckpt_path=path)
        assert prove is (strategy.proof is not None)
        return model.losses


def test_shards_are_saved_and_loaded_without_gathering(tmp_path: Path, ranks: Pool) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = ranks.run(2, fitted, tmp_path / "whole", 3)[0]
    first = ranks.run(2, fitted, tmp_path / "parts", 2)[0]
    store = casckpt.open(tmp_path / "parts" / "store")
    assert steps(store) == [("sft", 3), ("sft", 6), ("sft/last", 6)]
    assert set(store.read("sft@6")) == {"model", "optim", "train"}
    assert store.get("sft@6").health
    second = ranks.run(2, fitted, tmp_path / "parts", 3, "last")[0]
    assert sorted(second) == [6, 7, 8]
    assert first | second == whole
    more = ranks.run(1, fitted, tmp_path / "parts", 4, "sft@9", prove=True)[0]  # by reference, on one rank
    assert sorted(more) == [9, 10, 11]
    assert "resumed_from" in store.get("sft@12").lineage
    store.save({"model": store.read("sft@9")["model"]}, run="weights", step=1)
    with pytest.raises(JobFailed, match="has no optimizer that can be loaded"):
        ranks.run(2, fitted, tmp_path / "parts", 4, "weights@1")
    assert not store.verify().is_damaged


class Swaps(Callback):
    """Saves other weights in place of the model's."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {"net.0.bias": torch.ones(10)}


def swapped(rank: int, size: int, folder: Path) -> str:
    return str(outcome_of(lambda: fitted(rank, size, folder, 1, callbacks=[Swaps()])))


@needs_torch("2.8", "FSDP2 on the CPU")
def test_weights_that_a_hook_saves_in_place_of_the_model_are_refused_at_the_start(tmp_path: Path, ranks: Pool) -> None:
    for said in ranks.run(2, swapped, tmp_path):
        assert "an on_save_checkpoint hook sets checkpoint['state_dict'], but" in said
        assert "Choose another key" in said
    assert steps(small_folder(tmp_path / "store")) == []


def test_a_plug_in_that_would_be_ignored_is_rejected(tmp_path: Path) -> None:
    strategy = CasModelParallelStrategy(tmp_path, run="sft")
    with pytest.raises(InvalidInput, match="does not use CasCheckpointIO; remove that plug-in"):
        Trainer(strategy=strategy, accelerator="cpu", plugins=[CasCheckpointIO(tmp_path, run="sft")])


@pytest.mark.parametrize("cast", [False, True])
def test_the_strategy_applies_its_cast_setting_to_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cast: bool
) -> None:
    store = small_folder(tmp_path / "store")
    model, low = nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()
    casckpt.save_model_and_optim_state(store, model, run="sft", step=1)
    strategy = CasModelParallelStrategy(store, run="sft", cast=cast)
    fitting = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.VALIDATING))
    low.__dict__["trainer"] = fitting
    monkeypatch.setattr(strategy, "_module", lambda: low)
    with nullcontext() if cast else pytest.raises(Mismatch, match="pass cast=True"):
        strategy.load_checkpoint("sft@1")
    assert torch.equal(low.weight, model.weight.bfloat16()) is cast


def fitted_by_ddp(rank: int, size: int, folder: Path, epochs: int, path: str | None = None) -> Any:
    with as_torchrun_says(rank, size):
        model = Replicated()
        io = CasCheckpointIO(folder / "store", run="ddp", async_save=True)
        keeping: list[Callback] = [ModelCheckpoint(folder / "files", save_top_k=1, monitor="loss", save_last=True)]
        trainer = Trainer(
            accelerator="cpu", devices=size, strategy="ddp", max_epochs=epochs, callbacks=keeping, plugins=[io],
            logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
            use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(model, ckpt_path=path)
        return model.losses


class Replicated(Model):
    def configure_model(self) -> None:
        pass

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = super().training_step(batch, number)
        self.log("loss", loss)
        return loss


def test_replicas_are_saved_once_and_loaded_on_every_rank(tmp_path: Path, ranks: Pool) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = ranks.run(2, fitted_by_ddp, tmp_path / "whole", 3)
    first = ranks.run(2, fitted_by_ddp, tmp_path / "parts", 2)
    second = ranks.run(2, fitted_by_ddp, tmp_path / "parts", 3, "last")
    assert [one | two for one, two in zip(first, second, strict=True)] == whole
    store = casckpt.open(tmp_path / "parts" / "store")
    # the best checkpoint, and the last one if it differs
    assert len([run for run, _ in steps(store) if run == "ddp"]) <= 2


class Averaging(WeightAveraging):
    """An averaged model with the same sharding. Lightning's own setup copies shards, which torch does not allow."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        from torch.distributed.fsdp import fully_shard

        self._average_model = AveragedModel(Model(), avg_fn=lambda old, new, _: old * 0.5 + new * 0.5)
        strategy: Any = trainer.strategy
        average: Any = self._average_model.module
        fully_shard(average.net, mesh=strategy.device_mesh["data_parallel"])

    def found(self) -> tuple[list[torch.Tensor], int]:
        assert self._average_model is not None
        shards: list[Any] = list(self._average_model.module.parameters())
        return [one.full_tensor().detach() for one in shards], int(self._average_model.n_averaged)


def averaged(rank: int, size: int, folder: Path, epochs: int, path: str | None = None) -> tuple[Any, ...]:
    averaging = Averaging()
    losses = fitted(rank, size, folder, epochs, path, callbacks=[averaging])
    return losses, *averaging.found()


# on 3 ranks, the shards have different sizes, and some are empty
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_an_averaged_model_is_saved_and_loaded_with_the_model(tmp_path: Path, ranks: Pool, size: int) -> None:
    whole = ranks.run(size, averaged, tmp_path / "whole", 2)[0]
    before = ranks.run(size, averaged, tmp_path / "parts", 1)[0]
    store = casckpt.open(tmp_path / "parts" / "store")
    assert {"ema.net.0.weight", "model.net.0.weight"} <= set(store.get("sft@3").tensors)
    _, weights, count = ranks.run(5 - size, averaged, tmp_path / "parts", 1, "sft@3")[0]  # without a step
    assert count == before[2] == 3
    assert all(torch.equal(one, other) for one, other in zip(weights, before[1], strict=True))
    losses, weights, count = ranks.run(size, averaged, tmp_path / "parts", 2, "last")[0]
    assert losses == {step: whole[0][step] for step in (3, 4, 5)}
    assert count == whole[2] == 6
    assert all(torch.equal(one, other) for one, other in zip(weights, whole[1], strict=True))


class Projecting(torch.optim.AdamW):
    """An optimizer whose first step creates state that is not plain data."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["projector"] = object()
        return loss


class OddState(Model):
    """Saves a value that is not plain data on one rank, in the last callback."""

    odd: tuple[str, int, int, int]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["odd"] = object() if comes_last(*self.odd) else 1


class OddOptimizer(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Projecting(self.parameters(), lr=0.01)


def hears(rank: int, size: int, folder: Path) -> Any:
    found = []
    for model in (OddState(), OddOptimizer()):
        for strategy in ("ddp", CasModelParallelStrategy(folder / "store", run="sft", process_group_backend="gloo")):
            with as_torchrun_says(rank, size):
                # with a CheckpointIO, only rank 0 saves
                model.__dict__["odd"] = (str(strategy == "ddp"), rank, size, 0 if strategy == "ddp" else size - 1)
                if strategy == "ddp":
                    model.__dict__["configure_model"] = lambda: None
                else:
                    model.__dict__.pop("configure_model")
                trainer = Trainer(
                    accelerator="cpu", devices=size, strategy=strategy, max_epochs=1, logger=False,
                    callbacks=[CasCheckpointCheck()],
                    plugins=[CasCheckpointIO(folder / "store", run="ddp")] if strategy == "ddp" else [],
                    enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
                    use_distributed_sampler=False,
                )  # fmt: skip

                error = outcome_of(lambda: trainer.fit(model))  # noqa: B023 - called immediately
                found.append((type(error).__name__, trainer.global_step))
    return found


@needs_torch("2.8", "FSDP2 on the CPU")
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_an_invalid_state_raises_an_error_on_all_ranks_at_the_start(tmp_path: Path, ranks: Pool, size: int) -> None:
    expected = [("InvalidInput", 0)] * 2 + [("InvalidInput", 1)] * 2
    assert ranks.run(size, hears, tmp_path) == [expected] * size
    assert steps(small_folder(tmp_path / "store")) == []


def with_a_model(strategy: CasModelParallelStrategy) -> CasModelParallelStrategy:
    module: Any = nn.Linear(2, 2)
    module.trainer = SimpleNamespace(callbacks=[])
    strategy._lightning_module = module
    return strategy


def test_the_strategy_leaves_the_room_that_others_need(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    for least, found in (("999TB", "leaves min_free='999TB'"), (1, "None")):
        strategy = with_a_model(CasModelParallelStrategy(store, run="sft", min_free=least))
        saving = partial(strategy.save_checkpoint, {"global_step": 3, "epoch": 1}, tmp_path / "x.ckpt")
        assert found in str(outcome_of(saving))
    with pytest.raises(InvalidInput, match="'20 apples' is not a size"):
        CasModelParallelStrategy(store, run="sft", min_free="20 apples")


def test_the_strategy_saves_the_files_that_lightning_names_in_any_order(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    store.save({"x": 1}, run="sft", step=5)
    strategy = with_a_model(CasModelParallelStrategy(store, run="sft"))
    strategy.save_checkpoint({"state_dict": {}, "global_step": 3, "epoch": 1}, tmp_path / "x.ckpt")
    assert sorted(step for _, step in steps(store)) == [3, 5]
