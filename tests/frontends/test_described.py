"""DTensors that describe their own parts, in torch's checkpoints and in models and optimizers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import casckpt
from casckpt.frontends.dcp import StorageReader, StorageWriter, dcp_to_casckpt
from tests.support.dcp import failed, load, save
from tests.support.layouts import slices
from tests.support.ranks import Pool
from tests.support.together import line
from tests.support.torch_versions import needs_torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorProperties


ROWS = {2: [5, 2], 4: [3, 0, 2, 2]}
ORDER = {2: [1, 0], 4: [2, 0, 3, 1]}  # row order differs from rank order


def part_of(size: int, rank: int) -> ChunkStorageMetadata:
    """Return the chunk of a rank's rows, as Megatron-FSDP writes it."""
    before = ORDER[size][: ORDER[size].index(rank)]
    return ChunkStorageMetadata((sum(ROWS[size][one] for one in before), 0), (ROWS[size][rank], 3))  # type: ignore[arg-type]


def described(full: torch.Tensor, rank: int, size: int) -> DTensor:
    """Return a parameter as Megatron-FSDP leaves it, including the description for torch's checkpoints."""
    chunk = part_of(size, rank)
    local = full[slices((tuple(chunk.offsets), tuple(chunk.sizes)))].clone()
    tensor = DTensor.from_local(local, line(size), [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
    describe(tensor, chunk)
    return tensor


def describe(tensor: DTensor, chunk: ChunkStorageMetadata) -> None:
    from torch.distributed.checkpoint.metadata import TensorProperties

    def items(key: str, whole: DTensor) -> list[WriteItem]:
        properties: TensorProperties = TensorProperties.create_from_tensor(whole.to_local())
        data = TensorWriteData(chunk, properties, whole.size())
        found = WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
        return [found] if 0 not in chunk.sizes else []

    local: Any = tensor._local_tensor
    local.__create_chunk_list__ = lambda: [chunk]
    local.__create_write_items__ = items


FULL = torch.arange(21.0).view(7, 3)


def through_torch(rank: int, size: int, path: Path) -> None:
    """Save and load with DCP and with the store in all four combinations, and import DCP's folder."""
    save({"w": described(FULL, rank, size)}, StorageWriter(path, run="dcp", step=1))
    store = casckpt.open(path)
    store.save({"w": described(FULL, rank, size)}, run="own", step=1)
    save({"w": described(FULL, rank, size)}, FileSystemWriter(path.parent / "folder"))
    if rank == 0:
        dcp_to_casckpt(path.parent / "folder", store, run="imported", step=1)
    torch.distributed.barrier()
    for run in ("dcp", "own", "imported"):
        assert torch.equal(store.read(f"{run}@1")["w"], FULL)
        by_dcp, own = described(FULL * 0, rank, size), described(FULL * 0, rank, size)
        load({"w": by_dcp}, StorageReader(store, f"{run}@1"))
        store.load({"w": own}, f"{run}@1")
        expected = described(FULL, rank, size)._local_tensor
        assert torch.equal(by_dcp._local_tensor, expected)
        assert torch.equal(own._local_tensor, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_checkpoints_of_torch_and_casckpt_follow_the_same_description(ranks: Pool, store_path: Path, size: int) -> None:
    ranks.run(size, through_torch, store_path)


def test_only_folders_whose_chunks_are_described_by_tuples_are_imported(tmp_path: Path, store: casckpt.Store) -> None:
    """Megatron-FSDP writes such chunks. A tuple of any other values is still refused."""
    folder = tmp_path / "folder"
    save({"w": FULL}, FileSystemWriter(folder))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    stored = metadata.state_dict_metadata["w"]
    for chunk in ((0, 0), (7, 3)), ((0, 0.0), (7, 3)):
        stored.chunks = [ChunkStorageMetadata(*chunk)]
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        if chunk[0] == (0, 0) and type(chunk[0][1]) is int:
            dcp_to_casckpt(folder, store, step=1)
            assert torch.equal(store.read("default@1")["w"], FULL)
        else:
            with pytest.raises(casckpt.errors.Refused, match="the description of 'w'"):
                dcp_to_casckpt(folder, store, step=2)


def misplanned(rank: int, size: int, path: Path) -> list[dict[int, tuple[str, str]]]:
    """Save tensors for which torch plans the wrong offset."""
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    mesh = init_device_mesh("cpu", (2, 2))
    rows = FULL[:4]
    at = (rank % 2) * 2 + rank // 2  # the inner dimension first
    meta = TensorMeta(rows.shape, rows.stride(), rows.dtype)
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=(ShardOrderEntry(0, (1, 0)),))
    ordered = DTensor(rows[at : at + 1].clone(), spec, requires_grad=False)  # type: ignore[no-untyped-call]
    half = DTensor.from_local(rows[at : at + 1].clone(), line(4), [Shard(0)], run_check=False)
    chunk = ChunkStorageMetadata(torch.Size((at, 0)), torch.Size((1, 3)))
    half._local_tensor.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined] # and no items to write
    store = casckpt.open(path)
    found = []
    for number, tensor in enumerate((ordered, half)):
        store.save({"w": tensor}, run="own", step=number)
        assert torch.equal(store.read(f"own@{number}")["w"], rows)
        found.append(failed(lambda tensor=tensor: save({"w": tensor}, StorageWriter(store, run="d", step=1))))  # type: ignore[misc]
    found.append(failed(lambda: load({"w": ordered}, StorageReader(store, "own@0"))))
    load({"w": half}, StorageReader(store, "own@1"))  # this uses the tensor's own description
    assert torch.equal(half._local_tensor, rows[at : at + 1])
    return found


@needs_torch("2.10", "the order of a mesh")
def test_tensors_that_dcp_would_misplace_are_rejected_by_dcp_and_saved_natively(ranks: Pool, store_path: Path) -> None:
    for found in ranks.run(4, misplanned, store_path):
        for failures in found:
            assert failures
            for kind, text in failures.values():
                assert kind == "InvalidInput"
                assert "'w': torch's planner expects this rank to hold" in text


# models and optimizers


class Model(nn.Module):
    def __init__(self, full: torch.Tensor, rank: int, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(described(full, rank, size))
        describe(self.w, part_of(size, rank))  # type: ignore[arg-type] # a parameter has a local tensor of its own


def trained(full: torch.Tensor, rank: int, size: int) -> tuple[Model, torch.optim.Optimizer]:
    """torch creates the optimizer state like the parameter, but without the parameter's description."""
    model = Model(full, rank, size)
    optim = torch.optim.AdamW(model.parameters(), foreach=False)
    state: Any = torch.zeros_like(model.w)
    state._local_tensor.copy_(described(full * 2, rank, size)._local_tensor)
    optim.state[model.w] = {"step": torch.tensor(1.0), "exp_avg": state, "exp_avg_sq": state + 1}
    return model, optim


def with_optimizer(rank: int, size: int, path: Path) -> None:
    model, optim = trained(FULL, rank, size)
    before = optim.state[model.w]["exp_avg"]
    casckpt.save_model_and_optim_state(path, model, optim, run="a", step=1)
    assert optim.state[model.w]["exp_avg"] is before
    assert not hasattr(before._local_tensor, "__create_chunk_list__")
    whole = casckpt.unshard_optim_state(path, "a@1", by_name=True)["state"]["w"]
    assert torch.equal(casckpt.unshard_model_state(path, "a@1")["w"], FULL)
    assert torch.equal(whole["exp_avg"], FULL * 2)
    assert torch.equal(whole["exp_avg_sq"], FULL * 2 + 1)
    fresh = Model(FULL * 0, rank, size)
    for other, optimizer in (trained(FULL * 0, rank, size), (fresh, torch.optim.AdamW(fresh.parameters()))):
        casckpt.load_model_and_optim_state(path, "a@1", other, optimizer)
        assert torch.equal(other.w._local_tensor, model.w._local_tensor)  # type: ignore[attr-defined]
        for name in ("exp_avg", "exp_avg_sq"):
            mine, theirs = (
                held[parameter][name] for held, parameter in ((optimizer.state, other.w), (optim.state, model.w))
            )
            assert torch.equal(mine._local_tensor, theirs._local_tensor)


@pytest.mark.parametrize("size", [2, 4])
def test_optimizer_state_is_described_by_the_layout_of_its_parameter(ranks: Pool, store_path: Path, size: int) -> None:
    ranks.run(size, with_optimizer, store_path)
