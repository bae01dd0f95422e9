"""A resume restores all that it is given, or says so: no training goes on without its optimizer in silence."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from casckpt.checkpoint.ranks import open_ranks
from casckpt.errors import InvalidInput, Mismatch, MissingKey, NotFound
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.frontends.trainer.one_run import newest_together
from casckpt.frontends.training_state import load_model_and_optim_state, unshard_model_state, unshard_optim_state
from casckpt.store.store import Store
from tests.support.saves import small
from tests.support.training import identical, made, trained

_RUNS = itertools.count()
Save = Callable[[Store, str], Any]


def new_run() -> str:
    """What is told of a run is told once."""
    return f"resumed{next(_RUNS)}"


def told(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


def weights_alone(store: Store, run: str) -> Any:
    return store.save({"model": trained()[0].state_dict()}, run=run, step=5)


def bare_weights(store: Store, run: str) -> Any:
    return store.save(dict(trained()[0].state_dict()), run=run, step=5)


def optimizer_elsewhere(store: Store, run: str) -> Any:
    """As an import of a file of torch.save had it."""
    model, optimizer = trained()
    return store.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, run=run, step=5)


def optimizer_by_number(store: Store, run: str) -> Any:
    model, optimizer = trained()
    return store.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, run=run, step=5)


def optimizer_without_groups(store: Store, run: str) -> Any:
    return store.save({"model": trained()[0].state_dict(), "optim": {"lr": 1.0}}, run=run, step=5)


ODD: list[Save] = [
    weights_alone, bare_weights, optimizer_elsewhere, optimizer_by_number, optimizer_without_groups,
]  # fmt: skip


@pytest.mark.parametrize("save", ODD)
def test_an_optimizer_that_cannot_be_restored(save: Save, caplog: pytest.LogCaptureFixture) -> None:
    store, run, (model, optimizer) = small(), new_run(), made(1)
    saved = save(store, run)
    before = model.state_dict()["head.weight"].clone()
    checkpointer = Checkpointer(store, run=run)
    with pytest.raises((NotFound, Mismatch), match=r"optimizer|param_groups"):
        checkpointer.resume(model, optimizer)
    assert torch.equal(model.state_dict()["head.weight"], before)
    assert checkpointer.resume(model, optimizer, missing="warn") == saved
    assert identical(dict(model.state_dict()), dict(trained()[0].state_dict()))
    assert not optimizer.state
    assert "holds no optimizer that can be loaded" in told(caplog)
    with pytest.raises((NotFound, Mismatch), match=r"optimizer|param_groups"):
        checkpointer.load(f"{run}@5", model, optimizer, load_optim_state=True)


def test_what_there_is_instead_is_named() -> None:
    store, run, (model, optimizer) = small(), new_run(), made(1)
    optimizer_elsewhere(store, run)
    with pytest.raises(NotFound, match=r"without an optimizer .* it has 'model', 'optimizer'.*missing=\"warn\""):
        Checkpointer(store, run=run).resume(model, optimizer)


def test_a_load_that_is_given_an_optimizer_in_vain_says_so(caplog: pytest.LogCaptureFixture) -> None:
    store, run, (model, optimizer) = small(), new_run(), made(1)
    optimizer_elsewhere(store, run)
    Checkpointer(store, run=run).load(f"{run}@5", model, optimizer)
    assert "holds no optimizer that can be loaded, but 'model', 'optimizer'" in told(caplog)
    assert f"did not read 'optimizer' of {run}@5" in told(caplog)
    caplog.clear()
    Checkpointer(store, run=run).load(f"{run}@5", model, optimizer, load_optim_state=False, unread="ignore")
    assert not told(caplog)


def test_a_train_state_that_cannot_be_restored(caplog: pytest.LogCaptureFixture) -> None:
    store, run, (model, optimizer) = small(), new_run(), trained()
    checkpointer = Checkpointer(store, run=run)
    saved = checkpointer.save(5, model, optimizer)
    state = TrainState(rng=False, epoch=7)
    with pytest.raises(NotFound, match="without a train state"):
        checkpointer.resume(model, optimizer, state)
    assert checkpointer.resume(model, optimizer, state, missing="warn") == saved
    assert state["epoch"] == 7
    assert "holds no train state" in told(caplog)


def test_parts_of_a_train_state_that_are_not_there(caplog: pytest.LogCaptureFixture) -> None:
    store, run, (model, optimizer) = small(), new_run(), trained()
    checkpointer = Checkpointer(store, run=run)
    checkpointer.save(5, model, optimizer, TrainState(rng=False, epoch=3))
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    state = TrainState(schedule=schedule, epoch=0)
    with pytest.raises(MissingKey, match=r"'schedule'.*rng=False"):
        checkpointer.resume(model, optimizer, state)
    assert state["epoch"] == 0
    checkpointer.resume(model, optimizer, state, missing="warn")
    assert (state["epoch"], state["schedule"]) == (3, schedule)
    assert "has no 'schedule', 'rng': they stay as they are" in told(caplog)


def test_what_a_resume_is_not_given_is_told(caplog: pytest.LogCaptureFixture) -> None:
    store, run, (model, optimizer) = small(), new_run(), trained()
    checkpointer = Checkpointer(store, run=run)
    checkpointer.save(5, model, optimizer, TrainState(epoch=3))
    found = checkpointer.resume(model)
    assert found is not None
    assert found.unread_subtrees == ("optim", "train")
    assert f"did not read 'optim', 'train' of {run}@5" in told(caplog)
    caplog.clear()
    checkpointer.load(f"{run}@5", model, load_optim_state=False, load_trainer_state=False)
    checkpointer.load(f"{run}@5", model, optimizer)
    assert checkpointer.resume(model, unread="ignore") == found
    assert checkpointer.resume(model, optimizer, TrainState(epoch=0)) == found
    assert not told(caplog)


def test_what_a_front_end_leaves_on_purpose_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    store, run, (model, optimizer) = small(), new_run(), trained()
    Checkpointer(store, run=run).save(5, model, optimizer, TrainState(epoch=3))
    unshard_model_state(store, f"{run}@5")
    unshard_optim_state(store, f"{run}@5")
    assert not told(caplog)
    loaded = load_model_and_optim_state(store, f"{run}@5", model)
    assert loaded.unread_subtrees == ("optim", "train")
    assert f"did not read 'train' of {run}@5" in told(caplog)  # no optimizer is asked for
    caplog.clear()
    load_model_and_optim_state(store, f"{run}@5", model, optimizer, unread="ignore")
    assert not told(caplog)


def test_missing_is_raise_or_warn() -> None:
    with pytest.raises(InvalidInput, match="missing='error' is not usable"):
        Checkpointer(small(), run="sft").resume(nn.Linear(2, 2), missing="error")  # type: ignore[arg-type]


class Module:
    """A train module that says by itself what it has."""

    def __init__(self) -> None:
        self.state = {"model": {"w": torch.zeros(2)}, "optim": {"m": torch.zeros(2)}}

    def state_dict_to_save(self) -> dict[str, Any]:
        return self.state

    def state_dict_to_load(self, metadata: Any, *, optim: bool = True) -> dict[str, Any]:
        return self.state if optim else {"model": self.state["model"]}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = set(state)


def test_a_train_module_resumes_with_its_optimizer() -> None:
    store, module = small(), Module()
    store.save({"model": {"w": torch.ones(2)}}, run="sft", step=1)
    with pytest.raises(MissingKey, match=r"optim\.m"):
        Checkpointer(store, run="sft").resume(module)
    Checkpointer(store, run="sft").resume(module, missing="warn")
    assert module.loaded == {"model"}


def test_who_looks_for_the_newest_hears_what_was_asked_too() -> None:
    store, (model, optimizer) = small(), trained()
    saved = Checkpointer(store, run="sft").save(1, model, optimizer)
    alone = open_ranks(no_dist=True)
    assert newest_together(alone, store, "sft", None, lambda: True, healthy=False) == (saved, True)
    assert newest_together(alone, store, "sft", None, lambda: False, healthy=False) == (saved, False)
    assert newest_together(alone, store, "other", None, lambda: True, healthy=True) == (None, True)


def test_the_optimizers_of_a_dict_of_models_are_demanded_or_left_as_is_said(caplog: pytest.LogCaptureFixture) -> None:
    store, run, (model, optimizer) = small(), new_run(), trained()
    checkpointer, ema = Checkpointer(store, run=run), nn.Linear(2, 2)
    checkpointer.save(1, {"model": model, "ema": ema}, optimizer, {"epoch": 1})
    fresh, its = made(seed=1)
    state = checkpointer.load(f"{run}@1", {"model": fresh, "ema": nn.Linear(2, 2)}, its, load_optim_state=False)
    assert (state, its.state) == ({"epoch": 1}, {})
    assert checkpointer.load(f"{run}@1", {"model": fresh, "ema": ema, "optim": its}, load_trainer_state=False) is None
    assert identical(its.state_dict(), optimizer.state_dict())
    checkpointer.save(2, {"model": model, "ema": ema})
    for models, beside in (({"model": fresh}, its), ({"model": fresh, "optim": its}, None)):
        with pytest.raises((NotFound, MissingKey), match="optimizer"):
            checkpointer.resume(models, beside, unread="ignore")
        assert checkpointer.resume(models, beside, unread="ignore", missing="warn") is not None
        assert "holds no optimizer that can be loaded" in told(caplog)
        caplog.clear()
    with pytest.raises(InvalidInput, match="give one of them"):
        checkpointer.save(3, {"model": model, "optim": optimizer}, optimizer)
