"""Lists of models and of optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from cProfile import Profile
from typing import Any

import pytest
import torch
from torch import nn, optim

from casckpt.errors import InvalidInput, Mismatch, MissingKey
from casckpt.frontends.trainer import Checkpointer
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state
from casckpt.store.store import Store
from tests.support.saves import small
from tests.support.training import contents, identical


class Stages(nn.Module):
    """Part of a model: some of its layers, under their names in the whole model."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)


def test_lists_of_models_and_optimizers_act_as_one_model_and_one_optimizer() -> None:
    store, layers = small(), {str(number): nn.Linear(3, 3) for number in range(4)}
    whole = Stages(layers)
    parts = [Stages({name: layers[name] for name in names}) for names in ("01", "23")]
    optims = [optim.AdamW(parts[0].parameters()), optim.SGD(parts[1].parameters(), momentum=0.9)]
    for number, layer in enumerate(layers.values()):
        layer(torch.full((1, 3), float(number))).sum().backward()
    for one in optims:
        one.step()
    checkpointer = Checkpointer(store, run="sft")
    saved = checkpointer.save(1, parts, optims)
    assert set(store.read("sft@1")["model"]) == set(whole.state_dict())
    groups = store.read(saved)["optim"]["param_groups"]
    assert [len(group["params"]) for group in groups] == [4, 4]
    want = [contents(part, one) for part, one in zip(parts, optims, strict=True)]
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.zero_()
    again = [optim.AdamW(parts[0].parameters()), optim.SGD(parts[1].parameters(), momentum=0.9)]
    checkpointer.load("sft@1", parts, dict(enumerate(again)), load_optim_state=True)
    assert identical([contents(part, one) for part, one in zip(parts, again, strict=True)], want)
    loaded = Checkpointer(store, run="sft")
    loaded.load("sft@1", whole)
    with pytest.raises(InvalidInput, match="two optimizers have the parameter"):
        checkpointer.save(2, parts[0], [optims[0], optims[0]])
    with pytest.raises(InvalidInput, match="two parts of the model have the name"):
        checkpointer.save(2, [parts[0], Stages({"0": nn.Linear(3, 3)})])


# one optimizer per parameter


def layers(count: int, *, seed: int = 0) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(count))


def per_parameter(model: nn.Module, *, steps: bool = False) -> list[optim.Optimizer]:
    """Return an optimizer for each parameter, with its own kind and rate, after a step if ``steps`` is set."""
    kinds: list[Any] = [optim.AdamW, optim.SGD, optim.Adagrad]
    made = [kinds[number % 3]([one], lr=0.1 * (number + 1)) for number, one in enumerate(model.parameters())]
    if steps:
        step(model, made)
    return made


def step(model: nn.Module, optimizers: Sequence[optim.Optimizer]) -> None:
    sum(one.square().sum() for one in model.parameters()).backward()  # type: ignore[union-attr]
    for one in optimizers:
        one.step()


def state_of(optimizers: list[optim.Optimizer]) -> Any:
    return [one.state_dict() for one in optimizers]


def test_optimizers_of_several_kinds_with_a_parameter_each_are_restored_exactly() -> None:
    store, model = small(), layers(6)
    optimizers = per_parameter(model, steps=True)
    save_model_and_optim_state(store, model, optimizers, run="a", step=1)
    fresh = layers(6, seed=1)
    again = per_parameter(fresh)
    load_model_and_optim_state(store, "a@1", fresh, again[::-1])
    assert identical(state_of(again), state_of(optimizers))
    with pytest.raises(MissingKey) as lacks:
        load_model_and_optim_state(save_one_less(), "a@1", fresh, again)
    assert lacks.value.keys == ("5.weight",)
    assert "Only the checkpoint has" not in str(lacks.value)


def save_one_less() -> Store:
    """Return a store with six layers as a@1, of which the last one was not trained."""
    store, model = small(), layers(6)
    save_model_and_optim_state(store, model, per_parameter(model, steps=True)[:-1], run="a", step=1)
    return store


def test_one_optimizer_and_one_per_parameter_can_load_each_other() -> None:
    store, model = small(), layers(5)
    alone = [optim.AdamW(model.parameters(), lr=0.3)]
    many = [optim.AdamW([one], lr=0.3) for one in model.parameters()]
    for one in (alone, many):
        step(model, one)
    for number, (saved, into) in enumerate([(alone, many), (many, alone)]):
        save_model_and_optim_state(store, model, saved, run="a", step=number)
        fresh = layers(5, seed=1)
        parameters = [[one] for one in fresh.parameters()] if into is many else [[*fresh.parameters()]]
        again = [optim.AdamW(one, lr=0.1) for one in parameters]
        load_model_and_optim_state(store, f"a@{number}", fresh, again)
        want = {k: v for one in saved for k, v in one.state.items()}
        got = {k: v for one in again for k, v in one.state.items()}
        pairs = zip(fresh.parameters(), model.parameters(), strict=True)
        assert all(identical(got[here], want[there]) for here, there in pairs)
        assert [group["lr"] for one in again for group in one.param_groups] == [0.3] * len(again)


def test_each_of_several_optimizers_is_checked_against_its_own_saved_groups() -> None:
    store, model = small(), layers(6)
    save_model_and_optim_state(store, model, per_parameter(model, steps=True), run="a", step=1)
    kinds = per_parameter(model)
    kinds[1] = optim.Adadelta([[*model.parameters()][1]])
    with pytest.raises(Mismatch, match="of a different kind"):
        load_model_and_optim_state(store, "a@1", model, kinds)


def test_optimizers_keep_the_state_of_parameters_that_the_checkpoint_lacks() -> None:
    store, model = small(), layers(2)
    save_model_and_optim_state(store, model, per_parameter(model, steps=True), run="a", step=1)
    fresh = layers(4, seed=1)
    again = per_parameter(fresh, steps=True)
    kept, saved = state_of(again[2:]), store.read("a@1")["optim"]["state"]
    loaded = load_model_and_optim_state(store, "a@1", fresh, again, strict=False, unread="ignore")
    assert identical(state_of(again[2:]), kept)
    assert identical(dict(again[0].state[next(fresh.parameters())]), saved["0.weight"])
    assert {key for key in loaded.missing_keys if key.startswith("optim.")} == {
        "optim.state.2.weight", "optim.state.3.weight"
    }  # fmt: skip


def test_a_rename_cannot_give_the_parameters_of_two_optimizers_the_same_state() -> None:
    store, model = small(), layers(2)
    save_model_and_optim_state(store, model, per_parameter(model, steps=True), run="a", step=1)
    rename = {"model.1.weight": "model.0.weight"}
    many = [optim.AdamW([one]) for one in model.parameters()]
    with pytest.raises(InvalidInput, match=r"two parameters of the optimizer, '0\.weight' and '1\.weight'"):
        load_model_and_optim_state(store, "a@1", model, many, rename=rename, strict=False)


def calls(count: int) -> int:
    """Return the number of calls in a save and a load of an optimizer for each of ``count`` parameters."""
    store, model, profile = small(), layers(count), Profile()
    optimizers = per_parameter(model, steps=True)
    with profile:
        save_model_and_optim_state(store, model, optimizers, run="a", step=1)
        load_model_and_optim_state(store, "a@1", model, optimizers)
    return sum(entry.callcount for entry in profile.getstats())


def test_the_work_for_one_optimizer_does_not_grow_with_the_number_of_optimizers() -> None:
    calls(3)  # fills the caches
    few, more, many = map(calls, (5, 10, 60))
    assert (many - more) / 50 < 1.2 * (more - few) / 5
