"""Errors in a hook reach every rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import Shard, distribute_tensor

import casckpt
from casckpt.errors import StorageError
from casckpt.frontends.dcp import StorageWriter
from tests.support.dcp import causes, failed, failure, save
from tests.support.faulty import fail_before
from tests.support.together import line, numbers, watched

if TYPE_CHECKING:
    from tests.support.ranks import Pool


# 2: if an error does not survive pickling, the ranks wait for each other


class TwoTexts(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(one)
        self.lock = threading.Lock()


class FailingPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        raise TwoTexts("no data", "today")


def failing_save(rank: int, size: int, path: Path) -> Any:
    planner = FailingPlanner() if rank == 1 else DefaultSavePlanner()
    state = {"a": distribute_tensor(numbers("a", 4, 4), line(size), [Shard(0)])}
    return failed(lambda: save(state, StorageWriter(path, step=1), planner=planner))


def test_02_an_error_that_cannot_be_pickled_reaches_every_rank_as_a_string(ranks: Pool, store_path: Path) -> None:
    for told in ranks.run(2, failing_save, store_path):
        assert told == {1: ("RankFailed", "TwoTexts: no data")}
    assert casckpt.open(store_path).checkpoints() == []


# 3: a save fails if a writer thread fails, or if no rank wrote a planned item


def test_03_a_failed_writer_thread_fails_the_save(store_path: Path) -> None:
    store, storage = watched(store_path)
    store.create(blob_bytes=1 << 20)
    storage.inject(fail_before("put", at=2, times=9, key="objects/*.safetensors"))
    state = {str(i): numbers(str(i), 1 << 18) for i in range(8)}
    error = failure(lambda: save(state, StorageWriter(store, step=1, threads=2)))
    assert isinstance(causes(error)[0], StorageError)
    assert store.checkpoints() == []
    assert storage.count("put", "commits/*") == 1  # the save ended its transaction at once
    storage.heal()
    save(state, StorageWriter(store, step=1, threads=2))
    assert torch.equal(store.read("default@1")["7"], state["7"])
