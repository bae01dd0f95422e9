"""The mirror: saves never wait for it, no crash loses data, and gc waits for it."""

from __future__ import annotations

import gc as collector
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import casckpt
from casckpt.cli.commands import status
from casckpt.cli.describe import plain
from casckpt.errors import Damaged, InvalidInput, StorageError
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.keys import commit_key
from casckpt.frontends.trainer import Checkpointer
from casckpt.plan.retention import Policy
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from casckpt.upkeep.copies.mirror import Mirror
from casckpt.upkeep.gc.gc import execute, plan_gc
from tests.support.far import far
from tests.support.faulty import FaultyStore, fail_before
from tests.support.ranks import Pool, tell, wait_for
from tests.support.repositories import memory
from tests.support.rewrites import move
from tests.support.saves import CELL, blob_keys, cells, flip, same_state, small_folder, steps
from tests.support.small_disk import SmallDisk
from tests.support.together import cut, emptied, line


@pytest.fixture
def away(tmp_path: Path) -> Path:
    return tmp_path / "away"


@pytest.fixture
def link(away: Path) -> FaultyStore:
    """The connection to the mirror, which may fail."""
    return FaultyStore(LocalStore(away))


@pytest.fixture
def store(store_path: Path, link: FaultyStore) -> Store:
    small_folder(store_path)
    return casckpt.open(store_path, mirror=Store(Repository(link)))


def break_link(link: FaultyStore) -> None:
    link.inject(*(fail_before(method, times=1 << 30) for method in ("put", "get", "list", "size", "open")))


def save(store: Store, *numbers: int) -> None:
    for step in numbers:
        store.save({"w": cells(3, seed=step), "shared": cells(5, seed=0)}, run="sft", step=step)


def reasons(store: Store, keep_last: int | None = None) -> list[tuple[int | None, str]]:
    return [(one.step, one.reason) for one in store.gc(keep_last=keep_last, wait=0, min_age=0).waiting]


def test_commits_are_copied_to_the_mirror_in_the_background(store: Store, away: Path) -> None:
    save(store, 1, 2)
    store.wait_for_mirror()
    mirror = casckpt.open(away)
    assert steps(mirror) == [("sft", 1), ("sft", 2)]
    assert mirror.repository.marker.cell_bytes == store.repository.marker.cell_bytes
    assert same_state(mirror.read("sft@2"), store.read("sft@2"))
    assert not mirror.verify().is_damaged
    assert (store.mirror_lag().checkpoints, store.mirror_lag().bytes, store.mirror_lag().seconds) == (0, 0, 0.0)
    assert (store.status().mirror, unmirrored(store)) == (str(away), 0)


def test_while_the_mirror_is_unreachable_saves_work_and_gc_forgets_nothing(
    store: Store, link: FaultyStore, away: Path, store_path: Path
) -> None:
    break_link(link)
    save(store, 1, 2, 3)
    lag = store.mirror_lag()
    assert (lag.checkpoints, lag.seconds > 0, lag.bytes > 0) == (3, True, True)
    with pytest.raises(StorageError, match="fail"):
        store.wait_for_mirror()
    assert store.mirror_lag().error
    store.forget("sft@1")
    for other in (store, casckpt.open(store_path)):  # a gc run by cron knows about the mirror only from the settings
        assert reasons(other, keep_last=1) == [(1, "unmirrored"), (2, "unmirrored")]
        assert steps(other) == [("sft", 2), ("sft", 3)]
    assert "lacks 3 checkpoints" in _cli("status", store_path)
    assert "not yet safe in the mirror" in _cli("gc", store_path, "--keep-last", "1")
    link.heal()
    store.wait_for_mirror()
    assert reasons(casckpt.open(store_path), keep_last=1) == []
    assert steps(store) == [("sft", 3)]
    assert steps(casckpt.open(away)) == [("sft", 2), ("sft", 3)]  # checkpoints forgotten here are forgotten there


def test_a_full_mirror_catches_up_once_it_has_room_and_nothing_is_lost_until_then(store_path: Path) -> None:
    small_folder(store_path)
    disk = SmallDisk(memory(near=False), 20 * CELL)  # half a checkpoint
    store, away = casckpt.open(store_path, mirror=Store(Repository(disk))), Store(Repository(disk))
    with Checkpointer(store, run="sft", max_checkpoints=1, gc=True) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": cells(32, seed=step)})
            with pytest.raises(StorageError, match="the disk is full") as raised:
                store.wait_for_mirror()
            assert raised.value.full
    assert steps(store) == [("sft", 1), ("sft", 2), ("sft", 3)]
    assert store.mirror_lag().checkpoints == 3
    assert reasons(store, keep_last=1) == [(1, "unmirrored"), (2, "unmirrored")]
    disk.bytes = 999 * CELL
    store.wait_for_mirror()
    assert steps(away) == [("sft", 1), ("sft", 2), ("sft", 3)]
    with Checkpointer(store, run="sft", max_checkpoints=1, gc=True) as checkpointer:
        checkpointer.resume({"w": cells(32)})
        checkpointer.save(4, {"w": cells(32)})
    assert steps(store) == [("sft", 4)]
    store.wait_for_mirror()
    assert steps(away) == [("sft", 1), ("sft", 2), ("sft", 3), ("sft", 4)]
    assert not away.verify().is_damaged
    assert away.gc(wait=0, min_age=0).deleted_bytes == 0


def test_a_full_mirror_can_be_freed_while_the_training_runs(store: Store, link: FaultyStore, away: Path) -> None:
    """gc does not wait for the copy that found no room. The copy has removed what it wrote, and is repeated."""
    save(store, 1, 2)
    store.wait_for_mirror()
    full = StorageError("the disk is full", full=True)
    link.inject(fail_before("put", key="objects/*.manifest", times=1 << 30, error=full))
    store.save({"w": cells(32)}, run="sft", step=3)
    with pytest.raises(StorageError, match="the disk is full"):
        store.wait_for_mirror()
    link.inject(fail_before("put", key="transactions/*", times=1 << 30, error=full))  # the copy is not repeated yet
    for thread in threading.enumerate():
        if thread.name == "casckpt-clean-up":
            thread.join()
    assert list(away.glob("objects/*-3/*")) == []
    found = casckpt.open(away).gc(keep_last=1, min_age=0, wait=0)
    assert (len(found.purged), found.deleted_manifests, found.waiting) == (1, 1, ())
    link.heal()
    store.wait_for_mirror()
    assert steps(casckpt.open(away)) == [("sft", 2), ("sft", 3)]


def unmirrored(store: Store) -> int:
    return len(store.status().unmirrored)


def say_status(store: Store, capsys: pytest.CaptureFixture[str]) -> str:
    status.text(plain(store.status()) | {"exceeded": []})
    return capsys.readouterr().out


def _cli(*args: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "casckpt", *map(str, args)], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_pending_copies_resume_when_the_store_is_reopened(
    store: Store, link: FaultyStore, store_path: Path, away: Path
) -> None:
    break_link(link)
    save(store, 1)
    del store
    collector.collect()
    again = casckpt.open(store_path, mirror=away)
    mirror = again._mirror
    assert mirror is not None
    state = mirror._state.get()
    with state.changed:
        assert state.changed.wait_for(lambda: state.done > 0, 60)
    assert steps(casckpt.open(away)) == [("sft", 1)]


def test_references_to_overwritten_steps_resolve_to_the_same_id_in_the_mirror(
    store: Store, link: FaultyStore, away: Path
) -> None:
    save(store, 1)
    store.wait_for_mirror()
    break_link(link)
    store.save({"w": torch.zeros(3)}, run="sft", step=1, overwrite=True)
    store.save({"w": torch.ones(3)}, run="sft", step=1, overwrite=True)
    link.heal()
    store.wait_for_mirror()
    mirror = casckpt.open(away)
    assert mirror.get("sft@1").id == store.get("sft@1").id
    assert len(mirror.checkpoints(forgotten=True)) == 3
    assert same_state(mirror.read("sft@latest"), {"w": torch.ones(3)})


def test_a_rewritten_checkpoint_is_safe_once_its_rewrite_is_in_the_mirror(store_path: Path, away: Path) -> None:
    """The original commit can never be copied, because its blob is gone. gc does not wait for it, and reports omit
    it."""
    store = small_folder(store_path)
    state = {"a": cells(20, seed=1)}
    ckpt = store.save(state, step=2)
    before = blob_keys(store)
    move(store.repository, ckpt.commit)
    for key in before:
        flip(store, key, DATA_OFFSET + 5)
    store = Store(Repository(LocalStore(store_path)), Repository(LocalStore(away)))
    store.wait_for_mirror()
    assert store.mirror_lag().checkpoints == 0
    assert [one.txid for one in store.gc(min_age=0).purged] == [ckpt.commit.txid]
    assert same_state(casckpt.open(away).read(ckpt.id), state)


def test_a_damaged_checkpoint_is_named_and_does_not_block_others(store: Store, link: FaultyStore, away: Path) -> None:
    break_link(link)
    save(store, 1, 2)
    (blob,) = (key for key in blob_keys(store) if store.get("sft@2").commit.txid in key)
    flip(store, blob, 5000)
    save(store, 3)
    link.heal()
    with pytest.raises(Damaged, match="sft@2") as raised:
        store.wait_for_mirror()
    assert raised.value.keys == ("w",)
    assert steps(casckpt.open(away)) == [("sft", 1), ("sft", 3)]
    assert store.mirror_lag().checkpoints == 1


def test_gc_waits_until_a_new_mirror_has_received_everything(store: Store, store_path: Path, away: Path) -> None:
    save(store, 1, 2)
    store.wait_for_mirror()
    other = away.with_name("other")
    again = casckpt.open(store_path, mirror=other)
    save(again, 3)
    again.wait_for_mirror()
    assert steps(casckpt.open(other)) == [("sft", 1), ("sft", 2), ("sft", 3)]
    assert steps(casckpt.open(away)) == [("sft", 1), ("sft", 2)]
    assert reasons(again, keep_last=1) == []
    again.repository.change_settings(mirror=str(away))
    assert reasons(again) == []
    assert unmirrored(casckpt.open(store_path)) == 1


def test_the_mirror_setting_can_be_removed(store: Store, link: FaultyStore, store_path: Path) -> None:
    break_link(link)
    save(store, 1, 2)
    plain = casckpt.open(store_path)
    plain.repository.change_settings(mirror=None)
    assert reasons(plain, keep_last=1) == []
    assert steps(plain) == [("sft", 2)]


def test_a_manual_copy_into_the_mirror_counts_as_mirrored(
    store: Store, link: FaultyStore, store_path: Path, away: Path
) -> None:
    break_link(link)
    save(store, 1, 2)
    plain = casckpt.open(store_path)
    plain.copy_to(away, "sft@1")
    assert unmirrored(plain) == 1
    plain.copy_to(away)
    plain.copy_to(away.with_name("elsewhere"))
    assert unmirrored(plain) == 0


def test_a_checkpoint_that_was_copied_back_is_copied_to_the_mirror_under_its_new_transaction(
    store_path: Path, away: Path
) -> None:
    """gc asks only for the transactions of its own copies."""
    store = small_folder(store_path)
    store.change_settings(mirror=away)
    save(store, 1, 2)
    assert len(store.copy_to(away).copied) == 2
    store.gc(keep_last=1, min_age=0, wait=0)
    assert len(casckpt.open(away).copy_to(store, "sft@1").copied) == 1
    assert reasons(store, keep_last=1) == [(1, "unmirrored")]
    again = store.copy_to(away)
    assert ([one.step for one in again.copied], again.blobs) == ([1], 0)
    assert reasons(store, keep_last=1) == []


def test_a_checkpoint_that_the_mirror_purged_by_its_own_rule_is_not_copied_again(store: Store, away: Path) -> None:
    save(store, 1, 2)
    store.wait_for_mirror()
    mirror = casckpt.open(away)
    mirror.gc(keep_last=1, min_age=0)
    store.wait_for_mirror()
    assert (steps(mirror), store.mirror_lag().checkpoints) == ([("sft", 2)], 0)
    store.restore(*store.forget("sft@1"))
    store.wait_for_mirror()
    assert (steps(mirror), store.mirror_lag().checkpoints) == ([("sft", 1), ("sft", 2)], 0), "it was restored here"


def test_a_checkpoint_that_was_restored_is_not_safe_once_the_mirror_has_purged_it(
    store: Store, link: FaultyStore, store_path: Path, away: Path
) -> None:
    """It was forgotten, copied, restored, purged in the mirror, and forgotten again.

    Regression: gc once deleted such a checkpoint in both stores.
    """
    cron = casckpt.open(
        store_path
    )  # without the mirror's thread, which could copy the checkpoint before it is forgotten
    save(cron, 1, 2)
    (old,) = cron.forget("sft@1")
    store.wait_for_mirror()
    break_link(link)  # otherwise a late pass would restore it in the mirror
    store.restore(old)
    mirror = casckpt.open(away)
    assert [one.step for one in mirror.gc(min_age=0, wait=0).purged] == [1]
    store.forget(old)
    assert (reasons(cron), unmirrored(cron)) == ([(1, "unmirrored")], 1)
    assert {one.step for one in store.checkpoints(forgotten=True)} == {1, 2}
    link.heal()
    store.wait_for_mirror()
    assert [one.step for one in cron.gc(min_age=0, wait=0).purged] == [1]
    assert [one.step for one in mirror.checkpoints(forgotten=True) if one.forgotten] == [1]
    assert same_state(mirror.read(mirror.restore(old.id)), {"w": cells(3, seed=1), "shared": cells(5, seed=0)})


def test_a_restored_checkpoint_becomes_visible_in_the_mirror(
    store: Store, store_path: Path, link: FaultyStore, away: Path
) -> None:
    cron = casckpt.open(
        store_path
    )  # without the mirror's thread, which could copy the checkpoint before it is forgotten
    save(cron, 1)
    (old,) = cron.forget("sft@1")
    store.wait_for_mirror()
    mirror = casckpt.open(away)
    assert steps(mirror) == []
    break_link(link)  # otherwise a late pass would restore it first
    store.restore(old)
    assert store.mirror_lag().checkpoints == 1
    link.heal()
    store.wait_for_mirror()
    assert steps(mirror) == [("sft", 1)]
    assert store.mirror_lag().checkpoints == 0


def test_signatures_are_mirrored_before_the_commit(store: Store, link: FaultyStore, away: Path) -> None:
    break_link(link)
    save(store, 1)
    first, second = (f"signatures/{store.get('sft@1').id}/{digit * 64}" for digit in "ab")
    store.repository.storage.put(first, b"signed")
    link.heal()
    store.wait_for_mirror()
    assert (away / first).read_bytes() == b"signed"
    puts = link.keys("put")
    assert puts.index(first) < min(at for at, key in enumerate(puts) if key.startswith("commits/"))
    store.repository.storage.put(second, b"later")
    save(store, 2)
    store.wait_for_mirror()
    assert (away / second).read_bytes() == b"later"


@pytest.mark.parametrize("gone", ["store", "mirror"])
def test_a_deleted_store_or_mirror_is_recreated(gone: str, store: Store, store_path: Path, away: Path) -> None:
    """Otherwise no process could open the new mirror, and a gc from cron would not know that the new store has one."""
    save(store, 1)
    store.wait_for_mirror()
    shutil.rmtree(store_path if gone == "store" else away)
    save(store, 2)
    store.wait_for_mirror()
    mirror = casckpt.open(away)
    assert steps(mirror) == [("sft", 1), ("sft", 2)]
    assert not mirror.verify().is_damaged
    assert casckpt.open(store_path).status().mirror == str(away)


def test_checkpoints_in_a_deleted_mirror_are_unsafe_until_they_are_recopied(
    store: Store, link: FaultyStore, away: Path
) -> None:
    """Otherwise, gc would delete the only copy of checkpoints that were in the mirror."""
    save(store, 1, 2)
    store.wait_for_mirror()
    shutil.rmtree(away)
    link.inject(fail_before("put", key="transactions/*", times=1 << 30))
    save(store, 3)
    with pytest.raises(StorageError):
        store.wait_for_mirror()
    assert (away / "casckpt.json").exists()
    assert reasons(store, keep_last=1) == [(1, "unmirrored"), (2, "unmirrored")]
    link.heal()
    store.wait_for_mirror()
    assert steps(casckpt.open(away)) == [("sft", 1), ("sft", 2), ("sft", 3)]
    assert reasons(store, keep_last=1) == []


@pytest.mark.parametrize("saved", [True, False])
def test_a_store_recreated_by_a_different_process_names_its_mirror(
    saved: bool, store: Store, store_path: Path, away: Path
) -> None:
    save(store, 1)
    shutil.rmtree(store_path)
    small_folder(store_path)
    if saved:
        save(casckpt.open(store_path), 5)
    save(store, 2)
    other = casckpt.open(store_path)
    assert other.status().mirror == str(away)
    assert other.repository.marker == store.repository.marker
    assert other.repository.catalogue.path == store.repository.catalogue.path


def test_a_store_without_a_mirror_reports_it(store_path: Path, store: Store) -> None:
    plain = casckpt.open(store_path)
    for call in (plain.mirror_lag, plain.wait_for_mirror):
        with pytest.raises(InvalidInput, match="without a mirror"):
            call()
    for place in (store_path, store_path / "mirror"):
        with pytest.raises(InvalidInput, match="inside the store's own folder"):
            casckpt.open(store_path, mirror=place)
        with pytest.raises(InvalidInput, match="inside the store's own folder"):
            plain.change_settings(mirror=place)
    assert casckpt.open(store_path.with_name("new"), mirror=store_path).mirror_lag().checkpoints == 0


def test_waiting_for_a_mirror_times_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    attempt = Mirror._attempt

    def slow(self: Mirror, state: Any) -> Any:
        may_end.wait(60)
        return attempt(self, state)

    monkeypatch.setattr(Mirror, "_attempt", slow)
    save(store, 1)
    with pytest.raises(StorageError, match="not up to date after"):
        store.wait_for_mirror(timeout=0.01)
    may_end.set()
    store.wait_for_mirror()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_mirror_thread_ends_all_waits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = []

    def fail(*_: object) -> None:
        failed.append(threading.current_thread())
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_attempt", fail)
        with pytest.raises(StorageError, match="mirror thread failed"):
            store.wait_for_mirror()
    for thread in failed:
        thread.join()
    store.wait_for_mirror()


def test_a_pickled_store_keeps_its_mirror(store_path: Path, away: Path) -> None:
    store = casckpt.open(store_path, mirror=away)
    again: Store = pickle.loads(pickle.dumps(store))
    save(again, 1)
    again.wait_for_mirror()
    assert steps(casckpt.open(away)) == [("sft", 1)]


PROGRAM = """
import os, sys, torch, casckpt
import casckpt.saving.save, casckpt.upkeep.copies.mirror
folder, away, end, *runs = sys.argv[1:]
for run in runs:
    if not os.fork():
        break
else:
    os._exit(any([os.waitstatus_to_exitcode(os.wait()[1]) != (9 if end == "kill" else 0) for _ in runs]))
store = casckpt.open(folder, mirror=away)
for step in range(3):
    store.save({"w": torch.full((4000,), float(step))}, run=run, step=step)
if end == "wait":
    store.wait_for_mirror()
elif end == "kill":
    os._exit(9)
"""


@pytest.mark.parametrize("end", ["exit", *(pytest.param(end, marks=pytest.mark.soak) for end in ("kill", "wait"))])
def test_copies_finish_even_if_programs_exit_immediately(store_path: Path, away: Path, end: str) -> None:
    """Two programs are killed, exit without waiting, or exit normally.

    They are forks of one interpreter, because the import of torch is slow, and end as an interpreter does.
    """
    command: list[str | Path] = [sys.executable, "-c", PROGRAM, store_path, away, end, "a", "b"]
    done = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    plain = casckpt.open(store_path)
    assert len(plain.checkpoints()) == 6
    if end == "wait":
        assert unmirrored(plain) == 0
    casckpt.open(store_path, mirror=away).wait_for_mirror()
    mirror = casckpt.open(away)
    assert steps(mirror) == steps(plain)
    assert not mirror.verify().is_damaged
    assert unmirrored(plain) == 0


def save_and_load(rank: int, size: int, folder: Path, away: Path, host: Path) -> tuple[bool, int, int]:
    """Run a rank of a job whose store has a mirror, then of a job on a different host that has only the mirror."""
    full = cells(20, seed=5).reshape(4, -1)
    part = {"w": cut(full, line(size), [Shard(0)])}
    store = casckpt.open(folder, mirror=away)
    store.save(part, run="job", step=1)
    if rank == 0:
        store.wait_for_mirror()
        tell("mirrored")
    wait_for("mirrored")
    far = casckpt.open(away, cache_dir=host)
    into = emptied(part)
    fetched = far.pre_download("job@1", into)
    far.load(into, "job@1")
    return torch.equal(into["w"].to_local(), part["w"].to_local()), fetched, far.get("job@1").stats.bytes_written


def test_ranks_may_use_a_mirror_and_a_host_cache(ranks: Pool, store_path: Path, away: Path) -> None:
    found = ranks.run(2, save_and_load, store_path, away, away.with_name("host"))
    assert [same for same, _, _ in found] == [True, True]
    assert sum(fetched for _, fetched, _ in found) == found[0][2]  # each blob was fetched once per host


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("how", ["deleted", "moved", "a folder without a store"])
def test_gc_keeps_everything_if_the_mirror_is_missing(
    how: str, is_open: bool, store_path: Path, away: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The mirror may have lost the checkpoints that gc would purge. Its folder may be deleted, or its disk not
    mounted."""
    small_folder(store_path)
    store = casckpt.open(store_path, mirror=away)
    save(store, 1, 2, 3)
    store.wait_for_mirror()
    store.forget("sft@1")
    if how == "moved":
        away.rename(away.with_name("elsewhere"))
    else:
        shutil.rmtree(away)
    if how == "a folder without a store":
        away.mkdir()
    cron = store if is_open else casckpt.open(store_path)
    assert [one.reason for one in cron.gc(keep_last=1, min_age=0, dry_run=True).waiting] == ["unmirrored"] * 2
    caplog.clear()
    assert reasons(cron, keep_last=1) == [(1, "unmirrored"), (2, "unmirrored")]
    assert f"no store at the mirror {away}" in caplog.text
    assert steps(cron) == [("sft", 2), ("sft", 3)]
    assert f"no store at the mirror {away}" in cron.status().mirror_problem
    assert unmirrored(cron) == 3
    assert cron.stats().bytes_freed_now == 0
    if how == "moved":
        away.with_name("elsewhere").rename(away)
        assert [one.step for one in cron.gc(keep_last=1, min_age=0, wait=0).purged] == [1, 2]
        assert (cron.status().mirror_problem, unmirrored(cron)) == ("", 0)


def test_the_status_reports_a_missing_mirror(store: Store, away: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(store, 1, 2)
    store.wait_for_mirror()
    shutil.rmtree(away)
    shown = say_status(store, capsys)
    assert f"{away}, there is no store at the mirror {away}, lacks 2 checkpoints since " in shown


def test_gc_keeps_everything_if_it_cannot_ask_the_mirror(
    store_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    link = far()
    small_folder(store_path)
    store = casckpt.open(store_path, mirror=Store(Repository(link)))
    save(store, 1, 2)
    store.wait_for_mirror()
    assert [one.step for one in store.gc(keep_last=1, min_age=0, dry_run=True).purged] == [1]
    plan = plan_gc(store.repository, Policy(keep_last=1), min_age=0)
    link.inject(fail_before("get", times=99))
    assert [one.reason for one in store.gc(keep_last=1, min_age=0, wait=0).waiting] == ["unmirrored"]
    assert f"casckpt cannot ask the mirror {link.url} (" in caplog.text
    done = execute(store.repository, plan)
    assert ([one.reason for one in done.waiting], done.purged) == (["unmirrored"], ())
    assert unmirrored(store) == 2
    assert "casckpt cannot ask the mirror" in say_status(store, capsys)
    assert (store.mirror_lag().checkpoints, "cannot ask" in store.mirror_lag().error) == (2, True)
    link.heal()
    assert [one.step for one in store.gc(keep_last=1, min_age=0, wait=0).purged] == [1]


def test_an_unreadable_folder_does_not_count_as_a_mirror(store_path: Path, away: Path) -> None:
    store = casckpt.open(store_path, mirror=away)
    save(store, 1, 2)
    store.wait_for_mirror()
    shutil.rmtree(away)
    away.write_bytes(b"in its place")
    assert reasons(store, keep_last=1) == [(1, "unmirrored")]


def test_a_new_mirror_does_not_have_what_an_earlier_one_had(store_path: Path, away: Path) -> None:
    """The new mirror has no copies of forgotten checkpoints, so the store has the only ones."""
    store = small_folder(store_path)
    store.change_settings(mirror=away)
    save(store, 1, 2)
    store.copy_to(away)
    store.forget("sft@1")
    shutil.rmtree(away)
    store.copy_to(away)
    assert reasons(store) == [(1, "unmirrored")]


@pytest.mark.parametrize("by", ["a copy", "the thread"])
def test_gc_keeps_everything_that_a_different_store_in_place_of_the_mirror_lacks(
    by: str, store_path: Path, away: Path
) -> None:
    """A new disk holds a different store at the same path."""
    store = small_folder(store_path)
    store.change_settings(mirror=away)
    save(store, 1, 2)
    store.copy_to(away)
    save(store, 3)
    store.copy_to(away)
    shutil.rmtree(away)
    casckpt.open(away).create()
    assert reasons(store, keep_last=1) == [(1, "unmirrored"), (2, "unmirrored")]
    assert unmirrored(store) == 3
    store.forget("sft@1")
    if by == "a copy":
        store.copy_to(away, "sft@2")
        assert reasons(store, keep_last=1) == [(1, "unmirrored")]
    else:
        save(store, 4)
        writer = casckpt.open(store_path, mirror=away)
        writer.wait_for_mirror()
        assert steps(casckpt.open(away)) == [("sft", 2), ("sft", 3), ("sft", 4)]
        assert [one.step for one in writer.gc(keep_last=1, min_age=0, wait=0).purged] == [1, 2, 3]
        assert same_state(casckpt.open(away).read("sft@3"), {"w": cells(3, seed=3), "shared": cells(5, seed=0)})


@pytest.mark.parametrize("in_place", ["an older snapshot", "an older store"])
def test_gc_keeps_what_an_older_state_of_the_mirror_lacks_until_it_is_copied_again(
    in_place: str, store_path: Path, away: Path
) -> None:
    older = away.with_name("older")
    if in_place == "an older store":
        casckpt.open(older).create()
    store = small_folder(store_path)
    store.change_settings(mirror=away)
    save(store, 1)
    store.copy_to(away)
    if in_place == "an older snapshot":
        shutil.copytree(away, older)
    save(store, 2, 3)
    store.copy_to(away)
    store.forget("sft@1")
    shutil.rmtree(away)
    older.rename(away)
    lost = [2] if in_place == "an older snapshot" else [1, 2]
    assert reasons(casckpt.open(store_path), keep_last=1) == [(step, "unmirrored") for step in lost]
    store.copy_to(away)
    assert reasons(casckpt.open(store_path), keep_last=1) == [(step, "unmirrored") for step in lost if step == 1]
    assert steps(store) == [("sft", 3)]
    casckpt.open(store_path, mirror=away).wait_for_mirror()  # also copies what is forgotten
    assert reasons(store) == []
    assert steps(casckpt.open(away)) == [("sft", step) for step in (1, 2, 3) if step not in lost or step > 1]


def test_rotation_forgets_nothing_while_the_mirror_is_missing(store_path: Path, away: Path) -> None:
    store = small_folder(store_path)
    store.change_settings(mirror=away)
    with Checkpointer(store, run="sft", max_checkpoints=1, gc=True) as checkpointer:
        checkpointer.save(1, torch.nn.Linear(2, 2))
        store.copy_to(away)
        away.rename(away.with_name("unmounted"))
        checkpointer.save(2, torch.nn.Linear(2, 2))
        assert steps(store) == [("sft", 1), ("sft", 2)]
        away.with_name("unmounted").rename(away)
        store.copy_to(away)
        checkpointer.save(3, torch.nn.Linear(2, 2))
    assert steps(store) == [("sft", 3)]


def test_the_mirror_is_asked_only_about_what_gc_removes(store: Store, link: FaultyStore) -> None:
    """For the plan, and again before the records. Young ones wait anyway."""
    save(store, 1, 2, 3)
    store.wait_for_mirror()
    gone = store.get("sft@1").commit
    store.forget("sft@1")
    before = len(link.calls)
    assert reasons(store) == []  # it purges sft@1
    store.gc(wait=0)
    store.forget("sft@2")
    store.gc(wait=0)
    get = ("get", commit_key(gone.txid))
    asked = [("size", "casckpt.json"), get, ("settle", "commits"), get]
    calls = [(call.method, call.key) for call in link.calls[before:]]
    assert calls == asked * 2
