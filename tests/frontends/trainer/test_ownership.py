"""A run belongs to the training that continues it: a table of programs, each with its answer."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from casckpt.errors import Conflict
from casckpt.frontends.trainer import Checkpointer, CheckpointEvent, SaveOnSignal, TrainState
from casckpt.plan.retention import Policy
from casckpt.repository.processes import loaded_here, saved_here
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore, fail_before
from tests.support.ranks import Pool
from tests.support.repositories import memory
from tests.support.saves import small, small_folder, steps


def new_program() -> None:
    """Forget what this process has saved and loaded, as a new process would not know it."""
    saved_here.clear()
    loaded_here.clear()


def train(
    store: Store, saved: range, *, resume: bool = False, ref: str = "", run: str = "sft", **settings: Any
) -> None:
    """Train with a new checkpointer. Save each tenth step. The weight is the number of the step."""
    model = nn.Linear(1, 1, bias=False)
    with Checkpointer(store, run=run, save_interval=10, **settings) as checkpointer:
        if resume:
            checkpointer.resume(model)
        if ref:
            checkpointer.load(ref, model)
        for step in saved:
            model.weight.data.fill_(step)
            checkpointer.save_if_due(step, model)


def visible(store: Store, run: str = "sft") -> list[int]:
    return sorted(one.step for one in store.checkpoints(run))


Program = Callable[[Store], None]
GOES_ON, IS_WARNED, STOPS = "goes on", "is warned", "stops"
PROGRAMS: dict[str, tuple[Program, str, list[int]]] = {}


def program(answer: str, stay: list[int]) -> Callable[[Program], Program]:
    """Add a program to the table. ``stay``: the visible steps of the run afterwards."""

    def add(function: Program) -> Program:
        PROGRAMS[function.__name__] = (function, answer, stay)
        return function

    return add


@program(GOES_ON, [100, 110, 120])
def resumes(store: Store) -> None:
    train(store, range(101, 121), resume=True, max_checkpoints=3)


@program(STOPS, [80, 90, 100])
def forgets_to_resume(store: Store) -> None:
    train(store, range(1, 31))


@program(STOPS, [80, 90, 100])
def forgets_to_resume_and_rotates(store: Store) -> None:
    train(store, range(1, 31), max_checkpoints=1, gc=True, thin={"drop": ["model.*"], "keep_last": 1})


@program(IS_WARNED, [80, 90, 100, 120])
def goes_on_at_the_next_step_without_a_load(store: Store) -> None:
    train(store, range(101, 121), max_checkpoints=1, gc=True)


@program(IS_WARNED, [130])
def resumes_in_the_program_after_one_that_did_not(store: Store) -> None:
    """The next program that resumes has one history again."""
    train(store, range(101, 121), max_checkpoints=1)
    assert visible(store) == [80, 90, 100, 120]
    new_program()
    train(store, range(121, 131), resume=True, max_checkpoints=1)


@program(IS_WARNED, [20, 80, 90, 100])
def overwrites_as_the_user_said(store: Store) -> None:
    train(store, range(1, 21), overwrite=True, max_checkpoints=1)


@program(GOES_ON, [80, 90, 100, 120])
def reads_a_checkpoint_in_another_way(store: Store) -> None:
    """It is not known which checkpoints it continues, so retention leaves them alone."""
    store.read("sft@latest")
    train(store, range(101, 121), max_checkpoints=1)


@program(STOPS, [10, 20, 80, 90, 100])
def runs_a_notebook_cell_twice(store: Store) -> None:
    train(store, range(1, 21), run="other")
    with pytest.raises(Conflict, match="saved by this program"):
        train(store, range(1, 21), run="other")
    assert visible(store, "other") == [10, 20]
    train(store, range(1, 21), overwrite=True)
    train(store, range(1, 21))


@program(GOES_ON, [10, 20, 30, 40])
def uses_a_second_object_for_later_steps(store: Store) -> None:
    store.forget("sft@80..")
    train(store, range(1, 21), max_checkpoints=2)
    train(store, range(21, 41), max_checkpoints=2)


@program(STOPS, [80, 90, 100])
def loads_a_checkpoint_of_another_run(store: Store) -> None:
    store.save({"model": {"weight": torch.zeros(1, 1)}}, run="base", step=5)
    train(store, range(6, 31), ref="base@5")


@program(STOPS, [80, 90, 100])
def rolls_back_without_a_new_run(store: Store) -> None:
    """The load has said that the save of step 90 will be refused."""
    train(store, range(81, 101), ref="sft@80")


@program(GOES_ON, [80, 90])
def rolls_back_as_the_warning_says(store: Store) -> None:
    store.forget("sft@90..100")
    train(store, range(81, 91), ref="sft@80")


@program(IS_WARNED, [0, 10])
def imports_then_trains(store: Store) -> None:
    store.forget("sft@80..")
    store.save({"model": {"weight": torch.zeros(1, 1)}}, run="sft", step=0)
    new_program()  # the import was a command
    train(store, range(1, 11), max_checkpoints=1)


@program(GOES_ON, [0, 10])
def imports_in_the_same_program(store: Store) -> None:
    store.forget("sft@80..")
    store.save({"model": {"weight": torch.zeros(1, 1)}}, run="sft", step=0)
    train(store, range(1, 11), max_checkpoints=1)


@program(GOES_ON, [80, 90, 100])
def sweeps(store: Store) -> None:
    for number in range(2):
        train(store, range(1, 21), run=f"sweep-{number}")
        assert visible(store, f"sweep-{number}") == [10, 20]


@program(STOPS, [80, 90, 100])
def sweeps_with_one_run_name(store: Store) -> None:
    train(store, range(1, 21), run="sweep")
    train(store, range(1, 21), run="sweep")


@program(STOPS, [80, 90, 100])
def evaluates_a_fold_and_begins_the_next_in_the_same_run(store: Store) -> None:
    train(store, range(1, 31), run="folds", max_checkpoints=1)
    store.load({"model": nn.Linear(1, 1, bias=False)}, "folds@latest")
    train(store, range(1, 31), run="folds", max_checkpoints=1)


def test_thinning_alone_also_takes_the_checkpoints_of_earlier_programs_that_were_resumed() -> None:
    store, rule = small(), {"drop": ["model.bias"], "keep_last": 1}
    for first, resumes in ((1, True), (3, True), (5, True), (7, False)):
        new_program()
        model = nn.Linear(1, 1)
        with Checkpointer(store, run="sft", thin=rule) as checkpointer:
            if resumes:
                checkpointer.resume(model)
            for step in (first, first + 1):
                checkpointer.save(step, model)
    assert [one.step for one in store.checkpoints("sft") if one.dropped is None] == [6, 8]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_go_on_or_are_warned_or_stop_before_a_step_is_lost(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = small()
    train(store, range(71, 101), max_checkpoints=3)
    new_program()
    caplog.clear()
    run, answer, stay = PROGRAMS[name]
    if answer == STOPS:
        with pytest.raises(Conflict, match=r"already (has|exists)"):
            run(store)
    else:
        run(store)
    assert visible(store) == stay
    warned = [one.getMessage() for one in caplog.records if "This training has not loaded it" in one.getMessage()]
    assert len(warned) == (answer == IS_WARNED) or answer == STOPS


def test_the_conflict_names_the_newest_step_and_two_ways_out() -> None:
    store = small()
    train(store, range(71, 101))
    new_program()
    with pytest.raises(Conflict) as caught:
        train(store, range(1, 31))
    assert re.search(
        r"run 'sft' of memory://\S+ already has 3 checkpoints, up to sft@100 \(saved by another program at "
        r"\d{4}-\d\d-\d\d \d\d:\d\d UTC\).* call resume\(\) first\. Otherwise, use a different run",
        str(caught.value),
    )
    assert len(caught.value.checkpoints) == 3


def test_a_load_of_an_earlier_step_says_what_latest_stays(caplog: pytest.LogCaptureFixture) -> None:
    store = small()
    train(store, range(71, 101))
    caplog.clear()
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.load("sft@100", nn.Linear(1, 1, bias=False))
    assert not caplog.records
    checkpointer.load("sft@80", nn.Linear(1, 1, bias=False))
    (record,) = caplog.records
    assert (
        "sft@80 was loaded, but run sft already has later steps (2, up to 100). sft@latest stays step 100 until this "
        "program saves, and a save of a step that exists raises Conflict." in record.getMessage()
    )
    caplog.clear()
    Checkpointer(store, run="sft", overwrite=True).load("sft@80", nn.Linear(1, 1, bias=False))
    assert "a save of a step that exists replaces it." in caplog.text
    command = record.getMessage().rpartition("`casckpt forget ")[2].rstrip("`").split()
    store.forget(command[1])  # as advised
    assert visible(store) == [80]
    train(store, range(81, 101), ref="sft@80")
    assert visible(store) == [80, 90, 100]


def test_a_training_that_resumed_nothing_stops_if_another_one_has_begun_in_the_meantime() -> None:
    store, model = small(), nn.Linear(1, 1)
    slow = Checkpointer(store, run="sft")
    assert slow.resume(model) is None
    train(store, range(1, 11))
    new_program()
    with pytest.raises(Conflict, match="already has 1 checkpoint, up to sft@10"):
        slow.save(10, model)


def test_a_training_that_only_resumes_what_its_program_has_saved_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """For example, the second fold of a cross-validation that uses one run for all folds."""
    store = small()

    def said() -> list[str]:
        caplog.clear()
        train(store, range(31, 31), resume=True)
        return [text for text in caplog.messages if "use a different run for each" in text]

    train(store, range(1, 31))
    assert len(said()) == 1
    new_program()
    assert said() == []  # another program, such as a test


def test_retention_by_metrics_counts_only_what_it_may_remove() -> None:
    store, model = small(), nn.Linear(1, 1)
    train(store, range(71, 101))
    new_program()
    keep = Policy(keep_best="loss:min:1")
    with Checkpointer(store, run="sft", keep=keep) as checkpointer:
        for step, loss in ((110, 3.0), (120, 1.0), (130, 2.0)):
            checkpointer.save(step, model, metrics={"loss": loss})
    assert visible(store) == [80, 90, 100, 120, 130]


def test_a_storage_that_fails_during_the_look_does_not_end_the_training() -> None:
    storage = FaultyStore(memory())
    store, model = small(storage), nn.Linear(1, 1)
    train(store, range(71, 101))
    new_program()
    storage.inject(fail_before("get", key="commits/*", times=1))
    with Checkpointer(store, run="sft", max_checkpoints=1) as checkpointer:
        checkpointer.start(110)
        assert not checkpointer.ownership.is_decided
        with pytest.raises(Conflict, match="already has 3 checkpoints"):  # the look is repeated
            checkpointer.save(50, model)
        checkpointer.save(110, model)
    assert visible(store) == [80, 90, 100, 110]


def refusal_of(save: Callable[[], object]) -> str:
    """Return the message of the Conflict that a save raises, or "" if it succeeds."""
    try:
        save()
    except Conflict as error:
        return str(error)
    return ""


def save_in_child(path: Path, model: nn.Module, first: int, answers: Any) -> None:
    with Checkpointer(small_folder(path), run="sft") as checkpointer:
        answers.put(refusal_of(lambda: checkpointer.save(first, model)))


@pytest.mark.soak
def test_a_spawned_child_whose_parent_loaded_the_weights_may_only_go_on(tmp_path: Path) -> None:
    store, model = small_folder(tmp_path / "store"), nn.Linear(1, 1, bias=False)
    train(store, range(71, 101))
    Checkpointer(store, run="sft").resume(model)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    for first in (101, 1):
        child = context.Process(target=save_in_child, args=(tmp_path / "store", model, first, answers))
        child.start()
        child.join()
    said = [answers.get() for _ in range(2)]
    assert said[0] == ""
    assert "call resume() first" in said[1]
    assert visible(store) == [80, 90, 100, 101]


def loads_on_one_rank(rank: int, size: int, path: Path, loader: int | None) -> list[str]:
    """Save step 110, then step 50 with another object. Only rank ``loader`` has read the run."""
    new_program()
    store, model = small_folder(path), nn.Linear(1, 1, bias=False)
    if rank == loader:
        store.read("sft@100")
    found = []
    for step in (50, 110):
        checkpointer = Checkpointer(store, run="sft", save_interval=10)
        found.append(refusal_of(partial(checkpointer.save_if_due, step, model)))
        checkpointer.wait()
    return found


@pytest.mark.parametrize("loader", [None, 1])
def test_all_ranks_get_one_answer_and_the_load_of_any_rank_counts(
    store_path: Path, ranks: Pool, loader: int | None
) -> None:
    train(small_folder(store_path), range(71, 101))
    found = ranks.run(2, loads_on_one_rank, store_path, loader)
    assert found[0][1] == found[1][1] == ""
    assert (
        ("already has 3 checkpoints" in found[0][0]) == ("already has 3 checkpoints" in found[1][0]) == (loader is None)
    )
    assert visible(small_folder(store_path)) == [*([50] if loader else []), 80, 90, 100, 110]


class Learner:
    """A model, an optimizer and a train state. Each step changes all of them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 2)
        self.optim = torch.optim.AdamW(self.model.parameters())
        self.train = TrainState(rng=False, epoch=0)

    def step(self) -> None:
        self.optim.zero_grad()
        self.model(torch.ones(1, 2)).square().sum().backward()
        self.optim.step()
        self.train["epoch"] += 1

    @property
    def all(self) -> tuple[nn.Module, torch.optim.Optimizer, TrainState]:
        return self.model, self.optim, self.train


def nanogpt(store: Store, last: int, *, crash_at: int | None = None, **settings: Any) -> tuple[int, nn.Module]:
    """Train like nanoGPT: save at the top of the loop, and resume at the saved step, so that it is saved again."""
    new_program()
    learner = Learner()
    with Checkpointer(store, run="gpt", save_interval=2, **settings) as checkpointer:
        found = checkpointer.resume(*learner.all)
        step = begun = found.step if found else 0
        while True:
            if step > 0:
                checkpointer.save_if_due(step, *learner.all)
            if step in {last, crash_at}:
                break
            learner.step()
            step += 1
    return begun, learner.model


def test_a_loop_like_nanogpts_resumes_after_each_crash_and_ends_like_a_whole_one() -> None:
    store = small()
    begun = [nanogpt(store, 10, crash_at=crash, max_checkpoints=2)[0] for crash in (3, 5, 5, 8, None, None)]
    assert begun == [0, 2, 4, 4, 8, 10]
    assert [step for _, step in steps(store)] == [8, 10]
    whole = nanogpt(small(), 10)[1]
    again = Learner()
    Checkpointer(store, run="gpt").load("gpt@10", again.model, again.optim)
    assert all(map(torch.equal, whole.parameters(), again.model.parameters()))


def test_an_equal_state_is_not_saved_again_and_the_log_and_an_event_say_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "casckpt.frontends.trainer")
    events = list[CheckpointEvent]()
    store, learner = small(), Learner()
    with Checkpointer(store, run="sft", save_interval=1, on_event=events.append) as checkpointer:
        saved = checkpointer.save(1, *learner.all)
        learner.train["epoch"] = 5  # neither a train state nor a rate counts
        learner.optim.param_groups[0]["lr"] = 0.5
        assert checkpointer.save(1, *learner.all).id == saved.id
        future = checkpointer.save_if_due(1, *learner.all, last=True)
        assert future is not None
        assert future.done()
        assert future.result().id == saved.id
        assert checkpointer.save_async(1, *learner.all).result().id == saved.id
    assert [(one.kind, one.reason) for one in events] == [("saved", ""), *[("skipped", "already_saved")] * 3]
    lines = [one.getMessage() for one in caplog.records if "already saved" in one.getMessage()]
    assert lines == ["sft@1 is already saved (changed since: 'optim.param_groups', 'train.0.epoch')"] * 3


def repeated_epoch(store: Store) -> tuple[Checkpointer, Learner]:
    """Resume epoch 1, and train it again, as the torchrun tutorial does."""
    learner = Learner()
    Checkpointer(store, run="sft").save(1, *learner.all)
    new_program()
    again = Learner()
    checkpointer = Checkpointer(store, run="sft", save_interval=1)
    assert checkpointer.resume(*again.all) is not None
    again.step()
    return checkpointer, again


def test_a_repeated_step_that_was_resumed_is_kept_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = small()
    checkpointer, learner = repeated_epoch(store)
    before = store.get("sft@1").id
    for _ in range(2):
        future = checkpointer.save_if_due(1, *learner.all)
        assert future is not None
        assert future.result().id == before
    (record,) = caplog.records
    assert "sft@1 is already saved, and stays as it is, although 'model.bias'" in record.getMessage()
    assert "this loop repeats step 1. Save after advancing the counter" in record.getMessage()
    checkpointer.save_if_due(2, *learner.all)
    checkpointer.close()
    assert [step for _, step in steps(store)] == [1, 2]


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_save_of_a_resumed_step_with_another_state_is_an_error_in_the_call(how: str) -> None:
    checkpointer, learner = repeated_epoch(small())
    with pytest.raises(Conflict, match=r"sft@1 is already saved, and .* changed since\. Save after advancing the step"):
        getattr(checkpointer, how)(1, *learner.all)


@pytest.mark.parametrize("how", ["save", "save_async", "save_if_due"])
def test_a_second_state_for_a_step_that_this_object_saved_is_an_error_in_the_call(how: str) -> None:
    learner = Learner()
    checkpointer = Checkpointer(small(), run="sft", save_interval=1)
    checkpointer.save(1, *learner.all)
    learner.step()
    with pytest.raises(Conflict, match=r"sft@1 is already saved, and .* changed since"):
        getattr(checkpointer, how)(1, *learner.all)
    with pytest.raises(Conflict, match="'optim"):  # the optimizer is missing now
        Checkpointer.save(checkpointer, 1, learner.model)


def test_a_module_with_hooks_counts_as_changed_even_if_only_the_rate_changed_beside_it() -> None:
    learner = Learner()
    learner.model.register_state_dict_post_hook(lambda *_: None)  # type: ignore[no-untyped-call] # of torch
    checkpointer = Checkpointer(small(), run="sft")
    checkpointer.save(1, learner.model, learner.optim)
    learner.model.weight.data.fill_(7)
    learner.optim.param_groups[0]["lr"] = 0.5
    with pytest.raises(Conflict, match=r"'model\.weight' changed"):
        checkpointer.save(1, learner.model, learner.optim)


def test_overwrite_replaces_a_step_that_was_resumed() -> None:
    store = small()
    checkpointer, learner = repeated_epoch(store)
    before = store.get("sft@1").id
    assert checkpointer.save(1, *learner.all, overwrite=True).id != before
    assert len(store.checkpoints("sft")) == 1


def test_labels_of_a_skipped_save_are_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    store, learner = small(), Learner()
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.save(1, *learner.all, ephemeral=True, metrics={"loss": 1.0}, healthy=True)
    store.tag("best", "sft@1")
    more: dict[str, Any] = {"metrics": {"loss": 1.0, "acc": 2.0}, "healthy": False, "attachments": {"a": b""}}
    kept = checkpointer.save(1, *learner.all, **more)
    assert not caplog.records
    assert (kept.metrics, kept.healthy, kept.ephemeral) == ({"loss": 1.0}, True, True)
    assert store.get("tag:best").step == 1
    odd: Any = 5  # a label never costs a checkpoint
    assert checkpointer.save(1, *learner.all, metrics=odd, metadata=odd).step == 1
    checkpointer.save(1, *learner.all, **more, overwrite=True)
    assert (store.get("sft@1").healthy, store.get("sft@1").ephemeral) == (False, False)


def test_a_training_that_resumed_a_healthy_checkpoint_replaces_the_unhealthy_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, learner = small(), Learner()
    Checkpointer(store, run="sft").save(1, *learner.all)
    for step in (2, 3):
        store.save({"model": learner.model}, run="sft", step=step, healthy=False)
    for _ in range(2):  # also after another crash
        new_program()
        checkpointer = Checkpointer(store, run="sft", save_interval=1)
        found = checkpointer.resume(*learner.all, healthy=True)
        assert found is not None
        learner.step()
        checkpointer.save_if_due(found.step + 1, *learner.all)
        checkpointer.close()
    assert not caplog.records
    assert sorted((one.step, one.healthy) for one in store.checkpoints("sft")) == [(1, None), (2, None), (3, None)]


def test_a_signal_at_the_resumed_step_keeps_its_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    store = small()
    checkpointer, learner = repeated_epoch(store)
    with SaveOnSignal(checkpointer) as last:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as left:
            last.check(1, *learner.all)
    assert left.value.code == 128 + signal.SIGTERM
    assert "this loop repeats step 1" in caplog.text
    assert [step for _, step in steps(store)] == [1]


def saves_twice(rank: int, size: int, path: Path) -> list[Any]:
    """Save one step twice with buffers that differ across ranks, then with another parameter on the last rank."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(nn.Linear(2, 2), norm)
    norm.get_buffer("running_mean").fill_(rank)
    checkpointer = Checkpointer(small_folder(path), run="sft", check_replicas="off")
    found: list[Any] = [checkpointer.save(1, model).id, checkpointer.save(1, model).id]
    norm.get_buffer("running_mean").fill_(7.0 + rank)
    try:
        checkpointer.save(1, model)
    except Conflict as error:
        found.append("running_mean" in str(error))
    return found


def test_ranks_compare_what_a_save_would_store(store_path: Path, ranks: Pool) -> None:
    first, other = ranks.run(2, saves_twice, store_path)
    assert first == other
    assert first[0] == first[1]
    assert first[2] is True
