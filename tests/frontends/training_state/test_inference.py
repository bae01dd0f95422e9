"""Tensors created in inference mode are filled, and a load never creates such tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import casckpt
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state
from tests.support.training import identical


class Noting(nn.Linear):
    """A layer with extra state. It records whether autograd was enabled when the state was set."""

    grad: bool | None = None
    extra: Any = None

    def get_extra_state(self) -> Any:
        return torch.ones(2)

    def set_extra_state(self, state: Any) -> None:
        self.extra, self.grad = state, torch.is_grad_enabled()


def made(dtype: torch.dtype = torch.float32) -> Any:
    return nn.Sequential(Noting(4, 4), nn.BatchNorm1d(4)).to(dtype)


def step(model: nn.Module, optimizer: optim.Optimizer) -> None:
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def trained(store: casckpt.Store) -> tuple[nn.Module, optim.Optimizer]:
    model = made()
    optimizer = optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    step(model, optimizer)
    save_model_and_optim_state(store, model, optimizer, run="a", step=1)
    return model, optimizer


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_created_in_inference_mode_is_filled(
    store: casckpt.Store, trained: tuple[nn.Module, optim.Optimizer], dtype: torch.dtype, inside: bool
) -> None:
    with torch.inference_mode():
        model = made(dtype)
    with torch.inference_mode(inside):
        load_model_and_optim_state(store, "a@1", model, cast=True)
    assert model.get_parameter("0.weight").is_inference()
    for name, value in trained[0].state_dict().items():
        if isinstance(value, torch.Tensor) and "_extra_state" not in name:
            found = model.state_dict()[name]
            assert torch.equal(found, value.to(found.dtype)), name


def test_a_buffer_created_in_inference_mode_is_filled(
    store: casckpt.Store, trained: tuple[nn.Module, optim.Optimizer]
) -> None:
    model = made()
    with torch.inference_mode():
        model[1].running_mean = torch.zeros(4)
    load_model_and_optim_state(store, "a@1", model)
    assert torch.equal(model.get_buffer("1.running_mean"), trained[0].get_buffer("1.running_mean"))


Load = Callable[[casckpt.Store, nn.Module, optim.Optimizer], Any]
LOADS: dict[str, Load] = {
    "natively": lambda store, model, optimizer: load_model_and_optim_state(store, "a@1", model, optimizer),
    "by a Checkpointer": lambda store, model, optimizer: Checkpointer(store, run="a").resume(model, optimizer),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_training_continues_after_a_load_in_inference_mode(
    store: casckpt.Store, trained: tuple[nn.Module, optim.Optimizer], load: Load
) -> None:
    model = made()
    optimizer = optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    with torch.inference_mode():
        load(store, model, optimizer)
        assert torch.is_inference_mode_enabled()
    assert identical(optimizer.state_dict(), trained[1].state_dict())
    assert not model[0].extra.is_inference()
    step(model, optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.2)


def test_state_created_in_inference_mode_is_replaced(
    store: casckpt.Store, trained: tuple[nn.Module, optim.Optimizer]
) -> None:
    model = made()
    optimizer = optim.AdamW(model.parameters())
    with torch.inference_mode():
        for parameter in model.parameters():
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
    load_model_and_optim_state(store, "a@1", model, optimizer)
    assert identical(optimizer.state_dict(), trained[1].state_dict())
    step(model, optimizer)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_load_does_not_change_the_autograd_mode(
    store: casckpt.Store, trained: tuple[nn.Module, optim.Optimizer], enabled: bool
) -> None:
    model = made()
    with torch.set_grad_enabled(enabled):
        load_model_and_optim_state(store, "a@1", model)
    assert model[0].grad is enabled


def test_a_loaded_train_state_has_normal_tensors(store: casckpt.Store) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(store, run="a") as checkpointer:
        checkpointer.save(1, model, None, TrainState(rng=False, mean=torch.ones(2)))
        train = TrainState(rng=False, mean=None)
        with torch.inference_mode():
            checkpointer.resume(model, None, train)
    assert not train["mean"].is_inference()
