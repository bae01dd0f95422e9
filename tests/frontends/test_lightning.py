"""Lightning: real trainings whose checkpoints lie in a store; what it keeps, removes, and resumes from."""

# ruff: noqa: E402 - what is optional is asked for first

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning.pytorch", reason="needs casckpt[lightning]")

from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint

from casckpt.errors import CasckptError, Conflict, InvalidInput, NotFound, StorageError, Unsigned
from casckpt.frontends.lightning import CasCheckpointCheck, CasCheckpointIO, restore_checkpoint
from casckpt.frontends.lightning.pointer import Pointer
from casckpt.frontends.training_state import unshard_model_state
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore, call_first, fail_before
from tests.support.saves import small_folder, steps
from tests.support.signing import pair
from tests.support.training import identical

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # of Lightning and of what it imports: about devices, loggers, workers


class Model(LightningModule):
    """A frozen part, a part that learns, a scheduler, hyperparameters."""

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
    """All losses, to the bit; each step draws from a seed of its own."""

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


def best_two(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "files", monitor="loss", save_top_k=2, save_last=True, **options)


def test_an_average_of_weights_goes_on_to_the_bit(tmp_path: Path) -> None:
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
def test_a_training_keeps_the_best_and_resumes_to_the_bit(tmp_path: Path, async_save: bool) -> None:
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
    assert len(store.checkpoints(forgotten=True)) == len(store.checkpoints())  # what was removed is gone for good

    again, model = Losses(), Model()
    more = CasCheckpointIO(store, run="sft", async_save=async_save)
    trainer(tmp_path, more, again, best_two(tmp_path)).fit(model, data(), ckpt_path="last")
    assert sorted(again.found) == [13, 14, 15, 16]
    assert first.found | again.found == whole.found
    assert identical(unshard_model_state(store, "sft@16"), dict(model.state_dict()))
    assert not store.verify().is_damaged


def test_what_is_stored_smaller_resumes_to_the_bit(tmp_path: Path) -> None:
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


def test_the_store_grows_by_what_changed(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    keeping = ModelCheckpoint(tmp_path / "files", save_top_k=-1, every_n_train_steps=2)
    trainer(tmp_path, CasCheckpointIO(store, run="sft"), keeping).fit(Model(width=4000), data())
    saved = store.checkpoints("sft")
    assert len(saved) == 8
    backbone, head = 4000 * 17 * 4, 4001 * 4
    assert saved[0].stats.bytes_written > backbone
    for ckpt in saved[1:]:
        assert ckpt.stats.bytes_written < 3 * head + 12_000  # weights and moments of the head, and headers
    last = ModelCheckpoint(tmp_path / "more", save_last=True, save_top_k=0)
    trainer(tmp_path, CasCheckpointIO(store, run="more", health=True), last, epochs=1).fit(Model(width=4000), data())
    assert store.get("more@latest").health
    assert store.checkpoints("more")[0].stats.bytes_written < 3 * head + 12_000  # another run, the same backbone


def test_the_last_file_moves_and_what_it_named_goes(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    keeping = ModelCheckpoint(tmp_path / "files", save_last=True, save_top_k=0, every_n_epochs=1)
    trainer(tmp_path, CasCheckpointIO(store, run="sft"), keeping).fit(Model(), data())
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["last.ckpt"]
    assert steps(store) == [("sft", 16)]
    (tag,) = store.get("sft@16").tags
    assert tag.startswith("lightning.")
    store.gc(keep_last=1, min_age=0)
    pointer = json.loads((tmp_path / "files" / "last.ckpt").read_text())["casckpt"]
    assert (pointer["run"], pointer["step"], pointer["id"]) == ("sft", 16, store.get("sft@16").id)


def test_what_policies_of_the_store_must_not_touch(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    keeping = ModelCheckpoint(tmp_path / "files", save_top_k=-1, every_n_epochs=1)
    trainer(tmp_path, CasCheckpointIO(store, run="sft"), keeping).fit(Model(), data())
    store.gc(keep_last=1, min_age=0)
    assert [step for _, step in steps(store)] == [4, 8, 12, 16]


def test_a_reference_resumes_too(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    trainer(tmp_path, CasCheckpointIO(store, run="sft"), best_two(tmp_path), epochs=2).fit(Model(), data())
    losses = Losses()
    trainer(tmp_path, CasCheckpointIO(store, run="more"), losses, best_two(tmp_path / "b")).fit(
        Model(), data(), ckpt_path="sft@latest"
    )
    assert sorted(losses.found) == list(range(9, 17))
    with pytest.raises(FileNotFoundError, match="no step 99"):
        CasCheckpointIO(store, run="sft").load_checkpoint("sft@99")


def test_a_path_where_nothing_is(tmp_path: Path, store: Store) -> None:
    io = CasCheckpointIO(store, run="sft")
    for path in (tmp_path / "none.ckpt", "none.ckpt", "memory://none/x.ckpt", "memory://none/x", "./none"):
        with pytest.raises(FileNotFoundError, match=r"there is no file .*none.*; give the path of one, or a reference"):
            io.load_checkpoint(path)


def test_a_file_for_all_that_reads_files(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    model = Model(width=32)
    trainer(tmp_path, CasCheckpointIO(store, run="sft"), best_two(tmp_path), epochs=1).fit(model, data())
    path = restore_checkpoint(store, "sft@4", tmp_path / "real.ckpt")
    again = Model.load_from_checkpoint(path, weights_only=True)
    assert again.hparams["width"] == 32
    assert identical(dict(again.state_dict()), dict(model.state_dict()))
    with pytest.raises(Conflict, match="exists already"):
        restore_checkpoint(store, "sft@4", path)
    # and the plug-in takes it in turn, as any file that Lightning wrote before there was a store
    io = CasCheckpointIO(store, run="sft")
    assert io.load_checkpoint(path)["global_step"] == 4
    trusting = CasCheckpointIO(open_store(store.url, require_signature=pair(tmp_path / "keys").public), run="sft")
    with pytest.raises(Unsigned, match=r"real\.ckpt is in no store, so nobody has signed it"):
        trusting.load_checkpoint(path)
    io.remove_checkpoint(path)
    assert not path.exists()


def test_a_file_is_written_of_what_was_pickled_where_that_is_allowed(tmp_path: Path, store: Store) -> None:
    io = CasCheckpointIO(store, run="sft", allow_pickle=True)
    state = {"global_step": 1, "optimizer_states": [{"state": {0: {"projector": slice(1, 3), "odd": Slow}}}]}
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}, **state}, tmp_path / "one.ckpt")
    with pytest.raises(InvalidInput, match="pass allow_pickle=True"):
        restore_checkpoint(store, "sft@1", tmp_path / "real.ckpt")
    path = restore_checkpoint(store, "sft@1", tmp_path / "real.ckpt", allow_pickle=True)
    assert torch.load(path, weights_only=False)["optimizer_states"] == state["optimizer_states"]


class Slow:
    """A store whose saves wait until they are let go."""

    def __init__(self, folder: Path) -> None:
        self.faulty = FaultyStore(LocalStore(folder))
        self.store = Store(Repository(self.faulty))


def checkpoint(step: int, value: float = 0.0) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((8,), value)}, "global_step": step, "epoch": 0, "loops": {}}


def test_removals_in_the_background_keep_their_order(tmp_path: Path) -> None:
    slow = Slow(tmp_path / "store")
    io = CasCheckpointIO(slow.store, run="sft", async_save=True)
    for step in range(1, 5):
        io.save_checkpoint(checkpoint(step, step), tmp_path / f"{step}.ckpt")
        assert (tmp_path / f"{step}.ckpt").exists()  # at once, so that Lightning gives the name to nobody else
        if step > 1:
            io.remove_checkpoint(tmp_path / f"{step - 1}.ckpt")
    io.teardown()
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["4.ckpt"]
    assert steps(slow.store) == [("sft", 4)]
    assert identical(io.load_checkpoint(tmp_path / "4.ckpt")["state_dict"], checkpoint(4, 4)["state_dict"])


def test_a_save_in_the_background_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow(tmp_path / "store")
    io = CasCheckpointIO(slow.store, run="sft", async_save=True)
    slow.faulty.inject(fail_before("put", key="objects/*.manifest"))
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    assert "a save or removal in the background failed: injected" in caplog.text
    assert io.load_checkpoint(tmp_path / "1.ckpt")["global_step"] == 1  # which waits for it
    slow.faulty.inject(fail_before("put", key="objects/*.manifest"))
    io.save_checkpoint(checkpoint(2), tmp_path / "2.ckpt")
    with pytest.raises(StorageError, match="injected"):
        io.teardown()
    assert not (tmp_path / "2.ckpt").exists()
    assert steps(slow.store) == [("sft", 1)]
    assert io.load_checkpoint(tmp_path / "1.ckpt")["global_step"] == 1


class Death(BaseException):
    """The process is no more."""


@pytest.mark.parametrize("key", ["commits/*", "tags/*"])
def test_a_crash_between_commit_and_file_leaves_nothing_in_the_way(tmp_path: Path, key: str) -> None:
    slow = Slow(tmp_path / "store")
    io = CasCheckpointIO(slow.store, run="sft")
    io.save_checkpoint(checkpoint(1, 1), tmp_path / "last.ckpt")

    def die(_: Any) -> None:
        raise Death

    slow.faulty.inject(call_first("put", die, key=key))
    with pytest.raises(Death):
        io.save_checkpoint(checkpoint(2, 2), tmp_path / "last.ckpt")
    slow.faulty.heal()
    after = CasCheckpointIO(slow.store, run="sft")
    assert after.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 1
    after.save_checkpoint(checkpoint(2, 3), tmp_path / "last.ckpt")
    assert after.load_checkpoint(tmp_path / "last.ckpt")["state_dict"]["w"][0] == 3
    assert steps(slow.store) == [("sft", 2)]


def test_a_file_of_a_save_that_never_ended_is_told_from_others(tmp_path: Path, store: Store) -> None:
    (tmp_path / "1.ckpt").write_text(json.dumps({"casckpt": {"run": "sft", "step": 1}}))
    io = CasCheckpointIO(store, run="sft")
    with pytest.raises(NotFound, match="a save that did not end"):
        io.load_checkpoint(tmp_path / "1.ckpt")
    io.remove_checkpoint(tmp_path / "1.ckpt")
    assert not (tmp_path / "1.ckpt").exists()
    with pytest.raises(CasckptError, match="storage_options"):
        io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt", storage_options={})


def test_paths_may_be_remote(tmp_path: Path, store: Store) -> None:
    io = CasCheckpointIO(store, run="sft")
    path = f"memory://bucket/{tmp_path.name}/last.ckpt"
    for step in (1, 2):
        io.save_checkpoint(checkpoint(step, step), path)
    assert io.load_checkpoint(path)["global_step"] == 2
    assert steps(store) == [("sft", 2)]
    io.remove_checkpoint(path)
    with pytest.raises(CasckptError):
        io.load_checkpoint(path)
    assert steps(store) == []


def test_fabric_saves_and_loads_through_it(tmp_path: Path, store: Store) -> None:
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


def test_a_checkpoint_that_somebody_else_tagged_stays_whatever_becomes_of_its_file(
    tmp_path: Path, store: Store
) -> None:
    io, path = CasCheckpointIO(store, run="sft"), tmp_path / "a b.ckpt"
    io.save_checkpoint(checkpoint(1, 1), path)
    store.tag("best", "sft@1")
    io.save_checkpoint(checkpoint(1, 2), path)
    assert steps(store) == [("sft", 1), ("sft/a-b", 1)]
    assert io.load_checkpoint(path)["state_dict"]["w"][0] == 2
    io.save_checkpoint(checkpoint(1, 2), path)  # the same again
    assert io.load_checkpoint(path)["state_dict"]["w"][0] == 2
    io.remove_checkpoint(path)
    assert steps(store) == [("sft", 1)]
    assert store.get("sft@1").tags == ["best"]
    assert store.read("tag:best")["model"]["w"][0] == 1


def test_a_tag_is_of_one_path_however_it_is_spelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    one = Pointer("files/Last.ckpt")
    assert one.tag == Pointer(tmp_path / "files" / "Last.ckpt").tag
    assert one.tag.endswith(".last")
    others = ("more/Last.ckpt", "files/Last", "s3://b/files/Last.ckpt", "files/" + "x" * 200 + ".ckpt")
    tags = {one.tag, *(Pointer(path).tag for path in others)}
    assert len(tags) == 5
    assert max(map(len, tags)) == 87  # that of the longest name, which is cut
    assert [Pointer(path).name for path in ("a/epoch=1 b.ckpt", "a/")] == ["epoch-1-b", "file"]


def test_what_another_front_end_saved_and_what_no_trainer_counts(store: Store, tmp_path: Path) -> None:
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
    """With a hyperparameter that is no plain data."""

    def __init__(self, act: Any = torch.relu) -> None:
        super().__init__()
        self.save_hyperparameters()


class Projecting(torch.optim.SGD):
    """Its first step makes state that is no plain data."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["projector"] = object()


class Projected(Model):
    def configure_optimizers(self) -> Any:
        return Projecting(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("model", "pickles", "step"), [(Odd, False, 0), (Odd, True, 4), (Projected, False, 1), (Model, False, 4)]
)
def test_what_cannot_be_saved_is_heard_at_the_begin(
    tmp_path: Path, model: type[Model], pickles: bool, step: int
) -> None:
    io = CasCheckpointIO(tmp_path / "store", run="sft", allow_pickle=pickles)
    training = trainer(tmp_path, io, CasCheckpointCheck(), epochs=1, limit_train_batches=4)
    with nullcontext() if step == 4 else pytest.raises(InvalidInput, match=r"projector|hyper_parameters\.act"):
        training.fit(model(), data())
    assert training.global_step == step


def test_a_module_among_hyperparameters_is_no_whole_object(tmp_path: Path) -> None:
    """It would come back as a state_dict."""
    checkpoint = {"state_dict": {"w": torch.ones(2)}, "global_step": 1, "hyper_parameters": {"net": nn.Linear(1, 1)}}
    with pytest.raises(InvalidInput, match=r"hyper_parameters\.net: a .*Linear cannot be stored"):
        CasCheckpointIO(tmp_path / "store", run="plain").check(checkpoint)
    io = CasCheckpointIO(tmp_path / "store", run="sft", allow_pickle=True)
    io.save_checkpoint(checkpoint, tmp_path / "x.ckpt")
    assert type(io.load_checkpoint(tmp_path / "x.ckpt")["hyper_parameters"]["net"]) is nn.Linear


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("checks", [(), (CasCheckpointCheck(),)])
def test_the_first_save_that_fails_says_what_would_have_been_earlier(
    tmp_path: Path, checks: tuple[Callback, ...], async_save: bool
) -> None:
    io = CasCheckpointIO(tmp_path / "store", run="sft", async_save=async_save)
    training = trainer(tmp_path, io, *checks, epochs=1, limit_train_batches=4)
    with pytest.raises(InvalidInput) as caught:
        training.fit(Odd(), data())
    assert any("CasCheckpointCheck()" in note for note in getattr(caught.value, "__notes__", ())) == (not checks)
    with pytest.raises(InvalidInput) as caught:  # of a Fabric, which has no callbacks
        CasCheckpointIO(tmp_path / "fabric", run="sft").save_checkpoint({"x": object()}, tmp_path / "x")
    assert not hasattr(caught.value, "__notes__")
