"""The settings of a checkpointer, and the steps at which it saves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import optim

from casckpt.errors import InvalidInput
from casckpt.frontends.trainer import Checkpointer, CheckpointerConfig, TrainState
from casckpt.frontends.trainer.settings import TrainerSettings
from casckpt.store.store import Store
from tests.support.saves import small
from tests.support.training import made


def test_a_step_is_due_at_multiples_of_the_intervals() -> None:
    settings = TrainerSettings(
        save_interval=100, fixed_steps=[1, 250], ephemeral_save_interval=25, ephemeral_cooldown=30
    )
    last: int | None = None
    found = []
    for step in range(301):
        kind = settings.due(step, last)
        if kind:
            found.append((step, kind[0]))
            last = step
    assert found == [
        (1, "p"), (50, "e"), (100, "p"), (150, "e"), (200, "p"), (250, "p"), (300, "p"),
    ]  # fmt: skip
    assert TrainerSettings().due(100, None) is None


@given(
    every=st.none() | st.integers(1, 9),
    fixed=st.frozensets(st.integers(0, 40), max_size=3),
    ephemeral=st.none() | st.integers(1, 9),
    cooldown=st.none() | st.integers(1, 9),
)
def test_gaps_between_saves_do_not_exceed_longest_gap(
    every: int | None, fixed: frozenset[int], ephemeral: int | None, cooldown: int | None
) -> None:
    settings = TrainerSettings(
        save_interval=every, fixed_steps=fixed, ephemeral_save_interval=ephemeral, ephemeral_cooldown=cooldown
    )
    last: int | None = None
    gaps = []
    for step in range(1, 61):
        if settings.due(step, last):
            gaps.append(step - (last or 0))
            last = step
    longest = settings.longest_gap
    assert (longest is None) == (every is None and ephemeral is None)
    assert longest is None or longest >= max(gaps)


# settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"save_threads": 0}, "save_threads=0"),
        ({"load_threads": -1}, "load_threads"),
        ({"throttle": 0}, "throttle"),
        ({"max_checkpoints": 0}, "max_checkpoints"),
        ({"save_interval": 1.5}, "save_interval"),
        ({"fixed_steps": [-1]}, "step -1"),
        ({"fixed_steps": 5}, "fixed_steps=5"),
        ({"keep": {"keep_lats": 1}}, "keep_last"),
        ({"keep": 0}, "keep-last 0"),
        ({"run": ""}, "run ''"),
        ({"run": "latest"}, "run 'latest'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointerConfig(**settings)
    with pytest.raises(InvalidInput, match=message):
        CheckpointerConfig().build(small(), **settings)


def test_a_checkpointer_can_be_built_from_its_configuration(store: Store) -> None:
    config = CheckpointerConfig(run="sft", save_interval=10, fixed_steps=(5,), keep={"keep_within": "7d"}, throttle=2)
    checkpointer = config.build(store, max_checkpoints=3)
    assert checkpointer.config == CheckpointerConfig(
        run="sft", save_interval=10, fixed_steps=[5], keep={"keep_within": "7d"}, throttle=2, max_checkpoints=3
    )
    with pytest.raises(TypeError, match="unexpected keyword argument 'save_intervall'"):
        config.build(store, save_intervall=1)  # type: ignore[call-arg]  # the subject of the test


# how much work a crash can lose


@pytest.mark.parametrize(
    ("settings", "gap"),
    [
        ({"save_interval": 10}, 10),
        ({"save_interval": 10, "ephemeral_save_interval": 4}, 4),
        ({"save_interval": 10, "ephemeral_save_interval": 4, "ephemeral_cooldown": 5}, 8),
        ({"save_interval": 7, "ephemeral_save_interval": 4, "ephemeral_cooldown": 5}, 7),
        ({"ephemeral_save_interval": 1}, 1),
    ],
)
def test_a_max_steps_at_risk_below_the_interval_is_rejected(settings: dict[str, Any], gap: int) -> None:
    assert CheckpointerConfig(**settings, max_steps_at_risk=gap).longest_gap == gap
    if gap > 1:
        with pytest.raises(InvalidInput, match=f"there can be {gap} steps between two saves"):
            CheckpointerConfig(**settings, max_steps_at_risk=gap - 1)
    with pytest.raises(InvalidInput, match="there is no save interval"):
        CheckpointerConfig(fixed_steps=[5], max_steps_at_risk=gap)


# misuse


class Keeps:
    """An object with a state_dict but no load_state_dict."""

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}


def test_the_error_for_an_invalid_argument_names_it() -> None:
    model, optimizer = made()
    checkpointer = Checkpointer(small(), run="sft", save_interval=2)
    wrong: Any = optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(
        InvalidInput, match=r"an optimizer must be a torch\.optim\.Optimizer, or a list or dict of these, not StepLR"
    ):
        checkpointer.save(1, model, wrong)
    nothing: Any = None
    with pytest.raises(InvalidInput, match="step None"):
        checkpointer.save_if_due(nothing, model)
    checkpointer.save(1, model, optimizer, {"epoch": 1})
    plain: Any = [0]
    with pytest.raises(InvalidInput, match="pass a TrainState or a dict"):
        checkpointer.resume(model, optimizer, plain)
    with pytest.raises(InvalidInput, match="'rng' is reserved"):
        TrainState()["rng"] = 5
    state = TrainState(rng=False, keeps=Keeps())
    with pytest.raises(InvalidInput, match="a Keeps has a state_dict but no load_state_dict"):
        state.load_state_dict(state.state_dict())
