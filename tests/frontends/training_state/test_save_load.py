"""A model and any optimizer are saved and loaded bit for bit, into existing tensors."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

import casckpt
from casckpt.frontends.training_state import (
    flatten_optimizer_state,
    load_model_and_optim_state,
    save_model_and_optim_state,
    unflatten_optimizer_state,
    unshard_optim_state,
)
from tests.support.torch_versions import needs_torch
from tests.support.training import Factory, Network, Params, Refusing, Words, everything, identical, train

OPTIMIZERS: dict[str, Factory] = {
    "ASGD": partial(optim.ASGD, lr=0.1, t0=1),
    "Adadelta": partial(optim.Adadelta, lr=0.5),
    "Adafactor": partial(optim.Adafactor, lr=0.1),
    "Adagrad": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.3),
    "Adam": partial(optim.Adam, lr=0.1),
    "Adam, amsgrad": partial(optim.Adam, lr=0.1, amsgrad=True, foreach=False),
    "AdamW": partial(optim.AdamW, lr=0.1),
    "AdamW, fused": partial(optim.AdamW, lr=0.1, fused=True),
    "AdamW, foreach": partial(optim.AdamW, lr=0.1, foreach=True),
    "Adamax": partial(optim.Adamax, lr=0.1),
    "LBFGS": partial(optim.LBFGS, lr=0.1, max_iter=4, history_size=3),
    "LBFGS, line search": partial(optim.LBFGS, lr=0.1, max_iter=4, line_search_fn="strong_wolfe"),
    "NAdam": partial(optim.NAdam, lr=0.1),
    "RAdam": partial(optim.RAdam, lr=0.1),
    "RMSprop": partial(optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "Rprop": partial(optim.Rprop, lr=0.1),
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD, momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
}
OF_SPARSE: Factory = partial(optim.SparseAdam, lr=0.1)


def test_the_table_contains_every_torch_optimizer() -> None:
    known = {factory.func for factory in [*OPTIMIZERS.values(), OF_SPARSE] if isinstance(factory, partial)}
    kinds = {kind for kind in vars(optim).values() if inspect.isclass(kind) and issubclass(kind, Optimizer)}
    assert {kind.__name__ for kind in kinds - known} - {"Muon"} == {"Optimizer"}


def resumes_to_the_bit(store: casckpt.Store, factory: Factory, model: nn.Module, fresh: nn.Module) -> None:
    """Take three steps, save, and take three more.

    A new model and optimizer that load the save must continue identically.
    """
    trained = factory(p for p in model.parameters() if p.requires_grad)
    train(model, trained, range(3))
    before = everything(model, trained)
    save_model_and_optim_state(store, model, trained, run="a", step=3)
    assert identical(everything(model, trained), before)

    other = factory(p for p in fresh.parameters() if p.requires_grad)
    for group in other.param_groups:
        group["lr"] = 7.0
    load_model_and_optim_state(store, "a@3", fresh, other)
    assert identical(fresh.state_dict(), model.state_dict())
    assert identical(other.state_dict(), trained.state_dict())
    by_number = unshard_optim_state(store, "a@3")
    assert identical(by_number, trained.state_dict())
    assert identical(unflatten_optimizer_state(flatten_optimizer_state(model, trained)), trained.state_dict())

    train(model, trained, range(3, 6))
    train(fresh, other, range(3, 6))
    assert identical(fresh.state_dict(), model.state_dict())
    assert identical(other.state_dict(), trained.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_any_optimizer_resumes_bit_for_bit(store: casckpt.Store, name: str) -> None:
    resumes_to_the_bit(store, OPTIMIZERS[name], Network(1), Network(2))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_in_bfloat16_resumes_bit_for_bit(store: casckpt.Store, name: str) -> None:
    resumes_to_the_bit(store, OPTIMIZERS[name], Network(1, torch.bfloat16), Network(2, torch.bfloat16))


@needs_torch("2.9", "Muon")
def test_muon_resumes_bit_for_bit(store: casckpt.Store) -> None:
    layers = [nn.Linear(6, 4, bias=False).requires_grad_() for _ in range(2)]
    resumes_to_the_bit(store, partial(optim.Muon, lr=0.1), *layers)


def test_sparse_adam_resumes_bit_for_bit(store: casckpt.Store) -> None:
    resumes_to_the_bit(store, OF_SPARSE, Words(1), Words(2))


class Quantized(Optimizer):
    """An optimizer with state that `Optimizer.load_state_dict` would convert, and containers that it would not
    preserve."""

    def __init__(self, params: Params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        """Take a step without a useful effect."""
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                self._one(parameter, group["lr"])
        return loss

    def _one(self, parameter: torch.Tensor, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state["mean"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state["name"] = "quantized"
            state["scales"] = {"absmax": (torch.zeros(2, dtype=torch.float64), None), "history": []}
            state["step"] = 0
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        state["mean"].mul_(0.9).add_(gradient.float(), alpha=0.1)
        state["codes"].add_((state["mean"] * 16).to(torch.uint8))
        state["scales"]["absmax"][0].add_(gradient.double().abs().max())
        state["scales"]["history"].append(state["mean"].sum())
        state["step"] += 1
        with torch.no_grad():
            parameter.sub_((state["mean"] * (1 + state["codes"] % 3)).to(parameter.dtype), alpha=lr)


class Picky(Quantized):
    """An optimizer whose own load_state_dict reads state by number, as those of some packages do."""

    def load_state_dict(self, state_dict: Any) -> None:
        assert all(isinstance(key, int) for key in state_dict["state"])
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("kind", [Quantized, Picky])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_state_is_restored_in_its_saved_dtype(store: casckpt.Store, kind: Factory, dtype: torch.dtype) -> None:
    resumes_to_the_bit(store, kind, Network(1, dtype), Network(2, dtype))


def test_nan_payloads_and_other_bit_patterns_are_preserved(store: casckpt.Store) -> None:
    model, fresh = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    trained, other = optim.SGD(model.parameters(), momentum=0.9), optim.SGD(fresh.parameters(), momentum=0.9)
    odd = torch.tensor([0x7FC00123, -1, -(2**31), 1], dtype=torch.int32).view(torch.float32).view(2, 2)
    model.weight.data.copy_(odd)
    trained.state[model.weight]["momentum_buffer"] = odd.clone()
    save_model_and_optim_state(store, model, trained, run="a", step=0)
    load_model_and_optim_state(store, "a@0", fresh, other)
    assert identical(fresh.weight.data, odd)
    assert identical(other.state[fresh.weight]["momentum_buffer"], odd)


# no side effects, no steps


def test_a_save_before_the_first_step_neither_stores_nor_creates_state(store: casckpt.Store) -> None:
    model = Network(1).eval()
    model.norm.train()
    fresh = Refusing(model.parameters())
    before = everything(model, fresh)
    save_model_and_optim_state(store, model, fresh, run="a", step=0)
    flatten_optimizer_state(model, fresh)
    assert identical(everything(model, fresh), before)
    assert len(fresh.state) == 0
    assert store.read("a@0")["optim"]["state"] == {}
    assert unshard_optim_state(store, "a@0")["state"] == {}


def test_loading_into_a_fresh_optimizer_does_not_perform_a_step(store: casckpt.Store) -> None:
    model = Network(1)
    save_model_and_optim_state(store, model, Refusing(model.parameters()), run="a", step=0)
    weights = everything(model)[2]
    target = Network(2).eval()
    fresh = Refusing(target.parameters())
    load_model_and_optim_state(store, "a@0", target, fresh)
    assert len(fresh.state) == 0
    assert all(parameter.grad is None for parameter in target.parameters())
    assert not any(module.training for module in target.modules())
    assert identical({**everything(target)[2], "scratch": 0}, {**weights, "scratch": 0})


def test_loading_a_checkpoint_without_state_empties_the_optimizer(store: casckpt.Store) -> None:
    model = Network(1)
    trained = optim.AdamW(model.parameters())
    save_model_and_optim_state(store, model, trained, run="a", step=0)
    train(model, trained, range(2))
    load_model_and_optim_state(store, "a@0", model, trained)
    assert len(trained.state) == 0


def test_loading_fills_the_existing_tensors(store: casckpt.Store) -> None:
    model = Network(1)
    trained = optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    train(model, trained, range(2))
    saved = copy.deepcopy((model.state_dict(), trained.state_dict()))
    save_model_and_optim_state(store, model, trained, run="a", step=2)
    train(model, trained, range(2, 4))
    trained.param_groups[0]["lr"].fill_(5)
    where = [(id(tensor), tensor.data_ptr()) for tensor in all_tensors(model, trained)]
    load_model_and_optim_state(store, "a@2", model, trained)
    assert [(id(tensor), tensor.data_ptr()) for tensor in all_tensors(model, trained)] == where
    assert identical((model.state_dict(), trained.state_dict()), saved)


def all_tensors(model: nn.Module, trained: Optimizer) -> list[torch.Tensor]:
    state = [value for state in trained.state.values() for value in state.values()]
    return [*model.parameters(), *model.buffers(), trained.param_groups[0]["lr"], *state]


def test_state_tensors_that_share_memory_are_separated(store: casckpt.Store) -> None:
    model = nn.Linear(3, 2)
    trained = optim.AdamW(model.parameters())
    train_linear(model, trained)
    trained.state[model.bias]["step"].fill_(9)
    save_model_and_optim_state(store, model, trained, run="a", step=0)
    trained.state[model.bias]["step"] = trained.state[model.weight]["step"]
    load_model_and_optim_state(store, "a@0", model, trained)
    assert [float(trained.state[p]["step"]) for p in (model.weight, model.bias)] == [1, 9]


def train_linear(model: nn.Module, trained: Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    trained.step()


def test_state_is_loaded_in_the_memory_layout_of_its_parameter(store: casckpt.Store) -> None:
    model, fresh = (nn.Conv2d(3, 4, 2) for _ in range(2))
    for one in (model, fresh):
        one.weight.data = one.weight.data.to(memory_format=torch.channels_last)
    trained, other = optim.AdamW(model.parameters()), optim.AdamW(fresh.parameters())
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    trained.step()
    save_model_and_optim_state(store, model, trained, run="a", step=1)
    load_model_and_optim_state(store, "a@1", fresh, other)
    assert identical(other.state_dict(), trained.state_dict())
    strides = [opt.state[net.weight]["exp_avg"].stride() for net, opt in ((model, trained), (fresh, other))]
    assert strides[0] == strides[1] == model.weight.stride()


# options of groups


def test_all_optimizer_options_are_restored_including_tensors(store: casckpt.Store) -> None:
    def make(model: nn.Module, lr: Any, beta: float) -> Optimizer:
        betas = (torch.tensor(beta), torch.tensor(0.9))
        return optim.AdamW(model.parameters(), lr=lr, betas=betas, foreach=False, weight_decay=beta)

    model, fresh = Network(1), Network(2)
    trained = make(model, torch.tensor(0.1, dtype=torch.float64), 0.5)
    train(model, trained, range(2))
    trained.param_groups[0]["note"] = {"plain": [1, None, 2.5]}
    save_model_and_optim_state(store, model, trained, run="a", step=2)
    other = make(fresh, 3.0, 0.1)
    there = other.param_groups[0]["betas"][0]
    load_model_and_optim_state(store, "a@2", fresh, other)
    assert identical(other.state_dict(), trained.state_dict())
    assert other.param_groups[0]["betas"][0] is there
    assert identical(unflatten_optimizer_state(flatten_optimizer_state(model, trained)), trained.state_dict())
    assert identical(unshard_optim_state(store, "a@2"), trained.state_dict())


def test_a_scheduler_resumes_with_its_saved_state(store: casckpt.Store) -> None:
    def make(seed: int) -> tuple[Network, Optimizer, Any]:
        model = Network(seed)
        trained = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, trained, optim.lr_scheduler.StepLR(trained, 1, gamma=0.5)

    model, trained, scheduler = make(1)
    train(model, trained, range(2))
    scheduler.step()
    save_model_and_optim_state(store, model, trained, run="a", step=2, metadata={"scheduler": scheduler.state_dict()})
    fresh, other, second = make(2)
    found = load_model_and_optim_state(store, "a@2", fresh, other)
    second.load_state_dict(found.metadata["scheduler"])
    for one in (scheduler, second):
        one.optimizer.zero_grad()
        one.optimizer.step()
        one.step()
    assert other.param_groups[0]["lr"] == trained.param_groups[0]["lr"] == 0.025


def test_parameters_named_by_the_user_keep_their_names(store: casckpt.Store) -> None:
    model, fresh = Network(1), Network(2)
    trained = optim.AdamW(model.named_parameters())
    train(model, trained, range(1))
    save_model_and_optim_state(store, model, trained, run="a", step=1)
    other = optim.AdamW([(f"my.{name}", parameter) for name, parameter in fresh.named_parameters()])
    load_model_and_optim_state(store, "a@1", fresh, other)
    assert other.param_groups[0]["param_names"][0] == "my.frozen.weight"
    assert identical(other.state_dict()["state"], trained.state_dict()["state"])
