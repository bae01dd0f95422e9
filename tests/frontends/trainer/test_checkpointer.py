"""The checkpointer of one process: what a checkpoint holds, how it comes back, what fails and what is told of it."""

from __future__ import annotations

import copy
import logging
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from casckpt.errors import Conflict, InvalidInput, Mismatch, MissingKey, NotFound, StorageError
from casckpt.frontends.trainer import Checkpointer, CheckpointerConfig, TrainState
from casckpt.frontends.training_state import save_model_and_optim_state
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from tests.support.faulty import Call, FaultyStore, call_first, fail_before
from tests.support.repositories import memory
from tests.support.saves import small, steps
from tests.support.training import Network, identical, made, train, trained


def contents(model: nn.Module, optimizer: optim.Optimizer) -> Any:
    """A copy of all that is saved of them."""
    state = optimizer.state_dict()
    groups = [dict(sorted(group.items())) for group in state["param_groups"]]
    return copy.deepcopy([dict(model.state_dict()), state["state"], groups])


# there and back


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_all_that_a_loop_needs_comes_back_to_the_bit(how: str) -> None:
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


def test_what_is_due_is_saved_with_what_is_said_of_it() -> None:
    store, model = small(), nn.Linear(2, 2)
    unknown: dict[str, Any] = {"metric": 1}
    with Checkpointer(store, run="sft", save_interval=2) as checkpointer:
        checkpointer.save_if_due(2, model, metadata={"a": 1}, metrics={"loss": 0.5}, healthy=False)
        with pytest.raises(TypeError, match=r"Checkpointer\.save_if_due"):
            checkpointer.save_if_due(3, model, **unknown)
    found = store.get("sft@2")
    assert (found.metadata, found.metrics, found.healthy) == ({"a": 1}, {"loss": 0.5}, False)


def test_nested_train_state_of_any_kind_comes_back_as_it_was() -> None:
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


def test_what_was_not_saved_is_none_unless_it_must_be_there() -> None:
    store, (model, optimizer) = small(), trained()
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.save(1, model)
    before = contents(model, optimizer)
    assert checkpointer.load("sft@1", model, optimizer) is None
    assert identical(contents(model, optimizer), before)
    options: list[dict[str, Any]] = [{"load_optim_state": True}, {"load_trainer_state": True}]
    for wanted in options:
        with pytest.raises(NotFound, match="sft@1 was saved without"):
            checkpointer.load("sft@1", model, optimizer, **wanted)
    with pytest.raises(InvalidInput, match="needs an optimizer"):
        checkpointer.load("sft@1", model, load_optim_state=True)


@pytest.mark.parametrize("keyword", ["whole", "lenient", "is_train_state_set", "train", "misspelt"])
def test_a_keyword_that_a_load_does_not_have_is_refused(keyword: str) -> None:
    checkpointer = Checkpointer(small(memory()), run="a")
    given: dict[str, Any] = {keyword: True}
    with pytest.raises(TypeError, match=rf"^Checkpointer.load\(\) got an unexpected keyword argument '{keyword}'$"):
        checkpointer.load("a@1", nn.Linear(1, 1), **given)


def test_what_is_not_wanted_is_not_loaded() -> None:
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
def test_weights_alone_load_wherever_they_came_from(where: str) -> None:
    store, (model, _) = small(), trained()
    weights = model.state_dict()
    store.save({"model": weights} if where == "model" else dict(weights), run="base", step=0)
    other, fresh = made(1)
    checkpointer = Checkpointer(store, run="sft")
    assert checkpointer.load("base@0", other, fresh) is None
    assert identical(dict(other.state_dict()), dict(weights))
    assert checkpointer.saved_step is None  # that was another run
    with pytest.raises((MissingKey, Mismatch)):
        checkpointer.load("base@0", nn.Linear(2, 2))


@pytest.mark.parametrize("where", ["model", "top"])
def test_a_model_with_other_parts_takes_what_it_has_if_that_is_wanted(where: str) -> None:
    store, (model, _) = small(), trained()
    weights = {**model.state_dict(), "old.head": torch.ones(3)}
    store.save({"model": weights} if where == "model" else weights, run="base", step=0)
    other, new = Network(1), nn.Linear(2, 2)
    other.add_module("new", new)
    before = copy.deepcopy(new.state_dict())
    checkpointer = Checkpointer(store, run="sft")
    with pytest.raises((MissingKey, Mismatch), match=r"strict=False to leave them"):
        checkpointer.load("base@0", other)
    checkpointer.load("base@0", other, strict=False)
    found = dict(other.state_dict())
    assert identical({key: found[key] for key in model.state_dict()}, dict(model.state_dict()))
    assert identical(dict(new.state_dict()), dict(before))


def test_other_front_ends_read_it_and_it_reads_theirs() -> None:
    store, (model, optimizer) = small(), trained()
    save_model_and_optim_state(store, model, optimizer, run="other", step=1)
    Checkpointer(store, run="sft").save(1, model, optimizer)
    assert not store.diff("other@1", "sft@1").changed
    other, fresh = made(1)
    Checkpointer(store, run="sft").load("other@1", other, fresh, load_optim_state=True)
    assert identical(contents(other, fresh), contents(model, optimizer))


class Stages(nn.Module):
    """A part of a model: some of its layers, under the names that they have in the whole."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)


def test_lists_of_models_and_optimizers_are_one_model_and_one_optimizer() -> None:
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
    checkpointer.load("sft@1", parts, again, load_optim_state=True)
    assert identical([contents(part, one) for part, one in zip(parts, again, strict=True)], want)
    loaded = Checkpointer(store, run="sft")
    loaded.load("sft@1", whole)
    with pytest.raises(InvalidInput, match="two optimizers have the parameter"):
        checkpointer.save(2, parts[0], [optims[0], optims[0]])
    with pytest.raises(InvalidInput, match="two parts of the model have the name"):
        checkpointer.save(2, [parts[0], Stages({"0": nn.Linear(3, 3)})])


class Module:
    """A model that says by itself what is saved, as OLMo-core's do."""

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


def test_an_object_that_says_by_itself_what_is_saved() -> None:
    store, module = small(), Module()
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.save(1, module, train_state={"epoch": 1})
    want = contents(module.model, module.optimizer)
    train(module.model, module.optimizer, range(3))
    assert checkpointer.load("sft@1", module, load_optim_state=True) == {"epoch": 1}
    assert module.asked == [(True, True)]
    assert identical(contents(module.model, module.optimizer), want)
    checkpointer.load("sft@1", module)
    assert module.asked[-1] == (True, True)  # it is there
    with pytest.raises(InvalidInput, match="give no optimizer beside it"):
        checkpointer.save(2, module, module.optimizer)


class Bare:
    """One that is asked for nothing."""

    def __init__(self) -> None:
        self.model, _ = made()

    def state_dict_to_save(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def state_dict_to_load(self) -> dict[str, Any]:
        return self.state_dict_to_save()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


def test_an_object_whose_methods_take_nothing() -> None:
    store, module = small(), Bare()
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.save(1, module)  # type: ignore[arg-type] # its state_dict_to_load has no parameter
    want = copy.deepcopy(module.model.state_dict())
    nn.init.zeros_(module.model.head.weight)
    assert checkpointer.load("sft@1", module) is None  # type: ignore[arg-type] # see above
    assert identical(dict(module.model.state_dict()), dict(want))


def test_what_is_downloaded_before_is_not_read_from_the_store_again(tmp_path: Path) -> None:
    storage = FaultyStore(memory())
    store = Store(Repository(storage, cache_dir=tmp_path))
    model, optimizer = trained()
    checkpointer = Checkpointer(store, run="sft", pre_download=True)
    checkpointer.save(1, model, optimizer, {"seen": torch.arange(5000)})
    for wanted in (True, False):  # the second time it is there
        storage.calls.clear()
        other, fresh = made(1)
        checkpointer.load("sft@1", other, fresh)
        assert (storage.count("read_into", "objects/*.safetensors") > 0) is wanted
        assert identical(contents(other, fresh), contents(model, optimizer))


# looking, files


def test_checkpoints_are_found_from_one_listing(store: Store) -> None:
    model = nn.Linear(2, 2)
    checkpointer = Checkpointer(store, run="sft")
    assert list(checkpointer.find_checkpoints()) == []  # there is no store yet
    assert not checkpointer.contains_checkpoint()
    with pytest.raises(FileNotFoundError):
        checkpointer.latest_checkpoint()
    for step, ephemeral in ((30, False), (10, True), (20, False)):
        checkpointer.save(step, model, ephemeral=ephemeral)
    Checkpointer(store, run="other").save(1, model)
    assert [one.step for one in checkpointer.find_checkpoints()] == [10, 20, 30]
    assert [one.step for one in checkpointer.find_checkpoints(ephemeral=True)] == [10]
    assert [one.step for one in checkpointer.find_checkpoints(ephemeral=False)] == [20, 30]
    assert checkpointer.latest_checkpoint().step == 20  # saved last: the run was rolled back
    assert checkpointer.contains_checkpoint()
    assert checkpointer.checkpoint_dirname(20) == "step20"


def test_a_run_that_is_not_there_is_told_of_where_a_training_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    store, model = small(), nn.Linear(2, 2)
    Checkpointer(store, run="pretrain").save(1, model)
    caplog.set_level(logging.INFO, "casckpt")
    assert Checkpointer(store, run="pretrian").resume(model) is None
    assert "there is no checkpoint of run 'pretrian'" in caplog.text
    assert "did you mean pretrain?" in caplog.text


def test_the_first_run_of_all_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert Checkpointer(tmp_path / "new", run="sft").resume(nn.Linear(2, 2)) is None
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_one_listing_is_one_list_call() -> None:
    storage = FaultyStore(memory())
    checkpointer = Checkpointer(small(storage), run="sft")
    for step in range(3):
        checkpointer.save(step, nn.Linear(2, 2))
    storage.calls.clear()
    assert len(list(checkpointer.find_checkpoints(ephemeral=False))) == 3
    assert storage.count("list") == 1


def test_files_travel_with_the_next_save() -> None:
    store, model = small(), nn.Linear(2, 2)
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.write_file("config.json", "{}")
    checkpointer.write_file("big/file", b"x" * 9000, step=1)
    checkpointer.save(1, model, attachments={"more": b"1"})
    assert store.attachments("sft@1") == {"config.json": 2, "big/file": 9000, "more": 1}
    checkpointer.save(2, model)
    assert store.attachments("sft@2") == {}
    with pytest.raises(Conflict, match="sft@1 is saved"):
        checkpointer.write_file("late", "", step=1)
    for name, contents in (("../x", ""), ("x", 5)):
        with pytest.raises(InvalidInput):
            checkpointer.write_file(name, contents)  # type: ignore[arg-type]  # a wrong type on purpose


# what is said


def test_every_save_is_summed_up_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "casckpt")
    model, _ = trained()
    with Checkpointer(small(), run="sft", max_checkpoints=1) as checkpointer:
        checkpointer.save(1, model)
        checkpointer.save_async(2, model)
        checkpointer.wait()
        assert checkpointer.summary is not None
        assert checkpointer.summary.forgotten == (1,)
        assert checkpointer.summary.bytes_new == 0
        assert checkpointer.summary.bytes_reused == checkpointer.summary.checkpoint.stats.bytes_total > 0
    lines = [record.message for record in caplog.records if record.message.startswith("saved")]
    number = r"\d+\.\d"
    assert re.fullmatch(
        rf"saved sft@2: blocked {number}\d s, durable after {number}\d s, 0.0 MiB new, {number} MiB reused; "
        "forgot sft@1",
        lines[1],
    )
    assert len(lines) == 2


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
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointerConfig(**settings)
    with pytest.raises(InvalidInput, match=message):
        CheckpointerConfig().build(small(), **settings)


def test_a_configuration_builds_a_checkpointer(store: Store) -> None:
    config = CheckpointerConfig(run="sft", save_interval=10, fixed_steps=(5,), keep={"keep_within": "7d"}, throttle=2)
    checkpointer = config.build(store, max_checkpoints=3)
    assert checkpointer.config == CheckpointerConfig(
        run="sft", save_interval=10, fixed_steps=[5], keep={"keep_within": "7d"}, throttle=2, max_checkpoints=3
    )
    with pytest.raises(InvalidInput, match="no setting 'save_intervall'; it has"):
        config.build(store, save_intervall=1)  # type: ignore[call-arg]  # what is tested


def test_a_wrong_train_state_changes_nothing() -> None:
    state = TrainState(epoch=1, rng=False)
    with pytest.raises(MissingKey, match="has no 'epoch', but 'step'"):
        state.load_state_dict({"step": 1})
    with pytest.raises(MissingKey, match="lacks 'rank'"):
        TrainState().load_state_dict({"rng": {}})
    assert dict(state) == {"epoch": 1}


# the end of the training


def trained_to(end: int, *, first: int = 1, last: bool = False, **settings: Any) -> list[int]:
    """The steps that are saved."""
    store = small()
    with Checkpointer(store, run="sft", **settings) as checkpointer:
        for step in range(first, end + 1):
            checkpointer.save_if_due(step, nn.Linear(2, 2), last=last and step == end)
    return [step for _, step in steps(store)]


@pytest.mark.parametrize("settings", [{"last_step": 5}, {"last": True}], ids=list)
def test_the_end_of_a_training_that_was_told_is_saved(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert trained_to(5, save_interval=2, **settings) == [2, 4, 5]
    assert trained_to(5, **settings) == [5]
    assert not caplog.records


@pytest.mark.parametrize(
    ("interval", "first", "unsaved"),
    [(2, 1, "steps 5 to 5 "), (3, 1, "steps 4 to 5 "), (9, 3, "steps 3 to 5 "), (5, 1, "")],
)
def test_steps_at_the_end_that_are_in_no_checkpoint_are_told(
    interval: int, first: int, unsaved: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained_to(5, first=first, save_interval=interval)
    told = [record.message for record in caplog.records]
    assert len(told) == bool(unsaved)
    assert all(one.startswith(f"{unsaved}of sft are in no checkpoint") and "last_step=5" in one for one in told)


def test_steps_before_a_checkpoint_that_was_loaded_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(small(), run="sft", save_interval=2) as checkpointer:
        for step in range(1, 4):
            checkpointer.save_if_due(step, model)
        checkpointer.load("sft@2", model)
    assert not caplog.records


# how much a crash may cost


class Waiting(Checkpointer):
    """One whose saves in the background do not end before somebody waits for them."""

    def __init__(self, storage: FaultyStore, **settings: Any) -> None:
        super().__init__(small(storage), run="sft", **settings)
        self.asked = threading.Event()

    def hold(self, _: Call) -> None:
        self.asked.wait(60)

    def wait(self) -> None:
        self.asked.set()
        super().wait()


def lost_at_worst(interval: int, most: int) -> tuple[int, list[int]]:
    """(the most finished steps that a kill would have cost, after which steps a save was waited for)."""
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
def test_no_more_steps_are_at_risk_than_were_asked_for(most: int, late: int) -> None:
    assert lost_at_worst(4, most) == (most, [4 + late, 8 + late, 12 + late])


def test_where_a_save_failed_training_stops_rather_than_put_more_at_risk() -> None:
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
def test_a_bound_that_no_interval_keeps_is_refused(settings: dict[str, Any], gap: int) -> None:
    assert CheckpointerConfig(**settings, max_steps_at_risk=gap).longest_gap == gap
    if gap > 1:
        with pytest.raises(InvalidInput, match=f"there may be {gap} from one save to the next"):
            CheckpointerConfig(**settings, max_steps_at_risk=gap - 1)
    with pytest.raises(InvalidInput, match="nothing is due by an interval"):
        CheckpointerConfig(fixed_steps=[5], max_steps_at_risk=gap)


# used wrongly


class Keeps:
    """Something whose state can be taken, but not set."""

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}


def test_what_cannot_be_used_is_refused_by_name() -> None:
    model, optimizer = made()
    checkpointer = Checkpointer(small(), run="sft", save_interval=2)
    wrong: Any = optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(InvalidInput, match=r"an optimizer is a torch\.optim\.Optimizer or a list of them, not StepLR"):
        checkpointer.save(1, model, wrong)
    nothing: Any = None
    with pytest.raises(InvalidInput, match="step None"):
        checkpointer.save_if_due(nothing, model)
    checkpointer.save(1, model, optimizer, {"epoch": 1})
    plain: Any = [0]
    with pytest.raises(InvalidInput, match="give resume a TrainState or a dict"):
        checkpointer.resume(model, optimizer, plain)
    with pytest.raises(InvalidInput, match="'rng' is where"):
        TrainState()["rng"] = 5
    state = TrainState(rng=False, keeps=Keeps())
    with pytest.raises(InvalidInput, match="a Keeps has a state_dict, but no load_state_dict"):
        state.load_state_dict(state.state_dict())


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_summary_tells_how_long_the_loop_stood_still(how: str) -> None:
    model, optimizer = trained()
    begun = time.monotonic()
    with Checkpointer(small(), run="sft") as checkpointer:
        getattr(checkpointer, how)(1, model, optimizer)
    took, told = time.monotonic() - begun, checkpointer.summary
    assert told is not None
    assert 0 < told.blocked <= told.durable <= took
    assert (told.checkpoint.step, told.forgotten) == (1, ())


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_conflict_over_the_step_of_a_save_in_the_background_stops_the_next_save(how: str) -> None:
    store, (model, optimizer) = small(), trained()
    store.save({"x": 1}, run="sft", step=2)
    with Checkpointer(store, run="sft") as checkpointer:
        checkpointer.save_async(2, model, optimizer)
        with pytest.raises(Conflict, match="sft@2 exists"):
            getattr(checkpointer, how)(3, model, optimizer)
    assert steps(store) == [("sft", 2)]
