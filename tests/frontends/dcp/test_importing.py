"""Imports of folders that torch.distributed.checkpoint wrote."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import casckpt
from casckpt.errors import InvalidInput
from casckpt.frontends.dcp import (
    StorageReader,
    casckpt_to_dcp,
    casckpt_to_torch_save,
    dcp_to_casckpt,
)
from tests.support.dcp import load, save
from tests.support.meshes import build, differing, state_of, whole
from tests.support.torch_versions import needs_torch

if TYPE_CHECKING:
    from tests.support.ranks import Pool


Store = casckpt.Store


class Colour(enum.Enum):
    RED = 1


def stock(path: Path, state: Any) -> Path:
    save(state, FileSystemWriter(path))
    return path


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
