"""State of one kind of optimizer for another: it serves, or it is refused before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

import casckpt
from casckpt.errors import Mismatch
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state
from casckpt.frontends.training_state.kinds import StateKind
from tests.support.saves import small
from tests.support.training import everything, identical

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True}],
    "SGD": [{}, {"momentum": 0.9}],
}
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    f"{name} {options or ''}".strip(): partial(kind, lr=0.1, **options)  # type: ignore[call-arg]  # all of them take it
    for name, kind in vars(optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    for options in OPTIONS.get(name, [{}])
}


def made(kind: str, seed: int) -> tuple[nn.Module, Optimizer]:
    """One matrix, which every kind takes, and an optimizer."""
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)))
    return model, KINDS[kind](model.parameters())


def step(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.grad = gradient.to_sparse() if isinstance(optimizer, optim.SparseAdam) else gradient
    optimizer.step(lambda: next(model.parameters()).square().sum())  # type: ignore[arg-type,return-value]  # LBFGS takes a closure


def stepped_on(model: nn.Module, optimizer: Optimizer) -> str | None:
    """What goes wrong in one step more: torch 2.11's Adagrad cannot go on from SGD's, which has no state."""
    try:
        step(model, optimizer, 3)
    except KeyError as error:
        return str(error)
    return None


def torchs_own(saved: Optimizer, model: nn.Module, optimizer: Optimizer, kind: str) -> tuple[nn.Module, Optimizer]:
    """The same model, and an optimizer of this kind that takes over what was saved as torch itself has it."""
    other, alike = made(kind, 0)
    other.load_state_dict(model.state_dict())
    state = copy.deepcopy(saved.state_dict())
    state["param_groups"] = [{**optimizer.state_dict()["param_groups"][0], **state["param_groups"][0]}]
    alike.load_state_dict(state)
    return other, alike


@pytest.fixture(scope="module")
def trained() -> dict[str, tuple[casckpt.Store, Optimizer]]:
    """Of each kind: a store with what one step left, and the optimizer that took it."""
    found = {}
    for kind in KINDS:
        store = small()
        model, optimizer = made(kind, 1)
        step(model, optimizer, 1)
        save_model_and_optim_state(store, model, optimizer, run="a", step=1)
        found[kind] = store, optimizer
    return found


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("stepped", [True, False], ids=["stepped", "fresh"])
def test_state_of_each_kind_loads_into_each_other_kind_or_is_refused(
    trained: dict[str, tuple[casckpt.Store, Optimizer]], strict: bool, stepped: bool
) -> None:
    serves = set()
    for of, kind in product(KINDS, KINDS):
        store, saved = trained[of]
        model, optimizer = made(kind, 2)
        if stepped:
            step(model, optimizer, 2)
        before = everything(model, optimizer)
        try:
            load_model_and_optim_state(store, "a@1", model, optimizer, strict=strict)
        except Mismatch:
            assert identical(everything(model, optimizer), before), (of, kind)
            step(model, optimizer, 3)
            continue
        serves.add((of, kind))
        expected = torchs_own(saved, model, optimizer, kind)
        assert stepped_on(*expected) == stepped_on(model, optimizer), (of, kind)
        assert identical(everything(model, optimizer), everything(*expected)), (of, kind)
    assert {(kind, kind) for kind in KINDS} <= serves
    assert not strict or all(_family(of) == _family(kind) for of, kind in serves), serves


def _family(kind: str) -> str:
    """Kinds that keep the same."""
    name = kind.partition(" ")[0]
    return "Adam" if name in ("AdamW", "RAdam", "SparseAdam") else name


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_of_kinds_matches_the_state_of_torch(kind: str) -> None:
    """Should a version of torch keep more or less, this says so."""
    model, optimizer = made(kind, 1)
    step(model, optimizer, 1)
    known = StateKind.of(optimizer)
    assert known is not None
    for state in optimizer.state.values():
        assert known.needs(optimizer.param_groups[0]) <= state.keys() <= known.keeps()


class More(optim.SGD):
    """An optimizer of a user, which keeps more than the one that it is made of."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = self.state[parameter].get("seen", 0) + 1
        return super().step(closure)


class Slow(optim.Adam):
    """Another, which steps as Adam does, and keeps a copy beside that."""

    def note(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["slow"] = parameter.detach().clone()


@pytest.mark.parametrize("make", [More, Slow])
def test_an_optimizer_of_the_user_may_have_any_state(make: Callable[..., Any]) -> None:
    store, model = small(), made("SGD", 1)[0]
    optimizer = make(model.parameters(), lr=0.1)
    step(model, optimizer, 1)
    if make is Slow:
        optimizer.note()
    save_model_and_optim_state(store, model, optimizer, run="a", step=1)
    fresh = made("SGD", 2)[0]
    other = make(fresh.parameters(), lr=0.5)
    load_model_and_optim_state(store, "a@1", fresh, other)
    assert identical(other.state_dict(), optimizer.state_dict())


def test_a_subclass_of_a_torch_optimizer_needs_the_state_of_its_base() -> None:
    store = small()
    model, optimizer = made("Adamax", 1)
    step(model, optimizer, 1)
    save_model_and_optim_state(store, model, optimizer, run="a", step=1)
    fresh = made("Adamax", 2)[0]
    other = Slow(fresh.parameters())
    before = everything(fresh, other)
    with pytest.raises(Mismatch, match="lacks 'exp_avg_sq'"):
        load_model_and_optim_state(store, "a@1", fresh, other)
    assert identical(everything(fresh, other), before)
