"""Every front end saves, loads and keeps entries that users add to the state of a torch optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import casckpt
from casckpt.errors import InvalidInput
from casckpt.frontends.trainer import Checkpointer
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state, unshard_optim_state
from tests.support.parallel import Factory
from tests.support.training import everything, identical


class Projector:
    """A value that is not plain data, like the projector that GaLore keeps."""

    def __init__(self) -> None:
        self.basis = torch.eye(3)


ADDED: dict[Any, Any] = {
    "mask": torch.ones(3, 4, dtype=torch.bool),
    "history": torch.arange(7),
    "scale": torch.tensor(2.0),
    "count": 3,
    "nothing": None,
    "nested": {"a": torch.ones(2), "b": [1, torch.zeros(1)], "empty": {}},
    "a.b": torch.ones(5),
    7: "by number",
}


def trained(factory: Factory, seed: int, *, steps: int = 1) -> tuple[nn.Linear, optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Linear(4, 3)
    optimizer = factory(model.parameters())
    for _ in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("stepped", [0, 1], ids=["fresh", "stepped"])
@pytest.mark.parametrize("factory", [optim.AdamW, optim.SGD, optim.Adafactor])
def test_state_added_by_the_user_is_restored(store: casckpt.Store, factory: Factory, stepped: int) -> None:
    model, optimizer = trained(factory, 1)
    optimizer.state[model.weight].update(ADDED)
    # SGD does not keep one
    optimizer.state[model.bias]["step"] = optimizer.state[model.bias].get("step", torch.tensor(5.0))
    save_model_and_optim_state(store, model, optimizer, run="a", step=1)
    fresh, other = trained(factory, 2, steps=stepped)
    load_model_and_optim_state(store, "a@1", fresh, other)
    assert identical(other.state_dict(), optimizer.state_dict())
    assert identical(unshard_optim_state(store, "a@1"), optimizer.state_dict())
    save_model_and_optim_state(store, fresh, other, run="a", step=2)
    assert identical(store.read("a@2"), store.read("a@1"))


def test_pickled_state_added_by_the_user_is_restored_if_pickles_are_allowed(store: casckpt.Store) -> None:
    model, optimizer = trained(optim.AdamW, 1)
    optimizer.state[model.weight]["projector"] = Projector()
    with Checkpointer(store, run="a", allow_pickle=True) as checkpointer:
        checkpointer.save(1, model, optimizer)
        for load in (
            checkpointer.resume,
            lambda *to: checkpointer.load("a@1", *to),
            lambda *to: load_model_and_optim_state(store, "a@1", *to, allow_pickle=True),
        ):
            fresh, other = trained(optim.AdamW, 2)
            load(fresh, other)
            assert torch.equal(other.state[fresh.weight]["projector"].basis, torch.eye(3))
    fresh, other = trained(optim.AdamW, 2)
    before = everything(fresh, other)
    with pytest.raises(InvalidInput, match="pass allow_pickle=True"):
        Checkpointer(store, run="a").resume(fresh, other)
    assert identical(everything(fresh, other), before)
