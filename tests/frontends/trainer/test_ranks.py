"""Failures on one of several ranks, and agreement on the checkpoint to resume from."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from casckpt.errors import RankFailed, StorageError, Unsupported
from casckpt.frontends.trainer import Checkpointer
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore, call_first, fail_before
from tests.support.ranks import die, outcome_of
from tests.support.repositories import Ticks, meanwhile
from tests.support.saves import cells, small_folder, steps

if TYPE_CHECKING:
    from tests.support.ranks import Pool


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


# failures


def fails_on_one(rank: int, size: int, path: Path) -> Any:
    storage = FaultyStore(LocalStore(path))
    store = Store(Repository(storage))
    checkpointer = Checkpointer(store, run="sft", max_checkpoints=1)
    whole = {"model": torch.ones(4)}

    class Failing:
        def state_dict(self) -> dict[str, Any]:
            if rank == 1:
                raise ZeroDivisionError("of the loader")
            return {}

    found = [outcome_of(lambda: checkpointer.save_async(1, model(), None, Failing()))]
    if rank == 1:
        storage.inject(fail_before("put", key="objects/*.safetensors"))
    future = checkpointer.save_async(1, model(), None, {"big": cells(3, seed=rank)} | whole)
    found.append(future.exception(60))
    seen = steps(store)
    checkpointer.save(1, model(), None, {"big": cells(3, seed=rank)} | whole)
    mine = checkpointer.load("sft@1", model())
    same = bool(torch.equal(mine["big"], cells(3, seed=rank)))
    return [type(one) for one in found], [str(one) for one in found], seen, same


def test_a_save_that_fails_on_one_rank_fails_on_all_and_can_be_retried(store_path: Path, ranks: Pool) -> None:
    kinds, texts, seen, same = zip(*ranks.run(3, fails_on_one, store_path), strict=True)
    assert kinds == (
        [RankFailed, StorageError],
        [ZeroDivisionError, StorageError],
        [RankFailed, StorageError],
    )
    assert "rank 1" in texts[0][0]
    assert "rank 1" in texts[2][1]
    assert seen == ([], [], [])
    assert all(same)


def fails_again_and_again(rank: int, size: int, path: Path, *, repeats: bool) -> tuple[type, int]:
    """Let only rank 1 fail, and advance only its clock. Return each error with its step."""
    storage, clock = FaultyStore(LocalStore(path)), Ticks()
    checkpointer = Checkpointer(Store(Repository(storage, clock=clock)), run="sft", save_interval=2)
    if rank == 1:
        error = Unsupported("by the storage") if repeats else None
        storage.inject(fail_before("put", key="objects/*.safetensors", times=99, error=error))
    for step in range(2, 99):
        if rank == 1:
            clock.advance(60)
        saving = outcome_of(partial(checkpointer.save_if_due, step, model(), None, {"x": cells(2, seed=rank)}))
        if isinstance(saving, Exception):
            return type(saving), step
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("repeats", "want"), [(True, (Unsupported, 4)), (False, (StorageError, 20))])
def test_failures_are_raised_at_the_same_step_on_all_ranks(
    repeats: bool, want: tuple[type, int], store_path: Path, ranks: Pool
) -> None:
    assert ranks.run(2, fails_again_and_again, store_path, repeats=repeats) == [want] * 2


def dies_in_the_background(rank: int, size: int, path: Path) -> Any:
    storage = FaultyStore(LocalStore(path))
    checkpointer = Checkpointer(Store(Repository(storage)), run="sft")
    checkpointer.save(1, model(), None, {"x": rank})
    if rank == 1:
        storage.inject(call_first("put", lambda _: die(), key="objects/*"))
    future = checkpointer.save_async(2, model(), None, {"x": cells(2, seed=rank)})
    return type(future.exception(60)), [step for _, step in steps(checkpointer.store)]


def test_the_error_on_other_ranks_names_the_rank_that_died_during_a_save(store_path: Path, ranks: Pool) -> None:
    found = ranks.outcomes(3, dies_in_the_background, store_path)
    assert found[1].died == -signal.SIGKILL
    assert [one.value for one in (found[0], found[2])] == [(RankFailed, [1])] * 2


def resume_while_another_saves(rank: int, size: int, path: Path) -> int:
    store, state = small_folder(path), {"model": model().state_dict()}
    if rank == 0:
        store.save(state, run="sft", step=1, no_dist=True)
    else:
        store.repository.storage = FaultyStore(
            store.repository.storage,
            [
                call_first(
                    "open", meanwhile(lambda: store.save(state, run="sft", step=2, no_dist=True)), key="objects/*"
                )
            ],
        )
    found = Checkpointer(store, run="sft").resume(model())
    assert found is not None
    return found.step


def test_all_ranks_resume_from_the_checkpoint_that_rank_0_chooses(store_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, resume_while_another_saves, store_path) == [1, 1]
