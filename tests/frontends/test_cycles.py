"""Values that contain themselves are refused by key, or stored as DCP stores them. No call runs forever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import casckpt
from casckpt.errors import InvalidInput
from casckpt.frontends import megatron
from casckpt.frontends.dcp import PickleFreeSavePlanner, StorageReader, StorageWriter
from casckpt.frontends.megatron import CheckpointingException, ShardedTensor
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.frontends.training_state import flatten_optimizer_state
from tests.support import dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def a_list() -> Any:
    found: list[Any] = [1]
    found.append(found)
    return found


def a_dict() -> Any:
    found: dict[str, Any] = {"t": torch.ones(1)}
    found["below"] = [found]
    return found


def a_deque() -> Any:
    found: deque[Any] = deque()
    found.append(found)
    return found


MAKERS = [a_list, a_dict, a_deque]


def transactions(store: casckpt.Store) -> list[str]:
    return [entry.key for entry in store.repository.storage.list("transactions/")]


def model_and_optimizer() -> tuple[nn.Linear, optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, optim.SGD(model.parameters(), lr=1.0)


def with_state(value: Any) -> tuple[nn.Linear, optim.Optimizer]:
    model, optimizer = model_and_optimizer()
    optimizer.state[model.weight]["odd"] = value
    return model, optimizer


def with_option(value: Any) -> tuple[nn.Linear, optim.Optimizer]:
    model, optimizer = model_and_optimizer()
    optimizer.param_groups[0]["odd"] = value
    return model, optimizer


def sharded() -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", torch.ones(2))


def train(store: casckpt.Store, state: Any) -> None:
    Checkpointer(store, run="r").save(1, *model_and_optimizer(), state)


SAVES: dict[str, tuple[Callable[[casckpt.Store, Any], Any], str]] = {
    "save": (lambda store, value: store.save({"k": value}, run="r", step=1), "k"),
    "save in the background": (lambda store, value: store.save_async({"k": value}, run="r", step=1).result(), "k"),
    "PerRank": (lambda store, value: store.save({"k": casckpt.PerRank(value)}, run="r", step=1), "k"),
    "train state": (lambda store, value: train(store, {"k": value}), "train.0.k"),
    "TrainState": (lambda store, value: train(store, TrainState(k=value)), "train.0.k"),
    "state of an optimizer": (
        lambda store, value: casckpt.save_model_and_optim_state(store, *with_state(value), run="r", step=1),
        "weight",
    ),
    "option of an optimizer": (
        lambda store, value: casckpt.save_model_and_optim_state(store, *with_option(value), run="r", step=1),
        "param_groups",
    ),
    "Megatron's common part": (
        lambda store, value: megatron.save({"k": value, "w": sharded()}, casckpt.at(store, run="r", step=1)),
        "k",
    ),
}


@pytest.mark.parametrize("name", SAVES)
@pytest.mark.parametrize("make", MAKERS)
def test_a_save_rejects_a_cycle_and_names_its_key(store: casckpt.Store, name: str, make: Callable[[], Any]) -> None:
    call, key = SAVES[name]
    with pytest.raises((InvalidInput, CheckpointingException)) as caught:
        call(store, make())
    assert key.rpartition(".")[2] in str(caught.value)
    assert transactions(store) == []
    assert not store.repository.exists() or store.checkpoints() == []


def test_a_flat_optimizer_state_with_a_cycle_is_rejected() -> None:
    with pytest.raises(InvalidInput, match=r"'weight'.*contains itself"):
        flatten_optimizer_state(*with_state(a_list()))


def test_a_load_into_a_cycle_is_rejected_before_anything_changes(store: casckpt.Store) -> None:
    casckpt.save_model_and_optim_state(store, *model_and_optimizer(), run="r", step=1)
    store.save({"w": torch.zeros(2)}, run="r", step=2)
    model, optimizer = with_state(a_list())
    before = model.weight.detach().clone()
    with pytest.raises(InvalidInput, match=r"'weight'.*contains itself"):
        casckpt.load_model_and_optim_state(store, "r@1", model, optimizer)
    assert torch.equal(model.weight, before)
    asked: dict[str, Any] = {"k": a_list(), "w": sharded()}
    with pytest.raises(CheckpointingException, match=r"\['k'\].*contains itself"):
        megatron.load(asked, casckpt.at(store, run="r", step=2))
    assert asked["w"].data.tolist() == [1, 1]


def test_a_state_nested_too_deeply_is_rejected(store: casckpt.Store) -> None:
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    for call, _ in SAVES.values():
        with pytest.raises((InvalidInput, CheckpointingException)):
            call(store, deep)


def test_metadata_with_a_cycle_is_left_out_and_named(store: casckpt.Store, caplog: pytest.LogCaptureFixture) -> None:
    branching: dict[str, Any] = {}
    branching |= {"a": branching, "b": [branching, branching]}
    found = [branching, *(make() for make in MAKERS)]
    saved = store.save({}, run="r", step=1, metadata={"good": 1, **{str(i): one for i, one in enumerate(found)}})
    assert saved.metadata == {"good": 1}
    assert "metadata['0']" in caplog.text


def test_dcp_stores_a_cycle_as_a_pickle(store: casckpt.Store) -> None:
    state = {"x": (a_list(),), "t": torch.ones(2)}
    for step, flatten in enumerate([True, False]):
        planner = DefaultSavePlanner(flatten_state_dict=flatten)
        dcp.save(state, StorageWriter(store, run="r", step=step), planner=planner)
        (read,) = store.read(f"r@{step}", keys=["x"])["x"]
        assert read[1] is read
    into: dict[str, Any] = {"x": (None,), "t": torch.zeros(2)}
    dcp.load(into, StorageReader(store, "r@0"))
    (found,) = into["x"]
    assert found[0] == 1
    assert found[1] is found
    assert into["t"].tolist() == [1, 1]


def test_the_planner_that_does_not_pickle_rejects_a_cycle(store: casckpt.Store) -> None:
    error = dcp.failure(
        lambda: dcp.save({"x": (a_list(),)}, StorageWriter(store, run="r", step=1), planner=PickleFreeSavePlanner())
    )
    assert "contains itself" in str(dcp.causes(error)[0])
    assert store.checkpoints() == []
    assert transactions(store) == []


def test_a_value_that_occurs_repeatedly_is_not_a_cycle(store: casckpt.Store) -> None:
    once = [1, {"a": (2,)}]
    value = {"one": once, "other": [once, once]}
    megatron.save({"k": value, "w": sharded()}, casckpt.at(store, run="r", step=1))
    assert megatron.load_common_state_dict(casckpt.at(store, run="r", step=1))["k"] == value
    casckpt.save_model_and_optim_state(store, *with_state(value), run="r", step=2)
    assert store.read("r@2", keys=["optim.state.*"])["optim"]["state"]["weight"]["odd"] == value
