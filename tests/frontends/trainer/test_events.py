"""Events of a training: a hook and the log receive the same, and a hook that fails does not affect a save."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from casckpt.errors import InvalidInput, StorageError
from casckpt.format.keys import manifest_key
from casckpt.frontends.trainer import Checkpointer, CheckpointerConfig, CheckpointEvent
from tests.frontends.trainer.test_saves import FAULTS, broken
from tests.support.pages import Reader
from tests.support.saves import small, steps
from tests.support.training import trained
from tests.test_packaging import ROOT

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


def test_a_save_within_the_cooldown_is_skipped() -> None:
    seen = list[CheckpointEvent]()
    model, config = (
        nn.Linear(2, 2),
        CheckpointerConfig(ephemeral_save_interval=2, ephemeral_cooldown=3, save_interval=5),
    )
    with config.build(small(), run="sft", on_event=seen.append) as checkpointer:
        for step in range(1, 11):
            checkpointer.save_if_due(step, model)
            checkpointer.wait()
    skipped = [event for event in seen if event.kind == "skipped"]
    assert [event.step for event in seen if event.kind == "saved"] == [2, 5, 8, 10]
    assert named(skipped) == [("skipped", 4), ("skipped", 6)]
    assert {event.reason for event in skipped} == {"ephemeral_cooldown"}


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
