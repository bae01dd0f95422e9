"""A load counts as a change for autograd, which then rejects graphs over the old values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ByRows

from casckpt.errors import Mismatch
from casckpt.store.store import Store
from casckpt.tensors.values import Shard
from tests.support.ranks import Pool
from tests.support.saves import cells, small
from tests.support.tensors import is_noticed
from tests.support.together import line

REF = "default@1"
SHAPE = (64, 32)


@pytest.fixture
def store() -> Store:
    made = small()
    made.save({"a": cells(2, seed=1).view(SHAPE)}, step=1)
    return made


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "in one piece": lambda: torch.zeros(SHAPE),
    "a parameter": lambda: nn.Parameter(torch.zeros(SHAPE)),
    "a view": lambda: torch.zeros(3, *SHAPE)[1],
    "with strides": lambda: torch.zeros(SHAPE[::-1]).t(),
    "of another dtype": lambda: torch.zeros(SHAPE, dtype=torch.float64),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_an_autograd_graph_with_values_from_before_a_load_is_rejected(
    store: Store, make: Callable[[], torch.Tensor]
) -> None:
    tensor = make()
    assert is_noticed(tensor, lambda: store.load({"a": tensor}, REF, cast=True))


def test_an_autograd_graph_over_the_base_of_a_loaded_view_is_rejected(store: Store) -> None:
    whole = torch.zeros(3, *SHAPE)
    assert is_noticed(whole, lambda: store.load({"a": whole[1]}, REF))


SHARDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a box": lambda data: Shard(data, SHAPE, (0, 0)),
    "a flat part": lambda data: Shard(data.view(-1)[:100], SHAPE, flat=(7, 107)),
    "two boxes": lambda data: [Shard(data[:3], SHAPE, (0, 0)), Shard(data[3:], SHAPE, (3, 0))],
}


@pytest.mark.parametrize("template", SHARDS.values(), ids=SHARDS)
def test_an_autograd_graph_over_shard_data_is_rejected(store: Store, template: Callable[[torch.Tensor], Any]) -> None:
    data = torch.zeros(SHAPE)
    assert is_noticed(data, lambda: store.load({"a": template(data)}, REF))


def into_dtensors(rank: int, size: int) -> list[bool]:
    store = small()
    store.save({"a": cells(2, seed=1).view(SHAPE)}, step=1, no_dist=True)
    found = []
    for local_of in (lambda tensor: tensor, DTensor.to_local):
        local = torch.zeros(SHAPE[0] // size, SHAPE[1])
        tensor = DTensor.from_local(local, line(size), [ByRows(0)])
        found.append(is_noticed(local_of(tensor), lambda: store.load({"a": tensor}, REF, no_dist=True)))  # noqa: B023
    return found


def test_an_autograd_graph_over_a_dtensor_or_its_local_tensor_is_rejected(ranks: Pool) -> None:
    assert ranks.run(2, into_dtensors, backend="fake") == [[True, True]] * 2


def test_an_inference_mode_tensor_does_not_have_autograd_graphs_and_can_be_filled(store: Store) -> None:
    with torch.inference_mode():
        tensors = [torch.zeros(SHAPE), torch.zeros(SHAPE[::-1]).t()]
    for tensor in tensors:
        store.load({"a": tensor}, REF)
        assert torch.equal(tensor, cells(2, seed=1).view(SHAPE))


def test_rejected_and_prepared_loads_leave_graphs_valid(store: Store) -> None:
    tensor, other = torch.zeros(SHAPE), torch.zeros(SHAPE, dtype=torch.float64)

    def both() -> None:
        store.pre_download(REF, {"a": tensor})
        with pytest.raises(Mismatch, match="float64"):
            store.load({"a": other}, REF)

    assert not is_noticed(tensor, both)
    assert other._version == 0
