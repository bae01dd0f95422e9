"""Keys and nesting of DCP's metadata, and the tree of a checkpoint."""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import casckpt
from casckpt.errors import InvalidInput
from casckpt.frontends.dcp import StorageReader, StorageWriter
from tests.support.dcp import causes, failure, load, save, zeros
from tests.support.together import numbers
from tests.support.torch_versions import needs_torch
from tests.support.training import Network, identical, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


Store = casckpt.Store


def trained(steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Network(1)
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, optim, range(steps))
    return model, optim


# equal to a save by `Store.save`


def test_a_model_and_its_optimizer_load_through_dcp_and_the_native_api(store: Store) -> None:
    model, optim = trained()
    state = {"model": model.state_dict(), "optim": optim.state_dict()}
    figures = {"loss": 1.5, "grad": float("inf")}
    save(
        state,
        StorageWriter(store, run="dcp", step=1, metadata={"loss": 1.5}, metrics=figures, healthy=False, health=True),
    )
    store.save(state, run="native", step=1)
    assert store.get("native@1").stats.bytes_written == 0  # the same cells
    assert store.get("dcp@1").metadata == {"loss": 1.5}
    assert (store.get("dcp@1").metrics, store.get("dcp@1").healthy) == (figures, False)
    assert (store.get("dcp@1").health or {}).keys() == store.get("dcp@1").tensors.keys()
    for ref in ("dcp@1", "native@1"):
        through_dcp = {"model": zeros(model.state_dict()), "optim": Optim(optim).state_dict()}
        load(through_dcp, StorageReader(store, ref))
        assert identical(dict(through_dcp["model"]), dict(state["model"]))
        assert identical(through_dcp["optim"], state["optim"])
        native = {"model": zeros(model.state_dict()), "optim": None}
        store.load(native, ref)
        assert identical(dict(native["model"]), dict(state["model"]))
        assert native["optim"]["param_groups"] == state["optim"]["param_groups"]


class Optim:
    """An optimizer's state, without its parameter numbers."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        found = optim.state_dict()
        self.state = {"state": zeros(found["state"]), "param_groups": [dict.fromkeys(g) for g in found["param_groups"]]}

    def state_dict(self) -> dict[str, Any]:
        return self.state


def test_dcp_saves_and_loads_an_empty_state(store: Store) -> None:
    save({}, StorageWriter(store, step=1, attachments={"a.json": b"{}", "long": b"x" * 5000}))
    assert store.read("default@1") == {}
    assert store.read_attachment("default@1", "long") == b"x" * 5000


# features


def test_dcp_saves_and_loads_stateful_objects(store: Store) -> None:
    model, _ = trained()
    save({"model": model}, StorageWriter(store, step=1))
    other = Network(5)
    load({"model": other}, StorageReader(store, "default@1"))
    assert identical(dict(other.state_dict()), dict(model.state_dict()))


@needs_torch("2.8", "loads without a state from _load_state_dict_from_keys")
def test_keys_do_not_depend_on_the_front_end_that_saved(store: Store) -> None:
    state = {"model": {"a": numbers("a", 4), "b": {"c": 5}}, "steps": {0: torch.ones(1)}, "l": [{"x": 1}, {"x": 2}]}
    state |= {"nested": [[torch.ones(2), 1], 2]}
    save(state, StorageWriter(store, run="dcp", step=1))
    store.save(state, run="native", step=1)
    for ref in ("dcp@1", "native@1"):
        whole = _load_state_dict_from_keys(storage_reader=StorageReader(store, ref))
        assert identical(whole, state | {"steps": {"0": torch.ones(1)}})
        assert "nested.0.0" in StorageReader(store, ref).read_metadata().state_dict_metadata
        part = _load_state_dict_from_keys({"model.b", "l"}, storage_reader=StorageReader(store, ref))
        assert part == {"model": {"b": {"c": 5}}, "l": [{"x": 1}, {"x": 2}]}


# the examples in torch's documentation of planners


class RenamingSave(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({"foo_" + k: v for k, v in state_dict.items()}, storage_meta, is_coordinator)


def test_a_planner_can_rename_on_save(store: Store) -> None:
    save({"a": {"w": torch.ones(2)}, "n": 3}, StorageWriter(store, step=1), planner=RenamingSave())
    assert identical(store.read("default@1"), {"foo_a": {"w": torch.ones(2)}, "foo_n": 3})


# equal to a save by `Store.save`


class Colour(enum.Enum):
    RED = 1


def test_a_list_that_is_only_partly_described_by_dcp_is_loaded(store: Store) -> None:
    """DCP's metadata has no entry for an empty container."""
    state = {"l": [{}, {"x": torch.ones(2)}, {"y": 1}], "whole": [{"z": 1}, {"x": torch.ones(2)}]}
    save(state, StorageWriter(store, step=1))
    assert identical(store.read("default@1"), state | {"l": {1: {"x": torch.ones(2)}, 2: {"y": 1}}})
    told = StorageReader(store, "default@1").read_metadata()
    assert told.planner_data["l.1.x"] == ("l", 1, "x")


# the examples in torch's documentation of planners


class ExtraData(DefaultSavePlanner):
    data: Any = "per-rank-custom-data"

    def create_local_plan(self) -> SavePlan:
        return replace(super().create_local_plan(), planner_data=self.data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=[plan.planner_data for plan in plans])


class PickledExtra(ExtraData):
    data = Colour.RED


def test_a_planner_can_save_extra_planner_data(store: Store) -> None:
    state = {"a": torch.ones(2), "b": 1}
    save(state, StorageWriter(store, step=1), planner=ExtraData(flatten_state_dict=False))
    assert StorageReader(store, "default@1").read_metadata().planner_data == ["per-rank-custom-data"]
    into = {"a": torch.zeros(2), "b": 0}
    load(into, StorageReader(store, "default@1"), planner=DefaultLoadPlanner(False, flatten_sharded_tensors=False))
    assert identical(into, state)
    error = failure(lambda: save(state, StorageWriter(store, step=2), planner=PickledExtra(flatten_state_dict=False)))
    assert "planner_data" in str(causes(error)[0])
    assert "allow_pickle=True" in str(causes(error)[0])
    save(state, StorageWriter(store, step=2, allow_pickle=True), planner=PickledExtra(flatten_state_dict=False))
    reader = StorageReader(store, "default@2", allow_pickle=True)
    assert reader.read_metadata().planner_data == [Colour.RED]
    with pytest.raises(InvalidInput, match="allow_pickle=True"):
        StorageReader(store, "default@2").read_metadata()
