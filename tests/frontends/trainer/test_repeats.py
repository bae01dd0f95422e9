"""Saves of a step that is already saved: loops that repeat the step they resumed, and jobs that run after their end."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from casckpt.errors import Conflict
from casckpt.frontends.trainer import Checkpointer, CheckpointEvent, SaveOnSignal, TrainState
from casckpt.store.store import Store
from tests.frontends.trainer.test_ownership import new_program
from tests.support.saves import small, small_folder, steps

if TYPE_CHECKING:
    from tests.support.ranks import Pool


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


def test_labels_of_a_skipped_save_are_named(caplog: pytest.LogCaptureFixture) -> None:
    store, learner = small(), Learner()
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.save(1, *learner.all, ephemeral=True, metrics={"loss": 1.0}, healthy=True)
    store.tag("best", "sft@1")
    checkpointer.save(1, *learner.all, ephemeral=True, metrics={"loss": 2.0}, healthy=True)
    assert not caplog.records
    more: dict[str, Any] = {"metrics": {"loss": 1.0, "acc": 2.0}, "healthy": False, "attachments": {"a": b""}}
    checkpointer.save(1, *learner.all, **more)
    (record,) = caplog.records
    assert record.getMessage() == (
        "sft@1 is already saved; not stored: its new metrics, attachments, health mark, permanence"
    )
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
