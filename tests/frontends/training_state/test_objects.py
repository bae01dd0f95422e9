"""Models, optimizers and other objects in a state: how `Store.save` stores them and how `Store.load` fills them."""

from __future__ import annotations

import ast
import copy
import itertools
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import casckpt
from casckpt.contents.signatures import get_trusted
from casckpt.errors import InvalidInput, Mismatch, MissingKey
from casckpt.format.manifest import Manifest
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state
from casckpt.frontends.training_state.stored import StoredTraining
from casckpt.loading.options import renamer
from casckpt.store.store import Store
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import small
from tests.support.training import identical, made, train, trained


def manifest(store: Store, ref: str) -> Manifest:
    return get_trusted(store.repository, store.get(ref).commit)


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


def contents(model: nn.Module, optimizer: optim.Optimizer | None = None) -> Any:
    """Return a copy of the values that are saved for the model and the optimizer."""
    return copy.deepcopy([model.state_dict(), {} if optimizer is None else optimizer.state_dict()])


class Counter:
    """An object with a state_dict. ``log``: the names of the objects in the order of calls."""

    def __init__(self, name: str, log: list[str], value: int = 0) -> None:
        self.name, self.log, self.value = name, log, value

    def state_dict(self) -> dict[str, int]:
        self.log.append(self.name)
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.log.append(self.name)
        self.value = state["value"]


class Scaled(nn.Linear):
    """Like a quantized layer, it saves a scale that it does not read."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = torch.ones(1)


def test_objects_are_stored_as_by_save_model_and_optim_state() -> None:
    store, (model, optimizer) = small(), trained()
    store.save({"model": model, "optim": optimizer}, run="objects", step=1)
    save_model_and_optim_state(store, model, optimizer, run="named", step=1)
    one, other = manifest(store, "objects@1"), manifest(store, "named@1")
    assert one.body.tree == other.body.tree
    assert list(one.tensors) == list(other.tensors)
    assert [item.key for item in one.objects] == [item.key for item in other.objects]
    assert identical(store.read("objects@1"), store.read("named@1"))


def test_a_fresh_optimizer_receives_its_moments_and_learning_rate(caplog: pytest.LogCaptureFixture) -> None:
    store, (model, optimizer) = small(), trained()
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.param_groups[0]["lr"] = 0.125
    store.save({"model": model, "optim": optimizer, "sched": schedule, "epoch": 3}, run="a", step=1)
    fresh, fresh_optimizer = made(seed=1)
    state: dict[str, Any] = {
        "model": fresh,
        "optim": fresh_optimizer,
        "sched": optim.lr_scheduler.StepLR(fresh_optimizer, 7),
        "epoch": 0,
    }
    loaded = store.load(state, "a@1")
    assert identical(contents(fresh, fresh_optimizer), contents(model, optimizer))
    assert state["sched"].state_dict() == schedule.state_dict()
    assert state["epoch"] == 3
    assert not loaded.missing_keys + loaded.unread_keys
    assert "did not read" not in warnings(caplog)


def test_each_of_the_two_front_ends_can_load_checkpoints_of_the_other() -> None:
    store, (model, optimizer) = small(), trained()
    store.save({"model": model, "optim": optimizer}, run="a", step=1)
    save_model_and_optim_state(store, model, optimizer, run="b", step=1)
    for load, ref in itertools.product((load_model_and_optim_state, load_objects), ("a@1", "b@1")):
        fresh, fresh_optimizer = made(seed=1)
        load(store, ref, fresh, fresh_optimizer)
        assert identical(contents(fresh, fresh_optimizer), contents(model, optimizer))


def load_objects(store: Store, ref: str, model: nn.Module, optimizer: optim.Optimizer, **options: Any) -> Any:
    return store.load({"model": model, "optim": optimizer}, ref, **options)


def adversaries(seed: int) -> dict[str, Any]:
    """Return two nested models with equal parameter names, each with its optimizer."""
    (one, its), (other, others) = (made(seed), made(seed + 1)) if seed else (trained(5), trained(6))
    return {"nets": {"g": one, "d": other}, "optims": [others, its]}


def test_an_optimizer_belongs_to_the_module_that_has_its_parameters() -> None:
    store, saved, fresh = small(), adversaries(0), adversaries(20)
    store.save(saved, run="a", step=1)
    keys = store.get("a@1").tensors
    assert {"nets.g.head.weight", "nets.d.head.weight", "optims.0.state.head.weight.exp_avg"} <= set(keys)
    store.load(fresh, "a@1")
    for name, number in (("g", 1), ("d", 0)):
        got, want = (contents(state["nets"][name], state["optims"][number]) for state in (fresh, saved))
        assert identical(got, want)


@pytest.mark.parametrize("given", [list, tuple, lambda several: {"x": several[0], "y": several[1]}])
def test_optimizers_beside_a_dict_of_models_belong_to_parameters_and_not_to_positions(given: Any) -> None:
    store, saved, fresh = small(), adversaries(0), adversaries(20)
    Checkpointer(store, run="a").save(1, saved["nets"], given(saved["optims"]))
    resumed = Checkpointer(store, run="a")
    assert resumed.resume(fresh["nets"], given(fresh["optims"][::-1]), prove=True) is not None
    for name, number in (("g", 1), ("d", 0)):
        got, want = (contents(state["nets"][name], state["optims"][number]) for state in (fresh, saved))
        assert identical(got, want)
    with pytest.raises(InvalidInput, match="two optimizers have the parameter 'g"):
        resumed.save(2, fresh["nets"], [*fresh["optims"], adamw(fresh["nets"]["g"])])


def adamw(*models: nn.Module) -> optim.AdamW:
    return optim.AdamW(dict.fromkeys(one for model in models for one in model.parameters()), lr=0.01)


def shared_out(seed: int = 0) -> dict[str, Any]:
    """Return two models, one of which shares a layer with the other, and an optimizer of both after some steps."""
    (one, _), (other, _) = made(seed), made(seed + 1)
    other.norm = one.norm
    whole = adamw(one, other)
    train(one, whole, range(1))
    train(other, whole, range(2))
    return {"a": one, "nets": {"b": other}, "optim": whole}


def of_shared_out(state: Any) -> Any:
    """Return a copy of the models and of the optimizer state by parameter name."""
    one, other = state["a"], state["nets"]["b"]
    named = [*one.named_parameters(), *other.named_parameters()]
    return copy.deepcopy([one.state_dict(), other.state_dict(), [state["optim"].state.get(p) for _, p in named]])


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (lambda: {"optim": made()[1]}, "the modules in the state lack parameters of the optimizer 'optim'"),
        (lambda: {"model": made()[0], "optim": made(1)[1]}, 'as in {"model": model, "optim": optim}'),
        (lambda: {"optim": torch.optim.SGD([torch.zeros(7, requires_grad=True)])}, "such as one of shape [7]"),
        (lambda: {**shared_out(), "nets": {}}, "only 'a' have some of them: pass the modules of the others as well"),
        (lambda: {"model": casckpt.PerRank(made()[0])}, "'model' is in a PerRank"),
        (lambda: {"loader": DataLoader([1])}, "StatefulDataLoader"),  # type: ignore[arg-type]  # a list is sufficient
    ],
)
def test_an_object_that_cannot_be_stored_is_rejected(state: Callable[[], Any], says: str) -> None:
    store = small()
    with pytest.raises(InvalidInput) as refused:
        store.save(state(), run="a", step=1)
    assert says in str(refused.value)
    assert not store.repository.exists() or not store.checkpoints()


def test_an_optimizer_can_have_the_parameters_of_several_modules() -> None:
    store, saved, fresh = small(), shared_out(), shared_out(20)
    store.save(saved, run="a", step=1)
    names = {f"optim.state.{name}.exp_avg" for name in ("a.norm.weight", "a.head.weight", "nets.b.head.weight")}
    assert {key for key in store.get("a@1").tensors if key.endswith("weight.exp_avg")} == names
    store.load(fresh, "a@1")
    assert identical(of_shared_out(fresh), of_shared_out(saved))
    again = shared_out(30)
    again["optim"].state.clear()
    resumed = Checkpointer(store, run="a").resume(again, prove=True)
    assert resumed is not None
    assert not (*resumed.missing_keys, *resumed.unread_keys)
    assert identical(of_shared_out(again), of_shared_out(saved))


def test_the_groups_of_all_optimizers_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, reads, values = small(), list[list[str]](), StoredTraining.values

    def noted(stored: StoredTraining, keys: Any, **options: Any) -> Any:
        reads.append(list(keys))
        return values(stored, keys, **options)

    monkeypatch.setattr(StoredTraining, "values", noted)
    saved = adversaries(0)
    store.save(saved, run="a", step=1)
    store.load(saved, "a@1")
    assert reads == [["optims.0.param_groups", "optims.1.param_groups"]]


def test_the_names_of_an_optimizer_of_several_modules_follow_a_rename_of_each_module() -> None:
    store, saved, fresh = small(), shared_out(), shared_out(20)
    store.save({"x": saved["a"], "y": {"z": saved["nets"]["b"]}, "adam": saved["optim"]}, run="a", step=1)
    rename = {r"a\.(.*)": r"x.\1", r"nets\.b\.(.*)": r"y.z.\1", r"optim\.(.*)": r"adam.\1"}
    loaded = store.load(fresh, "a@1", rename=rename)
    assert identical(of_shared_out(fresh), of_shared_out(saved))
    assert not (*loaded.missing_keys, *loaded.unread_keys)


def test_an_optimizer_of_several_modules_keeps_the_state_of_a_parameter_that_does_not_fit() -> None:
    store, saved, fresh = small(), shared_out(), shared_out(20)
    store.save(saved, run="a", step=1)
    head = fresh["nets"]["b"].head = nn.Linear(5, 4, bias=False)
    fresh["optim"] = adamw(fresh["a"], fresh["nets"]["b"])
    store.load(fresh, "a@1", ignore_mismatched=["nets.b.head.*"])
    assert head.weight not in fresh["optim"].state
    assert identical(of_shared_out(fresh)[0], of_shared_out(saved)[0])


def test_all_objects_are_checked_before_any_of_them_changes() -> None:
    store, (model, optimizer) = small(), trained()
    store.save({"model": model, "optim": optimizer, "ema": nn.Linear(2, 2)}, run="a", step=1)
    fresh, fresh_optimizer = made(seed=1)
    sgd, log = optim.SGD(fresh.parameters(), momentum=0.5), list[str]()
    before = contents(fresh, fresh_optimizer)
    cases: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"model": fresh, "ema": nn.Linear(3, 2)}, Mismatch),  # shape
        ({"model": fresh, "optim": sgd}, Mismatch),  # kind of optimizer
        ({"model": fresh, "ema": nn.Linear(2, 2, bias=False)}, Mismatch),  # a name that the module lacks
        ({"model": fresh, "sched": Counter("sched", log)}, MissingKey),
        ({"model": fresh, "ema_optim": optim.SGD(fresh.parameters())}, MissingKey),
        ({"model": fresh, "beside": torch.zeros(3)}, MissingKey),
    ]
    for state, kind in cases:
        with pytest.raises(kind):
            store.load(state, "a@1")
    assert identical(contents(fresh, fresh_optimizer), before)
    assert not log


def test_a_module_that_reads_less_than_it_saves_is_rejected_before_any_change() -> None:
    store, layer = small(), Scaled(4, 4)
    store.save({"layer": layer}, run="a", step=1)
    fresh = Scaled(4, 4)
    before = fresh.weight.detach().clone()
    for strict in (True, False):
        with pytest.raises(Mismatch, match=r"weight\.scale"):
            store.load({"layer": fresh}, "a@1", strict=strict)
    assert torch.equal(fresh.weight, before)


def test_missing_parts_are_left_unchanged_if_allowed() -> None:
    store, log = small(), list[str]()
    model, _ = trained()
    store.save({"model": model}, run="a", step=1)
    fresh, fresh_optimizer = made(seed=1)
    state: dict[str, Any] = {"model": fresh, "optim": fresh_optimizer, "more": Counter("more", log, 4), "epoch": 7}
    loaded = store.load(state, "a@1", strict=False)
    assert set(loaded.missing_keys) == {"optim.param_groups", "more", "epoch"}
    assert (state["more"].value, state["epoch"], log) == (4, 7, [])
    assert identical(contents(fresh), contents(model))


def test_objects_are_saved_in_key_order_and_generators_are_loaded_last() -> None:
    store, log = small(), list[str]()

    class Drawing(Counter):
        def load_state_dict(self, state: dict[str, int]) -> None:
            super().load_state_dict(state)
            random.random(), np.random.rand(), torch.rand(1, generator=state_of["b"])  # noqa: NPY002

    def fresh() -> dict[str, Any]:
        generators = {"b": torch.Generator(), "c": [np.random.default_rng(1), random.Random(1)]}
        return {"z": Drawing("z", log), "a": TrainState(), "e": Counter("e", log), **generators}

    state_of = fresh()
    store.save(state_of, run="a", step=1)
    assert log == ["e", "z"]
    drawn = draw(state_of)
    random.seed(3)
    state_of = fresh()
    store.load(state_of, "a@1")
    assert log == ["e", "z", "e", "z"]
    assert draw(state_of) == drawn


def draw(state: dict[str, Any]) -> list[float]:
    array, plain = state["c"]
    return [random.random(), float(torch.rand(1, generator=state["b"])), array.random(), plain.random()]


def test_states_with_objects_can_be_saved_in_the_background_returned_by_a_function_and_updated() -> None:
    store, (model, optimizer) = small(), trained()
    state = {"model": model, "optim": optimizer, "t": torch.ones(3)}
    store.warm_up(state)
    store.save_async(state, run="a", step=1).result()
    store.save(lambda: state, run="a", step=2)
    fresh, fresh_optimizer = made(seed=1)
    mine: dict[str, Any] = {"model": fresh, "optim": fresh_optimizer, "t": torch.zeros(3)}
    held = store.load(mine, "a@1")
    with torch.no_grad():
        model.head.weight.add_(1)
    store.save(state, run="a", step=3)
    held = store.update(mine, "a@3", held=held)
    assert identical(contents(fresh, fresh_optimizer), contents(model, optimizer))
    assert torch.equal(mine["t"], torch.ones(3))
    assert [store.compare(mine, f"a@{step}").is_same for step in (1, 3)] == [False, True]


def test_objects_can_be_in_per_rank_values_and_in_lists() -> None:
    store, log = small(), list[str]()
    store.save({"l": casckpt.PerRank(Counter("l", log, 1)), "n": [{"x": Counter("x", log, 2)}]}, run="a", step=1)
    one, other = Counter("l", log), Counter("x", log)
    store.load({"l": casckpt.PerRank(one), "n": [{"x": other}]}, "a@1")
    assert (one.value, other.value) == (1, 2)


@pytest.mark.parametrize("count", [1, 3])
def test_a_list_of_objects_must_have_the_saved_length(count: int) -> None:
    store = small()
    store.save({"l": [Counter("a", [], 1), Counter("b", [], 2)]}, run="a", step=1)
    objects = [Counter("", []) for _ in range(count)]
    with pytest.raises(Mismatch, match=f"a list of {count}"):
        store.load({"l": objects}, "a@1")
    assert [one.value for one in objects] == [0] * count


def test_check_accepts_every_state_that_save_accepts() -> None:
    store, (model, optimizer) = small(), trained()
    store.check({"model": model, "optim": optimizer})
    store.check(lambda: {"model": model, "optim": optimizer})
    with pytest.raises(InvalidInput, match="'optim'"):
        store.check({"optim": optimizer})
    assert store.checkpoints() == []


def test_filling_a_state_dict_without_its_optimizer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store, (model, optimizer) = small(), trained()
    store.save({"model": model.state_dict(), "adam": optimizer.state_dict()}, run="a", step=1)
    fresh, fresh_optimizer = made(seed=1)
    store.load({"model": fresh.state_dict()}, "a@1", unread="ignore")
    store.load({"adam": fresh_optimizer.state_dict()}, "a@1", unread="ignore")
    assert "state_dict" not in caplog.text
    store.load({"model": fresh.state_dict(), "adam": fresh_optimizer.state_dict()}, "a@1")
    assert "optim.load_state_dict(state['adam'])" in caplog.text
    assert 'store.save({"model": model, "adam": optim}, step=step)' in caplog.text
    assert "state_dict" not in warnings(caplog)  # the caller may do so


class Holder:
    """An object whose state_dict contains another object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"x": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["x"]


class Extra(nn.Linear):
    def __init__(self, value: Any) -> None:
        super().__init__(1, 1)
        self.held = [value]

    def get_extra_state(self) -> dict[str, Any]:
        return {"x": self.held[0]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.held[0] = state["x"]


@pytest.mark.parametrize(
    "value",
    [nn.Linear(1, 1), torch.Generator(), optim.lr_scheduler.StepLR(optim.SGD([nn.Parameter(torch.ones(1))]), 1)],
    ids=lambda value: type(value).__name__,
)
def test_an_object_inside_a_state_dict_is_stored_exactly_or_rejected(value: Any) -> None:
    """Otherwise, a load would return its state_dict, which the owner does not expect."""
    model, holder, extra = nn.Linear(1, 1), Holder(value), Extra(value)
    sgd = optim.SGD(model.parameters())
    sgd.state[model.weight]["x"] = value
    saves: dict[str, Callable[..., Any]] = {
        "train.0.holder.x": lambda run: run.save(1, nn.Linear(1, 1), None, {"holder": holder}),
        "train.0.x": lambda run: run.save(2, nn.Linear(1, 1), None, holder),
        "model._extra_state.x": lambda run: run.save(3, extra),
        "optim.state.weight.x": lambda run: run.save(4, model, sgd),
    }
    store = small()
    for key, save in saves.items():
        with pytest.raises(InvalidInput, match=f"{key}: a .* cannot be stored as plain data"):
            save(Checkpointer(store, run="plain"))
    with pytest.raises(InvalidInput, match=r"optim\.state\.weight\.x: a "):
        save_model_and_optim_state(store, model, sgd, run="smo", step=1)
    run = Checkpointer(store, run="pickled", allow_pickle=True)
    for save in saves.values():
        save(run)
    extra.held[0] = sgd.state[model.weight]["x"] = None
    parts, whole = (run.load(f"pickled@{step}", nn.Linear(1, 1)) for step in (1, 2))
    run.load("pickled@3", extra)
    run.load("pickled@4", model, sgd)
    found = (parts["holder"]["x"], whole["x"], extra.held[0], sgd.state[model.weight]["x"])
    assert [type(one) for one in found] == [type(value)] * 4


def test_the_error_for_a_bare_model_says_to_pass_it_by_name() -> None:
    with pytest.raises(InvalidInput, match=r'\{"model": model\}'):
        small().save(made()[0], run="a", step=1)


class Inside(nn.Module):
    """A model that has been put into an outer model since it was saved."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def inside(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": Inside(state["model"]), "optim": state["optim"]}


RENAMED: list[tuple[Callable[[Any, Any], Any], Callable[[Any], Any], dict[str, str]]] = [
    (lambda model, adam: {"model": model, "optim": adam}, inside, {r"model\.inner\.(.*)": r"model.\1"}),
    (
        lambda model, adam: {"net": model, "adam": adam},
        lambda state: state,
        {r"model\.(.*)": r"net.\1", r"optim\.(.*)": r"adam.\1"},
    ),
    (lambda model, adam: {"nets": {"g": model}, "optim": adam}, inside, {r"model\.inner\.(.*)": r"nets.g.\1"}),
]


@pytest.mark.parametrize(("saved", "here", "rename"), RENAMED, ids=["names", "keys", "both"])
def test_a_rename_of_a_model_also_renames_its_optimizer(
    saved: Callable[[Any, Any], Any], here: Callable[[Any], Any], rename: dict[str, str]
) -> None:
    store, (model, optimizer) = small(), trained()
    store.save(saved(model, optimizer), run="a", step=1)
    for given in (rename, renamer(rename)):
        fresh, fresh_optimizer = made(seed=1)
        loaded = store.load(here({"model": fresh, "optim": fresh_optimizer}), "a@1", rename=given)
        assert identical(contents(fresh, fresh_optimizer), contents(model, optimizer))
        assert not (*loaded.missing_keys, *loaded.unread_keys)


def test_names_that_only_the_checkpoint_has_are_found_below_a_renamed_model() -> None:
    store, (model, optimizer) = small(), trained()
    model.register_buffer("more", torch.ones(2))
    store.save({"net": model, "optim": optimizer}, run="a", step=1)
    fresh, fresh_optimizer = made(seed=1)
    with pytest.raises(Mismatch, match="the model in a@1 has 'more', which this model lacks"):
        load_objects(store, "a@1", fresh, fresh_optimizer, rename={r"model\.(.*)": r"net.\1"})


def test_an_optimizer_loads_state_under_different_names_only_with_a_rename() -> None:
    store, (model, optimizer) = small(), trained()
    store.save({"model": model, "optim": optimizer}, run="a", step=1)
    fresh, fresh_optimizer = made(seed=1)
    before = contents(fresh)
    state = {"model": Inside(fresh), "optim": fresh_optimizer}
    store.load(state, "a@1", strict=False, unread="ignore")
    assert identical(contents(fresh), before)
    assert not fresh_optimizer.state


@pytest.mark.parametrize("front", [load_objects, load_model_and_optim_state])
def test_an_error_suggests_a_rename_that_loads_the_objects(front: Callable[..., Any]) -> None:
    store, (model, optimizer) = small(), trained()
    store.save({"net": model, "optim": optimizer}, run="a", step=1)
    fresh, fresh_optimizer = made(seed=1)
    with pytest.raises(MissingKey) as refused:
        store.load({"model": fresh}, "a@1")
    assert "your own function" not in str(refused.value)
    rename = ast.literal_eval(str(refused.value).rpartition("rename=")[2])
    with pytest.raises(MissingKey, match="in addition to what your own function does"):
        store.load({"model": fresh}, "a@1", rename=lambda key: key)
    front(store, "a@1", fresh, fresh_optimizer, rename=rename)
    assert identical(contents(fresh, fresh_optimizer), contents(model, optimizer))


# several ranks


class Averaging:
    """A model, an averaged model and a shadow of the weights, all with the same sharding, and the model's
    optimizer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        self.ema = AveragedModel(self.model, avg_fn=lambda old, new, _: old * 0.5 + new * 0.5)
        fully_shard(self.model)
        fully_shard(self.ema.module)
        self.optim = optim.AdamW(self.model.parameters())
        self.shadow = {name: one.detach().clone() for name, one in self.model.named_parameters()}

    def train(self) -> None:
        for step in range(3):
            self.model(torch.full((2, 6), 0.1 * (step + 1))).square().sum().backward()
            self.optim.step()
            self.ema.update_parameters(self.model)
        self.shadow = {name: one.detach() * 2 for name, one in self.model.named_parameters()}

    def models(self) -> dict[str, Any]:
        return {"model": self.model, "ema": self.ema, "shadow": self.shadow}

    def whole(self) -> list[torch.Tensor]:
        moments = [value for one in self.model.parameters() for value in self.optim.state[one].values()]
        tensors = [
            *self.model.parameters(),
            *self.ema.parameters(),
            self.ema.n_averaged,
            *self.shadow.values(),
            *moments,
        ]
        return [(one.full_tensor() if isinstance(one, DTensor) else one).detach().clone() for one in tensors]


class FailsOnRank1(Counter):
    """Its state_dict and load_state_dict fail only on rank 1."""

    def state_dict(self) -> dict[str, int]:
        return {"value": 1 // (1 - self.value)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state_dict()


def fail_on_one(rank: int, size: int, path: Path) -> list[str]:
    store, model = casckpt.open(path), nn.Linear(2, 2)
    store.save({"model": nn.Linear(2, 2), "z": Counter("z", [])}, run="good", step=1, check_replicas="off")
    state = {"model": model, "z": FailsOnRank1("z", [], rank)}
    calls = (lambda: store.save(state, run="bad", step=1), lambda: store.load(state, "good@1"))
    errors = [outcome_of(call) for call in calls]
    return [" ".join([str(error), *getattr(error, "__notes__", ())]) for error in errors]


def test_an_object_that_fails_on_one_rank_fails_on_all_ranks(tmp_path: Path, ranks: Pool) -> None:
    for saved, loaded in ranks.run(2, fail_on_one, tmp_path):
        assert "raised in state_dict of 'z'" in saved
        assert "raised in load_state_dict of 'z'; earlier parts are already loaded" in loaded


def objects_on_one(rank: int, size: int, path: Path) -> dict[str, list[str]]:
    """Return what each call raises if only rank 1 has objects, and rank 0 has their state_dict or nothing."""
    store = casckpt.open(path)
    model = nn.Linear(1, 1)
    store.save({"model": model}, run="good", step=1, check_replicas="off")
    found: dict[str, list[str]] = {}
    for name, mine in (
        ("dict", {"model": model.state_dict()}),
        ("nothing", {}),
        ("function", lambda: {"model": model}),
    ):
        state: Any = {"model": model} if rank else mine
        calls: list[Callable[[], Any]] = [
            lambda: store.save(state, run="bad", step=1),  # noqa: B023 - called immediately
            lambda: store.save_async(state, run="bad", step=2).result(),  # noqa: B023
            lambda: store.check(state),  # noqa: B023
            lambda: store.warm_up(state),  # noqa: B023
            lambda: store.load(state, "good@1"),  # noqa: B023
        ]
        found[name] = [str(outcome_of(call)) for call in calls[: 4 if callable(mine) else 5]]
    for step, state in enumerate(({"model": model}, {"model": model.state_dict()})):
        store.save_async(state, run="followed", step=step, check_replicas="off").result()
    return found


def test_objects_on_a_single_rank_are_rejected_on_all_ranks_without_waiting(tmp_path: Path, ranks: Pool) -> None:
    for found in ranks.run(2, objects_on_one, tmp_path):
        for text in (*found["dict"], *found["nothing"]):
            assert "must make the same casckpt calls, with the same whole objects in their states" in text
        # the function returns the same objects on both ranks
        assert not any("same casckpt calls" in text for text in found["function"])


def save_averaged(rank: int, size: int, path: Path) -> tuple[list[torch.Tensor], str]:
    one = Averaging(0)
    one.train()
    only = {"only": nn.Linear(2, 2)} if rank == 0 else {}
    casckpt.open(path).save({**one.models(), "optim": one.optim, **only}, run="objects", step=1)
    checkpointer = Checkpointer(path, run="loop")
    refused = str(outcome_of(lambda: checkpointer.save(1, one.model, one.optim, TrainState(ema=one.shadow))))
    checkpointer.save(1, one.models(), one.optim, {"epoch": 2, "sched": optim.lr_scheduler.StepLR(one.optim, 1)})
    return one.whole(), refused


def load_averaged(rank: int, size: int, path: Path) -> list[list[torch.Tensor]]:
    one, other = Averaging(rank + 1), Averaging(rank + 1)
    only = {"only": nn.Linear(2, 2)} if rank == 0 else {}
    casckpt.open(path).load({**one.models(), "optim": one.optim, **only}, "objects@1")
    train = {"epoch": 0, "sched": optim.lr_scheduler.StepLR(other.optim, 5)}
    Checkpointer(path, run="loop").resume(other.models(), other.optim, train)
    assert train["epoch"] == 2
    assert train["sched"].step_size == 1  # type: ignore[attr-defined]  # it is a scheduler
    return [one.whole(), other.whole()]


def test_an_averaged_model_is_a_second_model_on_any_number_of_ranks(tmp_path: Path, ranks: Pool, full: bool) -> None:
    (saved, refused), *_ = ranks.run(2, save_averaged, tmp_path)
    assert "'train.ema.0.weight' is sharded" in refused
    assert 'save(step, {"model": model, "ema": ema}' in refused
    for size in (2, 3) if full else (3,):
        for found in ranks.run(size, load_averaged, tmp_path):
            for tensors in found:
                assert all(torch.equal(one, other) for one, other in zip(tensors, saved, strict=True))


def sharded_pair(seed: int) -> dict[str, Any]:
    """Return two sharded modules, and an optimizer of both before its first step."""
    torch.manual_seed(seed)
    models = {"enc": nn.Linear(4, 6), "dec": nn.Linear(6, 4)}
    for model in models.values():
        fully_shard(model)
    return {**models, "optim": adamw(*models.values())}


def of_pair(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the whole moments of the optimizer by parameter name."""
    named = [(f"{key}.{name}", one) for key in ("enc", "dec") for name, one in state[key].named_parameters()]
    return {name: state["optim"].state[one]["exp_avg"].full_tensor() for name, one in named}


def save_pair(rank: int, size: int, path: Path) -> dict[str, torch.Tensor]:
    state = sharded_pair(0)
    state["dec"](state["enc"](torch.randn(3, 4))).square().sum().backward()
    state["optim"].step()
    Checkpointer(path, run="a").save(1, {"enc": state["enc"], "dec": state["dec"]}, state["optim"])
    saved = of_pair(state)
    state["optim"].state[state["enc"].weight]["own"] = torch.full((5,), float(rank))
    casckpt.open(path).save(state, run="own", step=2)
    again = sharded_pair(1)
    casckpt.open(path).load(again, "own@2")
    assert torch.equal(again["optim"].state[again["enc"].weight]["own"], torch.full((5,), float(rank)))
    return saved


def load_pair(rank: int, size: int, path: Path) -> dict[str, torch.Tensor]:
    state = sharded_pair(1)
    Checkpointer(path, run="a").resume({"enc": state["enc"], "dec": state["dec"]}, state["optim"], prove=True)
    return of_pair(state)


def test_an_optimizer_of_several_sharded_modules_can_be_resumed_on_other_ranks(tmp_path: Path, ranks: Pool) -> None:
    saved, *_ = ranks.run(2, save_pair, tmp_path)
    assert set(saved) == {"enc.weight", "enc.bias", "dec.weight", "dec.bias"}
    for found in ranks.run(3, load_pair, tmp_path):
        assert all(torch.equal(found[name], value) for name, value in saved.items())
