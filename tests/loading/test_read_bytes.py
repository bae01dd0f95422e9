"""A load reads the requested bytes once, and whole cells if it verifies them. The storage counts the bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import casckpt
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from casckpt.tensors.values import Shard
from tests.support.faulty import FaultyStore
from tests.support.reads import pages
from tests.support.repositories import memory
from tests.support.saves import CELL, cells, counted, same_state, small

PER = CELL // 4  # the number of float32 elements in a cell


def warmed(state: Any) -> Store:
    """Return a store that has already read its commit and manifest, so that it reads only tensors."""
    store = small()
    store.save(state, step=1)
    store.read("default@1", keys=[])
    return store


def bytes_read(store: Store, call: Callable[[], Any]) -> int:
    """Return the number of bytes read, except for the small records that locate the checkpoint.

    They are read each time.
    """
    with counted(store) as found:
        store.get("default@1")
    with counted(store) as io:
        call()
    return io.bytes_read - found.bytes_read


@pytest.mark.parametrize("verify", [True, False])
def test_reading_a_whole_checkpoint_reads_every_byte_once(verify: bool) -> None:
    state = {"w": cells(30.5), "x": torch.arange(10), "o": random.Random(1).randbytes(9000)}
    store = warmed(state)
    want = int(30.5 * CELL) + 80 + 9000
    assert bytes_read(store, lambda: store.read("default@1", verify=verify)) == want
    template = {"w": torch.zeros(int(30.5 * PER))}
    assert bytes_read(store, lambda: store.load(template, "default@1", verify=verify)) == 30.5 * CELL
    assert bytes_read(store, lambda: store.read("default@1", keys=["x"], verify=verify)) == 80
    assert bytes_read(store, lambda: store.load({}, "default@1", verify=verify)) == 0


@pytest.mark.parametrize("verify", [True, False])
def test_tied_and_constant_tensors_are_read_once(verify: bool) -> None:
    weight = cells(10)
    state = {
        "a": weight,
        "b": weight,
        "c": weight.view(-1, 8).t(),
        "z": torch.zeros(50 * PER),
        "y": torch.zeros(20 * PER),
    }
    store = warmed(state)
    template = {key: torch.ones_like(tensor) for key, tensor in state.items()}
    want = (10 + 10 + 1) * CELL  # in memory, c consists of different bytes
    assert bytes_read(store, lambda: store.load(template, "default@1", verify=verify)) == want
    assert same_state(template, {key: tensor.contiguous() for key, tensor in state.items()})
    assert bytes_read(store, lambda: store.read("default@1", verify=verify)) == want


@pytest.mark.parametrize(
    ("lo", "hi"),
    [(0, 1), (0, PER), (5, 5 * PER), (PER - 1, PER + 1), (3 * PER + 7, 9 * PER - 7), (20 * PER, 20 * PER + 1)],
)
def test_a_partial_read_is_extended_to_whole_cells_only_if_verified(lo: int, hi: int) -> None:
    weight = cells(20.5)
    store = warmed({"w": weight})

    def load(verify: bool) -> int:
        shard = Shard(torch.zeros(hi - lo), tuple(weight.shape), flat=(lo, hi))
        read = bytes_read(store, lambda: store.load({"w": shard}, "default@1", verify=verify))
        assert torch.equal(shard.data, weight[lo:hi])
        return read

    assert load(verify=False) == 4 * (hi - lo)
    touched = min(-(-hi // PER) * PER, weight.numel()) - lo // PER * PER
    assert load(verify=True) == 4 * touched


def test_the_ranks_together_read_each_cell_at_most_twice() -> None:
    weight = torch.randn(100, 333)
    store = warmed({"w": weight})
    for ranks in (2, 3, 7):
        total = 0
        for rank, part in enumerate(torch.arange(100).chunk(ranks)):
            lo, hi = int(part[0]), int(part[-1]) + 1
            shard = Shard(torch.zeros(hi - lo, 333), (100, 333), offset=(lo, 0))
            read = bytes_read(store, lambda s=shard: store.load({"w": s}, "default@1"))  # type: ignore[misc]  # a default binds the loop variable
            assert torch.equal(shard.data, weight[lo:hi])
            assert read <= (hi - lo) * 333 * 4 + 2 * CELL, rank
            total += read
        assert total <= weight.nbytes + (ranks - 1) * CELL


def test_a_column_of_wide_rows_is_read_cell_by_cell() -> None:
    weight = torch.randn(8, 50 * PER)
    store = warmed({"w": weight})
    shard = Shard(torch.zeros(8, 10), (8, 50 * PER), offset=(0, 7 * PER + 3))
    assert bytes_read(store, lambda: store.load({"w": shard}, "default@1", verify=False)) == 8 * 40
    assert torch.equal(shard.data, weight[:, 7 * PER + 3 : 7 * PER + 13])
    shard.data.zero_()
    assert bytes_read(store, lambda: store.load({"w": shard}, "default@1")) == 8 * CELL
    assert torch.equal(shard.data, weight[:, 7 * PER + 3 : 7 * PER + 13])


def test_a_new_process_reads_the_marker_and_the_manifest_once() -> None:
    faulty = FaultyStore(memory())
    store = small(faulty)
    store.save({"w": cells(3)}, step=1)
    faulty.calls.clear()
    again = Store(Repository(faulty))
    for _ in range(3):
        again.read("default@1")
    assert faulty.count("get", "casckpt.json") == 1
    assert faulty.count("get", "objects/*.manifest") == 1
    assert faulty.count("get", "commits/*") == 6  # its record, and a check for a further record
    assert faulty.count("list", "commits/") == 0


def test_a_blob_of_which_less_than_half_is_read_does_not_remain_in_the_page_cache(droppable: Store) -> None:
    store = casckpt.open(droppable.url, page_cache=True)
    part = Shard(torch.zeros(1 << 18, dtype=torch.int64), (1 << 20,), (1 << 18,))
    store.load({"w": part}, "default@0")
    assert torch.equal(part.data, torch.arange(1 << 18, 2 << 18))
    held, total = pages(store)
    assert held < 0.2 * total


@pytest.mark.parametrize("page_cache", [True, None])
def test_a_save_populates_the_page_cache_if_requested(page_cache: bool | None, droppable: Store) -> None:
    store = casckpt.open(droppable.url, page_cache=page_cache)
    store.save({"w": torch.arange(1 << 20) + 1}, step=1)
    held, total = pages(store)
    assert (held >= 0.4 * total) is bool(page_cache)
