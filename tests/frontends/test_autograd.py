"""Autograd detects that front ends have written to tensors. tests/loading has the same tests for `Store.load`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor, Shard

import casckpt
from casckpt.frontends import megatron
from casckpt.frontends.dcp import StorageReader
from casckpt.frontends.megatron import ShardedTensor
from casckpt.frontends.trainer import Checkpointer
from tests.support import dcp
from tests.support.ranks import Pool, outcome_of
from tests.support.tensors import is_noticed
from tests.support.together import line
from tests.support.torch_versions import needs_torch
from tests.support.training import made, trained

REF = "default@1"


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_dcp_load_invalidates_autograd_graphs(store: casckpt.Store) -> None:
    store.save({"a": torch.ones(4, 3)}, step=1)
    tensor = torch.zeros(4, 3)
    assert is_noticed(tensor, lambda: dcp.load({"a": tensor}, StorageReader(store, REF)))


def dcp_into_a_dtensor(rank: int, size: int, path: Path) -> bool:
    store = casckpt.open(path / str(rank))
    store.save({"a": torch.ones(4, 3)}, step=1, no_dist=True)
    tensor = DTensor.from_local(torch.zeros(2, 3), line(size), [Shard(0)])
    return is_noticed(tensor, lambda: dcp.load({"a": tensor}, StorageReader(store, REF), no_dist=True))


@needs_torch("2.7", "no_dist")
def test_a_dcp_load_of_a_dtensor_invalidates_autograd_graphs(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(2, dcp_into_a_dtensor, tmp_path, backend="fake") == [True] * 2


def model_loads(store: casckpt.Store, model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    return {
        "load_model_and_optim_state": lambda: casckpt.load_model_and_optim_state(store, REF, model, optimizer),
        "Checkpointer.load": lambda: Checkpointer(store, run="default").load(REF, model, optimizer),
    }


@pytest.mark.parametrize("name", ["load_model_and_optim_state", "Checkpointer.load"])
def test_loading_a_model_and_its_optimizer_invalidates_autograd_graphs(store: casckpt.Store, name: str) -> None:
    casckpt.save_model_and_optim_state(store, *trained(), run="default", step=1)
    model, optimizer = trained(seed=1)
    load = model_loads(store, model, optimizer)[name]
    held = [*model.parameters(), *model.buffers()]
    tensors = [one for state in optimizer.state.values() for one in state.values()]
    before = [tensor._version for tensor in (*held, *tensors)]
    assert is_noticed(model.head.weight, load)
    persistent = [tensor is not model.scratch for tensor in (*held, *tensors)]
    assert persistent == [a > b for a, b in zip([t._version for t in (*held, *tensors)], before, strict=True)]


def test_a_checkpointer_load_of_bare_weights_invalidates_autograd_graphs(store: casckpt.Store) -> None:
    model, _ = trained()
    store.save(model.state_dict(), step=1)
    into, _ = made(seed=1)
    assert is_noticed(into.head.weight, lambda: Checkpointer(store, run="default").load(REF, into))


def megatron_style(rank: int, size: int, where: str) -> list[Any]:
    """Load contiguous, strided and padded tensors, and a padded parameter."""
    state = {
        name: ShardedTensor.from_rank_offsets(name, torch.ones(4, 3), replica_id=rank) for name in ("a", "t", "p", "q")
    }
    megatron.save(state, where)
    tensors = {
        "a": torch.zeros(4, 3),
        "t": torch.zeros(3, 4).t(),
        "p": torch.zeros(5, 3),
        "q": nn.Parameter(torch.zeros(6, 3)),
    }
    asked = {
        name: ShardedTensor.from_rank_offsets(name, tensor, replica_id=rank, allow_shape_mismatch=True)
        for name, tensor in tensors.items()
    }
    weights = {name: torch.ones_like(tensor, requires_grad=True) for name, tensor in tensors.items()}
    results = {name: (weights[name] * tensor).sum() for name, tensor in tensors.items()}
    megatron.load(asked, where)
    errors = [outcome_of(result.backward) for result in results.values()]
    return ["modified by an inplace operation" in str(error) for error in errors] + [
        tensors["q"][4:].count_nonzero().item()
    ]


def test_a_megatron_load_invalidates_autograd_graphs(ranks: Pool, tmp_path: Path) -> None:
    found = ranks.run(2, megatron_style, f"{tmp_path}#a@1")
    assert found == [[True] * 4 + [0]] * 2
