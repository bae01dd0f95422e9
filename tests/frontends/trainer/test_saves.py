"""Failed saves in a training loop: errors, log messages, and retries of a step."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import pytest
from torch import nn

from casckpt.errors import Conflict, StorageError, Unsupported
from casckpt.frontends.trainer import Checkpointer
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore, fail_before, look_on
from tests.support.repositories import Ticks, memory
from tests.support.saves import small, steps
from tests.support.training import trained


def broken(*faults: Any) -> tuple[FaultyStore, Store]:
    storage = FaultyStore(memory())
    store = small(storage)
    storage.inject(*faults)
    return storage, store


FAULTS = {
    "blob": fail_before("put", key="objects/*.safetensors"),
    "manifest": fail_before("put", key="objects/*.manifest"),
    "begin": fail_before("put", key="transactions/*"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_background_save_is_logged_and_can_be_retried(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    _, store = broken(FAULTS[fault])
    model, optimizer = trained()
    checkpointer = Checkpointer(store, run="sft", max_checkpoints=2)
    checkpointer.write_file("a", "1")
    future = checkpointer.save_async(5, model, optimizer, {"epoch": 1})
    with pytest.raises(StorageError, match="injected"):
        future.result(60)
    assert steps(store) == []
    assert not caplog.records or all(record.levelno < logging.ERROR for record in caplog.records)
    assert checkpointer.save(5, model, optimizer, {"epoch": 1}).step == 5
    assert next(record.message for record in caplog.records if record.levelno == logging.ERROR).startswith(
        "the save of sft@5 failed, and no part of it is visible: injected"
    )
    assert store.attachments("sft@5") == {"a": 1}  # not lost with the failed save
    assert checkpointer.load("sft@5", model, optimizer) == {"epoch": 1}


def test_a_failed_foreground_save_can_be_retried() -> None:
    _, store = broken(FAULTS["blob"])
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.write_file("a", "1")
    with pytest.raises(StorageError, match="injected"):
        checkpointer.save(5, nn.Linear(2, 2))
    assert steps(store) == []
    assert checkpointer.saved_step is None
    checkpointer.save(5, nn.Linear(2, 2))
    assert store.attachments("sft@5") == {"a": 1}
    with pytest.raises(Conflict, match=r"sft@5 is already saved, and 'model\.bias', 'model\.weight' changed"):
        checkpointer.save(5, nn.Linear(2, 2))
    checkpointer.save(5, nn.Linear(2, 2), overwrite=True)


def test_a_failed_overwrite_keeps_the_old_checkpoint() -> None:
    storage, store = broken()
    checkpointer = Checkpointer(store, run="sft", overwrite=True, max_checkpoints=1)
    checkpointer.save(5, nn.Linear(2, 2), None, {"which": "old"})
    storage.inject(fail_before("put", key="objects/*.manifest"))
    with pytest.raises(StorageError, match="injected"):
        checkpointer.save(5, nn.Linear(2, 2), None, {"which": "new"})
    assert checkpointer.load("sft@5", nn.Linear(2, 2)) == {"which": "old"}
    checkpointer.save(5, nn.Linear(2, 2), None, {"which": "new"})
    assert checkpointer.load("sft@5", nn.Linear(2, 2)) == {"which": "new"}
    assert steps(store) == [("sft", 5)]


def test_a_load_right_after_a_background_save_finds_its_checkpoint() -> None:
    checkpointer = Checkpointer(small(), run="sft")
    checkpointer.save_async(5, nn.Linear(2, 2), None, {"which": 5})
    assert checkpointer.load("sft@5", nn.Linear(2, 2)) == {"which": 5}
    checkpointer.save_async(6, nn.Linear(2, 2))
    found = checkpointer.resume(nn.Linear(2, 2))
    assert found is not None
    assert found.step == 6


@pytest.mark.parametrize("end", ["wait", "close", "with"])
def test_the_failure_of_the_last_save_is_not_lost(end: str) -> None:
    _, store = broken(FAULTS["blob"])
    checkpointer = Checkpointer(store, run="sft")

    def leave() -> None:
        if end == "with":
            with checkpointer:
                checkpointer.save_async(5, nn.Linear(2, 2))
        else:
            checkpointer.save_async(5, nn.Linear(2, 2))
            getattr(checkpointer, end)()

    with pytest.raises(StorageError, match="injected"):
        leave()
    checkpointer.close()  # must not raise the error twice


def test_a_failed_rotation_does_not_fail_the_save(caplog: pytest.LogCaptureFixture) -> None:
    storage, store = broken()
    checkpointer = Checkpointer(store, run="sft", max_checkpoints=1)
    checkpointer.save(1, nn.Linear(2, 2))
    storage.inject(fail_before("list", key="tags/"))
    assert checkpointer.save(2, nn.Linear(2, 2)).step == 2
    assert "retention after the save of sft@2 failed: injected" in caplog.text
    assert steps(store) == [("sft", 1), ("sft", 2)]
    checkpointer.save(3, nn.Linear(2, 2))
    assert steps(store) == [("sft", 3)]


def test_only_one_save_runs_at_a_time() -> None:
    storage, store = broken()
    open_now: list[int] = []

    def look(_: Any) -> None:
        open_now.append(len(list(storage.inner.list("transactions/"))))

    storage.inject(look_on("put", look, key="objects/*.manifest", times=9))
    with Checkpointer(store, run="sft") as checkpointer:
        for step in range(3):
            checkpointer.save_async(step, nn.Linear(2, 2))
        checkpointer.save(3, nn.Linear(2, 2))
    assert open_now == [1, 1, 1, 1]
    assert steps(store) == [("sft", step) for step in range(4)]


def test_a_training_run_that_did_not_resume_stops_at_its_first_step(caplog: pytest.LogCaptureFixture) -> None:
    store, model = small(), nn.Linear(2, 2)
    Checkpointer(store, run="sft").save(2, model)
    Checkpointer(store, run="sft").save(4, model)
    done = []

    def again() -> None:
        with Checkpointer(store, run="sft", save_interval=2) as checkpointer:
            for step in range(1, 9):
                done.append(step)
                checkpointer.save_if_due(step, model)

    with pytest.raises(Conflict, match=r"already has 2 checkpoints, up to sft@4 \(saved by this program"):
        again()
    assert done == [1]
    assert not caplog.records


def test_a_save_error_does_not_hide_an_error_of_the_loop() -> None:
    _, store = broken(FAULTS["blob"])

    def loop() -> None:
        with Checkpointer(store, run="sft") as checkpointer:
            checkpointer.save_async(2, nn.Linear(2, 2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()


# permanent and temporary errors


def test_a_permanent_background_failure_is_raised_at_the_next_due_save(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, store = broken(fail_before("put", key="objects/*.manifest", error=Unsupported("by the storage")))
    checkpointer, done = Checkpointer(store, run="sft", save_interval=2), []

    def loop(first: int) -> None:
        for step in range(first, 9):
            done.append(step)
            checkpointer.save_if_due(step, nn.Linear(2, 2))

    with pytest.raises(Unsupported, match="by the storage"):
        loop(2)
    assert done == [2, 3, 4]
    assert not caplog.records
    loop(4)
    checkpointer.close()
    assert steps(store) == [("sft", 4), ("sft", 6), ("sft", 8)]


MINUTES = (0, 1, 2, 3, 15, 16, 17)
MANIFEST = "objects/*.manifest"


def raised_at(minutes: tuple[int, ...], *faults: Any, **settings: Any) -> list[int]:
    """Return the minutes at which the error of a background save was raised."""
    _, store = broken(*faults)
    clock, checkpointer, raised, before = Ticks(), Checkpointer(store, run="sft", **settings), [], 0
    checkpointer._failures._clock = lambda: clock() / 1e6
    for step, minute in enumerate(minutes):
        clock.advance(60 * (minute - before))
        before = minute
        try:
            checkpointer.save_async(step, nn.Linear(2, 2)).exception(60)
        except StorageError:
            raised.append(minute)
    return raised


@pytest.mark.parametrize(("most", "raised"), [(3, [16, 17]), (5, [16, 17]), (6, [17]), (7, []), (None, [])])
def test_temporary_failures_are_raised_after_max_failures_and_a_minimum_time(
    most: int | None, raised: list[int]
) -> None:
    assert raised_at(MINUTES, fail_before("put", key=MANIFEST, times=99), max_failures=most) == raised


def test_a_successful_save_resets_the_count_of_failures(caplog: pytest.LogCaptureFixture) -> None:
    faults = fail_before("put", key=MANIFEST, times=3), fail_before("put", key=MANIFEST, at=5, times=99)
    assert raised_at((*MINUTES, 18, 19, 20), *faults) == []
    assert "training waits" not in caplog.text


def test_a_foreground_save_runs_before_the_error_for_too_many_failures(caplog: pytest.LogCaptureFixture) -> None:
    assert raised_at(MINUTES, fail_before("put", key=MANIFEST, times=5)) == []
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "5 consecutive saves of sft failed: the training waits for the next one"
    ]


def test_a_failure_that_was_retrieved_is_not_raised_by_the_next_save(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(broken()[1], run="sft")
    monkeypatch.setattr(checkpointer.ownership, "find", lambda step: None)  # as if it was saved after the look
    checkpointer.save(5, nn.Linear(2, 2))
    with pytest.raises(Conflict, match="sft@5 already exists"):
        checkpointer.save_async(5, nn.Linear(2, 2)).result()
    checkpointer.save(6, nn.Linear(2, 2))
    failed = checkpointer.save_async(6, nn.Linear(2, 2))
    with pytest.raises(Conflict, match="sft@6 already exists"):
        checkpointer.save(7, nn.Linear(2, 2))
    assert isinstance(failed.exception(), Conflict)


# messages


def test_each_save_logs_a_summary(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "casckpt")
    model, _ = trained()
    with Checkpointer(small(), run="sft", max_checkpoints=1) as checkpointer:
        checkpointer.save(1, model)
        checkpointer.save_async(2, model)
        checkpointer.wait()
        assert checkpointer.summary is not None
        assert checkpointer.summary.forgotten == checkpointer.summary.purged == (1,)
        assert checkpointer.summary.bytes_new == 0
        assert checkpointer.summary.bytes_reused == checkpointer.summary.checkpoint.stats.bytes_total > 0
    lines = [record.message for record in caplog.records if record.message.startswith("saved")]
    number = r"\d+\.\d"
    assert re.fullmatch(
        rf"saved sft@2: blocked {number}\d s, durable after {number}\d s, 0.0 MiB new, {number} MiB reused; "
        "purged sft@1",
        lines[1],
    )
    assert len(lines) == 2


# misuse


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_summary_includes_the_time_that_the_loop_waited(how: str) -> None:
    model, optimizer = trained()
    begun = time.monotonic()
    with Checkpointer(small(), run="sft") as checkpointer:
        getattr(checkpointer, how)(1, model, optimizer)
    took, told = time.monotonic() - begun, checkpointer.summary
    assert told is not None
    assert 0 < told.blocked <= told.durable <= took
    assert (told.checkpoint.step, told.forgotten) == (1, ())


def test_the_time_of_a_save_in_the_foreground_counts_as_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    storage, store = broken(look_on("put", lambda _: now.__setitem__(0, now[0] + 100), key="objects/*.manifest"))
    store.repository.staging_bytes = 0
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    checkpointer = Checkpointer(store, run="sft")
    assert checkpointer.save_async(1, nn.Linear(2, 2)).done()
    summary = checkpointer.summary
    assert summary is not None
    assert (storage.count("put", "objects/*.manifest"), summary.blocked, summary.durable) == (1, 100, 100)
