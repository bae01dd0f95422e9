"""Parameters keep their plain names in wrapped models."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import casckpt
from casckpt.errors import InvalidInput
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state, unshard_model_state
from casckpt.frontends.training_state.names import WRAPPERS, parameter_names, plain_name, wrapped_child
from tests.support.training import bytes_of, identical


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
    """A process group that has only this process."""
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
    "DataParallel": lambda model: nn.DataParallel(model).cpu(),  # it moves to the GPU if there is one
    "compile": compiled,
    "checkpoint": checkpoint_wrapper,
    "DDP of compile": lambda model: nn.parallel.DistributedDataParallel(compiled(model)),
    "compile of DDP": lambda model: compiled(nn.parallel.DistributedDataParallel(model)),
    "within": inside,
    "all": lambda model: compiled(nn.parallel.DistributedDataParallel(checkpoint_wrapper(inside(model)))),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_wrapped_model_has_the_same_keys_as_the_plain_model(store: casckpt.Store, wrap: str) -> None:
    plain = Named(1)
    names = list(plain.state_dict())
    metadata = plain.state_dict()._metadata  # type: ignore[attr-defined]  # torch sets it on the dict
    wrapped = WRAPS[wrap](Named(1))
    trained = optim.AdamW(wrapped.parameters())
    for parameter in wrapped.parameters():
        parameter.grad = torch.ones_like(parameter)
    trained.step()
    saved = save_model_and_optim_state(store, wrapped, trained, run="a", step=1)
    assert [key for key in saved.tensors if key.startswith("model.")] == [f"model.{name}" for name in names]
    parameters = [name for name, _ in plain.named_parameters()]
    assert store.read("a@1")["optim"]["param_groups"][0]["params"] == parameters
    assert unshard_model_state(store, "a@1")._metadata == metadata  # type: ignore[attr-defined]  # torch sets it on the dict

    other = optim.AdamW(plain.parameters())  # from the wrapped model into a plain one
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


def test_a_user_module_named_module_keeps_its_name() -> None:
    model = Named(1)
    assert all(plain_name(model, name) == name for name in model.state_dict())
    assert [wrapped_child(module) for module in model.modules()] == [None] * 5


def test_a_subclass_of_a_wrapper_class_counts_as_a_wrapper() -> None:
    class Mine(nn.DataParallel[Any]):
        pass

    assert plain_name(Mine(Named(1)), "module.module.weight") == "module.weight"


@pytest.mark.parametrize(("name", "child"), WRAPPERS.items())
def test_the_wrapper_classes_exist_in_torch_under_their_names(name: str, child: str) -> None:
    """Megatron-FSDP need not be installed. Its wrapper is assumed to be where version 0.6.1 has it."""
    place, _, name_of_kind = name.rpartition(".")
    if place.startswith("torch."):
        found = getattr(importlib.import_module(place), name_of_kind)
    else:
        found = type(name_of_kind, (nn.Module,), {"__module__": place})
    assert f"{found.__module__}.{found.__qualname__}" == name
    kind: Any = type(found.__name__, (found,), {"forward": None})  # one of these classes is abstract
    made: nn.Module = object.__new__(kind)
    vars(made)["_modules"] = {child: nn.Linear(1, 1)}
    assert plain_name(made, f"{child}.weight") == "weight"
    assert plain_name(made, "weight") == "weight"  # if a hook has already removed the prefix
    assert plain_name(made, child) == ""


def test_two_parameters_with_the_same_plain_name_are_rejected() -> None:
    class Twice(nn.DataParallel[Any]):
        pass

    wrapper = Twice(nn.Linear(1, 1))
    wrapper.add_module("weight", nn.Linear(1, 1))
    wrapper.register_parameter("bias", nn.Parameter(torch.ones(1)))
    with pytest.raises(InvalidInput, match="'bias'"):
        parameter_names(wrapper)
