"""A GPT-like model that was saved in one parallel configuration loads in others, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.frontends import megatron
from tests.support import gpt
from tests.support.gpt import Topology, differences, saved
from tests.support.ranks import Pool

SAVED = Topology(tp=2, pp=2, cut=0.3)
LOADED = [Topology(tp=4), Topology(pp=4), Topology(tp=2, dp=2), Topology(tp=2, pp=2), Topology(dp=4, cut=0.1)]


def loaded(rank: int, size: int, where: str, topology: Topology) -> list[Any]:
    template = gpt.emptied(gpt.state(topology.at(rank)))
    found = megatron.load(template, where)
    return differences(found, gpt.expected(gpt.state(topology.at(rank))))


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory, ranks: Pool) -> str:
    place = f"{tmp_path_factory.mktemp('gpt')}#gpt@7"
    ranks.run(SAVED.size, saved, place, SAVED)
    return place


@pytest.mark.parametrize("topology", LOADED, ids=str)
def test_a_model_loads_in_a_different_configuration(where: str, topology: Topology, ranks: Pool) -> None:
    assert ranks.run(topology.size, loaded, where, topology) == [[]] * topology.size


def test_a_model_loads_in_one_process(where: str) -> None:
    assert loaded(0, 1, where, Topology()) == []


def test_the_store_contains_whole_tensors_under_megatron_keys(where: str) -> None:
    path, _, ref = where.partition("#")
    full = casckpt.open(path).read(ref)
    layers = [gpt.whole(f"weight/attention/{i}", gpt.HIDDEN, gpt.HIDDEN, dtype=torch.bfloat16) for i in range(4)]
    assert torch.equal(full["layers.attention"], torch.stack(layers))
    moments = gpt.whole("exp_avg_sq/embedding", gpt.VOCAB, gpt.HIDDEN)
    assert torch.equal(full["optimizer.state.exp_avg_sq.embedding.weight"][: gpt.VOCAB], moments)
    assert torch.equal(full["optimizer.state.exp_avg_sq.layers.fc1"], torch.stack([swiglu(i) for i in range(4)]))
    assert full["optimizer"]["param_groups"][0] == {"lr": 0.1, "betas": (0.9, 0.95), "step": 100}
    assert full["optimizer"]["common_step"] == 100
    assert full["iteration"] == 7
    assert full["layers._extra_state/shard_2_4"] == {"layer": 2, "scale": (1.5, 2)}


def swiglu(layer: int) -> torch.Tensor:
    """Return gate and up projections of one layer, concatenated as the halves of one tensor."""
    return gpt.whole(f"exp_avg_sq/fc1/{layer}", 2, gpt.FFN * 4, gpt.HIDDEN).flatten(0, 1)


def test_a_fully_parallel_save_divides_writing_among_replicas(tmp_path: Path, where: str, ranks: Pool) -> None:
    place = f"{tmp_path}#gpt@7"
    topology = Topology(tp=2, dp=2)
    ranks.run(topology.size, saved, place, topology, fully_parallel=True, check_replicas=True)
    assert loaded(0, 1, place, Topology()) == []


def test_a_store_compares_a_sharded_tensor_with_the_checkpoint(where: str) -> None:
    path, _, ref = where.partition("#")
    state = gpt.state(Topology(tp=2, pp=2).at(1))
    for tensor in (state["model"]["layers.0.attention"], state["model"]["layers.1.attention"]):
        assert casckpt.open(path).compare({tensor.key: tensor}, ref, no_dist=True).is_same
        tensor.data.add_(1)
        assert not casckpt.open(path).compare({tensor.key: tensor}, ref, no_dist=True).is_same
