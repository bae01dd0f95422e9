"""Advice about models, optimizers and training runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, StepLR
from torch.utils.data import DataLoader, IterableDataset

import casckpt
from casckpt import load_model_and_optim_state, save_model_and_optim_state
from casckpt.base import text
from casckpt.errors import Conflict, InvalidInput, Mismatch, MissingKey, NotFound, StorageError
from casckpt.frontends.trainer import Checkpointer, CheckpointerConfig, TrainState, restore_rng, rng_state
from tests.frontends.training_state.test_model import Reading, Scaled
from tests.hints.conftest import Run
from tests.support.hints import Advice, Messages, follows
from tests.support.logs import logged
from tests.support.parallel import Stack, joined, tp
from tests.support.ranks import Pool, outcome_of
from tests.support.repositories import memory
from tests.support.saves import CELL, cells, small
from tests.support.small_disk import SmallDisk
from tests.support.training import identical

Store = casckpt.Store
Optim = Callable[..., optim.Optimizer]
SGD = partial(optim.SGD, lr=0.1, momentum=0.9)


class Two(nn.Module):
    """Two layers, of which the second may be missing."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names or ("a", "b"):
            self.add_module(name, nn.Linear(2, 2, bias=False))


def stepped(model: nn.Module, kind: Optim = SGD) -> optim.Optimizer:
    made = kind(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    made.step()
    return made


@pytest.fixture
def model() -> Two:
    return Two()


@pytest.fixture
def trained(store: Store, model: Two) -> Store:
    """A store with ``model`` and its optimizer as a@1."""
    save_model_and_optim_state(store, model, stepped(model), run="a", step=1)
    return store


def weights(model: nn.Module) -> dict[str, Any]:
    return dict(model.state_dict())


# loads of models and optimizers


class Noam:
    """A wrapper of an optimizer, as in the code of many papers."""

    def __init__(self, wrapped: optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.steps = wrapped, wrapped.param_groups, 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


@follows("frontends/training_state/parts.py:as_optimizers", "pass the optimizer in it here")
def test_what_wraps_an_optimizer_is_saved_as_advised(store: Store, messages: Messages) -> None:
    model, wrong = Two(), Noam(stepped(Two()))
    with messages.error(InvalidInput) as advice:
        Checkpointer(store, run="a").save(1, model, wrong)  # type: ignore[arg-type]
    advice.says("pass the optimizer in it here, and the wrapper in train_state")
    noam = Noam(stepped(model))
    noam.steps = 7
    Checkpointer(store, run="a").save(1, model, noam.optimizer, {"noam": noam})
    fresh = Two()
    new = Noam(SGD(fresh.parameters()))
    Checkpointer(store, run="a").resume(fresh, new.optimizer, {"noam": new})
    assert new.steps == 7
    assert identical(new.optimizer.state_dict()["state"], noam.optimizer.state_dict()["state"])


@follows("frontends/training_state/groups.py:match", "or load the model alone (optim=None; in a dict")
def test_two_parameters_with_the_same_name_can_get_different_names(
    trained: Store, model: Two, messages: Messages
) -> None:
    fresh = Two("a", "c")
    new = SGD(fresh.parameters())
    with messages.error(InvalidInput) as advice:
        load_model_and_optim_state(
            trained, "a@1", fresh, new, rename={"model.c.weight": "model.a.weight"}, strict=False
        )
    alone: Any = advice.argument("optim")
    load_model_and_optim_state(
        trained, "a@1", fresh, rename={"model.c.weight": "model.a.weight"}, strict=False, **alone
    )
    assert torch.equal(fresh.c.weight, model.a.weight)  # type: ignore[union-attr,arg-type]
    trained.load({"model": fresh}, "a@1", rename={"model.c.weight": "model.a.weight"}, strict=False)
    advice.says("map each to a different one")
    load_model_and_optim_state(trained, "a@1", fresh, new, rename={"model.c.weight": "model.b.weight"})
    assert torch.equal(fresh.c.weight, model.b.weight)  # type: ignore[union-attr,arg-type]


@follows(
    "frontends/training_state/groups.py:check", "Create the kind of optimizer that was saved, or load the model alone"
)
def test_the_saved_optimizer_can_be_created_or_omitted_as_advised(
    trained: Store, model: Two, messages: Messages
) -> None:
    fresh = Two()
    with messages.error(Mismatch) as advice:
        load_model_and_optim_state(trained, "a@1", fresh, optim.Adadelta(fresh.parameters()))
    advice.says("Create the kind of optimizer that was saved")
    load_model_and_optim_state(trained, "a@1", fresh, SGD(fresh.parameters()))
    assert identical(weights(fresh), weights(model))
    other = Two()
    alone: Any = advice.argument("optim")
    load_model_and_optim_state(trained, "a@1", other, **alone)
    assert identical(weights(other), weights(model))
    advice.says("in a dict, leave the optimizer out")
    trained.load({"model": fresh}, "a@1")
    Checkpointer(trained, run="a").resume({"model": fresh}, **alone)


@follows(
    "frontends/training_state/groups.py:_other_parameters", "Pass strict=False to load the parameters that both have"
)
def test_the_suggested_option_loads_state_that_both_optimizers_have(trained: Store, messages: Messages) -> None:
    fresh = Two("a", "b", "c")
    new = SGD(fresh.parameters())
    with messages.error(MissingKey) as advice:
        load_model_and_optim_state(trained, "a@1", fresh, new)
    load_model_and_optim_state(trained, "a@1", fresh, new, **advice.argument("strict"))
    assert len(new.state) == 2


@follows("frontends/training_state/groups.py:_other_parameters", "Add their groups first, as they were at the save")
def test_the_groups_that_a_training_adds_later_are_added_first_as_advised(trained: Store, messages: Messages) -> None:
    fresh = Two()
    parameters = list(fresh.parameters())
    new = SGD(parameters[:1])
    with messages.error(Mismatch) as advice:
        load_model_and_optim_state(trained, "a@1", fresh, new)
    advice.says("optim.add_param_group")
    new.add_param_group({"params": parameters[1:]})
    load_model_and_optim_state(trained, "a@1", fresh, new)
    assert len(new.state) == len(parameters)


@follows("frontends/training_state/optimizer.py:states_to_save", "pass one of them by a name of its own")
def test_two_optimizers_of_the_same_parameters_are_saved_as_advised(
    store: Store, model: Two, messages: Messages
) -> None:
    first, second = stepped(model), optim.Adam(model.parameters())
    with messages.error(InvalidInput) as advice:
        Checkpointer(store, run="a").save(1, model, [first, second])
    advice.says("TrainState(second=optim)")
    saver = Checkpointer(store, run="a")
    saver.save(1, model, first, TrainState(second=second))
    assert saver.resume(model, first, TrainState(second=second))


class Wrapping(optim.Optimizer):
    """An optimizer around another, as in sharpness-aware minimization. Its state_dict forgets the inner state."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner


def test_an_optimizer_inside_another_one_is_saved_as_advised(store: Store, model: Two) -> None:
    wrapping = Wrapping(stepped(model))
    with pytest.raises(InvalidInput, match=r"pass that one, optim\.inner, here and to resume"):
        Checkpointer(store, run="a").save(1, model, wrapping)
    saver = Checkpointer(store, run="a")
    saver.save(1, model, wrapping.inner)
    assert saver.resume(model, wrapping.inner)


def test_parameters_of_no_module_are_saved_as_advised(store: Store) -> None:
    alpha = torch.zeros(1, requires_grad=True)
    own = optim.Adam([alpha])
    with pytest.raises(InvalidInput, match="put them and their optimizer into the train state of a Checkpointer"):
        store.save({"alpha": alpha, "optim": own}, run="a", step=1)
    alpha.grad = torch.ones(1)
    own.step()
    saver, model = Checkpointer(store, run="a"), nn.Linear(1, 1)
    saver.save(1, model, None, TrainState(alpha=alpha, optim=own))
    fresh = torch.zeros(1, requires_grad=True)
    other = optim.Adam([fresh])
    saver.resume(model, None, TrainState(alpha=fresh, optim=other))
    assert identical([fresh.detach(), other.state_dict()], [alpha.detach(), own.state_dict()])


class Mean(nn.Module):
    """A metric like those of torchmetrics, whose values are saved on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.persistent(mode=False)

    def persistent(self, mode: bool) -> None:
        self.register_buffer("value", torch.zeros(1), persistent=mode)


@follows("frontends/training_state/train_state.py:plain_state", "after persistent(True)")
def test_a_metric_without_a_state_is_said_and_saved_as_advised(
    store: Store, model: Two, messages: Messages, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer, metric = Checkpointer(store, run="a"), Mean()
    with messages.log() as advice:
        checkpointer.save(1, model, train_state=TrainState(mean=metric))
    advice.says("'mean', a Mean, has an empty state_dict")
    metric.persistent(True)
    metric.get_buffer("value").fill_(3)
    checkpointer.save(2, model, train_state=TrainState(mean=metric))
    fresh = Mean()
    fresh.persistent(True)
    Checkpointer(store, run="a").resume(Two(), train_state=TrainState(mean=fresh))
    advice.says("after persistent(True)")
    assert fresh.get_buffer("value") == 3
    assert sum("empty state_dict" in one for one in caplog.messages) == 1


class Numbers(IterableDataset[int]):
    """A dataset that knows its position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 8:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StatefulDataLoader(DataLoader[int]):
    """Stands for that of torchdata."""

    def state_dict(self) -> dict[str, int]:
        return {}


def said_of(caplog: pytest.LogCaptureFixture, loader: DataLoader[int], run: str, /, **parts: Any) -> str:
    """Save once while ``loader`` is in the middle of its epoch. Return what was logged."""
    caplog.clear()
    iterator, checkpointer = iter(loader), Checkpointer(small(), run=run)
    next(iterator)
    checkpointer.save(1, Two(), train_state=TrainState(**parts))
    return caplog.text


@follows(
    "frontends/training_state/train_state.py:_warn_of_iterator", "pass a StatefulDataLoader from torchdata instead"
)
def test_a_dataset_that_workers_copy_is_said_and_saved_as_advised(
    messages: Messages, caplog: pytest.LogCaptureFixture
) -> None:
    data = Numbers()
    with messages.log() as advice:
        said_of(caplog, DataLoader(data, num_workers=1, multiprocessing_context=get_context("fork")), "a", data=data)
    advice.says("pass a StatefulDataLoader from torchdata instead, or use num_workers=0")
    assert "DataLoader" not in said_of(caplog, DataLoader(data), "b", data=data)
    loader = StatefulDataLoader(data)
    assert "DataLoader" not in said_of(caplog, loader, "c", loader=loader)


def test_a_shuffled_order_that_cannot_continue_is_said_in_the_middle_of_an_epoch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data: Any = list(range(8))
    assert "a DataLoader is at batch 1 of 4" in said_of(caplog, DataLoader(data, batch_size=2, shuffle=True), "a")
    loader = StatefulDataLoader(data, batch_size=2, shuffle=True)
    assert "DataLoader" not in said_of(caplog, loader, "b", loader=loader)
    assert "DataLoader" not in said_of(caplog, DataLoader(data, batch_size=2), "c"), "the program can skip batches"
    assert "DataLoader" not in said_of(caplog, DataLoader(data, batch_size=8, shuffle=True), "d"), "the epoch has ended"


@follows("saving/prepare.py:prepare", "leave them out of frozen=, or call requires_grad_(False)")
def test_frozen_weights_that_require_gradients_are_said_and_mended_as_advised(
    store: Store, messages: Messages, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(3, 2), "head": nn.Linear(2, 2)})
    with messages.log() as advice:
        store.save({"model": model}, run="a", step=1, frozen=["model.words.*"])
    advice.says("'model.words.weight' are declared frozen, but require gradients")
    caplog.clear()
    store.save({"model": model}, run="a", step=2)
    model["words"].requires_grad_(False)
    store.save({"model": model}, run="a", step=3, frozen=["model.words.*"])
    advice.says("leave them out of frozen=, or call requires_grad_(False)")
    assert caplog.messages == []


@follows("frontends/training_state/model.py:model_to_save", "call unmerge_adapter() first")
def test_merged_adapters_are_unmerged_as_advised(
    store: Store, model: Two, messages: Messages, caplog: pytest.LogCaptureFixture
) -> None:
    adapted: Any = nn.ModuleDict({"layer": model})
    model.merged_adapters = ["default"]  # type: ignore[assignment]  # as in PEFT
    with messages.log() as advice:
        store.save({"model": adapted}, run="a", step=1)
    advice.says("the adapters of 'layer' are merged into the weights")
    model.merged_adapters = []  # type: ignore[assignment]  # unmerge_adapter()
    advice.says("call unmerge_adapter() first")
    caplog.clear()
    store.save({"model": adapted}, run="a", step=2)
    assert caplog.messages == []


@follows("frontends/training_state/optimizer.py:StateKind.check", "or load the model alone (optim=None; in a dict")
def test_state_of_a_different_kind_can_be_loaded_or_skipped_as_advised(
    store: Store, model: Two, messages: Messages
) -> None:
    save_model_and_optim_state(store, model, stepped(model, optim.Adagrad), run="a", step=1)
    state = store.read("a@1")
    state["optim"]["param_groups"][0] |= {"alpha": 0.9, "centered": False, "momentum": 0}
    store.save(state, run="a", step=2)
    fresh = Two()
    with messages.error(Mismatch) as advice:
        load_model_and_optim_state(store, "a@2", fresh, optim.RMSprop(fresh.parameters()))
    advice.says("Create the kind of optimizer that was saved, with the same options")
    load_model_and_optim_state(store, "a@1", fresh, optim.Adagrad(fresh.parameters()))
    other = Two()
    alone: Any = advice.argument("optim")
    load_model_and_optim_state(store, "a@2", other, **alone)
    assert identical(weights(other), weights(model))


@follows("frontends/training_state/loading.py:TrainingStateLoad._leave", "or leave these modules unchanged with")
@follows("frontends/training_state/model.py:model_state", "unless ignore_mismatched leaves their modules unchanged")
def test_keys_that_a_module_does_not_read_can_be_handled_or_ignored(store: Store, messages: Messages) -> None:
    text.known.clear()
    model = nn.Sequential(nn.Linear(3, 3), Scaled(2.0))
    with messages.log() as said:
        save_model_and_optim_state(store, model, run="a", step=1)
    fresh = nn.Sequential(nn.Linear(3, 3), Scaled(3.0))
    with messages.error(Mismatch) as advice:
        load_model_and_optim_state(store, "a@1", fresh)
    said.says("ignore_mismatched")
    load_model_and_optim_state(store, "a@1", fresh, **advice.argument("ignore_mismatched"))
    assert torch.equal(fresh[0].weight, model[0].weight)  # type: ignore[arg-type]
    advice.says("Load into modules that read all keys that they save")
    reading = nn.Sequential(nn.Linear(3, 3), Reading(3.0))
    load_model_and_optim_state(store, "a@1", reading)
    assert identical(weights(reading), weights(model))


@follows("frontends/training_state/loading.py:TrainingStateLoad.check_unused", "pass strict=False to skip them")
def test_weights_without_a_parameter_can_be_omitted_as_advised(trained: Store, model: Two, messages: Messages) -> None:
    fresh = Two("a")
    with messages.error(Mismatch) as advice:
        load_model_and_optim_state(trained, "a@1", fresh)
    load_model_and_optim_state(trained, "a@1", fresh, **advice.argument("strict"))
    assert torch.equal(fresh.a.weight, model.a.weight)  # type: ignore[union-attr,arg-type]


@follows("frontends/training_state/loading.py:TrainingStateLoad.check_unused", "or map names with rename=")
def test_a_model_with_other_names_is_not_left_random_by_the_advice(store: Store, messages: Messages) -> None:
    saved = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    save_model_and_optim_state(store, saved, run="a", step=1)
    with pytest.warns(FutureWarning):
        other: Any = nn.utils.weight_norm(nn.Linear(4, 3))
    with messages.error(Mismatch) as advice:
        load_model_and_optim_state(store, "a@1", other)
    assert "strict=" not in advice.message
    advice.says("it has 'weight_g', 'weight_v' instead")
    names = {"weight_g": "original0", "weight_v": "original1"}
    renamed: Any = {
        advice.says("rename"): {rf"(.*)\.{old}": rf"\1.parametrizations.weight.{new}" for old, new in names.items()}
    }
    load_model_and_optim_state(store, "a@1", other, **renamed)
    assert torch.equal(other(torch.ones(1, 4)), saved(torch.ones(1, 4)))
    advice.says("Build it as it was for the save")
    alike = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    load_model_and_optim_state(store, "a@1", alike)
    assert torch.equal(alike(torch.ones(1, 4)), saved(torch.ones(1, 4)))


@follows("frontends/stores.py:advising", "load with …, which does")
def test_an_argument_that_resume_does_not_take_is_taken_by_the_call_that_it_names(
    store: Store, model: Two, messages: Messages
) -> None:
    checkpointer = Checkpointer(store, run="a")
    checkpointer.save(1, model)
    other = Two()
    other.a = nn.Linear(5, 1)
    bias = other.a.bias.detach().clone()
    with messages.error(Mismatch) as advice:
        checkpointer.resume(other)
    advice.says("resume does not take ignore_mismatched=; load with Checkpointer.load, which does")
    with pytest.raises(Mismatch) as plain:
        checkpointer.load("a@1", other)
    assert "does not take" not in str(plain.value)
    checkpointer.load("a@1", other, ignore_mismatched=["a.*"])
    assert torch.equal(other.a.bias, bias)
    assert torch.equal(other.b.weight, model.b.weight)  # type: ignore[union-attr,arg-type]


def test_no_hint_loads_raw_weights_as_an_average(store: Store) -> None:
    raw, ema = ({"w": torch.full((2,), value), "v": torch.full((3,), value)} for value in (1.0, 2.0))
    store.save({"model": raw, "train": {"state_dict_ema": ema}}, run="a", step=1)
    fresh = {name: torch.zeros_like(value) for name, value in ema.items()}
    with pytest.raises(MissingKey) as caught:
        store.load({"ema": fresh}, "a@1")
    assert "give rename=" not in str(caught.value)
    with pytest.raises(MissingKey) as caught:
        store.load({"state_dict_ema": fresh}, "a@1", unread="ignore")
    store.load({"state_dict_ema": fresh}, "a@1", unread="ignore", **Advice(str(caught.value)).argument("rename"))
    assert identical(fresh, ema)


@follows("frontends/training_state/contents.py:load_model_and_optim_state", 'pass unread="ignore"')
def test_the_suggested_option_hides_the_keys_that_a_load_skips(trained: Store, messages: Messages) -> None:
    trained.save({**trained.read("a@1"), "more": {"x": 1, "y": 2}}, run="leaving-more", step=1)
    fresh = Two()
    with messages.log() as advice:
        load_model_and_optim_state(trained, "leaving-more@1", fresh, SGD(fresh.parameters()))
    with logged() as texts:
        load_model_and_optim_state(
            trained, "leaving-more@1", fresh, SGD(fresh.parameters()), **advice.argument("unread")
        )
    assert texts == []


@follows("frontends/training_state/stored.py:StoredTraining.groups", "Load the model alone (optim=None; in a dict")
@follows("frontends/training_state/stored.py:StoredTraining.groups", "read it with store.read")
def test_a_model_loads_from_a_checkpoint_without_a_named_optimizer(
    store: Store, model: Two, messages: Messages
) -> None:
    trained = stepped(model)
    save_model_and_optim_state(store, model, run="a", step=1)
    save_model_and_optim_state(store, model, trained, run="a", step=2)
    store.save({"model": model.state_dict(), "optim": trained.state_dict()}, run="a", step=3)
    fresh = Two()
    with messages.error(MissingKey) as advice:
        load_model_and_optim_state(store, "a@1", fresh, SGD(fresh.parameters()))
    alone: Any = advice.argument("optim")
    load_model_and_optim_state(store, "a@1", fresh, **alone)
    assert identical(weights(fresh), weights(model))
    advice.says("in a dict, leave the optimizer out")
    store.load({"model": fresh}, "a@1")
    advice.says("choose a different checkpoint")
    load_model_and_optim_state(store, "a@2", fresh, SGD(fresh.parameters()))
    with messages.error(Mismatch) as advice:
        load_model_and_optim_state(store, "a@3", fresh, SGD(fresh.parameters()))
    advice.says("store.read")
    new = SGD(fresh.parameters())
    new.load_state_dict(store.read("a@3")["optim"])
    assert len(new.state) == 2


@follows(
    "store/objects.py:", "call optim.load_state_dict(state[%r]) after the load. Or save the optimizer itself with its"
)
def test_optimizer_state_can_be_loaded_through_the_optimizer(store: Store, model: Two, messages: Messages) -> None:
    trained = stepped(model)
    store.save({"model": model.state_dict(), "adam": trained.state_dict()}, step=1)
    fresh = Two()
    with messages.log("INFO") as advice:
        store.load({"model": fresh.state_dict(), "adam": stepped(fresh).state_dict()}, "default@1")
    new = SGD(fresh.parameters())
    state = {"model": fresh.state_dict(), "adam": stepped(Two()).state_dict()}
    store.load(state, "default@1")
    eval(advice.says("optim.load_state_dict(state['adam'])"), {"optim": new, "state": state})  # as a reader types it
    assert len(new.state) == 2
    shown = advice.says('store.save({"model": model, "adam": optim}, step=step)')
    eval(shown, {"store": store, "model": model, "optim": trained, "step": 2})
    other = Two()
    new = SGD(other.parameters())
    store.load({"model": other, "adam": new}, "default@2")
    assert len(new.state) == 2
    assert identical(weights(other), weights(model))


# optimizers of other kinds


@follows(
    "frontends/training_state/optimizer.py:named_groups",
    "pass the list of these optimizers, or pass none (optim=None; in a Trainer",
)
def test_an_optimizer_must_be_passed_with_the_model_that_it_was_created_for(
    store: Store, model: Two, messages: Messages
) -> None:
    with messages.error(InvalidInput) as advice:
        save_model_and_optim_state(store, model, stepped(Two()), run="a", step=1)
    advice.says("pass the model that the optimizer was created for")
    save_model_and_optim_state(store, model, stepped(model), run="a", step=1)
    advice.says("pass the list of these")
    each = [stepped(layer) for layer in model.children()]
    save_model_and_optim_state(store, model, each, run="a", step=2)
    assert store.get("a@2").tensors.keys() == store.get("a@1").tensors.keys()
    none: Any = advice.argument("optim")
    save_model_and_optim_state(store, model, run="a", step=3, **none)
    assert "optim" not in store.read("a@3")


@follows(
    "frontends/training_state/optimizer.py:unflatten_optimizer_state",
    "pass the complete result of flatten_optimizer_state",
)
def test_a_flat_state_is_accepted_if_it_is_complete(model: Two, messages: Messages) -> None:
    trained = stepped(model)
    flat = casckpt.flatten_optimizer_state(model, trained)
    part = {key: value for key, value in flat.items() if "momentum" not in key}
    with messages.error(InvalidInput) as advice:
        casckpt.unflatten_optimizer_state(part)
    advice.says("flatten_optimizer_state")
    whole = casckpt.unflatten_optimizer_state(flat)
    assert identical(whole["state"], trained.state_dict()["state"])


@follows("frontends/training_state/unshard.py:_patterns", "`casckpt show --tensors` lists its keys")
@follows("frontends/training_state/unshard.py:_unmatched", "`casckpt show --tensors` lists its keys")
def test_keys_to_unshard_can_be_chosen_from_the_suggested_list(
    trained: Store, model: Two, messages: Messages, run: Run
) -> None:
    trained.save({"net": model.state_dict()}, run="b", step=1)
    with messages.error(MissingKey) as advice:
        casckpt.unshard_model_state(trained, "b@1")
    assert "net.a.weight" in run(*advice.command("show"), trained.url, "b@1").output
    with messages.error(MissingKey) as advice:
        casckpt.unshard_model_state(trained, "a@1", keys=["c.*"])
    listed = run(*advice.command("show"), trained.url, "a@1").output.split()
    key = next(word for word in listed if word.startswith("model.a"))
    assert casckpt.unshard_model_state(trained, "a@1", keys=[key]).keys() == {"a.weight"}


# ranks


def wrapped_otherwise(rank: int, size: int, path: str) -> list[str]:
    """Cases that FSDP refuses, each of which then uses the advised call."""
    said = []

    def refused(model: nn.Module, trained: optim.Optimizer | None = None) -> Advice:
        error = outcome_of(lambda: save_model_and_optim_state(path, model, trained, run="refused", step=1))
        said.append(str(error))
        return Advice(said[-1])

    def save(model: nn.Module, run: str, trained: optim.Optimizer | None = None) -> None:
        save_model_and_optim_state(path, model, trained, run=run, step=1)

    one = joined(nn.Linear(4, 4), use_orig_params=False)
    again = joined(nn.Linear(4, 4), **refused(one, SGD(one.parameters())).argument("use_orig_params"))
    save(again, "original", SGD(again.parameters()))
    with FullyShardedDataParallel.summon_full_params(again):
        refused(again).says("save and load outside of forward, backward and summon_full_params")
    save(again, "outside")
    image = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    refused(joined(image)).says("model.to(memory_format=torch.contiguous_format)")
    image = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    save(joined(image.to(memory_format=torch.contiguous_format)), "contiguous")
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("data", "tensor"))
    advice = refused(joined(tp(Stack(1), mesh["tensor"]), device_mesh=mesh["data"]))
    advice.says("torch.distributed.fsdp.fully_shard")
    parallel = tp(Stack(1), mesh["tensor"])
    fully_shard(parallel, mesh=mesh["data"])
    save(parallel, "parallel")
    return said


@follows("frontends/training_state/flat.py:_check", "shard the model with torch.distributed.fsdp.fully_shard")
@follows("frontends/training_state/flat.py:_check", "wrap the model with use_orig_params=True")
@follows("frontends/training_state/flat.py:_check", "save and load outside of forward, backward and summon_full_params")
@follows("frontends/training_state/flat.py:_check_order", "make it contiguous before it is wrapped")
def test_a_model_can_be_wrapped_in_a_supported_way_as_advised(
    ranks: Pool, store_path: Path, messages: Messages
) -> None:
    for texts in ranks.run(2, wrapped_otherwise, str(store_path)):
        for message in texts:
            messages.text(message).says("FSDP")
    assert casckpt.open(store_path).runs() == ["contiguous", "original", "outside", "parallel"]


def state_of_shards(rank: int, size: int, path: str) -> list[str]:
    said, store = [], casckpt.open(path)

    def made() -> tuple[Any, optim.Optimizer]:
        model: Any = nn.Linear(8, 6, bias=False)
        fully_shard(model)
        return model, SGD(model.parameters())

    model, trained = made()
    save_model_and_optim_state(store, model, trained, run="removed", step=1)
    trained.state[model.weight]["scales"] = torch.full((4,), 2.0 + rank)
    save_model_and_optim_state(store, model, trained, run="scales", step=1)

    ema: Any = nn.Linear(8, 6, bias=False)
    fully_shard(ema)
    made_of, kept = Checkpointer(store, run="ema"), {"ema": dict(ema.named_parameters())}
    advice = Advice(str(outcome_of(lambda: made_of.save(1, model, trained, kept))))
    said.append(advice.message)
    advice.says('save(step, {"model": model, "ema": ema}, optim, train_state), and load it in the same way')
    made_of.save(1, {"model": model, "ema": ema}, trained, TrainState(epoch=1))
    other: Any = nn.Linear(8, 6, bias=False)
    fully_shard(other)
    made_of.load("ema@1", {"model": model, "ema": other}, trained)
    assert torch.equal(other.weight.to_local(), ema.weight.to_local())

    if rank:
        error = outcome_of(lambda: casckpt.unshard_model_state(store, "removed@1", rank0_only=True, no_dist=True))
        said.append(str(error))
    found = casckpt.unshard_model_state(store, "removed@1", rank0_only=True)
    assert bool(found) == (rank == 0)
    return said


@follows("frontends/training_state/slices.py:refused", "Load it on the same number of ranks with the same sharding, or")
@follows("frontends/training_state/contents.py:_of_one_rank", "Pass it next to the model, as in")
@follows("frontends/training_state/unshard.py:_unshard", "leave no_dist out")
def test_the_advice_about_state_of_shards_works(ranks: Pool, store_path: Path, messages: Messages) -> None:
    _, (ema, alone) = ranks.run(2, state_of_shards, str(store_path))
    messages.text(ema).says("load it in the same way")
    messages.text(alone).says("leave no_dist out")
    model: Any = nn.Linear(8, 6, bias=False)
    with messages.error(Mismatch) as advice:
        load_model_and_optim_state(store_path, "scales@1", model, SGD(model.parameters()))
    load_model_and_optim_state(store_path, "scales@1", model, **advice.argument("optim"))
    assert ranks.run(2, load_scales, str(store_path)) == [2.0, 3.0]


def load_scales(rank: int, size: int, path: str) -> float:
    model: Any = nn.Linear(8, 6, bias=False)
    fully_shard(model)
    trained = SGD(model.parameters())
    load_model_and_optim_state(path, "scales@1", model, trained)
    return float(trained.state[model.weight]["scales"][0].item())


# trainings


def checkpointer(store: Store, **settings: Any) -> Checkpointer:
    return Checkpointer(store, run="sft", **settings)


@follows(
    "frontends/trainer/checkpointer.py:Checkpointer._after", "create the Checkpointer with gc=True, or run `casckpt gc"
)
@pytest.mark.parametrize("way", ["gc=True", "casckpt gc"])
def test_gc_frees_the_space_of_rotated_checkpoints(
    store: Store, store_path: Path, messages: Messages, run: Run, way: str
) -> None:
    store.create()
    store.change_settings(min_age=0, min_age_ephemeral=0)

    def train(run_name: str, **settings: Any) -> None:
        with Checkpointer(store, run=run_name, keep=1, **settings) as made:
            for step in (1, 2, 3):
                made.save(step, Two())

    with messages.log() as advice:
        train("sft")
    blobs = len(list(store_path.rglob("*.safetensors")))
    if way == "gc=True":
        train("again", **advice.argument("gc"))
        assert len(list(store_path.rglob("*.safetensors"))) < blobs + 3
    else:
        run(*advice.command("gc"))
        assert len(list(store_path.rglob("*.safetensors"))) < blobs


@follows("frontends/trainer/space.py:", "With gc=True and a rule such as max_checkpoints=2, a Checkpointer frees what")
def test_a_checkpointer_with_gc_and_a_rule_survives_a_full_disk_as_advised(messages: Messages) -> None:
    store = small(SmallDisk(memory(near=False), 45 * CELL))
    plain = checkpointer(store)
    plain.save(1, {"w": cells(16)})
    plain.save(2, {"w": cells(16)})
    with messages.error(StorageError) as advice:
        plain.save(3, {"w": cells(16)})
    with checkpointer(store, **advice.argument("gc"), max_checkpoints=1) as made:
        assert advice.argument("max_checkpoints") == {"max_checkpoints": 2}  # two do not leave room for a third
        made.resume({"w": cells(16)})
        made.save(3, {"w": cells(16)})
    assert [one.step for one in store.checkpoints("sft")] == [3]


@follows("frontends/trainer/space.py:RunSpace.check", "leaves min_free=…. Free some space, or lower min_free")
@pytest.mark.parametrize("way", ["Free some space", "lower min_free"])
def test_a_save_that_leaves_too_little_room_succeeds_as_advised(messages: Messages, way: str) -> None:
    disk = SmallDisk(memory(near=False), 60 * CELL, foreign=30 * CELL)
    store = small(disk)
    made = checkpointer(store, min_free=20 * CELL)
    with messages.error(StorageError) as advice:
        made.save(1, {"w": cells(16)})
    advice.says(way)
    if way == "Free some space":
        disk.foreign = 0
    else:
        made = checkpointer(store, min_free=10 * CELL)
    made.save(1, {"w": cells(16)})
    assert [one.step for one in store.checkpoints("sft")] == [1]


@follows("frontends/trainer/checkpointer.py:Checkpointer._warn_of_unsaved", "pass last_step=%d to the Checkpointer, or")
@pytest.mark.parametrize("way", ["last_step", "last"])
def test_the_last_training_step_is_saved(store: Store, model: Two, messages: Messages, way: str) -> None:
    def train(run: str, last: dict[str, Any] | None = None, **settings: Any) -> None:
        with Checkpointer(store, run=run, save_interval=2, **settings) as made:
            for step in range(1, 6):
                made.save_if_due(step, model, **(last or {} if step == 5 else {}))

    with messages.log() as advice:
        train("sft")
    given = advice.argument(way)
    train("again", **({"last": given} if way == "last" else given))
    assert [one.step for one in store.checkpoints("again")] == [2, 4, 5]


@follows(
    "frontends/training_state/contents.py:",
    'pass unread="ignore" (or load_optim_state=False, load_trainer_state=False)',
)
@pytest.mark.parametrize("way", ["unread", "load_optim_state"])
def test_the_suggested_option_hides_the_parts_that_a_resume_skips(
    store: Store, model: Two, messages: Messages, way: str
) -> None:
    made = Checkpointer(store, run=(name := f"leaving-{way}"))
    made.save(1, model, stepped(model), TrainState(epoch=1))
    with messages.log() as advice:
        made.load(f"{name}@1", Two())
    given = advice.argument(way)
    if way == "load_optim_state":
        given |= advice.argument("load_trainer_state")
    with logged() as texts:
        made.load(f"{name}@1", Two(), **given)
    assert texts == []


class Whole(nn.Module):
    """A module that defines its own saved state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def state_dict_to_save(self) -> dict[str, Any]:
        return {"model": {"weight": self.weight.detach()}}

    def state_dict_to_load(self, metadata: Any) -> dict[str, Any]:
        return self.state_dict_to_save()


@follows("frontends/training_state/contents.py:_contents", "do not pass an optimizer")
def test_a_train_module_can_be_saved_without_an_optimizer(store: Store, messages: Messages) -> None:
    whole: Any = Whole()
    with messages.error(InvalidInput) as advice:
        checkpointer(store).save(1, whole, SGD(whole.parameters()))
    advice.says("do not pass an optimizer")
    checkpointer(store).save(1, whole)
    assert torch.equal(store.read("sft@1")["model"]["weight"], torch.ones(2))


@follows(
    "frontends/training_state/contents.py:Restoring.load.wanted_optimizers",
    "requires an optimizer to load into; pass optim",
)
def test_optimizer_state_can_be_loaded_into_an_optimizer(store: Store, model: Two, messages: Messages) -> None:
    made = checkpointer(store)
    made.save(1, model, stepped(model))
    with messages.error(InvalidInput) as advice:
        made.load("sft@1", Two(), load_optim_state=True)
    fresh = Two()
    new: Any = {advice.says("pass optim").split()[-1]: SGD(fresh.parameters())}
    made.load("sft@1", fresh, load_optim_state=True, **new)
    assert len(new["optim"].state) == 2


@follows("frontends/training_state/contents.py:Restoring._check_there", '=None (in a resume: missing="warn")')
@pytest.mark.parametrize("way", ["load_optim_state", "missing", "another"])
def test_training_can_resume_without_the_parts_that_were_not_saved(
    store: Store, model: Two, messages: Messages, way: str
) -> None:
    made = checkpointer(store)
    made.save(1, model, stepped(model))
    made.save(2, model)
    fresh = Two()
    with messages.error(NotFound) as advice:
        if way == "missing":
            made.resume(fresh, SGD(fresh.parameters()))
        else:
            made.load("sft@2", fresh, SGD(fresh.parameters()), load_optim_state=True)
    if way == "missing":
        made.resume(fresh, SGD(fresh.parameters()), **advice.argument(way))
    elif way == "another":
        advice.says("choose a different checkpoint")
        made.load("sft@1", fresh, SGD(fresh.parameters()), load_optim_state=True)
    else:
        made.load("sft@2", fresh, SGD(fresh.parameters()), **advice.argument(way))
    assert identical(weights(fresh), weights(model))


class Loading(Whole):
    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # as OLMo-core has it
        with torch.no_grad():
            self.weight.copy_(state["model"]["weight"])


@follows("frontends/training_state/contents.py:Restoring.load.wanted_optimizers", 'omit options="keep"')
def test_a_model_loaded_directly_does_not_have_options_to_keep(store: Store, messages: Messages) -> None:
    whole: Any = Loading()
    checkpointer(store).save(1, whole)
    whole.weight.data.zero_()
    with messages.error(InvalidInput) as advice:
        checkpointer(store).resume(whole, options="keep")
    advice.says('omit options="keep"')
    checkpointer(store).resume(whole)
    assert torch.equal(whole.weight, torch.ones(2))


@follows("frontends/trainer/resumed.py:", 'but not passed to resume; to ignore this, pass unread="ignore"')
def test_a_part_that_a_resume_lacks_can_be_passed_or_skipped_explicitly(
    store: Store, model: Two, messages: Messages
) -> None:
    made = checkpointer(store)
    made.save(1, model, stepped(model))
    fresh = Two()
    with messages.log() as advice:
        made.resume(fresh)
    with logged() as texts:
        made.resume(fresh, **advice.argument("unread"))
        made.resume(fresh, SGD(fresh.parameters()))
    assert texts == []


@follows("frontends/trainer/resumed.py:", 'options="keep" keeps what was given')
def test_the_suggested_option_preserves_a_new_learning_rate(store: Store, model: Two, messages: Messages) -> None:
    made = checkpointer(store)
    first = stepped(model)
    StepLR(first, 100)
    made.save(1, model, first)
    lower = SGD(model.parameters(), lr=1e-9)
    StepLR(lower, 100)
    with messages.log() as advice:
        made.resume(model, lower)
    assert lower.param_groups[0]["lr"] > 1e-9
    lower = SGD(model.parameters(), lr=1e-9)
    StepLR(lower, 100)
    with logged() as texts:
        made.resume(model, lower, **advice.argument("options"))
    assert (lower.param_groups[0]["lr"], texts) == (1e-9, [])


@follows("frontends/training_state/settings.py:check_schedules", 'Resume without options="keep", then')
def test_a_longer_schedule_is_rebuilt_after_the_resume(store: Store, model: Two, messages: Messages) -> None:
    def parts(steps: int) -> Any:
        optimizer = SGD(model.parameters())
        return model, optimizer, TrainState(schedule=CosineAnnealingWarmRestarts(optimizer, steps))

    made = checkpointer(store)
    made.save(1, *parts(10))
    _, optimizer, train = longer = parts(20)
    with messages.error(InvalidInput) as advice:
        made.resume(*longer, options="keep")
    advice.says('Resume without options="keep"')
    made.resume(*longer)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["initial_lr"]
    train["schedule"] = CosineAnnealingWarmRestarts(optimizer, 20)
    optimizer.step()
    train["schedule"].step(5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (1 + math.cos(math.pi * 5 / 20)) / 2)


@follows("frontends/training_state/proof.py:prove.decide", "To resume without this comparison, pass prove=False")
def test_a_resume_without_a_proof_accepts_values_that_a_hook_changed(
    store: Store, model: Two, messages: Messages
) -> None:
    made = checkpointer(store)
    made.save(1, model)

    def changed() -> Any:
        fresh: Any = Two()

        def reset(*_: object) -> None:
            fresh.b.weight.data.zero_()

        fresh.register_load_state_dict_post_hook(reset)
        return fresh

    with messages.error(Mismatch) as advice:
        made.resume(changed(), prove=True)
    advice.says("'model.b.weight'")
    assert made.resume(changed(), **advice.argument("prove")) is not None


@follows("frontends/trainer/ownership.py:RunOwnership.note_load", "forget the later steps first: `casckpt forget")
@follows("frontends/trainer/ownership.py:RunOwnership.find", "Otherwise, forget it first: `casckpt forget")
def test_later_steps_can_be_forgotten_to_go_on_from_an_earlier_one(
    store: Store, store_path: Path, model: Two, messages: Messages, run: Run
) -> None:
    for step in (1, 2, 3):
        store.save({"model": model}, run="a", step=step)
    made = Checkpointer(store, run="a")
    with messages.log() as advice:
        made.load("a@1", model)
    with messages.error(Conflict) as refused:
        made.save(2, model)
    _, url, refs = refused.command("forget")
    run("forget", url, refs)
    assert made.save(2, model).step == 2
    _, url, refs = advice.command("forget")
    run("forget", url, refs)
    assert [one.step for one in store.checkpoints("a")] == [1]
    run("restore", store_path, "a@3")  # nothing is lost
    assert store.get("a@latest").step == 3


@follows("frontends/trainer/checkpointer.py:Checkpointer.prove", "call load() or resume() first")
def test_a_state_is_compared_with_the_checkpoint_that_was_loaded_first(
    store: Store, model: Two, messages: Messages
) -> None:
    made = checkpointer(store)
    made.save(1, model)
    with messages.error(InvalidInput) as advice:
        made.prove(model)
    advice.says("call load() or resume() first")
    made.load("sft@1", model)
    assert made.prove(model).unproved == {}


@follows("frontends/trainer/run_checkpoints.py:newest_healthy", "to load one of them, name its step")
def test_an_unhealthy_checkpoint_can_be_loaded_by_its_step(store: Store, model: Two, messages: Messages) -> None:
    made = checkpointer(store)
    made.save(1, model, healthy=False)
    fresh = Two()
    with messages.error(NotFound) as advice:
        made.resume(fresh, healthy=True)
    advice.says("name its step")
    made.load("sft@1", fresh)
    assert identical(weights(fresh), weights(model))


@follows(
    "frontends/trainer/settings.py:TrainerSettings._check_risk", "pass a save_interval or an ephemeral_save_interval"
)
@pytest.mark.parametrize("way", ["save_interval", "ephemeral_save_interval"])
def test_a_smaller_interval_limits_the_steps_at_risk(messages: Messages, way: str) -> None:
    with messages.error(InvalidInput) as advice:
        CheckpointerConfig(max_steps_at_risk=5, save_interval=None)
    interval: Any = {advice.says(way): 5}
    assert CheckpointerConfig(max_steps_at_risk=5, **({"save_interval": None} | interval)).longest_gap == 5


@follows("storage/throttle.py:Turn._wait", "set work_dir= to a folder on a local disk")
def test_a_throttle_works_in_a_folder_that_supports_locks(
    store: Store, tmp_path: Path, model: Two, messages: Messages
) -> None:
    (tmp_path / "file").touch()
    with messages.error(StorageError) as advice:
        checkpointer(store, throttle=1, work_dir=tmp_path / "file").save(1, model)
    folder: Any = {advice.says("work_dir=")[:-1]: tmp_path / "work"}
    checkpointer(store, throttle=1, **folder).save(1, model)
    assert store.get("sft@1").step == 1


@follows("frontends/training_state/train_state.py:restore_rng", "pass the result of rng_state")
def test_generators_can_be_restored_from_a_complete_state(messages: Messages) -> None:
    with messages.error(MissingKey) as advice:
        restore_rng({"torch": torch.get_rng_state()})
    advice.says("rng_state")
    state = rng_state()
    first = torch.rand(3)
    restore_rng(state)
    assert torch.equal(torch.rand(3), first)


@follows(
    "frontends/training_state/train_state.py:TrainState._missing", "rng=False leaves out the random number generators"
)
def test_parts_that_a_checkpoint_lacks_can_be_omitted_from_a_train_state(messages: Messages) -> None:
    with messages.error(MissingKey) as advice:
        TrainState(epoch=0, place=1).load_state_dict({"epoch": 3})
    advice.says("Leave this part out of the TrainState")
    train = TrainState(epoch=0, **advice.argument("rng"))
    train.load_state_dict({"epoch": 3})
    assert train["epoch"] == 3
