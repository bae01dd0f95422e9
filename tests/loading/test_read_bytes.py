"""A load reads what it wants, rounded to cells where it is verified, and no byte twice: the storage counts."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import casckpt
from casckpt.base import parallel
from casckpt.loading import entry_reader as download
from casckpt.repository.repository import Repository
from casckpt.storage.local import reader as localreader
from casckpt.storage.local import store as localstore
from casckpt.storage.local.syscalls import Lacking, cached_pages
from casckpt.store.store import Store
from casckpt.tensors.values import Shard
from tests.support.faulty import FaultyStore
from tests.support.repositories import memory
from tests.support.saves import CELL, cells, counted, same_state, small, small_folder

PER = CELL // 4  # float32 of a cell


def warmed(state: Any) -> Store:
    """A store that knows its commit and its manifest already: what is read from now on are tensors."""
    store = small()
    store.save(state, step=1)
    store.read("default@1", keys=[])
    return store


def bytes_read(store: Store, call: Callable[[], Any]) -> int:
    """Without those of the small records by which the checkpoint is found, each time anew."""
    with counted(store) as found:
        store.get("default@1")
    with counted(store) as io:
        call()
    return io.bytes_read - found.bytes_read


@pytest.mark.parametrize("verify", [True, False])
def test_a_whole_read_reads_every_byte_once(verify: bool) -> None:
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
    want = (10 + 10 + 1) * CELL  # c is other bytes, as it lies in memory
    assert bytes_read(store, lambda: store.load(template, "default@1", verify=verify)) == want
    assert same_state(template, {key: tensor.contiguous() for key, tensor in state.items()})
    assert bytes_read(store, lambda: store.read("default@1", verify=verify)) == want


@pytest.mark.parametrize(
    ("lo", "hi"),
    [(0, 1), (0, PER), (5, 5 * PER), (PER - 1, PER + 1), (3 * PER + 7, 9 * PER - 7), (20 * PER, 20 * PER + 1)],
)
def test_a_part_is_rounded_to_cells_at_each_end_and_not_at_all_unverified(lo: int, hi: int) -> None:
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


def test_all_ranks_together_read_each_cell_at_most_twice() -> None:
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


def test_a_column_of_wide_rows() -> None:
    weight = torch.randn(8, 50 * PER)
    store = warmed({"w": weight})
    shard = Shard(torch.zeros(8, 10), (8, 50 * PER), offset=(0, 7 * PER + 3))
    assert bytes_read(store, lambda: store.load({"w": shard}, "default@1", verify=False)) == 8 * 40
    assert torch.equal(shard.data, weight[:, 7 * PER + 3 : 7 * PER + 13])
    shard.data.zero_()
    assert bytes_read(store, lambda: store.load({"w": shard}, "default@1")) == 8 * CELL
    assert torch.equal(shard.data, weight[:, 7 * PER + 3 : 7 * PER + 13])


def test_near_ranges_of_a_blob_are_one_request(tmp_path: Path) -> None:
    """In a folder 128 KiB of unwanted bytes cost less than another request."""
    state = {f"w{i}": cells(1) for i in range(14)}
    store = small_folder(tmp_path / "store")
    saved = store.save(state, step=1, threads=1)
    with counted(store) as around:
        store.read(saved, keys=[])
    with counted(store) as io:
        store.read(saved, keys=["w1", "w3", "w11"])
    # they lie in the order of their keys: w1, w10, w11, w12, w13, w2, w3
    assert io.bytes_read - around.bytes_read == 7 * CELL
    assert io.reads - around.reads == 1


def test_each_blob_is_opened_once() -> None:
    faulty = FaultyStore(memory())
    store = small(faulty)
    state = {"w": cells(100), "v": cells(60).view(64, -1).t()}
    store.save(state, step=1)
    store.read("default@1")
    opened = faulty.keys("open")
    assert len(opened) == len(set(opened)) > 8
    assert faulty.count("get", "objects/*.manifest") == 0  # it was saved by this process


def test_another_process_reads_marker_and_manifest_once() -> None:
    faulty = FaultyStore(memory())
    store = small(faulty)
    store.save({"w": cells(3)}, step=1)
    faulty.calls.clear()
    again = Store(Repository(faulty))
    for _ in range(3):
        again.read("default@1")
    assert faulty.count("get", "casckpt.json") == 1
    assert faulty.count("get", "objects/*.manifest") == 1
    assert faulty.count("get", "commits/*") == 6  # its record, and whether there is another one
    assert faulty.count("list", "commits/") == 0


@given(st.integers(1, 6 * PER), st.data())
def test_any_ranges_at_once(numel: int, data: st.DataObject) -> None:
    """Several shards of one tensor, which may overlap: every byte of the union is read once."""
    weight = torch.arange(numel, dtype=torch.int32)
    store = warmed({"w": weight})
    bounds = data.draw(
        st.lists(st.tuples(st.integers(0, numel), st.integers(0, numel)).map(sorted), min_size=1, max_size=4)
    )
    shards = [Shard(torch.full((hi - lo,), -1, dtype=torch.int32), (numel,), flat=(lo, hi)) for lo, hi in bounds]
    read = bytes_read(store, lambda: store.load({"w": shards}, "default@1", verify=False))
    assert read == 4 * len({i for lo, hi in bounds for i in range(lo, hi)})
    verified = bytes_read(store, lambda: store.load({"w": shards}, "default@1"))
    cells_ = {i // PER for lo, hi in bounds for i in range(lo, hi)}
    assert verified == sum(4 * (min(numel, (i + 1) * PER) - i * PER) for i in cells_)
    for (lo, hi), shard in zip(bounds, shards, strict=True):
        assert torch.equal(shard.data, weight[lo:hi])


@pytest.mark.parametrize(("cached", "page_cache", "threads"), [(True, False, 1), (False, False, 8), (False, True, 6)])
def test_a_rank_reads_memory_with_its_own_cores_and_a_disk_with_more(
    cached: bool, page_cache: bool, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = casckpt.open(tmp_path / "store", page_cache=page_cache)
    store.save({"w": torch.arange(1 << 20)}, step=0)
    monkeypatch.setattr(localreader, "is_cached", lambda *_: cached)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    used: list[tuple[int, bool]] = []

    def run_all(call: Any, tasks: Sequence[Any], threads: int) -> None:
        used.append((threads, isinstance(call.__self__.turns, nullcontext)))
        parallel.run_all(call, tasks, threads)

    monkeypatch.setattr(download, "run_all", run_all)
    target = torch.zeros(1 << 20, dtype=torch.int64)
    store.load({"w": target}, "default@0", threads=4)
    assert torch.equal(target, torch.arange(1 << 20))
    # some to compute, some to have reads in flight, of which the kernel has some of its own; turns where there are more
    # than may compute
    assert used == [(threads, threads == 1)]


@pytest.mark.parametrize(("loose", "reads"), [(2, 1), (8, 16)])
def test_a_few_cells_that_are_copied_make_no_small_reads(
    loose: int, reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_SCRATCH_BYTES", CELL)
    store = small_folder(tmp_path / "store")
    state = {"a": cells(loose / 2), "b": cells(16 - loose), "c": cells(loose / 2)}
    store.save(state, step=1)
    into = {key: torch.zeros(2 * len(state[key]))[::2] for key in ("a", "c")} | {"b": torch.zeros_like(state["b"])}
    with counted(store) as before:
        store.load({}, "default@1", unread="ignore")
    with counted(store) as io:
        store.load(into, "default@1")
    assert all(torch.equal(into[key], state[key]) for key in state)
    assert io.reads - before.reads == reads


def pages(store: Store, *, drop: bool = False) -> tuple[int, int]:
    """How many pages of the blobs the page cache holds, and how many there are; both of what is left of a drop."""
    held = total = 0
    for path in Path(store.url, "objects").rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 20:
            with path.open("rb") as file:
                if drop:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                held += cached_pages(file.fileno(), 0, path.stat().st_size)
                total += -(-path.stat().st_size // mmap.PAGESIZE)
    return held, total


@pytest.fixture
def droppable(tmp_path: Path) -> Store:
    """A store with a checkpoint of 8 MiB, none of it in the page cache."""
    store = casckpt.open(tmp_path / "store")
    store.save({"w": torch.arange(1 << 20)}, step=0)
    try:
        held, _ = pages(store, drop=True)
    except Lacking:
        pytest.skip("this kernel does not count cached pages")
    if held:
        pytest.skip("this file system keeps its files in memory")
    return store


@pytest.mark.parametrize(
    ("page_cache", "free", "stays"),
    [(True, 0, True), (False, 1 << 40, False), (None, 0, False), (None, 4 * (8 << 20), True)],
)
def test_a_load_leaves_in_memory_what_there_is_memory_for(
    page_cache: bool | None, free: int, stays: bool, droppable: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "headroom", lambda: free)
    monkeypatch.setattr(download, "_ALWAYS", 0)
    monkeypatch.setattr(localstore, "caches_well", lambda path: True)
    store = casckpt.open(droppable.url, page_cache=page_cache)
    target = torch.zeros(1 << 20, dtype=torch.int64)
    store.load({"w": target}, "default@0")
    assert torch.equal(target, torch.arange(1 << 20))
    held, total = pages(store)
    assert held >= 0.9 * total if stays else held < 0.5 * total


def test_of_a_blob_that_is_read_for_the_lesser_part_nothing_stays(droppable: Store) -> None:
    store = casckpt.open(droppable.url, page_cache=True)
    part = Shard(torch.zeros(1 << 18, dtype=torch.int64), (1 << 20,), (1 << 18,))
    store.load({"w": part}, "default@0")
    assert torch.equal(part.data, torch.arange(1 << 18, 2 << 18))
    held, total = pages(store)
    assert held < 0.2 * total


@pytest.mark.parametrize("page_cache", [True, None])
def test_a_save_leaves_in_memory_what_it_was_told_to(page_cache: bool | None, droppable: Store) -> None:
    store = casckpt.open(droppable.url, page_cache=page_cache)
    store.save({"w": torch.arange(1 << 20) + 1}, step=1)
    held, total = pages(store)
    assert (held >= 0.4 * total) is bool(page_cache)
