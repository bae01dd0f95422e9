"""What holds a store's bytes: runs and checkpoints, and what gc would free."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import casckpt
from casckpt.base.units import time_of
from casckpt.contents import manifests
from casckpt.errors import NotFound
from casckpt.history.commits import list_commits
from casckpt.history.following import newest_of_runs
from casckpt.plan.retention import Rotation
from casckpt.repository.repository import Repository
from casckpt.saving import reuse_offer
from casckpt.store.store import Store
from casckpt.upkeep.sizes import Forecast, Freed
from tests.support.repositories import Ticks, memory
from tests.support.saves import cells, small, small_folder, trained
from tests.support.small_disk import SmallDisk

# runs


def test_the_bytes_of_each_run_are_counted() -> None:
    store = small()
    base, own = cells(20), cells(9)
    first = store.save({"w": base}, run="base", step=0)
    store.save({"w": base, "a": own}, run="sft", step=1)
    own += 1
    store.save({"w": base, "a": own}, run="sft", step=2)
    store.forget("sft@1")
    found = store.report()
    assert [(run.run, run.checkpoints, run.forgotten, run.newest_step) for run in found.runs] == [
        ("sft", 1, 1, 2),
        ("base", 1, 0, 0),
    ]
    sft, of_base = found.runs
    assert of_base.bytes_used == first.stats.bytes_written == found.bytes_shared
    assert of_base.bytes_alone == 0
    assert sft.bytes_used == sft.bytes_alone + found.bytes_shared == found.bytes_blobs
    assert sft.bytes_logical == base.nbytes + own.nbytes
    assert (found.bytes_unneeded, list(found.unreadable)) == (0, [])


def test_unused_bytes_are_reported_until_gc_deletes_them(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    store.save({"w": cells(9)}, step=0)
    store.save({"w": cells(9) + 1}, step=1)
    before = store.report()
    old = store.checkpoints()[0].stats.bytes_written
    store.forget("default@0")
    forgotten, stats = store.report(), store.stats()
    assert forgotten.bytes_unneeded == 0  # it can be restored
    assert forgotten.freed == Freed(0, old)
    assert (stats.bytes_freed_now, stats.bytes_freed_later) == (0, forgotten.freed.later)
    store.repository.change_settings(min_age_seconds=0.0)
    assert store.report().freed == Freed(forgotten.freed.later, 0)
    assert store.gc().deleted_bytes == forgotten.freed.later > 0
    after = store.report()
    assert (after.bytes_unneeded, after.freed) == (0, Freed(0, 0))
    assert after.bytes_blobs == after.runs[0].bytes_used < before.bytes_blobs


def test_a_damaged_manifest_affects_only_its_own_run(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    bad = store.save({"w": cells(9)}, run="bad", step=0)
    store.save({"w": torch.ones(5)}, run="good", step=0)
    (manifest,) = (tmp_path / "store").glob(f"objects/*/{bad.id}.manifest")
    manifest.unlink()
    fresh = casckpt.open(tmp_path / "store", cache_dir=tmp_path / "cache")
    found = fresh.report()
    assert list(found.unreadable) == [bad.id]
    assert {run.run: run.bytes_used > 0 for run in found.runs} == {"good": True, "bad": False}
    assert found.bytes_unneeded > 0


def test_stats_are_zero_for_an_empty_store_and_an_error_for_a_missing_one(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    assert list(store.report().runs) == []
    with pytest.raises(NotFound, match="there is no store"):
        casckpt.open(tmp_path / "none").report()


# checkpoints


def state(step: int) -> dict[str, Any]:
    return {"model": {"base": cells(300, 0), "head": cells(20, step)}, "optim": {"m": cells(600, step + 100)}}


def filled(store: Store, count: int = 4) -> Store:
    for step in range(count):
        store.save(state(step), run="r", step=step, metrics={"loss": abs(step - 1)})
    return store


def freed(store: Store, **rules: Any) -> int:
    """Run gc with these rules. Return the number of bytes that it frees."""
    return store.gc(min_age="0s", **rules).deleted_bytes


def test_a_thinned_checkpoint_counts_its_remaining_bytes() -> None:
    store = filled(small())
    whole = store.stats().bytes_logical
    dropped = store.thin("r@1", drop="optim.*").nbytes
    assert store.stats().bytes_logical == store.report().runs[0].bytes_logical == whole - dropped
    assert freed(store) >= 0.95 * dropped


@pytest.mark.sweep
@pytest.mark.parametrize("compress", ["off", "auto"])
def test_bytes_freed_by_thinning_include_frames(compress: Any) -> None:
    store = small()
    for step in range(6):
        held = {"model": {"w": trained(400, step, 1)}, "optim": {"m": trained(700, step, 2)}}
        store.save(held, step=step, compress=compress)
    told = store.thin(drop="optim.*", keep_last=1).freed_bytes
    assert freed(store) == told > 0
    thin, whole = store.checkpoints()[-2:]
    assert thin.stats.bytes_coded == (0 if compress == "off" else trained(400, 0).nbytes) < whole.stats.bytes_coded + 1


def test_bases_are_freed_with_the_cells_encoded_against_them() -> None:
    store = small()
    for step in range(4):
        held = {"model": {"w": trained(80, step, 1)}, "optim": {"m": trained(140, step, 2)}}
        store.save(held, step=step, compress="auto")
    store.save({"model": {"w": trained(80, 4, 1)}, "optim": {"m": trained(140, 0, 3)}}, step=4)
    store.forget("default@0")
    store.gc(min_age=0)
    told = store.thin(drop="optim.*", keep_last=1)
    assert freed(store) == told.freed_bytes > trained(140, 0).nbytes


class Lives(RuleBasedStateMachine):
    """Saves, tags, forgets and thins checkpoints. The reported bytes must add up and match the lists of blobs."""

    def __init__(self) -> None:
        super().__init__()
        self.store = small()
        self.step = 0

    @rule(
        run=st.sampled_from("ab"), base=st.integers(0, 2), change=st.integers(0, 2),
        compress=st.sampled_from(["off", "always"]), reuses=st.booleans(),
    )  # fmt: skip
    def save(self, run: str, base: int, change: int, compress: Any, reuses: bool) -> None:
        self.step += 1
        held = {"model": {"w": cells(300, base), "b": cells(2, change)}, "optim": {"m": trained(600, change, base)}}
        others = patch.object(reuse_offer, "newest_of_runs", newest_of_runs if reuses else Mock(return_value=[]))
        with others:  # without them, two blobs may have the same bytes, as after simultaneous saves
            self.store.save(held, run=run, step=self.step, compress=compress)

    @precondition(lambda self: self.store.checkpoints())
    @rule(data=st.data(), how=st.sampled_from(["forget", "tag", "lease", "thin"]))
    def change(self, data: st.DataObject, how: str) -> None:
        one = data.draw(st.sampled_from(self.store.checkpoints()))
        if how == "forget":
            self.store.forget(one, tagged=True)
        elif how == "thin":
            if not one.tags:
                self.store.thin(one, drop="optim.*")
        else:
            self.store.tag(f"{how}{self.step}", one, expires="1h" if how == "lease" else None)

    @rule()
    def gc(self) -> None:
        self.store.gc(min_age=0)

    @invariant()
    def adds_up(self) -> None:
        repo, report = self.store.repository, self.store.report()
        live = list_commits(repo).placed()
        named = {one.places.txid: {blob[:2]: blob[2] for blob in manifests.blobs_of(repo, one)} for one in live}
        total = sum({blob: size for blobs in named.values() for blob, size in blobs.items()}.values())
        assert sum(one.bytes_alone for one in report.runs) + report.bytes_shared == total
        assert total + report.bytes_unneeded == report.bytes_blobs == self.store.stats().bytes_blobs


TestLives = pytest.mark.sweep(Lives.TestCase)


TestLives.settings = settings(max_examples=max(6, settings().max_examples // 100), stateful_step_count=8)


# when the disk is full

DAY, START_AT = 86400.0, 1_700_000_000_000_000
MIB = 1 << 20


def growing(every: float, saves: int, *, keep: int | None = None) -> tuple[Store, SmallDisk, Ticks]:
    """Return a store with so many saves of a new MiB, ``every`` seconds, of which the last ``keep`` remain."""
    clock, disk = Ticks(START_AT, step=0), SmallDisk(memory(near=False), 1000 * MIB)
    store = Store(Repository(disk, clock=clock))
    for step in range(saves):
        store.save({"w": cells(256)}, run="sft", step=step)
        if keep is not None:
            store.rotate("sft", Rotation(max_checkpoints=keep))
            store.gc(wait=0)
        clock.advance(every)
    return store, disk, clock


def test_the_disk_is_full_once_the_growth_so_far_has_used_what_is_free() -> None:
    store, disk, clock = growing(DAY / 4, 9)
    found = store.sizes().forecast()
    assert found.bytes_per_day == pytest.approx(4 * MIB, rel=0.01)
    assert found.bytes_free == disk.bytes_free()
    assert found.full_at is not None
    days = (found.full_at - time_of(clock())) / timedelta(days=1)
    assert days == pytest.approx(found.bytes_free / found.bytes_per_day, rel=0.01)
    assert store.sizes().forecast("other").full_at is None
    assert store.sizes().forecast("sft") == found


def test_what_rules_remove_does_not_count_as_growth() -> None:
    store, _, _ = growing(DAY / 40, 40, keep=2)
    assert store.sizes().forecast().bytes_per_day < 3 * MIB  # and not 40 MiB


def test_runs_that_ended_do_not_grow() -> None:
    store, _, clock = growing(DAY / 4, 3)
    clock.advance(9 * DAY)
    assert store.sizes().forecast() == Forecast(0, store.sizes().forecast().bytes_free, None)


def test_a_run_with_one_save_and_a_storage_without_room_have_no_forecast() -> None:
    assert growing(DAY, 1)[0].sizes().forecast().full_at is None
    store = small()
    for step in (1, 2):
        store.save({"w": cells(2)}, step=step)
    found = store.sizes().forecast()
    assert (found.bytes_free, found.full_at) == (None, None)
