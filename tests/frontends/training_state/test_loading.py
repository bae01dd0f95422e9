"""Loads into a model with a different dtype: state gets the dtype of its parameter or keeps its own, and training
continues."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import casckpt
from casckpt.errors import Mismatch
from casckpt.frontends.trainer import Checkpointer
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state
from tests.support.parallel import TOPOLOGIES, Factory, Stack, local
from tests.support.ranks import Pool
from tests.support.training import identical

LOW, HIGH = torch.bfloat16, torch.float32
NUMBERS = {"step", "mu_product", "eta", "mu"}
OPTIMIZERS: dict[str, Factory] = {
    "AdamW": partial(optim.AdamW, foreach=False),
    "AdamW, foreach": partial(optim.AdamW, foreach=True),
    "AdamW, fused": partial(optim.AdamW, fused=True),
    "Adam, amsgrad": partial(optim.Adam, amsgrad=True),
    "SGD, momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "SGD, fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adafactor": optim.Adafactor,
    "ASGD, foreach": partial(optim.ASGD, foreach=True),
    "NAdam": partial(optim.NAdam, foreach=False),
    "NAdam, foreach": partial(optim.NAdam, foreach=True),
    "RMSprop": partial(optim.RMSprop, momentum=0.5, centered=True),
    "Rprop": optim.Rprop,
    "Adagrad": optim.Adagrad,
    "LBFGS": partial(optim.LBFGS, max_iter=2),
}


def made(dtype: torch.dtype, factory: Factory, seed: int = 0) -> tuple[nn.Module, optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Linear(4, 3).to(dtype)
    return model, factory(model.parameters())


def step(model: nn.Module, optimizer: optim.Optimizer) -> None:
    def loss() -> float:
        optimizer.zero_grad()
        value = model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).square().sum()
        value.backward()
        return float(value.detach())

    loss()
    optimizer.step(loss)  # LBFGS needs a closure


def dtypes(optimizer: optim.Optimizer) -> dict[str, torch.dtype]:
    state = next(iter(optimizer.state.values()))
    return {name: value.dtype for name, value in state.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(("saved", "here"), [(HIGH, LOW), (LOW, HIGH)], ids=["lower", "higher"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_loaded_in_the_dtype_of_its_parameter_and_the_next_step_works(
    store: casckpt.Store, name: str, saved: torch.dtype, here: torch.dtype
) -> None:
    model, trained = made(saved, OPTIMIZERS[name])
    step(model, trained)
    save_model_and_optim_state(store, model, trained, run="a", step=1)
    for stepped in (False, True):
        fresh, other = made(here, OPTIMIZERS[name], 1)
        if stepped:
            step(fresh, other)
        load_model_and_optim_state(store, "a@1", fresh, other, cast=True)
        was, now = dtypes(trained), dtypes(other)
        follows = {key for key in was if was[key] == saved and key not in NUMBERS}
        assert now == was | dict.fromkeys(follows, here)
        for parameter, source in zip(fresh.parameters(), model.parameters(), strict=True):
            for key in follows.intersection(trained.state[source]):
                assert torch.equal(other.state[parameter][key], trained.state[source][key].to(here))
        step(fresh, other)


def test_state_whose_dtype_differs_from_its_parameter_keeps_its_dtype(store: casckpt.Store) -> None:
    model, trained = made(HIGH, optim.AdamW)
    step(model, trained)
    state = trained.state[next(model.parameters())]
    state["exp_avg"] = state["exp_avg"].bfloat16()
    state |= {"codes": torch.ones(3, 4, dtype=torch.uint8), "mine": torch.ones(7), "half": torch.ones(2).half()}
    state["deep"] = {"step": torch.ones(1)}
    save_model_and_optim_state(store, model, trained, run="a", step=1)
    same, other = made(HIGH, optim.AdamW, 1)
    for cast in (False, True):
        load_model_and_optim_state(store, "a@1", same, other, cast=cast)
        assert identical(other.state[next(same.parameters())], state)
    double, other = made(torch.float64, optim.AdamW, 1)
    load_model_and_optim_state(store, "a@1", double, other, cast=True)
    wide = {"exp_avg_sq": torch.float64, "mine": torch.float64}
    assert dtypes(other) == {key: value.dtype for key, value in state.items() if isinstance(value, torch.Tensor)} | wide
    assert identical(other.state[next(double.parameters())]["deep"], state["deep"])


def test_state_that_an_optimizer_excludes_from_casts_keeps_its_dtype(store: casckpt.Store) -> None:
    class Eight(optim.AdamW):
        """An optimizer that excludes state from casts in the same way as bitsandbytes."""

        non_castable_tensor_keys = frozenset(("exp_avg_sq",))

    model, trained = made(HIGH, Eight)
    step(model, trained)
    save_model_and_optim_state(store, model, trained, run="a", step=1)
    fresh, other = made(LOW, Eight)
    load_model_and_optim_state(store, "a@1", fresh, other, cast=True)
    assert dtypes(other) == {"step": HIGH, "exp_avg": LOW, "exp_avg_sq": HIGH}


@pytest.mark.parametrize("pre_download", [False, True])
def test_a_checkpointer_loads_and_resumes_into_a_different_dtype(store: casckpt.Store, pre_download: bool) -> None:
    model, trained = made(HIGH, optim.AdamW)
    step(model, trained)
    with Checkpointer(store, run="a", pre_download=pre_download) as checkpointer:
        checkpointer.save(1, model, trained, {"epoch": 1})
        fresh, other = made(LOW, optim.AdamW, 1)
        before = [parameter.detach().clone() for parameter in fresh.parameters()]
        with pytest.raises(Mismatch, match="pass cast=True"):
            checkpointer.resume(fresh, other)
        assert identical([parameter.detach() for parameter in fresh.parameters()], before)
        assert checkpointer.load("a@1", fresh, other, cast=True) == {"epoch": 1}
        step(fresh, other)
        fresh, other = made(LOW, optim.AdamW, 1)
        assert checkpointer.resume(fresh, other, cast=True) is not None
    assert dtypes(other) == {"step": HIGH, "exp_avg": LOW, "exp_avg_sq": LOW}
    step(fresh, other)


def shards_in_another_dtype(rank: int, size: int, path: Path, topologies: list[str], full: bool) -> None:
    for number, (topology, (saved, here)) in enumerate(product(topologies, [(HIGH, LOW), (LOW, HIGH)])):
        trained = trained_in(topology, saved, 1)
        run = f"{topology}-{saved}".replace(" ", "-")
        save_model_and_optim_state(path, *trained, run=run, step=1)
        for foreach in (False, True) if full else (number in (1, 2),):
            fresh, other = built(topology, here, 2, foreach)
            load_model_and_optim_state(path, f"{run}@1", fresh, other, cast=True)
            pairs = zip(trained[1].param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
            for source, parameter in pairs:
                for key, value in trained[1].state.get(source, {}).items():
                    wanted = local(value) if key == "step" else local(value).to(here)
                    assert torch.equal(local(other.state[parameter][key]), wanted), (topology, key)
            train(fresh, other, here)


def built(topology: str, dtype: torch.dtype, seed: int, foreach: bool) -> tuple[nn.Module, optim.Optimizer]:
    model = TOPOLOGIES[topology][1](Stack(seed, 1).to(dtype))
    return model, optim.AdamW(model.parameters(), foreach=foreach)


def trained_in(topology: str, dtype: torch.dtype, seed: int) -> tuple[nn.Module, optim.Optimizer]:
    model, optimizer = built(topology, dtype, seed, False)
    train(model, optimizer, dtype)
    return model, optimizer


def train(model: nn.Module, optimizer: optim.Optimizer, dtype: torch.dtype) -> None:
    optimizer.zero_grad()
    model(torch.ones(5, 6, dtype=dtype)).float().square().sum().backward()
    optimizer.step()


def test_shards_can_be_loaded_into_a_different_dtype(store_path: Path, ranks: Pool, full: bool) -> None:
    ranks.run(2, shards_in_another_dtype, store_path, ["fsdp2 on 2", "fsdp1 nested"], full)


def test_the_plug_ins_accept_the_cast_option(store: casckpt.Store) -> None:
    accelerate: Any = pytest.importorskip("accelerate", reason="needs casckpt[transformers]")
    from casckpt.frontends.accelerate import AcceleratorCheckpointer

    def prepared(dtype: torch.dtype) -> tuple[AcceleratorCheckpointer, nn.Module, optim.Optimizer]:
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(*made(dtype, optim.AdamW))
        return AcceleratorCheckpointer(accelerator, store, run="a"), model, optimizer

    checkpointer, model, optimizer = prepared(HIGH)
    step(model, optimizer)
    checkpointer.save(1)
    for number in range(2):
        checkpointer, model, optimizer = prepared(LOW)
        if number:
            checkpointer.resume(cast=True)
        else:
            checkpointer.load("a@1", cast=True)
        assert dtypes(optimizer)["exp_avg"] == LOW
        step(model, optimizer)
