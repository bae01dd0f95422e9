from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.base import parallel
from casckpt.loading import entry_reader as download
from casckpt.loading import planned_reads
from casckpt.plan import reads
from casckpt.storage.local import reader as localreader
from casckpt.storage.local import store as localstore
from casckpt.store.store import Store
from tests.support.reads import pages
from tests.support.saves import CELL, cells, counted, small_folder


@pytest.mark.parametrize(("cached", "page_cache", "threads"), [(True, False, 1), (False, False, 8), (False, True, 6)])
def test_a_rank_uses_more_threads_to_read_a_disk_than_to_read_memory(
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
    # some threads compute, and some keep reads in flight, to which the kernel adds its own; turns are used if there
    # are more threads than may compute
    assert used == [(threads, threads == 1)]


@pytest.mark.parametrize(("loose", "reads"), [(2, 1), (8, 9)])
def test_a_few_copied_cells_do_not_split_a_read_into_small_ones(
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


def test_small_tensors_that_equal_parts_of_a_large_one_do_not_join_its_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "_LONG_BYTES", 8 * CELL)
    monkeypatch.setattr(download, "_SCRATCH_BYTES", 3 * CELL)
    store = casckpt.open(tmp_path / "store")
    store.create(cell_bytes=CELL, blob_bytes=1 << 20)
    state = {"large": cells(100)}
    state |= {f"row{number}": row for number, row in enumerate(state["large"].view(100, -1)) if number}
    store.save(state, step=0)
    planned: list[planned_reads.Reads] = []

    def plan_lots(*given: Any, **options: Any) -> planned_reads.Reads:
        planned.append(planned_reads.plan_lots(*given, **options))
        return planned[-1]

    monkeypatch.setattr(download, "plan_lots", plan_lots)
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    store.load(into, "latest")
    assert all(torch.equal(into[key], state[key]) for key in state)
    assert max(batch.nbytes for one in planned for batch in one.every) <= 6 * CELL


@pytest.mark.parametrize(
    ("page_cache", "free", "stays"),
    [(True, 0, True), (False, 1 << 40, False), (None, 0, False), (None, 4 * (8 << 20), True)],
)
def test_a_load_fills_the_page_cache_only_within_the_available_memory(
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
