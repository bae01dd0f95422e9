"""Announcements: each record is announced before it exists, numbers have no gaps, and followers miss no record."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from casckpt.base.names import run_hash
from casckpt.errors import Refused, StorageError
from casckpt.format.keys import announcement_key, commit_key, parse_log
from casckpt.format.names import TxId
from casckpt.history import commits
from casckpt.history.announcements import announce, fill, look, read_back, runs
from casckpt.history.commits import forget, purge, restore
from casckpt.repository.caches import RunCache
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from tests.support.announced import announcements
from tests.support.faulty import Call, FaultyStore, call_first, fail_after, fail_before, look_on
from tests.support.repositories import commit_bare, committed, meanwhile, memory, repository

RUN = run_hash("run")


def told(repo: Repository, run: str = RUN) -> list[tuple[int, list[tuple[str, int]]]]:
    """Return (number, announced records) of each announcement of a run."""
    return announcements(repo, run)


def faulty(tmp_path: Path, seed: int = 1) -> tuple[Repository, FaultyStore]:
    storage = FaultyStore(memory())
    return repository(tmp_path, storage, seed=seed), storage


def test_each_commit_and_restore_is_announced_before_it_exists(tmp_path: Path) -> None:
    repo, storage = faulty(tmp_path)
    created = []

    def look_behind(call: Call) -> None:
        name = parse_log(call.key)
        assert name is not None
        created.append(name)
        if name[1] in (0, 2):
            assert name in {one for _, some in told(repo) for one in some}

    storage.inject(look_on("put", look_behind, key="commits/*", times=100))
    one = commit_bare(repo)
    purge(repo, forget(repo, restore(repo, forget(repo, one))))
    other = commit_bare(repo, step=1)
    commits.purge_unreadable(repo, other.txid)
    assert [number for _, number in created] == [0, 1, 2, 3, 4, 0, 1]
    announced = [name for name in created if name[1] in (0, 2)]
    assert told(repo) == [(n, [name]) for n, name in enumerate(announced)]


def test_a_revocation_is_not_announced(tmp_path: Path) -> None:
    from casckpt.history.transactions import revoke

    repo, _ = faulty(tmp_path)
    revoke(repo, repo.new_txid("run", 0), "given up")
    assert runs(repo) == []


def test_announcements_of_different_runs_are_separate(tmp_path: Path) -> None:
    repo, _ = faulty(tmp_path)
    for run in ("a", "b", "a"):
        commit_bare(repo, run)
    assert runs(repo) == sorted(map(run_hash, "ab"))
    assert [number for number, _ in told(repo, run_hash("a"))] == [0, 1]
    assert [number for number, _ in told(repo, run_hash("b"))] == [0]


def test_a_failed_announcement_does_not_leave_a_gap_in_the_numbers(tmp_path: Path) -> None:
    repo, storage = faulty(tmp_path)
    commit_bare(repo)
    storage.inject(fail_before("put", key="runs/*"))
    with pytest.raises(StorageError):
        commit_bare(repo, step=1)
    assert storage.count("put", "commits/*") == 1
    commit_bare(repo, step=2)
    assert [number for number, _ in told(repo)] == [0, 1]


def test_a_process_recognizes_its_own_announcement_if_the_response_was_lost(tmp_path: Path) -> None:
    repo, storage = faulty(tmp_path)
    storage.inject(fail_after("put", key="runs/*"))
    commit_bare(repo)
    assert [number for number, _ in told(repo)] == [0]


def test_a_late_put_and_its_retry_have_different_numbers(tmp_path: Path) -> None:
    """The delayed put arrives after its writer has read that the number is still free."""
    repo, storage = faulty(tmp_path)
    other = repository(tmp_path / "other", storage.inner, seed=2)
    storage.inject(call_first("put", meanwhile(lambda: commit_bare(other, step=7)), key="runs/*"))
    commit_bare(repo)
    assert [number for number, _ in told(repo)] == [0, 1]
    assert len(look_at(repo).announced) == 2


@pytest.mark.parametrize("folder", ["runs", f"runs/{RUN}", announcement_key(RUN, 0).rpartition("/")[0]])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_file_in_place_of_an_announcement_folder_is_an_error(tmp_path: Path, folder: str, is_known: bool) -> None:
    """Otherwise, every number after the head would seem to be in use, and none of them could be read."""
    storage = LocalStore(tmp_path / "store")
    repo = repository(tmp_path / "host", storage)
    commit_bare(repo)
    (storage.path / folder).rename(tmp_path / "away")
    (storage.path / folder).touch()
    if not is_known:
        repo = repository(tmp_path / "other", storage, seed=2)
    with pytest.raises(Refused, match=f"{folder} is a(| file| n object) where a folder"):
        commit_bare(repo, step=1)


def look_at(repo: Repository, run: str = RUN) -> RunCache:
    look(repo, run)
    return read_back(repo, run)


def test_several_processes_share_one_announcement_of_a_record(tmp_path: Path) -> None:
    repo, storage = faulty(tmp_path)
    other = repository(tmp_path / "other", storage.inner, seed=2)
    record = committed(repo)
    mine = [(record.txid, 0)]
    look(repo, RUN)
    announce(other, mine)
    announce(repo, mine, seen=-1)
    announce(repo, mine)
    assert len(told(repo)) == 1
    assert look_at(repo).announced == {record.txid: 0}


def test_a_process_that_finds_a_log_number_in_use_announces_the_next(tmp_path: Path) -> None:
    """A gc has used the number because it considered the process dead."""
    repo, storage = faulty(tmp_path)
    one = forget(repo, commit_bare(repo))
    storage.inject(
        call_first("put", meanwhile(lambda: commits.keep(repo, one.txid, 2)), key=f"{commit_key(one.txid)}.2")
    )
    now = restore(repo, one)
    assert (now.last, now.number) == ("restored", 3)
    assert [some for _, some in told(repo)][1:] == [[(one.txid, 2)], [(one.txid, 3)]]
    assert commits.read_log(repo, one.txid) == now
    assert commits.list_commits(repo).commits[one.txid] == now


def test_a_kept_log_number_is_not_announced(tmp_path: Path) -> None:
    repo, _ = faulty(tmp_path)
    one = commit_bare(repo)
    assert commits.keep(repo, one.txid, 1)
    assert not commits.keep(repo, one.txid, 1)
    now = commits.refresh(repo, one)
    assert (now.last, now.number, now.changed_at) == ("committed", 1, one.changed_at)
    assert commits.list_commits(repo).commits[one.txid] == now == commits.read_log(repo, one.txid)
    gone = purge(repo, forget(repo, now))
    assert (gone.last, gone.number) == ("purged", 3)


def test_announcements_that_are_only_partly_cached_are_read_again(tmp_path: Path) -> None:
    """A fork or an interrupt may happen in the middle of a read."""
    repo, _ = faulty(tmp_path)
    one = commit_bare(repo)

    class Cut(dict[TxId, int]):
        def __setitem__(self, key: TxId, value: int) -> None:
            raise KeyboardInterrupt

    known = repo.runs[RUN]
    known.announced = Cut(known.announced)
    with pytest.raises(KeyboardInterrupt):
        commit_bare(repo, step=1)
    known.announced = dict(known.announced)
    ((txid, _),) = told(repo)[1][1]
    assert look_at(repo).announced == {one.txid: 0, txid: 0}
    assert len(told(repo)) == 2


def test_threads_that_read_a_run_concurrently_get_the_same_result(tmp_path: Path) -> None:
    repo, _ = faulty(tmp_path)
    for run in range(200):
        with ThreadPoolExecutor(4) as pool:
            assert len({id(one) for one in pool.map(lambda _, run=run: repo.runs[str(run)], range(4))}) == 1


def test_many_records_can_share_an_announcement(tmp_path: Path) -> None:
    repo, _ = faulty(tmp_path)
    txids = [repo.new_txid("run", step) for step in range(2500)]
    announce(repo, [(txid, 0) for txid in txids])
    assert [len(some) for _, some in told(repo)] == [1000, 1000, 500]


def asked(storage: FaultyStore, call: Callable[[], object]) -> list[tuple[str, str]]:
    before = len(storage.calls)
    call()
    return [(one.method, one.key) for one in storage.calls[before:]]


def test_a_reader_of_a_known_run_requests_only_the_next_numbers(tmp_path: Path) -> None:
    repo, storage = faulty(tmp_path)
    for step in range(3):
        commit_bare(repo, step=step)
    at = [announcement_key(RUN, number) for number in range(6)]
    assert asked(storage, lambda: look(repo, RUN)) == [("get", at[2]), ("get", at[3])]
    other = repository(tmp_path / "other", storage.inner, seed=2)
    for step in range(3, 5):
        commit_bare(other, step=step)
    assert asked(storage, lambda: look(repo, RUN)) == [("get", key) for key in at[2:]]
    assert len(look_at(repo).announced) == 5


def test_a_reader_of_an_unknown_run_lists_two_folders(tmp_path: Path) -> None:
    repo, storage = faulty(tmp_path)
    for step in range(3):
        commit_bare(repo, step=step)
    host = repository(tmp_path / "new", storage, seed=2)
    found = asked(storage, lambda: look(host, RUN))
    assert [call for call in found if call[0] == "list"] == [("list", f"runs/{RUN}"), ("list", f"runs/{RUN}/999999")]
    assert all(call[0] == "list" or call[1] == "casckpt.json" for call in found)
    assert look(host, RUN).head == 2


def test_the_head_is_in_the_first_nonempty_folder(tmp_path: Path) -> None:
    repo, storage = faulty(tmp_path)
    for number in (0, 999, 1000, 1001):
        fill(repo, RUN, number)
    (tmp_path / "empty").mkdir()
    assert look(repository(tmp_path / "new", storage, seed=2), RUN).head == 1001


def test_processes_on_a_host_share_announcements_that_they_have_read(tmp_path: Path) -> None:
    repo, storage = faulty(tmp_path)
    for step in range(20):
        commit_bare(repo, step=step)
    again = repository(tmp_path, storage, seed=3)
    calls = asked(storage, lambda: look_at(again))
    assert [key for method, key in calls if method == "get" and key.startswith("runs/")] == [
        announcement_key(RUN, 19),
        announcement_key(RUN, 20),
    ]
    assert len(look_at(again).announced) == 20


def test_announced_records_that_do_not_exist_yet_are_read_later(tmp_path: Path) -> None:
    """This holds within one process, and after it ends."""
    from casckpt.history.following import is_visible, newest

    repo, storage = faulty(tmp_path)
    first, late = commit_bare(repo), committed(repo, step=1)
    announce(repo, [(late.txid, 0)])
    hosts = [repository(tmp_path / "host", storage.inner, seed=2), repository(tmp_path / "never", storage.inner)]
    for host in hosts:
        found = newest(host, "run", is_visible)
        assert found is not None
        assert found.txid == first.txid
    commits.commit(repo, late)
    commit_bare(repo, "another")
    for host in (*hosts, repository(tmp_path / "host", storage.inner, seed=4)):
        found = newest(host, "run", is_visible)
        assert found is not None
        assert found.txid == late.txid


def test_a_run_is_read_again_after_its_backup_was_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """This ensures that no number is put after a gap."""
    repo, storage = faulty(tmp_path)
    for step in range(3):
        commit_bare(repo, step=step)
    for number in (1, 2):
        storage.inner.delete(announcement_key(RUN, number))
    with caplog.at_level(logging.WARNING):
        assert look(repo, RUN).head == 0
    assert "restored from a copy" in caplog.text
    commit_bare(repo, step=3)
    assert [number for number, _ in told(repo)] == [0, 1]


def test_a_restored_and_changed_backup_is_reread(tmp_path: Path) -> None:
    repo, storage = faulty(tmp_path)
    one = commit_bare(repo)
    other = repository(tmp_path / "other", storage.inner, seed=2)
    storage.inner.delete(announcement_key(RUN, 0))
    storage.inner.delete(commit_key(one.txid))
    two = commit_bare(other, step=2)
    assert look_at(repo).announced == {two.txid: 0}


def test_the_number_of_an_unreadable_announcement_is_not_used_again(tmp_path: Path) -> None:
    repo, storage = faulty(tmp_path)
    one = commit_bare(repo)
    storage.inner.put(announcement_key(RUN, 1), b"torn")
    two = commit_bare(repo, step=1)
    assert list(look_at(repo).records) == [0, 1, 2]
    assert look_at(repo).unreadable == {1}
    assert look_at(repo).announced == {one.txid: 0, two.txid: 0}


def test_announcements_of_a_different_run_are_rejected(tmp_path: Path) -> None:
    repo, storage = faulty(tmp_path)
    commit_bare(repo, "another")
    data = storage.inner.get(announcement_key(run_hash("another"), 0), limit=1 << 20)
    storage.inner.put(announcement_key(RUN, 0), data)
    assert look_at(repo).unreadable == {0}
