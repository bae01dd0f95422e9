"""Prepared files: records that a full disk can still store."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from casckpt.errors import StorageError
from casckpt.storage.base import AlreadyExists
from casckpt.storage.local import spare, syscalls
from casckpt.storage.local import store as local_store
from casckpt.storage.local.spare import COUNT, SIZE
from casckpt.storage.local.store import LocalStore
from tests.support.local import failing, lacking

KEY = "commits/a"
RECORD = b"a record"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """A store with few prepared files, so that tests are fast."""
    monkeypatch.setattr(spare, "COUNT", 3)
    monkeypatch.setattr(local_store, "_FREEING_SMALL", 0.0)  # a prepare does not make puts wait
    store = LocalStore(tmp_path / "store")
    store.put("casckpt.json", b"{}")
    store.prepare()
    return store


def prepared(store: LocalStore) -> list[Path]:
    return sorted((store.path / ".spare").iterdir())


def put(store: LocalStore, key: str, data: bytes) -> bool:
    """Put a record into a prepared file. Return whether there was one that could be used."""
    try:
        return store.put_prepared(key, data)
    except StorageError as error:
        if not error.full:
            raise
        return False


def whole(store: LocalStore) -> bool:
    """Return whether all prepared files are as new."""
    found = [path.stat() for path in prepared(store)]
    return [(one.st_size, one.st_nlink, stat.S_ISREG(one.st_mode)) for one in found] == [(SIZE, 1, True)] * spare.COUNT


@pytest.fixture
def full(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """The store on a disk on which no file can be created, and none may grow."""

    def forbidden(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(fd: int, data: memoryview, offset: int, real: Callable[..., int] = os.pwrite) -> int:
        return real(fd, data, offset) if offset + len(data) <= 512 * os.fstat(fd).st_blocks else forbidden()

    for name in ("open_unnamed", "open_named"):
        monkeypatch.setattr(syscalls, name, forbidden)
    monkeypatch.setattr(os, "pwrite", write)
    return store


def test_a_store_has_64_files_of_4_kib_that_no_listing_shows(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"")
    store.prepare()
    found = [(path.name, len(path.read_bytes())) for path in prepared(store)]
    assert found == [(f"{number:02}", SIZE) for number in range(COUNT)]
    assert [entry.key for entry in store.list("")] == ["a"]
    assert store.list_folder("") == ([next(store.list("a"))], [])
    assert b"\0" * 100 not in prepared(store)[0].read_bytes()


def test_a_record_is_stored_on_a_full_disk(full: LocalStore) -> None:
    with pytest.raises(StorageError) as caught:
        full.put(KEY, RECORD)
    assert caught.value.full
    assert put(full, KEY, RECORD)
    path = full.path / KEY
    assert path.read_bytes() == RECORD
    assert not path.stat().st_mode & 0o222
    assert path.stat().st_nlink == 1
    assert len(prepared(full)) == spare.COUNT - 1


def test_a_second_record_of_a_name_is_refused_and_loses_no_prepared_file(
    full: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert put(full, KEY, RECORD)
    with pytest.raises(AlreadyExists):
        full.put_prepared(KEY, b"another")
    monkeypatch.setattr("casckpt.storage.local.store.exists", lambda folder, name: False)
    with pytest.raises(AlreadyExists):
        full.put_prepared(KEY, b"another")
    assert (full.path / KEY).read_bytes() == RECORD
    assert len(prepared(full)) == spare.COUNT - 1
    assert put(full, "commits/b", b"one that is a little longer")


def test_without_a_prepared_file_nothing_is_stored(full: LocalStore) -> None:
    assert not put(full, KEY, bytes(SIZE + 1))
    assert len(prepared(full)) == spare.COUNT
    assert all(put(full, f"commits/{number}", bytes(SIZE)) for number in range(spare.COUNT))
    assert not put(full, KEY, RECORD)
    shutil.rmtree(full.path / ".spare")
    assert not put(full, KEY, RECORD)
    assert not (full.path / KEY).exists()


@pytest.mark.parametrize("call", ["pwrite", "ftruncate"])
def test_a_file_system_that_needs_a_block_to_overwrite_keeps_its_prepared_files(
    full: LocalStore, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, call, failing(getattr(os, call), errno.ENOSPC, times=spare.COUNT))
    assert not put(full, KEY, RECORD)
    assert len(prepared(full)) == spare.COUNT
    assert put(full, KEY, RECORD)


def test_files_are_given_up_for_a_larger_object_but_not_all(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare, "KEPT", 2)
    monkeypatch.setattr(spare, "COUNT", 8)
    monkeypatch.setattr(local_store, "_FREEING", 0.5)
    store.prepare()
    data = bytes(3 * SIZE)
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, errno.ENOSPC, times=2))
    assert put(store, KEY, data)
    assert store.get(KEY, limit=len(data)) == data
    assert len(prepared(store)) == 2
    assert not put(store, "commits/b", data)
    assert len(prepared(store)) == 2


def test_files_are_given_up_if_the_folder_of_the_record_has_to_grow(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "KEPT", 0)
    monkeypatch.setattr(syscalls, "link_named", failing(syscalls.link_named, errno.ENOSPC, times=9))
    assert put(store, KEY, RECORD)
    assert store.get(KEY, limit=99) == RECORD
    assert prepared(store) == []


def test_a_file_system_without_exclusive_names_stores_nothing(
    full: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syscalls, "link_named", lacking)
    assert not put(full, KEY, RECORD)
    assert len(prepared(full)) == spare.COUNT


def test_another_failure_is_not_taken_for_a_full_disk(full: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "sync", failing(syscalls.sync, errno.EIO))
    with pytest.raises(StorageError, match="kernel log"):
        full.put_prepared(KEY, RECORD)
    assert not (full.path / KEY).exists()


def test_a_file_with_a_second_name_is_never_written(full: LocalStore) -> None:
    shutil.copytree(full.path, full.path.with_name("copy"), copy_function=os.link)
    before = [path.read_bytes() for path in prepared(full)]
    assert not put(full, KEY, RECORD)
    copy = LocalStore(full.path.with_name("copy"))
    assert [path.read_bytes() for path in prepared(copy)] == before
    assert put(copy, KEY, RECORD)


def test_a_record_that_is_also_a_prepared_file_survives_a_prepare_at_any_instant(
    full: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in prepared(full)[1:]:
        path.unlink()
    os.link(prepared(full)[0], full.path / "record")  # as after a kill between link and unlink
    before = (full.path / "record").read_bytes()
    opened = os.open

    def open_first(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        fd = opened(path, flags, *args, **kwargs)
        if flags & os.O_WRONLY:
            (full.path / ".spare" / path).unlink()  # as `prepare` does
        return fd

    monkeypatch.setattr(os, "open", open_first)
    assert not put(full, KEY, RECORD)
    assert (full.path / "record").read_bytes() == before


def test_what_is_missing_or_unusable_is_prepared_again(store: LocalStore) -> None:
    first, second, third = prepared(store)
    first.write_bytes(b"")
    second.unlink()
    os.link(third, store.path / "record")
    (store.path / ".spare" / ".00.0.tmp").write_bytes(b"")
    kept = third.read_bytes()
    store.prepare()
    assert whole(store)
    assert (store.path / "record").read_bytes() == kept


def test_preparing_ends_without_an_error_if_the_disk_is_full(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in prepared(store):
        path.unlink()
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, errno.EDQUOT, after=1, times=99))
    store.prepare()
    assert [path.name for path in prepared(store)] == ["00"]


@pytest.mark.parametrize("name", ["00", ".00.0.tmp", ".keep", "keep"])
@pytest.mark.parametrize("what", ["folder", "pipe", "link", "file"])
def test_something_else_in_the_folder_does_not_prevent_the_use_of_the_others(
    full: LocalStore, what: str, name: str
) -> None:
    path = full.path / ".spare" / name
    path.unlink(missing_ok=True)
    make: dict[str, Callable[[], object]] = {
        "folder": path.mkdir, "pipe": partial(os.mkfifo, path), "link": partial(path.symlink_to, "/dev/null"),
        "file": path.touch,
    }  # fmt: skip
    make[what]()
    full.prepare()
    assert put(full, KEY, RECORD)
    assert path.exists() or name == ".00.0.tmp"


@pytest.mark.parametrize("what", ["link", "file"])
def test_something_else_in_the_place_of_the_folder_is_left_alone(store: LocalStore, what: str, tmp_path: Path) -> None:
    folder, outside = store.path / ".spare", tmp_path / "outside"
    shutil.rmtree(folder)
    outside.mkdir()
    folder.symlink_to(outside) if what == "link" else folder.write_bytes(b"mine")
    store.prepare()
    assert not put(store, KEY, RECORD)
    assert not any(outside.iterdir())


def test_the_group_of_a_shared_store_may_use_its_prepared_files(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    before = os.umask(0o077)
    try:
        store = LocalStore(tmp_path)
        store.put("a", b"")
        store.prepare()
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in prepared(store)} == {0o664}
    assert (tmp_path / ".spare").stat().st_mode & 0o070 == 0o070
    assert put(store, "b", RECORD)
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o444


def _fill(path: Path, number: int) -> None:
    store = LocalStore(path)
    for each in range(20):
        with suppress(AlreadyExists):
            store.put_prepared(f"commits/{each}", f"{number} ".encode() * 100)
        if each % 4 == number:
            store.prepare()


def test_processes_that_prepare_and_use_the_same_files_store_whole_records(store: LocalStore) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_fill, args=(store.path, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    found = [(store.path / entry.key).read_bytes() for entry in store.list("commits/")]
    assert set(found) <= {f"{number} ".encode() * 100 for number in range(4)}
    assert found


STEPS = ("rename", "open", "pwrite", "ftruncate", "fsync", "fchmod", "replace", "unlink", "link", "close")


@pytest.mark.kill
@pytest.mark.parametrize("action", ["prepare", "put"])
def test_a_process_killed_at_any_call_leaves_no_half_record_and_its_files_are_replaced(
    store: LocalStore, action: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """By default, at every third call."""
    outcomes = set()
    for at in itertools.count(1, 1 if request.config.getoption("--full") else 3):
        copy = LocalStore(tmp_path / f"copy-{at}")
        shutil.copytree(store.path, copy.path)
        if action == "prepare":
            prepared(copy)[0].write_bytes(b"short")
            (copy.path / ".spare" / ".01.0.tmp").write_bytes(b"left")
        ended = _killed(copy, action, at)
        there = (copy.path / KEY).exists()
        if there:
            assert (copy.path / KEY).read_bytes() == RECORD
        assert [entry.key for entry in copy.list("commits/")] == [KEY] * there
        outcomes.add(there)
        other = "commits/other"
        assert put(copy, other, b"other")  # before anybody has prepared anything
        copy.prepare()
        assert whole(copy)
        assert copy.get(other, limit=9) == b"other"
        if there:
            assert (copy.path / KEY).read_bytes() == RECORD
        if ended:
            break
    assert at > 8
    assert outcomes == ({False, True} if action == "put" else {False})


def _killed(store: LocalStore, action: str, at: int) -> bool:
    """Run an action in a process that is killed before system call number ``at``. Return whether it ended first."""
    child = os.fork()
    if not child:
        count = 0

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == at:
                    os.kill(os.getpid(), 9)
                return call(*args, **kwargs)

            return wrapped

        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        store.prepare() if action == "prepare" else put(store, KEY, RECORD)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
