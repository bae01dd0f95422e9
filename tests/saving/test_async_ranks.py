"""Background saves on several ranks: errors that a rank does not know of, and simultaneous saves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.tensor import Shard

import casckpt
from casckpt.errors import CasckptError, Conflict, InvalidInput, StorageError
from tests.support.faulty import Call, call_first, fail_before
from tests.support.ranks import outcome_of, tell, wait_for
from tests.support.saves import small_folder
from tests.support.together import line, numbers, spread, watched

if TYPE_CHECKING:
    from tests.support.ranks import Pool


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with small cells and blobs."""
    small_folder(tmp_path / "store")
    return tmp_path / "store"


def unheard(rank: int, size: int, path: Path) -> Any:
    """Rank 0 learns of the failure, but rank 1 does not."""
    store, faults = watched(path)
    state = spread({"w": numbers("w", 64, 100)}, line(size), [Shard(0)])
    store.warm_up(state)
    if rank == 1:
        faults.inject(fail_before("put", key="objects/*.safetensors"))
    first = store.save_async(state, step=0)
    heard = [outcome_of(first.result)] if rank == 0 else []
    heard.append(outcome_of(lambda: store.save_async(state, step=1)))
    third = store.save_async(state, step=2).result()
    return [type(error) for error in heard], third.step, [one.step for one in store.checkpoints()]


def test_a_failure_that_one_rank_did_not_see_stops_the_next_save_on_all_ranks(ranks: Pool, path: Path) -> None:
    first, second = ranks.run(2, unheard, path)
    assert all(issubclass(kind, CasckptError) for kind in first[0])
    assert second[0] == [StorageError]
    assert first[1:] == second[1:] == (2, [2])


def wrong_on_one(rank: int, size: int, path: Path) -> Any:
    """Rank 1 passes an invalid value: first as a metric, then in the state."""
    store = casckpt.open(path)
    state = spread({"w": numbers("w", 64, 100)}, line(size), [Shard(0)])
    metrics: Any = {"loss": "low"} if rank == 1 else None
    calls = (
        lambda: store.save_async(state, step=0, metrics=metrics),
        lambda: store.save_async(state | ({"odd": object()} if rank == 1 else {}), step=0),
    )
    errors = [outcome_of(call) for call in calls]
    return [type(error) for error in errors], store.save_async(state, step=0).result().step


def test_an_invalid_argument_on_one_rank_raises_on_all_ranks(ranks: Pool, path: Path) -> None:
    assert ranks.run(2, wrong_on_one, path) == [([InvalidInput, InvalidInput], 0)] * 2


def refusing(rank: int, size: int, path: Path) -> Any:
    """Rank 1's save is still running. Rank 0's save waits for it."""
    store, faults = watched(path)
    state = spread({"w": numbers("w", 64, 100)}, line(size), [Shard(0)])

    def hold(_: Call) -> None:
        wait_for("refused")

    if rank == 1:
        faults.inject(call_first("put", hold, key="objects/*.safetensors"))
    first = store.save_async(state, step=0)
    error = outcome_of(lambda: store.save_async(state, step=1, when_busy="refuse"))
    if rank == 0:
        tell("refused")
    first.result()
    again = store.save_async(state, step=1, when_busy="refuse").result()
    return type(error), again.step


def test_all_ranks_reject_a_save_while_any_rank_is_still_saving(ranks: Pool, path: Path) -> None:
    assert ranks.run(2, refusing, path) == [(Conflict, 1)] * 2


def copied(rank: int, size: int, path: Path) -> Any:
    store = casckpt.open(path)
    state = spread({"w": numbers("w", 64, 100, dtype=torch.int32)}, line(size), [Shard(0)])
    futures = []
    for step in range(4):
        futures.append(store.save_async(state, step=step))
        state["w"].to_local().add_(1)
    return [future.result().step for future in futures]


def test_each_save_stores_the_state_at_the_time_of_the_call(ranks: Pool, path: Path) -> None:
    assert ranks.run(2, copied, path) == [[0, 1, 2, 3]] * 2
    store = casckpt.open(path)
    for step in range(4):
        assert torch.equal(store.read(f"default@{step}")["w"], numbers("w", 64, 100, dtype=torch.int32) + step)
