"""Saves in progress: their files and their heartbeats."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from casckpt.errors import Conflict, Revoked, StorageError
from casckpt.format.keys import commit_key, transaction_key
from casckpt.format.names import ManifestId
from casckpt.format.records import Began, RevokedRecord, changed
from casckpt.history import transactions
from casckpt.history.commits import commit, forget, list_commits, list_names, purge
from casckpt.history.transactions import Transaction, begin, begin_save, closed_files, join, open_transactions, revoke
from casckpt.repository.processes import this_process
from casckpt.repository.repository import Repository
from tests.support.far import FarStore
from tests.support.faulty import Call, Fault, FaultyStore, call_first, fail_after, fail_before
from tests.support.gcs import keys, run_gc
from tests.support.repositories import (
    commit_bare,
    committed,
    manifest_id,
    meanwhile,
    memory,
    put_blob,
    repository,
    save,
    wait_for_clean_up,
)


@pytest.fixture
def transaction(repo: Repository) -> Iterator[Transaction]:
    one = begin(repo, "a", 1)
    yield one
    one.abort("the test ended")


def files(repo: Repository) -> list[str]:
    return sorted(entry.key for entry in repo.storage.list("transactions/"))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("casckpt-alive")]


def test_heartbeats_are_not_sent_if_no_thread_can_start(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on, no thread can start while the interpreter shuts down."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    begin(repo, "a", 1).abort("done")
    assert files(repo) == []


def test_a_save_does_not_reuse_a_checkpoint_purged_before_its_transaction_begins(
    repo: Repository, faults: FaultyStore
) -> None:
    """A gc that has not seen the transaction may delete the blobs of this checkpoint."""
    older, newest = commit_bare(repo, "a", 1), commit_bare(repo, "a", 2)
    faults.inject(call_first("put", meanwhile(lambda: purge(repo, forget(repo, newest))), key="transactions/*"))
    transaction, parent, _ = begin_save(repo, "a", 3)
    transaction.abort("the test ended")
    assert parent is not None
    assert parent.txid == older.txid


def test_begin_save_returns_the_newest_commit_and_all_commits_of_the_step(repo: Repository) -> None:
    one, two = commit_bare(repo, "a", 1), commit_bare(repo, "a", 2)
    transaction, parent, replaced = begin_save(repo, "a", 1, overwrite=True)
    transaction.abort("the test ended")
    assert transaction.txid > two.txid
    assert (parent, replaced) == (two, [one])


def test_a_commit_names_the_store_in_which_it_was_made_and_by_whom(repo: Repository, transaction: Transaction) -> None:
    repo.user = "ann"
    made = transaction.commit(committed(repo, "a", 1, txid=transaction.txid, store="another", who="bob@node4"))
    assert made.committed.store == repo.marker.store_id
    assert made.committed.who == made.who == f"ann@{socket.gethostname()}"
    assert made == list_commits(repo).commits[made.txid]


def test_begin_save_writes_nothing_if_the_step_exists(repo: Repository) -> None:
    commit_bare(repo, "a", 1)
    with pytest.raises(Conflict, match="already exists"):
        begin_save(repo, "a", 1)
    assert files(repo) == []


def test_begin_save_aborts_its_transaction_if_it_cannot_find_the_parent(repo: Repository, faults: FaultyStore) -> None:
    newest = commit_bare(repo, "a", 1)
    faults.inject(fail_before("get", key=f"commits/{newest.txid}*", times=99))
    with pytest.raises(StorageError):
        begin_save(repo, "a", 2)
    assert files(repo) == threads() == []
    assert len(list_names(repo)) == 2


def test_a_begun_transaction_is_open_and_names_its_process(repo: Repository, transaction: Transaction) -> None:
    (found,) = open_transactions(repo, set())
    assert (found.txid, found.signs) == (transaction.txid, 0)
    assert found.began == transaction.began
    assert found.began is not None
    assert (found.began.run, found.began.step, found.began.process) == ("a", 1, this_process())
    assert files(repo) == [transaction_key(transaction.txid)]


def test_the_transaction_file_is_removed_after_the_record(repo: Repository, transaction: Transaction) -> None:
    with pytest.raises(Conflict, match="still open"):
        transaction.close()
    assert files(repo)
    commit(repo, committed(repo, "a", 1, txid=transaction.txid))
    assert open_transactions(repo, list_names(repo)) == []
    transaction.close()
    assert files(repo) == []
    assert threads() == []


def test_an_abort_revokes_the_transaction(repo: Repository) -> None:
    one = begin(repo, "a", 1)
    assert one.abort("out of memory")
    first = list_commits(repo).commits[one.txid].first
    assert isinstance(first, RevokedRecord)
    assert first.reason == "out of memory"
    assert (files(repo), threads()) == ([], [])


def test_an_abort_after_a_revocation_by_gc_succeeds(repo: Repository) -> None:
    one = begin(repo, "a", 1)
    assert revoke(repo, one.txid, "no sign of life")
    assert one.abort("error")
    assert files(repo) == []


def test_an_abort_in_a_deleted_store_leaves_nothing_behind(repo: Repository) -> None:
    one = begin(repo, "a", 1)
    for entry in list(repo.storage.list("")):
        repo.storage.delete(entry.key)
    assert not one.abort("the store is gone")
    assert list(repo.storage.list("")) == []


def test_an_abort_of_a_committed_transaction_reports_the_commit(repo: Repository) -> None:
    one = begin(repo, "a", 1)
    commit(repo, committed(repo, "a", 1, txid=one.txid))
    assert not one.abort("the answer got lost")
    assert list_commits(repo).commits[one.txid].visible
    assert files(repo) == []


def test_an_abort_never_hides_an_earlier_error(
    repo: Repository, faults: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    one = begin(repo, "a", 1)
    faults.inject(fail_before("put"))
    with caplog.at_level(logging.WARNING):
        assert not one.abort("x")
    assert "a later gc revokes it" in caplog.text
    assert [found.txid for found in open_transactions(repo, list_names(repo))] == [one.txid]
    assert threads() == []


def test_a_failed_begin_does_not_leave_a_thread_behind(
    repo: Repository, faults: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "SIGN_OF_LIFE_SECONDS", 0)
    faults.inject(fail_before("put"))
    with pytest.raises(StorageError):
        begin(repo, "a", 1)
    assert (files(repo), threads()) == ([], [])


def test_beginning_a_transaction_succeeds_even_if_the_response_is_lost(repo: Repository, faults: FaultyStore) -> None:
    faults.inject(fail_after("put"))
    one = begin(repo, "a", 1)
    assert files(repo) == [transaction_key(one.txid)]
    one.abort("x")


def test_a_commit_ends_the_transaction(repo: Repository) -> None:
    one = begin(repo, "a", 1)
    made = one.commit(committed(repo, "a", 1, txid=one.txid))
    assert list_commits(repo).visible() == [made]
    assert (files(repo), threads()) == ([], [])
    assert not one.abort("an error behind it")
    assert list_commits(repo).visible() == [made]


def test_a_commit_of_the_same_checkpoint_by_a_different_process_counts(repo: Repository) -> None:
    one = begin(repo, "a", 1)
    first = committed(repo, "a", 1, txid=one.txid)
    commit(repo, first)
    assert one.commit(committed(repo, "a", 1, txid=one.txid, manifest=first.manifest)).committed == first
    assert files(repo) == []
    with pytest.raises(Revoked, match="a different process already ended"):
        one.commit(committed(repo, "a", 1, txid=one.txid, manifest=ManifestId("0" * 64)))


def test_a_commit_whose_response_was_lost_is_found_or_revoked(repo: Repository, faults: FaultyStore) -> None:
    for fault, last in ((fail_after, "committed"), (fail_before, "revoked")):
        one = begin(repo, "a", 1)
        faults.inject(fault("put", key="commits/*"), fail_before("get", key="commits/*"))
        try:
            assert one.commit(committed(repo, "a", 1, txid=one.txid)).last == last
        except StorageError:
            assert last == "revoked"
        faults.heal()
        assert list_commits(repo).commits[one.txid].last == last
        assert files(repo) == []


def test_transaction_files_remain_if_the_process_lacks_delete_permission(repo: Repository, faults: FaultyStore) -> None:
    one = begin(repo, "a", 1)
    commit(repo, committed(repo, "a", 1, txid=one.txid))
    faults.inject(fail_before("delete", times=99))
    one.close()
    assert files(repo) == [transaction_key(one.txid)]
    faults.heal()
    assert list(closed_files(repo, list_names(repo))[0]) == files(repo)


def test_closing_a_transaction_leaves_its_files_in_place_if_the_storage_fails(
    repo: Repository, faults: FaultyStore
) -> None:
    one = begin(repo, "a", 1)
    commit(repo, committed(repo, "a", 1, txid=one.txid))
    faults.inject(fail_before("size"))
    one.close()  # the save is complete, so this does not raise
    assert (files(repo), threads()) == ([transaction_key(one.txid)], [])


def test_heartbeats_are_numbered_and_removed(
    repo: Repository, faults: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "SIGN_OF_LIFE_SECONDS", 0.001)
    third = threading.Event()
    faults.inject(call_first("put", lambda _: third.set(), key="transactions/*.3"))
    one = begin(repo, "a", 1)
    assert third.wait(60)
    (found,) = open_transactions(repo, set())
    assert found.signs >= 2
    commit(repo, committed(repo, "a", 1, txid=one.txid))
    one.close()
    assert (files(repo), threads()) == ([], [])


def test_a_failed_heartbeat_is_logged_and_the_next_one_is_sent(
    repo: Repository, faults: FaultyStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "SIGN_OF_LIFE_SECONDS", 0.001)
    third = threading.Event()
    faults.inject(
        fail_before("put", key="transactions/*.1"),
        fail_after("put", key="transactions/*.2"),
        call_first("put", lambda _: third.set(), key="transactions/*.4"),
    )
    with caplog.at_level(logging.WARNING):
        one = begin(repo, "a", 1)
        assert third.wait(60)
        keys = files(repo)
        one.abort("x")
    assert transaction_key(one.txid, 1) not in keys
    assert {transaction_key(one.txid, 2), transaction_key(one.txid, 3)} <= set(keys)
    assert caplog.text.count("could not write sign of life") == 1
    assert files(repo) == []


def test_a_transaction_without_references_does_not_send_heartbeats(repo: Repository) -> None:
    begin(repo, "a", 1)
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("casckpt-alive"):
            thread.join(60)
    assert threads() == []
    assert len(open_transactions(repo, set())) == 1


def test_a_forked_child_does_not_send_heartbeats(repo: Repository) -> None:
    one = begin(repo, "a", 1)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        theirs.send(threads())
        one.close()  # it must not wait for a thread that does not exist
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


def test_a_transaction_without_a_record_counts_as_open(repo: Repository) -> None:
    made = [begin(repo, "a", step) for step in range(3)]
    revoke(repo, made[1].txid, "x")
    found = open_transactions(repo, list_names(repo))
    assert [one.txid for one in found] == [made[0].txid, made[2].txid]
    closed, opened = closed_files(repo, list_names(repo))
    assert (list(closed), opened) == ([transaction_key(made[1].txid)], {made[0].txid, made[2].txid})
    for one in made:
        one.abort("x")


@pytest.mark.parametrize("data", [b"", b"{}\n", b"torn"])
def test_an_unreadable_transaction_counts_as_open(repo: Repository, data: bytes) -> None:
    txid = repo.new_txid("a", 1)
    repo.storage.put(transaction_key(txid), data)
    repo.storage.put("transactions/README", b"x")
    (found,) = open_transactions(repo, set())
    assert (found.txid, found.began, found.signs) == (txid, None, 0)


def test_a_transaction_of_which_only_heartbeats_exist_has_ended(repo: Repository) -> None:
    """Its process removed its file, and a delayed sign of life arrived."""
    txid = repo.new_txid("a", 1)
    for number in (9, 10):
        repo.storage.put(transaction_key(txid, number), b"x")
    assert open_transactions(repo, set()) == []
    assert len(closed_files(repo, set())[0]) == 2


def test_the_reason_of_a_revocation_is_truncated_if_it_is_long(repo: Repository) -> None:
    txid = repo.new_txid("a", 1)
    assert revoke(repo, txid, "x" * 10_000_000)
    assert repo.storage.size(commit_key(txid)) is not None
    assert list_names(repo) == {(txid, 0)}


# -- what a failed save removes

FULL = StorageError("full", full=True)
FAILED = StorageError("the upload failed")


def no_room() -> list[Fault]:
    """Refuse records as a full disk without prepared files does."""
    return [fail_before(method, key="commits/*", error=FULL, times=99) for method in ("put", "put_prepared")]


def upload(repo: Repository, transaction: Transaction, texts: str = "abcd") -> Transaction:
    for text in texts:
        put_blob(repo, transaction.txid, text)
    return transaction


def saving(repo: Repository) -> Transaction:
    return upload(repo, begin(repo, "a", 1))


def copying(repo: Repository) -> Transaction:
    """Begin a copy, which other processes may join."""
    txid = repo.new_txid("a", 1)
    began = Began(
        txid=txid, run="a", step=1, time=repo.clock(), process=this_process(), manifest=manifest_id("m"), places=txid
    )
    made = join(repo, began)
    assert made is not None
    return upload(repo, made)


def joining(repo: Repository) -> Transaction:
    made = join(repo, changed(copying(repo).began, time=repo.clock()))  # as another process does
    assert made is not None
    assert made.joined
    return made


def rewriting(repo: Repository) -> Transaction:
    base = save(repo, "a", 1)
    return upload(repo, begin(repo, "a", 1, slot=(base.txid, base.number + 1)))


@pytest.mark.parametrize("make", [saving, copying, joining])
def test_a_failed_save_or_copy_removes_its_objects_after_its_record_was_read_back(
    repo: Repository, faults: FaultyStore, make: Callable[[Repository], Transaction]
) -> None:
    save(repo, "a", 0, texts=["live"])
    live, one = keys(repo), make(repo)
    since = len(faults.calls)
    assert one.abort(FAILED)
    wait_for_clean_up()
    assert keys(repo) == live
    calls = [f"{call.method} {call.key.partition('/')[0]}" for call in faults.calls[since:]]
    before = calls[: calls.index("delete objects")]
    assert {"put commits", "get commits", "settle commits"} <= set(before)


def test_a_save_that_a_gc_revoked_also_removes_its_objects(repo: Repository) -> None:
    one = saving(repo)
    assert revoke(repo, one.txid, "no sign of life")
    assert one.abort(FAILED)
    wait_for_clean_up()
    assert keys(repo) == set()


_ENDS = """
import sys, time
from pathlib import Path
from casckpt.history.transactions import begin
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from tests.support.repositories import put_blob
storage = LocalStore(Path(sys.argv[1]))
delete = storage.delete
storage.delete = lambda key: (time.sleep(0.2), delete(key))
repo = Repository(storage, Path(sys.argv[2]))
repo.create()
one = begin(repo, "a", 1)
put_blob(repo, one.txid, "a")
assert one.abort(OSError("the upload failed"))
assert list(storage.list("objects/"))
"""


def test_a_process_that_ends_waits_until_its_failed_save_has_removed_its_objects(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", _ENDS, tmp_path / "store", tmp_path / "cache"], cwd=root, check=True)
    assert not list((tmp_path / "store").rglob("*.safetensors"))


STAYS: dict[str, tuple[Callable[[Repository], Transaction], BaseException | str]] = {
    "a copy": (copying, FAILED),
    "a copy that was joined": (joining, FAILED),
    "a rewrite": (rewriting, "the rewrite failed"),
    "an interrupt": (saving, KeyboardInterrupt()),
    "an exit": (saving, SystemExit(143)),
}


@pytest.mark.parametrize(
    ("what", "room"), [(what, room) for what in STAYS for room in (True, False) if not (room and "copy" in what)]
)
def test_what_others_may_need_and_what_is_interrupted_is_left_to_gc(
    repo: Repository, faults: FaultyStore, what: str, room: bool
) -> None:
    make, reason = STAYS[what]
    one = make(repo)
    before = keys(repo)
    assert before
    faults.inject(*([] if room else no_room()))
    assert one.abort(reason) == room
    wait_for_clean_up()
    assert keys(repo) == before
    assert faults.count("delete", "objects/*") == 0
    faults.heal()
    assert run_gc(repo, revoke_after=0).deleted_blobs == 4


@pytest.mark.parametrize("room", [True, False])
def test_in_a_bucket_a_failed_save_removes_nothing(tmp_path: Path, room: bool) -> None:
    storage = FarStore(memory())
    repo = repository(tmp_path, storage)
    one = saving(repo)
    storage.inject(*([] if room else no_room()))
    assert one.abort(FAILED) == room
    wait_for_clean_up()
    assert len(keys(repo)) == 4


UNKNOWN: dict[str, Callable[[], list[Fault]]] = {
    "the record cannot be read": lambda: [fail_before("get", key="commits/*", times=99)],
    "the record is not durable": lambda: [fail_before("settle", key="commits*", times=99)],
    "the storage fails": lambda: [fail_before("put", key="commits/*", times=99)],
    "the storage fails to prepare": lambda: [*no_room()[:1], fail_before("put_prepared", times=99)],
}


@pytest.mark.parametrize("why", UNKNOWN)
def test_nothing_is_deleted_unless_the_save_is_known_to_be_revoked(
    repo: Repository, faults: FaultyStore, why: str
) -> None:
    one = saving(repo)
    faults.inject(*UNKNOWN[why]())
    one.abort(FAILED)
    wait_for_clean_up()
    assert len(keys(repo)) == 4
    assert faults.count("delete", "objects/*") == 0


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_after_a_try_to_commit_objects_go_only_if_the_answer_becomes_known(
    repo: Repository, faults: FaultyStore, stored: bool, known: bool
) -> None:
    one = saving(repo)
    tried = (fail_after if stored else fail_before)("put", key="commits/*", error=FULL)
    lost = fail_before("get", key="commits/*", times=1 if known else 99)
    faults.inject(tried, lost, *([] if known else [fail_before("put", at=2, times=99, key="commits/*", error=FULL)]))
    wanted = committed(repo, "a", 1, txid=one.txid)
    if stored and known:
        assert one.commit(wanted).visible
    else:
        with pytest.raises(StorageError):
            one.commit(wanted)
        one.abort(FAILED)  # as the save does
    wait_for_clean_up()
    faults.heal()
    assert (len(keys(repo)) == 0) == (known and not stored)
    assert bool(list_commits(repo).visible()) == stored


def freed(faults: FaultyStore, objects: int) -> Callable[[Call], None]:
    """Raise FULL until so many objects are deleted."""

    def check(_: Call) -> None:
        if faults.count("delete", "objects/*") < objects:
            raise FULL

    return check


def test_without_room_to_revoke_it_a_save_deletes_first_and_is_then_revoked(
    repo: Repository, faults: FaultyStore
) -> None:
    one, other = saving(repo), upload(repo, begin(repo, "a", 2))
    faults.inject(call_first("put", freed(faults, 4), key="commits/*", times=99))
    assert not one.abort(FAILED)
    wait_for_clean_up()
    assert {key.split("/")[1] for key in keys(repo)} == {other.txid}
    assert isinstance(list_commits(repo).commits[one.txid].first, RevokedRecord)
    assert files(repo) == [transaction_key(other.txid)]
    other.leave()


STEPS = [("list", 1), ("delete", 1), ("delete", 2), ("delete", 4), ("sweep", 1), ("put", 2)]


@pytest.mark.parametrize("gives_up", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_gc_at_any_call_of_a_save_that_deletes_first_loses_nothing_that_is_live(
    repo: Repository, faults: FaultyStore, step: tuple[str, int], gives_up: bool, tmp_path: Path
) -> None:
    method, at = step
    save(repo, "a", 0, texts=["live"])
    live, one = keys(repo), saving(repo)
    seen = []

    def collect() -> None:
        other = repository(tmp_path / "other", faults.inner, seed=2)
        run_gc(other, revoke_after=0 if gives_up else 10**6, wait=0)
        seen.append(live <= keys(repo))

    key = "commits/*" if method == "put" else "objects/*"
    faults.inject(call_first("put", freed(faults, 4), key="commits/*", times=99))
    faults.inject(call_first(method, meanwhile(collect), key=key, at=at))
    one.abort(FAILED)
    wait_for_clean_up()
    assert seen == [True]
    assert keys(repo) == live
    run_gc(repo, revoke_after=0)
    assert (keys(repo), files(repo)) == (live, [])
    assert not list_commits(repo).commits[one.txid].live


@pytest.mark.parametrize("room", [True, False])
def test_a_clean_up_gives_up_after_ten_seconds(
    repo: Repository, faults: FaultyStore, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]

    def take(_: Call) -> None:
        now[0] += 6

    monkeypatch.setattr(transactions, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one = saving(repo)
    faults.inject(call_first("delete", take, key="objects/*", times=99), *([] if room else no_room()))
    one.abort(FAILED)
    wait_for_clean_up()
    assert len(keys(repo)) == 2
    assert faults.count("sweep") == 0
    faults.heal()
    run_gc(repo, revoke_after=0)
    assert keys(repo) == set()


def test_an_error_in_the_clean_up_is_only_logged(
    repo: Repository, faults: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    one = saving(repo)
    faults.inject(fail_before("delete", at=2, key="objects/*"))
    with caplog.at_level(logging.INFO):
        assert one.abort(FAILED)
        wait_for_clean_up()
    assert f"the uploads of transaction {one.txid} remain" in caplog.text
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert len(keys(repo)) == 3


@pytest.mark.parametrize("room", [True, False])
def test_nobody_waits_for_a_clean_up(repo: Repository, faults: FaultyStore, room: bool) -> None:
    let_go, waited = threading.Event(), list[bool]()

    def block(_: Call) -> None:
        waited.append(let_go.wait(20))

    one = saving(repo)
    faults.inject(call_first("delete", block, key="objects/*"), *([] if room else no_room()))
    assert one.abort(FAILED) == room
    assert len(keys(repo)) == 4
    let_go.set()
    wait_for_clean_up()
    assert waited == [True]
    assert keys(repo) == set()


def test_a_clean_up_prepares_files_again(
    repo: Repository, faults: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list[int]()
    monkeypatch.setattr(faults, "prepare", lambda: left.append(len(keys(repo))))
    one = saving(repo)
    faults.inject(*(fail_before(method, key="commits/*", error=FULL) for method in ("put", "put_prepared")))
    assert not one.abort(FAILED)
    wait_for_clean_up()
    assert left == [0]
