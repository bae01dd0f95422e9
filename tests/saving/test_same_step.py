"""A late error on one of several ranks ends the same training step on all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import casckpt
from casckpt.errors import InvalidInput
from casckpt.frontends.trainer import Checkpointer
from tests.support.faulty import call_first
from tests.support.ranks import Pool, comes_last, outcome_of
from tests.support.saves import small_folder
from tests.support.together import line, numbers, spread, watched

STEPS = 5
BAD = {0: "in the state", 2: "in the state", 3: "in the storage"}
"""The steps that fail, and the location of the failure. The first save creates a plan. Later saves reuse it."""


class Late:
    """Every rank calls this in a step. On ``who``, it waits until the other ranks have called it, and then raises."""

    def __init__(self, rank: int, size: int, who: int) -> None:
        self.rank, self.who, self.size, self.name = rank, who, size, ""

    def comes_last(self) -> bool:
        return comes_last(self.name, self.rank, self.size, self.who)

    def __call__(self, *_: Any) -> None:
        if self.comes_last():
            raise InvalidInput("as it happens")


def training(rank: int, size: int, path: Path, who: int) -> dict[str, dict[int, str]]:
    """Return the steps that raised, with their errors, of trainings that continue.

    There is one for each way to save or load.
    """
    store, storage = watched(path)
    model, late = nn.Linear(30, 40, bias=False), Late(rank, size, who)
    model.weight.data.copy_(numbers("w", 40, 30))
    broken = nn.Linear(30, 41, bias=False)
    weights = spread({"w": numbers("w", 16 * size, 100)}, line(size), [Shard(0)])
    trainer = Checkpointer(store, run="trainer")
    store.save(weights, run="saved", step=1)
    trainer.save(100, model)

    def is_bad() -> bool:
        return BAD.get(step) == "in the state" and late.comes_last()

    def state() -> dict[str, Any]:
        if is_bad():
            raise InvalidInput("as it happens")
        return {"own": casckpt.PerRank(numbers(f"{rank}", 3000) + step)}

    class Train:
        state_dict = staticmethod(state)

    def wanted() -> dict[str, Any]:
        return {"as it happens" if is_bad() else "w": torch.zeros_like(weights["w"])}

    ways: dict[str, Callable[[], Any]] = {
        "save": lambda: store.save(state, run="save", step=step),
        "save_async": lambda: store.save_async(state, run="save_async", step=step).result(),
        "trainer": lambda: trainer.save(step, model, train_state=Train()),
        "trainer async": lambda: trainer.save_async(200 + step, model, train_state=Train()).result(),
        "load": lambda: store.load(wanted(), "saved@1"),
        "trainer load": lambda: trainer.load("trainer@100", broken if is_bad() else model),
    }
    raised: dict[str, dict[int, str]] = {way: {} for way in ways}
    for way, run in ways.items():
        for step in range(STEPS):
            late.name = f"{way} {step}"
            if BAD.get(step) == "in the storage":
                storage.inject(call_first("read_into" if "load" in way else "put", late, key="objects/*"))
            found = outcome_of(run)
            storage.heal()
            if isinstance(found, Exception):
                raised[way][step] = str(found)
    return raised


@pytest.mark.parametrize(("size", "who"), [(2, 0), (2, 1), (4, 2)])
def test_a_late_error_on_one_rank_ends_the_same_step_on_all_ranks(
    ranks: Pool, tmp_path: Path, size: int, who: int
) -> None:
    small_folder(tmp_path / "store")
    for rank, raised in enumerate(ranks.run(size, training, tmp_path / "store", who)):
        for way, errors in raised.items():
            assert list(errors) == list(BAD), (rank, way, errors)
            assert all(re.search("as it happens|41", error) for error in errors.values())
            assert all(error.startswith(f"rank {who}: ") for error in errors.values()) == (rank != who)
