"""The bytes that are used by one run, by several runs, or by none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.errors import NotFound
from casckpt.upkeep.usage import Freed, usage
from tests.support.saves import cells, small, small_folder


def test_the_bytes_of_each_run_are_counted() -> None:
    store = small()
    base, own = cells(20), cells(9)
    first = store.save({"w": base}, run="base", step=0)
    store.save({"w": base, "a": own}, run="sft", step=1)
    own += 1
    store.save({"w": base, "a": own}, run="sft", step=2)
    store.forget("sft@1")
    found = usage(store.repository)
    assert [(run.run, run.checkpoints, run.forgotten, run.newest_step) for run in found.runs] == [
        ("sft", 1, 1, 2),
        ("base", 1, 0, 0),
    ]
    sft, of_base = found.runs
    assert of_base.bytes_used == of_base.bytes_newest == first.stats.bytes_written == found.bytes_shared
    assert of_base.bytes_alone == 0
    assert sft.bytes_used == sft.bytes_alone + found.bytes_shared == found.bytes_blobs
    assert sft.bytes_newest < sft.bytes_used
    assert sft.bytes_logical == base.nbytes + own.nbytes
    assert (found.bytes_unneeded, list(found.unreadable)) == (0, [])


def test_unused_bytes_are_reported_until_gc_deletes_them(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    store.save({"w": cells(9)}, step=0)
    store.save({"w": cells(9) + 1}, step=1)
    before = usage(store.repository)
    store.forget("default@0")
    forgotten, stats = usage(store.repository), store.stats()
    assert forgotten.bytes_unneeded == 0  # it can be restored
    assert forgotten.freed == Freed(0, forgotten.runs[0].bytes_used - forgotten.runs[0].bytes_newest)
    assert (stats.bytes_freed_now, stats.bytes_freed_later) == (0, forgotten.freed.later)
    store.repository.change_settings(min_age_seconds=0.0)
    assert usage(store.repository).freed == Freed(forgotten.freed.later, 0)
    assert store.gc().deleted_bytes == forgotten.freed.later > 0
    after = usage(store.repository)
    assert (after.bytes_unneeded, after.freed) == (0, Freed(0, 0))
    assert after.bytes_blobs == after.runs[0].bytes_used < before.bytes_blobs


def test_a_damaged_manifest_affects_only_its_own_run(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    bad = store.save({"w": cells(9)}, run="bad", step=0)
    store.save({"w": torch.ones(5)}, run="good", step=0)
    (manifest,) = (tmp_path / "store").glob(f"objects/*/{bad.id}.manifest")
    manifest.unlink()
    fresh = casckpt.open(tmp_path / "store", cache_dir=tmp_path / "cache")
    found = usage(fresh.repository)
    assert list(found.unreadable) == [bad.id]
    assert {run.run: run.bytes_used > 0 for run in found.runs} == {"good": True, "bad": False}
    assert found.bytes_unneeded > 0


def test_stats_are_zero_for_an_empty_store_and_an_error_for_a_missing_one(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    assert list(usage(store.repository).runs) == []
    with pytest.raises(NotFound, match="there is no store"):
        usage(casckpt.open(tmp_path / "none").repository)
