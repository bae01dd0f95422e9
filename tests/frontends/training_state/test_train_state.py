"""Train states: the values that they accept, and the values that a load fills in place."""

from __future__ import annotations

import logging
import random
from collections import Counter, defaultdict, deque
from typing import Any

import numpy as np
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


def test_a_part_cannot_take_the_name_of_the_option() -> None:
    with pytest.raises(InvalidInput, match=r"rng says whether .* and cannot be a Generator; choose a different name"):
        TrainState(rng=np.random.default_rng(0))  # type: ignore[arg-type]  # the mistake


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


def test_a_dict_with_unsaved_entries_is_rejected_before_it_changes() -> None:
    store = small()
    Checkpointer(store, run="a").save(1, nn.Linear(1, 1), None, {"epoch": 3})
    plain = {"epoch": 0, "more": 1}
    with pytest.raises(MissingKey, match="has no 'more'; it has 'epoch'"):
        resumed(store, "a", plain)
    assert plain == {"epoch": 0, "more": 1}
    Checkpointer(store, run="a").resume(nn.Linear(1, 1), None, plain, missing="warn")
    assert plain == {"epoch": 3, "more": 1}


def test_entries_of_an_inner_dict_that_were_not_saved_are_removed_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = small()
    Checkpointer(store, run="a").save(1, nn.Linear(1, 1), None, {"progress": {"epoch": 3}})
    plain = {"progress": {"epoch": 0, "tokens": 0}}
    resumed(store, "a", plain)
    assert plain == {"progress": {"epoch": 3}}
    assert "'progress' loses 'tokens', which the checkpoint lacks" in caplog.text


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
def test_a_train_state_that_does_not_match_is_rejected_before_the_model_changes(
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


def test_a_model_with_the_name_of_the_train_state_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="'train'"):
        Checkpointer(small(), run="a").save(1, {"train": nn.Linear(1, 1)})


def test_a_data_loader_that_cannot_save_its_position_is_rejected() -> None:
    loader: DataLoader[int] = DataLoader([1, 2])  # type: ignore[arg-type]  # a list is sufficient
    with pytest.raises(InvalidInput, match=r"'loader' is a torch DataLoader.*StatefulDataLoader"):
        TrainState(loader=loader)
    with pytest.raises(InvalidInput, match="StatefulDataLoader"):
        TrainState()["loader"] = loader
    with pytest.raises(InvalidInput, match="StatefulDataLoader"):
        Checkpointer(small(), run="a").save(1, nn.Linear(1, 1), None, {"nested": [loader]})


def filled() -> dict[str, Any]:
    return {
        "seen": {"a": 1, "inner": {"b": [1, 2]}, "t": torch.arange(3.0)},
        "losses": [1.0, 2.0],
        "recent": deque([1, 2], maxlen=2),
        "tally": Counter(a=1, b=2),
        "table": defaultdict(list, a=[1]),
        "array": np.arange(4),
        "tensor": torch.ones(2),
        "scheds": [schedule(3), {"one": schedule(5)}],
        "epoch": 3,
    }


def empty() -> dict[str, Any]:
    return {
        "seen": {"gone": 0, "inner": {"b": []}, "t": torch.zeros(3)},
        "losses": [0.0],
        "recent": deque([0], maxlen=2),
        "tally": Counter(c=5),
        "table": defaultdict(list),
        "array": np.zeros(4, np.int64),
        "tensor": torch.zeros(2, requires_grad=True),
        "scheds": [schedule(1), {"one": schedule(1)}],
        "epoch": 0,
    }


@pytest.mark.parametrize("kind", [dict, TrainState])
def test_a_resume_fills_existing_tensors_in_place(kind: type) -> None:
    store = small()
    Checkpointer(store, run="a").save(1, nn.Linear(1, 1), None, kind(**filled()))
    parts, want = empty(), filled()
    inner, loose = parts["seen"]["inner"], parts["seen"]["t"]
    state = kind(**parts)
    resumed(store, "a", state)
    for name in set(parts) - {"epoch"}:
        assert state[name] is parts[name], name
    assert (parts["seen"]["inner"], parts["seen"]["t"]) == (inner, loose)
    assert list(parts["seen"]) == ["a", "inner", "t"]
    assert inner == {"b": [1, 2]}
    assert torch.equal(loose, torch.arange(3.0))
    for name in ("losses", "recent", "tally", "table"):
        assert parts[name] == want[name]
    assert parts["array"].tolist() == [0, 1, 2, 3]
    assert parts["tensor"].tolist() == [1.0, 1.0]
    assert (parts["scheds"][0].step_size, parts["scheds"][1]["one"].step_size) == (3, 5)
    assert state["epoch"] == 3


def test_an_unsaved_object_inside_a_dict_is_rejected() -> None:
    with pytest.raises(MissingKey, match="'one'"):
        TrainState(rng=False, scheds={"one": schedule(1)}).load_state_dict({"scheds": {}})


@pytest.mark.parametrize("saved", [[], [{}] * 3, 3, {"0": {}}])
def test_a_list_of_a_different_length_is_rejected(saved: Any) -> None:
    schedules = [schedule(1), schedule(2)]
    with pytest.raises(Mismatch, match="'scheds' is a list with objects, of length 2"):
        TrainState(rng=False, scheds=schedules).load_state_dict({"scheds": saved})
    assert [one.step_size for one in schedules] == [1, 2]


def test_an_error_raised_by_an_object_has_a_note_with_its_key() -> None:
    class Odd:
        def state_dict(self) -> dict[str, int]:
            raise KeyError(1)

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError(2)

    state = TrainState(rng=False, parts={"odd": Odd()})
    with pytest.raises(KeyError) as saved:
        state.state_dict()
    assert saved.value.__notes__ == ["raised in state_dict of 'parts.odd'"]
    with pytest.raises(KeyError) as loaded:
        state.load_state_dict({"parts": {"odd": 1}})
    assert "load_state_dict of 'parts.odd'" in loaded.value.__notes__[0]


def test_a_value_that_cannot_be_filled_in_place_is_replaced_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    state = TrainState(rng=False, buffer=torch.zeros(2), ids=np.zeros(2))
    state.load_state_dict({"buffer": torch.ones(3), "ids": np.ones(2, np.int64)})
    assert state["buffer"].tolist() == [1, 1, 1]
    assert state["ids"].dtype == np.int64
    assert "'buffer' has a different shape or dtype" in caplog.text
    assert "'ids' has a different shape or dtype" in caplog.text


def test_generators_are_restored_after_parts_that_draw_numbers() -> None:
    generators: dict[str, Any] = {
        "numpy": np.random.default_rng(3),
        "old": np.random.RandomState(2),
        "torch": torch.Generator().manual_seed(4),
        "plain": random.Random(5),
    }

    class Drawing:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            drawn(generators)

    store = small()
    Checkpointer(store, run="a").save(1, nn.Linear(1, 1), None, TrainState(**generators, zz=Drawing()))
    want = [random.random(), *drawn(generators)]
    resumed(store, "a", TrainState(**generators, zz=Drawing()))
    assert [random.random(), *drawn(generators)] == want


def drawn(generators: dict[str, Any]) -> list[float]:
    there = torch.rand(1, generator=generators["torch"])
    return [generators["numpy"].random(), generators["old"].normal(), float(there), generators["plain"].random()]
