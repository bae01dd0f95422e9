"""Lightning's files and their checkpoints, which are moved, removed, or left behind by a crash."""

# ruff: noqa: E402 - skip before importing optional packages

from __future__ import annotations

import json
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

lightning = pytest.importorskip("lightning.pytorch", reason="needs casckpt[lightning]")
from lightning.pytorch.callbacks import ModelCheckpoint

from casckpt.errors import CasckptError, NotFound
from casckpt.frontends.lightning import CasCheckpointIO
from casckpt.frontends.lightning.files import Pointer
from casckpt.store.store import Store
from tests.support.faulty import call_first
from tests.support.lightning_training import Model, Slow, data, trainer
from tests.support.saves import small_folder, steps
from tests.support.training import identical

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning and its imports warn about devices, loggers and workers


def test_the_old_checkpoint_is_forgotten_when_the_last_file_moves_to_a_new_one(tmp_path: Path) -> None:
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
    remote = "memory://none/x.ckpt", "memory://none/x@1"
    for path in (*remote, tmp_path / "none.ckpt", "none.ckpt", "./none", "../none@1", "files/none"):
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


def test_a_load_waits_for_the_saves_of_other_plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, go = Slow(tmp_path / "store"), threading.Event()
    io, other = (CasCheckpointIO(slow.store, run="sft", async_save=True) for _ in range(2))

    def wait_for_go(_: Any) -> None:
        go.wait(60)

    slow.faulty.inject(call_first("put", wait_for_go, key="commits/*"))
    io.save_checkpoint(checkpoint(2, 2), tmp_path / "2.ckpt")

    def waited(several: Any) -> Any:
        if several:
            go.set()
        return wait(several)

    monkeypatch.setattr("casckpt.frontends.lightning.io.wait", waited)
    try:
        assert other.load_checkpoint(tmp_path / "2.ckpt")["global_step"] == 2
    finally:
        go.set()
        io.teardown()


def test_only_a_file_that_moves_to_another_training_warns_of_what_it_no_longer_protects(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    io, last = CasCheckpointIO(store, run="sft"), tmp_path / "last.ckpt"
    io.save_checkpoint(checkpoint(1), tmp_path / "best.ckpt")
    for step in (1, 2):  # in the run sft/last, because sft@1 is that of best.ckpt, and then in sft
        io.save_checkpoint(checkpoint(step), last)
        assert (store.get(f"sft{'/last' * (step == 1)}@{step}").tags, caplog.messages) == ([Pointer(last).tag], [])
    CasCheckpointIO(store, run="sft2").save_checkpoint(checkpoint(3), last)
    assert "moves from run sft to run sft2, and no longer protects sft@2" in caplog.text


class Death(BaseException):
    """The process died."""


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


def test_a_file_of_an_unfinished_save_is_recognized(tmp_path: Path, store: Store) -> None:
    (tmp_path / "1.ckpt").write_text(json.dumps({"casckpt": {"run": "sft", "step": 1}}))
    io = CasCheckpointIO(store, run="sft")
    with pytest.raises(NotFound, match="a save that did not finish"):
        io.load_checkpoint(tmp_path / "1.ckpt")
    io.remove_checkpoint(tmp_path / "1.ckpt")
    assert not (tmp_path / "1.ckpt").exists()
    with pytest.raises(TypeError, match="storage_options"):  # as Lightning's own plug-ins
        io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt", storage_options={})


def test_lightning_paths_can_be_remote(tmp_path: Path, store: Store) -> None:
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


def test_files_of_one_name_and_step_in_several_folders_keep_their_checkpoints(tmp_path: Path, store: Store) -> None:
    io = CasCheckpointIO(store, run="sft")
    paths = [tmp_path / folder / "last.ckpt" for folder in "abcd"]
    for value, path in enumerate(paths):
        io.save_checkpoint(checkpoint(1, value), path)
    io.save_checkpoint(checkpoint(1, 9), paths[2])
    store.gc(min_age=0)
    assert [io.load_checkpoint(path)["state_dict"]["w"][0] for path in paths] == [0, 1, 9, 3]
    assert len(steps(store)) == len(paths)  # none is forgotten
    for path in paths:
        io.remove_checkpoint(path)
    assert steps(store) == []
