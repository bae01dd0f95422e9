"""Averages for followers: each one equals a merge of all checkpoints, bit by bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from casckpt.errors import InvalidInput, Mismatch, MissingKey, NotFound
from casckpt.frontends.averaging import moving_average
from casckpt.frontends.follow import CURRENT, Follower
from casckpt.store.store import Store
from tests.support.saves import CELL, blob_keys, cells, flip, small_folder

RULE, FILE = "ema:0.9", "model.safetensors"
FROZEN = torch.tensor([-float("inf"), -0.0, 0.1, float("inf"), 1e-30]).repeat(CELL)


def state(step: int) -> dict[str, Any]:
    frozen = {"mask": FROZEN, "frozen": FROZEN.bfloat16(), "late": cells(2, seed=step if step > 1 else 1)}
    trained = {"a": cells(3, seed=step), "b": cells(3, seed=step).bfloat16(), "c": cells(0.5, seed=step).half()}
    return {**frozen, **trained, "count": torch.tensor(step)}


def save(store: Store, *steps: int) -> None:
    for step in steps:
        store.save({"model": state(step), "step": step}, run="run", step=step)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = small_folder(tmp_path / "store")
    save(made, 0)
    return made


def once(store: Store, folder: Path, **options: Any) -> list[int]:
    options = {"merge": RULE, **options}
    return [one.checkpoint.step for one in Follower(store, "run", folder, **options).follow(once=True)]


def check(store: Store, folder: Path, *refs: str) -> None:
    """Check that the current folder is an export of the moving average of these checkpoints."""
    wanted = folder.with_name("wanted")
    step = len(store.checkpoints("wanted", forgotten=True))
    store.export(store.merge(*refs, run="wanted", step=step, ema=RULE.partition(":")[2]), wanted, force=True)
    assert (folder / CURRENT / FILE).read_bytes() == (wanted / FILE).read_bytes()


def test_each_average_equals_a_merge_of_all_checkpoints(store: Store, tmp_path: Path) -> None:
    """However many of them are new."""
    folder, step = tmp_path / "to", 1
    for count in (0, 1, 2, 1, 3):
        save(store, *range(step, step + count))
        step += count
        assert once(store, folder) == [step - 1]
        check(store, folder, "run@..")
    held = load_file(folder / CURRENT / FILE)
    assert torch.equal(held["model.frozen"].view(torch.int16), FROZEN.bfloat16().view(torch.int16))
    assert once(store, folder) == []


def test_an_average_continues_after_gc_removed_its_checkpoints(store: Store, tmp_path: Path) -> None:
    folder, average = tmp_path / "to", state(0)["a"]
    for step in range(1, 5):
        once(store, folder)
        save(store, step)
        store.gc(run="run", keep_last=1, min_age=0, wait=0)
        average = average * 0.9 + state(step)["a"] * 0.1
    once(store, folder)
    assert torch.equal(load_file(folder / CURRENT / FILE)["model.a"], average.float())


@pytest.mark.parametrize("loss", ["lost", "of another store", "not there yet"])
def test_without_an_earlier_average_a_new_one_begins(store: Store, tmp_path: Path, loss: str) -> None:
    folder = tmp_path / "to"
    once(store, folder, merge=None if loss == "not there yet" else RULE)
    save(store, 1)
    if loss == "of another store":
        store = small_folder(tmp_path / "other")
        save(store, 4, 5)
    if loss == "lost":
        once(store, folder)
        shutil.rmtree(next(folder.glob("*-average")))
    once(store, folder)
    check(store, folder, "run@..")


def test_only_the_average_of_the_current_folder_is_kept(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "to"
    for step in range(1, 5):
        once(store, folder)
        save(store, step)
    assert sorted(path.name[:8] for path in folder.glob("0*")) == ["000003-2", "000004-3", "000004-a"]


def test_a_damaged_checkpoint_is_left_out(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "to"
    once(store, folder)
    there = {*blob_keys(store)}
    save(store, 1)
    for key in {*blob_keys(store)} - there:
        flip(store, key, 5000)
    assert once(store, folder) == []
    assert "skipping " in caplog.text
    save(store, 2)
    assert once(store, folder) == [2]
    assert "the average of run leaves out a checkpoint" in caplog.text
    check(store, folder, "run@0", "run@2")


def test_a_checkpoint_that_is_marked_unhealthy_is_left_out(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "to"
    once(store, folder)
    store.save({"model": {**state(1), "a": torch.full((3,), float("nan"))}}, run="run", step=1, health=True)
    assert once(store, folder) == []
    assert "it is marked unhealthy, so the average leaves it out" in caplog.text
    save(store, 2)
    assert once(store, folder) == [2]
    assert "the average leaves out run@1: it is marked unhealthy" in caplog.text
    check(store, folder, "run@0", "run@2")


def test_no_checkpoint_counts_twice_if_the_newest_is_forgotten_meanwhile(store: Store, tmp_path: Path) -> None:
    """Otherwise, this average would contain the later checkpoint, and the next one would add it again."""
    average = moving_average(store, "run", RULE, ())
    average.advance(None, "", store.get("run@0"), tmp_path / "0")
    save(store, 1)
    newest = store.get("run@1")
    store.forget(newest)
    save(store, 2)
    with pytest.raises(NotFound, match="run@1 was forgotten before it was averaged"):
        average.advance(tmp_path / "0", store.get("run@0").id, newest, tmp_path / "1")


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"a": torch.ones(3)}, Mismatch, "'model.a' has the shape"),
        ({"new": torch.ones(3)}, MissingKey, "does not hold 'model.new'"),
        ({"s": torch.eye(3).to_sparse()}, MissingKey, "does not hold 'model.s"),
    ],
)
def test_an_average_that_cannot_continue_is_an_error(
    store: Store, tmp_path: Path, change: dict[str, Any], error: type[Exception], why: str
) -> None:
    folder = tmp_path / "to"
    once(store, folder)
    store.save({"model": state(1) | change, "step": 1}, run="run", step=1)
    with pytest.raises(error, match=f"{why}.*different folder, or select other keys with keys="):
        once(store, folder)
    assert once(store, tmp_path / "another", keys=["model.b"]) == [1]
    assert once(store, tmp_path / "other") == [1]


@pytest.mark.parametrize("change", [{"a": torch.ones(3)}, {"new": torch.ones(3)}, {"a": None}])
def test_a_new_average_begins_after_the_last_checkpoint_that_does_not_fit(
    store: Store, tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 1)
    for step in (2, 3):
        model = {key: tensor for key, tensor in (state(step) | change).items() if tensor is not None}
        store.save({"model": model, "step": step}, run="run", step=step)
    assert once(store, tmp_path / "to") == [3]
    assert "the average of run begins after step 1: " in caplog.text
    check(store, tmp_path / "to", "run@2", "run@3")


@pytest.mark.parametrize("pattern", ["casckpt.json", "objects/*/*.safetensors", "objects/*/*.manifest"])
def test_a_damaged_average_is_not_blamed_on_new_checkpoints(store: Store, tmp_path: Path, pattern: str) -> None:
    folder = tmp_path / "to"
    once(store, folder)
    (average,) = folder.glob("*-average")
    for path in (average / "store").glob(pattern):
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    save(store, 1)
    with pytest.raises(InvalidInput, match=f"{average} is damaged: delete this folder, and a new average begins"):
        once(store, folder)
    shutil.rmtree(average)
    assert once(store, folder) == [1]
    check(store, folder, "run@..")


def test_a_pattern_without_a_match_keeps_its_own_advice(store: Store, tmp_path: Path) -> None:
    with pytest.raises(MissingKey, match="matches 'nope'") as raised:
        once(store, tmp_path / "to", keys=["nope"])
    assert "a new average" not in str(raised.value)


def test_an_invalid_rule_is_refused(store: Store, tmp_path: Path) -> None:
    for rule, why in (("mean", "pass ema:DECAY"), ("ema:", "not a finite number"), ("ema:1.5", "between 0 and 1")):
        with pytest.raises(InvalidInput, match=why):
            once(store, tmp_path / "to", merge=rule)


def test_a_folder_with_an_average_is_refused_with_a_different_rule(store: Store, tmp_path: Path) -> None:
    once(store, tmp_path / "to")
    for rule, why in ((None, "holds an average: pass merge="), ("ema:0.5", "has the decay 0.9, not 0.5")):
        with pytest.raises(InvalidInput, match=why):
            once(store, tmp_path / "to", merge=rule)
    assert once(store, tmp_path / "to", merge="ema:9/10") == []
