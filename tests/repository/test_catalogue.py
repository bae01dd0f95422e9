"""After any damage to its file, the catalogue returns correct results and does not raise errors."""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import platformdirs
import pytest

from casckpt.contents import manifests
from casckpt.format.names import TxId
from casckpt.history.commits import list_commits
from casckpt.repository import catalogue as module
from casckpt.repository.catalogue import SCHEMA, Catalogue
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from tests.support.afresh import afresh
from tests.support.faulty import FaultyStore
from tests.support.forks import forked
from tests.support.repositories import blob_hash, commit_bare, manifest_id, memory, repository, save

UPLOADER = TxId(f"20240101T000000000000Z-{'1' * 16}-{'2' * 16}-3")
OTHER = TxId(f"20240102T000000000000Z-{'1' * 16}-{'2' * 16}-4")
HEAD, LIST = manifest_id("head"), b"a list of blobs"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "catalogue.sqlite"


def fill(catalogue: Catalogue) -> None:
    catalogue.add_records({"commits/a": b"one", "commits/b": b"two", "tags/x/0": b"three"})
    catalogue.add_blobs(UPLOADER, HEAD, LIST)
    catalogue.set_note("gc", b"\0paused")


def check_filled(catalogue: Catalogue) -> None:
    assert catalogue.records("commits/") == {"commits/a": b"one", "commits/b": b"two"}
    assert catalogue.records("tags/x/") == {"tags/x/0": b"three"}
    assert catalogue.blobs(UPLOADER, HEAD) == LIST
    assert catalogue.blobs(OTHER, HEAD) is None
    assert catalogue.note("gc") == b"\0paused"
    assert catalogue.note("other") is None


def check_empty(catalogue: Catalogue) -> None:
    assert catalogue.records("") == {}
    assert catalogue.blobs(UPLOADER, HEAD) is None
    assert catalogue.note("gc") is None


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def sql(path: Path, *statements: str) -> list[tuple[object, ...]]:
    """Return the result of the last statement."""
    with closing(sqlite3.connect(path)) as connection:
        rows: list[tuple[object, ...]] = []
        for statement in statements:
            rows = connection.execute(statement).fetchall()
        connection.commit()
    return rows


def test_the_next_process_sees_added_records(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Catalogue(path)
    check_empty(first)
    fill(first)
    check_filled(first)
    check_filled(Catalogue(path))  # by another object
    first.close()
    check_filled(Catalogue(path))
    check_filled(first)  # the file is reopened
    assert warnings(caplog) == []
    assert sql(path, "PRAGMA journal_mode") == [("wal",)]


def test_records_that_are_added_twice_are_replaced(path: Path) -> None:
    catalogue = Catalogue(path)
    fill(catalogue)
    fill(catalogue)
    catalogue.add_records({"commits/a": b"anew"})
    catalogue.set_note("gc", b"2")
    assert catalogue.records("commits/a") == {"commits/a": b"anew"}
    assert catalogue.note("gc") == b"2"
    catalogue.set_note("gc", None)
    catalogue.set_note("gc", None)
    assert catalogue.note("gc") is None


def test_an_old_schema_is_dropped_and_rebuilt(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    sql(path, "CREATE TABLE records (colour TEXT)", "CREATE TABLE old (x)", "PRAGMA user_version = 99")
    catalogue = Catalogue(path)
    check_empty(catalogue)
    fill(catalogue)
    check_filled(Catalogue(path))
    tables = sql(path, "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    assert tables == [("blobs",), ("notes",), ("records",)]
    assert sql(path, "PRAGMA user_version") == [(SCHEMA,)]
    assert warnings(caplog) == []


def as_garbage(path: Path) -> None:
    path.write_bytes(b"this is no database" * 1000)


def as_torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_unreachable(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()
    path.parent.write_bytes(b"a file where a folder is wanted")


def as_other_tables(path: Path) -> None:
    sql(path, "DROP TABLE records", "DROP TABLE blobs", "DROP TABLE notes")


DAMAGES: list[Callable[[Path], None]] = [as_garbage, as_torn, as_folder, as_unreachable, as_other_tables]


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unreadable_file_is_logged_once_and_replaced_by_memory(
    path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    before = Catalogue(path)
    fill(before)
    before.close()
    damage(path)
    catalogue = Catalogue(path)
    check_empty(catalogue)
    assert catalogue.is_off
    fill(catalogue)
    check_filled(catalogue)
    catalogue.set_note("gc", None)
    assert catalogue.note("gc") is None
    assert len(warnings(caplog)) == 1
    assert str(path) in warnings(caplog)[0]
    assert "reindex" in warnings(caplog)[0]


@pytest.mark.parametrize("damage", [as_garbage, as_torn, as_other_tables])
def test_reindex_repairs_the_catalogue(
    path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    before = Catalogue(path)
    fill(before)
    before.close()
    damage(path)
    catalogue = Catalogue(path)
    check_empty(catalogue)
    catalogue.reindex()
    assert not catalogue.is_off
    check_empty(catalogue)
    fill(catalogue)
    check_filled(Catalogue(path))
    assert len(warnings(caplog)) == 1


def test_reindexing_an_unreadable_catalogue_raises_no_error(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.mkdir(parents=True)
    catalogue = Catalogue(path)
    fill(catalogue)
    catalogue.reindex()
    check_empty(catalogue)
    fill(catalogue)
    check_filled(catalogue)


def test_reindex_clears_the_catalogue_for_other_processes_too(path: Path) -> None:
    one, two = Catalogue(path), Catalogue(path)
    fill(one)
    check_filled(two)
    one.reindex()
    check_empty(one)
    check_empty(two)
    fill(two)
    check_filled(one)


def test_a_catalogue_whose_file_is_locked_is_not_used(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_SECONDS", 0.0)
    fill(Catalogue(path))
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    catalogue = Catalogue(path)
    catalogue.add_records({"commits/c": b"x"})
    assert catalogue.is_off
    assert catalogue.records("commits/") == {"commits/c": b"x"}
    assert "locked" in warnings(caplog)[0]
    holder.execute("ROLLBACK")
    holder.close()
    check_filled(Catalogue(path))


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE records SET data = x'6f6e66' WHERE key = 'commits/a'",
        "UPDATE records SET data = NULL WHERE key = 'commits/a'",
        (
            "UPDATE records SET (data, digest) = (SELECT data, digest FROM records WHERE key = 'commits/b')"
            " WHERE key = 'commits/a'"
        ),
        "UPDATE records SET digest = NULL WHERE key = 'commits/a'",
    ],
)
def test_a_corrupted_record_in_the_catalogue_is_ignored(path: Path, change: str) -> None:
    fill(Catalogue(path))
    sql(path, change)
    assert Catalogue(path).records("commits/") == {"commits/b": b"two"}


@pytest.mark.parametrize(
    "change",
    [
        "data = x'00' || substr(data, 2)",
        "data = NULL",
        "key = replace(key, '2024', '2025')",
        "data = CAST(substr(data, 1, 10) AS TEXT)",
    ],
)
def test_a_corrupted_blob_list_in_the_catalogue_is_ignored(path: Path, change: str) -> None:
    fill(Catalogue(path))
    sql(path, f"UPDATE blobs SET {change}")
    found = Catalogue(path)
    assert found.blobs(UPLOADER, HEAD) is None
    assert found.blobs(TxId(UPLOADER.replace("2024", "2025")), HEAD) is None


def test_a_corrupted_note_in_the_catalogue_is_ignored(path: Path) -> None:
    fill(Catalogue(path))
    sql(path, "UPDATE notes SET data = x'00'")
    assert Catalogue(path).note("gc") is None


def test_threads_can_share_a_catalogue(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    catalogue = Catalogue(path)
    start = threading.Barrier(8, timeout=60)

    def run(index: int) -> None:
        start.wait()
        for number in range(20):
            catalogue.add_records({f"commits/{index}.{number}": bytes([index, number])})
            catalogue.records("commits/")

    threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Catalogue(path).records("commits/")) == 160
    assert warnings(caplog) == []


def write_many(path: Path, index: int, start: Barrier) -> None:
    """Run in several processes, which create the file at the same time."""
    start.wait(60)
    catalogue = Catalogue(path)
    for number in range(20):
        catalogue.add_records({f"commits/{index}.{number}": b"x"})
    if catalogue.is_off:
        raise SystemExit(3)


def test_processes_that_create_a_catalogue_at_the_same_time_can_share_it(path: Path) -> None:
    context = afresh()
    start = context.Barrier(4)
    running = [context.Process(target=write_many, args=(path, index, start)) for index in range(4)]
    for process in running:
        process.start()
    for process in running:
        process.join(120)
    assert [process.exitcode for process in running] == [0] * 4
    assert len(Catalogue(path).records("commits/")) == 80


def test_a_fork_waits_until_no_thread_is_inside_sqlite(path: Path) -> None:
    """SQLite's locks cover the process. A child would wait forever if another thread held one during the fork."""
    catalogue = Catalogue(path)
    fill(catalogue)
    begun, about_to_fork, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(connection: sqlite3.Connection) -> None:
        begun.set()
        about_to_fork.wait()
        connection.execute("SELECT count(*) FROM records").fetchone()
        ended.set()

    def child() -> None:
        assert ended.is_set()
        assert catalogue._file.connection is None
        catalogue.add_records({"commits/child": b"x"})
        assert catalogue.records("commits/child") == {"commits/child": b"x"}

    thread = threading.Thread(target=catalogue._do, args=(slow, lambda: None))
    thread.start()
    begun.wait()
    os.register_at_fork(before=about_to_fork.set)  # the last registered callback runs first
    with forked(child):
        thread.join()
    assert catalogue.records("commits/child") == {"commits/child": b"x"}
    assert not catalogue.is_off


def test_a_store_works_without_a_readable_catalogue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = FaultyStore(memory())
    (tmp_path / "cache").write_bytes(b"not a folder")
    repo = repository(tmp_path, storage)
    commits = [save(repo, "a", step, texts=[f"blob {step}"]) for step in range(3)]
    for _ in range(2):
        assert [commit.txid for commit in list_commits(repo).live()] == [commit.txid for commit in commits]
        assert manifests.blobs_of(repo, commits[0]) == [(commits[0].txid, blob_hash("blob 0"), 6)]
    assert storage.count("get", "commits/*") == 3  # memory took over
    assert len(warnings(caplog)) == 1


def test_two_stores_have_separate_catalogues(tmp_path: Path) -> None:
    one, two = repository(tmp_path, seed=1), repository(tmp_path, seed=2)
    assert one.catalogue.path != two.catalogue.path
    assert one.catalogue.path.parent.parent == tmp_path / "cache"
    assert one.catalogue.path.parent.name.startswith(one.marker.store_id)


def test_the_default_catalogue_is_in_the_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home cache"))
    repo = Repository(memory())
    repo.create()
    assert repo.catalogue.path.parent.parent == tmp_path / "home cache" / "casckpt"


def test_a_user_without_a_home_has_a_catalogue_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: str) -> None:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr(platformdirs, "user_cache_path", no_home)
    one, two = Repository(memory()), Repository(memory())
    for repo in (one, two):
        repo.create()
    folder = one.catalogue.path.parent.parent
    assert two.catalogue.path.parent.parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700


def test_different_hosts_list_a_folder_identically(tmp_path: Path) -> None:
    storage = LocalStore(tmp_path / "store")
    writer = repository(tmp_path / "one", storage)
    made = [commit_bare(writer, "a", step) for step in range(5)]
    other = repository(tmp_path / "two", storage)
    assert list_commits(writer) == list_commits(other)
    assert [commit.txid for commit in list_commits(other).live()] == [commit.txid for commit in made]


USED_AT_EXIT = """
import os, sys, threading
from pathlib import Path
from casckpt.repository.catalogue import Catalogue

for _ in range(5):
    child = os.fork()
    if not child:
        break  # and end as any process does
    assert os.waitpid(child, 0)[1] == 0
else:
    sys.exit()

catalogue = Catalogue(Path(sys.argv[1]) / "catalogue.db")
catalogue.add_records({f"commits/{i}": b"" for i in range(1000)})
started = threading.Event()

def use():
    while True:
        catalogue.records("commits/")
        started.set()

threading.Thread(target=use, daemon=True).start()
started.wait()
"""


def test_a_thread_may_use_the_file_while_the_process_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", USED_AT_EXIT, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
