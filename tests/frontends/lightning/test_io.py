"""Lightning: saves, removals and resumes in real trainings with checkpoints in a store."""

# ruff: noqa: E402 - skip before importing optional packages

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning.pytorch", reason="needs casckpt[lightning]")
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint

from casckpt.base.exit_status import unreported
from casckpt.errors import InvalidInput, StorageError
from casckpt.frontends.lightning import CasCheckpointCheck, CasCheckpointIO
from casckpt.frontends.training_state import unshard_model_state
from casckpt.store.store import Store
from tests.support.faulty import Call, call_first, fail_before
from tests.support.lightning_training import Losses, Model, Slow, data, trainer
from tests.support.repositories import memory
from tests.support.saves import CELL, cells, copied, small, small_folder, steps
from tests.support.small_disk import SmallDisk
from tests.support.training import WithProjector, identical

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning and its imports warn about devices, loggers and workers


def test_a_copy_of_the_plug_in_can_save_and_load(tmp_path: Path, store: Store) -> None:
    io = CasCheckpointIO(store, run="sft", async_save=True, gc=True)
    files = [tmp_path / f"{step}.ckpt" for step in (1, 2, 3)]
    for step, path in enumerate(files[:2], 1):
        io.save_checkpoint({"state_dict": {"w": torch.ones(step)}, "global_step": step}, path)
    io.remove_checkpoint(files[0])
    copies = copied(io)  # while it saves and removes
    io.teardown()
    for other in copies + copied(io):
        other.save_checkpoint({"state_dict": {"w": torch.ones(3)}, "global_step": 3}, files[2])
        other.teardown()
        assert len(other.load_checkpoint(files[2])["state_dict"]["w"]) == 3
        assert [step for _, step in steps(store)] == [2, 3]


def best_two(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "files", monitor="loss", save_top_k=2, save_last=True, **options)


def test_averaged_weights_resume_bit_for_bit(tmp_path: Path) -> None:
    def fit(name: str, epochs: int, path: str | None = None) -> Any:
        averaging = EMAWeightAveraging(decay=0.5)
        io = CasCheckpointIO(tmp_path / name, run="sft")
        keeping = ModelCheckpoint(tmp_path / f"{name} files", save_last=True)
        trainer(tmp_path, io, averaging, keeping, Losses(), epochs=epochs).fit(Model(), data(), ckpt_path=path)
        assert averaging._average_model is not None
        return averaging._average_model.state_dict()

    whole = fit("whole", 2)
    fit("parts", 1)
    assert identical(fit("parts", 2, "last"), whole)


@pytest.mark.parametrize("async_save", [False, True])
def test_training_keeps_the_best_checkpoints_and_resumes_bit_for_bit(tmp_path: Path, async_save: bool) -> None:
    store = small_folder(tmp_path / "store")
    io = CasCheckpointIO(store, run="sft", async_save=async_save, gc=True)
    whole = Losses()
    trainer(tmp_path, CasCheckpointIO(tmp_path / "other", run="sft"), whole, best_two(tmp_path / "other")).fit(
        Model(), data()
    )
    first = Losses()
    keeping = best_two(tmp_path)
    trainer(tmp_path, io, first, keeping, epochs=3).fit(Model(), data())
    files = sorted(path.name for path in (tmp_path / "files").iterdir())
    assert files == sorted([*(Path(path).name for path in keeping.best_k_models), "last.ckpt"])
    assert len(files) == 3
    assert sorted(step for run, step in steps(store) if run == "sft") == [8, 12]  # the best two of 4, 8, 12
    assert ("sft/last", 12) in steps(store)
    assert all(0 < one.metrics["loss"] < 1e9 for one in store.checkpoints("sft"))
    assert len(store.checkpoints(forgotten=True)) == len(store.checkpoints())  # a removed checkpoint cannot be restored

    again, model = Losses(), Model()
    more = CasCheckpointIO(store, run="sft", async_save=async_save)
    trainer(tmp_path, more, again, best_two(tmp_path)).fit(model, data(), ckpt_path="last")
    assert sorted(again.found) == [13, 14, 15, 16]
    assert first.found | again.found == whole.found
    assert identical(unshard_model_state(store, "sft@16"), dict(model.state_dict()))
    assert not store.verify().is_damaged


def test_training_with_compression_resumes_bit_for_bit(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    store.change_settings(compress="always")

    def keeping(folder: str) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / folder, save_top_k=-1, every_n_epochs=1, save_last=True)

    whole, first, again = Losses(), Losses(), Losses()
    plain = CasCheckpointIO(tmp_path / "other", run="sft")
    trainer(tmp_path, plain, whole, keeping("other files"), epochs=4).fit(Model(width=3000), data())
    for losses, epochs, ref in ((first, 2, None), (again, 4, "last")):
        io = CasCheckpointIO(store, run="sft")
        trainer(tmp_path, io, losses, keeping("files"), epochs=epochs).fit(Model(width=3000), data(), ckpt_path=ref)
    assert first.found | again.found == whole.found
    assert store.stats().bytes_frames < store.stats().bytes_coded
    assert sum(one.stats.bytes_deltas for one in store.checkpoints()) > 0
    assert not store.verify(decode=True).is_damaged


def test_the_store_grows_only_by_changed_bytes(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    keeping = ModelCheckpoint(tmp_path / "files", save_top_k=-1, every_n_train_steps=2)
    trainer(tmp_path, CasCheckpointIO(store, run="sft"), keeping).fit(Model(width=4000), data())
    saved = store.checkpoints("sft")
    assert len(saved) == 8
    backbone, head = 4000 * 17 * 4, 4001 * 4
    assert saved[0].stats.bytes_written > backbone
    for ckpt in saved[1:]:
        assert ckpt.stats.bytes_written < 3 * head + 12_000  # the head's weights and moments, and headers
    last = ModelCheckpoint(tmp_path / "more", save_last=True, save_top_k=0)
    trainer(tmp_path, CasCheckpointIO(store, run="more", health=True), last, epochs=1).fit(Model(width=4000), data())
    assert store.get("more@latest").health
    # a different run with the same backbone
    assert store.checkpoints("more")[0].stats.bytes_written < 3 * head + 12_000


def test_gc_keeps_checkpoints_that_have_a_file_regardless_of_the_policy(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    keeping = ModelCheckpoint(tmp_path / "files", save_top_k=-1, every_n_epochs=1)
    trainer(tmp_path, CasCheckpointIO(store, run="sft"), keeping).fit(Model(), data())
    store.gc(keep_last=1, min_age=0)
    assert [step for _, step in steps(store)] == [4, 8, 12, 16]


def checkpoint(step: int, value: float = 0.0) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((8,), value)}, "global_step": step, "epoch": 0, "loops": {}}


def test_the_error_of_a_failed_background_save_is_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow(tmp_path / "store")
    io = CasCheckpointIO(slow.store, run="sft", async_save=True)
    slow.faulty.inject(fail_before("put", key="objects/*.manifest"))
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    assert "a save or removal in the background failed: injected" in caplog.text
    assert io.load_checkpoint(tmp_path / "1.ckpt")["global_step"] == 1  # the load waits for the save
    slow.faulty.inject(fail_before("put", key="objects/*.manifest"))
    io.save_checkpoint(checkpoint(2), tmp_path / "2.ckpt")
    with pytest.raises(StorageError, match="injected"):
        io.teardown()
    assert not (tmp_path / "2.ckpt").exists()
    assert steps(slow.store) == [("sft", 1)]
    assert io.load_checkpoint(tmp_path / "1.ckpt")["global_step"] == 1


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_that_meets_a_full_disk_frees_what_removals_left_and_is_tried_again(
    tmp_path: Path, async_save: bool
) -> None:
    disk = SmallDisk(memory(near=False), 45 * CELL)  # for two checkpoints
    store = small(disk)

    def save(io: CasCheckpointIO, step: int) -> None:
        drawn = checkpoint(step) | {"state_dict": {"w": cells(16)}}
        io.save_checkpoint(drawn, tmp_path / f"{step}.ckpt")
        io.teardown()

    plain = CasCheckpointIO(store, run="sft", async_save=async_save)
    save(plain, 1)
    save(plain, 2)
    plain.remove_checkpoint(tmp_path / "1.ckpt")
    with pytest.raises(StorageError, match=r"the disk is full\. With gc=True"):
        save(plain, 3)
    assert not (tmp_path / "3.ckpt").exists()
    io = CasCheckpointIO(store, run="sft", async_save=async_save, gc=True)
    save(io, 3)
    assert steps(store) == [("sft", 2), ("sft", 3)]
    refused = disk.refused
    with pytest.raises(StorageError, match="the disk is full"):
        save(io, 4)
    assert disk.refused == refused + 1  # gc frees nothing, so a second try would be in vain
    assert steps(store) == [("sft", 2), ("sft", 3)]  # Lightning decides what goes


def test_a_save_leaves_the_room_that_others_need(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    with pytest.raises(StorageError, match="leaves min_free='999TB'") as raised:
        CasCheckpointIO(store, run="sft", min_free="999TB").save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    assert raised.value.full
    CasCheckpointIO(store, run="sft", min_free=1).save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    with pytest.raises(InvalidInput, match="'20 apples' is not a size"):
        CasCheckpointIO(store, run="sft", min_free="20 apples")


def test_the_last_failed_save_of_a_fabric_is_reported_at_exit_unless_somebody_hears_of_it(tmp_path: Path) -> None:
    slow = Slow(tmp_path / "store")
    io = CasCheckpointIO(slow.store, run="fab", async_save=True)
    fabric, state = Fabric(accelerator="cpu", plugins=[io]), {"w": torch.ones(3), "loops": 1}
    slow.faulty.inject(fail_before("put", key="objects/*.manifest"))
    fabric.save(tmp_path / "1.ckpt", state)
    slow.store._saver.get().background.wait()
    wait(io._waiting)  # the file is removed by now
    assert ["injected" in why for why in unreported.values()] == [True]
    assert not (tmp_path / "1.ckpt").exists()
    with pytest.raises(StorageError, match="injected"):
        io.teardown()
    assert not unreported


class WithTest(Model):
    def test_step(self, batch: Any, number: int) -> None:
        """A baseline."""


def test_a_trainer_saves_in_the_background_only_within_a_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, saves = Slow(tmp_path / "store"), list[str]()

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            saves.append(name)
            return real(*args, **options)

        return call

    for name in ("save", "save_async"):
        monkeypatch.setattr(slow.store, name, noted(name, getattr(slow.store, name)))
    io = CasCheckpointIO(slow.store, run="sft", async_save=True)
    within = (ModelCheckpoint(tmp_path / "a", every_n_train_steps=2), ModelCheckpoint(tmp_path / "b", monitor="loss"))
    training = trainer(tmp_path, io, *within, epochs=1)
    training.test(WithTest(), data(), verbose=False)
    for epochs in (1, 2):
        training.fit_loop.max_epochs = epochs
        training.fit(Model(), data())
        assert {*saves} == {"save_async"}
        saves.clear()
        training.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        assert saves == ["save"]
        saves.clear()
    slow.faulty.inject(fail_before("put", key="objects/*.manifest"))
    with pytest.raises(StorageError, match="injected"):
        training.save_checkpoint(tmp_path / "final.ckpt")
    assert not (tmp_path / "final.ckpt").exists()


def test_a_removal_waits_for_the_save_before_it(tmp_path: Path) -> None:
    slow = Slow(tmp_path / "store")
    io, go = CasCheckpointIO(slow.store, run="sft", async_save=True), threading.Event()

    def held(_: Call) -> None:
        assert go.wait(60)

    slow.faulty.inject(call_first("put", held, key="objects/*.manifest"))
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    io.remove_checkpoint(tmp_path / "1.ckpt")
    assert (tmp_path / "1.ckpt").exists()
    go.set()
    io.teardown()
    assert not (tmp_path / "1.ckpt").exists()
    assert steps(slow.store) == []


def test_what_hooks_add_to_a_checkpoint_is_saved_and_loaded(tmp_path: Path, store: Store) -> None:
    class Adds(Model):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"average": [torch.ones(2)], "drawn": 3}
            checkpoint["state_dict"]["extra"] = torch.ones(3)

    class Counts(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"count": 5}

    io = CasCheckpointIO(store, run="sft")
    training = trainer(tmp_path, io, Counts(), epochs=1)
    training.fit(Adds(), data())
    training.save_checkpoint(tmp_path / "a.ckpt")
    given, found = (
        training._checkpoint_connector.dump_checkpoint(weights_only=False),
        io.load_checkpoint(tmp_path / "a.ckpt"),
    )
    assert found.keys() == given.keys()
    assert found["mine"]["drawn"] == 3
    assert found["mine"]["average"][0].tolist() == [1, 1]
    assert found["callbacks"] == given["callbacks"]
    assert found["loops"] == given["loops"]
    assert identical(found["state_dict"], given["state_dict"])


def test_fabric_saves_and_loads_through_the_plug_in(tmp_path: Path, store: Store) -> None:
    fabric = Fabric(accelerator="cpu", plugins=[CasCheckpointIO(store, run="fab")])
    model = nn.Linear(3, 3)
    for _ in range(2):
        fabric.save(tmp_path / "state.ckpt", {"model": model, "epoch": 3})
    want = copy.deepcopy(model.state_dict())
    nn.init.zeros_(model.weight)
    state = {"model": model, "epoch": 0}
    fabric.load(tmp_path / "state.ckpt", state)
    assert state["epoch"] == 3
    assert identical(dict(model.state_dict()), dict(want))
    assert steps(store) == [("fab", 1)]


def test_lightning_loads_checkpoints_of_other_front_ends(store: Store, tmp_path: Path) -> None:
    store.save({"w": torch.ones(2)}, run="plain", step=7)
    store.save({"model": {"w": torch.ones(2)}, "optim": {"lr": 1}}, run="ours", step=7)
    io = CasCheckpointIO(store, run="plain")
    for ref in ("plain@7", "ours@7"):
        found = io.load_checkpoint(ref, map_location="meta")
        assert list(found) == ["state_dict"]
        assert found["state_dict"]["w"].device.type == "meta"
    io.save_checkpoint(
        {"state_dict": {"w": torch.ones(2)}, "callbacks": {"a": None, "b": {"monitor": "x"}}}, tmp_path / "x"
    )
    assert [(one.step, one.metrics) for one in store.checkpoints("plain")] == [(7, {}), (8, {})]


class Odd(Model):
    """A module with a hyperparameter that is not plain data."""

    def __init__(self, act: Any = torch.relu) -> None:
        super().__init__()
        self.save_hyperparameters()


class Projected(Model):
    def configure_optimizers(self) -> Any:
        return WithProjector(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("model", "pickles", "step"), [(Odd, False, 0), (Odd, True, 4), (Projected, False, 1), (Model, False, 4)]
)
def test_an_invalid_state_raises_an_error_at_the_start(
    tmp_path: Path, model: type[Model], pickles: bool, step: int
) -> None:
    io = CasCheckpointIO(tmp_path / "store", run="sft", allow_pickle=pickles)
    training = trainer(tmp_path, io, CasCheckpointCheck(), epochs=1, limit_train_batches=4)
    with nullcontext() if step == 4 else pytest.raises(InvalidInput, match=r"projector|hyper_parameters\.act"):
        training.fit(model(), data())
    assert training.global_step == step


def test_a_module_among_hyperparameters_is_rejected(tmp_path: Path) -> None:
    """A load would return the module as a state_dict."""
    checkpoint = {"state_dict": {"w": torch.ones(2)}, "global_step": 1, "hyper_parameters": {"net": nn.Linear(1, 1)}}
    with pytest.raises(InvalidInput, match=r"hyper_parameters\.net: a .*Linear cannot be stored"):
        CasCheckpointIO(tmp_path / "store", run="plain").check(checkpoint)
    io = CasCheckpointIO(tmp_path / "store", run="sft", allow_pickle=True)
    io.save_checkpoint(checkpoint, tmp_path / "x.ckpt")
    assert type(io.load_checkpoint(tmp_path / "x.ckpt")["hyper_parameters"]["net"]) is nn.Linear


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("checks", [(), (CasCheckpointCheck(),)])
def test_the_first_failed_save_suggests_the_check_callback(
    tmp_path: Path, checks: tuple[Callback, ...], async_save: bool
) -> None:
    io = CasCheckpointIO(tmp_path / "store", run="sft", async_save=async_save)
    training = trainer(tmp_path, io, *checks, epochs=1, limit_train_batches=4)
    with pytest.raises(InvalidInput) as caught:
        training.fit(Odd(), data())
    assert any("CasCheckpointCheck()" in note for note in getattr(caught.value, "__notes__", ())) == (not checks)
    with pytest.raises(InvalidInput) as caught:  # raised by a Fabric, which has no callbacks
        CasCheckpointIO(tmp_path / "fabric", run="sft").save_checkpoint({"x": object()}, tmp_path / "x")
    assert not hasattr(caught.value, "__notes__")


def test_the_check_names_the_schedules_that_a_resume_replaces(caplog: pytest.LogCaptureFixture) -> None:
    def cosine(steps: int) -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    training: Any = SimpleNamespace(lr_scheduler_configs=[SimpleNamespace(scheduler=cosine(24))], is_global_zero=True)
    check = CasCheckpointCheck()
    check.on_load_checkpoint(training, None, {"lr_schedulers": [cosine(16).state_dict()]})
    check.on_fit_start(training, None)
    (record,) = caplog.records
    assert "T_max=24 was given, but the checkpoint has 16" in record.getMessage()
