"""torch.distributed.checkpoint folders, read without unpickling."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

import casckpt
from casckpt.errors import Damaged, InvalidInput, NotFound, Refused
from casckpt.frontends.dcp import casckpt_to_dcp, dcp_to_casckpt
from casckpt.frontends.dcp.folder import unflatten
from tests.support.dcp import load, save, stock

Store = casckpt.Store


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return print, ("run",)


def test_invalid_metadata_is_rejected(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stock(tmp_path / "in", {"a": torch.ones(2)})
    metadata = folder / ".metadata"
    good = metadata.read_bytes()
    metadata.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InvalidInput, match=r"builtins.print.*allow_pickle"):
        dcp_to_casckpt(folder, store, step=1)
    assert capsys.readouterr().out == ""
    for bad in (b"", b"garbage", pickle.dumps({"a": 1})):
        metadata.write_bytes(bad)
        with pytest.raises((Refused, InvalidInput)):
            dcp_to_casckpt(folder, store, step=1)
    metadata.write_bytes(good)
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:100])
    with pytest.raises(Damaged, match="'a' cannot be read"):
        dcp_to_casckpt(folder, store, step=1)
    data.unlink()
    with pytest.raises(NotFound, match=r"__0_0.distcp"):
        dcp_to_casckpt(folder, store, step=1)
    assert store.checkpoints() == []
    assert store.gc(wait=0).waiting == ()


def test_megatron_objects_are_unwrapped_from_their_lists(store: Store, tmp_path: Path) -> None:
    """Folders of `torch_dist`. The real package adds plans to its metadata."""
    key, folder = "layer._extra_state/shard_0_1", tmp_path / "in"
    state = {"layer.weight": torch.ones(2), key: [{"scale": 1}]}
    save(state, FileSystemWriter(folder), planner=DefaultSavePlanner(flatten_state_dict=False))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.all_local_plans = [SavePlan([])]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "common.pt").write_bytes(b"common")
    found = dcp_to_casckpt(folder, store, step=1)
    assert store.read(found)[key] == {"scale": 1}
    assert set(store.attachments(found)) == {"common.pt", "metadata.json"}
    casckpt_to_dcp(store, found, tmp_path / "out")
    back = load({key: None}, FileSystemReader(tmp_path / "out"), planner=DefaultLoadPlanner(False, False))
    assert back[key] == [{"scale": 1}]


Chunk = tuple[Sequence[int], Sequence[int]]
"""Offset and sizes in a tensor of (4, 3) that is stored as (2, 1, 6): two parts of (2, 3)."""


def folder(*chunks: Chunk) -> Metadata:
    held = [ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)) for offset, sizes in chunks]
    stored = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2, 1, 6]), held)
    metadata = Metadata({"w": stored})
    vars(metadata)["mcore_data"] = {"w": {"nd_reformulated_orig_global_shape": (4, 3)}}
    return metadata


def test_flat_chunks_are_converted_to_boxes_of_the_tensor() -> None:
    described, cuts = unflatten(folder(((0, 0, 0), (1, 1, 6)), ((1, 0, 0), (1, 1, 6))))
    stored = described.state_dict_metadata["w"]
    assert isinstance(stored, TensorStorageMetadata)
    assert stored.size == torch.Size([4, 3])
    assert sorted(cut.offset for cut in cuts.values()) == [(0, 0), (2, 0)]


@pytest.mark.parametrize("first", [0, 1])
def test_a_tensor_with_a_chunk_that_is_not_flat_stays_in_chunks(first: int) -> None:
    chunks: list[Chunk] = [((0, 0, 0), (2, 1, 3)), ((0, 0, 3), (1, 1, 3)), ((1, 0, 3), (1, 1, 3))]
    metadata = folder(*chunks[first:], *chunks[:first])
    described, cuts = unflatten(metadata)
    assert described is metadata
    assert not cuts
