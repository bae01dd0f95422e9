"""The advice of the plug-ins for Lightning, torchtitan and Transformers."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning.pytorch", reason="needs casckpt[lightning]")
pytest.importorskip("transformers", reason="needs casckpt[transformers]")

from lightning.pytorch import Callback, LightningModule, Trainer

import casckpt
from casckpt.errors import InvalidInput, Mismatch, MissingKey, NotFound, Unsigned, Unsupported
from casckpt.frontends.lightning import (
    CasCheckpointCheck,
    CasCheckpointIO,
    CasModelParallelStrategy,
    restore_checkpoint,
)
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.frontends.transformers import CasCheckpointCallback
from casckpt.frontends.transformers import restore_checkpoint as restore_folder
from tests.hints.conftest import Run
from tests.support.hints import Messages, follows
from tests.support.signing import pair
from tests.support.training import identical

Store = casckpt.Store
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning, Transformers and torchtitan, about devices

CHECKPOINT: dict[str, Any] = {
    "state_dict": {"w": torch.ones(2)}, "global_step": 3, "epoch": 1, "pytorch-lightning_version": "2.5.0",
}  # fmt: skip


@follows(
    "frontends/lightning/files.py:RunFiles.saved", "casckpt.frontends.lightning.restore_checkpoint(store, id, path)"
)
def test_the_command_in_a_pointer_file_restores_its_checkpoint(
    store: Store, tmp_path: Path, messages: Messages
) -> None:
    CasCheckpointIO(store, run="sft").save_checkpoint(CHECKPOINT, tmp_path / "x.ckpt")
    (named,) = json.loads((tmp_path / "x.ckpt").read_text()).values()
    assert messages.text(named["as_a_file"]).says("restore_checkpoint(store, id, path)")
    restore_checkpoint(named["store"], named["id"], tmp_path / "file.ckpt")
    found = torch.load(tmp_path / "file.ckpt", weights_only=True)
    assert identical({name: found[name] for name in CHECKPOINT}, CHECKPOINT)


@follows("frontends/lightning/io.py:CasCheckpointIO.save_checkpoint", "pass them to casckpt.open instead")
def test_storage_options_can_be_passed_when_a_store_is_opened(
    store_path: Path, tmp_path: Path, messages: Messages
) -> None:
    options: dict[str, Any] = {}
    with messages.error(TypeError) as advice:
        CasCheckpointIO(store_path, run="sft").save_checkpoint(CHECKPOINT, tmp_path / "x.ckpt", options)
    advice.says("save_checkpoint does not accept storage_options; pass them to casckpt.open")
    store = casckpt.open(store_path, storage_options=options)
    CasCheckpointIO(store, run="sft").save_checkpoint(CHECKPOINT, tmp_path / "x.ckpt")
    assert store.get("sft@3").step == 3


class Begins(LightningModule):
    """A module that trains one batch and has a hyperparameter that is not plain data."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.weight = nn.Parameter(torch.ones(1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return (self.weight * batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@follows("frontends/lightning/io.py:CasCheckpointIO.save_checkpoint", "CasCheckpointCheck(), ...]) raises this before")
def test_a_callback_raises_save_errors_before_the_first_batch(store: Store, tmp_path: Path, messages: Messages) -> None:
    def fit(*callbacks: Callback) -> tuple[int, InvalidInput]:
        trainer = Trainer(
            plugins=[CasCheckpointIO(store, run="sft")], callbacks=[*callbacks], accelerator="cpu", max_epochs=1,
            logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        with pytest.raises(InvalidInput) as caught:
            trainer.fit(Begins(torch.relu), DataLoader(TensorDataset(torch.ones(1))))
        return trainer.global_step, caught.value

    step, error = fit()
    assert step == 1
    messages.text("".join(error.__notes__)).says("callbacks=[CasCheckpointCheck()")
    step, error = fit(CasCheckpointCheck())
    assert step == 0


@follows(
    "frontends/lightning/strategy.py:CasModelParallelStrategy.save_checkpoint", "pass them to casckpt.open instead"
)
def test_the_lightning_strategy_accepts_an_open_store_as_advised(
    store_path: Path, tmp_path: Path, messages: Messages
) -> None:
    options: dict[str, Any] = {}
    with messages.error(TypeError) as advice:
        CasModelParallelStrategy(store_path, run="sft").save_checkpoint(CHECKPOINT, tmp_path / "x.ckpt", options)
    advice.says("save_checkpoint does not accept storage_options; pass them to casckpt.open")
    strategy = CasModelParallelStrategy(casckpt.open(store_path, storage_options=options), run="sft")
    module: Any = nn.Linear(2, 2)
    module.trainer = SimpleNamespace(callbacks=[])
    strategy._lightning_module = module
    strategy.save_checkpoint({**CHECKPOINT, "state_dict": {}}, tmp_path / "x.ckpt")
    assert casckpt.open(store_path).get("sft@3").step == 3


@follows("frontends/stores.py:check_foreign", "Import it and sign the imported checkpoint")
@pytest.mark.parametrize("way", ["sign", "without"])
def test_an_unsigned_file_can_be_imported_and_signed_as_advised(
    tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    path, where, alice = tmp_path / "x.ckpt", tmp_path / "store", pair(tmp_path / "keys")
    torch.save(CHECKPOINT, path)
    trusting = CasCheckpointIO(casckpt.open(where, require_signature=alice.public), run="sft")
    with messages.error(Unsigned) as advice:
        trusting.load_checkpoint(path)
    if way == "sign":
        advice.says("Import it and sign the imported checkpoint")
        run("import", where, path, "--run", "sft", "--step", 3)
        run("sign", where, "sft@3", "--key", alice.private)
        found = trusting.load_checkpoint("sft@3")
    else:
        advice.says("with a store that was opened without")
        found = CasCheckpointIO(where, run="sft").load_checkpoint(path)
    assert torch.equal(found["state_dict"]["w"], torch.ones(2))


# Accelerate


@follows("frontends/accelerate.py:AcceleratorCheckpointer.__init__", "save them with accelerator.save_state")
def test_models_that_accelerate_did_not_prepare_can_be_prepared_as_advised(
    store: Store, tmp_path: Path, messages: Messages
) -> None:
    pytest.importorskip("accelerate", reason="needs casckpt[transformers]")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from casckpt.frontends.accelerate import AcceleratorCheckpointer

    other: Any = SimpleNamespace(distributed_type=SimpleNamespace(name="DEEPSPEED"))
    with messages.error(Unsupported) as advice:
        AcceleratorCheckpointer(other, store, run="sft")
    accelerator = Accelerator(cpu=True)
    try:
        accelerator.prepare(nn.Linear(2, 2))
        getattr(accelerator, advice.says("accelerator.save_state").partition(".")[2])(tmp_path / "state")
    finally:  # the class keeps this setting
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert list((tmp_path / "state").glob("*.safetensors"))


# torchtitan


@follows("frontends/torchtitan.py:CasCheckpointManager._ref", "has no step …; `casckpt list` shows its steps")
def test_the_suggested_list_shows_the_existing_step(store: Store, messages: Messages, run: Run) -> None:
    pytest.importorskip("torchtitan", reason="needs casckpt[torchtitan]")
    from casckpt.frontends.torchtitan import CasCheckpointManager

    store.save({"model": {"w": torch.ones(2)}}, run="titan", step=2)
    config = SimpleNamespace(run="titan", initial_load_ref=None)
    manager: Any = SimpleNamespace(checkpointer=Checkpointer(store, run="titan"), config=config)
    with messages.error(NotFound) as advice:
        CasCheckpointManager._ref(manager, 7)
    (listed,) = json.loads(run(*advice.command("list"), store.url, "--json").stdout)
    assert CasCheckpointManager._ref(manager, listed["step"]).id == listed["id"]  # type: ignore[union-attr]


@follows("frontends/torchtitan.py:_refuse", "casckpt import, and initial_load_ref")
@follows("frontends/torchtitan.py:_refuse", "casckpt export --format safetensors")
def test_hub_folders_can_be_imported_and_exported_with_the_suggested_commands(
    store: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    pytest.importorskip("torchtitan", reason="needs casckpt[torchtitan]")
    from casckpt.frontends.torchtitan import CasCheckpointManager, _refuse

    model = nn.Linear(2, 2)
    with messages.error(Unsupported) as advice:
        _refuse(CasCheckpointManager.Config(enable=True, store=store.url, run="titan", last_save_in_hf=True))
    Checkpointer(store, run="titan").save(1, model)
    run("export", store.url, "titan@1", tmp_path / "out", *advice.says("--format safetensors").split())
    assert "model.weight" in safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")

    run("export", store.url, "titan@1", tmp_path / "hf", "--format", "hf")
    with messages.error(Unsupported) as advice:
        _refuse(CasCheckpointManager.Config(enable=True, store=store.url, run="titan", initial_load_in_hf=True))
    run(*advice.command("import"), store.url, tmp_path / "hf", "--run", "hub", "--step", 1)
    begun: Any = {advice.says("initial_load_ref"): "hub@1"}
    config = CasCheckpointManager.Config(enable=True, store=store.url, run="new", **begun)
    manager: Any = SimpleNamespace(checkpointer=Checkpointer(store, run="new"), config=config)
    fresh = nn.Linear(2, 2)
    manager.checkpointer.load(CasCheckpointManager._ref(manager, -1), fresh)
    assert identical(dict(fresh.state_dict()), dict(model.state_dict()))


@follows("frontends/stores.py:advising", "load with …, which does")
def test_a_model_with_new_names_can_continue_in_a_different_run(store: Store, messages: Messages) -> None:
    pytest.importorskip("torchtitan", reason="needs casckpt[torchtitan]")
    from casckpt.frontends.torchtitan import CasCheckpointManager

    def manager_of(model: nn.Module, run: str = "titan", **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
        adam = torch.optim.AdamW(model.parameters())
        config = CasCheckpointManager.Config(enable=True, store=store.url, run=run, interval=1, **settings)
        parts: Any = {"model_parts": [model], "optimizers": [adam], "states": {"step": TrainState(value=0)}}
        return CasCheckpointManager(config, dataloader=None, lr_schedulers=None, sd_adapter=None, **parts), adam

    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    saving, adam = manager_of(model)
    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    saving.save(2)
    saving.close()
    inside = nn.Sequential(OrderedDict(net=fresh))
    with messages.error(MissingKey) as advice:
        manager_of(inside)[0].load()
    rename = advice.argument("rename", after="different names there: give")
    advice.says("own run does not take rename= or unread=; load with casckpt.load_model_and_optim_state, which does")
    casckpt.load_model_and_optim_state(store, "titan@2", inside, **rename)
    assert identical(dict(fresh.state_dict()), dict(model.state_dict()))
    fresh.reset_parameters()
    begun = {"initial_load_ref": "titan@2", "initial_load_model_only": False}
    loading, fresh_adam = manager_of(inside, "next", **begun, **rename)
    assert loading.load()
    assert identical(dict(fresh.state_dict()), dict(model.state_dict()))
    assert identical(fresh_adam.state_dict()["state"], adam.state_dict()["state"])
    loading.save(3)
    loading.maybe_wait_for_saving()
    assert manager_of(inside, "next", **begun, **rename)[0].load()  # the manager's own names are not changed


# Transformers


@follows(
    "frontends/transformers/callback.py:", "save with casckpt.frontends.trainer.Checkpointer in your own training loop"
)
def test_a_custom_loop_can_save_states_that_a_trainer_cannot(store: Store, messages: Messages) -> None:
    callback = CasCheckpointCallback(store, run="sft")
    with messages.error(Unsupported) as advice:
        callback.on_train_begin(SimpleNamespace(fsdp=True), None, None)
    advice.says("casckpt.frontends.trainer.Checkpointer")
    Checkpointer(store, run="sft").save(1, nn.Linear(2, 2))
    assert store.get("sft@1").step == 1


@follows("frontends/transformers/mixin.py:CasTrainerMixin._newest", "pass resume_from_checkpoint=")
@follows(
    "frontends/transformers/mixin.py:CasTrainerMixin._small_files", "pass the folder that restore_checkpoint returns"
)
def test_checkpoints_that_the_mixin_did_not_save_can_be_resumed_from_their_folder(
    tmp_path: Path, store: Store, messages: Messages
) -> None:
    from tests.frontends.transformers import test_mixin as mixin
    from tests.frontends.transformers.test_callback import Losses

    mixin.plain(tmp_path / "out", CasCheckpointCallback(store, run="old"))
    with messages.log() as advice:
        mixin.trainer(store, tmp_path / "out", max_steps=1).train(resume_from_checkpoint=True)
    losses = Losses()
    resumed = mixin.trainer(store, tmp_path / "out", losses)
    resumed.train(**advice.argument("resume_from_checkpoint"))
    assert sorted(losses.found) == [3, 4, 5, 6]
    with messages.error(Mismatch) as advice:
        mixin.trainer(store, tmp_path / "new", run="old").train(resume_from_checkpoint=True)
    advice.says("restore_checkpoint")
    resumed = mixin.trainer(store, tmp_path / "new", run="old")
    resumed.train(resume_from_checkpoint=restore_folder(store, "old@2", tmp_path / "new"))
    assert resumed.state.global_step == mixin.STEPS


@follows("frontends/transformers/mixin.py:CasTrainerMixin._config", "pass save_total_limit alone")
def test_the_suggested_limit_replaces_rules_that_may_forget_the_best_model(
    tmp_path: Path, store: Store, messages: Messages
) -> None:
    from tests.frontends.transformers import test_mixin as mixin

    with messages.error(InvalidInput) as advice:
        mixin.trainer(store, tmp_path / "out", settings={"keep": 1}, **mixin.BEST)
    advice.says("save_total_limit")
    training = mixin.trainer(store, tmp_path / "out", save_total_limit=1, **mixin.BEST)
    training.train()
    assert training.state.best_model_checkpoint in store


@follows("frontends/transformers/callback.py:restore_checkpoint", "use casckpt export to write its weights")
def test_weights_that_a_transformers_trainer_did_not_save_can_be_exported(
    saved: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    with messages.error(Mismatch) as advice:
        restore_folder(saved, "a@1", tmp_path)
    run(*advice.command("export"), saved.url, "a@1", tmp_path / "out")
    assert safetensors.torch.load_file(tmp_path / "out" / "model.safetensors").keys() == {"w", "b"}
