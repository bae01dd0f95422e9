"""The checkpointer of a single process: contents of checkpoints, restores, failures and log messages."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn, optim

import casckpt
from casckpt.errors import Conflict, InvalidInput, Mismatch, MissingKey, NotFound, StorageError
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.frontends.training_state import save_model_and_optim_state
from tests.support.faulty import Call, FaultyStore, call_first, fail_before
from tests.support.repositories import memory
from tests.support.saves import copied, small, steps
from tests.support.training import Network, contents, identical, made, train, trained

# save and restore


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_model_optimizer_and_train_state_are_restored_bit_for_bit(how: str) -> None:
    store, (model, optimizer) = small(), trained()
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    state = TrainState(schedule=schedule, epoch=3, drawn=torch.Generator().manual_seed(7))
    want = contents(model, optimizer)
    with Checkpointer(store, run="sft") as checkpointer:
        getattr(checkpointer, how)(
            5, model, optimizer, state, metadata={"loss": 0.5}, metrics={"val": 0.25}, healthy=True
        )
    torch.rand(4)
    other, fresh = made(1)
    again = TrainState(
        schedule=optim.lr_scheduler.StepLR(fresh, 1, last_epoch=-1), epoch=0, drawn=torch.Generator().manual_seed(8)
    )
    found = Checkpointer(store, run="sft").resume(other, fresh, again)
    assert found is not None
    assert (found.step, found.metadata, found.ephemeral) == (5, {"loss": 0.5}, False)
    assert (found.metrics, found.healthy) == ({"val": 0.25}, True)
    assert identical(contents(other, fresh), want)
    assert again["epoch"] == 3
    assert again["schedule"].state_dict() == schedule.state_dict()
    assert again["drawn"].initial_seed() == 7


class Endless:
    """A part of a train state that cannot be copied."""

    def __init__(self) -> None:
        self.it = iter(int, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"it": 0}

    def load_state_dict(self, state: Any) -> None:
        """Goes on."""

    def __reduce__(self) -> str:
        raise AssertionError("a checkpointer is copied without the train state")


def test_a_copy_has_the_same_settings_and_can_save(store: casckpt.Store) -> None:
    model, optimizer = trained()
    checkpointer = Checkpointer(store, run="sft", gc=True, max_checkpoints=2, fixed_steps=[1], throttle=1)
    checkpointer.save(1, model, optimizer, TrainState(it=Endless()))
    checkpointer.resume(model, optimizer, TrainState(it=Endless()))
    checkpointer.write_file("notes", b"2")
    checkpointer.save_async(2, model, optimizer)
    for step, other in enumerate(copied(checkpointer), 3):
        assert (other.config, other.store.url) == (checkpointer.config, store.url)
        assert (other.saved_step, other.lineage, other.has_loaded(1)) == (None, None, False)
        with other:
            saved = other.save(step, model, optimizer)
        assert store.attachments(saved) == {}
    checkpointer.close()
    assert sorted(one.step for one in store.checkpoints()) == [1, 2, 3, 4]


def test_a_step_that_is_due_is_saved_with_its_metadata() -> None:
    store, model = small(), nn.Linear(2, 2)
    unknown: dict[str, Any] = {"metric": 1}
    with Checkpointer(store, run="sft", save_interval=2) as checkpointer:
        checkpointer.save_if_due(2, model, metadata={"a": 1}, metrics={"loss": 0.5}, healthy=False)
        with pytest.raises(TypeError, match=r"Checkpointer\.save_if_due"):
            checkpointer.save_if_due(3, model, **unknown)
    found = store.get("sft@2")
    assert (found.metadata, found.metrics, found.healthy) == ({"a": 1}, {"loss": 0.5}, False)


def test_nested_train_state_of_any_kind_is_restored_exactly() -> None:
    store, (model, optimizer) = small(), trained()
    state = {
        "loader": {
            "order": torch.randperm(50),
            "at": 7,
            "files": ["a", "b"],
            "none": None,
            "empty": {},
            5: {(1, 2): 3},
        },
        "history": [0.5, torch.tensor(0.25), {"x": torch.ones(2)}],
    }
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.save(1, model, optimizer, state)
    assert identical(checkpointer.load("sft@1", model, optimizer), state)


def test_a_load_sets_the_train_state_as_a_resume_does(caplog: pytest.LogCaptureFixture) -> None:
    store, (model, optimizer) = small(), trained()
    checkpointer = Checkpointer(store, run="sft")
    schedule = optim.lr_scheduler.StepLR(optimizer, 3)
    checkpointer.save(1, model, optimizer, TrainState(schedule=schedule, epoch=3))
    drawn = torch.rand(2)
    given = TrainState(schedule=optim.lr_scheduler.StepLR(optimizer, 5), epoch=0)
    assert checkpointer.load("sft@1", model, optimizer, given) is given
    assert (given["epoch"], given["schedule"].step_size) == (3, 3)
    assert torch.equal(torch.rand(2), drawn)  # its random generators, too
    assert "replaced: 'train.schedule' (step_size=5 was given, but the checkpoint has 3" in caplog.text
    plain: dict[str, Any] = {"epoch": 0}
    assert checkpointer.load("sft@1", model, optimizer, plain) is plain
    assert plain.keys() == {"rng", "schedule", "epoch"}
    checkpointer.prove(model, optimizer, plain)
    assert checkpointer.load("sft@1", model, optimizer, plain, load_trainer_state=False) is None


@pytest.mark.parametrize(("given", "error"), [({"epoch": 0, "loader": 1}, MissingKey), ((1, 2), InvalidInput)])
def test_a_train_state_that_does_not_fit_is_rejected_before_a_load(given: Any, error: type[Exception]) -> None:
    store, (model, optimizer), (other, fresh) = small(), trained(), made(1)
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.save(1, model, optimizer, {"epoch": 3})
    before = contents(other, fresh)
    with pytest.raises(error):
        checkpointer.load("sft@1", other, fresh, given)
    assert identical(contents(other, fresh), before)


def test_a_load_without_a_saved_train_state_warns_and_leaves_the_given_one(caplog: pytest.LogCaptureFixture) -> None:
    store, model, given = small(), nn.Linear(2, 2), {"epoch": 0}
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.save(1, model)
    assert checkpointer.load("sft@1", model, None, given) is None
    assert given == {"epoch": 0}
    assert caplog.text.count("has no train state (it has 'model'): the given train state is left unchanged") == 1


def test_a_missing_part_loads_as_none_unless_it_is_required() -> None:
    store, (model, optimizer) = small(), trained()
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.save(1, model)
    before = contents(model, optimizer)
    assert checkpointer.load("sft@1", model, optimizer) is None
    assert identical(contents(model, optimizer), before)
    options: list[dict[str, Any]] = [{"load_optim_state": True}, {"load_trainer_state": True}]
    for wanted in options:
        with pytest.raises(NotFound, match=r"sft@1 has no (optimizer|train state)"):
            checkpointer.load("sft@1", model, optimizer, **wanted)
    with pytest.raises(InvalidInput, match="requires an optimizer"):
        checkpointer.load("sft@1", model, load_optim_state=True)


@pytest.mark.parametrize("keyword", ["whole", "lenient", "is_train_state_set", "train", "misspelt"])
def test_an_unknown_keyword_of_a_load_is_rejected(keyword: str) -> None:
    checkpointer = Checkpointer(small(memory()), run="a")
    given: dict[str, Any] = {keyword: True}
    with pytest.raises(TypeError, match=rf"^Checkpointer.load\(\) got an unexpected keyword argument '{keyword}'$"):
        checkpointer.load("a@1", nn.Linear(1, 1), **given)


def test_a_load_skips_parts_that_are_not_requested() -> None:
    store, (model, optimizer) = small(), trained()
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.save(1, model, optimizer, {"epoch": 3})
    other, fresh = made(1)
    assert checkpointer.load("sft@1", other, fresh, load_optim_state=False, load_trainer_state=False) is None
    assert not fresh.state
    assert identical(dict(other.state_dict()), dict(model.state_dict()))
    assert checkpointer.load("sft@1", other, fresh, load_optim_state=True, load_trainer_state=True) == {"epoch": 3}
    assert fresh.state


@pytest.mark.parametrize("where", ["model", "top"])
def test_a_checkpoint_that_contains_only_weights_loads(where: str) -> None:
    store, (model, _) = small(), trained()
    weights = model.state_dict()
    store.save({"model": weights} if where == "model" else dict(weights), run="base", step=0)
    other, fresh = made(1)
    checkpointer = Checkpointer(store, run="sft")
    assert checkpointer.load("base@0", other, fresh) is None
    assert identical(dict(other.state_dict()), dict(weights))
    assert checkpointer.saved_step is None  # the checkpoint is from a different run
    with pytest.raises((MissingKey, Mismatch)):
        checkpointer.load("base@0", nn.Linear(2, 2))


@pytest.mark.parametrize("where", ["model", "top"])
def test_a_load_with_strict_false_loads_the_layers_that_exist_on_both_sides(where: str) -> None:
    store, (model, _) = small(), trained()
    weights = {**model.state_dict(), "old.head": torch.ones(3)}
    store.save({"model": weights} if where == "model" else weights, run="base", step=0)
    other, new = Network(1), nn.Linear(2, 2)
    other.add_module("new", new)
    before = copy.deepcopy(new.state_dict())
    checkpointer = Checkpointer(store, run="sft")
    with pytest.raises((MissingKey, Mismatch), match="Build it as it was for the save"):
        checkpointer.load("base@0", other)
    checkpointer.load("base@0", other, strict=False)
    found = dict(other.state_dict())
    assert identical({key: found[key] for key in model.state_dict()}, dict(model.state_dict()))
    assert identical(dict(new.state_dict()), dict(before))


def test_every_front_end_can_read_checkpoints_of_the_others() -> None:
    store, (model, optimizer) = small(), trained()
    save_model_and_optim_state(store, model, optimizer, run="other", step=1)
    Checkpointer(store, run="sft").save(1, model, optimizer)
    assert not store.diff("other@1", "sft@1").changed
    other, fresh = made(1)
    Checkpointer(store, run="sft").load("other@1", other, fresh, load_optim_state=True)
    assert identical(contents(other, fresh), contents(model, optimizer))


class Module:
    """A model that defines its own saved state, as OLMo-core's models do."""

    def __init__(self) -> None:
        self.model, self.optimizer = trained()
        self.asked: list[Any] = []

    def state_dict_to_save(self, *, optim: bool = True) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict() if optim else {}}

    def state_dict_to_load(self, metadata: Any, *, optim: bool | None = None) -> dict[str, Any]:
        self.asked.append((optim, "model.head.weight" in metadata.state_dict_metadata))
        return self.state_dict_to_save()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])


def test_a_train_module_supplies_its_own_state() -> None:
    store, module = small(), Module()
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.save(1, module, train_state={"epoch": 1})
    want = contents(module.model, module.optimizer)
    train(module.model, module.optimizer, range(3))
    assert checkpointer.load("sft@1", module, load_optim_state=True) == {"epoch": 1}
    assert module.asked == [(True, True)]
    assert identical(contents(module.model, module.optimizer), want)
    checkpointer.load("sft@1", module)
    assert module.asked[-1] == (True, True)  # the checkpoint has it
    with pytest.raises(InvalidInput, match="do not pass an optimizer"):
        checkpointer.save(2, module, module.optimizer)


class Bare:
    """A module without the optional methods."""

    def __init__(self) -> None:
        self.model, _ = made()

    def state_dict_to_save(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def state_dict_to_load(self) -> dict[str, Any]:
        return self.state_dict_to_save()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


def test_a_train_module_without_the_optional_methods_is_saved_and_loaded() -> None:
    store, module = small(), Bare()
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.save(1, module)
    want = copy.deepcopy(module.model.state_dict())
    nn.init.zeros_(module.model.head.weight)
    assert checkpointer.load("sft@1", module) is None
    assert identical(dict(module.model.state_dict()), dict(want))


# lookups and files


def test_files_are_attached_to_the_next_save() -> None:
    store, model = small(), nn.Linear(2, 2)
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.write_file("config.json", "{}")
    checkpointer.write_file("big/file", b"x" * 9000, step=1)
    checkpointer.save(1, model, attachments={"more": b"1"})
    assert store.attachments("sft@1") == {"config.json": 2, "big/file": 9000, "more": 1}
    checkpointer.save(2, model)
    assert store.attachments("sft@2") == {}
    with pytest.raises(Conflict, match="sft@1 is already saved"):
        checkpointer.write_file("late", "", step=1)
    for name, content in (("../x", ""), ("x", 5)):
        with pytest.raises(InvalidInput):
            checkpointer.write_file(name, content)  # type: ignore[arg-type]  # intentionally the wrong type


# settings


def test_a_failed_load_of_a_train_state_changes_nothing() -> None:
    state = TrainState(epoch=1, rng=False)
    with pytest.raises(MissingKey, match="has no 'epoch'; it has 'step'"):
        state.load_state_dict({"step": 1})
    with pytest.raises(MissingKey, match="lacks 'rank'"):
        TrainState().load_state_dict({"rng": {}})
    assert dict(state) == {"epoch": 1}


# the end of the training


def trained_to(end: int, *, first: int = 1, last: bool = False, **settings: Any) -> list[int]:
    """Return the saved steps."""
    store = small()
    with Checkpointer(store, run="sft", **settings) as checkpointer:
        for step in range(first, end + 1):
            checkpointer.save_if_due(step, nn.Linear(2, 2), last=last and step == end)
    return [step for _, step in steps(store)]


@pytest.mark.parametrize("settings", [{"last_step": 5}, {"last": True}], ids=list)
def test_the_last_training_step_is_saved(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert trained_to(5, save_interval=2, **settings) == [2, 4, 5]
    assert trained_to(5, **settings) == [5]
    assert not caplog.records


@pytest.mark.parametrize(
    ("interval", "first", "unsaved"),
    [(2, 1, "steps 5 to 5 "), (3, 1, "steps 4 to 5 "), (9, 3, "steps 3 to 5 "), (5, 1, "")],
)
def test_unsaved_steps_at_the_end_are_logged(
    interval: int, first: int, unsaved: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained_to(5, first=first, save_interval=interval)
    told = [record.message for record in caplog.records]
    assert len(told) == bool(unsaved)
    assert all(one.startswith(f"{unsaved}of sft are not in any checkpoint") and "last_step=5" in one for one in told)


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_step_that_the_loop_saves_itself_counts_as_saved(how: str, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"save_interval": 9, "ephemeral_save_interval": 2, "ephemeral_cooldown": 3}
    with Checkpointer(small(), run="sft", **settings) as checkpointer:
        checkpointer.save_if_due(3, nn.Linear(2, 2))
        getattr(checkpointer, how)(3, nn.Linear(2, 2))
        assert (checkpointer.due(4), checkpointer.due(6)) == (None, "ephemeral")
    assert not [record.message for record in caplog.records if "not in any checkpoint" in record.message]


def test_steps_before_a_loaded_checkpoint_are_not_logged_as_unsaved(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(small(), run="sft", save_interval=2) as checkpointer:
        for step in range(1, 4):
            checkpointer.save_if_due(step, model)
        checkpointer.load("sft@2", model)
    assert not caplog.records


# how much work a crash can lose


class Waiting(Checkpointer):
    """A checkpointer whose background saves finish only when a caller waits for them."""

    def __init__(self, storage: FaultyStore, **settings: Any) -> None:
        super().__init__(small(storage), run="sft", **settings)
        self.asked = threading.Event()

    def hold(self, _: Call) -> None:
        self.asked.wait(60)

    def wait(self) -> None:
        self.asked.set()
        super().wait()


def lost_at_worst(interval: int, most: int) -> tuple[int, list[int]]:
    """Return the most completed steps that a kill would have lost, and the steps after which the loop waited for a
    save."""
    storage = FaultyStore(memory())
    model, worst, waited = nn.Linear(2, 2), 0, []
    with Waiting(storage, save_interval=interval, max_steps_at_risk=most) as checkpointer:
        storage.inject(call_first("put", checkpointer.hold, key="objects/*.manifest", times=99))
        for step in range(1, 4 * interval):
            durable = max((found for _, found in steps(checkpointer.store)), default=0)
            worst = max(worst, step - durable)
            checkpointer.save_if_due(step, model)
            if checkpointer.asked.is_set():
                waited.append(step)
                checkpointer.asked.clear()
        checkpointer.asked.set()
    return worst, waited


@pytest.mark.parametrize(("most", "late"), [(4, 0), (5, 1), (7, 3)])
def test_the_steps_at_risk_never_exceed_max_steps_at_risk(most: int, late: int) -> None:
    assert lost_at_worst(4, most) == (most, [4 + late, 8 + late, 12 + late])


def test_a_failed_save_stops_the_training_before_more_steps_are_at_risk() -> None:
    storage, model, done = FaultyStore(memory()), nn.Linear(2, 2), []

    def loop(first: int, checkpointer: Checkpointer) -> None:
        for step in range(first, 12):
            done.append(step)
            checkpointer.save_if_due(step, model)

    checkpointer = Checkpointer(small(storage), run="sft", save_interval=4, max_steps_at_risk=6)
    storage.inject(fail_before("put", key="objects/*.manifest"))
    with pytest.raises(StorageError, match="injected"):
        loop(1, checkpointer)
    assert done == [1, 2, 3, 4, 5, 6]
    loop(7, checkpointer)
    checkpointer.close()
    assert steps(checkpointer.store) == [("sft", 8)]


# misuse


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_conflict_in_a_background_save_is_raised_by_the_next_save(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, (model, optimizer) = small(), trained()
    with Checkpointer(store, run="sft") as checkpointer:
        checkpointer.save(1, model)
        store.save({"x": 1}, run="sft", step=2)
        monkeypatch.setattr(checkpointer.ownership, "find", lambda step: None)  # as if it was saved after the look
        checkpointer.save_async(2, model, optimizer)
        with pytest.raises(Conflict, match="sft@2 already exists"):
            getattr(checkpointer, how)(3, model, optimizer)
    assert steps(store) == [("sft", 1), ("sft", 2)]


# lineage


def test_saves_name_the_checkpoint_that_was_last_loaded() -> None:
    store, (model, optimizer) = small(), trained()
    with Checkpointer(store, run="sft") as first:
        assert first.save(1, model, optimizer).lineage == {}
    with Checkpointer(store, run="sft", max_checkpoints=1) as second:
        resumed = second.resume(model, optimizer)
        assert resumed is not None
        lineage = {"resumed_from": {"id": resumed.id, "run": "sft", "step": 1}}
        assert second.save(2, model, optimizer).lineage == lineage
        assert second.save_async(3, model, optimizer).result().lineage == lineage
    assert steps(store) == [("sft", 3)]  # the parent is forgotten, and stays a name
    other = Checkpointer(store, run="other")
    other.load("sft@3", model, optimizer)
    assert other.save(1, model).lineage["resumed_from"]["step"] == 3
    new = Checkpointer(store, run="new")
    new.load("sft@3", model, optimizer)
    assert new.resume(model) is None  # a run without checkpoints begins anew
    assert new.save(1, model).lineage == {}
