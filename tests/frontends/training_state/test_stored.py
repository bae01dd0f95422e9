"""Optimizer state in a checkpoint, by name and by number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

import casckpt
from casckpt.format.sections.index import Entry
from casckpt.frontends.training_state import load_model_and_optim_state, unshard_optim_state
from casckpt.frontends.training_state.holding import Holding
from casckpt.frontends.training_state.stored import is_step, steps_on_cpu
from tests.frontends.training_state.conftest import two_groups
from tests.support.training import Network, identical


def test_optimizer_state_that_a_different_front_end_nested_is_found(
    store: casckpt.Store, saved: tuple[Network, optim.Optimizer]
) -> None:
    state = store.read("a@2")
    nested: dict[str, Any] = {}
    for name, value in state["optim"]["state"].items():
        layer, _, leaf = name.rpartition(".")
        nested.setdefault(layer, {})[leaf] = value
    store.save({**state, "optim": {**state["optim"], "state": nested}}, run="b", step=2)
    assert identical(unshard_optim_state(store, "b@2"), saved[1].state_dict())
    model = Network(2)
    trained = two_groups(model)
    load_model_and_optim_state(store, "b@2", model, trained)
    assert identical(trained.state_dict(), saved[1].state_dict())


def test_optimizer_state_by_number_and_by_name_is_found(
    store: casckpt.Store, saved: tuple[Network, optim.Optimizer]
) -> None:
    model, trained = saved
    by_number = unshard_optim_state(store, "a@2")
    assert identical(by_number, trained.state_dict())
    trained.load_state_dict(by_number)
    by_name = unshard_optim_state(store, "a@2", by_name=True)
    assert [group["params"] for group in by_name["param_groups"]] == [["head.weight"], ["norm.weight", "norm.bias"]]
    assert identical(by_name["state"]["norm.bias"], trained.state[model.norm.bias])


@pytest.mark.parametrize(
    ("what", "options", "on_cpu"),
    [
        ("step", {}, True),
        ("step", {"capturable": False, "fused": None}, True),
        ("step", {"capturable": True}, False),
        ("step", {"fused": True}, False),
        ("mu_product", {"capturable": False}, True),
        ("exp_avg", {}, False),
        ("scale", {}, False),
    ],
)
def test_a_fresh_optimizer_finds_its_stored_state(
    store: casckpt.Store, what: str, options: dict[str, Any], on_cpu: bool
) -> None:
    shape = (3, 2) if what == "exp_avg" else ()
    entry = Entry("tensor", "x", 0, None, "float32", 4, shape, 0)
    assert (is_step(entry, f"deep.{what}") and steps_on_cpu(None, options)) is on_cpu
    asgd = optim.ASGD([torch.ones(1)])
    assert not steps_on_cpu(asgd, options)  # the only torch optimizer that keeps step counts on the device
    like = torch.empty(2, 3, device="meta").t()
    holding = Holding("w", like, None)
    made = holding.destination(entry, None, torch.device("meta"), set(), added=False)
    assert made.is_meta
    assert made.shape == entry.shape
    assert holding.destination(entry, None, torch.device("cpu"), set(), added=False).device.type == "cpu"
