"""Saves in progress: their files, their signs of life, and which process is provably dead."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from casckpt.errors import Conflict, Revoked, StorageError
from casckpt.format.keys import commit_key, transaction_key
from casckpt.format.names import ManifestId
from casckpt.format.records import Process, RevokedRecord
from casckpt.history.commits import commit, list_commits, list_names
from casckpt.history.transactions import (
    Transaction,
    begin,
    open_transactions,
    remove_closed,
    revoke,
)
from casckpt.repository import processes
from casckpt.repository.processes import is_dead, this_process
from casckpt.repository.repository import Repository
from tests.support.faulty import FaultyStore, call_first, fail_after, fail_before
from tests.support.repositories import committed

NEVER = 1e6  # seconds between signs of life, for tests that want none


def changed(process: Process, **fields: object) -> Process:
    return Process(**{name: getattr(process, name) for name in process.__struct_fields__} | fields)


@pytest.fixture
def transaction(repo: Repository) -> Iterator[Transaction]:
    one = begin(repo, "a", 1, seconds=NEVER)
    yield one
    one.abort("the test ended")


def files(repo: Repository) -> list[str]:
    return sorted(entry.key for entry in repo.storage.list("transactions/"))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("casckpt-alive")]


def test_where_no_thread_can_be_started_there_are_no_signs(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while the interpreter ends, from Python 3.12 on."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    begin(repo, "a", 1).abort("done")
    assert files(repo) == []


def test_what_has_begun_is_open_and_tells_who_runs_it(repo: Repository, transaction: Transaction) -> None:
    (found,) = open_transactions(repo, set())
    assert (found.txid, found.signs) == (transaction.txid, 0)
    assert found.began == transaction.began
    assert found.began is not None
    assert (found.began.run, found.began.step, found.began.process) == ("a", 1, this_process())
    assert files(repo) == [transaction_key(transaction.txid)]


def test_the_file_goes_after_the_record(repo: Repository, transaction: Transaction) -> None:
    with pytest.raises(Conflict, match="still open"):
        transaction.close()
    assert files(repo)
    commit(repo, committed(repo, "a", 1, txid=transaction.txid))
    assert open_transactions(repo, list_names(repo)) == []
    transaction.close()
    assert files(repo) == []
    assert threads() == []


def test_an_abort_revokes(repo: Repository) -> None:
    one = begin(repo, "a", 1, seconds=NEVER)
    assert one.abort("out of memory")
    first = list_commits(repo).commits[one.txid].first
    assert isinstance(first, RevokedRecord)
    assert first.reason == "out of memory"
    assert (files(repo), threads()) == ([], [])


def test_an_abort_after_a_gc_was_faster_is_an_abort(repo: Repository) -> None:
    one = begin(repo, "a", 1, seconds=NEVER)
    assert revoke(repo, one.txid, "no sign of life")
    assert one.abort("error")
    assert files(repo) == []


def test_an_abort_of_what_was_committed_after_all_says_so(repo: Repository) -> None:
    one = begin(repo, "a", 1, seconds=NEVER)
    commit(repo, committed(repo, "a", 1, txid=one.txid))
    assert not one.abort("the answer got lost")
    assert list_commits(repo).commits[one.txid].visible
    assert files(repo) == []


def test_an_abort_never_hides_the_error_before_it(
    repo: Repository, faults: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    one = begin(repo, "a", 1, seconds=NEVER)
    faults.inject(fail_before("put"))
    with caplog.at_level(logging.WARNING):
        assert not one.abort("x")
    assert "a later gc revokes it" in caplog.text
    assert [found.txid for found in open_transactions(repo, list_names(repo))] == [one.txid]
    assert threads() == []


def test_a_begin_that_failed_leaves_no_thread(repo: Repository, faults: FaultyStore) -> None:
    faults.inject(fail_before("put"))
    with pytest.raises(StorageError):
        begin(repo, "a", 1, seconds=0)
    assert (files(repo), threads()) == ([], [])


def test_a_begin_whose_answer_got_lost_has_begun(repo: Repository, faults: FaultyStore) -> None:
    faults.inject(fail_after("put"))
    one = begin(repo, "a", 1, seconds=NEVER)
    assert files(repo) == [transaction_key(one.txid)]
    one.abort("x")


def test_a_commit_ends_the_transaction(repo: Repository) -> None:
    one = begin(repo, "a", 1, seconds=NEVER)
    made = one.commit(committed(repo, "a", 1, txid=one.txid))
    assert list_commits(repo).visible() == [made]
    assert (files(repo), threads()) == ([], [])
    assert not one.abort("an error behind it")
    assert list_commits(repo).visible() == [made]


def test_a_commit_of_the_same_checkpoint_by_another_process_counts(repo: Repository) -> None:
    one = begin(repo, "a", 1, seconds=NEVER)
    first = committed(repo, "a", 1, txid=one.txid)
    commit(repo, first)
    assert one.commit(committed(repo, "a", 1, txid=one.txid, manifest=first.manifest)).committed == first
    assert files(repo) == []
    with pytest.raises(Revoked, match="ended otherwise"):
        one.commit(committed(repo, "a", 1, txid=one.txid, manifest=ManifestId("0" * 64)))


def test_a_commit_without_an_answer_is_found_or_revoked(repo: Repository, faults: FaultyStore) -> None:
    for fault, last in ((fail_after, "committed"), (fail_before, "revoked")):
        one = begin(repo, "a", 1, seconds=NEVER)
        faults.inject(fault("put", key="commits/*"), fail_before("get", key="commits/*"))
        try:
            assert one.commit(committed(repo, "a", 1, txid=one.txid)).last == last
        except StorageError:
            assert last == "revoked"
        faults.heal()
        assert list_commits(repo).commits[one.txid].last == last
        assert files(repo) == []


def test_files_that_may_not_be_deleted_are_left(repo: Repository, faults: FaultyStore) -> None:
    one = begin(repo, "a", 1, seconds=NEVER)
    commit(repo, committed(repo, "a", 1, txid=one.txid))
    faults.inject(fail_before("delete", times=99))
    one.close()
    assert files(repo) == [transaction_key(one.txid)]
    faults.heal()
    assert remove_closed(repo, list_names(repo)) == 1
    assert files(repo) == []


def test_close_leaves_the_files_if_the_storage_fails(repo: Repository, faults: FaultyStore) -> None:
    one = begin(repo, "a", 1, seconds=NEVER)
    commit(repo, committed(repo, "a", 1, txid=one.txid))
    faults.inject(fail_before("size"))
    one.close()  # the save is done; nothing is raised
    assert (files(repo), threads()) == ([transaction_key(one.txid)], [])


def test_signs_of_life_are_numbered_and_removed(repo: Repository, faults: FaultyStore) -> None:
    third = threading.Event()
    faults.inject(call_first("put", lambda _: third.set(), key="transactions/*.3"))
    one = begin(repo, "a", 1, seconds=0.001)
    assert third.wait(60)
    (found,) = open_transactions(repo, set())
    assert found.signs >= 2
    commit(repo, committed(repo, "a", 1, txid=one.txid))
    one.close()
    assert (files(repo), threads()) == ([], [])


def test_a_failed_sign_of_life_is_logged_and_the_next_one_follows(
    repo: Repository, faults: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    third = threading.Event()
    faults.inject(
        fail_before("put", key="transactions/*.1"),
        fail_after("put", key="transactions/*.2"),
        call_first("put", lambda _: third.set(), key="transactions/*.4"),
    )
    with caplog.at_level(logging.WARNING):
        one = begin(repo, "a", 1, seconds=0.001)
        assert third.wait(60)
        keys = files(repo)
        one.abort("x")
    assert transaction_key(one.txid, 1) not in keys
    assert {transaction_key(one.txid, 2), transaction_key(one.txid, 3)} <= set(keys)
    assert caplog.text.count("was not written") == 1
    assert files(repo) == []


def test_a_garbage_collected_transaction_gives_no_more_signs(repo: Repository) -> None:
    begin(repo, "a", 1, seconds=NEVER)
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("casckpt-alive"):
            thread.join(60)
    assert threads() == []
    assert len(open_transactions(repo, set())) == 1


def test_a_forked_child_gives_no_signs(repo: Repository) -> None:
    one = begin(repo, "a", 1, seconds=NEVER)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        theirs.send(threads())
        one.close()  # with its record it could; it must not hang on a thread that is not there
        theirs.send("closed")

    commit(repo, committed(repo, "a", 1, txid=one.txid))
    process = context.Process(target=child)
    process.start()
    assert ours.poll(60)
    assert ours.recv() == []
    assert ours.poll(60)
    assert ours.recv() == "closed"
    process.join(60)
    assert process.exitcode == 0
    one.close()


def test_open_ones_are_those_without_a_record(repo: Repository) -> None:
    made = [begin(repo, "a", step, seconds=NEVER) for step in range(3)]
    revoke(repo, made[1].txid, "x")
    found = open_transactions(repo, list_names(repo))
    assert [one.txid for one in found] == [made[0].txid, made[2].txid]
    assert remove_closed(repo, list_names(repo)) == 1
    assert files(repo) == [transaction_key(made[0].txid), transaction_key(made[2].txid)]
    for one in made:
        one.abort("x")


@pytest.mark.parametrize("data", [b"", b"{}\n", b"torn"])
def test_an_unreadable_transaction_is_open_all_the_same(repo: Repository, data: bytes) -> None:
    txid = repo.new_txid("a", 1)
    repo.storage.put(transaction_key(txid), data)
    repo.storage.put("transactions/README", b"x")
    (found,) = open_transactions(repo, set())
    assert (found.txid, found.began, found.signs) == (txid, None, 0)


def test_a_transaction_of_which_signs_alone_are_left_is_open(repo: Repository) -> None:
    txid = repo.new_txid("a", 1)
    for number in (9, 10):
        repo.storage.put(transaction_key(txid, number), b"x")
    (found,) = open_transactions(repo, set())
    assert (found.txid, found.began, found.signs) == (txid, None, 10)


def test_a_long_reason_is_cut(repo: Repository) -> None:
    txid = repo.new_txid("a", 1)
    assert revoke(repo, txid, "x" * 10_000_000)
    assert repo.storage.size(commit_key(txid)) is not None
    assert list_names(repo) == {txid}


# ---- who is dead


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    code = (
        "from casckpt.repository.processes import this_process as p; from casckpt.format.records import encode;"
        "print(encode(p()).decode().splitlines()[0], flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def identity(child: subprocess.Popen[bytes]) -> Process:
    import msgspec

    assert child.stdout is not None
    return msgspec.json.decode(child.stdout.readline(), type=Process)


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@needs_proc
def test_a_process_is_dead_once_it_was_killed(child: subprocess.Popen[bytes]) -> None:
    process = identity(child)
    assert process.pid == child.pid
    assert not is_dead(process)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it ended, and is a zombie
    assert is_dead(process)
    child.wait()
    assert is_dead(process)


@needs_proc
def test_this_process_lives() -> None:
    me = this_process()
    assert me.pid == os.getpid()
    assert me.started > 0
    assert me.boot_id
    assert me.pid_namespace
    assert not is_dead(me)


@needs_proc
def test_a_number_that_was_given_to_another_process_proves_death() -> None:
    me = this_process()
    assert is_dead(changed(me, started=me.started - 1))


@needs_proc
@pytest.mark.parametrize(
    "fields",
    [
        {"boot_id": "another boot, maybe another host"},
        {"boot_id": ""},
        {"pid_namespace": "pid:[1]"},
        {"pid_namespace": ""},
        {"started": 0},
        {"started": -5},
        {"pid": 0},
        {"pid": -1},
        {"pid": 1 << 40},
    ],
)
def test_where_there_is_doubt_nobody_is_dead(child: subprocess.Popen[bytes], fields: dict[str, object]) -> None:
    process = identity(child)
    child.kill()
    child.wait()
    assert is_dead(process)
    assert not is_dead(changed(process, **fields))


def test_without_proc_nobody_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = this_process()
    monkeypatch.setattr(processes, "PROC", tmp_path)
    me = this_process()
    assert (me.boot_id, me.pid_namespace, me.started) == ("", "", 0)
    assert me.pid == os.getpid()
    assert not is_dead(me)
    assert not is_dead(before)


@needs_proc
def test_a_process_that_proc_hides_is_not_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = this_process()
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text(me.boot_id)
    (tmp_path / "self").symlink_to("/proc/self")  # as with hidepid=2: only some entries are shown
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert this_process().boot_id == me.boot_id
    assert not is_dead(me)


@needs_proc
@pytest.mark.parametrize(("state", "alive", "dead"), [("S", 1, False), ("Z", 1, True), ("Z", 2, False), ("X", 0, True)])
def test_names_hold_anything_and_leaders_end_before_their_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, alive: int, dead: bool
) -> None:
    me = this_process()
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text(me.boot_id)
    (tmp_path / "self").symlink_to("/proc/self")
    (tmp_path / str(me.pid)).mkdir()
    fields = [state, *["0"] * 16, str(alive), "0", str(me.started), "0"]
    (tmp_path / str(me.pid) / "stat").write_text(f"{me.pid} (a) Z 1 ) 2) {' '.join(fields)}\n")
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert is_dead(me) is dead
