"""Imports of safetensors files and of folders of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import casckpt
from casckpt.errors import InvalidInput, NotFound, Unsupported
from casckpt.frontends.convert import export_safetensors, find_sources, import_any, import_safetensors, look_at
from casckpt.frontends.interchange.safetensors import importing as safetensors_import
from tests.support.dcp import load, save, zeros
from tests.support.ranks import Pool
from tests.support.safetensors_files import contents, file_of, hugging_face, same, unpacked
from tests.support.together import numbers
from tests.support.torch_versions import needs_torch
from tests.support.training import identical

pytestmark = pytest.mark.usefixtures("temporaries")


# one file


def test_a_file_with_unaligned_data_is_imported(store: casckpt.Store, tmp_path: Path) -> None:
    source = file_of(tmp_path, {"a": torch.arange(6, dtype=torch.float64)})
    data = source.read_bytes()
    length = int.from_bytes(data[:8], "little")
    source.write_bytes((length + 3).to_bytes(8, "little") + data[8 : 8 + length] + b"   " + data[8 + length :])
    import_safetensors(store, source, step=0)
    assert torch.equal(store.read("latest")["a"], torch.arange(6, dtype=torch.float64))


# folders


def test_an_index_can_be_imported_directly(store: casckpt.Store, tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", {"a": torch.ones(2), "b": torch.zeros(2)})
    made = import_safetensors(store, folder / "model.safetensors.index.json", step=0)
    assert set(made.tensors) == {"a", "b"}
    assert store.attachments(made) == {}


def test_a_key_in_two_files_is_rejected(store: casckpt.Store, tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", {"a": torch.ones(2), "b": torch.zeros(2)})
    file_of(folder, {"a": torch.ones(2)}, "model-00002-of-00002.safetensors")
    with pytest.raises(InvalidInput, match="'a' is in") as caught:
        import_safetensors(store, folder, step=0)
    assert caught.value.key == "a"


def test_an_index_cannot_name_files_outside_its_folder(store: casckpt.Store, tmp_path: Path) -> None:
    file_of(tmp_path, {"secret": torch.ones(2)}, "secret.safetensors")
    folder = hugging_face(tmp_path / "hf", {"a": torch.ones(2)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(InvalidInput, match="do not trust"):
        import_safetensors(store, folder, step=0)
    assert not store.repository.exists()


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model_index.json"])
@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, partial(os.symlink, "missing")], ids=["pipe", "folder", "dangling link"]
)
def test_a_json_path_that_is_not_a_file_is_never_read(
    store: casckpt.Store, tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    path = file_of(tmp_path, {"a": torch.ones(2)}, "model.safetensors").with_name(name)
    make(path)
    if name == "model_index.json":
        assert import_safetensors(store, tmp_path, step=1).step == 1
    else:
        with pytest.raises(InvalidInput, match="is not a file"):
            import_safetensors(store, tmp_path, step=1)


def test_the_error_for_a_missing_shard_names_it(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", {"a": torch.ones(2), "b": torch.ones(2)})
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(NotFound, match=r"names model-00002-of-00002\.safetensors, which does not exist"):
        find_sources(folder)


def test_a_tensor_that_only_the_index_names_is_reported(
    store: casckpt.Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = hugging_face(tmp_path / "hf", {"a": torch.ones(2), "b": torch.ones(2)})
    file_of(folder, {"c": torch.ones(2)}, "model-00002-of-00002.safetensors")
    assert list(import_safetensors(store, folder, step=0).tensors) == ["a", "c"]
    assert "names tensors that are not in any file: b" in caplog.text


def test_links_to_files_outside_the_folder_are_not_attached(tmp_path: Path) -> None:
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
    file_of(blobs, {"a": torch.ones(2)}, "0123", format="pt")
    (blobs / "4567").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "config.json").symlink_to("../../blobs/4567")
    made = import_safetensors(store, snapshot, step=0)
    assert (list(made.tensors), list(store.attachments(made))) == (["a"], ["config.json"])


def test_an_import_does_not_attach_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        (("casckpt.json",), Unsupported, "a casckpt store"),
        (("metadata.json",), Unsupported, "a different trainer"),
        (("zero_to_fp32.py",), Unsupported, "a DeepSpeed checkpoint; convert it with this script"),
        (("a.safetensors", "b.safetensors"), InvalidInput, "several models: a.safetensors, b.safetensors"),
    ],
)
def test_the_error_for_a_folder_without_a_single_model_lists_its_contents(
    tmp_path: Path, names: tuple[str, ...], kind: type[Exception], match: str
) -> None:
    for name in names:
        file_of(tmp_path, {"a": torch.ones(1)}, name)
    with pytest.raises(kind, match=match):
        find_sources(tmp_path)


# folders with more than one model, and other files


def made_of(store: casckpt.Store, folder: Path, out: Path) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Import and export a folder. Return the exported files and the notes of the import."""
    made = import_safetensors(store, folder, step=len(list(out.parent.iterdir())))
    store.export(made, out)
    return contents(out), made.notes


def test_an_index_determines_the_imported_files_and_others_are_logged(store: casckpt.Store, tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "in", {"a": torch.ones(2), "b": torch.zeros(2)})
    expected = unpacked(contents(folder))
    others = ("model-00003-of-00003", "model", "model.fp16", "consolidated", "consolidated.00", "adapter_model")
    for name in others:
        file_of(folder, {"a": torch.ones(3)}, f"{name}.safetensors")
    (folder / "model.safetensors.index.fp16.json").write_text('{"weight_map": {"a": "model.fp16.safetensors"}}')
    found, notes = made_of(store, folder, tmp_path / "out")
    left_out = {f"{name}.safetensors" for name in others} | {"pytorch_model.bin", "model.safetensors.index.fp16.json"}
    assert set(notes) == {f"left out: {name}" for name in left_out}
    assert unpacked(found) == {
        name: data for name, data in expected.items() if name not in ("pytorch_model.bin", ".cache/secret")
    }


@pytest.mark.parametrize(
    ("names", "main"),
    [
        (("model.fp16.safetensors", "model.safetensors"), "model.safetensors"),
        (("consolidated.safetensors", "mine.safetensors"), "mine.safetensors"),
        (("consolidated.safetensors",), "consolidated.safetensors"),
        (
            ("diffusion_pytorch_model.non_ema.safetensors", "diffusion_pytorch_model.safetensors"),
            "diffusion_pytorch_model.safetensors",
        ),
        (("adapter_model.safetensors", "mine.safetensors"), "adapter_model.safetensors"),
        (("pytorch_lora_weights.safetensors", "mine.safetensors"), "pytorch_lora_weights.safetensors"),
    ],
)
def test_an_import_reads_the_file_that_libraries_would_load(
    store: casckpt.Store, tmp_path: Path, names: tuple[str, ...], main: str
) -> None:
    for name in names:
        file_of(tmp_path / "in", {name: torch.ones(2)}, name)
    found, notes = made_of(store, tmp_path / "in", tmp_path / "out")
    assert found.keys() == {main}
    assert same(safetensors.torch.load(found[main]), {main: torch.ones(2)})
    assert notes == tuple(f"left out: {name}" for name in sorted(names) if name != main)


def test_gitattributes_and_gitignore_files_are_attached(store: casckpt.Store, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    file_of(folder, {"a": torch.ones(2)}, "model.safetensors", format="pt")
    for name in (".gitattributes", ".gitignore", "unet/.gitattributes"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    expected = contents(folder)
    (folder / ".env").write_text("secret")
    assert made_of(store, folder, tmp_path / "out") == (expected, ())


TORCH = {"a": torch.arange(4.0), "tied": torch.ones(2, 3).half(), "t": torch.randn(3, 2).t(), "n": torch.tensor(3)}


@pytest.mark.parametrize(
    ("given", "exported"),
    [
        ("pytorch_model.bin", "model.safetensors"), ("adapter_model.bin", "adapter_model.safetensors"),
        ("diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"),
        ("pytorch_lora_weights.bin", "pytorch_lora_weights.safetensors"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_torch_file_becomes_a_safetensors_file(
    store: casckpt.Store, tmp_path: Path, given: str, exported: str, is_zip: bool
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text("{}")
    torch.save(TORCH | {"twin": TORCH["tied"]}, tmp_path / "in" / given, _use_new_zipfile_serialization=is_zip)
    torch.save({"lr": 1}, tmp_path / "in" / "training_args.bin")
    found, notes = made_of(store, tmp_path / "in", tmp_path / "out")
    assert (set(found), notes) == ({exported, "config.json"}, ("left out: training_args.bin",))
    assert same(safetensors.torch.load(found[exported]), TORCH | {"twin": TORCH["tied"]})
    with safetensors.safe_open(tmp_path / "out" / exported, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def torch_shards(folder: Path) -> Path:
    folder.mkdir(parents=True)
    names = {key: f"pytorch_model-0000{1 + number % 2}-of-00002.bin" for number, key in enumerate(TORCH)}
    for name in set(names.values()):
        torch.save({key: TORCH[key] for key in TORCH if names[key] == name}, folder / name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def test_sharded_torch_files_become_safetensors_files(store: casckpt.Store, tmp_path: Path) -> None:
    folder = torch_shards(tmp_path / "in")
    (folder / "pytorch_model.bin").write_bytes(b"stale")
    found, notes = made_of(store, folder, tmp_path / "out")
    assert notes == ("left out: pytorch_model.bin",)
    assert found.keys() == {"model.safetensors"}
    assert same(safetensors.torch.load(found["model.safetensors"]), TORCH)


def test_one_of_several_torch_files_is_rejected(store: casckpt.Store, tmp_path: Path) -> None:
    folder = torch_shards(tmp_path / "in")
    for path in folder.glob("*.bin"):
        with pytest.raises(InvalidInput, match=f"one of several files of a model; pass the folder {folder}"):
            import_any(store, look_at(path), step=1)
    (folder / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(NotFound, match="no safetensors file"):
        import_any(store, look_at(folder), step=1)
    assert not Path(store.url).exists()


@pytest.mark.parametrize(
    "content", [{"state_dict": {"a": torch.ones(2)}}, {"a": 3}, [torch.ones(2)], {1: torch.ones(1)}, Path("x")]
)
def test_a_torch_file_with_other_values_is_rejected_in_a_folder(
    store: casckpt.Store, tmp_path: Path, content: Any
) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidInput, match="more than a model's weights; import the file itself"):
        import_any(store, look_at(tmp_path), step=1, allow_pickle=True)


def components(folder: Path) -> Path:
    for name in ("unet", "text_encoder", "unused"):
        file_of(folder / name, {f"{name}.w": torch.ones(2), "w": torch.zeros(3)}, "mine.safetensors")
        (folder / name / "config.json").write_text("{}")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    (folder / "model_index.json").write_text('{"unet": ["diffusers", "UNet"], "text_encoder": [], "scheduler": []}')
    return folder


def test_a_torch_file_may_contain_values_that_safetensors_cannot_represent(
    store: casckpt.Store, tmp_path: Path
) -> None:
    torch.save({"a": torch.ones(2, dtype=torch.complex128)}, tmp_path / "pytorch_model.bin")
    made = import_safetensors(store, tmp_path, step=1)
    assert not store.attachments(made)
    assert store.read(made)["a"].dtype == torch.complex128
    with pytest.raises(InvalidInput, match="complex128"):
        store.export(made, tmp_path / "out")


def test_components_are_named_after_their_folders(store: casckpt.Store, tmp_path: Path) -> None:
    folder = components(tmp_path / "in")
    file_of(folder, {"a": torch.ones(1)}, "v1.safetensors")  # the same weights for other programs
    found, notes = made_of(store, folder, tmp_path / "out")
    assert set(store.read("latest")) == {"unet", "text_encoder"}
    assert set(store.get("latest").tensors) == {
        "unet.unet.w",
        "unet.w",
        "text_encoder.text_encoder.w",
        "text_encoder.w",
    }
    left_out = ("v1.safetensors", "unused/mine.safetensors")
    assert notes == tuple(f"left out: {name}" for name in left_out)
    kept = {name: data for name, data in contents(folder).items() if name not in left_out}
    for given, mine in ((kept, found), (contents(folder / "unet"), contents(tmp_path / "out" / "unet"))):
        assert unpacked(mine).keys() == unpacked(given).keys()
        assert same(loaded(mine), loaded(given))


def loaded(files: dict[str, bytes]) -> dict[str, torch.Tensor]:
    weights = {name: data for name, data in files.items() if name.endswith(".safetensors")}
    return {f"{name} {key}": one for name in weights for key, one in safetensors.torch.load(files[name]).items()}


@pytest.mark.parametrize("key", ["unet", "unet.w", "unet.other"])
def test_a_component_whose_name_is_a_prefix_of_a_key_is_rejected(
    store: casckpt.Store, tmp_path: Path, key: str
) -> None:
    folder = components(tmp_path / "in")
    file_of(folder, {key: torch.ones(1)}, "model.safetensors")
    with pytest.raises(InvalidInput, match="begins with the name of the subfolder 'unet'"):
        import_safetensors(store, folder, step=1)
    import_safetensors(store, folder / "unet", step=1)


def test_adapters_in_subfolders_are_components(store: casckpt.Store, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for name in ("", "other", "checkpoint-10"):
        file_of(folder / name, {"lora": torch.ones(2)}, "adapter_model.safetensors", format="pt")
        (folder / name / "adapter_config.json").write_text("{}")
    found, notes = made_of(store, folder, tmp_path / "out")
    assert notes == ("left out: checkpoint-10/adapter_model.safetensors",)
    assert set(store.get("latest").tensors) == {"lora", "other.lora"}
    kept = {name: data for name, data in contents(folder).items() if f"left out: {name}" not in notes}
    assert unpacked(found) == unpacked(kept)
    file_of(folder, {"w": torch.ones(2)}, "model.safetensors", format="pt")
    (folder / "config.json").write_text("{}")  # a whole model, not several adapters
    assert set(import_safetensors(store, folder, step=99).tensors) == {"w"}


@pytest.mark.parametrize("content", ["[", "3", '[3, {}, {"path": []}]', '{"../unet": 1, "unet/..": 1}', "[" * 100_000])
@pytest.mark.parametrize("name", ["model_index.json", "modules.json"])
def test_a_malformed_list_of_components_is_ignored(tmp_path: Path, name: str, content: str) -> None:
    folder = components(tmp_path / "in")
    (folder / "model_index.json").unlink()
    (folder / name).write_text(content)
    file_of(folder, {"w": torch.ones(2)}, "model.safetensors")
    assert [model.component for model in find_sources(folder).models] == [""]


# exports of any state


def test_shards_of_several_ranks_are_joined_into_a_tensor(store: casckpt.Store, tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    left = casckpt.Shard(whole[:, :2].clone(), global_shape=(4, 6), offset=(0, 0), shape=(4, 2))
    right = casckpt.Shard(whole[:, 2:].clone(), global_shape=(4, 6), offset=(0, 2), shape=(4, 4))
    store.save({"w": [left, right]}, step=0)
    found = export_safetensors(store, "latest", tmp_path / "m.safetensors")
    assert same(safetensors.torch.load_file(found.files[0]), {"w": whole})


# plans


def test_an_import_of_a_pipe_fails_immediately(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    writer = os.open(tmp_path / "pipe.pt", os.O_RDWR)  # open and close the pipe, so that the reader finds an empty file
    os.write(writer, b"none")
    try:
        with pytest.raises(InvalidInput, match="neither a file nor a folder"):
            look_at(tmp_path / "pipe.pt")
    finally:
        os.close(writer)


of_torch = needs_torch("2.9", "save_distributed of HuggingFaceStorageWriter")
FIRST, SECOND = (f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2))


def example() -> dict[str, torch.Tensor]:
    return {
        "w": numbers("w", 6, 4), "odd": numbers("odd", 7, 3), "columns": numbers("columns", 2, 5).bfloat16(),
        "replicated": numbers("replicated", 3), "scalar": torch.tensor(2.5), "short": numbers("short", 1, 2),
    }  # fmt: skip


def two_ranks(rank: int, size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (size,))
    placed = {"w": Shard(0), "odd": Shard(0), "columns": Shard(1), "short": Shard(0)}
    state = {
        key: distribute_tensor(value, mesh, [placed.get(key, Replicate())]) if value.dim() else value
        for key, value in example().items()
    }
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    save(state, HuggingFaceStorageWriter(str(folder), save_distributed=True))


def whole(store: casckpt.Store, ref: str) -> bool:
    """Return whether the checkpoint contains the example, in any order."""
    found = store.read(ref)
    return identical(dict(sorted(found.items())), dict(sorted(example().items())))


@pytest.fixture(scope="module")
def written(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that two ranks wrote."""
    folder = tmp_path_factory.mktemp("written") / "in"
    ranks.run(2, two_ranks, folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of the folder that tests may change."""
    (tmp_path / "in").mkdir()
    for path in written.iterdir():
        (tmp_path / "in" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "in"


@of_torch
@pytest.mark.parametrize("way", ["consolidate_safetensors_files", "HuggingFaceStorageReader"])
def test_parts_of_several_ranks_are_refused_with_two_ways_to_join_them(
    store: casckpt.Store, folder: Path, tmp_path: Path, way: str
) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    assert sorted(path.name for path in folder.iterdir()) == [FIRST, SECOND]
    with pytest.raises(Unsupported, match=rf"shard-0000\d-.* holds one rank's parts of tensors\..* {way}"):
        import_any(store, look_at(folder), step=1)
    assert not Path(store.url).exists()
    if way == "HuggingFaceStorageReader":
        store.save(load(zeros(example()), HuggingFaceStorageReader(str(folder))), step=1)
        assert whole(store, "default@1")
    else:
        (tmp_path / "whole").mkdir()
        consolidate_safetensors_files(str(folder), str(tmp_path / "whole"), dict.fromkeys(example(), 1))
        import_any(store, look_at(tmp_path / "whole"), step=1)
        found, expected = store.read("default@1"), {key: one for key, one in example().items() if one.dim()}
        assert identical({key: found[key] for key in expected}, expected)


@of_torch
def test_torch_loads_an_exported_folder(store: casckpt.Store, tmp_path: Path) -> None:
    store.save(example(), step=1)
    export_safetensors(store, "default@1", tmp_path / "out")
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    assert identical(load(zeros(example()), HuggingFaceStorageReader(str(tmp_path / "out"))), example())


@of_torch
def test_files_of_one_process_are_imported_by_their_index(store: casckpt.Store, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    save(example(), HuggingFaceStorageWriter(str(tmp_path / "in")))
    import_safetensors(store, tmp_path / "in", step=1)
    assert whole(store, "default@1")
    (path,) = (tmp_path / "in").glob("*.safetensors")
    import_safetensors(store, path, step=2)
    assert whole(store, "default@2")


@of_torch
@pytest.mark.parametrize("name", [FIRST, SECOND, "model.safetensors"])
def test_the_file_of_a_single_rank_is_rejected(store: casckpt.Store, folder: Path, name: str) -> None:
    if name == "model.safetensors":  # its metadata says where its parts begin
        (folder / SECOND).rename(folder / name)
    with pytest.raises(Unsupported, match=f"{name} holds one rank's parts"):
        import_safetensors(store, folder / name, step=1)
    assert not Path(store.url).exists()


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("rank_0.safetensors", "rank_1.safetensors"),  # OLMo-core's
        ("rank_0.safetensors", "metadata.json"),
        ("rank1.safetensors", "rank0.safetensors"),  # TensorRT-LLM's
        ("model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"),  # vLLM's
    ],
)
def test_the_file_of_one_rank_is_rejected_if_files_of_other_ranks_are_beside_it(
    store: casckpt.Store, tmp_path: Path, name: str, beside: str
) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / name)
    import_safetensors(store, tmp_path / name, step=1)  # a single file may be complete
    save_file({"w": torch.ones(3)}, tmp_path / beside)
    with pytest.raises(InvalidInput, match="holds one rank's parts"):
        import_safetensors(store, tmp_path / name, step=2)


def test_an_adapter_file_with_a_rank_in_its_name_is_not_mistaken_for_a_part(
    store: casckpt.Store, tmp_path: Path
) -> None:
    for rank in (8, 16):
        save_file({"lora": torch.ones(rank)}, tmp_path / f"style_rank_{rank}.safetensors")
    found = import_safetensors(store, tmp_path / "style_rank_16.safetensors", step=1)
    assert found.tensors["lora"].shape == (16,)


@pytest.mark.parametrize(
    "chosen", ["model.fp16.safetensors", "model.safetensors.index.bf16.json", "consolidated.safetensors"]
)
def test_variants_and_consolidated_files_can_be_imported_by_their_paths(
    store: casckpt.Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, chosen: str
) -> None:
    shards = {name: f"model.bf16-0000{number}-of-00002.safetensors" for number, name in enumerate("ab", 1)}
    files = {
        "model.safetensors": ({"a": 1, "b": 1}, torch.float32),
        "model.fp16.safetensors": ({"a": 2, "b": 2}, torch.float16),
        shards["a"]: ({"a": 3}, torch.bfloat16),
        shards["b"]: ({"b": 3}, torch.bfloat16),
        "consolidated.safetensors": ({"tok.a": 4, "tok.b": 4}, torch.float32),
    }
    folder = tmp_path / "in"
    folder.mkdir()
    for name, (values, dtype) in files.items():
        save_file({key: torch.full((2,), value, dtype=dtype) for key, value in values.items()}, folder / name)
    (folder / "model.safetensors.index.bf16.json").write_text(json.dumps({"weight_map": shards}))
    (folder / "config.json").write_text("{}")
    import_safetensors(store, folder, step=1)
    assert store.read("default@1")["a"].tolist() == [1, 1]
    assert chosen in caplog.text
    assert "to import one of these models by itself, pass the path of its file or index" in caplog.text
    import_safetensors(store, folder / chosen, step=2)
    found = {key: (float(value[0]), value.dtype) for key, value in store.read("default@2").items()}
    if "index" in chosen:
        assert found == {"a": (3.0, torch.bfloat16), "b": (3.0, torch.bfloat16)}
    else:
        values, dtype = files[chosen]
        assert found == {key: (float(value), dtype) for key, value in values.items()}
