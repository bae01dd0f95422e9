"""A resume says which settings it replaces, and a schedule never ends where nobody wants it to."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as rates
from torch.optim.swa_utils import SWALR

from casckpt.errors import InvalidInput
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.frontends.training_state.settings import replaced_in
from tests.support.saves import small

Make = Callable[..., Any]
_RUNS = itertools.count()


def sequential(it: Any, first: int = 3, last: int = 9) -> Any:
    return rates.SequentialLR(it, [rates.LinearLR(it, total_iters=first), rates.CosineAnnealingLR(it, last)], [first])


def chained(it: Any, gamma: float = 0.9) -> Any:
    return rates.ChainedScheduler([rates.LinearLR(it), rates.ExponentialLR(it, gamma)])


def cosine(it: Any, steps: int = 10, **options: Any) -> Any:
    return rates.CosineAnnealingLR(it, steps, **options)


def cycle(it: Any, steps: int = 20, most: float = 0.1, **options: Any) -> Any:
    return rates.OneCycleLR(it, most, total_steps=steps, **options)


def triangle(it: Any, low: float = 0.01, high: float = 0.1, **options: Any) -> Any:
    return rates.CyclicLR(it, low, high, **{"step_size_up": 4, **options})


class Decay:
    """A function for `LambdaLR` whose attributes are saved."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return max(0.0, 1 - step / self.steps)


def decaying(it: Any, steps: int = 10) -> Any:
    return rates.LambdaLR(it, Decay(steps))


ALL: dict[str, tuple[Make, list[dict[str, Any]]]] = {
    "lambda": (decaying, [{"steps": 20}]),
    "step": (lambda it, size=3, **o: rates.StepLR(it, size, **o), [{"size": 5}, {"gamma": 0.5}]),
    "multistep": (lambda it, at=(3, 6), **o: rates.MultiStepLR(it, at, **o), [{"at": [3, 9]}, {"gamma": 0.5}]),
    "constant": (rates.ConstantLR, [{"factor": 0.5}, {"total_iters": 9}]),
    "linear": (rates.LinearLR, [{"start_factor": 0.5}, {"end_factor": 0.5}, {"total_iters": 9}]),
    "exponential": (lambda it, gamma=0.9: rates.ExponentialLR(it, gamma), [{"gamma": 0.8}]),
    "polynomial": (rates.PolynomialLR, [{"total_iters": 9}, {"power": 2.0}]),
    "cosine": (cosine, [{"steps": 20}, {"eta_min": 0.01}]),
    "sequential": (sequential, [{"first": 4}, {"last": 20}]),
    "chained": (chained, [{"gamma": 0.8}]),
    "plateau": (
        rates.ReduceLROnPlateau,
        [
            {"mode": "max"}, {"factor": 0.5}, {"patience": 20}, {"threshold": 0.1}, {"threshold_mode": "abs"},
            {"cooldown": 3}, {"min_lr": 1e-3}, {"eps": 1e-3},
        ],
    ),
    "cyclic": (
        triangle,
        [
            {"low": 0.02}, {"high": 0.2}, {"step_size_up": 5}, {"step_size_down": 9}, {"mode": "exp_range"},
            {"gamma": 0.5}, {"base_momentum": 0.7}, {"max_momentum": 0.95},
            {"cycle_momentum": False},
        ],
    ),
    "warm restarts": (
        lambda it, period=3, **o: rates.CosineAnnealingWarmRestarts(it, period, **o),
        [{"period": 4}, {"T_mult": 2}, {"eta_min": 0.01}],
    ),
    "one cycle": (
        cycle,
        [
            {"steps": 40}, {"most": 0.2}, {"pct_start": 0.5}, {"anneal_strategy": "linear"}, {"base_momentum": 0.8},
            {"max_momentum": 0.9}, {"div_factor": 10.0}, {"final_div_factor": 100.0}, {"three_phase": True},
            {"cycle_momentum": False},
        ],
    ),
    "swa": (SWALR, [{"swa_lr": 0.02}, {"anneal_epochs": 5}, {"anneal_strategy": "linear"}]),
}  # fmt: skip
"""Every scheduler of torch that has settings, and changes of each parameter that changes its rates or momenta."""
CLOSED = ("lambda", "step", "multistep", "constant", "linear", "exponential", "polynomial", "cosine")


def made(make: Make, lr: float = 0.1, **given: Any) -> tuple[nn.Module, optim.Optimizer, TrainState]:
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if make is SWALR:
        given = {"swa_lr": 0.05, **given}
    return model, optimizer, TrainState(rng=False, schedule=make(optimizer, **given))


def run(state: TrainState, steps: int) -> list[float]:
    """Return the rates of these steps."""
    schedule, found = state["schedule"], []
    for _ in range(steps):
        schedule.optimizer.step()
        schedule.step(*([1.0] if isinstance(schedule, rates.ReduceLROnPlateau) else []))
        found.append(float(schedule.optimizer.param_groups[0]["lr"]))
    return found


def saved(make: Make, steps: int = 7, **given: Any) -> Checkpointer:
    """Train and save with a new run."""
    checkpointer, parts = Checkpointer(small(), run=f"settings{next(_RUNS)}"), made(make, **given)
    run(parts[2], steps)
    checkpointer.save(steps, *parts)
    return checkpointer


def replaced(checkpointer: Checkpointer) -> dict[str, Any]:
    assert checkpointer.resumed is not None
    return dict(checkpointer.resumed.replaced)


@pytest.mark.parametrize("name", ALL)
def test_settings_of_schedulers_do_not_move_and_each_change_of_one_is_named(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, changes = ALL[name]
    checkpointer = saved(make, 12)
    checkpointer.resume(*made(make), prove=True)
    assert replaced(checkpointer) == {}
    assert not caplog.records or all(one.levelno < logging.WARNING for one in caplog.records)
    for number, change in enumerate(changes):
        caplog.clear()
        checkpointer.resume(*made(make, **change), prove=number == 0)
        assert replaced(checkpointer), change
        assert checkpointer.resumed is not None
        assert checkpointer.resumed.proof is None or checkpointer.resumed.proof.replaced == replaced(checkpointer)
        if any(key.startswith("train.") for key in replaced(checkpointer)):
            assert any(one.levelno == logging.WARNING for one in caplog.records), change


def shown(checkpointer: Checkpointer, *parts: Any, **options: Any) -> dict[str, Any]:
    checkpointer.resume(*parts, **options)
    return replaced(checkpointer)


def test_replaced_settings_have_the_given_and_the_saved_value() -> None:
    assert shown(saved(cosine), *made(cosine, steps=20)) == {"train.schedule.T_max": (20, 10)}
    assert shown(saved(sequential), *made(sequential, last=20)) == {"train.schedule._schedulers.1.T_max": (20, 9)}
    assert shown(saved(cosine), *made(cosine, lr=0.2)) == {"optim.param_groups.0.initial_lr": (0.2, 0.1)}


def test_settings_of_other_objects_are_named_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def parts(weight_decay: float, growth: int, beta: float) -> Any:
        model = nn.Linear(2, 2)
        optimizer = optim.AdamW(model.parameters(), weight_decay=weight_decay, betas=(beta, 0.999))
        return model, optimizer, {"scalers": [torch.amp.GradScaler("cpu", growth_interval=growth)], "epoch": 1}

    checkpointer = Checkpointer(small(), run="others")
    checkpointer.save(1, *parts(0.1, 2000, 0.9))
    with caplog.at_level(logging.INFO, "casckpt"):
        found = shown(checkpointer, *(given := parts(0.2, 100, 0.8)), prove=True)
    assert found == {
        "train.scalers.0.growth_interval": (100, 2000), "optim.param_groups.0.weight_decay": (0.2, 0.1),
        "optim.param_groups.0.betas": ((0.8, 0.999), (0.9, 0.999)),
    }  # fmt: skip
    assert given[1].param_groups[0]["weight_decay"] == 0.1
    lines = [one for one in caplog.records if one.getMessage().startswith("replaced: ")]
    assert len(lines) == 2
    assert {one.levelno for one in lines} == {logging.INFO}
    assert "growth_interval=100 was given, but the checkpoint has 2000" in caplog.text


def test_a_position_is_no_setting() -> None:
    class Sampler:
        def __init__(self, size: int, epoch: int = 0) -> None:
            self.size, self.epoch = size, epoch

        def state_dict(self) -> dict[str, int]:
            return dict(vars(self))

    assert replaced_in([Sampler(3)], [{"size": 3, "epoch": 9}], "train") == {}
    assert replaced_in([Sampler(3)], [{"size": 4, "epoch": 9}], "train") == {"train.0.size": (3, 4)}


def whole(make: Make, steps: int, lr: float = 0.1, /, **given: Any) -> list[float]:
    """Return the rates of a training that was never interrupted."""
    return run(made(make, lr, **given)[2], steps)


@pytest.mark.parametrize("name", CLOSED)
def test_a_resume_that_keeps_options_continues_with_the_given_schedule(name: str) -> None:
    make, changes = ALL[name]
    checkpointer = saved(make)
    for lr, change in ((0.3, {}), *((0.1, change) for change in changes)):
        model, optimizer, state = made(make, lr, **change)
        checkpointer.resume(model, optimizer, state, options="keep", prove=True)
        assert replaced(checkpointer) == {}
        assert checkpointer.resumed is not None
        assert "the given schedule continues" in checkpointer.resumed.left["train.schedule"]
        rest = whole(make, 27, lr, **change)[6:]
        assert [float(optimizer.param_groups[0]["lr"]), *run(state, 20)] == pytest.approx(rest, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("name", ["sequential", "one cycle", "chained", "cosine", "warm restarts"])
def test_a_resume_that_keeps_options_continues_an_equal_schedule(name: str) -> None:
    make = ALL[name][0]
    _, optimizer, state = parts = made(make)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    saved(make).resume(*parts, options="keep")
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    assert run(state, 5) == pytest.approx(whole(make, 12)[7:])


@pytest.mark.parametrize("name", ["sequential", "chained", "plateau", "cyclic", "warm restarts", "one cycle", "swa"])
def test_a_resume_refuses_to_keep_options_if_the_schedule_cannot_continue(name: str) -> None:
    make, changes = ALL[name]
    model, optimizer, state = made(make, **changes[0])
    before = model.state_dict()["weight"].clone()
    with pytest.raises(InvalidInput, match=r"options=\"keep\" cannot continue 'train.schedule', a .*Train for longer"):
        saved(make).resume(model, optimizer, state, options="keep")
    assert torch.equal(model.state_dict()["weight"], before)


def test_two_schedules_of_one_optimizer_cannot_be_continued_separately() -> None:
    def parts(steps: int) -> Any:
        model, optimizer, state = made(cosine, steps=steps)
        return model, optimizer, TrainState(rng=False, a=state["schedule"], b=rates.ConstantLR(optimizer))

    checkpointer = Checkpointer(small(), run="two")
    checkpointer.save(1, *parts(10))
    with pytest.raises(InvalidInput, match=r"cannot continue 'train\.a'"):
        checkpointer.resume(*parts(20), options="keep")


class Warmup:
    """Multiplies the rate that a schedule sets, as pytorch_warmup does."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer, self.lrs = optimizer, [group["lr"] for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"lrs": self.lrs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lrs = state["lrs"]


def test_a_schedule_beside_a_warmup_cannot_keep_its_options() -> None:
    def parts() -> Any:
        model, optimizer, state = made(cosine)
        return model, optimizer, TrainState(rng=False, **state, warmup=Warmup(optimizer))

    checkpointer = Checkpointer(small(), run="warm")
    checkpointer.save(1, *parts())
    with pytest.raises(InvalidInput, match=r"cannot continue 'train\.schedule'"):
        checkpointer.resume(*parts(), options="keep")
    assert checkpointer.resume(*parts()) is not None


def rebuilt(make: Make, optimizer: optim.Optimizer, position: int) -> Any:
    """Rebuild a schedule, as in docs/resume.md."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"]
    schedule = make(optimizer)
    with warnings.catch_warnings(action="ignore"):
        for _ in range(position):
            schedule.step()
    return schedule


@pytest.mark.parametrize(
    ("make", "longer"),
    [
        (cosine, {"steps": 20}), (sequential, {"last": 20}), (cycle, {"steps": 40}), (decaying, {"steps": 20}),
        (chained, {"gamma": 0.8}), (ALL["warm restarts"][0], {"period": 5}), (ALL["linear"][0], {"total_iters": 9}),
    ],
)  # fmt: skip
def test_a_rebuilt_schedule_has_the_rates_of_a_training_that_was_never_interrupted(
    make: Make, longer: dict[str, Any]
) -> None:
    model, optimizer, state = made(make, **longer)
    saved(make).resume(model, optimizer, state)
    state["schedule"] = rebuilt(lambda it: make(it, **longer), optimizer, 7)
    assert run(state, 13) == whole(make, 20, **longer)[7:]
