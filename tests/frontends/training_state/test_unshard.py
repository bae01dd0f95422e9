"""Wrappers and their names, extra state, hooks, and state that is taken out of a checkpoint without a model."""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import casckpt
from casckpt.errors import InvalidInput, MissingKey
from casckpt.format.sections.index import Entry
from casckpt.frontends.training_state import (
    flatten_optimizer_state,
    load_model_and_optim_state,
    save_model_and_optim_state,
    unflatten_optimizer_state,
    unshard_model_state,
    unshard_optim_state,
)
from casckpt.frontends.training_state.flat import FlatPart, flat_parts, reshard
from casckpt.frontends.training_state.holding import Holding
from casckpt.frontends.training_state.names import WRAPPERS, parameter_names, plain_name, wrapped_child
from casckpt.frontends.training_state.stored import is_step, steps_on_cpu
from tests.support.training import Network, bytes_of, everything, identical, train

# names


class Named(nn.Module):
    """Submodules with the names that wrappers use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.module: nn.Module = nn.Linear(3, 3)
        self._orig_mod = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._orig_mod(self.module(x))
        return found


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist: Any = torch.distributed
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "rendezvous"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    found: Any = torch.compile(model, backend="eager")
    assert isinstance(found, nn.Module)
    return found


def inside(model: Named) -> Named:
    model.module = checkpoint_wrapper(compiled(model.module))
    model._orig_mod[1] = checkpoint_wrapper(model._orig_mod[1])
    return model


WRAPS: dict[str, Callable[[Any], nn.Module]] = {
    "nothing": lambda model: model,
    "DDP": nn.parallel.DistributedDataParallel,
    "DataParallel": lambda model: nn.DataParallel(model).cpu(),  # where there is one GPU it moves there
    "compile": compiled,
    "checkpoint": checkpoint_wrapper,
    "DDP of compile": lambda model: nn.parallel.DistributedDataParallel(compiled(model)),
    "compile of DDP": lambda model: compiled(nn.parallel.DistributedDataParallel(model)),
    "within": inside,
    "all": lambda model: compiled(nn.parallel.DistributedDataParallel(checkpoint_wrapper(inside(model)))),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap", WRAPS)
def test_keys_are_those_of_the_plain_model(store: casckpt.Store, wrap: str) -> None:
    plain = Named(1)
    names = list(plain.state_dict())
    metadata = plain.state_dict()._metadata  # type: ignore[attr-defined]  # torch hangs it on the dict
    wrapped = WRAPS[wrap](Named(1))
    trained = optim.AdamW(wrapped.parameters())
    for parameter in wrapped.parameters():
        parameter.grad = torch.ones_like(parameter)
    trained.step()
    saved = save_model_and_optim_state(store, wrapped, trained, run="a", step=1)
    assert [key for key in saved.tensors if key.startswith("model.")] == [f"model.{name}" for name in names]
    parameters = [name for name, _ in plain.named_parameters()]
    assert store.read("a@1")["optim"]["param_groups"][0]["params"] == parameters
    assert unshard_model_state(store, "a@1")._metadata == metadata  # type: ignore[attr-defined]  # torch hangs it on the dict

    other = optim.AdamW(plain.parameters())  # out of the wrapper, and into another
    load_model_and_optim_state(store, "a@1", plain, other)
    again = WRAPS[wrap](Named(2))
    third = optim.AdamW(again.parameters())
    load_model_and_optim_state(store, "a@1", again, third)
    for optimizer in (other, third):
        assert identical(optimizer.state_dict(), trained.state_dict())
    for model in (plain, again):
        assert [bytes_of(one) for one in model.state_dict().values()] == [
            bytes_of(one) for one in wrapped.state_dict().values()
        ]


def test_a_module_of_the_user_keeps_its_name() -> None:
    model = Named(1)
    assert all(plain_name(model, name) == name for name in model.state_dict())
    assert [wrapped_child(module) for module in model.modules()] == [None] * 5


def test_a_subclass_of_a_wrapper_wraps() -> None:
    class Mine(nn.DataParallel[Any]):
        pass

    assert plain_name(Mine(Named(1)), "module.module.weight") == "module.weight"


@pytest.mark.parametrize(("name", "child"), WRAPPERS.items())
def test_the_wrappers_are_where_torch_has_them(name: str, child: str) -> None:
    """Megatron-FSDP, which need not be installed, is taken to have its own where its version 0.6.1 has it."""
    place, _, name_of_kind = name.rpartition(".")
    if place.startswith("torch."):
        found = getattr(importlib.import_module(place), name_of_kind)
    else:
        found = type(name_of_kind, (nn.Module,), {"__module__": place})
    assert f"{found.__module__}.{found.__qualname__}" == name
    kind: Any = type(found.__name__, (found,), {"forward": None})  # one of them is abstract
    made: nn.Module = object.__new__(kind)
    vars(made)["_modules"] = {child: nn.Linear(1, 1)}
    assert plain_name(made, f"{child}.weight") == "weight"
    assert plain_name(made, "weight") == "weight"  # where a hook has removed it already
    assert plain_name(made, child) == ""


def test_two_parameters_of_one_plain_name_are_refused() -> None:
    class Twice(nn.DataParallel[Any]):
        pass

    wrapper = Twice(nn.Linear(1, 1))
    wrapper.add_module("weight", nn.Linear(1, 1))
    wrapper.register_parameter("bias", nn.Parameter(torch.ones(1)))
    with pytest.raises(InvalidInput, match="'bias'"):
        parameter_names(wrapper)


# extra state


class Extra(nn.Linear):
    """A layer with state of its own."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra",
    [None, 7, {"amax": [1.0, 2.0]}, {}, {"history": torch.ones(3), "deep": [torch.zeros(2), "x"]}, torch.arange(4)],
)
def test_extra_state(store: casckpt.Store, extra: Any) -> None:
    save_model_and_optim_state(store, nn.Sequential(Extra(extra)), run="a", step=1)
    for there in (None, {"other": torch.ones(1)}, torch.zeros(9)):
        fresh = Extra(there)
        load_model_and_optim_state(store, "a@1", nn.Sequential(fresh))
        assert identical(fresh.extra, extra)
    assert identical(unshard_model_state(store, "a@1")["0._extra_state"], extra)


class Odd:
    """What is no plain data."""

    x = 0


def test_extra_state_that_is_no_plain_data_is_refused_by_name(store: casckpt.Store) -> None:
    odd = Odd()
    odd.x = 7
    model = nn.Sequential(Extra(odd))
    with pytest.raises(InvalidInput, match=r"model\.0\._extra_state"):
        save_model_and_optim_state(store, model, run="a", step=1)
    save_model_and_optim_state(store, model, run="a", step=1, allow_pickle=True)
    fresh = Extra(None)
    load_model_and_optim_state(store, "a@1", nn.Sequential(fresh), allow_pickle=True)
    assert fresh.extra.x == 7


def test_extra_state_that_the_checkpoint_lacks(store: casckpt.Store) -> None:
    model = nn.Linear(2, 2)
    save_model_and_optim_state(store, model, run="a", step=1)
    fresh = Extra("mine")
    with pytest.raises(MissingKey, match="_extra_state"):
        load_model_and_optim_state(store, "a@1", fresh)
    load_model_and_optim_state(store, "a@1", fresh, strict=False)
    assert fresh.extra == "mine"
    assert torch.equal(fresh.weight, model.weight)


# hooks


class Transposed(nn.Module):
    """Its state_dict holds the weight another way round than the module does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, generator=torch.Generator().manual_seed(seed)))
        self.loads = 0
        hooked: Any = self  # torch has no types for these
        hooked.register_state_dict_post_hook(lambda module, state, prefix, local: turn(state, prefix))
        hooked.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: turn(state, prefix))
        hooked.register_load_state_dict_post_hook(lambda module, keys: module.loaded())

    def loaded(self) -> None:
        self.loads += 1


def turn(state: Any, prefix: str) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].t().contiguous()


def test_hooks_of_a_module_are_heeded(store: casckpt.Store) -> None:
    model, fresh = Transposed(1), Transposed(2)
    saved = save_model_and_optim_state(store, model, run="a", step=1)
    assert saved.tensors["model.weight"].shape == (2, 3)
    load_model_and_optim_state(store, "a@1", fresh)
    assert torch.equal(fresh.weight, model.weight)
    assert fresh.loads == 1


def test_hooks_of_an_optimizer_are_heeded(store: casckpt.Store) -> None:
    seen: list[str] = []
    model = Network(1)
    trained = optim.AdamW(model.parameters())
    trained.register_state_dict_post_hook(lambda optimizer, state: seen.append("save"))
    trained.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append("before"))
    trained.register_load_state_dict_post_hook(lambda optimizer: seen.append("after"))
    save_model_and_optim_state(store, model, trained, run="a", step=1)
    load_model_and_optim_state(store, "a@1", model, trained)
    assert seen == ["save", "before", "after"]


# without a model


def two_groups(model: Network) -> optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": model.head.parameters()}, {"params": model.norm.parameters()}]
    return optim.AdamW(groups, lr=0.1)


@pytest.fixture
def saved(store: casckpt.Store) -> tuple[Network, optim.Optimizer]:
    """Saved as a@2: two groups, state of all but the frozen parameters."""
    model = Network(1)
    trained = two_groups(model)
    train(model, trained, range(2))
    save_model_and_optim_state(store, model, trained, run="a", step=2)
    return model, trained


def test_a_models_state(store: casckpt.Store, saved: tuple[Network, optim.Optimizer]) -> None:
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
def test_a_part_of_a_models_state(
    store: casckpt.Store, saved: tuple[Network, optim.Optimizer], keys: list[str], names: list[str] | None
) -> None:
    state = saved[0].state_dict()
    found = unshard_model_state(store, "a@2", keys=keys)
    assert sorted(found) == sorted(state if names is None else names)
    assert all(identical(found[name], state[name]) for name in found)


def test_names_that_begin_with_model(store: casckpt.Store) -> None:
    model = nn.ModuleDict({"model": nn.Linear(1, 1), "head": nn.Linear(1, 1)})
    save_model_and_optim_state(store, model, run="a", step=1)
    assert list(unshard_model_state(store, "a@1", keys=["model.*"])) == ["model.weight", "model.bias"]


def test_a_models_state_as_another_front_end_nests_it(store: casckpt.Store) -> None:
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


def test_an_optimizers_state_as_another_front_end_nests_it(
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


def test_what_nothing_matches_is_an_error(store: casckpt.Store, saved: tuple[Network, optim.Optimizer]) -> None:
    for pattern in ("haed.*", "optim.*"):
        with pytest.raises(MissingKey, match="matches"):
            unshard_model_state(store, "a@2", keys=[pattern])
    with pytest.raises(MissingKey, match="matches"):
        unshard_optim_state(store, "a@2", keys=["haed.*"])
    store.save({"x": torch.ones(1)}, run="b", step=1)
    with pytest.raises(MissingKey, match="no model"):
        unshard_model_state(store, "b@1")


def test_an_optimizers_state_by_number_and_by_name(
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
    ("keys", "parts"),
    [
        (["head.*"], {"head.weight": ["step", "exp_avg", "exp_avg_sq"]}),
        (["*.exp_avg"], {name: ["exp_avg"] for name in ("head.weight", "norm.weight", "norm.bias")}),
        (["optim.state.norm.*.step"], {"norm.weight": ["step"], "norm.bias": ["step"]}),
        (["head.weight", "norm.bias.step"], {"head.weight": ["step", "exp_avg", "exp_avg_sq"], "norm.bias": ["step"]}),
    ],
)
def test_a_part_of_an_optimizers_state(
    store: casckpt.Store, saved: tuple[Network, optim.Optimizer], keys: list[str], parts: dict[str, list[str]]
) -> None:
    found = unshard_optim_state(store, "a@2", keys=keys, by_name=True)
    assert {name: list(state) for name, state in found["state"].items()} == parts
    whole = unshard_optim_state(store, "a@2", by_name=True)
    assert identical(found["param_groups"], whole["param_groups"])
    assert all(
        identical(value, whole["state"][n][k]) for n, state in found["state"].items() for k, value in state.items()
    )


def test_a_device(store: casckpt.Store, saved: tuple[Network, optim.Optimizer]) -> None:
    assert unshard_model_state(store, "a@2", device=torch.device("cpu"))["counts"].device.type == "cpu"
    for unshard in (unshard_model_state, unshard_optim_state):
        with pytest.raises(InvalidInput, match="device='nowhere' is not usable"):
            unshard(store, "a@2", device="nowhere")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_that_is_not_there(store: casckpt.Store, saved: tuple[Network, optim.Optimizer]) -> None:
    for unshard in (unshard_model_state, unshard_optim_state):
        with pytest.raises(InvalidInput, match="cannot be made on cuda"):
            unshard(store, "a@2", device="cuda")


def test_patterns(store: casckpt.Store, saved: tuple[Network, optim.Optimizer]) -> None:
    """One text is one pattern, as for `Store.read`."""
    assert list(unshard_model_state(store, "a@2", keys="counts")) == ["counts"]
    first = unshard_optim_state(store, "a@2", keys=["norm.*"], by_name=True)["state"]
    assert identical(unshard_optim_state(store, "a@2", keys="norm.*", by_name=True)["state"], first)
    for unshard in (unshard_model_state, unshard_optim_state):
        with pytest.raises(InvalidInput, match="give a list of patterns"):
            unshard(store, "a@2", keys=5)  # type: ignore[arg-type]  # what is refused


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
def test_where_a_fresh_optimizer_gets_its_state(
    store: casckpt.Store, what: str, options: dict[str, Any], on_cpu: bool
) -> None:
    shape = (3, 2) if what == "exp_avg" else ()
    entry = Entry("tensor", "x", 0, None, "float32", 4, shape, 0)
    assert (is_step(entry, f"deep.{what}") and steps_on_cpu(None, options)) is on_cpu
    asgd = optim.ASGD([torch.ones(1)])
    assert not steps_on_cpu(asgd, options)  # the one optimizer of torch that counts on the device
    like = torch.empty(2, 3, device="meta").t()
    holding = Holding("w", like, None)
    made = holding.destination(entry, None, torch.device("meta"), set(), added=False)
    assert made.is_meta
    assert made.shape == entry.shape
    assert holding.destination(entry, None, torch.device("cpu"), set(), added=False).device.type == "cpu"


def test_state_of_a_flat_part_of_a_parameter_is_of_the_same_elements() -> None:
    parameter, cpu = nn.Parameter(torch.zeros(3)), torch.device("cpu")
    holding = Holding("w", parameter, FlatPart(parameter, parameter.detach(), (4, 3), 5, 8, everywhere=False))
    entry = Entry("tensor", "x", 0, None, "float32", 4, (4, 3), 0)
    there = torch.ones(3)
    found = holding.destination(entry, there, cpu, set(), added=False)
    assert (found.data is there, found.shape, found.flat) == (True, (4, 3), ((5, 8),))
    for unfit, taken in ((None, 0), (torch.ones(4), 0), (there.double(), 0), (there, there.data_ptr())):
        made = holding.destination(entry, unfit, cpu, {taken}, added=False)
        assert made.data is not unfit
        assert (made.data.shape, made.data.dtype, made.flat) == ((3,), torch.float32, ((5, 8),))
    assert holding.as_saved({"exp_avg": there})["exp_avg"].flat == ((5, 8),)
    assert not holding.is_nothing
    assert Holding("w", parameter, FlatPart(parameter, there[:0], (4, 3), 0, 0, everywhere=False)).is_nothing


def test_where_fsdp_is_not_loaded_nothing_is_wrapped_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch.distributed.fsdp", "torch.distributed.fsdp.fully_sharded_data_parallel"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert flat_parts(Network(1)) == {}
    reshard(Network(1))


def test_the_only_rank_is_rank_0(store: casckpt.Store, saved: tuple[Network, optim.Optimizer]) -> None:
    choices: list[dict[str, Any]] = [{"rank0_only": True}, {"no_dist": True}, {"rank0_only": True, "no_dist": True}]
    for flags in choices:
        assert identical(unshard_model_state(store, "a@2", **flags), saved[0].state_dict())
        assert identical(unshard_optim_state(store, "a@2", **flags), saved[1].state_dict())


def test_a_flat_state_must_be_whole() -> None:
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
