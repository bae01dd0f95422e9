"""The note for DCP preserves structure that the tree does not hold."""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

import casckpt
from casckpt.errors import InvalidInput
from casckpt.frontends.dcp import StorageReader, StorageWriter
from tests.support.dcp import causes, failure, load, save
from tests.support.training import identical

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


Store = casckpt.Store


# equal to a save by `Store.save`


class Colour(enum.Enum):
    RED = 1


def test_a_list_that_dcp_describes_only_partly_is_loaded(store: Store) -> None:
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


def test_pattern_extra_planner_data(store: Store) -> None:
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
