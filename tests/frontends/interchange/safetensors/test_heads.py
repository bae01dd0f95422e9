"""An export restores the files of an imported folder, byte for byte, from their heads."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import casckpt
from casckpt.base.names import HEADS, HUB_FILE
from casckpt.errors import InvalidInput
from casckpt.frontends.convert import import_safetensors
from casckpt.frontends.follow import Follower
from casckpt.frontends.interchange.safetensors import heads
from casckpt.frontends.interchange.safetensors.heads import stem_of
from casckpt.frontends.interchange.safetensors.layout import index_name
from tests.support.safetensors_files import contents, file_of, same, served

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
def test_every_export_restores_the_files_of_an_imported_folder(store: casckpt.Store, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "in"
    if kind == "shards":
        sharded(folder)
    elif kind == "odd":
        odd_file(folder / "model.safetensors")
    else:
        stem = {"adapter": "adapter_model", "variant": "model.fp16", "another name": "mine"}[kind]
        file_of(folder, STATE, f"{stem}.safetensors", format="pt")
    made = import_safetensors(store, folder, run="a", step=1)
    expected = contents(folder)
    for format in ("hf", "safetensors"):
        found = store.export(made, tmp_path / format, format=format)
        assert contents(tmp_path / format) == expected
        assert (found.notes, found.skipped, len(found.files)) == ((), (), len(expected))
    assert served(store) == expected
    (switch,) = Follower(store, "a", tmp_path / "follow").follow(once=True)
    assert contents(switch.folder) == expected


def test_an_export_restores_a_single_file_under_any_name(store: casckpt.Store, tmp_path: Path) -> None:
    odd_file(tmp_path / "in" / "model.safetensors")
    import_safetensors(store, tmp_path / "in", step=1)
    store.export("latest", tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "in" / "model.safetensors").read_bytes()
    import_safetensors(store, sharded(tmp_path / "shards"), step=2)
    store.export("latest", tmp_path / "y.safetensors")
    assert same(load_file(tmp_path / "y.safetensors"), STATE)


def test_a_single_file_of_a_component_contains_the_full_names_of_tensors(store: casckpt.Store, tmp_path: Path) -> None:
    file_of(tmp_path / "in" / "unet", {"a": torch.ones(2)}, "diffusion_pytorch_model.safetensors", format="pt")
    (tmp_path / "in" / "model_index.json").write_text('{"unet": []}')
    import_safetensors(store, tmp_path / "in", step=1)
    store.export("latest", tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors").keys() == {"unet.a"}


def test_a_changed_component_is_exported_to_its_own_folder(store: casckpt.Store, tmp_path: Path) -> None:
    file_of(tmp_path / "in" / "unet", {"a": torch.ones(2)}, "diffusion_pytorch_model.safetensors", format="pt")
    (tmp_path / "in" / "model_index.json").write_text('{"unet": []}')
    made = import_safetensors(store, tmp_path / "in", step=1)
    files = {name: store.read_attachment(made, name) for name in store.attachments(made)}
    store.save({"unet": {"a": torch.ones(3)}}, step=2, attachments=files)
    for format in ("hf", "safetensors"):
        store.export("latest", tmp_path / format, format=format)
        assert contents(tmp_path / format) == served(store)
    assert served(store).keys() == {"model_index.json", "unet/diffusion_pytorch_model.safetensors"}


def test_a_folder_in_the_usual_layout_needs_no_stored_heads(store: casckpt.Store, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    file_of(folder, STATE, "model.safetensors", format="pt")
    (folder / "config.json").write_text("{}")
    made = import_safetensors(store, folder, step=1)
    assert (list(made.tensors), list(store.attachments(made))) == (["b", "none", "a"], ["config.json"])
    assert made.metadata == {"safetensors": {"format": "pt"}}
    store.export(made, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folder)


def test_trained_weights_are_exported_to_files_named_like_the_imported_ones(
    store: casckpt.Store, tmp_path: Path
) -> None:
    made = import_safetensors(store, sharded(tmp_path / "in"), step=1)
    files = {name: store.read_attachment(made, name) for name in store.attachments(made)}
    trained = {key: tensor + 1 for key, tensor in STATE.items()}
    store.save({"model": trained, "optim": {"a": torch.ones(4)}}, step=2, attachments=files)
    found = store.export("latest", tmp_path / "out")
    assert (found.format, found.left_out, found.notes) == ("hf", ("optim.a",), ())
    assert contents(tmp_path / "out").keys() == contents(tmp_path / "in").keys()
    assert same(load_file(tmp_path / "out" / SHARDS[0]) | load_file(tmp_path / "out" / SHARDS[1]), trained)


def test_a_thinned_optimizer_does_not_prevent_an_export(store: casckpt.Store, tmp_path: Path) -> None:
    made = import_safetensors(store, sharded(tmp_path / "in"), run="a", step=1)
    files = {name: store.read_attachment(made, name) for name in store.attachments(made)}
    for step in (2, 3):
        store.save({"model": STATE, "optim": {"a": torch.ones(4)}}, run="a", step=step, attachments=files)
    store.thin(run="a", drop=["optim.*"], keep_last=1)
    store.export("a@2", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "in") == served(store, "a@2")


def changed(how: str) -> dict[str, torch.Tensor]:
    return {
        "shape": STATE | {"b": torch.zeros(3, 2)},
        "dtype": STATE | {"b": torch.zeros(2, 3).int()},
        "missing": {"b": STATE["b"], "a": STATE["a"]},
        "new": STATE | {"c": torch.ones(2)},
        "renamed": {"B": STATE["b"], "a": STATE["a"], "none": STATE["none"]},
    }[how]


@pytest.mark.parametrize("how", ["shape", "dtype", "missing", "new", "renamed"])
def test_a_changed_model_is_exported_to_new_files(
    store: casckpt.Store, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = import_safetensors(store, sharded(tmp_path / "in", "adapter_model"), step=1)
    files = {name: store.read_attachment(made, name) for name in store.attachments(made)}
    store.save(changed(how), step=2, attachments=files)
    found = store.export("latest", tmp_path / "out")
    assert contents(tmp_path / "out").keys() == {"adapter_model.safetensors", "config.json"}
    assert same(load_file(tmp_path / "out" / "adapter_model.safetensors"), changed(how))
    assert "the imported files adapter_model*.safetensors" in found.notes[0]
    assert found.notes[0] in caplog.text
    store.export("latest", tmp_path / "shards", max_shard_size=8)
    assert "adapter_model.safetensors.index.json" in contents(tmp_path / "shards")


def test_an_adapter_of_an_imported_model_is_exported_to_an_adapter_file(store: casckpt.Store, tmp_path: Path) -> None:
    made = import_safetensors(store, sharded(tmp_path / "in"), step=1)
    files = {name: store.read_attachment(made, name) for name in store.attachments(made)}
    view = {"strip_prefix": "model", "keys": ["model.lora_A"]}
    files[HUB_FILE] = json.dumps({"views": {"adapter_model": view}}).encode()
    store.save({"model": STATE | {"lora_A": torch.ones(2)}}, step=2, attachments=files)
    store.export("latest", tmp_path / "out")
    assert contents(tmp_path / "out").keys() == {"adapter_model.safetensors", "config.json"}


def test_new_files_are_named_after_the_index(store: casckpt.Store, tmp_path: Path) -> None:
    file_of(tmp_path / "in", {"a": torch.ones(2)}, "first.safetensors", format="pt")
    index = {"weight_map": {"a": "first.safetensors"}}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    import_safetensors(store, tmp_path / "in", step=1)
    store.export("latest", tmp_path / "out", max_shard_size=1)
    assert contents(tmp_path / "out").keys() == {"model.safetensors"}


def test_a_smaller_shard_size_creates_new_files(store: casckpt.Store, tmp_path: Path) -> None:
    made = import_safetensors(store, sharded(tmp_path / "in"), step=1)
    store.export(made, tmp_path / "same", max_shard_size=24)
    assert contents(tmp_path / "same") == contents(tmp_path / "in")
    found = store.export(made, tmp_path / "more", max_shard_size=23)
    assert {name for name in contents(tmp_path / "more") if name.startswith("model-")}.isdisjoint(SHARDS)
    assert found.notes == ()


def test_stale_files_of_the_same_model_are_replaced(store: casckpt.Store, tmp_path: Path) -> None:
    made = import_safetensors(store, sharded(tmp_path / "in", "adapter_model"), step=1)
    out = tmp_path / "out"
    for name in ("adapter_model.safetensors", "adapter_model-00001-of-00009.safetensors", "model.safetensors"):
        file_of(out, STATE, name)
    store.export(made, out, force=True)
    assert contents(out).keys() == contents(tmp_path / "in").keys() | {"model.safetensors"}


HEAD = f"{HEADS}model.safetensors"
A = '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'


def head(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


HOSTILE: Mapping[str, Mapping[str, bytes]] = {
    "no length": {HEAD: A.encode()},
    "empty": {HEAD: b""},
    "truncated": {HEAD: head(A)[:-1]},
    "not an object": {HEAD: head("[]")},
    "deep": {HEAD: head('{"a": ' + "[" * 100_000)},
    "a hole": {HEAD: head(A.replace("[0, 8]", "[8, 16]"))},
    "an overlap": {HEAD: head(A[:-1] + ', "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}')},
    "a wrong size": {HEAD: head(A.replace("[0, 8]", "[0, 12]"))},
    "a huge shape": {HEAD: head(A.replace("[2]", "[4611686018427387904]"))},
    "the same key twice": {HEAD: head(A[:-1] + ", " + A[1:])},
    "an unknown dtype": {HEAD: head(A.replace("F32", "F7"))},
    "a key in two files": {HEAD: head(A), f"{HEADS}more.safetensors": head(A)},
    "a deep folder": {f"{HEADS}a/b/model.safetensors": head(A)},
    "no suffix": {f"{HEADS}config.json": head(A)},
    "an index without files": {HEAD: head(A), f"{HEADS}model.safetensors.index.json": b"{}"},
    "an index of a different file": {
        HEAD: head(A), f"{HEADS}model.safetensors.index.json": b'{"weight_map": {"a": "b.safetensors"}}'
    },
    "an index of a file outside": {
        HEAD: head(A), f"{HEADS}model.safetensors.index.json": b'{"weight_map": {"a": "../b.safetensors"}}'
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_head_is_ignored_with_a_note(store: casckpt.Store, tmp_path: Path, kind: str) -> None:
    store.save({"a": torch.ones(2)}, step=1, attachments=HOSTILE[kind])
    found = store.export("latest", tmp_path / "out")
    assert found.notes
    (name,) = contents(tmp_path / "out")
    assert same(load_file(tmp_path / "out" / name), {"a": torch.ones(2)})
    assert served(store) == contents(tmp_path / "out")


def test_altered_heads_never_change_the_exported_values(store: casckpt.Store, tmp_path: Path, seed: int) -> None:
    made = import_safetensors(store, sharded(tmp_path / "in"), step=1)
    files = {name: store.read_attachment(made, name) for name in store.attachments(made)}
    rng = random.Random(seed)
    for step in range(2, 32):
        name = rng.choice([name for name in files if name.startswith(HEADS)])
        data = bytearray(files[name])
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.choice(b'\0"[]{},:0123456789abFU\xff')
        store.save(STATE, step=step, attachments=files | {name: bytes(data)})
        store.export("latest", tmp_path / f"{step}")
        found = [load_file(path) for path in (tmp_path / f"{step}").glob("*.safetensors")]
        assert same({key: tensor for state in found for key, tensor in state.items()}, STATE), (name, bytes(data))


def test_heads_above_the_size_limit_are_not_parsed(
    store: casckpt.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded(tmp_path / "in")
    made = import_safetensors(store, tmp_path / "in", step=1)
    monkeypatch.setattr(heads, "MAX_HEADS_BYTES", 100)
    monkeypatch.setattr(heads, "decode_head", None)
    found = store.export(made, tmp_path / "out")
    assert "larger than 100 bytes" in found.notes[0]
    assert contents(tmp_path / "out").keys() == {"model.safetensors", "config.json"}
    monkeypatch.setattr("casckpt.frontends.interchange.safetensors.importing.MAX_HEADS_BYTES", 100)
    made = import_safetensors(store, tmp_path / "in", step=2)
    assert list(store.attachments(made)) == ["config.json"]
    assert "the headers have more than 100 bytes" in made.notes[0]


def test_a_head_does_not_replace_an_attachment(store: casckpt.Store, tmp_path: Path) -> None:
    files = {HEAD: head(A), "Model.safetensors": b"not weights"}
    store.save({"a": torch.ones(2)}, step=1, attachments=files)
    with pytest.raises(InvalidInput, match="has the same name as a file with tensors"):
        store.export("latest", tmp_path / "out")


def test_an_export_does_not_write_heads_as_files(store: casckpt.Store, tmp_path: Path) -> None:
    made = import_safetensors(store, sharded(tmp_path / "in"), step=1)
    dcp = store.export(made, tmp_path / "dcp", format="dcp")
    assert (dcp.attachments, dcp.skipped) == (("config.json",), ())
    assert not (tmp_path / "dcp" / "casckpt.heads").exists()
    assert store.export(made, tmp_path / "x.pt").skipped == ("config.json",)
    assert store.export(made, tmp_path / "out", attachments=False).skipped == ("config.json",)


def test_indexes_are_written_after_the_files_of_all_components(store: casckpt.Store, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for component in ("unet", "vae"):
        sharded(folder / component, "diffusion_pytorch_model")
    (folder / "model_index.json").write_text('{"unet": [], "vae": []}')
    made = import_safetensors(store, folder, step=1)
    names = [Path(file).relative_to(tmp_path / "out") for file in store.export(made, tmp_path / "out").files]
    assert [name.suffix for name in names[:6]] == [".safetensors"] * 4 + [".json"] * 2
    assert contents(tmp_path / "out") == contents(folder) == served(store)


def test_a_follower_updates_the_files_of_components(store: casckpt.Store, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for component in ("unet", "vae"):
        sharded(folder / component, "diffusion_pytorch_model")
    (folder / "model_index.json").write_text('{"unet": [], "vae": []}')
    made = import_safetensors(store, folder, run="a", step=1)
    files = {name: store.read_attachment(made, name) for name in store.attachments(made)}
    for step in (1, 2, 3, 4):
        if step > 1:
            state = {"unet": {key: tensor * step for key, tensor in STATE.items()}, "vae": STATE}
            store.save(state, run="a", step=step, attachments=files)
        (switch,) = Follower(store, "a", tmp_path / "follow", keep=0, reuse=True).follow(once=True)
        store.export(f"a@{step}", tmp_path / f"{step}")
        assert contents(switch.folder) == contents(tmp_path / f"{step}")
    assert contents(tmp_path / "4").keys() == contents(folder).keys()


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
