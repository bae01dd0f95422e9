"""Files of torch's HuggingFaceStorageWriter on several ranks, and other files with parts of tensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import casckpt
from casckpt.errors import InvalidInput
from casckpt.frontends.convert import export_safetensors, import_any, import_safetensors, look_at
from casckpt.frontends.interchange import resident
from tests.support.dcp import load, save, zeros
from tests.support.together import numbers
from tests.support.training import identical

if TYPE_CHECKING:
    from tests.support.ranks import Pool

FIRST, SECOND = (f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2))


def example() -> dict[str, torch.Tensor]:
    return {
        "w": numbers("w", 6, 4), "odd": numbers("odd", 7, 3), "columns": numbers("columns", 2, 5).bfloat16(),
        "replicated": numbers("replicated", 3), "scalar": torch.tensor(2.5), "short": numbers("short", 1, 2),
    }  # fmt: skip


def two_ranks(rank: int, size: int, folder: Path, more: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (size,))
    placed = {"w": Shard(0), "odd": Shard(0), "columns": Shard(1), "short": Shard(0)}
    state = {
        key: distribute_tensor(value, mesh, [placed.get(key, Replicate())]) if value.dim() else value
        for key, value in example().items()
    }
    save(state, HuggingFaceStorageWriter(str(folder), save_distributed=True, **more))


def whole(store: casckpt.Store, ref: str) -> bool:
    """Does it hold the example, in whatever order?"""
    found = store.read(ref)
    return identical(dict(sorted(found.items())), dict(sorted(example().items())))


@pytest.fixture(scope="module")
def written(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as two ranks write it."""
    folder = tmp_path_factory.mktemp("written") / "in"
    ranks.run(2, two_ranks, folder, {})
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of it to be changed."""
    (tmp_path / "in").mkdir()
    for path in written.iterdir():
        (tmp_path / "in" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "in"


def test_files_of_ranks_are_joined(
    store: casckpt.Store, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [FIRST, SECOND]
    monkeypatch.setattr(resident, "RESIDENT_BYTES", 16)
    (folder / "config.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        found = import_any(store, look_at(folder), run="hf", step=1)
    assert "2 files of ranks, which do not say how many there were" in caplog.text
    assert whole(store, "hf@1")
    assert store.attachments(found) == {"config.json": 2}
    assert found.metadata == {"safetensors": {"format": "pt"}}  # nothing of where parts lay


def test_an_imported_and_exported_model_is_complete(store: casckpt.Store, folder: Path, tmp_path: Path) -> None:
    import_safetensors(store, folder, step=1)
    export_safetensors(store, "default@1", tmp_path / "out")
    assert identical(load(zeros(example()), HuggingFaceStorageReader(str(tmp_path / "out"))), example())


def test_several_files_of_each_rank_are_joined(ranks: Pool, store: casckpt.Store, tmp_path: Path) -> None:
    chosen = {key: 1 + number % 2 for number, key in enumerate(example())}
    ranks.run(2, two_ranks, tmp_path / "in", {"fqn_to_index_mapping": chosen})
    assert len(list((tmp_path / "in").iterdir())) > 2
    import_safetensors(store, tmp_path / "in", step=1)
    assert whole(store, "default@1")


def test_consolidated_files_are_imported_as_one_model(ranks: Pool, store: casckpt.Store, tmp_path: Path) -> None:
    ranks.run(2, two_ranks, tmp_path / "in", {"enable_consolidation": True})
    import_safetensors(store, tmp_path / "in", run="whole", step=1)
    import_safetensors(store, tmp_path / "in/sharded", run="parts", step=1)
    expected = {key: value for key, value in example().items() if value.dim()}  # the writer leaves a scalar zero
    for ref in ("whole@1", "parts@1"):
        found = store.read(ref)
        assert identical({key: found[key] for key in expected}, expected)


def test_files_of_one_process_are_imported_by_their_index(store: casckpt.Store, tmp_path: Path) -> None:
    save(example(), HuggingFaceStorageWriter(str(tmp_path / "in")))
    import_safetensors(store, tmp_path / "in", step=1)
    assert whole(store, "default@1")
    (path,) = (tmp_path / "in").glob("*.safetensors")
    import_safetensors(store, path, step=2)
    assert whole(store, "default@2")


@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_the_file_of_a_single_rank_is_refused(store: casckpt.Store, folder: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name} holds the parts .* give the folder"):
        import_safetensors(store, folder / name, step=1)
    (folder / SECOND).rename(folder / "model.safetensors")  # it says where its parts begin, whatever its name is
    with pytest.raises(InvalidInput, match=r"model\.safetensors holds the parts"):
        look_at(folder / "model.safetensors")
    assert not Path(store.url).exists()


def cut(folder: Path) -> None:
    (folder / FIRST).unlink()


def cut_last(folder: Path) -> None:
    (folder / SECOND).rename(folder / SECOND.replace("00002-model", "00003-model"))


def rest_of_another_save(folder: Path) -> None:
    (folder / SECOND.replace("00002-model", "00003-model")).write_bytes((folder / SECOND).read_bytes())


def without_places(folder: Path) -> None:
    save_file({"w": torch.ones(3, 4)}, folder / SECOND, metadata={"DCP_SHARDING_INFO": "{}"})


def odd_places(folder: Path) -> None:
    places = {"w": {"saved_offsets": [-3, 0]}}
    save_file({"w": torch.ones(3, 4)}, folder / SECOND, metadata={"DCP_SHARDING_INFO": json.dumps(places)})


def far_places(folder: Path) -> None:
    places = {"w": {"saved_offsets": [2**40, 0]}}
    save_file({"w": torch.ones(3, 4)}, folder / SECOND, metadata={"DCP_SHARDING_INFO": json.dumps(places)})


def deep_places(folder: Path) -> None:
    save_file({"w": torch.ones(3, 4)}, folder / SECOND, metadata={"DCP_SHARDING_INFO": "[" * 100_000})


def another_dtype(folder: Path) -> None:
    places = {"w": {"saved_offsets": [3, 0]}}
    save_file({"w": torch.ones(3, 4).half()}, folder / SECOND, metadata={"DCP_SHARDING_INFO": json.dumps(places)})


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (cut, "no file shard-00001"), (cut_last, "no file shard-00002"), (rest_of_another_save, "two files hold"),
        (without_places, "does not say where"), (odd_places, "does not say where"), (far_places, "no file holds"),
        (deep_places, "does not say where"), (another_dtype, "another dtype"),
    ],
)  # fmt: skip
def test_an_incomplete_folder_is_refused(
    store: casckpt.Store, folder: Path, spoil: Callable[[Path], None], match: str
) -> None:
    spoil(folder)
    with pytest.raises(InvalidInput, match=match):
        import_safetensors(store, folder, step=1)
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
def test_a_part_recognised_by_its_name_is_refused_beside_others(
    store: casckpt.Store, tmp_path: Path, name: str, beside: str
) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / name)
    import_safetensors(store, tmp_path / name, step=1)  # alone in its folder it may be all
    save_file({"w": torch.ones(3)}, tmp_path / beside)
    with pytest.raises(InvalidInput, match="holds the parts"):
        import_safetensors(store, tmp_path / name, step=2)


def test_the_rank_in_the_name_of_an_adapter_does_not_mean_a_part(store: casckpt.Store, tmp_path: Path) -> None:
    for rank in (8, 16):
        save_file({"lora": torch.ones(rank)}, tmp_path / f"style_rank_{rank}.safetensors")
    found = import_safetensors(store, tmp_path / "style_rank_16.safetensors", step=1)
    assert found.tensors["lora"].shape == (16,)
