"""The small file that names a checkpoint for Lightning."""

# ruff: noqa: E402 - skip before importing optional packages

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

lightning = pytest.importorskip("lightning.pytorch", reason="needs casckpt[lightning]")
from lightning.pytorch.callbacks import ModelCheckpoint

from casckpt.errors import Conflict, InvalidInput, Unsigned
from casckpt.frontends.lightning import CasCheckpointIO, restore_checkpoint
from casckpt.frontends.lightning.files import Pointer
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from tests.support.lightning_training import Losses, Model, Slow, data, trainer
from tests.support.saves import small_folder
from tests.support.signing import pair
from tests.support.training import identical

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning and its imports warn about devices, loggers and workers


def best_two(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "files", monitor="loss", save_top_k=2, save_last=True, **options)


def test_training_resumes_from_a_reference(tmp_path: Path) -> None:
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


def test_different_spellings_of_a_path_lead_to_the_same_tag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    one = Pointer("files/Last.ckpt")
    assert one.tag == Pointer(tmp_path / "files" / "Last.ckpt").tag
    assert one.tag.endswith(".last")
    others = ("more/Last.ckpt", "files/Last", "s3://b/files/Last.ckpt", "files/" + "x" * 200 + ".ckpt")
    tags = {one.tag, *(Pointer(path).tag for path in others)}
    assert len(tags) == 5
    assert max(map(len, tags)) == 87  # the length for the longest name, which is truncated
    assert [Pointer(path).name for path in ("a/epoch=1 b.ckpt", "a/")] == ["epoch-1-b", "file"]
