"""Matching of parameters: groups in a different number or order, tied parameters, and mismatches by name."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

import casckpt
from casckpt.errors import CasckptError, InvalidInput, Mismatch, MissingKey
from casckpt.frontends.training_state import (
    load_model_and_optim_state,
    save_model_and_optim_state,
    unshard_model_state,
    unshard_optim_state,
)
from casckpt.frontends.training_state.groups import _same
from tests.support.training import Network, everything, identical, train

NAMES = ["frozen.weight", "frozen.bias", "norm.weight", "norm.bias", "head.weight"]


def adamw(model: nn.Module, *groups: list[str], **options: list[float]) -> Optimizer:
    """Return AdamW with the named parameters in each group, and an option for each group."""
    parameters = dict(model.named_parameters())
    each = [{name: values[number] for name, values in options.items()} for number in range(len(groups))]
    made = [{"params": [parameters[name] for name in group]} | each[number] for number, group in enumerate(groups)]
    return optim.AdamW(made, lr=0.1)


def trained_pair(*groups: list[str], **options: list[float]) -> tuple[Network, Optimizer]:
    model = Network(1)
    trained = adamw(model, *groups, **options)
    train(model, trained, range(2))
    return model, trained


def state_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}


# layout


def test_one_commit_contains_the_model_and_the_optimizer_by_name(store: casckpt.Store) -> None:
    model, trained = trained_pair(NAMES[2:], NAMES[:2])
    saved = save_model_and_optim_state(store, model, trained, run="a", step=2, metadata={"loss": 0.5})
    assert [one.id for one in store.checkpoints()] == [saved.id]
    assert saved.metadata == {"loss": 0.5}
    weights = [f"model.{name}" for name in model.state_dict()]
    state = [f"optim.state.{name}.{what}" for name in NAMES[2:] for what in ("step", "exp_avg", "exp_avg_sq")]
    assert list(saved.tensors) == weights + state
    groups = store.read(saved)["optim"]["param_groups"]
    assert [group["params"] for group in groups] == [NAMES[2:], NAMES[:2]]
    assert groups[0]["lr"] == 0.1


def test_save_options_are_passed_on_to_the_store(store: casckpt.Store) -> None:
    save_model_and_optim_state(store, Network(1), run="a", step=1, ephemeral=True, attachments={"x": b"y"})
    assert store.get("a@1").ephemeral
    assert store.read_attachment("a@1", "x") == b"y"


@pytest.mark.parametrize("name", [str, lambda path: path, lambda path: path.as_uri(), casckpt.open])
def test_a_path_or_url_is_accepted_as_a_store(store_path: Any, name: Callable[[Any], Any]) -> None:
    place = name(store_path)
    model, trained = trained_pair(NAMES)
    save_model_and_optim_state(place, model, trained, run="a", step=2)
    fresh = Network(2)
    load_model_and_optim_state(place, "latest", fresh)
    assert identical(fresh.state_dict(), model.state_dict())
    assert identical(unshard_model_state(place, "latest"), model.state_dict())
    assert identical(unshard_optim_state(place, "latest"), trained.state_dict())


# groups


@pytest.mark.parametrize(
    "groups",
    [
        [NAMES[:2], NAMES[2:]],
        [NAMES[2:], NAMES[:2]],
        [NAMES[::-1]],
        [NAMES[:1], NAMES[1:3], NAMES[3:4], NAMES[4:]],
        [NAMES, []],
    ],
)
def test_the_same_parameters_load_into_different_groups(store: casckpt.Store, groups: list[list[str]]) -> None:
    model, trained = trained_pair(NAMES[:2], NAMES[2:])
    save_model_and_optim_state(store, model, trained, run="a", step=2)
    fresh = Network(2)
    other = adamw(fresh, *groups, lr=[0.7] * len(groups))
    load_model_and_optim_state(store, "a@2", fresh, other)
    assert identical(state_by_name(fresh, other), state_by_name(model, trained))
    assert [len(group["params"]) for group in other.param_groups] == [len(group) for group in groups]
    assert all(group["lr"] == 0.1 for group in other.param_groups if group["params"])


def test_optimizer_options_follow_their_parameters_to_other_groups(store: casckpt.Store) -> None:
    model, trained = trained_pair(NAMES[:3], NAMES[3:], weight_decay=[0.25, 0.0])
    save_model_and_optim_state(store, model, trained, run="a", step=2)
    fresh = Network(2)
    other = adamw(fresh, NAMES[4:], NAMES[3:4], NAMES[:3], weight_decay=[9.0, 9.0, 9.0])
    load_model_and_optim_state(store, "a@2", fresh, other)
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.0, 0.25]


def test_an_option_that_differs_between_joined_groups_is_kept(
    store: casckpt.Store, caplog: pytest.LogCaptureFixture
) -> None:
    model, trained = trained_pair(NAMES[:3], NAMES[3:], weight_decay=[0.25, 0.0], lr=[0.5, 0.5])
    save_model_and_optim_state(store, model, trained, run="a", step=2)
    fresh = Network(2)
    other = adamw(fresh, NAMES, weight_decay=[9.0])
    with caplog.at_level(logging.WARNING, "casckpt"):
        load_model_and_optim_state(store, "a@2", fresh, other)
    assert (other.param_groups[0]["weight_decay"], other.param_groups[0]["lr"]) == (9.0, 0.5)
    assert "weight_decay" in caplog.text
    assert identical(state_by_name(fresh, other), state_by_name(model, trained))


def test_an_optimizer_option_that_the_checkpoint_lacks_is_kept(store: casckpt.Store) -> None:
    model, trained = trained_pair(NAMES)
    del trained.param_groups[0]["maximize"]  # as in earlier versions of torch
    save_model_and_optim_state(store, model, trained, run="a", step=2)
    fresh = Network(2)
    other = adamw(fresh, NAMES)
    other.param_groups[0]["maximize"] = True
    load_model_and_optim_state(store, "a@2", fresh, other)
    assert other.param_groups[0]["maximize"] is True


def test_saved_state_that_belongs_to_no_parameter_is_restored(store: casckpt.Store) -> None:
    model, trained = trained_pair(NAMES)
    trained.state["shared"] = {"seen": torch.arange(3), "note": "x"}  # type: ignore[index]  # state may have any keys
    save_model_and_optim_state(store, model, trained, run="a", step=2)
    fresh = Network(2)
    other = adamw(fresh, NAMES)
    load_model_and_optim_state(store, "a@2", fresh, other)
    assert identical(other.state["shared"], trained.state["shared"])  # type: ignore[index]  # state may have any keys
    assert identical(other.state_dict(), trained.state_dict())


# mismatches: the error names them, and nothing changes


def refused(store: casckpt.Store, model: nn.Module, other: Optimizer | None, kind: type[CasckptError]) -> str:
    before = everything(model, other)
    with pytest.raises(kind) as caught:
        load_model_and_optim_state(store, "a@2", model, other)
    assert identical(everything(model, other), before)
    return str(caught.value)


@pytest.fixture
def saved(store: casckpt.Store) -> tuple[Network, Optimizer]:
    """Save a model as a@2, with an optimizer that has all parameters except one."""
    model, trained = trained_pair(NAMES[:4])
    save_model_and_optim_state(store, model, trained, run="a", step=2)
    return model, trained


def test_a_parameter_absent_from_the_saved_optimizer_is_rejected(
    store: casckpt.Store, saved: tuple[Network, Optimizer]
) -> None:
    fresh = Network(2)
    other = adamw(fresh, NAMES)
    assert "'head.weight'" in refused(store, fresh, other, MissingKey)
    train(fresh, other, range(1))
    state = dict(other.state[fresh.head.weight])
    found = load_model_and_optim_state(store, "a@2", fresh, other, strict=False)
    assert found.missing_keys == ("optim.state.head.weight",)
    assert identical(other.state[fresh.head.weight], state)
    assert identical(other.state[fresh.norm.bias], saved[1].state[saved[0].norm.bias])


def test_a_parameter_that_only_the_saved_optimizer_has_is_rejected(
    store: casckpt.Store, saved: tuple[Network, Optimizer]
) -> None:
    fresh = Network(2)
    other = adamw(fresh, NAMES[:3])
    message = refused(store, fresh, other, Mismatch)
    assert "'norm.bias'" in message
    assert "strict=False" in message
    found = load_model_and_optim_state(store, "a@2", fresh, other, strict=False)
    assert set(other.state) == {fresh.norm.weight}
    assert "optim.state.norm.bias.exp_avg" in found.unread_keys
    assert "optim.param_groups" not in found.unread_keys


def test_weights_with_a_different_shape_are_rejected(store: casckpt.Store, saved: tuple[Network, Optimizer]) -> None:
    fresh = Network(2)
    fresh.head = nn.Linear(5, 4, bias=False)
    assert "'model.head.weight'" in refused(store, fresh, adamw(fresh, NAMES[:4]), Mismatch)


def test_weights_with_a_different_dtype_are_rejected(store: casckpt.Store, saved: tuple[Network, Optimizer]) -> None:
    fresh = Network(2).double()
    assert "cast=True" in refused(store, fresh, None, Mismatch)
    load_model_and_optim_state(store, "a@2", fresh, adamw(fresh, NAMES[:4]), cast=True)
    assert torch.equal(fresh.head.weight, saved[0].head.weight.double())


def test_a_weight_absent_from_the_checkpoint_is_rejected(
    store: casckpt.Store, saved: tuple[Network, Optimizer]
) -> None:
    fresh = Network(2)
    fresh.extra = extra = nn.Linear(1, 1)
    before = extra.weight.detach().clone()
    assert "'model.extra.weight'" in refused(store, fresh, adamw(fresh, NAMES[:4]), MissingKey)
    found = load_model_and_optim_state(store, "a@2", fresh, strict=False)
    assert found.missing_keys == ("model.extra.weight", "model.extra.bias")
    assert torch.equal(extra.weight, before)
    assert torch.equal(fresh.head.weight, saved[0].head.weight)


def test_a_weight_that_only_the_checkpoint_has_is_rejected(
    store: casckpt.Store, saved: tuple[Network, Optimizer]
) -> None:
    fresh = Network(2)
    del fresh.head
    message = refused(store, fresh, adamw(fresh, NAMES[:4]), Mismatch)
    assert "'head.weight'" in message
    assert "strict=False" in message
    load_model_and_optim_state(store, "a@2", fresh, strict=False)
    assert torch.equal(fresh.norm.running_mean, saved[0].norm.running_mean)  # type: ignore[arg-type]  # it has one


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda parameters: optim.SGD(parameters, lr=0.1), "momentum"),
        (optim.RMSprop, "alpha"),
        (optim.LBFGS, "history_size"),
    ],
)
def test_the_state_of_an_optimizer_of_a_different_kind_is_rejected(
    store: casckpt.Store, saved: tuple[Network, Optimizer], make: Callable[[Any], Optimizer], option: str
) -> None:
    fresh = Network(2)
    parameters = [dict(fresh.named_parameters())[name] for name in NAMES[:4]]
    message = refused(store, fresh, make(parameters), Mismatch)
    assert f"'{option}'" in message
    assert "'betas'" in message


def test_a_checkpoint_without_an_optimizer_is_rejected(store: casckpt.Store) -> None:
    model = Network(1)
    save_model_and_optim_state(store, model, run="a", step=2)
    fresh = Network(2)
    other = adamw(fresh, NAMES)
    assert "optim=None" in refused(store, fresh, other, MissingKey)
    found = load_model_and_optim_state(store, "a@2", fresh, other, strict=False)
    assert found.missing_keys == ("optim.param_groups",)
    assert identical(fresh.state_dict(), model.state_dict())
    with pytest.raises(MissingKey, match="optim"):
        unshard_optim_state(store, "a@2")


def test_a_model_alone_loads_from_a_checkpoint_with_an_optimizer(
    store: casckpt.Store, saved: tuple[Network, Optimizer]
) -> None:
    fresh = Network(2)
    found = load_model_and_optim_state(store, "a@2", fresh)
    assert identical(fresh.state_dict(), saved[0].state_dict())
    assert "optim.param_groups" in found.unread_keys


def test_optimizer_state_that_was_saved_by_number_is_rejected(store: casckpt.Store) -> None:
    model, trained = trained_pair(NAMES)
    store.save({"model": model.state_dict(), "optim": trained.state_dict()}, run="a", step=2)
    assert "store.read" in refused(store, model, trained, Mismatch)
    fresh = Network(2)
    load_model_and_optim_state(store, "a@2", fresh)
    assert identical(fresh.state_dict(), model.state_dict())


def test_the_state_of_an_optimizer_of_a_different_model_is_rejected(store: casckpt.Store) -> None:
    model, trained = trained_pair(NAMES)
    with pytest.raises(InvalidInput, match=r"parameter 0 of group 0 .* \[5, 6\]"):
        save_model_and_optim_state(store, Network(1), trained, run="a", step=2)
    assert not store.repository.exists()
    save_model_and_optim_state(store, model, trained, run="a", step=2)
    assert "not in the model" in refused(store, Network(2), trained, InvalidInput)


def test_state_of_a_parameter_outside_all_groups_is_rejected(store: casckpt.Store) -> None:
    model, trained = trained_pair(NAMES)
    trained.param_groups[0]["params"].pop()
    with pytest.raises(InvalidInput, match=r"\[3, 5\].*not in any of its groups"):
        save_model_and_optim_state(store, model, trained, run="a", step=2)


def test_an_optimizer_with_additional_state_is_rejected(store: casckpt.Store) -> None:
    class Lookahead(optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "slow_state": {}}

    model = Network(1)
    with pytest.raises(InvalidInput, match=r"Lookahead.*slow_state"):
        save_model_and_optim_state(store, model, Lookahead(model.parameters(), lr=0.1), run="a", step=2)


def test_an_option_that_is_not_plain_data_is_rejected(store: casckpt.Store) -> None:
    model = Network(1)
    trained = adamw(model, NAMES)
    trained.param_groups[0]["backend"] = OrderedDict.fromkeys
    with pytest.raises(InvalidInput, match="backend"):
        save_model_and_optim_state(store, model, trained, run="a", step=2)
    save_model_and_optim_state(store, model, trained, run="a", step=2, allow_pickle=True)
    with pytest.raises(InvalidInput, match="allow_pickle"):
        load_model_and_optim_state(store, "a@2", model, trained)
    load_model_and_optim_state(store, "a@2", model, trained, allow_pickle=True)


# tied and frozen parameters


class Tied(nn.Module):
    def __init__(self, seed: int, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(4, 3)
        self.out = nn.Linear(3, 4, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.embed(x))
        return found


def tied_step(model: Tied, trained: Optimizer) -> None:
    trained.zero_grad()
    model(torch.arange(4)).square().sum().backward()
    trained.step()


def test_tied_parameters_have_one_state_and_remain_tied(store: casckpt.Store) -> None:
    model, fresh = Tied(1), Tied(2)
    trained, other = (optim.AdamW(one.parameters()) for one in (model, fresh))
    tied_step(model, trained)
    saved = save_model_and_optim_state(store, model, trained, run="a", step=1)
    assert [key for key in saved.tensors if key.endswith("exp_avg")] == ["optim.state.embed.weight.exp_avg"]
    assert {"model.embed.weight", "model.out.weight"} <= set(saved.tensors)
    load_model_and_optim_state(store, "a@1", fresh, other)
    assert fresh.out.weight is fresh.embed.weight
    for pair in ((model, trained), (fresh, other)):
        tied_step(*pair)
    assert identical(fresh.state_dict(), model.state_dict())
    assert identical(other.state_dict(), trained.state_dict())


def test_a_tied_parameter_is_found_under_either_name(store: casckpt.Store) -> None:
    class Reversed(Tied):
        def named_parameters(self, *args: Any, **options: Any) -> Any:
            return iter(reversed(list(super().named_parameters(*args, **options))))

    model, fresh = Reversed(1), Tied(2)
    trained, other = (optim.AdamW([one.embed.weight]) for one in (model, fresh))
    tied_step(model, trained)
    saved = save_model_and_optim_state(store, model, trained, run="a", step=1)
    assert "optim.state.out.weight.exp_avg" in saved.tensors
    load_model_and_optim_state(store, "a@1", fresh, other)
    assert identical(other.state_dict(), trained.state_dict())


def test_two_saved_parameters_cannot_be_loaded_into_the_same_parameter(store: casckpt.Store) -> None:
    model, fresh = Tied(1, tied=False), Tied(2)
    save_model_and_optim_state(store, model, optim.AdamW(model.parameters()), run="a", step=2)
    assert "['embed.weight', 'out.weight']" in refused(store, fresh, optim.AdamW(fresh.parameters()), Mismatch)


def test_frozen_parameters_can_be_inside_or_outside_the_optimizer(store: casckpt.Store) -> None:
    model, trained = trained_pair(NAMES)
    assert model.frozen.weight not in trained.state
    save_model_and_optim_state(store, model, trained, run="a", step=2)
    fresh = Network(2)
    other = adamw(fresh, NAMES)
    load_model_and_optim_state(store, "a@2", fresh, other)
    assert fresh.frozen.weight not in other.state
    assert not fresh.frozen.weight.requires_grad
    assert torch.equal(fresh.frozen.weight, model.frozen.weight)


def test_a_resized_model_is_rejected_only_because_of_its_shapes(store: casckpt.Store) -> None:
    def resized(rows: int) -> nn.ModuleList:
        return nn.ModuleList([nn.Embedding(rows, 2), nn.Linear(2, rows, bias=False)])

    model = resized(6)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model[1](model[0](torch.tensor(0))).sum().backward()
    optimizer.step()
    save_model_and_optim_state(store, model, optimizer, run="a", step=1)
    for loaded, lacks in ((resized(8), False), (resized(8).append(nn.Linear(1, 1)), True)):
        new = optim.SGD(loaded.parameters(), lr=0.1)
        for load in (
            partial(load_model_and_optim_state, store, "a@1", loaded, new, strict=False),
            partial(load_model_and_optim_state, store, "a@1", loaded, strict=False),
            partial(store.load, {"model": loaded, "optim": new}, "a@1", strict=False),
        ):
            with pytest.raises(Mismatch, match="2 keys do not fit a@1") as caught:
                load()
            assert ("only the template has 'model.2.weight', 'model.2.bias'" in str(caught.value)) is lacks
            assert "only the checkpoint" not in str(caught.value)


def test_non_persistent_buffers_are_neither_saved_nor_loaded(store: casckpt.Store) -> None:
    saved = save_model_and_optim_state(store, Network(1), run="a", step=1)
    assert "model.counts" in saved.tensors
    assert "model.scratch" not in saved.tensors
    fresh = Network(2)
    load_model_and_optim_state(store, "a@1", fresh)
    buffers = {name: buffer.tolist() for name, buffer in fresh.named_buffers()}
    assert buffers["counts"] == [1, 2, 3]
    assert buffers["scratch"] == [2.0] * 4


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (torch.tensor(0.1), torch.tensor(0.1), True), (torch.tensor(0.1), torch.tensor(0.1).double(), False),
        (torch.tensor(0.1), torch.tensor(0.2), False), (torch.tensor(0.1), 0.1, False), (0.1, torch.tensor(0.1), False),
        ((0.9, torch.tensor(0.1)), (0.9, torch.tensor(0.1)), True), ((0.9, 0.1), [0.9, 0.1], False),
        ((0.9, 0.1), (0.9,), False), ((0.9,), (0.9, 0.1), False), ({"a": [1]}, {"a": [1]}, True),
        ({"a": [1]}, {"a": [2]}, False), ({"a": 1}, {"b": 1}, False), ({"a": 1}, {"a": 1, "b": 1}, False),
        (1, 1.0, False), (1, True, False), (None, None, True), (None, 0, False), ({"a": 1}, [1], False),
    ],
)  # fmt: skip
def test_group_options_are_equal_only_if_their_types_are_equal(one: Any, other: Any, alike: bool) -> None:
    assert _same(one, other) is alike


def test_weights_that_were_saved_apart_load_once_they_are_untied(store: casckpt.Store) -> None:
    def made(*, tied: bool) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        if tied:
            second.weight = first.weight
        model = nn.Sequential(first, second)
        return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, trained = made(tied=False)
    model(torch.ones(1, 2)).sum().backward()
    trained.step()
    save_model_and_optim_state(store, model, trained, run="a", step=1)
    with pytest.raises(Mismatch, match="are tied in this model, but not in the checkpoint: untie them"):
        load_model_and_optim_state(store, "a@1", *made(tied=True))
    other, fresh = made(tied=False)
    load_model_and_optim_state(store, "a@1", other, fresh)
    assert identical(dict(other.state_dict()), dict(model.state_dict()))
    assert identical(fresh.state_dict(), trained.state_dict())
