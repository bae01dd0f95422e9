"""``resume(prove=True)`` finds what differs from the checkpoint after a resume, whatever changed it."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from casckpt.errors import Mismatch
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.frontends.training_state.proof import Proof
from casckpt.store.store import Store
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import small, small_folder
from tests.test_packaging import ROOT


class Model(nn.Module):
    """Two equal layers, normalization with buffers, and tied weights. ``seen`` is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm: Any = nn.BatchNorm1d(4)
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.seen: Any
        self.register_buffer("seen", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.b(self.a(self.embed(x))).flatten(0, 1)))
        return found


class Loader:
    """A data loader with a position."""

    def __init__(self, at: int = 0) -> None:
        self.at = {"epoch": at, "sample": 10 * at}

    def state_dict(self) -> dict[str, Any]:
        return {"at": dict(self.at), "order": torch.arange(self.at["sample"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = dict(state["at"])


class World:
    """Everything of a training, after ``steps`` steps."""

    def __init__(self, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        self.ema: Any = optim.swa_utils.AveragedModel(self.model)
        late: list[Any] = [*self.model.b.parameters()]
        early: list[Any] = [one for one in self.model.parameters() if all(one is not other for other in late)]
        groups: list[dict[str, Any]] = [{"params": early}, {"params": late, "lr": 0.5}]
        self.optim = optim.AdamW(groups, lr=0.1, amsgrad=True)
        self.schedule = optim.lr_scheduler.StepLR(self.optim, 2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.loader, self.drawn = Loader(steps), torch.Generator().manual_seed(seed)
        self.dice: Any = np.random.default_rng(seed)
        self.sick: Callable[[], object] = lambda: None
        self.train = _Train(
            self, schedule=self.schedule, scaler=self.scaler, loader=self.loader, drawn=self.drawn, dice=self.dice,
            epoch=steps, lists=[1, [2, 3]], names={"x": steps}, best=torch.full((2,), float(steps)),
        )  # fmt: skip
        for _ in range(steps):
            self.model(torch.randint(9, (5, 2))).square().mean().backward()
            self.optim.step()
            self.optim.zero_grad()
            self.schedule.step()
            self.ema.update_parameters(self.model)

    @property
    def models(self) -> dict[str, Any]:
        return {"model": self.model, "ema": self.ema}

    def state(self, of: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.optim.state[of]
        return found


class _Train(TrainState):
    """A train state that calls ``world.sick`` once all state is restored, as a callback of a framework does."""

    def __init__(self, world: World, **parts: Any) -> None:
        super().__init__(**parts)
        self.world = world

    def set_parts(self, state: Mapping[str, Any], *, strict: bool) -> list[str]:
        missing = super().set_parts(state, strict=strict)
        self.world.sick()
        return missing


class Option:
    """An option that is not plain data."""


OPTIONS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], object], bool]] = {
    "right tensors": ({"betas": (torch.tensor(0.9), torch.tensor(0.99))}, lambda group: None, True),
    "tensors": (
        {"betas": (torch.tensor(0.9), torch.tensor(0.99))},
        lambda group: group.update(betas=(torch.tensor(0.5), torch.tensor(0.99))),
        False,
    ),
    "a number that is gone": ({"lr": torch.tensor(0.1)}, lambda group: group.update(lr=None), False),
    "an object": ({"extra": Option()}, lambda group: None, True),
    "an object and a number": ({"extra": Option()}, lambda group: group.update(lr=0.3), False),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_are_not_plain_data_are_compared_or_listed(name: str) -> None:
    options, act, is_proved = OPTIONS[name]
    model = nn.Linear(2, 2)
    optimizer = optim.AdamW([{"params": [*model.parameters()], **options}], foreach=False)
    checkpointer = Checkpointer(small(), run="sft", allow_pickle=True)
    checkpointer.save(1, model, optimizer)
    checkpointer.resume(model, optimizer)
    act(optimizer.param_groups[0])
    if is_proved:
        pickled = {"optim.param_groups": "stored as a pickle, which is not compared"}
        assert checkpointer.prove(model, optimizer).unproved == (pickled if "extra" in options else {})
    else:
        with pytest.raises(Mismatch, match=r"optim\.param_groups"):
            checkpointer.prove(model, optimizer)


@pytest.fixture(scope="module")
def store() -> Store:
    """A store with two checkpoints of a run."""
    made = small()
    for step in (2, 3):
        world = World(1, step)
        Checkpointer(made, run=f"sft-{step}").save(step, world.models, world.optim, world.train)
    return made


def resumed(store: Store, sick: Callable[[World], object], run: str = "sft-3") -> Checkpointer:
    world, checkpointer = World(2, 1), Checkpointer(store, run=run)
    world.sick = lambda: sick(world)
    with torch.random.fork_rng():
        checkpointer.resume(world.models, world.optim, world.train, prove=True)
    return checkpointer


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    with torch.no_grad():
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def set_to(tensor: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.fill_(value)


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().view(torch.int32)[0] ^= 1


def untie(world: World, change: float) -> None:
    world.model.head.weight = nn.Parameter(world.model.embed.weight.detach() + change)


def swap_groups(world: World) -> None:
    one, other = (group["params"][0] for group in world.optim.param_groups)
    state = world.optim.state
    state[one], state[other] = state[other], state[one]


def move_to_other_group(world: World) -> None:
    first, second = world.optim.param_groups
    second["params"].append(first["params"].pop())


def older(world: World, store: Store) -> None:
    Checkpointer(store, run="sft-2").load("sft-2@2", world.models, world.optim)


WRONG: dict[str, tuple[Callable[[World], Any], str]] = {
    "two parameters are swapped": (lambda w: swap(w.model.a.weight, w.model.b.weight), "model.a.weight"),
    "one bit of a parameter is flipped": (lambda w: flip(w.model.a.bias), "model.a.bias"),
    "a parameter is initialized again": (lambda w: w.model.a.reset_parameters(), "model.a.weight"),
    "a parameter is replaced by zeros": (lambda w: set_to(w.model.b.weight, 0), "model.b.weight"),
    "a parameter has a different dtype": (lambda w: w.model.b.double(), "model.b.weight"),
    "a buffer is missing": (
        lambda w: setattr(w.model.norm, "num_batches_tracked", None), "model.norm.num_batches_tracked"
    ),
    "a parameter was added": (
        lambda w: w.model.register_parameter("new", nn.Parameter(torch.ones(2))), "model.new"
    ),
    "a layer is frozen at its old values": (lambda w: set_to(w.model.embed.weight, 1), "model.embed.weight"),
    "tied weights are untied and differ": (lambda w: untie(w, 1), "model.head.weight"),
    "the means of a buffer are reset": (lambda w: w.model.norm.running_mean.zero_(), "model.norm.running_mean"),
    "the count of a buffer is reset": (
        lambda w: w.model.norm.num_batches_tracked.zero_(), "model.norm.num_batches_tracked"
    ),
    "buffers have a different dtype": (lambda w: w.model.norm.double(), "model.norm.running_var"),
    "the average is the model": (lambda w: w.ema.module.load_state_dict(w.model.state_dict()), "ema.module"),
    "the count of the average is reset": (lambda w: w.ema.n_averaged.zero_(), "ema.n_averaged"),
    "the buffers of the average are reset": (lambda w: w.ema.module.norm.reset_running_stats(), "ema.module.norm"),
    "the state of two parameters is swapped": (
        lambda w: swap(w.state(w.model.a.weight)["exp_avg"], w.state(w.model.b.weight)["exp_avg"]),
        "optim.state.a.weight.exp_avg",
    ),
    "the state of two groups is swapped": (swap_groups, "optim.state"),
    "the second moment is reset": (
        lambda w: w.state(w.model.a.weight)["exp_avg_sq"].zero_(), "optim.state.a.weight.exp_avg_sq"
    ),
    "the largest second moment is reset": (
        lambda w: w.state(w.model.a.weight)["max_exp_avg_sq"].zero_(), "optim.state.a.weight.max_exp_avg_sq"
    ),
    "one parameter has a different step": (
        lambda w: w.state(w.model.b.bias)["step"].add_(1), "optim.state.b.bias.step"
    ),
    "the state of an optimizer has a different dtype": (
        lambda w: w.state(w.model.b.bias).update(exp_avg=torch.zeros(4).double()), "optim.state.b.bias.exp_avg"
    ),
    "the optimizer has no state": (lambda w: w.optim.state.clear(), "optim.state"),
    "one parameter has no state": (lambda w: w.optim.state.pop(w.model.b.bias), "optim.state.b.bias"),
    "a parameter has additional state": (
        lambda w: w.state(w.model.b.bias).update(momentum=torch.ones(4)), "optim.state.b.bias.momentum"
    ),
    "the learning rate differs": (lambda w: w.optim.param_groups[0].update(lr=7.0), "optim.param_groups"),
    "the learning rate of the second group differs": (
        lambda w: w.optim.param_groups[1].update(lr=0.1), "optim.param_groups"
    ),
    "the betas differ": (lambda w: w.optim.param_groups[0].update(betas=(0.5, 0.9)), "optim.param_groups"),
    "the weight decay differs": (
        lambda w: w.optim.param_groups[1].update(weight_decay=0.0), "optim.param_groups"
    ),
    "a parameter moved to a different group": (move_to_other_group, "optim.param_groups"),
    "the scheduler is at a different step": (
        lambda w: setattr(w.schedule, "last_epoch", 0), "train.0.schedule.last_epoch"
    ),
    "the base rates of the scheduler differ": (
        lambda w: setattr(w.schedule, "base_lrs", [1.0, 1.0]), "train.0.schedule.base_lrs"
    ),
    "the scale of the scaler is stale": (lambda w: setattr(w.scaler, "_init_scale", 2.0), "train.0.scaler.scale"),
    "the growth of the scaler is stale": (
        lambda w: setattr(w.scaler, "_init_growth_tracker", 9), "train.0.scaler._growth_tracker"
    ),
    "the loader is at a different sample": (lambda w: w.loader.at.update(sample=31), "train.0.loader"),
    "the loader is in a different epoch": (lambda w: w.loader.at.update(epoch=0), "train.0.loader.at.epoch"),
    "the epoch differs": (lambda w: w.train.update(epoch=0), "train.0.epoch"),
    "a number has a different type": (lambda w: w.train.update(epoch=3.0), "train.0.epoch"),
    "an item of a nested list differs": (lambda w: w.train["lists"][1].append(4), "train.0.lists"),
    "an item of a dict is missing": (lambda w: w.train["names"].clear(), "train.0.names.x"),
    "a tensor of the train state differs": (lambda w: w.train["best"].add_(1), "train.0.best"),
    "Python has drawn a number": (lambda w: random.random(), "train.0.rng.python"),
    "numpy has drawn a number": (lambda w: np.random.rand(), "train.0.rng.numpy"),  # noqa: NPY002 - the global generator
    "torch has drawn a number": (lambda w: torch.rand(1), "train.0.rng.torch"),
    "a generator of torch has drawn a number": (lambda w: torch.rand(1, generator=w.drawn), "train.0.drawn"),
    "a generator of numpy has drawn a number": (lambda w: w.dice.random(), "train.0.dice"),
}  # fmt: skip

UNSEEN: dict[str, Callable[[World], Any]] = {
    "tied weights that are untied and equal": lambda w: untie(w, 0),
    "`requires_grad`": lambda w: w.model.a.requires_grad_(False),
    "the training mode": lambda w: w.model.eval(),
    "gradients": lambda w: setattr(w.model.a.weight, "grad", torch.ones(4, 4)),
    "buffers that are not saved": lambda w: w.model.seen.add_(1),
    "hooks that run later": lambda w: w.model.register_forward_pre_hook(lambda *_: None),
    "the optimizer's `defaults`": lambda w: w.optim.defaults.update(lr=3.0),
    "the seeds from which a numpy generator spawns others": lambda w: w.dice.bit_generator.seed_seq.spawn(1),
    "variables that are not in the train state": lambda w: setattr(w, "step", 7),
}
"""What no comparison of the saved state can see. docs/resume.md lists the same."""


def test_a_resume_that_restores_everything_is_proved(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        checkpointer = resumed(store, lambda world: None)
    assert checkpointer.resumed is not None
    proof = checkpointer.resumed.proof
    assert proof is not None
    contents = store.get("sft-3@3")
    assert proof.proved == len({*contents.tensors, *contents.details.objects})
    assert proof.bytes == contents.stats.bytes_total
    assert proof.unproved == {}
    assert f"sft-3@3: proved: {proof.proved} values are equal in every bit" in caplog.messages


@pytest.mark.parametrize("name", WRONG)
def test_each_way_to_resume_wrongly_is_found(store: Store, name: str) -> None:
    sick, key = WRONG[name]
    with pytest.raises(Mismatch, match="after the resume") as caught:
        resumed(store, sick)
    assert any(found.startswith(key) for found in caught.value.keys)


def test_a_callback_that_loads_a_different_checkpoint_is_found(store: Store) -> None:
    with pytest.raises(Mismatch, match="'model") as caught:
        resumed(store, lambda world: older(world, store))
    assert "optim.state.a.weight.step" in caught.value.keys


def test_more_than_forty_ways_are_tried() -> None:
    assert len(WRONG) >= 40


@pytest.mark.parametrize("name", UNSEEN)
def test_what_a_proof_cannot_see_is_documented(store: Store, name: str) -> None:
    checkpointer = resumed(store, UNSEEN[name])
    assert checkpointer.resumed is not None
    assert name in re.sub(r"\s+", " ", (ROOT / "docs" / "resume.md").read_text())


def unproved(checkpointer: Checkpointer) -> dict[str, str]:
    assert checkpointer.resumed is not None
    assert checkpointer.resumed.proof is not None
    return dict(checkpointer.resumed.proof.unproved)


def test_values_that_a_cast_changed_are_listed() -> None:
    checkpointer = Checkpointer(small(), run="sft")
    checkpointer.save(1, nn.Linear(2, 2), None, {"epoch": 1})
    checkpointer.resume(nn.Linear(2, 2).bfloat16(), None, {"epoch": 0}, cast=True, prove=True)
    found = unproved(checkpointer)
    assert found.keys() == {"model.weight", "model.bias"}
    assert set(found.values()) == {"converted by the cast, so its digest proves nothing"}


def test_values_of_a_module_with_a_hook_are_listed_and_others_are_not() -> None:
    checkpointer = Checkpointer(small(), run="sft")
    checkpointer.save(1, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))

    def reset(which: int) -> Any:
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        (model if which else model[0]).register_load_state_dict_post_hook(lambda *_: set_to(model[which].weight, 0))
        return model

    checkpointer.resume(reset(0), prove=True)
    assert list(unproved(checkpointer)) == ["model.0.weight"]
    with pytest.raises(Mismatch, match=r"'model\.1\.weight'"):
        checkpointer.resume(reset(1), prove=True)


def plain_sgd(model: Any, *, without: int = 0) -> optim.SGD:
    parameters = [*model.parameters()]
    return optim.SGD(parameters[: len(parameters) - without], lr=1.0)


class Forgets:
    """A part of the train state that changes an optimizer when it is loaded, as a callback of a framework does."""

    def __init__(self, change: Callable[[], object]) -> None:
        self.change = change

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.change()


@pytest.mark.parametrize("is_added", [False, True])
def test_a_parameter_that_an_optimizer_without_state_lost_or_gained_is_found(is_added: bool) -> None:
    checkpointer, model = Checkpointer(small(), run="sft"), nn.Linear(2, 2)
    checkpointer.save(1, model, plain_sgd(model, without=is_added), {"last": Forgets(lambda: None)})
    optimizer = plain_sgd(model, without=is_added)
    members = optimizer.param_groups[0]["params"]
    change: Callable[[], object] = (lambda: members.append(model.bias)) if is_added else members.pop
    with pytest.raises(Mismatch, match="after the resume") as caught:
        checkpointer.resume(model, optimizer, {"last": Forgets(change)}, prove=True)
    assert caught.value.keys == ("optim.state.bias",)


@pytest.mark.parametrize("is_added", [False, True])
def test_parameters_that_only_one_optimizer_has_are_listed_after_a_load_that_permits_them(is_added: bool) -> None:
    checkpointer, model = Checkpointer(small(), run="sft"), nn.Linear(2, 2)
    checkpointer.save(1, model, plain_sgd(model, without=is_added))
    checkpointer.resume(model, plain_sgd(model, without=not is_added), missing="warn", prove=True)
    assert list(unproved(checkpointer)) == ["optim.state.bias"]


GAPS: dict[str, tuple[dict[str, int], dict[str, int], bool]] = {
    "a parameter that the checkpoint lacks": ({"w2": 2}, {"w": 2, "w2": 2}, True),
    "a parameter that only the checkpoint has": ({"w": 2, "w2": 2}, {"w2": 2}, True),
    "a parameter that has a different shape in the checkpoint": ({"w": 3, "w2": 2}, {"w": 2, "w2": 2}, False),
    "an optimizer that the checkpoint lacks": ({"w2": 2}, {"w2": 2}, False),
}
"""What a load leaves out: the sizes of the saved and of the live parameters, and whether the optimizer is saved."""

BESIDE: dict[str, Callable[[Any, Any, dict[str, Any]], object]] = {
    "model.w2": lambda model, optimizer, train: set_to(model["w2"], 7),
    "optim.state.w2.exp_avg": lambda model, optimizer, train: set_to(optimizer.state[model["w2"]]["exp_avg"], 7),
    "optim.param_groups": lambda model, optimizer, train: optimizer.param_groups[0].update(lr=7.0),
    "train.0.epochs": lambda model, optimizer, train: train.update(epochs=7),
}
"""A change of a value beside what was left out, by its key. Some names begin with the name of what was left out."""


def stepped(sizes: Mapping[str, int]) -> tuple[nn.ParameterDict, optim.AdamW]:
    model = nn.ParameterDict({name: nn.Parameter(torch.rand(size)) for name, size in sizes.items()})
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("key", BESIDE)
@pytest.mark.parametrize("gap", GAPS)
def test_a_value_that_a_load_leaves_out_excuses_no_other_value(gap: str, key: str) -> None:
    saved, live, is_saved = GAPS[gap]
    checkpointer, (model, optimizer) = Checkpointer(small(), run="sft"), stepped(saved)
    checkpointer.save(1, model, optimizer if is_saved else None, {"epochs": 1})
    model, optimizer = stepped(live)
    train = {"epoch": 3, "epochs": 0}
    given = None if "shape" in gap else optimizer
    checkpointer.resume(model, given, train, missing="warn", prove=True)
    assert checkpointer.resumed is not None
    left, is_excused = checkpointer.resumed.left, key.startswith("optim") and not (given and is_saved)
    BESIDE[key](model, optimizer, train)
    found = outcome_of(lambda: checkpointer.prove(model, given, train, excused=left))
    assert isinstance(found, Proof | Mismatch)
    assert (found.keys if isinstance(found, Mismatch) else ()) == (() if is_excused else (key,))


def test_a_load_is_proved_after_the_caller_has_set_the_train_state() -> None:
    checkpointer, model = Checkpointer(small(), run="sft"), nn.Linear(2, 2)
    checkpointer.save(1, model, plain_sgd(model), {"epoch": 3, "loader": Loader(2)})
    fresh, loader = nn.Linear(2, 2), Loader()
    optimizer = plain_sgd(fresh)
    train = checkpointer.load("sft@1", fresh, optimizer)
    with pytest.raises(Mismatch) as caught:
        checkpointer.prove(fresh, optimizer, {"epoch": 3, "loader": loader})
    assert {key.rpartition(".")[0] for key in caught.value.keys} == {"train.0.loader.at", "train.0.loader"}
    why = "starts again"
    proof = checkpointer.prove(fresh, optimizer, {"epoch": 3, "loader": loader}, excused={"train.loader": why})
    assert set(proof.unproved.values()) == {why}
    loader.load_state_dict(train["loader"])
    set_to(fresh.bias, 7)
    with pytest.raises(Mismatch, match=r"'model\.bias'"):
        checkpointer.prove(fresh, optimizer, {"epoch": 3, "loader": loader}, excused={"train.loader": why})


class Drawing(Loader):
    """A loader that draws a random number for its first state, as iterators of torch's data loaders do."""

    has_drawn = False

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.has_drawn = False

    def state_dict(self) -> dict[str, Any]:
        if not self.has_drawn:
            torch.rand(1)
            self.has_drawn = True
        return super().state_dict()


def test_a_loader_that_draws_a_random_number_for_its_first_state_is_proved() -> None:
    checkpointer, model = Checkpointer(small(), run="sft"), nn.Linear(2, 2)
    with torch.random.fork_rng():
        checkpointer.save(1, model, None, TrainState(loader=Drawing()))
        checkpointer.resume(model, None, TrainState(loader=Drawing()), prove=True)
    assert unproved(checkpointer) == {}


def test_what_the_caller_leaves_out_is_listed_with_the_reason() -> None:
    checkpointer, model = Checkpointer(small(), run="sft"), nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    checkpointer.save(1, model, optimizer, {"epoch": 1})
    checkpointer.resume(model, unread="ignore", prove=True)
    assert {key.partition(".")[0] for key in unproved(checkpointer)} == {"optim", "train"}
    optimizer.param_groups[0]["lr"] = 2.0
    checkpointer.resume(model, optimizer, {"epoch": 0}, options="keep", prove=True)
    assert list(unproved(checkpointer)) == ["optim.param_groups"]
    checkpointer.resume(nn.Linear(2, 3), missing="warn", prove=True)
    assert {"model.weight", "model.bias"} <= unproved(checkpointer).keys()


def test_options_of_an_optimizer_are_compared_by_parameter() -> None:
    checkpointer, model = Checkpointer(small(), run="sft"), nn.Linear(2, 2)
    checkpointer.save(1, model, optim.SGD(model.parameters(), lr=0.1))
    rate: Any = torch.tensor(0.7)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    other = optim.SGD(groups, lr=rate)
    optim.lr_scheduler.StepLR(other, 1)  # adds an option
    checkpointer.resume(model, other, prove=True)
    assert unproved(checkpointer) == {}
    assert rate.item() == pytest.approx(0.1)


@pytest.mark.parametrize("rename", [None, {r"model\.new\.(.*)": r"model.old.\1"}], ids=["at the top", "renamed"])
def test_values_with_a_different_name_are_listed(rename: Any) -> None:
    store = small()
    checkpointer = Checkpointer(store, run="sft")
    old = nn.ModuleDict({"new" if rename is None else "old": nn.Linear(2, 2)})
    store.save(old.state_dict() if rename is None else {"model": old.state_dict()}, run="sft", step=1)
    checkpointer.resume(nn.ModuleDict({"new": nn.Linear(2, 2)}), rename=rename, prove=True)
    assert {"model.new.weight", "model.new.bias"} < unproved(checkpointer).keys()
    assert set(unproved(checkpointer).values()) == {"stored under a different name, so it was not compared"}


def proves(rank: int, size: int, path: Path) -> list[Any]:
    torch.manual_seed(0)  # all ranks hold the same model
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    whole: dict[str, Any] = {"model": nn.Linear(2, 2), "rows": distribute_tensor(torch.arange(8.0), mesh)}
    checkpointer, train = Checkpointer(path, run="sft"), TrainState(number=rank)
    checkpointer.save(1, whole, None, train)
    found: list[Any] = []
    for act in (
        lambda: None,
        lambda: set_to(whole["rows"].to_local(), 0) if rank == 1 else None,
        lambda: whole["model"].weight.data.add_(1) if rank == 1 else None,
        lambda: train.update(number=0),
    ):
        train.set_parts = _after(act)  # type: ignore[method-assign] # what a callback of a framework could do
        result = outcome_of(lambda: checkpointer.resume(whole, None, train, prove=True))
        found.append(sorted(result.keys) if isinstance(result, Mismatch) else type(result).__name__)
    return found


def proves_fsdp2(rank: int, size: int, path: Path) -> list[Any]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    checkpointer, train = Checkpointer(path, run="sft"), TrainState(number=rank)
    checkpointer.save(1, model, None, train)
    found: list[Any] = []
    for number in (0, 1):
        sharded: Any = model.weight
        train.set_parts = _after(lambda n=number, one=sharded: one.to_local().detach().add_(n))  # type: ignore[method-assign,misc]
        result = outcome_of(lambda: checkpointer.resume(model, None, train, prove=True))
        found.append(sorted(result.keys) if isinstance(result, Mismatch) else type(result).__name__)
    return found


def test_values_that_fsdp2_shards_are_compared(store_path: Path, ranks: Pool) -> None:
    small_folder(store_path)
    for found in ranks.run(2, proves_fsdp2, store_path):
        assert found == ["Checkpoint", ["model.weight"]]


def _after(act: Callable[[], object]) -> Any:
    def set_parts(state: Mapping[str, Any], *, strict: bool) -> list[str]:
        act()
        return []

    return set_parts


def test_a_difference_on_one_rank_is_raised_on_all(store_path: Path, ranks: Pool) -> None:
    small_folder(store_path)
    for found in ranks.run(2, proves, store_path):
        assert found == ["Checkpoint", ["rows"], ["model.weight"], ["train.1.number"]]


def test_a_different_number_of_ranks_is_proved_except_for_the_train_states(store_path: Path, ranks: Pool) -> None:
    small_folder(store_path)
    ranks.run(2, proves, store_path)
    model, checkpointer = nn.Linear(2, 2), Checkpointer(store_path, run="sft")
    checkpointer.resume({"model": model, "rows": torch.zeros(8)}, None, TrainState(number=7), prove=True)
    assert {key.split(".")[1] for key in unproved(checkpointer)} == {"1"}
