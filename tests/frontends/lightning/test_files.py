"""Lightning's files and their checkpoints, which are moved, removed, or left behind by a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from casckpt.errors import CasckptError, Conflict, InvalidInput, NotFound, Unsigned
from casckpt.frontends.lightning import CasCheckpointIO, restore_checkpoint
from casckpt.frontends.lightning.files import Pointer
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from tests.support.faulty import call_first
from tests.support.lightning_training import Losses, Model, Slow, data, trainer
from tests.support.saves import small_folder, steps
from tests.support.signing import pair
from tests.support.training import identical

lightning = pytest.importorskip("lightning.pytorch", reason="needs casckpt[lightning]")


pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning and its imports warn about devices, loggers and workers


def test_the_last_file_moves_and_its_old_checkpoint_is_forgotten(tmp_path: Path) -> None:
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


def test_a_missing_path_raises_not_found(tmp_path: Path, store: Store) -> None:
    io = CasCheckpointIO(store, run="sft")
    for path in (tmp_path / "none.ckpt", "none.ckpt", "memory://none/x.ckpt", "memory://none/x", "./none"):
        with pytest.raises(FileNotFoundError, match=r"the file .*none.* does not exist; pass the path of"):
            io.load_checkpoint(path)


def checkpoint(step: int, value: float = 0.0) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((8,), value)}, "global_step": step, "epoch": 0, "loops": {}}


def test_background_removals_run_in_order(tmp_path: Path) -> None:
    slow = Slow(tmp_path / "store")
    io = CasCheckpointIO(slow.store, run="sft", async_save=True)
    for step in range(1, 5):
        io.save_checkpoint(checkpoint(step, step), tmp_path / f"{step}.ckpt")
        assert (tmp_path / f"{step}.ckpt").exists()  # immediately, so that Lightning does not reuse the name
        if step > 1:
            io.remove_checkpoint(tmp_path / f"{step - 1}.ckpt")
    io.teardown()
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["4.ckpt"]
    assert steps(slow.store) == [("sft", 4)]
    assert identical(io.load_checkpoint(tmp_path / "4.ckpt")["state_dict"], checkpoint(4, 4)["state_dict"])


class Death(BaseException):
    """The death of the process."""


@pytest.mark.parametrize("key", ["commits/*", "tags/*"])
def test_a_crash_between_commit_and_file_does_not_block_the_next_save(tmp_path: Path, key: str) -> None:
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


def test_a_file_of_an_unfinished_save_is_recognised(tmp_path: Path, store: Store) -> None:
    (tmp_path / "1.ckpt").write_text(json.dumps({"casckpt": {"run": "sft", "step": 1}}))
    io = CasCheckpointIO(store, run="sft")
    with pytest.raises(NotFound, match="a save that did not finish"):
        io.load_checkpoint(tmp_path / "1.ckpt")
    io.remove_checkpoint(tmp_path / "1.ckpt")
    assert not (tmp_path / "1.ckpt").exists()
    with pytest.raises(CasckptError, match="storage_options"):
        io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt", storage_options={})


def test_lightning_paths_may_be_remote(tmp_path: Path, store: Store) -> None:
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


def test_a_checkpoint_with_a_user_tag_survives_the_removal_of_its_file(tmp_path: Path, store: Store) -> None:
    io, path = CasCheckpointIO(store, run="sft"), tmp_path / "a b.ckpt"
    io.save_checkpoint(checkpoint(1, 1), path)
    store.tag("best", "sft@1")
    io.save_checkpoint(checkpoint(1, 2), path)
    assert steps(store) == [("sft", 1), ("sft/a-b", 1)]
    assert io.load_checkpoint(path)["state_dict"]["w"][0] == 2
    io.save_checkpoint(checkpoint(1, 2), path)  # the same save once more
    assert io.load_checkpoint(path)["state_dict"]["w"][0] == 2
    io.remove_checkpoint(path)
    assert steps(store) == [("sft", 1)]
    assert store.get("sft@1").tags == ["best"]
    assert store.read("tag:best")["model"]["w"][0] == 1


def best_two(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "files", monitor="loss", save_top_k=2, save_last=True, **options)


def test_a_training_resumes_from_a_reference(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    trainer(tmp_path, CasCheckpointIO(store, run="sft"), best_two(tmp_path), epochs=2).fit(Model(), data())
    losses = Losses()
    trainer(tmp_path, CasCheckpointIO(store, run="more"), losses, best_two(tmp_path / "b")).fit(
        Model(), data(), ckpt_path="sft@latest"
    )
    assert sorted(losses.found) == list(range(9, 17))
    with pytest.raises(FileNotFoundError, match="no step 99"):
        CasCheckpointIO(store, run="sft").load_checkpoint("sft@99")


def test_a_restored_file_is_readable_without_casckpt(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    model = Model(width=32)
    trainer(tmp_path, CasCheckpointIO(store, run="sft"), best_two(tmp_path), epochs=1).fit(model, data())
    path = restore_checkpoint(store, "sft@4", tmp_path / "real.ckpt")
    again = Model.load_from_checkpoint(path, weights_only=True)
    assert again.hparams["width"] == 32
    assert identical(dict(again.state_dict()), dict(model.state_dict()))
    with pytest.raises(Conflict, match="already exists"):
        restore_checkpoint(store, "sft@4", path)
    # the plug-in also loads a file that Lightning wrote without a store
    io = CasCheckpointIO(store, run="sft")
    assert io.load_checkpoint(path)["global_step"] == 4
    trusting = CasCheckpointIO(open_store(store.url, require_signature=pair(tmp_path / "keys").public), run="sft")
    with pytest.raises(Unsigned, match=r"real\.ckpt is not in a store, so it has no signature"):
        trusting.load_checkpoint(path)
    io.remove_checkpoint(path)
    assert not path.exists()


def test_a_file_with_pickled_values_is_written_if_allowed(tmp_path: Path, store: Store) -> None:
    io = CasCheckpointIO(store, run="sft", allow_pickle=True)
    state = {"global_step": 1, "optimizer_states": [{"state": {0: {"projector": slice(1, 3), "odd": Slow}}}]}
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}, **state}, tmp_path / "one.ckpt")
    with pytest.raises(InvalidInput, match="pass allow_pickle=True"):
        restore_checkpoint(store, "sft@1", tmp_path / "real.ckpt")
    path = restore_checkpoint(store, "sft@1", tmp_path / "real.ckpt", allow_pickle=True)
    assert torch.load(path, weights_only=False)["optimizer_states"] == state["optimizer_states"]


def test_different_spellings_of_a_path_have_the_same_tag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    one = Pointer("files/Last.ckpt")
    assert one.tag == Pointer(tmp_path / "files" / "Last.ckpt").tag
    assert one.tag.endswith(".last")
    others = ("more/Last.ckpt", "files/Last", "s3://b/files/Last.ckpt", "files/" + "x" * 200 + ".ckpt")
    tags = {one.tag, *(Pointer(path).tag for path in others)}
    assert len(tags) == 5
    assert max(map(len, tags)) == 87  # the length for the longest name, which is truncated
    assert [Pointer(path).name for path in ("a/epoch=1 b.ckpt", "a/")] == ["epoch-1-b", "file"]
