"""Import and export: what comes out is what went in, bit by bit, and nothing half-done is ever left."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import casckpt
from casckpt.errors import Conflict, Damaged, InvalidInput, MissingKey, NotFound, StorageError, Unsupported
from casckpt.format.dtypes import itemsize
from casckpt.format.sections.index import Entry
from casckpt.frontends.convert import (
    dcp_to_casckpt,
    export_safetensors,
    find_sources,
    import_olmo,
    import_olmo_trainer,
    import_safetensors,
    look_at,
    torch_save_to_casckpt,
)
from casckpt.frontends.interchange import resident
from casckpt.frontends.interchange.safetensors import importing as safetensors_import
from casckpt.frontends.interchange.safetensors.layout import plan_shards
from casckpt.frontends.views.recut import ViewTensor
from casckpt.loading import regions
from tests.support.told import Told

Tensors = dict[str, torch.Tensor]


def tensors(seed: int) -> Tensors:
    """One of each kind that a file may hold: empty, 0-d, odd sizes, NaNs with a payload, larger than a cell."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (3, 7, 4), dtype=torch.uint8, generator=generator)
    return {
        "model.w": torch.randn(700, 500, generator=generator),
        "model.b": torch.randn(11, generator=generator).bfloat16(),
        "nan": bits.view(torch.float32).clone(),
        "half": torch.randn(5, 3, generator=generator).half(),
        "f64": torch.randn(2, 2, 2, generator=generator, dtype=torch.float64),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "c64": torch.randn(3, generator=generator, dtype=torch.complex64),
        "f8": bits[0].clone().view(torch.float8_e5m2),
        "f8fnuz": bits[1].clone().view(torch.float8_e4m3fnuz),
        "u16": torch.tensor([1, 65535], dtype=torch.uint16),
        "i8": torch.tensor([-128, 127], dtype=torch.int8),
    }


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """The same keys, shapes, dtypes and bits?"""

    def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
        return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return {key: bits(tensor) for key, tensor in one.items()} == {key: bits(tensor) for key, tensor in other.items()}


def file_of(folder: Path, state: Tensors, name: str = "in.safetensors", **metadata: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(state, folder / name, metadata=metadata or None)
    return folder / name


def hugging_face(folder: Path, state: Tensors) -> Path:
    """A folder with two shards, an index and what usually lies beside them."""
    keys = list(state)
    names = {key: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, key in enumerate(keys)}
    for name in sorted(set(names.values())):
        file_of(folder, {key: state[key] for key in keys if names[key] == name}, name, format="pt")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text('{"hidden": 4}')
    (folder / "vocab.txt").write_text("word\n" * 2000)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"the same again")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "secret").write_text("secret")
    return folder


@pytest.fixture
def temporaries(tmp_path: Path) -> Any:
    """After the test: no temporary file of an export is left."""
    yield
    assert [path for path in tmp_path.rglob("*") if ".casckpt-" in path.name] == []


pytestmark = pytest.mark.usefixtures("temporaries")


# one file


def test_a_file_comes_back_byte_for_byte(store: casckpt.Store, tmp_path: Path, seed: int) -> None:
    state = tensors(seed)
    source = file_of(tmp_path / "in", state, made_by="a test")
    made = import_safetensors(store, source, run="base", step=0)
    assert same(store.read(made), state)
    assert made.metadata == {"safetensors": {"made_by": "a test"}}
    found = export_safetensors(store, "base@0", tmp_path / "out" / "m.safetensors")
    assert found.files == (tmp_path / "out" / "m.safetensors",)
    assert (found.tensors, found.left_out) == (len(state), ())
    assert found.files[0].read_bytes() == source.read_bytes()


def test_the_same_file_again_writes_no_blob(store: casckpt.Store, tmp_path: Path, seed: int) -> None:
    source = file_of(tmp_path / "in", tensors(seed))
    assert import_safetensors(store, source, run="base", step=0).stats.bytes_written > 0
    again = import_safetensors(store, source, run="base", step=1)
    assert (again.stats.bytes_written, again.stats.blobs_written) == (0, 0)
    with pytest.raises(Conflict, match="base@1 exists"):
        import_safetensors(store, source, run="base", step=1)
    import_safetensors(store, source, run="base", step=1, overwrite=True)
    assert [(one.run, one.step) for one in store.checkpoints()] == [("base", 0), ("base", 1)]


def test_a_path_is_taken_for_a_store(store_path: Path, tmp_path: Path) -> None:
    source = file_of(tmp_path / "in", {"a": torch.ones(3)})
    import_safetensors(store_path, source, step=4)
    out = export_safetensors(store_path, "default@4", tmp_path / "o.safetensors").files[0]
    assert same(safetensors.torch.load_file(out), {"a": torch.ones(3)})


def test_data_need_not_be_aligned(store: casckpt.Store, tmp_path: Path) -> None:
    source = file_of(tmp_path, {"a": torch.arange(6, dtype=torch.float64)})
    data = source.read_bytes()
    length = int.from_bytes(data[:8], "little")
    source.write_bytes((length + 3).to_bytes(8, "little") + data[8 : 8 + length] + b"   " + data[8 + length :])
    import_safetensors(store, source, step=0)
    assert torch.equal(store.read("latest")["a"], torch.arange(6, dtype=torch.float64))


def test_mapped_pages_are_let_go(
    store: casckpt.Store, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "RESIDENT_BYTES", 1000)  # nearly all the time
    state = tensors(seed)
    done = Told()
    import_safetensors(store, file_of(tmp_path, state), step=0, progress=done)
    assert same(store.read("latest"), state)
    assert done.done >= sum(tensor.nbytes for tensor in state.values())


# folders


def test_a_folder_comes_back_with_what_travels_along(
    store: casckpt.Store, tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    state = tensors(seed)
    folder = hugging_face(tmp_path / "hf", state)
    with caplog.at_level(logging.WARNING, "casckpt"):
        made = import_safetensors(store, folder, run="hf", step=0)
    assert "left out: pytorch_model.bin" in caplog.text
    assert "left out: pytorch_model.bin" in made.notes
    assert same(store.read(made), state)
    assert set(store.attachments(made)) == {"config.json", "vocab.txt", "1_Pooling/config.json"}
    found = export_safetensors(store, made, tmp_path / "out")
    assert sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")) == [
        "1_Pooling/config.json", "config.json", "model.safetensors", "vocab.txt",
    ]  # fmt: skip
    assert set(found.files) == {path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert (tmp_path / "out" / "vocab.txt").read_bytes() == (folder / "vocab.txt").read_bytes()
    assert same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), state)


def test_an_export_is_cut_into_files_with_an_index(store: casckpt.Store, tmp_path: Path, seed: int) -> None:
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


def test_a_tensor_that_only_the_index_has_is_told_of(
    store: casckpt.Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = hugging_face(tmp_path / "hf", {"a": torch.ones(2), "b": torch.ones(2)})
    file_of(folder, {"c": torch.ones(2)}, "model-00002-of-00002.safetensors")
    assert list(import_safetensors(store, folder, step=0).tensors) == ["a", "c"]
    assert "names tensors that no file holds: b" in caplog.text


def test_links_out_of_the_folder_do_not_travel(tmp_path: Path) -> None:
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


def test_a_snapshot_in_the_cache_of_hugging_face_is_taken(store: casckpt.Store, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    file_of(blobs, {"a": torch.ones(2)}, "0123")
    (blobs / "4567").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "config.json").symlink_to("../../blobs/4567")
    made = import_safetensors(store, snapshot, step=0)
    assert (list(made.tensors), list(store.attachments(made))) == (["a"], ["config.json"])


def test_large_files_do_not_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_folder_without_one_model_is_told_by_what_it_holds(
    tmp_path: Path, names: tuple[str, ...], kind: type[Exception], match: str
) -> None:
    for name in names:
        file_of(tmp_path, {"a": torch.ones(1)}, name)
    with pytest.raises(kind, match=match):
        find_sources(tmp_path)


# exports of any state


def test_nested_states_get_flat_keys_and_objects_are_named(store: casckpt.Store, tmp_path: Path) -> None:
    tied = torch.randn(4, 4)
    state = {"model": {"a": tied, "b": tied, "t": torch.randn(3, 2).t()}, "steps": [torch.ones(1), 7], "lr": 0.1}
    store.save(state, step=0)
    found = export_safetensors(store, "latest", tmp_path / "m.safetensors")
    assert found.left_out == ("steps.1", "lr")
    read = safetensors.torch.load_file(found.files[0])
    expected = {"model.a": tied, "model.b": tied, "model.t": state["model"]["t"], "steps.0": torch.ones(1)}  # type: ignore[index]  # a nested state
    assert same(read, expected)


def test_keys_choose(store: casckpt.Store, tmp_path: Path, seed: int) -> None:
    state = tensors(seed)
    store.save(state | {"model.lr": 0.1}, step=0)
    found = export_safetensors(store, "latest", tmp_path / "m.safetensors", keys=["model.*", "nan"])
    assert found.left_out == ("model.lr",)
    assert set(safetensors.torch.load_file(found.files[0])) == {"model.w", "model.b", "nan"}
    with pytest.raises(MissingKey, match="nothing in default@0 matches 'head"):
        export_safetensors(store, "latest", tmp_path / "n.safetensors", keys=["model.*", "head.*"])


def test_a_dtype_that_safetensors_lacks_is_named_before_anything_is_written(
    store: casckpt.Store, tmp_path: Path
) -> None:
    store.save({"a": torch.ones(2), "b": {"z": torch.ones(2, dtype=torch.complex128)}}, step=0)
    with pytest.raises(InvalidInput, match=r"'b\.z' is complex128") as caught:
        export_safetensors(store, "latest", tmp_path / "out" / "m.safetensors")
    assert caught.value.key == "b.z"
    assert not (tmp_path / "out").exists()
    assert export_safetensors(store, "latest", tmp_path / "m.safetensors", keys=["a"]).tensors == 1


def test_small_windows_give_the_same_file(
    store: casckpt.Store, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tensors(seed)
    store.create(cell_bytes=4096, blob_bytes=1 << 16)
    store.save(state, step=0, attachments={"long.txt": random.Random(seed).randbytes(25_600)})
    whole = export_safetensors(store, "latest", tmp_path / "whole")
    monkeypatch.setattr(regions, "WINDOW_BYTES", 10_000)
    done = Told()
    parts = export_safetensors(store, "latest", tmp_path / "parts", progress=done)
    for one, other in zip(whole.files, parts.files, strict=True):
        assert Path(one).read_bytes() == Path(other).read_bytes()
    assert done.done == sum(tensor.nbytes for tensor in state.values()), "no cell was read twice"


def test_shards_of_ranks_make_one_tensor(store: casckpt.Store, tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    left = casckpt.Shard(whole[:, :2].clone(), global_shape=(4, 6), offset=(0, 0), shape=(4, 2))
    right = casckpt.Shard(whole[:, 2:].clone(), global_shape=(4, 6), offset=(0, 2), shape=(4, 4))
    store.save({"w": [left, right]}, step=0)
    found = export_safetensors(store, "latest", tmp_path / "m.safetensors")
    assert same(safetensors.torch.load_file(found.files[0]), {"w": whole})


# what is there already, and what goes wrong


@pytest.mark.parametrize("below", [".", "objects", "commits/x.pt", "new"])
def test_nothing_is_written_into_the_store_itself(tmp_path: Path, below: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"w": torch.ones(3)}, run="run", step=1)
    before = sorted((tmp_path / "store").rglob("*"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("store")
    for path in (Path("link") / below, tmp_path / "store" / below, f"file://{tmp_path}/store/{below}"):
        with pytest.raises(InvalidInput, match="in the folder of the store itself"):
            store.export("run@1", path, force=True)
    assert sorted((tmp_path / "store").rglob("*")) == before
    store.export("run@1", "beside")


def test_nothing_is_written_over_without_force(store: casckpt.Store, tmp_path: Path) -> None:
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


def test_an_empty_folder_is_filled(store: casckpt.Store, tmp_path: Path) -> None:
    store.save({"a": torch.ones(2)}, step=0)
    (tmp_path / "out").mkdir()
    number = (tmp_path / "out").stat().st_ino
    export_safetensors(store, "latest", tmp_path / "out")
    assert (tmp_path / "out").stat().st_ino == number, "whoever stands in it still does"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_folder_is_not_put_where_a_file_is(store: casckpt.Store, tmp_path: Path) -> None:
    store.save({"a": torch.ones(2)}, step=0)
    (tmp_path / "file").touch()
    with pytest.raises(Conflict, match="is a file"):
        export_safetensors(store, "latest", tmp_path / "file", force=True)
    with pytest.raises(StorageError, match="cannot be written"):
        export_safetensors(store, "latest", tmp_path / "file" / "m.safetensors")


@pytest.mark.parametrize("name", ["out", "m.safetensors"])
def test_damage_leaves_nothing_behind(store: casckpt.Store, store_path: Path, tmp_path: Path, name: str) -> None:
    store.save({"a": torch.randn(100, 100)}, step=0, attachments={"config.json": b"{}"})
    (blob,) = store_path.glob("objects/*/*.safetensors")
    data = bytearray(blob.read_bytes())
    data[4096] ^= 1
    os.chmod(blob, 0o600)
    blob.write_bytes(data)
    with pytest.raises(Damaged, match="'a'"):
        export_safetensors(store, "latest", tmp_path / name)
    assert not (tmp_path / name).exists()


def test_an_attachment_does_not_replace_weights(store: casckpt.Store, tmp_path: Path) -> None:
    store.save({"a": torch.ones(2)}, step=0, attachments={"Model.safetensors": b"not weights"})
    with pytest.raises(InvalidInput, match="has the name of a file with tensors"):
        export_safetensors(store, "latest", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no store"):
        export_safetensors(tmp_path / "store", "latest", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# plans


def streams(kinds: list[tuple[str, int]]) -> list[ViewTensor]:
    return [
        ViewTensor(f"k{number}", Entry("tensor", f"k{number}", 0, None, dtype, itemsize(dtype), (count,), number))
        for number, (dtype, count) in enumerate(kinds)
    ]


some_streams = st.lists(st.tuples(st.sampled_from(["uint8", "float32", "float64"]), st.integers(0, 300))).map(streams)


@given(given_streams=some_streams, most=st.integers(8, 500), cell=st.sampled_from([8, 64, 1024]))
def test_windows_hold_every_element_once_in_order(given_streams: list[ViewTensor], most: int, cell: int) -> None:
    sources = [source for one in given_streams for source in one.sources]
    planned = list(regions.plan_windows(sources, most, cell))
    pieces = [piece for window in planned for piece in window]
    assert all(planned)
    assert max((sum(piece.nbytes for piece in window) for window in planned), default=0) <= most
    found = [(piece.entry.number, index) for piece in pieces for index in range(piece.lo, piece.hi)]
    assert found == [(one.entry.number, index) for one in given_streams for index in range(one.entry.numel)]
    for piece in pieces:
        size = itemsize(piece.entry.dtype)
        cut = piece.hi * size
        assert piece.hi == piece.entry.numel or cut % cell == 0 or most < cell


@given(given_streams=some_streams, most=st.integers(1, 2000))
def test_files_hold_every_tensor_once_in_order(given_streams: list[ViewTensor], most: int) -> None:
    shards = plan_shards(given_streams, most)
    assert [one for shard in shards for one in shard] == given_streams
    for shard in shards:
        assert len(shard) <= 1 or sum(one.entry.nbytes for one in shard) <= most
    assert len(shards) == 1 or all(shards)


def test_files_of_no_size_are_refused() -> None:
    with pytest.raises(InvalidInput, match="max-shard-size"):
        plan_shards([], 0)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    writer = os.open(tmp_path / "pipe.pt", os.O_RDWR)  # one that opens it ends, and finds what is no checkpoint
    os.write(writer, b"none")
    try:
        with pytest.raises(InvalidInput, match="neither a file nor a folder"):
            look_at(tmp_path / "pipe.pt")
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "importer", [import_safetensors, torch_save_to_casckpt, dcp_to_casckpt, import_olmo, import_olmo_trainer]
)
@pytest.mark.parametrize("keyword", ["ephemeral", "allow_pickel", "no_dist"])
def test_a_keyword_that_no_import_has_is_refused_before_anything_is_read(
    store: casckpt.Store, tmp_path: Path, importer: Any, keyword: str
) -> None:
    first = (store, tmp_path / "none") if importer is import_safetensors else (tmp_path / "none", store)
    with pytest.raises(TypeError, match=rf"^{importer.__name__}\(\) got an unexpected keyword argument '{keyword}'$"):
        importer(*first, step=1, **{keyword: True})
    with pytest.raises(TypeError, match=rf"^{importer.__name__}\(\) missing .*'step'$"):
        importer(*first)
