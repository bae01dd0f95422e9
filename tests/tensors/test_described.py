"""DTensors that describe their own parts, for any mesh and placements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

import casckpt
from casckpt.errors import InvalidInput
from casckpt.format.regions import full_box
from casckpt.tensors.dtensors import local_boxes
from casckpt.tensors.shards import local_tensor
from tests.support.layouts import KINDS, WRAPS, Layout, draw, slices
from tests.support.plain_reader import Checkpoint
from tests.support.plain_reader import Store as PlainStore
from tests.support.ranks import Pool
from tests.support.saves import small
from tests.support.together import cut
from tests.support.torch_versions import needs_torch
from tests.tensors.test_dtensors import arange, pretending


def layouts(seed: int, count: int, ranks: int) -> dict[str, Layout]:
    rng = Random(seed)
    drawn = {f"t{number}": draw(rng, ranks) for number in range(count)}
    return {key: layout for key, layout in drawn.items() if layout.stacked or WRAPS}


def check_here(drawn: dict[str, Layout], rank: int, mesh: DeviceMesh, store: casckpt.Store) -> None:
    """Check that a rank's part equals the part that numpy cuts, even after loads and comparisons."""
    state: dict[str, Any] = {}
    data: dict[str, list[torch.Tensor]] = {}
    for key, layout in drawn.items():
        held, _ = layout.tensor(rank, mesh, empty=False)
        pieces = local_tensor(key, held).pieces
        boxes = [(piece.region.box.offset, piece.region.box.shape) for piece in pieces]
        assert boxes == list(layout.held[rank]), layout
        for piece, part in zip(pieces, layout.parts(rank), strict=True):
            assert np.array_equal(piece.data.numpy(), part), layout
        state[key], data[key] = layout.tensor(rank, mesh, empty=True)
    store.load(state, "a@1", no_dist=True)
    for key, layout in drawn.items():
        for found, part in zip(data[key], layout.parts(rank), strict=True):
            assert np.array_equal(found.numpy(), part), layout
    assert store.compare(state, "a@1", no_dist=True).is_same
    first = next((parts[0] for parts in data.values() if parts), None)
    if first is not None:
        first += 1
        assert len(store.compare(state, "a@1", no_dist=True).differs) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_layout_that_can_be_described_is_saved_exactly(size: int, full: bool, seed: int) -> None:
    drawn = layouts(seed, 500 if full else 20, size)
    store = small()
    store.save({key: torch.from_numpy(layout.whole) for key, layout in drawn.items()}, run="a", step=1)
    with pretending((size,)) as ranks:
        for rank, mesh in enumerate(ranks):
            check_here(drawn, rank, mesh, store)


def saved(rank: int, size: int, path: Path, seed: int, count: int) -> None:
    """Save, update from an earlier version, and load again. Return the part of each rank."""
    store = casckpt.open(path)
    mesh = init_device_mesh("cpu", (size,))
    drawn = layouts(seed, count, size)
    state: dict[str, Any] = {}
    data: dict[str, list[torch.Tensor]] = {}
    for key, layout in drawn.items():
        state[key], data[key] = layout.tensor(rank, mesh, empty=True)
    held = store.save(state, run="a", step=1)
    for key, layout in drawn.items():
        for mine, part in zip(data[key], layout.parts(rank), strict=True):
            mine.copy_(torch.from_numpy(part))
    store.save_async(state, run="a", step=2).result()
    for parts in data.values():
        for mine in parts:
            mine.zero_()
    store.update(state, "a@2", held=held)
    for key, layout in drawn.items():
        for mine, part in zip(data[key], layout.parts(rank), strict=True):
            assert np.array_equal(mine.numpy(), part), layout


@pytest.mark.parametrize("size", [2, 3, 4])
def test_real_ranks_together_save_the_whole_tensor(
    ranks: Pool, store_path: Path, size: int, *, full: bool, seed: int
) -> None:
    """The tests read it with the independent reader, and load it."""
    count = 50 if full else 8
    ranks.run(size, saved, store_path, seed, count)
    plain = PlainStore(store_path)
    found = Checkpoint(store_path, plain.log(plain.visible()["a", 2]).record).read()
    for key, layout in layouts(seed, count, size).items():
        assert np.array_equal(np.asarray(found[key]), layout.whole), layout


def test_the_generator_produces_every_kind_of_description() -> None:
    rng = Random(0)
    assert {draw(rng, 4).kind for _ in range(200)} == set(KINDS)


# inconsistent descriptions


def described(local: torch.Tensor, shape: Sequence[int], *chunks: tuple[Sequence[int], Sequence[int]]) -> DTensor:
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
    found = [ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)) for offset, sizes in chunks]
    tensor._local_tensor.__create_chunk_list__ = lambda: found  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((2, 3), [((0, 0), (3, 3))]),
        ((2, 3), [((0, 0), (3, 2))]),
        ((2, 3), [((3, 0), (2, 3))]),
        ((2, 3), [((0, -1), (2, 3))]),
        ((2, 3), [((0,), (6,))]),
        ((2, 3), []),
        ((0, 3), [((0, 0), (1, 3))]),
        ((4, 3), [((0, 0), (2, 3)), ((1, 0), (2, 3))]),
        ((4, 3), [((0, 0), (2, 3)), ((2, 0), (1, 3))]),
        ((4, 3), [((0, 0), (1, 3)), ((2, 0), (2, 3))]),
    ],
    ids=["more", "another form", "outside", "before", "flat", "nothing", "of nothing", "overlap", "less", "a gap"],
)
def test_an_incorrect_description_is_rejected(
    shape: tuple[int, int], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    with pretending((2,)) as ranks:
        next(ranks)
        tensor = described(torch.ones(shape), (4, 3), *chunks)
        for call in (small().save, lambda state, **_: small_with_it().load(state, "default@1", no_dist=True)):
            with pytest.raises(InvalidInput, match=r"'w': the tensor of shape \[4, 3\] describes its part") as caught:
                call({"w": tensor}, step=1, no_dist=True)
            assert caught.value.key == "w"


def small_with_it() -> casckpt.Store:
    store = small()
    store.save({"w": torch.zeros(4, 3)}, step=1, no_dist=True)
    return store


def test_partial_sums_are_rejected_even_with_a_chunk_description() -> None:
    with pretending((2,)) as ranks:
        mesh = next(ranks)
        tensor = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()], run_check=False)
        tensor._local_tensor.__create_chunk_list__ = lambda: [  # type: ignore[attr-defined]
            ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 2)))
        ]
        with pytest.raises(InvalidInput, match="partial sums"):
            local_tensor("w", tensor)


def test_any_tensor_class_can_describe_itself() -> None:
    """Its parts must be within the shape of the tensor."""
    shards, store = [torch.ones(2, 3), torch.full((2, 2), 2.0)], small()
    store.save({"w": LocalShardsWrapper(shards, [(0, 0), (0, 3)])}, step=1)
    assert store.read("default@1")["w"].tolist() == [[1, 1, 1, 2, 2]] * 2
    for shard in shards:
        shard.zero_()
    store.load({"w": LocalShardsWrapper(shards, [(0, 0), (0, 3)])}, "default@1")
    assert [shard.flatten()[0].item() for shard in shards] == [1, 2]
    with pytest.raises(InvalidInput, match="describes its part"):
        store.save({"w": LocalShardsWrapper(shards, [(2, 0), (2, 3)])}, step=2)
    part = torch.ones(2)
    part.__create_chunk_list__ = lambda: [  # type: ignore[attr-defined]
        ChunkStorageMetadata(torch.Size((2,)), torch.Size((2,)))
    ]
    with pytest.raises(InvalidInput, match="describes its part"):
        store.save({"w": part}, step=2)


# other orders of the mesh


@needs_torch("2.10", "the order of a mesh")
@pytest.mark.parametrize("order", [(1, 0), (2, 0, 1), (2, 1, 0), (1, 2)], ids=str)
def test_the_custom_order_of_a_mesh_is_respected(order: tuple[int, ...]) -> None:
    """torch's strided shards describe the same division. torch's own description of a DTensor ignores the mesh
    order."""
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    shape, full = (24, 2), arange((24, 2))
    placements = tuple(Shard(0) if dim in order else Shard(1) for dim in range(3))
    entries = [ShardOrderEntry(0, order), *(ShardOrderEntry(1, (dim,)) for dim in range(3) if dim not in order)]
    with pretending((2, 3, 2)) as ranks:
        for mesh in ranks:
            strided = DTensorSpec._convert_shard_order_to_StridedShard(tuple(entries), placements, mesh)
            local = cut(full, mesh, strided).to_local()
            meta = TensorMeta(torch.Size(shape), (2, 1), full.dtype)
            spec = DTensorSpec(mesh, placements, meta, shard_order=tuple(entries))
            pieces = local_tensor("w", DTensor(local, spec, requires_grad=False)).pieces  # type: ignore[no-untyped-call]
            for piece in pieces:
                box = piece.region.box
                assert torch.equal(full[slices((box.offset, box.shape))], piece.data)
            assert sum(piece.data.numel() for piece in pieces) == local.numel()


@needs_torch("2.10", "the order of a mesh")
def test_strided_shards_define_the_order_even_if_their_spec_also_contains_one() -> None:
    """torch 2.10 sets both for FSDP2 with tensor parallelism."""
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    full = arange((24, 2))
    with pretending((2, 2)) as ranks:
        for mesh in ranks:
            tensor = cut(full, mesh, (_StridedShard(0, split_factor=2), Shard(0)))
            tensor._spec.shard_order = (ShardOrderEntry(0, (1, 0)),)
            (piece,) = local_tensor("w", tensor).pieces
            assert torch.equal(full[slices((piece.region.box.offset, piece.region.box.shape))], piece.data)


def test_a_mesh_of_megatron_fsdp_does_not_determine_which_elements_a_rank_holds() -> None:
    """Megatron-FSDP divides the inner dimension first, unevenly, and with any placements, so a tensor must describe
    itself."""
    with pretending((2, 2)) as ranks:
        mesh = next(ranks)
        mesh._shard_order = [1, 0]  # type: ignore[attr-defined]
        with pytest.raises(InvalidInput, match=r"'w'.*preprocess_state_dict_for_uneven_dtensor"):
            local_boxes("w", cut(arange((8, 2)), mesh, [Shard(0), Shard(0)]))
        assert local_boxes("w", cut(arange((8, 2)), mesh, [Shard(0), Shard(1)]))[0][0].inside(full_box((8, 2)))
