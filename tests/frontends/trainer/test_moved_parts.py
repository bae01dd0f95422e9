"""A resume on different ranks reports per-rank parts that were saved by a different rank, except random generators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import casckpt
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.loading.unread import is_generator, warn_moved
from tests.support.logs import logged
from tests.support.ranks import Pool
from tests.support.saves import small_folder


def save(store: casckpt.Store, run: str, rank: int) -> None:
    """Save a train state and per-rank values."""
    Checkpointer(store, run=run).save(1, nn.Linear(1, 1), None, TrainState(loader={"at": rank}))
    state: dict[str, Any] = {
        "loader": casckpt.PerRank({"at": rank}),
        "rng": casckpt.PerRank(rank),
        "seen": casckpt.PerRank(rank),
        "m": {},
    }
    state["m"]["w"] = torch.ones(2)
    store.save(state, run=f"{run}/keys", step=1)


def load(store: casckpt.Store, run: str) -> list[str]:
    """Load both, and return the log."""
    with logged() as said:
        for _ in range(2):
            Checkpointer(store, run=run).resume(nn.Linear(1, 1), None, TrainState(loader={"at": 9}))
            state: dict[str, Any] = {"loader": None, "rng": 0, "seen": 0, "m": {"w": torch.zeros(2)}}
            store.load(state, f"{run}/keys@1")
        store.load({"m": {"w": torch.zeros(2)}}, f"{run}/keys@1", unread="ignore")
        store.load({"m": {"w": torch.zeros(2)}}, f"{run}/keys@1")
    return [line for line in said if "loader" in line or "rng" in line]


def on_two(rank: int, size: int, path: Path) -> tuple[list[str], list[str]]:
    store = casckpt.open(path)
    save(store, "two", rank)
    return load(store, "two"), load(store, "one")


def test_per_rank_values_that_move_to_a_different_rank_are_logged(tmp_path: Path, ranks: Pool) -> None:
    store = small_folder(tmp_path)
    save(store, "one", 0)
    nobody = "the load did not read 'loader', 'seen' of {}/keys@1; if this is intended, pass unread=\"ignore\""
    (same, more), others = ranks.run(2, on_two, tmp_path)
    assert others == ([], [])
    assert same == [nobody.format("two")]
    assert more == [
        "'train.loader' of one@1: rank 1 loaded the value of rank 0",
        "'loader.at', 'seen' of one/keys@1: rank 1 loaded the value of rank 0",
        nobody.format("one"),
    ]
    assert load(store, "two") == [
        "'train.loader' of two@1: no rank loaded the value of rank 1",
        "'loader.at', 'seen' of two/keys@1: no rank loaded the value of rank 1",
        nobody.format("two"),
    ]


def of_models(rank: int, size: int, path: Path) -> None:
    models = {"model": nn.Linear(1, 1), "ema": nn.Linear(1, 1)}
    for model in models.values():
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
    Checkpointer(small_folder(path), run="models").save(1, models, None, TrainState(loader={"at": rank}))


def test_a_resume_on_fewer_ranks_logs_moved_parts_once(
    tmp_path: Path, ranks: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.run(2, of_models, tmp_path)
    models = {"model": nn.Linear(1, 1), "ema": nn.Linear(1, 1)}
    checkpointer = Checkpointer(small_folder(tmp_path), run="models")
    checkpointer.resume(models, None, TrainState(loader={"at": 9}))
    assert caplog.messages == ["'train.loader' of models@1: no rank loaded the value of rank 1"]
    caplog.clear()
    checkpointer.resume(models)
    assert caplog.messages == [str(checkpointer.resumed)]
    assert "left: 'train' (in the checkpoint, but not passed" in caplog.text
    caplog.clear()
    assert checkpointer.load("models@1", {"ema": models["ema"]}) is not None
    assert caplog.messages == ["the load did not read 'model' of models@1; if this is intended, pass unread=\"ignore\""]


def test_the_log_lists_ranks_and_parts(caplog: pytest.LogCaptureFixture) -> None:
    holders = {"moved.a": [0, 1], "moved.b": [0, 1], "moved.c": [1, 3], "moved.d": [0, 1, 2]}
    for _ in range(2):
        warn_moved("moved", 1, holders, 3)
    assert caplog.messages == [
        "'moved.a', 'moved.b' of moved@1: rank 2 loaded the value of rank 0",
        "'moved.c' of moved@1: ranks 0, 2 loaded the value of rank 1; no rank loaded the value of rank 3",
    ]


@pytest.mark.parametrize("key", ["rng", "train.rng", "rng_state", "cuda_rng", "a.random.b", "generator0"])
def test_random_generators_are_recognized_by_name(key: str) -> None:
    assert is_generator(key)


@pytest.mark.parametrize("key", ["loader", "arng", "strong", "train.epoch"])
def test_other_parts_are_not_mistaken_for_generators(key: str) -> None:
    assert not is_generator(key)
