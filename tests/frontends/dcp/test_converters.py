"""Imports of folders that torch.distributed.checkpoint wrote, and exports to such folders."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import casckpt
from casckpt.errors import Conflict, Damaged, InvalidInput
from casckpt.frontends.dcp import (
    StorageReader,
    StorageWriter,
    casckpt_to_dcp,
    casckpt_to_torch_save,
    converters,
    dcp_to_casckpt,
    items,
)
from tests.support.dcp import example, load, save, stock, stringed, zeros
from tests.support.meshes import build, differing, state_of, whole
from tests.support.progress_calls import ProgressCalls
from tests.support.ranks import Pool
from tests.support.together import numbers
from tests.support.torch_versions import needs_torch
from tests.support.training import identical

Store = casckpt.Store


class Colour(enum.Enum):
    RED = 1


def four_ranks(rank: int, size: int, path: Path) -> Any:
    state = state_of(*build("fsdp2", size, 1))
    save(state, FileSystemWriter(path))
    return whole(state)


def two_ranks(rank: int, size: int, path: Path, ref: str) -> Any:
    state = state_of(*build("fsdp2", size, 7))
    load(state, StorageReader(path, ref) if ref else FileSystemReader(path))
    return whole(state)


@needs_torch("2.8", "FSDP2 on the CPU")
def test_a_stock_dcp_checkpoint_is_imported_reshaped_and_exported(
    ranks: Pool, store_path: Path, tmp_path: Path
) -> None:
    saved = ranks.run(4, four_ranks, tmp_path / "in")[0]
    dcp_to_casckpt(tmp_path / "in", store_path, run="a", step=1)
    casckpt_to_dcp(store_path, "a@1", tmp_path / "out")
    for where, ref in ((store_path, "a@1"), (tmp_path / "out", "")):
        for found in ranks.run(2, two_ranks, where, ref):
            assert differing(found, saved) == []


def test_a_pickle_in_a_folder_is_not_executed(store: Store, tmp_path: Path) -> None:
    folder = stock(tmp_path / "in", {"colour": Colour.RED, "a": torch.ones(2), "n": 1})
    with pytest.raises(InvalidInput, match=r"'colour' \(1 of 2 values\) .*--allow-pickle") as caught:
        dcp_to_casckpt(folder, store, step=1)  # readers could not open the result
    assert caught.value.keys == ("colour",)
    assert not Path(store.url).exists()
    dcp_to_casckpt(folder, store, step=1, allow_pickle=True)  # its values are kept as bytes
    with pytest.raises(InvalidInput, match="allow_pickle=True"):
        store.read("default@1")
    assert store.read("default@1", allow_pickle=True)["colour"] is Colour.RED
    with pytest.raises(InvalidInput, match="allow_pickle=True"):
        casckpt_to_dcp(store, "default@1", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    casckpt_to_dcp(store, "default@1", tmp_path / "out", allow_pickle=True)
    assert load({"colour": None}, FileSystemReader(tmp_path / "out"))["colour"] is Colour.RED
    casckpt_to_torch_save(store, "default@1", tmp_path / "out.pt", allow_pickle=True)
    assert torch.load(tmp_path / "out.pt", weights_only=False)["colour"] is Colour.RED


def test_an_export_splits_tensors_into_few_boxes_of_whole_rows() -> None:
    def rows(shape: tuple[int, ...], most: int) -> list[tuple[int, int]]:
        return [(box.offset[0], box.shape[0]) for box in converters.split(shape, 4, most)]

    assert rows((7, 2, 3), 72) == [(0, 3), (3, 3), (6, 1)]  # a row has 24 bytes
    assert rows((3, 2, 3), 72) == [(0, 3)]
    assert rows((2, 2, 3), 23) == [(0, 1), (1, 1)]
    assert rows((0, 9), 1) == [(0, 0)]
    assert [box.shape for box in converters.split((), 8, 1)] == [()]


def test_a_dcp_folder_is_imported_and_exported(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "WINDOW_BYTES", 50_000)
    monkeypatch.setattr(converters, "WINDOW_BYTES", 50_000)  # the largest tensor becomes three chunks
    monkeypatch.setattr(converters, "FILE_BYTES", 60_000)
    state = example()
    done = ProgressCalls()
    folder = stock(tmp_path / "in", state)
    (folder / "config.json").write_text("{}")
    found = dcp_to_casckpt(folder, store, run="a", step=3, metadata={"x": 1}, progress=done)
    assert (found.run, found.step, found.metadata) == ("a", 3, {"x": 1})
    assert identical(store.read("a@3"), stringed(state))
    assert done.done >= 120_000
    assert store.read_attachment(found, "config.json") == b"{}"
    store.save(state, run="native", step=1)
    for ref in ("a@3", "native@1"):
        out = tmp_path / ref
        casckpt_to_dcp(store, ref, out)
        back = load({key: zeros(value) for key, value in stringed(state).items()}, FileSystemReader(out))
        assert identical(back, stringed(state))
        assert len(list(out.glob("*.distcp"))) >= 2
    assert dcp_to_casckpt(folder, store, run="b", step=1).stats.bytes_written == 0
    again = dcp_to_casckpt(tmp_path / "a@3", store, run="b", step=2)
    assert identical(store.read(again), stringed(state))
    assert store.attachments(again) == {"config.json": 2}


TORCH_DIST = b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'


@pytest.mark.parametrize(
    ("config", "attachments"),
    [
        (b"{}", True),
        (b'{"sharded_backend": "zarr"}', True),
        (b'{"backend": "torch_dist"}', True),
        (b'["sharded_backend", "torch_dist"]', True),
        (b"sharded_backend: torch_dist", True),
        (TORCH_DIST, False),  # the export does not have the file
    ],
)
def test_only_the_metadata_json_of_megatron_puts_values_into_lists(
    store: Store, tmp_path: Path, config: bytes, attachments: bool
) -> None:
    state = {"number": 3, "list": [3], "nested": {"deep": [[3]]}, "w": torch.ones(2)}
    store.save(state, step=1, attachments={"metadata.json": config})
    casckpt_to_dcp(store, "default@1", tmp_path / "out", attachments=attachments)
    assert load({"number": 0, "list": [0], "w": torch.zeros(2)}, FileSystemReader(tmp_path / "out"))["number"] == 3
    again = dcp_to_casckpt(tmp_path / "out", store, step=2)
    assert identical(store.read(again), state)
    assert ("metadata.json" in store.attachments(again)) is attachments


def test_an_export_is_complete_or_absent(store: Store, tmp_path: Path) -> None:
    store.save({"a": numbers("a", 3000)}, step=1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(Conflict):
        casckpt_to_dcp(store, "default@1", tmp_path / "full")
    casckpt_to_dcp(store, "default@1", tmp_path / "full", force=True)
    assert {path.name for path in (tmp_path / "full").iterdir()} == {"x", ".metadata", "__0_0.distcp"}
    for blob in Path(store.url).glob("objects/*/*.safetensors"):
        blob.chmod(0o600)
        blob.write_bytes(blob.read_bytes()[:5000])
    for call in (casckpt_to_dcp, casckpt_to_torch_save):
        with pytest.raises(Damaged):
            call(store, "default@1", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} <= {"full", "store"}


@needs_torch("2.9", "use_collectives")
def test_per_rank_values_are_not_exported_as_whole_tensors(store: Store, tmp_path: Path) -> None:
    from tests.support.dcp import half

    save({"a": half()}, StorageWriter(store, run="x", step=1), use_collectives=False)
    with pytest.raises(InvalidInput, match="cannot export the complete state"):
        casckpt_to_dcp(store, "x/rank-0@1", tmp_path / "out")
