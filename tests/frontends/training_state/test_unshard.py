"""Whole weights and optimizer state are read from a checkpoint without a model."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn, optim

import casckpt
from casckpt.errors import InvalidInput, MissingKey
from casckpt.frontends.training_state import (
    flatten_optimizer_state,
    load_model_and_optim_state,
    save_model_and_optim_state,
    unflatten_optimizer_state,
    unshard_model_state,
    unshard_optim_state,
)
from tests.support.training import Network, everything, identical, train

# without a model


def test_unshard_returns_the_whole_state_of_a_model(
    store: casckpt.Store, saved: tuple[Network, optim.Optimizer]
) -> None:
    found = unshard_model_state(store, "a@2")
    assert identical(found, saved[0].state_dict())
    Network(2).load_state_dict(found)
    assert isinstance(found, OrderedDict)
    assert found["head.weight"].data_ptr() != saved[0].head.weight.data_ptr()


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["head.*"], ["head.weight"]),
        (["*.weight", "counts"], ["frozen.weight", "norm.weight", "head.weight", "counts"]),
        (["model.head.*"], ["head.weight"]),
        (["model.*"], None),
    ],
)
def test_unshard_returns_selected_parts_of_the_state_of_a_model(
    store: casckpt.Store, saved: tuple[Network, optim.Optimizer], keys: list[str], names: list[str] | None
) -> None:
    state = saved[0].state_dict()
    found = unshard_model_state(store, "a@2", keys=keys)
    assert sorted(found) == sorted(state if names is None else names)
    assert all(identical(found[name], state[name]) for name in found)


def test_names_that_begin_with_model_are_unsharded(store: casckpt.Store) -> None:
    model = nn.ModuleDict({"model": nn.Linear(1, 1), "head": nn.Linear(1, 1)})
    save_model_and_optim_state(store, model, run="a", step=1)
    assert list(unshard_model_state(store, "a@1", keys=["model.*"])) == ["model.weight", "model.bias"]


def test_model_state_that_a_different_front_end_nested_is_unsharded(store: casckpt.Store) -> None:
    model = Network(1)
    nested: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        layer, _, leaf = name.rpartition(".")
        nested.setdefault(layer, {})[leaf] = value
    nested |= nested.pop("")
    store.save({"model": nested}, run="a", step=1)
    found = unshard_model_state(store, "a@1")
    assert sorted(found) == sorted(model.state_dict())
    fresh = Network(2)
    load_model_and_optim_state(store, "a@1", fresh)
    assert identical(fresh.state_dict(), model.state_dict())


def test_a_pattern_without_a_match_raises_an_error(
    store: casckpt.Store, saved: tuple[Network, optim.Optimizer]
) -> None:
    for pattern in ("haed.*", "optim.*"):
        with pytest.raises(MissingKey, match="matches"):
            unshard_model_state(store, "a@2", keys=[pattern])
    with pytest.raises(MissingKey, match="matches"):
        unshard_optim_state(store, "a@2", keys=["haed.*"])
    store.save({"x": torch.ones(1)}, run="b", step=1)
    with pytest.raises(MissingKey, match="no model"):
        unshard_model_state(store, "b@1")


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (["head.*"], {"head.weight": ["step", "exp_avg", "exp_avg_sq"]}),
        (["*.exp_avg"], {name: ["exp_avg"] for name in ("head.weight", "norm.weight", "norm.bias")}),
        (["optim.state.norm.*.step"], {"norm.weight": ["step"], "norm.bias": ["step"]}),
        (["head.weight", "norm.bias.step"], {"head.weight": ["step", "exp_avg", "exp_avg_sq"], "norm.bias": ["step"]}),
    ],
)
def test_part_of_an_optimizer_state_is_unsharded(
    store: casckpt.Store, saved: tuple[Network, optim.Optimizer], keys: list[str], parts: dict[str, list[str]]
) -> None:
    found = unshard_optim_state(store, "a@2", keys=keys, by_name=True)
    assert {name: list(state) for name, state in found["state"].items()} == parts
    whole = unshard_optim_state(store, "a@2", by_name=True)
    assert identical(found["param_groups"], whole["param_groups"])
    assert all(
        identical(value, whole["state"][n][k]) for n, state in found["state"].items() for k, value in state.items()
    )


def test_an_unsharded_state_is_on_the_requested_device(
    store: casckpt.Store, saved: tuple[Network, optim.Optimizer]
) -> None:
    assert unshard_model_state(store, "a@2", device=torch.device("cpu"))["counts"].device.type == "cpu"
    for unshard in (unshard_model_state, unshard_optim_state):
        with pytest.raises(InvalidInput, match="device='nowhere' is not valid"):
            unshard(store, "a@2", device="nowhere")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is available")
def test_an_unavailable_device_is_rejected(store: casckpt.Store, saved: tuple[Network, optim.Optimizer]) -> None:
    for unshard in (unshard_model_state, unshard_optim_state):
        with pytest.raises(InvalidInput, match=r"cannot allocate .* on cuda"):
            unshard(store, "a@2", device="cuda")


def test_patterns_select_the_keys_to_unshard(store: casckpt.Store, saved: tuple[Network, optim.Optimizer]) -> None:
    """A string is one pattern, as for `Store.read`."""
    assert list(unshard_model_state(store, "a@2", keys="counts")) == ["counts"]
    first = unshard_optim_state(store, "a@2", keys=["norm.*"], by_name=True)["state"]
    assert identical(unshard_optim_state(store, "a@2", keys="norm.*", by_name=True)["state"], first)
    for unshard in (unshard_model_state, unshard_optim_state):
        with pytest.raises(InvalidInput, match="pass a list of patterns"):
            unshard(store, "a@2", keys=5)  # type: ignore[arg-type]  # the invalid value


def test_options_for_ranks_do_not_affect_unshard_in_a_single_process(
    store: casckpt.Store, saved: tuple[Network, optim.Optimizer]
) -> None:
    choices: list[dict[str, Any]] = [{"rank0_only": True}, {"no_dist": True}, {"rank0_only": True, "no_dist": True}]
    for flags in choices:
        assert identical(unshard_model_state(store, "a@2", **flags), saved[0].state_dict())
        assert identical(unshard_optim_state(store, "a@2", **flags), saved[1].state_dict())


def test_an_incomplete_flat_state_is_rejected() -> None:
    model = Network(1)
    trained = optim.LBFGS(model.parameters(), max_iter=3)
    before = everything(model, trained)
    flat = flatten_optimizer_state(model, trained)
    assert identical(unflatten_optimizer_state(flat), trained.state_dict())
    assert identical(everything(model, trained), before)
    train(model, trained, range(2))
    flat = flatten_optimizer_state(model, trained)
    named = unflatten_optimizer_state(flat, by_name=True)
    assert named["param_groups"][0]["params"][0] == "frozen.weight"
    assert isinstance(named["state"]["frozen.weight"]["old_dirs"], list)
    assert flat["state.frozen.weight.d"] is trained.state[model.frozen.weight]["d"]
    del flat["state.frozen.weight.d"]
    with pytest.raises(InvalidInput, match=r"state\.frozen\.weight\.d"):
        unflatten_optimizer_state(flat)
    with pytest.raises(InvalidInput, match="tree"):
        unflatten_optimizer_state({})
