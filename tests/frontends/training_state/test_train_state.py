"""A train state: accepted values, and values that a load fills in place."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader

from casckpt.errors import InvalidInput, Mismatch, MissingKey
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.store.store import Store
from tests.support.saves import small


def schedule(step_size: int) -> optim.lr_scheduler.StepLR:
    return optim.lr_scheduler.StepLR(optim.SGD([nn.Parameter(torch.zeros(1))]), step_size)


def resumed(store: Store, run: str, into: Any) -> None:
    assert Checkpointer(store, run=run).resume(nn.Linear(1, 1), None, into) is not None


def test_a_dict_receives_extra_entries_and_a_train_state_logs_them(caplog: pytest.LogCaptureFixture) -> None:
    store = small()
    Checkpointer(store, run="a").save(1, nn.Linear(1, 1), None, {"epoch": 3, "seen": {"a": 1}})
    plain: dict[str, Any] = {}
    resumed(store, "a", plain)
    assert plain == {"epoch": 3, "seen": {"a": 1}}
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    resumed(store, "a", TrainState(rng=False, epoch=0))
    assert "left: 'train.seen' (only in the checkpoint" in caplog.text
    TrainState(rng=False, epoch=0).load_state_dict(plain)
    assert "also has 'seen'" in caplog.text


def test_a_dict_that_asks_for_more_than_was_saved_is_refused_before_it_changes() -> None:
    store = small()
    Checkpointer(store, run="a").save(1, nn.Linear(1, 1), None, {"epoch": 3})
    plain = {"epoch": 0, "more": 1}
    with pytest.raises(MissingKey, match="no 'more', but 'epoch'"):
        resumed(store, "a", plain)
    assert plain == {"epoch": 0, "more": 1}
    Checkpointer(store, run="a").resume(nn.Linear(1, 1), None, plain, missing="warn")
    assert plain == {"epoch": 3, "more": 1}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("more", 1), ("epoch", schedule(1)), ("scheds", [schedule(1)]), ("scheds", {"one": schedule(1)}),
        ("pair", [schedule(1), 3]), ("pair", {"one": schedule(1), "other": schedule(1)}),
        ("pair", {"one": {"x": schedule(1)}}),
        ("generator", schedule(1)), ("schedule", torch.Generator()), ("schedule", random.Random(1)),
        ("deep", [[1, schedule(1)], 2]),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("kind", "named"), [(dict, False), (TrainState, True)])
def test_a_train_state_that_does_not_fit_is_refused_before_the_model_changes(
    kind: Any, named: bool, name: str, part: Any
) -> None:
    store, model, fresh = small(), nn.Linear(2, 2), nn.Linear(2, 2)
    saved = {"epoch": 3, "scheds": [schedule(1), schedule(2)], "pair": {"one": schedule(3)}, "deep": [schedule(1), 2]}
    saved |= {"generator": torch.Generator(), "schedule": schedule(4)}
    state = kind(**saved)
    Checkpointer(store, run="a").save(1, {"model": model} if named else model, stepped(model), state)
    optimizer, before = stepped(fresh, 0.5), [one.clone() for one in fresh.parameters()]
    with pytest.raises((Mismatch, MissingKey), match=name):
        Checkpointer(store, run="a").resume({"model": fresh} if named else fresh, optimizer, kind(**{name: part}))
    assert all(map(torch.equal, fresh.parameters(), before))
    assert optimizer.param_groups[0]["lr"] == 0.5
    saved["epoch"] = 0
    Checkpointer(store, run="a").resume({"model": fresh} if named else fresh, optimizer, state)
    assert optimizer.param_groups[0]["lr"] == 0.1


def stepped(model: nn.Module, rate: float = 0.1) -> optim.Optimizer:
    made = optim.SGD(model.parameters(), rate, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    return made


def test_a_model_with_the_name_of_the_train_state_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'train'"):
        Checkpointer(small(), run="a").save(1, {"train": nn.Linear(1, 1)})


def test_a_data_loader_without_a_position_is_refused_at_once() -> None:
    loader: DataLoader[int] = DataLoader([1, 2])  # type: ignore[arg-type]  # a list will do
    with pytest.raises(InvalidInput, match=r"'loader' is a DataLoader of torch.*StatefulDataLoader"):
        TrainState(loader=loader)
    with pytest.raises(InvalidInput, match="StatefulDataLoader"):
        TrainState()["loader"] = loader
    with pytest.raises(InvalidInput, match="StatefulDataLoader"):
        Checkpointer(small(), run="a").save(1, nn.Linear(1, 1), None, {"nested": [loader]})
