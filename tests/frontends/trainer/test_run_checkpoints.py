"""The checkpoints of a run, which need one listing, and missing runs."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import Future, wait
from pathlib import Path

import pytest
from torch import nn

import casckpt
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import Conflict, NotFound
from casckpt.frontends.trainer import Checkpointer
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore, call_first, fail_before
from tests.support.forks import forked
from tests.support.repositories import memory
from tests.support.saves import small
from tests.support.servers import Server
from tests.support.training import made


@pytest.mark.parametrize(
    ("run", "meant"),
    [
        ("llama-stf", "llama-sft"), ("LLAMA-SFT", "llama-sft"), ("llama", "llama-sft"), ("zzz", None),
        ("llama-sft-long", None), ("llama-sft2", None), ("ablate-no-norm", None), ("lr-1e-4", None),
        ("dpo-20260302-183012", "dpo-20260301-120000"), ("gpt/2026-03-02/08-30-12", "gpt/2026-03-01/12-00-00"),
    ],
)  # fmt: skip
def test_a_resume_without_a_checkpoint_suggests_a_similar_run(
    run: str, meant: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    store, (model, optimizer) = small(), made(1)
    assert Checkpointer(store, run=run).resume(model, optimizer) is None  # there is no store, so there is no run
    for other in ("llama-sft", "ablate-no-dropout", "lr-1e-3", "dpo-20260301-120000", "gpt/2026-03-01/12-00-00"):
        Checkpointer(store, run=other).save(1, model, optimizer)
    caplog.set_level(logging.INFO, "casckpt")
    fresh = Checkpointer(store, run=run)
    assert fresh.resume(model, optimizer) is None
    fresh.save(1, model, optimizer)
    (told,) = (record for record in caplog.records if "there is no checkpoint" in record.getMessage())
    assert (told.levelno == logging.WARNING) == ("did you mean" in told.getMessage()) == (meant is not None)
    assert meant is None or told.getMessage().endswith(f"; did you mean {meant}?")


def test_names_of_a_checkpoint_that_is_still_being_saved_are_not_those_of_the_one_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage, go = FaultyStore(memory()), threading.Event()
    store, (model, optimizer) = small(storage), made(1)
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.save(1, model, optimizer)

    def hold(_: object) -> None:
        assert go.wait(60)

    storage.inject(call_first("put", hold, key="commits/*[!1]"))
    saving = checkpointer.save_async(2, model, optimizer)
    with pytest.raises(NotFound, match="The save of sft@2 still runs in the background: wait for its future"):
        store.get("sft@2")
    caplog.clear()
    store.tag("best", "sft@latest")
    (said,) = caplog.messages
    assert "tag best is on sft@1" in said
    assert "The save of sft@2 still runs" in said
    threading.Timer(0, go.set).start()
    resumed = Checkpointer(store, run="sft").resume(model, optimizer)  # as in a notebook cell that was interrupted
    assert checkpointer.latest_checkpoint() == saving.result() == resumed
    caplog.clear()
    store.tag("best", "sft@latest")
    assert caplog.messages == []
    storage.inject(fail_before("put", times=1))
    failed = checkpointer.save_async(3, model, optimizer)
    assert checkpointer.latest_checkpoint() == resumed  # as a load, it logs the error and goes on
    assert "the save of sft@3 failed" in caplog.text
    assert failed.exception() is not None


@pytest.mark.parametrize("is_started", [True, False])
def test_a_resume_after_ctrl_c_waits_for_a_save_whose_thread_had_started(
    monkeypatch: pytest.MonkeyPatch, is_started: bool
) -> None:
    storage, reached, go, (model, optimizer) = FaultyStore(memory()), threading.Event(), threading.Event(), made(1)
    checkpointer = Checkpointer(small(storage), run="sft", save_interval=1)
    checkpointer.save(1, model, optimizer)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        is_of_the_save = thread.name == "casckpt-async"
        if is_started or not is_of_the_save:
            start(thread)
        if is_of_the_save:
            assert not is_started or reached.wait(60)
            raise KeyboardInterrupt

    def hold(_: object) -> None:
        reached.set()
        assert go.wait(60)

    def waited(savings: list[Future[Checkpoint]]) -> object:
        go.set()
        assert len(savings) == is_started
        return wait(savings)

    storage.inject(call_first("put", hold, key="commits/*[!1]"))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save_if_due(2, model, optimizer)
    monkeypatch.setattr("casckpt.frontends.trainer.checkpointer.wait", waited)
    resumed = checkpointer.resume(model, optimizer)
    assert resumed is not None
    assert resumed.step == 1 + is_started
    saving = checkpointer.save_if_due(resumed.step + 1, model, optimizer)
    assert saving is not None
    assert saving.result(60).step == resumed.step + 1


def test_a_forked_child_does_not_wait_for_the_saves_of_its_parent(caplog: pytest.LogCaptureFixture) -> None:
    inner, go = memory(), threading.Event()
    storage, (model, optimizer) = FaultyStore(inner), made(1)
    checkpointer, other = Checkpointer(small(storage), run="sft"), Checkpointer(Store(Repository(inner)), run="sft")
    first = checkpointer.save(1, model, optimizer)

    def hold(_: object) -> None:
        assert go.wait(60)

    storage.inject(call_first("put", hold, key="commits/*[!1]"))
    saving = checkpointer.save_async(2, model, optimizer)

    def child() -> None:
        for each in (other, checkpointer):
            assert each.resume(model, optimizer) == first
        checkpointer.close()
        with pytest.raises(Conflict, match="the process that forked this one runs this save"):
            saving.result()
        storage.heal()
        checkpointer.save(3, model, optimizer)  # does not raise the other error again
        assert "of sft@2" not in caplog.text

    caplog.clear()
    try:
        with forked(child):
            assert not saving.done()
    finally:
        go.set()
        saving.result()


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("run1/chekpoints", "run1/checkpoints"), ("run/checkpoints", None), ("run2/checkpoints", None),
        ("run1/chekpoints/more", None), ("run1/other", None),
        ("runs1/checkpoints", "run1/checkpoints"), ("run1/checkpoint", "run1/checkpoints"),
    ],
)  # fmt: skip
def test_a_resume_without_a_store_suggests_a_similar_folder(
    path: str, meant: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made(1)
    Checkpointer(tmp_path / "run1" / "checkpoints", run="sft").save(1, model, optimizer)
    (tmp_path / "run1" / "checkpoinds").mkdir()  # not a store
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, "casckpt"):
        assert Checkpointer(path, run="sft").resume(model, optimizer) is None
    there = f"there is no store at {tmp_path / path}"
    if meant is None:
        want = logging.INFO, f"{there} yet, so nothing is resumed; the first save creates it"
    else:
        want = logging.WARNING, f"{there}, so nothing is resumed; did you mean {tmp_path / meant}?"
    assert [(one.levelno, one.getMessage()) for one in caplog.records if "no store" in one.getMessage()] == [want]
    with pytest.raises(NotFound, match=re.escape(f"{there}{f' (did you mean {tmp_path / meant}?)' if meant else ''}:")):
        Checkpointer(path, run="sft").load("sft@latest", model, optimizer)


def test_a_single_listing_is_enough_to_find_checkpoints(store: Store) -> None:
    model = nn.Linear(2, 2)
    checkpointer = Checkpointer(store, run="sft")
    assert list(checkpointer.find_checkpoints()) == []  # the store does not exist yet
    assert not checkpointer.contains_checkpoint()
    with pytest.raises(FileNotFoundError):
        checkpointer.latest_checkpoint()
    for step, ephemeral in ((30, False), (10, True), (20, False)):
        checkpointer.save(step, model, ephemeral=ephemeral)
    Checkpointer(store, run="other").save(1, model)
    assert [one.step for one in checkpointer.find_checkpoints()] == [10, 20, 30]
    assert [one.step for one in checkpointer.find_checkpoints(ephemeral=True)] == [10]
    assert [one.step for one in checkpointer.find_checkpoints(ephemeral=False)] == [20, 30]
    assert checkpointer.latest_checkpoint().step == 20  # saved last, because the run was rolled back
    assert checkpointer.contains_checkpoint()
    assert checkpointer.checkpoint_dirname(20) == "step20"


def test_a_run_whose_checkpoints_are_all_forgotten_warns(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    Checkpointer(store, run="sft").save(1, model)
    store.forget("sft@1")
    assert Checkpointer(store, run="sft").resume(model) is None
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith("nothing is resumed: there is no checkpoint of run 'sft'")
    assert "1 was forgotten: see `casckpt list --all`" in warning


def test_the_first_run_of_a_store_does_not_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert Checkpointer(tmp_path / "new", run="sft").resume(nn.Linear(2, 2)) is None
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_listing_of_checkpoints_makes_a_single_list_call() -> None:
    storage = FaultyStore(memory())
    checkpointer = Checkpointer(small(storage), run="sft")
    for step in range(3):
        checkpointer.save(step, nn.Linear(2, 2))
    storage.calls.clear()
    assert len(list(checkpointer.find_checkpoints(ephemeral=False))) == 3
    assert storage.count("list") == 1


def test_two_programs_that_save_to_one_run_are_warned(caplog: pytest.LogCaptureFixture) -> None:
    store, model = small(), nn.Linear(2, 2)
    first, second = (Checkpointer(store, run="sft", overwrite=True) for _ in range(2))
    for step in (1, 2, 3):
        first.save(step, model)
    first.load("sft@1", model)
    caplog.clear()  # a warning of the later steps
    store.forget("sft@2..")
    store.gc(min_age="0s")
    first.save(2, model)  # its parent is now the loaded checkpoint
    second.save(3, model)
    assert not caplog.records
    for step in (4, 5):
        first.save(step, model)
    (record,) = caplog.records
    assert "another program also saves to run 'sft'" in record.getMessage()
    assert store.get("sft@3").id[:12] in record.getMessage()


def test_a_missing_bucket_is_an_error_before_the_first_save(moto_server: Server) -> None:
    store = casckpt.open("s3://no-such-bucket/store", storage_options=moto_server.options)
    for first_call in (Checkpointer.resume, lambda loop, model: loop.save_if_due(1, model)):
        with pytest.raises(NotFound, match="no such bucket: create it first"):
            first_call(Checkpointer(store, run="sft", save_interval=100), nn.Linear(2, 2))
    store = casckpt.open(f"s3://{moto_server.new_bucket()}/store", storage_options=moto_server.options)
    assert Checkpointer(store, run="sft").resume(nn.Linear(2, 2)) is None
