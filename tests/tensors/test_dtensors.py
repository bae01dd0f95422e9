"""The values of an arange are distributed over meshes. `local_boxes` returns the position of each for any
placement."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.torch_version import TorchVersion

from casckpt.errors import InvalidInput
from casckpt.format.regions import Box
from casckpt.tensors.dtensors import boxes_of, local_boxes
from casckpt.tensors.memory import narrow
from tests.support.ids import named
from tests.support.ranks import Pool
from tests.support.together import cut
from tests.support.torch_versions import needs_torch

Shape = tuple[int, ...]
MESHES: list[Shape] = [(1,), (2,), (3,), (5,), (8,), (2, 2), (2, 3), (4, 2), (1, 3), (2, 2, 2), (3, 1, 2)]
SHAPES: list[Shape] = [(8, 6), (7, 5), (3, 9), (16,), (5,), (1,), (4, 3, 5), (2, 0)]


@contextmanager
def pretending(mesh: Shape) -> Iterator[Iterator[DeviceMesh]]:
    """Yield the mesh as each of its ranks in turn sees it, in a group without communication."""

    def ranks() -> Iterator[DeviceMesh]:
        for rank in range(prod(mesh)):
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group("fake", rank=rank, world_size=prod(mesh), store=FakeStore())
            yield init_device_mesh("cpu", mesh)

    try:
        yield ranks()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def held(tensor: DTensor, full: torch.Tensor) -> list[int]:
    """Return the elements of this rank, after a check of each."""
    local, found = tensor.to_local(), []
    for outer, inner in local_boxes("key", tensor):
        assert outer.shape == inner.shape
        assert torch.equal(narrow(local, inner), narrow(full, outer))
        found += narrow(local, inner).reshape(-1).tolist()
    assert sorted(found) == sorted(local.reshape(-1).tolist())
    return found


def arange(shape: Shape) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


Cuts = Sequence[tuple[Placement, ...]]
Where = tuple[Shape, tuple[Placement, ...]]


def scatter(mesh: Shape, shapes: Sequence[Shape], cuts: Callable[[int], Cuts]) -> dict[Where, list[int] | None]:
    """Return the elements of all ranks for each shape and division, or None if a rank refuses it."""
    said: dict[Where, list[list[int] | Exception]] = {}
    with pretending(mesh) as ranks:
        for here in ranks:
            for shape in shapes:
                full = arange(shape)
                for placements in cuts(len(shape)):
                    tensor = cut(full, here, placements)
                    said.setdefault((shape, placements), []).append(attempt(tensor, full))
    return {
        where: None
        if any(isinstance(one, InvalidInput) for one in tried)
        else [i for one in tried for i in proven(one)]
        for where, tried in said.items()
    }


def attempt(tensor: DTensor, full: torch.Tensor) -> list[int] | Exception:
    try:
        return held(tensor, full)
    except (AssertionError, InvalidInput) as error:
        return error


def proven(held: list[int] | Exception) -> list[int]:
    if isinstance(held, Exception):
        raise held
    return held


def whole(mesh: Shape, where: Where) -> list[int]:
    """Return the expected elements."""
    shape, placements = where
    times = prod(size for size, one in zip(mesh, placements, strict=True) if one.is_replicate())
    return sorted(list(range(prod(shape))) * times)


def even(mesh: Shape, where: Where) -> bool:
    """Report whether each mesh dimension divides the tensor into equal parts."""
    shape, placements = where
    left = list(shape)
    for size, one in zip(mesh, placements, strict=True):
        dim = getattr(one, "dim", None)
        if dim is not None:
            if left[dim] % size:
                return False
            left[dim] //= size
    return True


@pytest.mark.parametrize("mesh", MESHES, ids=named)
def test_every_placement_maps_each_element_to_its_position(mesh: Shape) -> None:
    def cuts(dims: int) -> Cuts:
        return list(itertools.product([Replicate(), *map(Shard, range(dims))], repeat=len(mesh)))

    for where, found in scatter(mesh, SHAPES, cuts).items():
        assert found is not None
        assert sorted(found) == whole(mesh, where)


def pairs_of(last: int) -> Callable[[int], Cuts]:
    """Return placements on two mesh dimensions."""
    return lambda dims: [
        *((_StridedShard(dim, split_factor=last), Shard(dim)) for dim in range(dims)),
        *((_StridedShard(a, split_factor=1), Shard(b)) for a, b in itertools.permutations(range(dims), 2)),
    ]


def triples(dims: int) -> Cuts:
    """Return placements on three mesh dimensions of two ranks each."""
    return [
        *((Replicate(), _StridedShard(dim, split_factor=2), Shard(dim)) for dim in range(dims)),
        *((_StridedShard(dim, split_factor=2), Replicate(), Shard(dim)) for dim in range(dims)),
        *((_StridedShard(dim, split_factor=4), _StridedShard(dim, split_factor=2), Shard(dim)) for dim in range(dims)),
        *((Shard(dim), _StridedShard(dim, split_factor=2), Shard(dim)) for dim in range(dims)),
        *((_StridedShard(a, split_factor=2), Shard(b), Shard(a)) for a, b in itertools.permutations(range(dims), 2)),
    ]


STRIDED: dict[Shape, Callable[[int], Cuts]] = {
    **{mesh: pairs_of(mesh[1]) for mesh in [(2, 2), (2, 3), (3, 2), (4, 2), (2, 4), (3, 4)]},
    (2, 2, 2): triples,
}


@needs_torch("2.8", "uneven strided shards")
@pytest.mark.parametrize("mesh", STRIDED, ids=named)
def test_strided_shards_map_each_element_to_its_position(mesh: Shape) -> None:
    """torch divides uneven shards in two ways. casckpt supports that of FSDP2, and refuses the other, as the sizes
    show. Before torch 2.10, it refuses both, because the sizes may agree."""
    shapes = [*SHAPES, (16, 8), (24, 12), (48,)]
    for where, found in scatter(mesh, shapes, STRIDED[mesh]).items():
        if found is None:
            assert not even(mesh, where)
        else:
            assert sorted(found) == whole(mesh, where)


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with pretending((4,)) as ranks:
        for rank, _ in enumerate(ranks):
            inner = DeviceMesh("cpu", [1, 3])
            tensor = DTensor.from_local(torch.zeros(2), inner, [Shard(0)], run_check=False)
            assert bool(local_boxes("key", tensor)) == (rank in (1, 3))


def test_unreduced_sums_are_rejected() -> None:
    with pretending((2, 2)) as ranks:
        for here in ranks:
            tensor = DTensor.from_local(torch.zeros(4, 4), here, [Partial(), Shard(0)], run_check=False)
            with pytest.raises(InvalidInput, match=r"'layer\.w'.*partial sums.*redistribute") as caught:
                local_boxes("layer.w", tensor)
            assert caught.value.key == "layer.w"


def test_a_local_tensor_of_the_wrong_size_is_rejected() -> None:
    """An example is an uneven division, which a DTensor cannot describe."""
    with pretending((2,)) as ranks:
        for rank, here in enumerate(ranks):
            local = torch.zeros(1 + 4 * rank)
            tensor = DTensor.from_local(local, here, [Shard(0)], run_check=False, shape=torch.Size([6]), stride=(1,))
            with pytest.raises(InvalidInput, match=r"local tensor of shape \[\d\] here instead of \[3\]"):
                local_boxes("key", tensor)


def test_a_stride_that_does_not_match_the_mesh_is_rejected() -> None:
    with pretending((2, 3)) as ranks:
        here = next(ranks)
        local = torch.zeros(2)
        placements = (_StridedShard(0, split_factor=2), Shard(0))
        tensor = DTensor.from_local(local, here, placements, run_check=False, shape=torch.Size([12]), stride=(1,))
        with pytest.raises(InvalidInput, match="split factor 2"):
            local_boxes("key", tensor)


@pytest.mark.parametrize(
    ("version", "named", "rows", "supported"),
    [
        ("2.9.1", False, 5, False),
        ("2.9.1", False, 7, False),
        ("2.9.1", False, 8, True),
        ("2.9.1", True, 5, True),  # may be FSDP2's
        ("2.8.0", True, 5, True),
        ("2.7.1", True, 5, False),
        ("2.10.0", False, 5, True),
    ],
)
def test_uneven_strided_shards_are_refused_with_old_versions_of_torch_unless_fsdp2_may_have_created_them(
    monkeypatch: pytest.MonkeyPatch, version: str, named: bool, rows: int, supported: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    placements, full = (_StridedShard(0, split_factor=2), Shard(0)), arange((rows, 3))
    parts = [part for half in full.chunk(2) for part in half.chunk(2)]  # of each rank, tensor parallelism first
    with pretending((2, 2)) as ranks:
        for rank, _ in enumerate(ranks):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor") if named else None)
            part = parts[rank % 2 * 2 + rank // 2]
            tensor = DTensor.from_local(part, mesh, placements, run_check=False, shape=full.shape, stride=(3, 1))
            if supported:
                assert held(tensor, full) == part.reshape(-1).tolist()
                continue
            with pytest.raises(InvalidInput, match=rf"'key': torch {version} .* upgrade torch to 2\.10") as caught:
                local_boxes("key", tensor)
            assert caught.value.key == "key"


def test_consecutive_indices_become_boxes() -> None:
    indices = [torch.tensor(held).numpy() for held in ([0, 1, 4, 5], [2])]
    assert boxes_of(indices) == [(Box((0, 2), (2, 1)), Box((0, 0), (2, 1))), (Box((4, 2), (2, 1)), Box((2, 0), (2, 1)))]
    assert boxes_of([]) == [(Box((), ()), Box((), ()))]
    assert boxes_of([torch.tensor([], dtype=torch.int64).numpy()]) == []


# real FSDP2 and tensor parallelism

SIZES = [(8, 8), (6, 10), (7, 5), (9, 13), (3, 2), (1, 1)]
UNEVEN = needs_torch("2.8", "uneven shards of tensor parallelism and FSDP2")


Held = dict[tuple[int, str], tuple[list[int], int]]
"""Of each key of each size: the elements held, and how many there are in all."""


def wrap(here: DeviceMesh, names: tuple[str, ...], model: torch.nn.Module) -> None:
    """Apply FSDP2 over all dimensions of the mesh except "tp", either separately or ("flat") merged into one."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if "tp" in names:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, here["tp"], plan, src_data_rank=None)
    data = tuple(name for name in names if name != "tp")
    if "flat" in names:
        fully_shard(model, mesh=here[data]._flatten("data"))
    elif data:
        fully_shard(model, mesh=here[data])


def wrapped(rank: int, size: int, mesh: Shape, names: tuple[str, ...]) -> Held:
    """Return this rank's elements of two layers, for all sizes."""
    here = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    found = {}
    for number, (inner, outer) in enumerate(SIZES):
        model = torch.nn.Sequential(torch.nn.Linear(inner, outer), torch.nn.Linear(outer, inner))
        for parameter in model.parameters():
            parameter.data = arange(tuple(parameter.shape)).float()
        full = {key: value.clone() for key, value in model.state_dict().items()}
        wrap(here, names, model)
        for key, value in model.state_dict().items():
            found[number, key] = [int(one) for one in held(value, full[key])], full[key].numel()
    return found


def check_whole(ranks: Sequence[Held]) -> None:
    """Check that the same number of ranks holds each element of a tensor."""
    for where, (_, count) in ranks[0].items():
        times = Counter(element for found in ranks for element in found[where][0])
        assert set(times) == set(range(count))
        assert len(set(times.values())) == 1


@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        ((4,), ("dp",)),
        ((3,), ("dp",)),
        ((2, 2), ("rep", "dp")),
        pytest.param((4,), ("tp",), marks=needs_torch("2.7", "src_data_rank")),
        pytest.param((2, 2), ("dp", "tp"), marks=[UNEVEN, pytest.mark.soak]),
        pytest.param((3, 2), ("dp", "tp"), marks=UNEVEN),
        pytest.param((2, 3), ("dp", "tp"), marks=[UNEVEN, pytest.mark.soak]),
        pytest.param((2, 2, 2), ("rep", "dp", "tp"), marks=UNEVEN),
        pytest.param((2, 2, 2), ("dp", "flat", "tp"), marks=[UNEVEN, pytest.mark.soak]),
        ((2, 2), ("dp", "flat")),
    ],
    ids=lambda value: " x ".join(map(str, value)),
)
def test_torch_wrappers_are_sharded_as_described(ranks: Pool, mesh: Shape, names: tuple[str, ...]) -> None:
    check_whole(ranks.run(prod(mesh), wrapped, mesh, names))


def mixture(rank: int, size: int) -> Any:
    """Return this rank's elements of tensors that were redistributed, which needs communication."""
    here = init_device_mesh("cpu", (2, 2))
    full = arange((7, 6))
    tensor = distribute_tensor(full, here, [Shard(0), Shard(1)])
    return [
        sorted(held(tensor.redistribute(here, placements), full))
        for placements in ([Shard(1), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Shard(0)])
    ]


def test_tensors_that_were_redistributed_are_saved(ranks: Pool) -> None:
    for found in zip(*ranks.run(4, mixture), strict=True):
        assert {element for one in found for element in one} == set(range(42))
