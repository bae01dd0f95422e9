"""Checkpoints that a watch yields can be loaded while other processes write."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import casckpt
from casckpt.contents.watching import Notice, Watcher, watch
from casckpt.errors import InvalidInput, NotFound
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from tests.support.afresh import afresh
from tests.support.counting import count_io
from tests.support.hosts import finish, saved
from tests.support.saves import cells, reopened, same_state, small, small_folder

ROOT = Path(__file__).parents[2]
WRITERS = 4
KILLS = 200


def write(path: Path, first: int, most: int) -> None:
    """Save every fourth step, as one of the writers."""
    repo = Repository(LocalStore(path / "store"), path / f"cache {first}")
    for step in range(first, most, WRITERS):
        finish(repo, saved(repo, "run", step))


def state(step: int) -> dict[str, Any]:
    return {"w": cells(1, seed=step)}


def test_yielded_checkpoints_can_be_loaded() -> None:
    store = small()
    told = store.watch("run", timeout=0)
    for step in (1, 2):
        store.save(state(step), run="run", step=step)
    for arrival, step in zip(told, (1, 2), strict=True):
        assert same_state(store.read(arrival.checkpoint), state(step))
        assert not arrival.late
    assert list(told) == []


def test_a_watch_can_continue_after_any_reference() -> None:
    store = small()
    made = [store.save(state(step), run="run", step=step) for step in range(3)]
    store.tag("seen", made[0])
    for after in (0, "run@0", made[0], made[0].id, "tag:seen"):
        assert [one.checkpoint for one in reopened(store).watch("run", after=after, timeout=0)] == made[1:]
    assert [one.checkpoint for one in store.watch("run", after="start", timeout=0, latest_only=True)] == made[2:]
    assert [one.checkpoint for one in store.watch("run", after="latest", timeout=0)] == []


def test_a_watch_waits_for_a_store_that_is_created_later(store: casckpt.Store, store_path: Path) -> None:
    told = casckpt.open(store_path).watch("run", timeout="60s", poll="0.1s")
    made = store.save(state(1), run="run", step=1)
    assert next(told).checkpoint == made


@pytest.mark.parametrize(
    "wrong",
    [
        {"poll": 0},
        {"poll": "0.05s"},
        {"poll": 1},
        {"timeout": 5},
        {"timeout": "soon"},
        {"after": "begin"},
        {"after": 1.5},
    ],
)
def test_contradictory_arguments_are_rejected_immediately(wrong: dict[str, Any]) -> None:
    store = small()
    with pytest.raises(InvalidInput):
        store.watch("run", **wrong)
    with pytest.raises(InvalidInput):
        store.watch("a run")
    with pytest.raises(NotFound):
        store.watch("run", after=7)


@pytest.mark.parametrize("commits", [60, pytest.param(1000, marks=pytest.mark.soak)])
def test_each_commit_from_four_processes_is_yielded_once(tmp_path: Path, commits: int) -> None:
    storage, polls = LocalStore(tmp_path / "store"), list[float]()

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        time.sleep(seconds)

    Repository(storage, tmp_path / "cache").create()
    watcher = Watcher(Repository(storage, tmp_path / "cache"), "run", latest_only=False)
    counts = count_io(storage)
    told = watch(watcher, poll=0.05, timeout=60, sleep=sleep)
    writers = [afresh().Process(target=write, args=(tmp_path, first, commits)) for first in range(WRITERS)]
    for writer in writers:
        writer.start()
    found = [next(told) for _ in range(commits)]
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    assert sorted(one.commit.step for one in found) == list(range(commits))
    newest = ""
    for one in found:
        assert one.late == (one.commit.txid < newest)
        newest = max(newest, one.commit.txid)
    assert watcher.next() is None
    # for each checkpoint: its announcement, its log, the next number of each, and one poll
    assert counts.requests <= 8 * commits + 3 * len(polls)


@pytest.mark.soak
@pytest.mark.kill
def test_over_200_kills_each_visible_checkpoint_is_yielded_once(tmp_path: Path) -> None:
    """Four writers with clocks ten minutes apart, a copier and a gc are killed. The watch runs all the time."""
    source, store = (small_folder(tmp_path / name) for name in ("source", "store"))
    for step in range(300):
        source.save(state(step), run="run", step=step)
    command = [sys.executable, "-m", "tests.support.killed_writers", str(tmp_path)]
    roles = [*map(str, range(WRITERS)), "copy", "gc"]
    running = [subprocess.Popen([*command, role, str(KILLS // len(roles) + 1)], cwd=ROOT) for role in roles]
    watcher, found = Watcher(store.repository, "run", latest_only=False), list[Notice]()
    while any(process.poll() is None for process in running):
        found += filter(None, [watcher.next()])
        time.sleep(0.01)
    assert [process.returncode for process in running] == [0] * len(roles)
    for left in store.transactions():
        store.revoke(left.txid)
    for one in store.checkpoints("run", forgotten=True):
        if one.forgotten:
            store.restore(one)
    quiet = 0
    while quiet < 64:  # a missing record is read again after at most 32 polls
        now = watcher.next()
        found += filter(None, [now])
        quiet = 0 if now else quiet + 1
    yielded = Counter(one.commit.id for one in found)
    assert yielded.total() == len(yielded)
    assert any(one.late for one in found), "no copy arrived"
    assert {one.id for one in store.checkpoints("run")} <= set(yielded)
