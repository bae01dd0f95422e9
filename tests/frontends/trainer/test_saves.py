"""Saves in a training loop: errors, retries of a step, summaries and events, and the gc that follows."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from casckpt.errors import Conflict, InvalidInput, StorageError, Unsupported
from casckpt.format.keys import manifest_key
from casckpt.frontends.trainer import Checkpointer, CheckpointEvent
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore, fail_before, look_on
from tests.support.pages import Reader
from tests.support.repositories import Ticks, memory
from tests.support.saves import small, steps
from tests.support.training import trained
from tests.test_packaging import ROOT


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


def test_gc_runs_after_a_save_if_requested() -> None:
    store, model = small(), nn.Linear(50, 50)
    with Checkpointer(store, run="sft", max_checkpoints=1, gc=True) as checkpointer:
        for step in range(4):
            model.weight.data.fill_(step)
            checkpointer.save(step, model)
    found = store.stats()
    # the bias did not change, so it remains in the blob of the first save
    assert (found.checkpoints, found.blobs) == (
        1,
        2,
    )


def test_a_checkpointer_with_gc_frees_space(caplog: pytest.LogCaptureFixture) -> None:
    store = small()
    with caplog.at_level("WARNING"), Checkpointer(store, run="sft", max_checkpoints=1, gc=True) as checkpointer:
        for step in range(1, 4):
            checkpointer.save(step, nn.Linear(30, 30))
    assert (store.stats().blobs, caplog.messages) == (1, [])


def test_a_checkpointer_respects_the_minimum_age_of_the_store() -> None:
    store = small()
    store.create()
    store.repository.change_settings(min_age_seconds=3600.0)
    checkpointer = Checkpointer(store, run="sft", max_checkpoints=1)
    for step in range(1, 4):
        checkpointer.save(step, nn.Linear(2, 2))
    assert store.stats().forgotten == 2
    store.restore(store.checkpoints(forgotten=True)[0])
    assert [step for _, step in steps(store)] == [1, 3]


FIGURES = {
    "blocked_seconds", "waited_seconds", "ranks_seconds", "durable_seconds", "bytes_total", "bytes_copied",
    "bytes_hashed", "bytes_written", "bytes_reused",
}  # fmt: skip


def named(seen: list[CheckpointEvent]) -> list[tuple[str, int]]:
    return [(event.kind, event.step) for event in seen]


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_the_hook_receives_saves_loads_and_what_retention_forgets(how: str) -> None:
    store, (model, optimizer) = small(), trained()
    seen = list[CheckpointEvent]()
    with Checkpointer(store, run="sft", max_checkpoints=1, on_event=seen.append) as checkpointer:
        assert checkpointer.resume(model, optimizer) is None
        for step in (1, 2):
            getattr(checkpointer, how)(step, model, optimizer)
        checkpointer.wait()
        checkpointer.resume(model, optimizer)
        checkpointer.load("sft@2", model)
    assert named(seen) == [("saved", 1), ("saved", 2), ("forgotten", 1), ("resumed", 2), ("resumed", 2)]
    first, second, _, resumed, _ = seen
    stats = store.get("sft@2").stats
    assert first.figures.keys() == FIGURES
    waits = [first.figures[f"{name}_seconds"] for name in ("ranks", "waited", "blocked", "durable")]
    assert waits == sorted(waits)
    assert (first.figures["bytes_copied"] >= stats.bytes_total) is (how == "save_async")
    assert (second.figures["bytes_written"], second.figures["bytes_reused"]) == (stats.bytes_written, stats.bytes_total)
    assert second.checkpoint == resumed.checkpoint == store.get("sft@2")
    assert (resumed.figures["bytes_total"], resumed.run) == (stats.bytes_total, "sft")


def test_tensors_that_are_declared_frozen_do_not_count_as_hashed() -> None:
    model, seen = nn.ModuleDict({"base": nn.Linear(600, 600), "head": nn.Linear(600, 2)}), list[CheckpointEvent]()
    with Checkpointer(small(), run="sft", frozen=["model.base.*"], on_event=seen.append) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, model)
    frozen = sum(tensor.nbytes for tensor in model["base"].parameters())
    total = frozen + sum(tensor.nbytes for tensor in model["head"].parameters())
    assert [event.figures["bytes_hashed"] for event in seen] == [total, total - frozen]


def test_figures_do_not_require_that_the_manifest_can_be_read() -> None:
    """Another process may purge the checkpoint right after the save."""
    store = small()
    with Checkpointer(store, run="sft") as checkpointer:
        checkpointer.save(1, nn.Linear(2, 2))
        summary, commit = checkpointer.summary, store.get("sft@1").commit
        assert summary is not None
        store.repository.storage.delete(manifest_key(commit.txid, commit.committed.manifest))
        store.repository.forget_all(keep_marker=True)
        assert summary.figures.keys() == FIGURES - {"bytes_hashed"}


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_failed_save_is_reported_once_with_its_error(how: str) -> None:
    _, store = broken(FAULTS["blob"])
    seen = list[CheckpointEvent]()
    with Checkpointer(store, run="sft", on_event=seen.append) as checkpointer:
        with pytest.raises(StorageError, match="injected"):  # noqa: PT012 - a background save raises in wait
            getattr(checkpointer, how)(5, nn.Linear(2, 2))
            checkpointer.wait()
        with pytest.raises(InvalidInput):
            getattr(checkpointer, how)(6, nn.Linear(2, 2), None, {"odd": object()})
        checkpointer.save(7, nn.Linear(2, 2))
    assert named(seen) == [("failed", 5), ("failed", 6), ("saved", 7)]
    assert isinstance(seen[0].error, StorageError)
    assert seen[0].reason.startswith("StorageError: injected")
    assert seen[0].checkpoint is None


@pytest.mark.parametrize("error", [ValueError("from the hook"), SystemExit(3)], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("how", ["save", "save_async"])
def test_an_error_of_the_hook_is_logged_once_and_saves_continue(
    how: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    store = small()

    def fail(event: CheckpointEvent) -> None:
        raise error

    with Checkpointer(store, run="sft", on_event=fail) as checkpointer:
        for step in (1, 2):
            getattr(checkpointer, how)(step, nn.Linear(2, 2))
    assert steps(store) == [("sft", 1), ("sft", 2)]
    (logged,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert logged.message.startswith("on_event failed for the event 'saved' of sft@1. The checkpoint is not affected.")
    assert logged.exc_info is not None
    assert logged.exc_info[1] is error


def test_the_log_has_one_line_of_json_for_each_event(caplog: pytest.LogCaptureFixture) -> None:
    _, store = broken(FAULTS["begin"])
    seen = list[CheckpointEvent]()
    with caplog.at_level(logging.INFO, "casckpt.events"):
        checkpointer = Checkpointer(store, run="sft", on_event=seen.append)
        with pytest.raises(StorageError):
            checkpointer.save(1, nn.Linear(2, 2))
        saved = checkpointer.save(1, nn.Linear(2, 2))
    lines = [json.loads(record.message) for record in caplog.records if record.name == "casckpt.events"]
    assert lines == [event.as_dict() for event in seen]
    failed, last = lines
    assert (failed["event"], failed["id"], failed["run"]) == ("failed", None, "sft")
    assert (last["event"], last["id"], last["reason"]) == ("saved", saved.id, "")
    assert last.keys() == {"event", "run", "step", "id", "reason"} | FIGURES


def test_a_hook_that_cannot_be_called_is_rejected() -> None:
    odd: Any = "print"
    with pytest.raises(InvalidInput, match="on_event='print' is not valid"):
        Checkpointer(small(), run="sft", on_event=odd)


@pytest.mark.filterwarnings("ignore")  # mlflow and its database warn about each other
def test_the_recipe_for_mlflow_links_a_checkpoint_and_the_run_of_the_tracker(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow, which is too large for the dev extra")
    reader = Reader(tmp_path, ROOT, {}, lambda size, block: None)
    assert reader.follow(ROOT / "docs" / "howto.md", needs="mlflow") == 2


def test_a_level_that_was_set_before_the_import_is_kept() -> None:
    program = """
import logging
import subprocess
import sys
log = logging.getLogger("casckpt.events")
log.setLevel("INFO")
import casckpt.frontends.trainer
assert log.level == logging.INFO
"""
    subprocess.run([sys.executable, "-c", program], check=True)
