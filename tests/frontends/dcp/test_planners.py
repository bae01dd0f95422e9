"""Planners that return values without pickling them."""

from __future__ import annotations

import enum
import io

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import casckpt
from casckpt.errors import InvalidInput
from casckpt.frontends.dcp import PickleFreeLoadPlanner, PickleFreeSavePlanner, StorageReader, StorageWriter
from casckpt.frontends.dcp.planners import ValueStream, value_of
from tests.support.dcp import PLAIN, causes, failure, load, save
from tests.support.exact import same
from tests.support.together import numbers
from tests.support.training import identical

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


Store = casckpt.Store


class Colour(enum.Enum):
    RED = 1


def test_planners_work_without_pickle(store: Store) -> None:
    state = {"model": {"w": numbers("w", 3)}, "two": (torch.ones(2), 3), "groups": [{"lr": 0.1}]} | PLAIN
    save(state, StorageWriter(store, step=1), planner=PickleFreeSavePlanner())
    into = {"model": {"w": torch.zeros(3)}, "two": None, "groups": [{"lr": 0}]} | dict.fromkeys(PLAIN)
    del into["ordered"]
    load(into, StorageReader(store, "default@1"), planner=PickleFreeLoadPlanner())
    assert all(same(into[key], PLAIN[key]) for key in into if key in PLAIN)
    assert into["groups"] == [{"lr": 0.1}]
    assert torch.equal(into["two"][0], torch.ones(2))
    error = failure(lambda: save({"c": Colour.RED}, StorageWriter(store, step=2), planner=PickleFreeSavePlanner()))
    assert isinstance(causes(error)[0], InvalidInput)
    save({"c": Colour.RED}, StorageWriter(store, step=2, allow_pickle=True), planner=PickleFreeSavePlanner())
    with_leave = StorageReader(store, "default@2", allow_pickle=True)
    assert load({"c": None}, with_leave, planner=PickleFreeLoadPlanner())["c"] is Colour.RED
    # from a stream that a different process received
    assert value_of(io.BytesIO(ValueStream([3, "x"]).getvalue())) == [
        3,
        "x",
    ]


def test_a_state_that_is_not_flattened_has_one_value_per_key(store: Store) -> None:
    state = {"model.w": torch.ones(2), "rest": {"a": {"b": 1}, "t": torch.zeros(3)}}
    save(state, StorageWriter(store, step=1), planner=DefaultSavePlanner(flatten_state_dict=False))
    into = {"model.w": torch.zeros(2), "rest": None}
    load(into, StorageReader(store, "default@1"), planner=DefaultLoadPlanner(False, flatten_sharded_tensors=False))
    assert identical(into, state)
    assert store.read("default@1")["rest"]["a"] == {"b": 1}
