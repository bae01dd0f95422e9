"""The results and refusals of a save, the objects that it leaves behind, and repeated saves of a step."""

from __future__ import annotations

import logging
import math
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from casckpt.base.names import MAX_STEP
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import Conflict, InvalidInput, NotFound, StorageError
from casckpt.history.commits import list_commits
from casckpt.repository.repository import Repository
from casckpt.saving.upload import Upload
from casckpt.storage.local.store import LocalStore
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from tests.support.faulty import Call, Fault, FaultyStore, call_first, fail_before, look_on
from tests.support.ids import named
from tests.support.repositories import memory, wait_for_clean_up
from tests.support.saves import CELL, cells, reopened, same_state, small, steps

STATE = {"w": torch.arange(6.0), "x": [1]}


def test_the_record_contains_metrics_and_health() -> None:
    store = small()
    figures = {"loss": 0.3, "tokens": 12, "grad": math.nan, "ppl": math.inf}
    ckpt = store.save(STATE, step=1, metrics=figures, healthy=True)
    assert (repr(ckpt.metrics), ckpt.healthy) == (repr(figures), True)
    assert repr(store.get("default@1").metrics) == repr(figures)
    assert store.save(STATE, step=2, healthy=False).healthy is False
    plain = store.save(STATE, step=3)
    assert (plain.metrics, plain.healthy) == ({}, None)


@pytest.mark.parametrize("metadata", [{"a": object()}, {1: 2}, "text", 5, {"t": torch.ones(2)}], ids=named)
def test_metadata_that_json_cannot_represent_is_left_out(
    metadata: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_store(tmp_path / "store").save(STATE, step=1, metadata=metadata).metadata == {}
    assert "leaves out what JSON cannot represent" in caplog.text


def test_a_save_reaches_its_first_tensor_through_few_stack_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader can follow `Store.save` in eight steps to `Upload.place`, which compares and stores cells."""
    frames: list[str] = []
    place = Upload.place

    def look(self: Upload, work: Any) -> Any:
        frames.extend(frame.f_code.co_qualname for frame, _ in traceback.walk_stack(sys._getframe(1)))
        return place(self, work)

    monkeypatch.setattr(Upload, "place", look)
    small().save(STATE, step=1)
    between = frames[: frames.index("Store.save") + 1]
    assert len(between) + 1 <= 8, between


def test_the_smallest_and_largest_steps_are_saved() -> None:
    store = small()
    for step in (0, MAX_STEP):
        store.save(STATE, step=step)
        assert same_state(store.read(f"default@{step}"), STATE)


def test_saving_an_existing_step_raises_conflict() -> None:
    store = small()
    first = store.save(STATE, run="a", step=1)
    with pytest.raises(Conflict, match=r"a@1 already exists.*overwrite=True") as caught:
        store.save({"w": torch.zeros(6)}, run="a", step=1)
    assert caught.value.checkpoints == (first.id,)
    assert isinstance(caught.value, FileExistsError)
    assert same_state(store.read("a@1"), STATE)
    assert len(list_commits(store.repository).commits) == 1
    store.save(STATE, run="b", step=1)


def test_overwrite_forgets_the_previous_checkpoint() -> None:
    store = small()
    first = store.save(STATE, step=1)
    second = store.save({"w": torch.zeros(6)}, step=1, overwrite=True)
    assert steps(store) == [("default", 1)]
    assert store.get("default@1") == second
    assert store.get(first.id).forgotten
    assert same_state(store.read("default@1"), {"w": torch.zeros(6)})
    assert store.save(STATE, step=2, overwrite=True).step == 2


def test_an_overwrite_that_cannot_forget_still_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    faulty = FaultyStore(memory())
    store = small(faulty)
    store.save(STATE, step=1)
    faulty.inject(fail_before("put", key="commits/*.1", times=9))
    second = store.save({"w": torch.zeros(6)}, step=1, overwrite=True)
    faulty.heal()
    assert store.get("default@1") == second
    assert steps(store) == [("default", 1)]
    assert "superseded, but not forgotten" in caplog.text


def test_a_forgotten_step_can_be_saved_again() -> None:
    store = small()
    first = store.save(STATE, step=1)
    store.forget("default@1")
    assert "default@1" not in store
    second = store.save(STATE, step=1)
    assert second.stats.bytes_written == 0  # a forgotten checkpoint is still live, and may be reused
    assert store.get(first.id[:20]).forgotten
    with pytest.raises(Conflict):
        store.restore(first)


def test_a_later_save_is_newer_regardless_of_the_clock() -> None:
    store = small()
    now = store.repository.clock()
    store.repository.clock = lambda: now + 10**9
    store.save(STATE, step=10)
    store.repository.clock = lambda: now
    store.save(STATE, step=5)
    assert store.get("default@latest").step == store.get("latest").step == 5


def test_runs_are_separate() -> None:
    store = small()
    for run in ("a", "b", "a/b"):
        store.save({"w": torch.full((2,), float(len(run)))}, run=run, step=1)
    assert {ckpt.run for ckpt in store.checkpoints()} == {"a", "b", "a/b"}
    assert [ckpt.run for ckpt in store.checkpoints(run="a")] == ["a"]
    assert store.read("a/b@latest")["w"].tolist() == [3.0, 3.0]


def test_tags_refer_to_checkpoints() -> None:
    store = small()
    ckpt = store.save(STATE, step=1)
    store.tag("best", "default@1")
    assert store.get("tag:best") == ckpt
    assert ckpt.tags == ["best"]
    assert same_state(store.read("tag:best"), STATE)
    store.untag("best")
    with pytest.raises(NotFound):
        store.get("tag:best")


def test_a_save_leaves_no_transaction_behind() -> None:
    store = small()
    store.save(STATE, step=1)
    keys = sorted(entry.key.split("/")[0] for entry in store.repository.storage.list(""))
    assert keys == ["casckpt.json", "commits", "objects", "objects", "runs"]
    with pytest.raises(Conflict):
        store.save(STATE, step=1)
    assert sorted(entry.key.split("/")[0] for entry in store.repository.storage.list("")) == keys


def clean_up(outcome: str, let_go: threading.Event) -> Fault:
    """Return what happens to the first object that a failed save deletes."""
    if outcome == "fails":
        return fail_before("delete", key="objects/*")

    def look(_: Call) -> None:
        if outcome == "blocks":
            let_go.wait(20)

    return look_on("delete", look, key="objects/*")


@pytest.mark.parametrize("outcome", ["succeeds", "fails", "blocks"])
def test_the_error_of_a_save_is_raised_at_once_whether_its_clean_up_succeeds_or_not(outcome: str) -> None:
    faulty, let_go, failed = FaultyStore(memory()), threading.Event(), StorageError("the disk failed")
    store = small(faulty)
    kept = store.save(STATE, step=1)
    faulty.inject(fail_before("put", key="objects/*.manifest", error=failed), clean_up(outcome, let_go))
    with pytest.raises(StorageError) as caught:
        store.save({"w": cells(40)}, step=2)
    assert caught.value is failed
    assert (faulty.count("delete", "objects/*") > 1) <= (outcome != "blocks")
    let_go.set()
    wait_for_clean_up()
    assert store.checkpoints() == [kept]
    assert (store.stats().bytes_freed_now == 0) == (outcome != "fails")
    assert store.save({"w": cells(40)}, step=2).stats.bytes_written > 40 * CELL


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_a_save_that_is_interrupted_leaves_its_objects_to_gc(interrupt: type[BaseException]) -> None:
    def hit(_: Call) -> None:
        raise interrupt

    store = small(faulty := FaultyStore(memory()))
    faulty.inject(call_first("put", hit, key="objects/*.manifest"))
    with pytest.raises(interrupt):
        store.save({"w": cells(40)}, step=2)
    wait_for_clean_up()
    assert faulty.count("delete", "objects/*") == 0
    assert store.gc(min_age=0).deleted_blobs > 1


def test_the_first_save_creates_the_store(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a" / "store")
    assert not (tmp_path / "a").exists()
    store.save(STATE, step=1)
    assert (tmp_path / "a" / "store" / "casckpt.json").is_file()
    assert store.repository.marker.cell_bytes == 1 << 20
    assert store.create() is False


def test_a_store_keeps_its_own_sizes(tmp_path: Path) -> None:
    assert open_store(tmp_path / "s").create(cell_bytes=8192, blob_bytes=65536)
    store = open_store(tmp_path / "s")
    store.save({"w": cells(20)}, step=1)
    assert (store.repository.marker.cell_bytes, store.repository.marker.blob_bytes) == (8192, 65536)
    with pytest.raises(InvalidInput):
        open_store(tmp_path / "t").create(cell_bytes=100)


def test_a_save_updates_the_statistics_of_the_store() -> None:
    store = small()
    store.save({"w": cells(4)}, run="a", step=1)
    store.save({"w": cells(4)}, run="b", step=1)
    stats = store.stats()
    assert (stats.checkpoints, stats.runs, stats.blobs) == (2, 2, 2)
    assert stats.bytes_logical == 8 * 4096
    assert stats.bytes_blobs == 10 * 4096 + 2 * 72


def test_threads_can_save_at_the_same_time() -> None:
    store = small()
    states = {step: {"w": cells(5), "n": step} for step in range(8)}
    found: list[Checkpoint] = []

    def save(step: int) -> None:
        found.append(store.save(states[step], step=step))

    threads = [threading.Thread(target=save, args=(step,)) for step in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    for step, state in states.items():
        assert same_state(store.read(f"default@{step}"), state)


def test_two_threads_that_save_the_same_step_do_not_lose_a_checkpoint() -> None:
    store, barrier = small(), threading.Barrier(2)
    errors: list[Exception] = []

    def save(value: float) -> None:
        barrier.wait()
        try:
            store.save({"w": torch.full((3,), value)}, step=1)
        except Conflict as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) <= 1
    assert steps(store) == [("default", 1)]
    assert store.read("default@1")["w"].tolist() in ([1.0] * 3, [2.0] * 3)


def test_a_successful_save_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = small()
    with caplog.at_level(logging.INFO, logger="casckpt"):
        store.save(STATE, step=1)
        store.save(STATE, step=2)
        store.read("default@2")
    assert caplog.text == ""


@pytest.mark.parametrize("known", [True, False])
def test_a_save_into_a_store_without_announcements_finds_existing_checkpoints(
    known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """This is the case for a copy of folders that omitted runs/."""
    _finds_what_is_not_announced(small(), known, caplog)


def test_empty_run_folders_are_not_announcements(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Some servers keep the folder of deleted objects for a while, and a manual copy may omit only the files."""
    _finds_what_is_not_announced(small(LocalStore(tmp_path / "store")), True, caplog)
    assert list((tmp_path / "store/runs").iterdir())


def _finds_what_is_not_announced(made: Store, known: bool, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        made.save({"w": cells(3, seed=1)}, run="a", step=step)
    storage = made.repository.storage
    for entry in list(storage.list("runs/")):
        storage.delete(entry.key)
    store = made if known else Store(Repository(storage))
    with pytest.raises(Conflict, match="a@1 already exists"):
        store.save(STATE, run="a", step=1)
    assert "runs/ of" in caplog.text
    again = store.save({"w": cells(3, seed=1)}, run="a", step=3)
    assert again.stats.blobs_written == 0
    assert [one.step for one in reopened(store).checkpoints()] == [1, 2, 3]
    assert not store.verify().records
