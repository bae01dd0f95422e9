"""Following a run returns the same commits as a listing of commits/, for any order of announcements and events."""

from __future__ import annotations

import random
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.base.names import run_hash
from casckpt.base.units import time_of
from casckpt.contents.refs import resolve
from casckpt.errors import Damaged, NotFound
from casckpt.format.keys import announcement_key, commit_key, make_txid
from casckpt.history import commits as log
from casckpt.history import following
from casckpt.history.announcements import announce, look
from casckpt.history.commits import list_commits
from casckpt.history.following import (
    MANY_RUNS,
    at_step,
    greatest,
    is_live,
    is_visible,
    look_at_all,
    newest,
    newest_of_runs,
    newest_reusable,
)
from casckpt.history.transactions import begin_save
from casckpt.repository.repository import Repository
from casckpt.storage.memory import MemoryStore
from tests.support.faulty import FaultyStore, call_first
from tests.support.hosts import AHEAD, CHANGES, RUNS, Hosts, Meddled, finish, saved
from tests.support.repositories import START, Ticks, commit_bare, meanwhile, memory, repository, save


def check(repo: Repository, run: str) -> None:
    """Check that following returns the same as a listing."""
    listed = list_commits(repo)
    visible = [one for one in listed.visible() if one.run == run]
    live = [one for one in listed.live() if one.run == run]
    assert newest(repo, run, is_visible) == (visible[-1] if visible else None)
    assert newest_reusable(repo, run, anew=True) == (live[-1] if live else None)
    known = look_at_all(repo, run)
    every = [txid for txid, one in listed.commits.items() if run_hash(run) in txid and one.last != "revoked"]
    latest = greatest(repo, known, run)
    assert latest is None or latest >= max(every, default=latest)
    assert latest is not None or not every
    for step in range(3):
        assert at_step(repo, known, run, step, is_visible) == [one for one in visible if one.step == step]


@given(st.lists(st.sampled_from(CHANGES), max_size=25), st.integers(0, 1 << 30), st.sampled_from([0, 3, 1000]))
def test_following_a_run_returns_the_same_commits_as_a_listing(changes: list[str], seed: int, many: int) -> None:
    """``many``: above this number of unread announcements, names are listed."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(following, "MANY_ANNOUNCEMENTS", many)
        hosts = Hosts(Path(folder), MemoryStore(f"following-{seed}-{folder}"), random.Random(seed))
        for change in changes:
            hosts.act(change)
            for repo in (*hosts.hosts, hosts.another_process(), hosts.fresh()):
                for run in RUNS if hosts.draw.random() < 0.5 else ():
                    check(repo, run)
        newest_ones = [one.txid for one in newest_of_runs(hosts.fresh(), is_live)]
        live = {one.run: one for one in list_commits(hosts.hosts[0]).live()}
        assert newest_ones == [one.txid for one in sorted(live.values(), key=lambda one: one.txid, reverse=True)]
        hosts.close()


@pytest.fixture(params=[1000, 0])
def _many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above this number of unread announcements, names are listed."""
    monkeypatch.setattr(following, "MANY_ANNOUNCEMENTS", request.param)


@pytest.mark.usefixtures("_many")
@pytest.mark.parametrize("is_new", [True, False])
def test_a_read_returns_everything_that_existed_before_it_began(
    tmp_path: Path, seed: int, is_new: bool, full: bool
) -> None:
    missed = 0
    for round_ in range(200 if full else 20):
        draw = random.Random(seed + round_)
        storage = memory()
        hosts = Hosts(tmp_path / str(round_), storage, draw)
        for _ in range(draw.randrange(8)):
            hosts.act(draw.choice(["begin", "save", "copy", "end"]))
        meddled = Meddled(storage, hosts)
        reader = repository(tmp_path / str(round_) / "reader", meddled, seed=99)
        if not is_new:
            look_at_all(reader, "a")
        hosts.act("end")
        before = [one for one in list_commits(hosts.fresh()).visible() if one.run == "a"]
        meddled.is_on = True
        found = newest(reader, "a", is_visible)
        meddled.is_on = False
        if before:
            assert found is not None
            assert found.txid >= before[-1].txid
        known = look_at_all(reader, "a")
        missed += len({one.txid for one in before} - {txid for some in known.at.values() for txid in some})
        hosts.close()
    assert not missed


def requests(storage: FaultyStore) -> list[str]:
    return [call.key for call in storage.calls if call.method in ("get", "list", "size") and call.key != "casckpt.json"]


@pytest.mark.parametrize("length", [3, 110])
def test_the_first_read_of_a_run_needs_few_requests(
    tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of requests depends neither on the length of the run nor on other changes."""
    monkeypatch.setattr(following, "MANY_ANNOUNCEMENTS", 100)
    storage = FaultyStore(memory())
    repo = repository(tmp_path / "writer", storage)
    for step in range(length):
        finish(repo, saved(repo, "a", step))
    for step in range(50):
        commit_bare(repo, f"other-{step % 5}", step)
    host = repository(tmp_path / "host", storage, seed=2)
    storage.calls.clear()
    found = resolve(host, "a@latest")
    assert found.step == length - 1
    run, at = run_hash("a"), announcement_key(run_hash("a"), length - 1)
    assert requests(storage) == [
        f"runs/{run}",
        at.rpartition("/")[0],
        at,
        commit_key(found.txid),
        commit_key(found.txid, 1),
    ]


def test_a_fresh_host_lists_names_instead_of_reading_many_announcements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "MANY_ANNOUNCEMENTS", 4)
    storage = FaultyStore(memory())
    repo = repository(tmp_path / "writer", storage)
    for step in range(6):
        finish(repo, saved(repo, "a", step))
    commit_bare(repo, "other")
    at = [announcement_key(run_hash("a"), number) for number in range(9)]

    def asked(host: Repository) -> list[str]:
        storage.calls.clear()
        known = look_at_all(host, "a")
        found = requests(storage)
        assert sorted(known.at) == list(range(len(list_commits(host).commits) - 1))
        return found

    host = repository(tmp_path / "host", storage, seed=2)
    assert asked(host) == [f"runs/{run_hash('a')}", at[0].rpartition("/")[0], "transactions/", "commits/"]
    assert asked(repository(tmp_path / "host", storage, seed=3))[-1] == "commits/"  # the head has not been read yet
    last = newest(host, "a", is_visible)
    assert last is not None
    assert last.step == 5
    finish(repo, saved(repo, "a", 6))
    assert asked(host) == at[5:8]
    assert asked(repository(tmp_path / "host", storage, seed=4)) == at[6:8]
    assert [one.step for one in at_step(host, look_at_all(host, "a"), "a", 2, is_visible)] == [2]


@pytest.mark.parametrize("moment", ["transactions/", "commits/", "after"])
def test_a_fresh_host_saves_later_than_saves_that_were_announced_but_not_committed(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the other host is ahead. Its save ends before, between, or after the listings."""
    monkeypatch.setattr(following, "MANY_ANNOUNCEMENTS", 0)
    storage = FaultyStore(memory())
    ahead = repository(tmp_path / "ahead", storage.inner, clock=Ticks(START + AHEAD * 10**6))
    other = saved(ahead, "a", 1)
    announce(ahead, [(other.txid, 0)])
    if moment != "after":
        storage.inject(call_first("list", meanwhile(lambda: finish(ahead, other)), key=moment))
    repo = repository(tmp_path / "fresh", storage, seed=2)
    mine, _, _ = begin_save(repo, "a", 2)
    assert mine.txid > other.txid
    if moment == "after":
        finish(ahead, other)
    assert [one.step for one in at_step(repo, look_at_all(repo, "a"), "a", 1, is_visible)] == [1]
    finish(repo, mine)
    found = newest(repository(tmp_path / "reader", storage, seed=3), "a", is_visible)
    assert found is not None
    assert found.txid == mine.txid


def test_names_that_were_listed_before_the_store_was_restored_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that listed them ended before it read an announcement."""
    monkeypatch.setattr(following, "MANY_ANNOUNCEMENTS", 3)
    storage = memory()
    repo = repository(tmp_path / "writer", storage)
    for step in range(5):
        finish(repo, saved(repo, "a", step))
    look_at_all(repository(tmp_path / "host", storage, seed=2), "a")
    for entry in [*storage.list("runs/"), *storage.list("commits/")]:
        storage.delete(entry.key)
    repo = repository(tmp_path / "other", storage, seed=3)
    for step in range(10, 16):
        finish(repo, saved(repo, "a", step))
    monkeypatch.undo()
    known = look_at_all(repository(tmp_path / "host", storage, seed=4), "a")
    assert sorted(known.at) == list(range(10, 16))


def test_latest_follows_each_run_unless_there_are_many_runs_and_then_makes_a_listing(tmp_path: Path) -> None:
    storage = FaultyStore(memory())
    repo = repository(tmp_path, storage)
    last = [commit_bare(repo, f"run-{number}") for number in range(MANY_RUNS)][-1]
    storage.calls.clear()
    assert resolve(repo, "latest").txid == last.txid
    assert storage.count("list", "commits/") == 0
    other = commit_bare(repo, "one-more")
    storage.calls.clear()
    assert resolve(repo, "latest").txid == other.txid
    assert storage.count("list", "commits/") == 1
    assert next(one.txid for one in newest_of_runs(repo, is_live, but="one-more")) == last.txid


@pytest.mark.parametrize("count", [2, MANY_RUNS + 1])
def test_a_save_reuses_nothing_from_a_run_whose_newest_checkpoint_is_uncertain(tmp_path: Path, count: int) -> None:
    """The checkpoint may have been purged, but the record that would show this cannot be read."""
    storage = memory()
    repo = repository(tmp_path, storage)
    one, *others = (commit_bare(repo, f"run-{number}") for number in range(count))
    log.purge(repo, log.forget(repo, one))
    key = commit_key(one.txid, 2)
    storage.delete(key)
    storage.put(key, b"torn")
    found = newest_of_runs(repository(tmp_path / "new", storage), is_live, skip_doubtful=True)
    assert {commit.txid for commit in found} == {commit.txid for commit in others}


def test_following_a_run_without_announcements_makes_a_listing(tmp_path: Path) -> None:
    """The error names the available runs."""
    storage = memory()
    repo = repository(tmp_path, storage)
    one = commit_bare(repo, "a", 1)
    for entry in list(storage.list("runs/")):
        storage.delete(entry.key)
    assert resolve(repository(tmp_path / "new", storage), "a@latest").txid == one.txid
    assert resolve(repository(tmp_path / "newer", storage), "latest").txid == one.txid
    with pytest.raises(NotFound, match="existing runs: a"):
        resolve(repo, "other@latest")


def test_a_save_announced_with_a_later_clock_does_not_hide_other_saves(tmp_path: Path) -> None:
    """A writer that has followed the run knows all earlier checkpoints. Other writers make no such claim."""
    storage = memory()
    ahead = repository(tmp_path / "ahead", storage, clock=Ticks(START + AHEAD * 10**6))
    repo = repository(tmp_path / "behind", storage, seed=2)
    one = finish(ahead, saved(ahead, "a", 1))
    two = finish(repo, saved(repo, "a", 2))
    late = saved(repo, "a", 3)
    copied = commit_bare(repo, "a", 4, txid=make_txid(time_of(START) + timedelta(days=1), bytes(8), "a", 4))
    three = finish(repo, late)
    assert one.txid < two.txid < three.txid < copied.txid
    assert newest(repository(tmp_path / "new", storage), "a", is_visible) == copied


def test_following_a_run_with_an_unreadable_announcement_makes_a_listing(tmp_path: Path) -> None:
    storage = memory()
    repo = repository(tmp_path, storage)
    made = [finish(repo, saved(repo, "a", step)) for step in range(4)]
    key = announcement_key(run_hash("a"), 3)
    storage.delete(key)
    storage.put(key, b"torn")
    host = repository(tmp_path / "new", storage)
    assert newest(host, "a", is_visible) == made[3]
    assert greatest(host, look_at_all(host, "a"), "a") == made[3].txid
    assert [one.step for one in at_step(host, look_at_all(host, "a"), "a", 3, is_visible)] == [3]


def test_an_unreadable_log_is_skipped_or_raises_an_error(tmp_path: Path) -> None:
    storage = memory()
    repo = repository(tmp_path, storage)
    one, two = (finish(repo, saved(repo, "a", step)) for step in range(2))
    storage.delete(commit_key(two.txid))
    storage.put(commit_key(two.txid), b"torn")
    assert newest_reusable(repo, "a", anew=True) == one
    assert resolve(repo, "a@latest").txid == one.txid
    known = look_at_all(repo, "a")
    assert at_step(repo, known, "a", 1, is_visible, skip_doubtful=True) == []
    with pytest.raises(Damaged):
        at_step(repo, known, "a", 1, is_visible)


def test_the_logs_of_ended_transactions_are_not_reread(tmp_path: Path) -> None:
    storage = FaultyStore(memory())
    repo = repository(tmp_path, storage)
    one = finish(repo, saved(repo, "a", 0))
    gone = [finish(repo, saved(repo, "a", step)) for step in range(1, 4)]
    for commit in gone:
        log.purge(repo, log.forget(repo, commit))
    assert newest(repo, "a", is_visible) == one
    storage.calls.clear()
    assert newest(repo, "a", is_visible) == one
    assert not [key for key in requests(storage) if any(commit.txid in key for commit in gone)]


def test_a_damaged_newest_announcement_does_not_invalidate_the_cache(tmp_path: Path) -> None:
    storage = memory()
    repo = repository(tmp_path, storage)
    made = [finish(repo, saved(repo, "a", step)) for step in range(2)]
    key = announcement_key(run_hash("a"), 1)
    storage.delete(key)
    storage.put(key, b"torn")
    assert look(repo, run_hash("a")).head == 1
    assert newest(repo, "a", is_visible) == made[1]


def test_a_first_save_that_meets_another_first_save_does_not_take_its_announcement_for_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = FaultyStore(memory())
    repo, other = (repository(tmp_path / f"{seed}", faults, seed=seed) for seed in (1, 2))

    def save_there() -> None:
        faults.heal()
        save(other, "b", 0)

    faults.inject(call_first("list", meanwhile(save_there), key="commits/"))
    begin_save(repo, "a", 0)
    assert caplog.text == ""
    assert len([*repo.storage.list(f"runs/{run_hash('b')}/")]) == 1
