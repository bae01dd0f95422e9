"""An export of an imported folder has its files, with the same tensors, under the same beginnings of names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import casckpt
from casckpt.base.names import HEADS, HUB_FILE
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, MissingKey
from casckpt.frontends.convert import import_safetensors
from casckpt.frontends.follow import Follower
from casckpt.frontends.interchange.safetensors.layout import index_name, stem_of
from tests.support.safetensors_files import contents, file_of, same, served, unpacked

STATE = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(4).half(), "none": torch.zeros(0, 2)}
SHARDS = ("model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors")


def odd_file(path: Path) -> None:
    """Write a valid file that no library writes: unusual key order, an unaligned header, and additional metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data, described, start = b"", {}, 0
    for name, tensor in STATE.items():
        stop = start + tensor.nbytes
        kind = {torch.float32: "F32", torch.float16: "F16"}[tensor.dtype]
        described[name] = {"data_offsets": [start, stop], "shape": list(tensor.shape), "dtype": kind}
        data, start = data + tensor.numpy().tobytes(), stop
    text = json.dumps({"a": described["a"], "__metadata__": {"z": "1", "format": "pt"}} | described).encode() + b"   "
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def sharded(folder: Path, stem: str = "model") -> Path:
    names = dict(zip(STATE, (*SHARDS, SHARDS[1]), strict=True))
    for name in SHARDS:
        state = {key: STATE[key] for key in STATE if names[key] == name}
        file_of(folder, state, name.replace("model", stem), format="pt")
    shards = {key: name.replace("model", stem) for key, name in names.items()}
    index = {"metadata": {"total_size": 32, "other": True}, "weight_map": shards}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("kind", ["odd", "shards", "adapter", "variant", "another name"])
def test_every_export_has_the_model_of_an_imported_folder(store: casckpt.Store, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "in"
    if kind == "shards":
        sharded(folder)
    elif kind == "odd":
        odd_file(folder / "model.safetensors")
    else:
        stem = {"adapter": "adapter_model", "variant": "model.fp16", "another name": "mine"}[kind]
        file_of(folder, STATE, f"{stem}.safetensors", format="pt")
    made = import_safetensors(store, folder, run="a", step=1)
    expected = unpacked(contents(folder))
    for format in ("hf", "safetensors"):
        found = store.export(made, tmp_path / format, format=format)
        assert unpacked(contents(tmp_path / format)) == expected
        assert (found.notes, found.skipped) == ((), ())
    assert unpacked(served(store)) == expected
    (switch,) = Follower(store, "a", tmp_path / "follow").follow(once=True)
    assert unpacked(contents(switch.folder)) == expected


def test_files_come_back_byte_for_byte_with_the_format_files(store: casckpt.Store, tmp_path: Path) -> None:
    sharded(tmp_path / "in")
    odd_file(tmp_path / "in" / "odd.safetensors")
    made = store.import_files(tmp_path / "in", run="a", step=1)
    store.export(made, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "in")


def test_a_single_file_of_a_component_contains_the_full_names_of_tensors(store: casckpt.Store, tmp_path: Path) -> None:
    for name in ("unet", "vae"):
        file_of(tmp_path / "in" / name, {"a": torch.ones(2)}, "diffusion_pytorch_model.safetensors", format="pt")
    (tmp_path / "in" / "model_index.json").write_text('{"unet": [], "vae": []}')
    import_safetensors(store, tmp_path / "in", step=1)
    store.export("latest", tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors").keys() == {"unet.a", "vae.a"}
    with pytest.raises(InvalidInput, match="has several models, which need a folder"):
        store.export("latest", tmp_path / "y.safetensors", format="hf")
    found = store.export("latest", tmp_path / "unet", keys=["unet.*"])
    assert load_file(found.files[0]).keys() == {"a"}


def test_a_changed_component_is_exported_to_its_own_folder(store: casckpt.Store, tmp_path: Path) -> None:
    file_of(tmp_path / "in" / "unet", {"a": torch.ones(2)}, "diffusion_pytorch_model.safetensors", format="pt")
    (tmp_path / "in" / "model_index.json").write_text('{"unet": []}')
    made = import_safetensors(store, tmp_path / "in", step=1)
    store.save({"unet": {"a": torch.ones(3)}}, step=2, attachments=attachments(store, made))
    store.export("latest", tmp_path / "out")
    assert contents(tmp_path / "out") == served(store)
    assert served(store).keys() == {"model_index.json", "unet/diffusion_pytorch_model.safetensors"}


def attachments(store: casckpt.Store, made: Checkpoint) -> dict[str, bytes]:
    return {name: store.read_attachment(made, name) for name in store.attachments(made)}


def test_a_folder_in_the_usual_layout_needs_no_stored_names(store: casckpt.Store, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    file_of(folder, STATE, "model.safetensors", format="pt")
    (folder / "config.json").write_text("{}")
    made = import_safetensors(store, folder, step=1)
    assert (list(made.tensors), list(store.attachments(made))) == (["b", "none", "a"], ["config.json"])
    assert made.metadata == {"safetensors": {"format": "pt"}}
    store.export(made, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folder)


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
def test_trained_weights_are_exported_to_files_named_like_the_imported_ones(
    store: casckpt.Store, tmp_path: Path, stem: str
) -> None:
    made = import_safetensors(store, sharded(tmp_path / "in", stem), run="a", step=1)
    trained = {key: tensor + 1 for key, tensor in STATE.items()}
    for step in (2, 3):
        state = {"model": trained, "optim": {"a": torch.ones(4)}}
        store.save(state, run="a", step=step, attachments=attachments(store, made))
    found = store.export("a@3", tmp_path / "out")
    assert (found.format, found.left_out, found.notes) == ("hf", ("optim.a",), ())
    assert contents(tmp_path / "out").keys() == {f"{stem}.safetensors", "config.json"}
    assert same(load_file(tmp_path / "out" / f"{stem}.safetensors"), trained)
    whole = store.export("a@3", tmp_path / "whole.safetensors")
    assert load_file(whole.files[0]).keys() == {*(f"model.{key}" for key in STATE), "optim.a"}
    store.thin(run="a", drop=["optim.*"], keep_last=1)
    store.export("a@2", tmp_path / "thinned")
    assert contents(tmp_path / "thinned") == contents(tmp_path / "out") == served(store, "a@2")


def test_a_module_beside_a_root_model_has_its_own_folder(store: casckpt.Store, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    root = {"[a].w": torch.ones(2), "[a].v": torch.ones(1), "b": torch.ones(3)}
    file_of(folder, root, "model.safetensors", format="pt")
    file_of(folder / "2_Dense", {"linear.w": torch.ones(4)}, "model.safetensors", format="pt")
    file_of(folder / "3_None", {}, "model.safetensors", format="pt")
    modules = [{"path": path} for path in ("", "2_Dense", "3_None")]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config.json").write_text("{}")
    made = import_safetensors(store, folder, step=1)
    for format in ("hf", "safetensors"):
        store.export(made, tmp_path / format, format=format)
        kept = {name: data for name, data in contents(folder).items() if not name.startswith("3_None")}
        assert unpacked(contents(tmp_path / format)) == unpacked(kept)
    store.export(made, tmp_path / "part", keys=["b"], format="safetensors")
    assert contents(tmp_path / "part").keys() == {"model.safetensors", "modules.json"}


def test_an_adapter_of_an_imported_model_is_exported_to_an_adapter_file(store: casckpt.Store, tmp_path: Path) -> None:
    made = import_safetensors(store, sharded(tmp_path / "in"), step=1)
    view = {"strip_prefix": "model", "keys": ["model.lora_A"]}
    files = attachments(store, made) | {HUB_FILE: json.dumps({"views": {"adapter_model": view}}).encode()}
    store.save({"model": STATE | {"lora_A": torch.ones(2)}}, step=2, attachments=files)
    store.export("latest", tmp_path / "out")
    assert contents(tmp_path / "out").keys() == {"adapter_model.safetensors", "config.json"}
    with pytest.raises(MissingKey, match="nothing in default@3"):
        store.export(store.save({"model": STATE}, step=3, attachments=files), tmp_path / "none")


def test_new_files_are_named_after_the_index(store: casckpt.Store, tmp_path: Path) -> None:
    file_of(tmp_path / "in", {"a": torch.ones(2)}, "first.safetensors", format="pt")
    index = {"weight_map": {"a": "first.safetensors"}}
    (tmp_path / "in" / "mine.safetensors.index.json").write_text(json.dumps(index))
    import_safetensors(store, tmp_path / "in", step=1)
    store.export("latest", tmp_path / "out", max_shard_size=1)
    assert contents(tmp_path / "out").keys() == {"mine.safetensors"}


def test_a_name_that_no_attachment_may_have_becomes_model(store: casckpt.Store, tmp_path: Path) -> None:
    file_of(tmp_path / "in", {"a": torch.ones(2)}, "a\\b.safetensors", format="pt")
    made = import_safetensors(store, tmp_path / "in", step=1)
    store.export(made, tmp_path / "out")
    assert contents(tmp_path / "out").keys() == {"model.safetensors"}


def test_stale_files_of_the_same_model_are_replaced(store: casckpt.Store, tmp_path: Path) -> None:
    made = import_safetensors(store, sharded(tmp_path / "in", "adapter_model"), step=1)
    out = tmp_path / "out"
    for name in ("adapter_model.safetensors", "adapter_model-00001-of-00009.safetensors", "model.safetensors"):
        file_of(out, STATE, name)
    store.export(made, out, force=True, max_shard_size=30)
    assert unpacked(contents(out)).keys() == unpacked(contents(tmp_path / "in")).keys() | {"model*.safetensors"}
    assert "adapter_model-00001-of-00009.safetensors" not in contents(out)


@pytest.mark.parametrize("is_pipeline", [False, True])
def test_a_folder_imported_by_an_earlier_version_is_exported_under_the_usual_names(
    store: casckpt.Store, tmp_path: Path, is_pipeline: bool
) -> None:
    state, home = ({"unet": STATE}, "unet/") if is_pipeline else (STATE, "")
    files = {f"{HEADS}{home}adapter_model.safetensors": b"a head", "a.json": b"{}"}
    made = store.save(state, step=1, attachments=files, metadata={"safetensors": {"format": "pt", "z": "1"}})
    found = store.export(made, tmp_path / "out")
    assert (found.notes, found.skipped) == ((), ())
    assert contents(tmp_path / "out").keys() == {"model.safetensors", "a.json"}
    expected = {f"unet.{key}": tensor for key, tensor in STATE.items()} if is_pipeline else STATE
    assert same(load_file(tmp_path / "out" / "model.safetensors"), expected)
    store.export(made, tmp_path / "hf", format="hf")
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), STATE)


def test_an_export_does_not_write_stored_names_as_files(store: casckpt.Store, tmp_path: Path) -> None:
    made = import_safetensors(store, sharded(tmp_path / "in", "mine"), step=1)
    assert store.attachments(made).keys() == {"config.json", HUB_FILE}
    dcp = store.export(made, tmp_path / "dcp", format="dcp")
    assert (dcp.attachments, dcp.skipped) == (("config.json",), ())
    assert HUB_FILE not in contents(tmp_path / "dcp")
    assert store.export(made, tmp_path / "x.pt").skipped == ("config.json",)
    assert store.export(made, tmp_path / "out", attachments=False).skipped == ("config.json",)


def test_indexes_are_written_after_the_files_of_all_components(store: casckpt.Store, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for component in ("unet", "vae"):
        sharded(folder / component, "diffusion_pytorch_model")
    (folder / "model_index.json").write_text('{"unet": [], "vae": []}')
    made = import_safetensors(store, folder, step=1)
    files = store.export(made, tmp_path / "out", max_shard_size=24).files
    names = [Path(file).relative_to(tmp_path / "out") for file in files]
    assert [name.suffix for name in names[:6]] == [".safetensors"] * 4 + [".json"] * 2
    assert unpacked(contents(tmp_path / "out")) == unpacked(contents(folder)) == unpacked(served(store))


def test_a_follower_updates_the_files_of_components(store: casckpt.Store, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for component in ("unet", "vae"):
        sharded(folder / component, "diffusion_pytorch_model")
    (folder / "model_index.json").write_text('{"unet": [], "vae": []}')
    made = import_safetensors(store, folder, run="a", step=1)
    for step in (1, 2, 3, 4):
        if step > 1:
            state = {"unet": {key: tensor * step for key, tensor in STATE.items()}, "vae": STATE}
            store.save(state, run="a", step=step, attachments=attachments(store, made))
        (switch,) = Follower(store, "a", tmp_path / "follow", keep=0).follow(once=True)
        store.export(f"a@{step}", tmp_path / f"{step}")
        assert contents(switch.folder) == contents(tmp_path / f"{step}")
    assert unpacked(contents(tmp_path / "4")).keys() == unpacked(contents(folder)).keys()


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("model.safetensors", "model"), (SHARDS[1], "model"), ("model.fp16-00001-of-00002.safetensors", "model.fp16"),
        ("diffusion_pytorch_model-00001-of-00002.fp16.safetensors", "diffusion_pytorch_model.fp16"),
        ("model.safetensors.index.json", "model"), ("model.safetensors.index.fp16.json", "model.fp16"),
    ],
)  # fmt: skip
def test_all_files_of_a_model_share_the_beginning_of_their_names(name: str, stem: str) -> None:
    assert stem_of(name) == stem
    assert stem_of(index_name(stem)) == stem
