"""Fixtures that several test modules in this folder share."""

from __future__ import annotations

from typing import Any

import pytest
from torch import optim

import casckpt
from casckpt.frontends.training_state import save_model_and_optim_state
from tests.support.training import Network, train


def two_groups(model: Network) -> optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": model.head.parameters()}, {"params": model.norm.parameters()}]
    return optim.AdamW(groups, lr=0.1)


@pytest.fixture
def saved(store: casckpt.Store) -> tuple[Network, optim.Optimizer]:
    """Save a model and an optimizer as a@2, with two groups and state for all parameters except frozen ones."""
    model = Network(1)
    trained = two_groups(model)
    train(model, trained, range(2))
    save_model_and_optim_state(store, model, trained, run="a", step=2)
    return model, trained
