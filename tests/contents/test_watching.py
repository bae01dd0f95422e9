"""Watching a run: each checkpoint is yielded once, after it is complete, and requests read only new data."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.base.names import run_hash
from casckpt.base.units import time_of
from casckpt.contents.watching import LONGEST_PAUSE, Expected, Notice, Watcher, watch
from casckpt.contents.watching import START as WHOLE
from casckpt.errors import InvalidInput, NotFound, StorageError
from casckpt.format.keys import announcement_key, commit_key, make_txid
from casckpt.format.names import ManifestId, TxId
from casckpt.history import commits as log
from casckpt.history.announcements import announce
from casckpt.history.commits import Commit, CommitList, just_committed, list_commits
from casckpt.history.transactions import revoke
from casckpt.repository.repository import Repository
from casckpt.storage.base import ObjectStore
from casckpt.storage.memory import MemoryStore
from tests.support.faulty import FaultyStore, fail_before
from tests.support.hosts import CHANGES, RUNS, Hosts, Meddled, finish, saved
from tests.support.repositories import (
    START,
    Ticks,
    commit_bare,
    committed,
    half_rewrite,
    manifest_id,
    memory,
    repository,
    rewrite_bare,
)

RUN = run_hash("run")


class Seen:
    """A watch whose polls take no time. ``pauses``: the seconds between its polls."""

    def __init__(self, repo: Repository, after: str | Commit | None = None, *, latest_only: bool = False) -> None:
        self.watcher = Watcher(repo, "run", after, latest_only=latest_only)
        self.pauses: list[float] = []
        self.now = 0.0

    def __call__(self, polls: int = 0, meanwhile: Callable[[], object] = lambda: None) -> list[tuple[int, bool]]:
        """Return the steps of new checkpoints after a number of polls, one second apart, and whether each is late."""
        return [(told.commit.step, told.late) for told in self.told(polls, meanwhile)]

    def told(self, polls: int = 0, meanwhile: Callable[[], object] = lambda: None) -> list[Notice]:
        def sleep(seconds: float) -> None:
            self.pauses.append(seconds)
            self.now += seconds
            meanwhile()

        return list(watch(self.watcher, poll=1.0, timeout=polls, sleep=sleep, now=lambda: self.now))


def on_time(*steps: int) -> list[tuple[int, bool]]:
    return [(step, False) for step in steps]


def begun(repo: Repository, step: int) -> Any:
    """Return a save that was announced, but has no record yet."""
    save = saved(repo, "run", step)
    announce(repo, [(save.txid, 0)])
    return save


# new checkpoints


def test_a_new_commit_is_yielded_once(repo: Repository) -> None:
    commit_bare(repo, step=1)
    seen = Seen(repo)
    assert seen() == []
    for step in (2, 3):
        commit_bare(repo, step=step)
        commit_bare(repo, "other", step)
    assert seen() == on_time(2, 3)
    assert seen(3) == []


def test_a_watch_starts_when_it_is_created_and_not_at_its_first_poll(repo: Repository) -> None:
    seen = Seen(repo)
    commit_bare(repo, step=1)
    assert seen() == on_time(1)


def test_a_watch_starts_at_the_first_checkpoint_or_after_a_given_one(repo: Repository) -> None:
    made = [commit_bare(repo, step=step) for step in range(12)]
    assert Seen(repo, WHOLE)() == on_time(*range(12))
    for number in (0, 4, 10, 11):
        commit = made[number]
        for after in (commit, commit.id, commit.id[:10], f"run@{number}"):
            assert Seen(repo, after)() == on_time(*range(number + 1, 12))


@pytest.mark.parametrize("end", ["forgotten", "purged"])
def test_a_watch_continues_if_the_last_yielded_checkpoint_is_gone(repo: Repository, end: str) -> None:
    made = [commit_bare(repo, step=step) for step in range(4)]
    gone = log.forget(repo, made[1])
    if end == "purged":
        gone = log.purge(repo, gone)
    for after in (made[1], gone, gone.id, "run@1"):
        assert Seen(repo, after)() == on_time(2, 3)


def test_the_checkpoint_that_a_watch_starts_after_must_belong_to_the_run(repo: Repository) -> None:
    commit_bare(repo, step=1)
    other = commit_bare(repo, "other", step=2)
    for after in (other, "other@2", other.id):
        with pytest.raises(InvalidInput, match="does not belong to run 'run'"):
            Seen(repo, after)
    for missing in ("run@7", "abcdef", "tag:none"):
        with pytest.raises(NotFound):
            Seen(repo, missing)
    with pytest.raises(InvalidInput, match="not a valid name"):
        Watcher(repo, "a run", latest_only=False)


def test_a_checkpoint_is_not_yielded_before_its_record_exists(repo: Repository) -> None:
    """It is announced, but arrives late. Later checkpoints do not wait for it."""
    seen = Seen(repo)
    slow = begun(repo, 1)
    assert seen() == []
    commit_bare(repo, step=2)
    assert seen() == on_time(2)
    finish(repo, slow)
    assert seen(4) == [(1, True)]
    assert seen(4) == []


def test_a_checkpoint_is_late_only_if_its_save_began_before_that_of_a_yielded_one(repo: Repository) -> None:
    seen = Seen(repo)
    first, second = saved(repo, "run", 1), saved(repo, "run", 2)
    announce(repo, [(second.txid, 0)])
    finish(repo, first)
    assert seen() == on_time(1)
    finish(repo, second)
    assert seen(4) == on_time(2)


@pytest.mark.parametrize("announced", [False, True])
def test_a_save_in_progress_is_yielded_regardless_of_when_it_was_announced(repo: Repository, announced: bool) -> None:
    slow = begun(repo, 1) if announced else saved(repo, "run", 1)
    one = commit_bare(repo, step=2)
    watches = [Seen(repo), Seen(repo, one), Seen(repo, WHOLE)]
    finish(repo, slow)
    assert [seen(4) for seen in watches] == [
        [(1, True)],
        [(1, True)],
        [(2, False), (1, True)] if not announced else [(1, False), (2, False)],
    ]


def test_an_abandoned_transaction_is_not_yielded(repo: Repository, faults: FaultyStore) -> None:
    faults.inject(fail_before("delete", key="transactions/*", times=9))
    finish(repo, saved(repo, "run", 1))
    commit_bare(repo, step=2)
    assert list(repo.storage.list("transactions/"))
    assert Seen(repo)(4) == []


def test_a_watch_yields_new_checkpoints_after_a_run_was_rolled_back(repo: Repository) -> None:
    seen = Seen(repo)
    made = [commit_bare(repo, step=step) for step in (1, 2, 3)]
    assert seen() == on_time(1, 2, 3)
    for commit in made[1:]:
        log.forget(repo, commit)
    commit_bare(repo, step=2)
    assert seen() == on_time(2)


def test_a_previously_forgotten_checkpoint_is_yielded_when_it_is_restored(repo: Repository) -> None:
    seen = Seen(repo)
    gone, ended = commit_bare(repo, step=1), commit_bare(repo, step=2)
    log.forget(repo, gone)
    log.purge(repo, log.forget(repo, ended))
    revoke(repo, begun(repo, 3).txid, "given up")
    commit_bare(repo, step=4)
    assert seen(4) == on_time(4)
    log.restore(repo, gone)
    assert seen() == [(1, True)]
    log.restore(repo, log.forget(repo, list_commits(repo).commits[gone.txid]))
    assert seen(4) == []


def test_a_watch_waits_for_an_announced_restore(repo: Repository) -> None:
    seen = Seen(repo)
    gone = log.forget(repo, commit_bare(repo, step=1))
    assert seen(4) == []
    announce(repo, [(gone.txid, gone.number + 1)])
    assert seen(1) == []
    log.restore(repo, gone)
    assert seen(4) == on_time(1)


def test_a_restored_checkpoint_from_before_the_watch_is_not_yielded(repo: Repository) -> None:
    gone = log.forget(repo, commit_bare(repo, step=1))
    seen = Seen(repo)
    log.restore(repo, gone)
    assert seen(2) == []


def test_a_watch_yields_a_rewritten_checkpoint_once(repo: Repository) -> None:
    old = commit_bare(repo, step=0)
    commit_bare(repo, step=1)
    seen = Seen(repo)
    rewrite_bare(repo, rewrite_bare(repo, old))
    one, two = commit_bare(repo, step=2), commit_bare(repo, step=3)
    moved = rewrite_bare(repo, rewrite_bare(repo, one))
    half_rewrite(repo, two)
    assert [told.commit for told in seen.told(4)] == [moved, two]
    moved = rewrite_bare(repo, moved)
    assert seen(4) == []
    log.restore(repo, moved.old[0])
    assert seen(4) == []


def test_a_watch_that_starts_after_a_rewritten_checkpoint_yields_later_saves(repo: Repository) -> None:
    old = commit_bare(repo, step=1)
    commit_bare(repo, step=2)
    moved = rewrite_bare(repo, old)
    for after in (old, moved, old.id, "run@1"):
        assert Seen(repo, after)() == on_time(2)
        assert Seen(repo, after, latest_only=True)() == on_time(2)


def test_a_copy_of_an_older_checkpoint_is_yielded_as_late(repo: Repository) -> None:
    commit_bare(repo, step=1)
    seen, latest = Seen(repo), Seen(repo, latest_only=True)
    commit_bare(repo, step=0, txid=make_txid(time_of(START) - timedelta(days=1), bytes(8), "run", 0))
    assert seen() == [(0, True)]
    assert latest() == []


# latest_only


def test_a_watch_for_latest_yields_only_the_newest_checkpoint_at_each_poll(repo: Repository) -> None:
    seen = Seen(repo, latest_only=True)
    slow = begun(repo, 1)
    made = [commit_bare(repo, step=step) for step in (2, 3, 4)]
    log.forget(repo, made[2])
    assert seen() == on_time(3)
    finish(repo, slow)
    assert seen(4) == []
    commit_bare(repo, step=5)
    assert seen() == on_time(5)
    log.restore(repo, list_commits(repo).commits[made[2].txid])
    assert seen(4) == []


@pytest.mark.parametrize("after", [WHOLE, 0, 2])
def test_the_current_latest_checkpoint_is_yielded_if_it_follows_the_given_one(repo: Repository, after: Any) -> None:
    made = [commit_bare(repo, step=step) for step in range(3)]
    rewrite_bare(repo, made[2])
    seen = Seen(repo, after if after == WHOLE else made[after], latest_only=True)
    assert seen() == ([] if after == 2 else on_time(2))
    rewrite_bare(repo, list_commits(repo).visible()[-1])
    assert seen(4) == []
    commit_bare(repo, step=1)
    assert seen() == on_time(1)


# missing, failing and replaced stores


@pytest.mark.parametrize("after", [None, WHOLE])
@pytest.mark.parametrize("latest_only", [False, True])
def test_a_watch_waits_for_a_store_to_be_created(tmp_path: Path, after: str | None, latest_only: bool) -> None:
    storage = memory()
    seen = Seen(Repository(storage, tmp_path), after, latest_only=latest_only)
    assert seen(2) == []
    repo = repository(tmp_path, storage)
    assert seen(2) == []
    commit_bare(repo, step=1)
    assert seen() == on_time(1)
    with pytest.raises(NotFound, match="there is no store"):
        Seen(Repository(memory(), tmp_path), "run@1")


def test_a_watch_retries_after_storage_failures_and_misses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = FaultyStore(memory())
    writer = repository(tmp_path / "writer", storage)
    seen = Seen(repository(tmp_path / "reader", storage))
    slow = begun(writer, 1)
    for step in (2, 3):
        commit_bare(writer, step=step)
    for method in ("size", "get"):
        storage.inject(*(fail_before(method, at=3 * at, times=2) for at in range(1, 9)))
    told = seen(1000)
    storage.heal()
    finish(writer, slow)
    assert told + seen(40) == [(2, False), (3, False), (1, True)]
    assert caplog.text.count("cannot watch the run now, but will retry") > 4


def test_storage_that_still_fails_at_the_end_raises_an_error(repo: Repository, faults: FaultyStore) -> None:
    seen = Seen(repo)
    faults.inject(*(fail_before(method, times=10**6) for method in ("get", "size", "list")))
    with pytest.raises(StorageError):
        seen(1000)
    assert seen.pauses[:7] == [2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE]
    assert sum(seen.pauses) == 1000
    with pytest.raises(StorageError):
        Seen(repo)
    faults.heal()
    commit_bare(repo, step=1)
    assert seen() == on_time(1)


def test_the_timeout_starts_at_the_last_yielded_checkpoint(repo: Repository) -> None:
    seen, steps = Seen(repo), iter(range(1, 6))

    def every_third() -> None:
        if seen.now % 3 == 0 and (step := next(steps, None)):
            commit_bare(repo, step=step)

    assert seen(4, every_third) == on_time(1, 2, 3, 4, 5)
    assert seen.now == 15 + 4


def copy_of(storage: Any) -> dict[str, bytes]:
    return {entry.key: storage.get(entry.key, limit=1 << 20) for entry in storage.list("")}


def put_in_place(storage: Any, objects: dict[str, bytes]) -> None:
    for entry in list(storage.list("")):
        storage.delete(entry.key)
    for key, data in objects.items():
        storage.put(key, data)


def test_saves_into_a_restored_backup_of_the_store_are_yielded(tmp_path: Path) -> None:
    storage = memory()
    writer = repository(tmp_path / "writer", storage)
    commit_bare(writer, step=1)
    before = copy_of(storage)
    seen = Seen(repository(tmp_path / "reader", storage))
    slow = begun(writer, 2)
    for step in (3, 4):
        commit_bare(writer, step=step)
    assert seen() == on_time(3, 4)
    slow.leave()
    put_in_place(storage, before)
    assert seen(40) == []
    other = repository(tmp_path / "other", storage, seed=7, clock=Ticks(START + 10**9))
    commit_bare(other, step=3)
    assert seen(20) == on_time(3)


def test_all_checkpoints_of_a_replacement_store_are_yielded(tmp_path: Path) -> None:
    storage = memory()
    commit_bare(repository(tmp_path / "writer", storage), step=1)
    seen = Seen(repository(tmp_path / "reader", storage))
    put_in_place(storage, {})
    other = repository(tmp_path / "other", storage, seed=7, clock=Ticks(START + 10**9))
    for step in range(3):
        commit_bare(other, step=step)
    assert seen(20) == on_time(0, 1, 2)


def spoil(repo: Repository, key: str) -> None:
    repo.storage.delete(key)
    repo.storage.put(key, b"torn")


def test_a_listing_finds_the_transactions_named_in_a_damaged_announcement(tmp_path: Path) -> None:
    storage = memory()
    repo = repository(tmp_path / "writer", storage)
    one = commit_bare(repo, step=1)
    seen = Seen(repository(tmp_path / "reader", storage))
    for step in (2, 3, 4):
        commit_bare(repo, step=step)
    spoil(repo, announcement_key(RUN, 2))
    assert seen() == [(2, False), (4, False), (3, True)]
    host = repository(tmp_path / "new", storage)
    assert Seen(host, WHOLE)() == [(1, False), (2, False), (4, False), (3, True)]
    assert Seen(host, one)() == [(2, False), (4, False), (3, True)]


def test_later_saves_are_yielded_even_if_the_announcement_is_lost(tmp_path: Path) -> None:
    storage = memory()
    repo = repository(tmp_path / "writer", storage)
    made = [commit_bare(repo, step=step) for step in range(4)]
    spoil(repo, announcement_key(RUN, 1))
    assert sorted(Seen(repository(tmp_path / "new", storage), made[1])()) == on_time(2, 3)


def test_an_unreadable_record_is_skipped(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen(repo)
    made = [commit_bare(repo, step=step) for step in range(3)]
    spoil(repo, commit_key(made[1].txid))
    assert seen(4) == on_time(0, 2)
    assert caplog.text.count("skipping ") == 1


# requests


def requests(faults: FaultyStore) -> list[str]:
    return [call.key for call in faults.calls if call.key != "casckpt.json"]


@pytest.mark.parametrize("length", [0, 3, 300])
@pytest.mark.parametrize("latest_only", [False, True])
def test_a_poll_costs_one_request_regardless_of_the_length_of_the_history(
    tmp_path: Path, length: int, latest_only: bool
) -> None:
    storage = FaultyStore(memory())
    writer = repository(tmp_path / "writer", storage)
    for step in range(length):
        commit_bare(writer, step=step)
    begun(writer, length).leave()  # it never ends
    seen = Seen(repository(tmp_path / "reader", storage), latest_only=latest_only)
    seen(200)
    storage.calls.clear()
    assert seen(100) == []
    assert len(requests(storage)) <= 101 + 4 * 101 // 16
    assert requests(storage).count(announcement_key(RUN, length + 1)) >= 101


@pytest.mark.parametrize("length", [1, 200])
def test_a_watch_starts_with_few_requests_and_then_reads_only_new_records(tmp_path: Path, length: int) -> None:
    storage = FaultyStore(memory())
    writer = repository(tmp_path / "writer", storage)
    made = [finish(writer, saved(writer, "run", step)) for step in range(length)]

    def begin(name: str, after: str | Commit | None, *, latest_only: bool = False) -> Seen:
        storage.calls.clear()
        seen = Seen(repository(tmp_path / name, storage), after, latest_only=latest_only)
        seen()
        assert len(requests(storage)) <= 14
        return seen

    begin("new", None)
    begin("behind", made[-1])
    seen = begin("latest", WHOLE, latest_only=True)
    for step in range(20):
        finish(writer, saved(writer, "run", length + step))
    storage.calls.clear()
    assert len(seen()) == 1
    assert len(requests(storage)) <= 20 + 12, "of each an announcement, and of the last its log"


# any order of events


@dataclass
class Watched:
    """One of several watches. ``before``: the ids that existed before it. ``told``: all ids that it yielded."""

    run: str
    latest_only: bool
    before: set[ManifestId]
    watcher: Watcher
    told: list[Notice] = field(default_factory=list)

    def look(self) -> None:
        found = self.watcher.next()
        self.told += [] if found is None else [found]

    def drain(self) -> None:
        polls = iter(range(10**6))
        self.told += watch(self.watcher, poll=1, timeout=40, sleep=lambda _: None, now=polls.__next__)

    def check(self, listed: CommitList) -> None:
        ids = [one.commit.id for one in self.told]
        ended = {one.id for one in listed.commits.values() if one.last != "revoked" and one.run == self.run}
        assert len(ids) == len(set(ids))
        assert set(ids) <= ended - self.before
        for number, one in enumerate(self.told):
            earlier = [other.commit.txid for other in self.told[:number]]
            assert one.late or one.commit.txid > max(earlier, default="")
            assert not (one.late and self.latest_only)
        visible = {one.id for one in listed.visible() if one.run == self.run}
        assert self.latest_only or visible - self.before <= set(ids)


def begin_watch(hosts: Hosts, number: int, storage: ObjectStore) -> Watched:
    run, after = hosts.draw.choice(RUNS), hosts.draw.choice([None, WHOLE])
    latest_only = hosts.draw.random() < 0.3
    before = {one.id for one in list_commits(hosts.fresh()).live() if one.run == run} if after is None else set()
    reader = repository(hosts.folder / f"reader {number}", storage, seed=number)
    return Watched(run, latest_only, before, Watcher(reader, run, after, latest_only=latest_only))


CHANGE = [*CHANGES, "end", "announce", "announce", "look", "watch"]


@given(st.lists(st.sampled_from(CHANGE), max_size=30), st.integers(0, 1 << 30))
def test_every_checkpoint_is_yielded_exactly_once(changes: list[str], seed: int) -> None:
    """Other processes act between and during the polls."""
    with tempfile.TemporaryDirectory() as folder:
        storage = MemoryStore(f"watching-{seed}-{folder}")
        hosts = Hosts(Path(folder), storage, random.Random(seed))
        meddled = Meddled(storage, hosts)
        watches: list[Watched] = []
        for number, change in enumerate(["watch", *changes, "watch"]):
            if change == "watch" and len(watches) < 4:
                watches.append(begin_watch(hosts, number, meddled))
            elif change == "announce":
                hosts.announce()
            elif change == "look":
                meddled.is_on = True
                for one in watches:
                    one.look()
                meddled.is_on = False
            else:
                hosts.act(change)
        for one in watches:
            one.drain()
            one.check(list_commits(hosts.fresh()))
        hosts.close()


# the part that performs no I/O


def bare(txid: TxId, **fields: Any) -> Commit:
    record = committed(
        Repository(MemoryStore("none")), step=1, txid=txid, manifest=manifest_id(txid), store="none", **fields
    )
    return just_committed(record)


def test_missing_announcements_are_polled_at_increasing_intervals() -> None:
    expected, txid = Expected(), make_txid(time_of(START), bytes(8), "run", 1)
    expected.note(txid)
    asked = []
    for poll in range(200):
        if expected.due():
            asked.append(poll)
            expected.judge(txid, None)
        expected.polls += 1
    assert asked[:7] == [0, 1, 3, 7, 15, 31, 63]
    assert asked[7:] == [95, 127, 159, 191]
    expected.note(txid)
    assert expected.due() == [txid], "it was announced again"
    commit = bare(txid)
    assert expected.judge(txid, commit) == commit
    assert expected.take(txid, commit) == Notice(commit, late=False)
    assert expected.due() == []


def test_logs_of_yielded_commits_are_not_reread() -> None:
    expected, txid = Expected(), make_txid(time_of(START), bytes(8), "run", 1)
    expected.note(txid)
    expected.take(txid, bare(txid))
    expected.note(txid, 1)
    expected.note(make_txid(time_of(START), bytes(8), "run", 2), 3)
    assert expected.due() == []
