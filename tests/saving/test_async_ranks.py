"""Background saves on several ranks: errors that a rank does not know of, and simultaneous saves."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import Shard

import casckpt
from casckpt.errors import CasckptError, InvalidInput, StorageError
from casckpt.repository import blob_cache
from casckpt.storage.buffers import AlignedBuffer
from casckpt.tensors import staging
from tests.saving.test_replicas import Heard
from tests.support.faulty import Call, FaultyStore, call_first, fail_before
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import cells, small_folder
from tests.support.together import impatient, line, numbers, spread, watched


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
    """Rank 1 passes an invalid value: first as an argument, then in the state."""
    store = casckpt.open(path)
    state = spread({"w": numbers("w", 64, 100)}, line(size), [Shard(0)])
    compress: Any = "much" if rank == 1 else None
    calls = (
        lambda: store.save_async(state, step=0, compress=compress),
        lambda: store.save_async(state | ({"odd": object()} if rank == 1 else {}), step=0),
    )
    errors = [outcome_of(call) for call in calls]
    return [type(error) for error in errors], store.save_async(state, step=0).result().step


def test_an_invalid_argument_on_one_rank_raises_on_all_ranks(ranks: Pool, path: Path) -> None:
    assert ranks.run(2, wrong_on_one, path) == [([InvalidInput, InvalidInput], 0)] * 2


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


# the memory for copies


COPY = cells(4).nbytes


def limited(folder: Path, name: str, nbytes: int) -> tuple[casckpt.Store, FaultyStore]:
    """Open the store ``name`` as one rank does, with ``folder`` as this host's memory."""
    blob_cache.MEMORY = folder
    impatient()
    store, storage = watched(folder / name)
    store.repository.staging_bytes = nbytes
    return store, storage


def staged(store: casckpt.Store) -> int:
    return store._saver.get().background.staging.nbytes


def save_with_limits(rank: int, size: int, folder: Path, limits: list[int], *, fits: bool) -> list[str]:
    """Save with the rank's limit, and check whether the call returns before the save ends. Return what was logged."""
    (store, storage), go, heard = limited(folder, "store", limits[rank]), threading.Event(), Heard()

    def wait(_: Call) -> None:
        assert go.wait(60)

    if fits:
        storage.inject(call_first("put", wait, key="objects/*"))
    state = {f"w{rank}": cells(4, seed=rank)}
    future = store.save_async(state, step=1)
    assert (future.done(), staged(store)) == (not fits, COPY if fits else 0)
    go.set()
    assert future.result(60).step == 1
    assert torch.equal(store.read("latest")[f"w{rank}"], state[f"w{rank}"])
    return heard.taken()


@pytest.mark.parametrize(
    ("limits", "fits", "warning"),
    [
        ([3 * COPY] * 3, True, None),
        ([3 * COPY - 1] * 3, False, f"staging_bytes={3 * COPY} or more"),
        ([3 * COPY, COPY - 1, 3 * COPY], False, "on the host of rank 1 would take"),
    ],
    ids=["enough", "too little", "too little on one rank"],
)
def test_all_ranks_save_in_the_foreground_if_the_copy_of_one_does_not_fit(
    limits: list[int], fits: bool, warning: str | None, tmp_path: Path, ranks: Pool
) -> None:
    first, *others = ranks.run(3, save_with_limits, tmp_path, limits, fits=fits)
    assert others == [[], []]
    assert len(first) == (warning is not None)
    assert warning is None or warning in first[0]


@pytest.mark.parametrize(("limit", "fits"), [(2 * COPY, True), (2 * COPY - 1, False)])
def test_only_the_copies_of_the_same_host_count(limit: int, fits: bool, tmp_path: Path, ranks: Pool) -> None:
    ranks.run(3, save_on_two_hosts, tmp_path, limit, fits=fits)


def save_on_two_hosts(rank: int, size: int, folder: Path, limit: int, *, fits: bool) -> None:
    """Save on two hosts, each with its own folder for memory."""
    memory = folder / f"memory-{rank % 2}"
    memory.mkdir(exist_ok=True)
    store = limited(memory, "../store", limit)[0]
    store.save_async({f"w{rank}": cells(4, seed=rank)}, step=1).result(60)
    assert staged(store) == (COPY if fits else 0)


def reject_on_one(rank: int, size: int, folder: Path) -> Any:
    store = limited(folder, "store", 2 * COPY)[0]
    error = outcome_of(lambda: store.save_async({f"w{rank}": cells(4) if rank == 0 else object()}, step=1))
    before = staged(store)
    store.save_async({f"w{rank}": cells(4)}, step=1).result(60)
    return type(error), before, staged(store)


def test_a_save_that_is_rejected_on_one_rank_keeps_no_memory(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, reject_on_one, tmp_path) == [(InvalidInput, 0, COPY)] * 2


def no_memory(_: int) -> AlignedBuffer:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def copy_without_memory_on_one(rank: int, size: int, folder: Path) -> Any:
    """Rank 1 fails to allocate memory for its first copy, as under `ulimit -v`."""
    store, state = small_folder(folder / "store"), {f"w{rank}": cells(4, seed=rank)}
    with patch.object(staging, "AlignedBuffer", no_memory if rank == 1 else AlignedBuffer):
        error = store.save_async(state, step=1).exception(60)
    return type(error), str(error).removeprefix("rank 1: "), store.save_async(state, step=2).result(60).step


def test_a_copy_that_fails_on_one_rank_fails_the_save_on_all_ranks(tmp_path: Path, ranks: Pool) -> None:
    first, second = ranks.run(2, copy_without_memory_on_one, tmp_path)
    assert first == second
    assert first[0] is CasckptError
    assert "Cannot allocate memory; allow this process more memory" in first[1]
    assert first[2] == 2
