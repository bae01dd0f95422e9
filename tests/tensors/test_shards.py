"""Leaves are divided into chunks without a copy, and the error for a leaf without bytes names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from casckpt import Shard
from casckpt.errors import InvalidInput
from casckpt.format.regions import Box, Region, whole
from casckpt.tensors.shards import check_destination, check_in_place, local_tensor
from tests.support.tensors import WRONG, wrong


def test_a_plain_tensor_becomes_a_single_chunk() -> None:
    tensor = torch.randn(3, 4)
    local = local_tensor("w", tensor)
    assert (local.key, local.dtype, local.shape) == ("w", torch.float32, (3, 4))
    (piece,) = local.pieces
    assert piece.region == whole((3, 4))
    assert piece.data.data_ptr() == tensor.data_ptr()
    assert not local.replicated


def test_a_parameter_counts_as_replicated() -> None:
    assert local_tensor("w", torch.nn.Parameter(torch.zeros(2))).replicated


def test_a_shard_can_be_described_by_a_box() -> None:
    data = torch.arange(6).view(2, 3)
    local = local_tensor("w", Shard(data, (4, 3), offset=(2, 0)))
    (piece,) = local.pieces
    assert local.shape == (4, 3)
    assert piece.region == Region(Box((2, 0), (2, 3)), 0, 6)
    assert piece.data.data_ptr() == data.data_ptr()


def test_a_shard_can_be_described_by_flat_ranges() -> None:
    data = torch.arange(5)
    (piece,) = local_tensor("w", Shard(data, (4, 3), flat=(2, 7))).pieces
    assert piece.region == Region(Box((0, 0), (4, 3)), 2, 7)
    first, second = local_tensor("w", Shard(data, (4, 3), flat=[(6, 9), (0, 2)])).pieces
    assert (first.region.lo, first.data.tolist()) == (6, [0, 1, 2])
    assert (second.region.lo, second.data.tolist()) == (0, [3, 4])


def test_a_flat_range_that_covers_the_whole_box_has_its_shape() -> None:
    (piece,) = local_tensor("w", Shard(torch.arange(12), (4, 3), flat=(0, 12))).pieces
    assert piece.data.shape == (4, 3)


def test_several_chunks_describe_several_regions() -> None:
    chunks = [Shard(torch.zeros(1, 3), (4, 3), offset=(row, 0)) for row in (0, 3)]
    local = local_tensor("w", chunks)
    assert [piece.region.box.offset for piece in local.pieces] == [(0, 0), (3, 0)]


def test_replicated_shards_are_marked() -> None:
    def is_replicated(*flags: bool) -> bool:
        chunks = [Shard(torch.zeros(2), (6,), offset=(2 * at,), replicated=flag) for at, flag in enumerate(flags)]
        return local_tensor("w", chunks).replicated

    assert is_replicated(True)
    assert is_replicated(True, True)
    assert not is_replicated(True, False)
    assert not local_tensor("w", Shard(torch.zeros(2), (2,))).replicated


def test_a_shard_can_be_empty() -> None:
    local = local_tensor("w", Shard(torch.zeros(0), (4, 3), flat=(5, 5)))
    assert local.shape == (4, 3)
    assert not local.pieces


@pytest.mark.parametrize(
    "other",
    [Shard(torch.zeros(2), (5,), offset=(2,)), Shard(torch.zeros(2, dtype=torch.int8), (4,), offset=(2,))],
    ids=["shape", "dtype"],
)
def test_shards_of_two_different_tensors_are_rejected(other: Shard) -> None:
    with pytest.raises(InvalidInput, match="'w': the shards of this key differ"):
        local_tensor("w", [Shard(torch.zeros(2), (4,), offset=(0,)), other])


@pytest.mark.parametrize("problem", WRONG)
@pytest.mark.filterwarnings("ignore")  # torch: quantization and nested tensors are deprecated, or a prototype
def test_a_tensor_without_data_is_rejected(problem: str) -> None:
    with pytest.raises(InvalidInput, match=r"^'a\.b': ") as caught:
        local_tensor("a.b", wrong(problem))
    assert caught.value.key == "a.b"


class _Wrapper(torch.Tensor):
    """A tensor made of others, like quantized weights."""

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> NoReturn:
        raise NotImplementedError


def test_a_wrapper_without_memory_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="no memory of its own"):
        local_tensor("w", torch.Tensor._make_wrapper_subclass(_Wrapper, (3,)))


def test_fake_functional_meta_nested_and_uninitialized_tensors_are_rejected() -> None:
    with pytest.raises(InvalidInput, match="'w': an uninitialized parameter"):
        local_tensor("w", torch.nn.LazyLinear(3).weight)
    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(InvalidInput, match="'w': a FakeTensor has no memory of its own"):
        local_tensor("w", fake)
    with pytest.raises(InvalidInput, match="'w': a Tensor has no memory of its own"):
        local_tensor("w", torch._to_functional_tensor(torch.ones(3)))
    with pytest.raises(InvalidInput, match="'w': a meta tensor"):
        local_tensor("w", torch.ones(3, device="meta")[1:])
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(InvalidInput, match="'w': a nested tensor"):
        local_tensor("w", nested)


def test_an_expanded_tensor_can_be_saved_but_not_loaded_into() -> None:
    tensor = torch.zeros(1, 3).expand(2, 3)
    assert local_tensor("w", tensor).pieces
    with pytest.raises(InvalidInput, match="'w': the elements of an expanded tensor"):
        check_destination("w", tensor)
    check_destination("w", torch.zeros(1, 3).expand(1, 3))
    check_destination("w", torch.zeros(3, 2).t())


def test_an_expanded_tensor_that_no_host_could_hold_is_rejected() -> None:
    local_tensor("w", torch.zeros(1).expand(1 << 46))
    with pytest.raises(InvalidInput, match="'w': an expanded tensor"):
        local_tensor("w", torch.zeros(1).expand(1 << 61))


@pytest.mark.parametrize("part", [lambda whole: whole, lambda whole: whole[6:], lambda whole: whole.view(2, 4)[:, ::3]])
def test_a_tensor_whose_storage_is_too_small_is_rejected(part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    whole = torch.zeros(8)
    tensor = part(whole)
    whole.untyped_storage().resize_(31)
    for call in (local_tensor, check_destination):
        with pytest.raises(InvalidInput, match="'w': its storage was resized to 31 bytes, but its elements need 32"):
            call("w", tensor)
    whole.untyped_storage().resize_(32)
    local_tensor("w", tensor)


def test_a_tensor_that_overlaps_itself_cannot_be_loaded_into() -> None:
    tensor = torch.zeros(12).as_strided((5, 4), (2, 1))
    with pytest.raises(InvalidInput, match="'w'"):
        check_destination("w", tensor)


def test_a_flat_shard_of_strided_data_cannot_be_loaded_into() -> None:
    strided = torch.zeros(6, 4).t()
    for shard in (Shard(strided, (48,), flat=(0, 24)), Shard(strided, (4, 6), flat=[(0, 12), (12, 24)])):
        with pytest.raises(InvalidInput, match=r"'w': the data of a flat Shard has strides \[1, 4\]"):
            check_in_place("w", shard)
        with pytest.raises(InvalidInput):
            check_in_place("w", [shard])
    check_in_place("w", Shard(torch.zeros(48)[::2], (48,), flat=(0, 24)))
    check_in_place("w", Shard(strided, (4, 6)))
    check_in_place("w", Shard(strided, (4, 6), flat=(0, 24)))
    check_in_place("w", torch.zeros(3))
