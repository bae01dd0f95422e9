"""Imports of safetensors files and of folders of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

import casckpt
from casckpt.errors import InvalidInput, NotFound, Unsupported
from casckpt.frontends.convert import (
    export_safetensors,
    find_sources,
    import_safetensors,
    look_at,
)
from casckpt.frontends.interchange.safetensors import importing as safetensors_import
from tests.support.safetensors_files import file_of, hugging_face, same

pytestmark = pytest.mark.usefixtures("temporaries")


# one file


def test_data_need_not_be_aligned(store: casckpt.Store, tmp_path: Path) -> None:
    source = file_of(tmp_path, {"a": torch.arange(6, dtype=torch.float64)})
    data = source.read_bytes()
    length = int.from_bytes(data[:8], "little")
    source.write_bytes((length + 3).to_bytes(8, "little") + data[8 : 8 + length] + b"   " + data[8 + length :])
    import_safetensors(store, source, step=0)
    assert torch.equal(store.read("latest")["a"], torch.arange(6, dtype=torch.float64))


# folders


def test_an_index_can_be_given_itself(store: casckpt.Store, tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", {"a": torch.ones(2), "b": torch.zeros(2)})
    made = import_safetensors(store, folder / "model.safetensors.index.json", step=0)
    assert set(made.tensors) == {"a", "b"}
    assert store.attachments(made) == {}


def test_a_key_in_two_files_is_refused(store: casckpt.Store, tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", {"a": torch.ones(2), "b": torch.zeros(2)})
    file_of(folder, {"a": torch.ones(2)}, "model-00002-of-00002.safetensors")
    with pytest.raises(InvalidInput, match="'a' is in") as caught:
        import_safetensors(store, folder, step=0)
    assert caught.value.key == "a"


def test_an_index_does_not_lead_out_of_its_folder(store: casckpt.Store, tmp_path: Path) -> None:
    file_of(tmp_path, {"secret": torch.ones(2)}, "secret.safetensors")
    folder = hugging_face(tmp_path / "hf", {"a": torch.ones(2)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(InvalidInput, match="do not trust"):
        import_safetensors(store, folder, step=0)
    assert not store.repository.exists()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", {"a": torch.ones(2), "b": torch.ones(2)})
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(NotFound, match=r"names model-00002-of-00002\.safetensors, which is not there"):
        find_sources(folder)


def test_a_tensor_that_is_only_in_the_index_is_reported(
    store: casckpt.Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = hugging_face(tmp_path / "hf", {"a": torch.ones(2), "b": torch.ones(2)})
    file_of(folder, {"c": torch.ones(2)}, "model-00002-of-00002.safetensors")
    assert list(import_safetensors(store, folder, step=0).tensors) == ["a", "c"]
    assert "names tensors that no file holds: b" in caplog.text


def test_links_out_of_the_folder_are_not_attached(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", {"a": torch.ones(2)})
    (tmp_path / "secret.json").write_text("secret")
    (folder / "innocent.json").symlink_to(tmp_path / "secret.json")
    (folder / "inside.json").symlink_to("config.json")
    (folder / "more").symlink_to(tmp_path)
    (folder / "broken.json").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.json")
    found = find_sources(folder)
    assert "inside.json" in found.attachments
    assert {"innocent.json", "more", "broken.json", "pipe.json"} <= set(found.skipped)
    assert not [name for name in found.attachments if "secret" in name]


def test_a_snapshot_in_the_hugging_face_cache_is_imported(store: casckpt.Store, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    file_of(blobs, {"a": torch.ones(2)}, "0123")
    (blobs / "4567").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "config.json").symlink_to("../../blobs/4567")
    made = import_safetensors(store, snapshot, step=0)
    assert (list(made.tensors), list(store.attachments(made))) == (["a"], ["config.json"])


def test_large_files_are_not_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_import, "MAX_ATTACHMENT_BYTES", 1000)
    folder = hugging_face(tmp_path / "hf", {"a": torch.ones(2)})
    assert "vocab.txt" in find_sources(folder).skipped
    monkeypatch.setattr(safetensors_import, "MAX_ATTACHMENTS_BYTES", 3)
    assert list(find_sources(folder).attachments) == ["1_Pooling/config.json"]


@pytest.mark.parametrize(
    ("names", "kind", "match"),
    [
        ((), NotFound, "no safetensors file"),
        ((".metadata",), Unsupported, r"torch\.distributed\.checkpoint"),
        (("pytorch_model.bin",), Unsupported, "weights that torch.save wrote"),
        (("casckpt.json",), Unsupported, "a store of casckpt"),
        (("metadata.json",), Unsupported, "another trainer"),
        (("a.safetensors", "b.safetensors"), InvalidInput, "several models: a.safetensors, b.safetensors"),
    ],
)
def test_the_error_for_a_folder_without_one_model_lists_its_content(
    tmp_path: Path, names: tuple[str, ...], kind: type[Exception], match: str
) -> None:
    for name in names:
        file_of(tmp_path, {"a": torch.ones(1)}, name)
    with pytest.raises(kind, match=match):
        find_sources(tmp_path)


# exports of any state


def test_shards_of_ranks_are_joined_to_a_tensor(store: casckpt.Store, tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    left = casckpt.Shard(whole[:, :2].clone(), global_shape=(4, 6), offset=(0, 0), shape=(4, 2))
    right = casckpt.Shard(whole[:, 2:].clone(), global_shape=(4, 6), offset=(0, 2), shape=(4, 4))
    store.save({"w": [left, right]}, step=0)
    found = export_safetensors(store, "latest", tmp_path / "m.safetensors")
    assert same(safetensors.torch.load_file(found.files[0]), {"w": whole})


# plans


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    writer = os.open(tmp_path / "pipe.pt", os.O_RDWR)  # one that opens it ends, and finds what is no checkpoint
    os.write(writer, b"none")
    try:
        with pytest.raises(InvalidInput, match="neither a file nor a folder"):
            look_at(tmp_path / "pipe.pt")
    finally:
        os.close(writer)
