"""Exports of a state to safetensors files, and exports that fail."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import casckpt
from casckpt.errors import Conflict, Damaged, InvalidInput, MissingKey, StorageError
from casckpt.frontends.convert import export_safetensors, import_safetensors
from casckpt.loading import regions
from tests.support.progress_calls import ProgressCalls
from tests.support.safetensors_files import Tensors, same, tensors

pytestmark = pytest.mark.usefixtures("temporaries")


# folders


def test_a_large_export_has_several_files_and_an_index(store: casckpt.Store, tmp_path: Path, seed: int) -> None:
    state = tensors(seed)
    made = store.save(state, step=0)
    found = export_safetensors(store, made, tmp_path / "out", max_shard_size="100B")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in state.values())}
    assert set(index["weight_map"]) == set(state)
    assert {Path(path).name for path in found.files} == {*index["weight_map"].values(), "model.safetensors.index.json"}
    read: Tensors = {}
    for name in set(index["weight_map"].values()):
        read |= safetensors.torch.load_file(tmp_path / "out" / name)
        with safetensors.safe_open(tmp_path / "out" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}, "transformers asks for it"
    assert same(read, state)
    again = import_safetensors(store, tmp_path / "out", step=1)
    assert again.stats.bytes_written == 0
    assert same(store.read(again), state)


# exports of any state


def test_small_read_windows_produce_the_same_file(
    store: casckpt.Store, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tensors(seed)
    store.create(cell_bytes=4096, blob_bytes=1 << 16)
    store.save(state, step=0, attachments={"long.txt": random.Random(seed).randbytes(25_600)})
    whole = export_safetensors(store, "latest", tmp_path / "whole")
    monkeypatch.setattr(regions, "WINDOW_BYTES", 10_000)
    done = ProgressCalls()
    parts = export_safetensors(store, "latest", tmp_path / "parts", progress=done)
    for one, other in zip(whole.files, parts.files, strict=True):
        assert Path(one).read_bytes() == Path(other).read_bytes()
    assert done.done == sum(tensor.nbytes for tensor in state.values()), "no cell was read twice"


def test_nested_states_have_flat_keys_and_omitted_objects_are_named(store: casckpt.Store, tmp_path: Path) -> None:
    tied = torch.randn(4, 4)
    state = {"model": {"a": tied, "b": tied, "t": torch.randn(3, 2).t()}, "steps": [torch.ones(1), 7], "lr": 0.1}
    store.save(state, step=0)
    found = export_safetensors(store, "latest", tmp_path / "m.safetensors")
    assert found.left_out == ("steps.1", "lr")
    read = safetensors.torch.load_file(found.files[0])
    expected = {"model.a": tied, "model.b": tied, "model.t": state["model"]["t"], "steps.0": torch.ones(1)}  # type: ignore[index]  # a nested state
    assert same(read, expected)


def test_a_pattern_selects_the_exported_keys(store: casckpt.Store, tmp_path: Path, seed: int) -> None:
    state = tensors(seed)
    store.save(state | {"model.lr": 0.1}, step=0)
    found = export_safetensors(store, "latest", tmp_path / "m.safetensors", keys=["model.*", "nan"])
    assert found.left_out == ("model.lr",)
    assert set(safetensors.torch.load_file(found.files[0])) == {"model.w", "model.b", "nan"}
    with pytest.raises(MissingKey, match="nothing in default@0 matches 'head"):
        export_safetensors(store, "latest", tmp_path / "n.safetensors", keys=["model.*", "head.*"])


def test_an_export_says_what_safetensors_cannot_hold(
    store: casckpt.Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (2, 2), check_invariants=True)
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"w": torch.ones(2)}, "", ""),
        ({"w": torch.ones(2), "note": "x"}, "", "they are not tensors, or not below the prefix: 'note'"),
        ({"w": sparse}, "of 'w', the files have only the inner tensors, not shape and options", ""),
        ({"w": sparse, "note": "x"}, "inner tensors", "left out"),
    ]  # fmt: skip
    for step, (state, note, logged) in enumerate(cases):
        caplog.clear()
        store.save(state, step=step)
        notes = store.export(f"default@{step}", tmp_path / f"{step}.safetensors").notes
        assert [note in one for one in notes] == [True] * bool(note)
        assert logged in caplog.text
        assert bool(caplog.text) == bool(note or logged)


def test_metadata_is_added_to_new_files(store: casckpt.Store, tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "in.safetensors", {"a": "1", "b": "2"})
    import_safetensors(store, tmp_path / "in.safetensors", step=1)
    (tmp_path / "in").mkdir()
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "in" / "mine.safetensors", {"a": "1"})
    import_safetensors(store, tmp_path / "in", step=2)
    store.save({"w": torch.ones(2)}, step=3)
    for step, own in ((1, {"a": "1", "b": "2"}), (2, {"a": "1"}), (3, {"format": "pt"})):
        for given in (None, {"b": "3"}):
            out = store.export(f"default@{step}", tmp_path / f"{step}{given}", format="safetensors", metadata=given)
            with safetensors.safe_open(out.files[0], "pt") as file:
                assert file.metadata() == own | (given or {})
            assert out.notes == ()
    with pytest.raises(InvalidInput, match="consists of strings"):
        store.export("default@3", tmp_path / "x.safetensors", metadata={"n": 3})  # type: ignore[dict-item]  # a mistake


def test_a_dtype_that_safetensors_lacks_is_named_before_anything_is_written(
    store: casckpt.Store, tmp_path: Path
) -> None:
    store.save({"a": torch.ones(2), "b": {"z": torch.ones(2, dtype=torch.complex128)}}, step=0)
    with pytest.raises(InvalidInput, match=r"'b\.z' is complex128") as caught:
        export_safetensors(store, "latest", tmp_path / "out" / "m.safetensors")
    assert caught.value.key == "b.z"
    assert not (tmp_path / "out").exists()
    assert export_safetensors(store, "latest", tmp_path / "m.safetensors", keys=["a"]).tensors == 1


# existing files and failures


@pytest.mark.parametrize("below", [".", "objects", "commits/x.pt", "new"])
def test_an_export_into_the_store_itself_is_rejected(
    tmp_path: Path, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"w": torch.ones(3)}, run="run", step=1)
    before = sorted((tmp_path / "store").rglob("*"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("store")
    for path in (Path("link") / below, tmp_path / "store" / below, f"file://{tmp_path}/store/{below}"):
        with pytest.raises(InvalidInput, match="inside the store's own folder"):
            store.export("run@1", path, force=True)
    assert sorted((tmp_path / "store").rglob("*")) == before
    store.export("run@1", "beside")


def test_an_export_overwrites_only_with_force(store: casckpt.Store, tmp_path: Path) -> None:
    store.save({"a": torch.ones(2)}, step=0, attachments={"config.json": b"new"})
    out, file = tmp_path / "out", tmp_path / "m.safetensors"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    (out / "config.json").write_text("old")
    (out / "model.safetensors.index.json").write_text("stale")
    (out / "model-00001-of-00002.safetensors").write_text("stale")
    file.write_text("mine")
    for target in (out, file):
        with pytest.raises(Conflict, match="--force"):
            export_safetensors(store, "latest", target)
    export_safetensors(store, "latest", out, force=True)
    export_safetensors(store, "latest", file, force=True)
    assert {path.name: path.stat().st_size for path in out.iterdir()} == {
        "mine.txt": 4, "config.json": 3, "model.safetensors": file.stat().st_size,
    }  # fmt: skip
    assert same(safetensors.torch.load_file(file), {"a": torch.ones(2)})


def test_an_export_can_fill_an_empty_folder(store: casckpt.Store, tmp_path: Path) -> None:
    store.save({"a": torch.ones(2)}, step=0)
    (tmp_path / "out").mkdir()
    number = (tmp_path / "out").stat().st_ino
    export_safetensors(store, "latest", tmp_path / "out")
    assert (tmp_path / "out").stat().st_ino == number, "whoever stands in it still does"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_exporting_a_folder_does_not_replace_a_file(store: casckpt.Store, tmp_path: Path) -> None:
    store.save({"a": torch.ones(2)}, step=0)
    (tmp_path / "file").touch()
    with pytest.raises(Conflict, match="is a file"):
        export_safetensors(store, "latest", tmp_path / "file", force=True)
    with pytest.raises(StorageError, match="cannot be written"):
        export_safetensors(store, "latest", tmp_path / "file" / "m.safetensors")


@pytest.mark.parametrize("name", ["out", "m.safetensors"])
def test_an_export_of_damaged_data_leaves_nothing_behind(
    store: casckpt.Store, store_path: Path, tmp_path: Path, name: str
) -> None:
    store.save({"a": torch.randn(100, 100)}, step=0, attachments={"config.json": b"{}"})
    (blob,) = store_path.glob("objects/*/*.safetensors")
    data = bytearray(blob.read_bytes())
    data[4096] ^= 1
    os.chmod(blob, 0o600)
    blob.write_bytes(data)
    with pytest.raises(Damaged, match="'a'"):
        export_safetensors(store, "latest", tmp_path / name)
    assert not (tmp_path / name).exists()


def test_an_attachment_does_not_replace_a_weight_file(store: casckpt.Store, tmp_path: Path) -> None:
    store.save({"a": torch.ones(2)}, step=0, attachments={"Model.safetensors": b"not weights"})
    with pytest.raises(InvalidInput, match="has the same name as a file with tensors"):
        export_safetensors(store, "latest", tmp_path / "out")
    assert not (tmp_path / "out").exists()
