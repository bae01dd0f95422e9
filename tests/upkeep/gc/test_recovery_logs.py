"""gc deletes the logs of transactions that have been over for a month, and the oldest announcements of their runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from casckpt.base.names import run_hash
from casckpt.contents.watching import Watcher, watch
from casckpt.format.keys import announcement_key, commit_key, ended_key, signature_key, transaction_key
from casckpt.format.names import TxId
from casckpt.format.records import Began
from casckpt.history import commits
from casckpt.history.announcements import announce, look, read_back
from casckpt.history.commits import Commit, list_commits, read_log
from casckpt.history.ended import line_of, write_list
from casckpt.history.following import is_visible, newest
from casckpt.history.transactions import begin, revoke
from casckpt.repository.processes import this_process
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc import recovery
from casckpt.upkeep.gc.recovery import drop_logs
from casckpt.upkeep.repair.verify import verify
from tests.support.announced import announcements, untold
from tests.support.dying import Deadly, Killed
from tests.support.faulty import Call, FaultyStore, call_first
from tests.support.gcs import begin_elsewhere, collect, keys
from tests.support.repositories import (
    START,
    Ticks,
    again,
    commit_bare,
    committed,
    half_rewrite,
    memory,
    objects_of,
    repository,
    rewrite_bare,
    save,
)

A_DAY = 24 * 3600
RUN = run_hash("run")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of a few logs, because each log takes time."""
    monkeypatch.setattr(recovery, "FEWEST", 3)
    monkeypatch.setattr(recovery, "_AT_ONCE", 4)


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return repository(tmp_path, FaultyStore(memory()), clock=Ticks())


def sleep(repo: Repository, days: float = 31) -> None:
    assert isinstance(repo.clock, Ticks)
    repo.clock.advance(days * A_DAY)


def short_lived(repo: Repository, count: int = 3, first: int = 0) -> list[Commit]:
    """Return commits that were purged, and whose objects a gc has deleted. A later one is live."""
    every = [save(repo, step=step, texts=[f"of {step}"]) for step in range(first, first + count + 1)]
    for commit in every[:-1]:
        commits.forget(repo, commit)
    collect(repo)
    return [list_commits(repo).commits[commit.txid] for commit in every[:-1]]


def left(repo: Repository) -> set[TxId]:
    """Return the transactions that have a record in commits/."""
    return {txid for txid, _ in commits.list_names(repo)}


def over(repo: Repository) -> set[TxId]:
    return set(list_commits(repo.fresh()).over)


def test_gc_deletes_logs_that_have_been_over_for_a_month(repo: Repository) -> None:
    gone = short_lived(repo)
    (live,) = list_commits(repo).live()
    sleep(repo, 29)
    collect(repo)
    assert not over(repo)
    sleep(repo, 2)
    collect(repo)
    assert over(repo) == {one.txid for one in gone}
    assert keys(repo, "commits/") == {commit_key(live.txid), ended_key(0)}
    assert list_commits(repo).live() == [live]
    assert not verify(repo).records
    before = keys(repo, "")
    collect(repo)
    assert all(key.startswith("ran/") for key in keys(repo, "") ^ before)


def test_gc_leaves_a_few_logs(repo: Repository) -> None:
    short_lived(repo, 2)
    sleep(repo)
    collect(repo)
    assert not over(repo)


def test_lists_are_of_a_limited_length(repo: Repository) -> None:
    gone = short_lived(repo, 6)
    sleep(repo)
    collect(repo)
    assert keys(repo, "commits/ended/") == {ended_key(0), ended_key(1)}
    assert over(repo) == {one.txid for one in gone}


def test_logs_of_revoked_and_rewritten_checkpoints_are_deleted(repo: Repository) -> None:
    for step in range(2):
        begin(repo, "run", step).abort("for a test")
    rewritten = rewrite_bare(repo, save(repo, step=3, texts=["of 3"]))
    failed = half_rewrite(repo, rewritten)
    save(repo, step=4)
    commits.forget(repo, rewritten)
    collect(repo, revoke_after=0)
    assert failed.by in left(repo)
    sleep(repo)
    collect(repo)
    listed = list_commits(repo)
    assert len(listed.over) == 4
    assert listed.over[rewritten.txid].places == [rewritten.places.txid]
    assert not listed.over[failed.by].was_whole
    assert len(left(repo)) == 1
    assert not keys(repo, "transactions/")


def an_open_save(repo: Repository, one: Commit) -> None:
    begin_elsewhere(repo, one.run, one.step)


def a_blob(repo: Repository, one: Commit) -> None:
    repo.storage.put(f"objects/{one.txid}/foreign", b"x")


def a_signature(repo: Repository, one: Commit) -> None:
    repo.storage.put(signature_key(one.id, one.id), b"x")


def a_late_purge(repo: Repository, one: Commit) -> None:
    drop_record(repo, one, one.number)
    commits.purge(repo, next(c for c in list_commits(repo.fresh()).live() if c.txid == one.txid))


def drop_record(repo: Repository, one: Commit, number: int) -> None:
    repo.storage.delete(commit_key(one.txid, number))
    repo.forget_all(keep_marker=True)


@pytest.mark.parametrize("obstacle", [an_open_save, a_blob, a_signature, a_late_purge])
def test_a_log_that_something_may_still_need_stays(
    repo: Repository, obstacle: Callable[[Repository, Commit], None]
) -> None:
    gone = short_lived(repo, 4)
    sleep(repo)
    obstacle(repo, gone[1])
    drop_logs(repo, list_commits(repo))
    assert over(repo) == {one.txid for one in gone} - {gone[1].txid}


def test_a_log_stays_while_a_folder_of_its_places_is_left(repo: Repository) -> None:
    rewritten = rewrite_bare(repo, save(repo, step=9, texts=["of 9"]))
    commits.forget(repo, rewritten)
    gone = short_lived(repo, 3, first=10)
    sleep(repo)
    repo.storage.put(f"objects/{rewritten.places.txid}/foreign", b"x")
    collect(repo)
    assert over(repo) == {one.txid for one in gone}


def test_a_list_is_durable_before_another_gc_deletes_records(repo: Repository) -> None:
    """The gc that created it may have died."""
    gone = short_lived(repo)[0]
    records = objects_of(repo.storage)
    sleep(repo)
    collect(repo)
    repo.storage.put(commit_key(gone.txid), records[commit_key(gone.txid)])
    storage = repo.storage
    assert isinstance(storage, FaultyStore)
    storage.calls.clear()
    collect(repo)
    calls = [(call.method, call.key) for call in storage.calls]
    assert calls.index(("settle", "commits/ended")) < calls.index(("delete", commit_key(gone.txid)))


def test_a_log_of_the_future_stays(repo: Repository) -> None:
    """Readers rely on the age in the name."""
    gone = short_lived(repo, 3)
    late = repo.new_txid("run", 7, after=[repo.new_txid("run", 7)])
    fast = repository(
        Path(repo.cache_dir or "") / "fast", repo.storage, clock=Ticks(START + 40 * A_DAY * 10**6), seed=5
    )
    ahead = fast.new_txid("run", 8)
    for txid in (late, ahead):
        revoke(repo, txid, "for a test")
    save(fast, step=9)
    sleep(repo)
    collect(repo)
    assert over(repo) == {one.txid for one in gone} | {late}


def test_the_newest_log_of_a_run_stays(repo: Repository) -> None:
    """So later saves sort after it."""
    every = [save(repo, step=step) for step in range(4)]
    for commit in every:
        commits.forget(repo, commit)
    collect(repo)
    sleep(repo)
    collect(repo)
    assert left(repo) == {every[-1].txid}


# records that remain


@pytest.mark.parametrize("numbers", [[0], [1, 2], [0, 1, 2], [3]])
def test_gc_deletes_records_of_logs_that_are_over(repo: Repository, numbers: list[int]) -> None:
    gone = short_lived(repo)[0]
    records = objects_of(repo.storage)
    sleep(repo)
    collect(repo)
    for number in numbers:
        repo.storage.put(commit_key(gone.txid, number), records[commit_key(gone.txid, number % 3)])
    collect(repo)
    assert gone.txid not in left(repo)


def test_gc_deletes_what_a_save_that_slept_leaves(repo: Repository) -> None:
    gone = short_lived(repo)[0]
    before = objects_of(repo.storage)
    sleep(repo)
    collect(repo)
    there = keys(repo, "")
    repo.storage.put(f"objects/{gone.txid}/{gone.id}.manifest", b"x")
    repo.storage.put(commit_key(gone.txid), before[commit_key(gone.txid)])
    assert not verify(repo).records
    collect(repo)
    assert keys(repo, "commits/") | keys(repo, "objects/") <= there


def test_gc_deletes_the_files_of_a_copier_that_slept(repo: Repository) -> None:
    gone = short_lived(repo)[0]
    sleep(repo)
    collect(repo)
    began = Began(txid=gone.txid, run=gone.run, step=gone.step, time=repo.clock(), process=this_process())
    repo.put_record(transaction_key(gone.txid), began)
    collect(repo)
    assert not keys(repo, "transactions/")


# announcements


def test_the_oldest_announcements_of_a_run_are_deleted(tmp_path: Path, repo: Repository) -> None:
    host = partial(repository, storage=repo.storage, clock=repo.clock)
    before = host(tmp_path / "before", seed=2)
    short_lived(repo, 5)
    assert newest(before, "run", is_visible) is not None
    partly = host(tmp_path / "partly", seed=3)
    read_back(partly, RUN, look(partly, RUN).head - 2)
    (live,) = list_commits(repo).live()
    low = min(number for number, some in announcements(repo) if (live.txid, 0) in some)
    sleep(repo)
    collect(repo)
    assert [number for number, _ in announcements(repo)] == [low]
    assert not untold(repo)
    last = save(repo, step=9)
    for one in (repo, before, partly, repo.fresh(), host(tmp_path / "new", seed=4)):
        known = look(one, RUN)
        assert known is read_back(one, RUN)
        assert not known.unreadable
        assert newest(one, "run", is_visible) == last
        assert newest(one, "run", lambda commit: commit.live and commit.step == 99) is None
    assert not verify(repo).records
    collect(repo)
    assert [number for number, _ in announcements(repo)] == [low, low + 1]


def test_a_host_asks_for_deleted_announcements_only_once(tmp_path: Path, repo: Repository) -> None:
    short_lived(repo, 8)
    partly = repository(tmp_path / "partly", repo.storage, clock=repo.clock, seed=3)
    look(partly, RUN)
    read_back(partly, RUN, 7)
    sleep(repo)
    collect(repo)
    storage = repo.storage
    assert isinstance(storage, FaultyStore)
    counts = []
    for _ in range(2):
        storage.calls.clear()
        again_there = partly.fresh()
        look(again_there, RUN)
        read_back(again_there, RUN)
        counts.append(len(storage.calls))
    assert counts[1] <= 4 < counts[0] < 8


def test_the_newest_announcement_stays(repo: Repository) -> None:
    """Otherwise, its number would be used twice."""
    gone = purged_all(repo)
    write_list(repo, {one.txid: line_of(one) for one in gone})  # an earlier version erased the run
    collect(repo)
    assert len(announcements(repo, RUN)) == 4, "a save that began before may be about to use the next number"
    sleep(repo)
    collect(repo)
    ((number, _),) = announcements(repo, RUN)
    one = commit_bare(repo, step=9)
    assert announcements(repo, RUN)[-1] == (number + 1, [(one.txid, 0)])
    assert newest(repo.fresh(), "run", is_visible) == one


def host(repo: Repository, folder: Path) -> Repository:
    return repository(folder, repo.storage, clock=repo.clock, seed=9)


def all_but_the_last_deleted(repo: Repository) -> Commit:
    """Save and purge some checkpoints. After a month, gc deletes their announcements. Return one that is live."""
    short_lived(repo, 4, first=1)
    sleep(repo)
    collect(repo)
    assert len(announcements(repo)) == 1
    (live,) = list_commits(repo).live()
    return live


def test_a_host_whose_announcements_are_all_deleted_reads_on(
    tmp_path: Path, repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    slept, old = host(repo, tmp_path / "slept"), repo.new_txid("run", 7)
    commits.forget(repo, save(repo, step=0))
    seen = Watcher(slept, "run", latest_only=False)
    known = look(slept, RUN)
    live = all_but_the_last_deleted(repo)
    copy = commit_bare(repo, step=7, txid=old)
    told = list(watch(seen, poll=1, timeout=40, sleep=lambda _: None, now=iter(range(10**6)).__next__))
    assert [(one.commit.txid, one.late) for one in told] == [(live.txid, False), (copy.txid, True)]
    assert look(slept, RUN) is known
    assert newest(slept, "run", is_visible) == live
    assert not caplog.records


def test_a_watch_behind_a_checkpoint_whose_log_is_deleted_yields_old_copies_too(
    tmp_path: Path, repo: Repository
) -> None:
    old, first = repo.new_txid("run", 7), save(repo, step=0)
    commits.forget(repo, first)
    live = all_but_the_last_deleted(repo)
    copy = commit_bare(repo, step=7, txid=old)
    seen = Watcher(host(repo, tmp_path / "new"), "run", first, latest_only=False)
    assert [one and one.commit.txid for one in (seen.next(), seen.next(), seen.next())] == [live.txid, copy.txid, None]


def test_announcements_that_are_deleted_during_a_look_are_noticed(tmp_path: Path, repo: Repository) -> None:
    """The last announcement that the host has read still exists when it looks for the next one."""
    slept = host(repo, tmp_path / "slept")
    commits.forget(repo, save(repo, step=0))
    look(slept, RUN)
    short_lived(repo, 4, first=1)
    sleep(repo)
    storage = repo.storage
    assert isinstance(storage, FaultyStore)

    def delete(_: Call) -> None:
        collect(repo)

    storage.inject(call_first("get", delete, key=announcement_key(RUN, 1)))
    assert newest(slept, "run", is_visible) == list_commits(repo).live()[0]


def test_announcements_are_deleted_one_by_one(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, a host that has read one of them would take it for the newest, because the next one is missing."""
    storage, left = repo.storage, []
    assert isinstance(storage, FaultyStore)
    traits = replace(storage.traits, parallel=4)
    monkeypatch.setattr(FaultyStore, "traits", property(lambda _: traits))

    def wait(_: Call) -> None:
        time.sleep(0.05)
        left.append([number for number, _ in announcements(repo)])

    storage.inject(call_first("delete", wait, key="runs/*", times=3))
    all_but_the_last_deleted(repo)
    assert left == [list(range(first, 5)) for first in range(3)]


def test_a_save_that_slept_uses_no_number_that_was_deleted(tmp_path: Path, repo: Repository) -> None:
    slept = host(repo, tmp_path / "slept")
    commits.forget(repo, save(repo, step=0))
    seen = look(slept, RUN).head
    all_but_the_last_deleted(repo)
    ((number, _),) = announcements(repo)
    one = committed(slept, step=9)
    commits.commit(slept, one, seen=seen)
    assert announcements(repo)[-1] == (number + 1, [(one.txid, 0)])
    found = newest(repo.fresh(), "run", is_visible)
    assert found is not None
    assert found.txid == one.txid


def test_an_announcement_that_cannot_be_read_stays(tmp_path: Path, repo: Repository) -> None:
    """It may name a save in progress."""
    save(repo, step=0)
    key = announcement_key(RUN, 0)
    repo.storage.delete(key)
    repo.storage.put(key, b"torn")
    sleep(repo)
    save(repo, step=1)
    collect(host(repo, tmp_path / "new"))
    assert key in keys(repo, "runs/")


def purged_all(repo: Repository) -> list[Commit]:
    every = [commit_bare(repo, step=step) for step in range(4)]
    return [commits.purge(repo, commits.forget(repo, one)) for one in every]


def test_an_announced_number_of_a_deleted_log_stays_free(repo: Repository) -> None:
    gone = short_lived(repo)
    announce(repo, [(gone[0].txid, 9)])
    sleep(repo)
    collect(repo, revoke_after=0)
    collect(repo, revoke_after=0)
    assert not left(repo) & {one.txid for one in gone}


# a gc that is killed


def folding(repo: Repository) -> None:
    collect(repo, revoke_after=0)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(4))
def test_a_gc_killed_at_any_call_leaves_what_the_next_one_completes(tmp_path: Path, part: int, full: bool) -> None:
    first = repository(tmp_path / "first", clock=Ticks())
    gone, base = short_lived(first, 5), rewrite_bare(first, save(first, step=8))
    live = {one.txid: one.last for one in list_commits(first).live()}
    objects, now = objects_of(first.storage), START + 31 * A_DAY * 10**6
    whole = Deadly(again(objects))
    folding(repository(tmp_path / "whole", whole, clock=Ticks(now)))
    for at in range(1 + part, whole.steps + 1, 4 if full else 12):
        storage, cache = Deadly(again(objects), at), tmp_path / f"{at}"
        with pytest.raises(Killed):
            folding(repository(cache, storage, clock=Ticks(now)))
        for host in (cache, tmp_path / f"{at} other"):
            reader = repository(host, storage.inner, seed=2, clock=Ticks(now + 10**9))
            listed = list_commits(reader)
            assert {one.txid: one.last for one in listed.live()} == live
            assert not listed.damaged
            last = newest(reader, "run", is_visible)
            assert last is not None
            assert last.txid == base.txid
            for commit in gone:
                found = read_log(reader, commit.txid)
                assert found is not None
                assert not found.live
        after = repository(tmp_path / f"{at} after", storage.inner, seed=3, clock=Ticks(now + 10**9))
        folding(after)
        folding(after)
        some = over(after)
        assert some <= {one.txid for one in gone}
        assert left(after) == {*live, *(one.txid for one in gone)} - some
        assert len(some) > len(gone) - recovery.FEWEST
        assert untold(after) == []
        numbers = [number for number, _ in announcements(after, RUN)]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert not verify(after).records
