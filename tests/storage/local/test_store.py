"""Tests of storage in a local folder."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from casckpt.errors import NotFound, Refused, StorageError
from casckpt.storage.base import AlreadyExists, ListedObject, ObjectStore
from casckpt.storage.local import newfile, syscalls
from casckpt.storage.local import store as local_store
from casckpt.storage.local.folders import Folders
from casckpt.storage.local.newfile import Naming
from casckpt.storage.local.spare import SIZE
from casckpt.storage.local.store import LocalStore
from tests.storage.contract import MIB, Peek, SharedContract, StorageContract, noise
from tests.support.counting import count_io
from tests.support.local import KEY, failing, files, only, put_aligned, require


class LocalFixtures:
    @pytest.fixture
    def storage(self, store: LocalStore) -> ObjectStore:
        return store

    @pytest.fixture
    def peek(self, store: LocalStore) -> Peek:
        def read(key: str) -> bytes | None:
            path = store.path / key
            return path.read_bytes() if path.exists() else None

        return read


class TestContract(LocalFixtures, SharedContract):
    """The contract on the current file system."""


@pytest.mark.parametrize("way", [Naming.LINK, Naming.RENAME, Naming.ALONE], ids=lambda way: way.name)
class TestContractOfPoorerFileSystems(LocalFixtures, StorageContract):
    @pytest.fixture(autouse=True)
    def poor(self, way: Naming, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        require(way, tmp_path)
        only(way, monkeypatch)
        monkeypatch.setattr(syscalls, "set_direct", lambda fd, on: not on)


def test_the_storage_counts_calls_and_bytes(store: LocalStore) -> None:
    store.path.mkdir(parents=True)
    fsyncs, counts = [0], count_io(store)

    def since() -> int:
        fsyncs.append(counts.fsyncs)
        return fsyncs[-1] - fsyncs[-2]

    store.put("objects/x/a", bytes(10))
    assert since() == 5  # the file, objects/x, objects, the store and its parent
    store.put("objects/x/b", bytes(10))
    assert since() == 2
    store.put("objects/x/c", bytes(10), settle=False)
    assert since() == 1
    store.settle("objects/x")
    assert since() == 1
    store.put("objects/y/a", bytes(10), settle=False)
    store.settle("objects/y")
    assert since() == 3  # the file, objects/y, objects
    store.put("casckpt.json", bytes(10))
    assert since() == 2
    assert (counts.puts, counts.bytes_written, counts.requests) == (5, 50, 7)
    store.get("objects/x/a", limit=10)
    with store.open("objects/x/a") as reader:
        reader.read_into(2, [memoryview(bytearray(3))])
    assert (counts.reads, counts.bytes_read, counts.requests) == (2, 13, 10)


def test_leftovers_are_invisible_and_are_deleted_by_sweep(store: LocalStore) -> None:
    store.put(KEY, b"12")
    folder = store.path / "objects/x"
    (folder / newfile.temporary_name("b")).write_bytes(bytes(100))
    (folder / newfile.temporary_name("c")).write_bytes(bytes(11))
    os.link(folder / "a", folder / newfile.temporary_name("a"))
    assert list(store.list("")) == [ListedObject(KEY, 2)]
    assert store.sweep("objects/x") == 111
    assert files(store) == [KEY]
    store.delete(KEY)
    assert store.sweep("objects/x") == 0
    assert sorted(path.name for path in store.path.rglob("*")) == ["objects"]


def test_sweep_does_not_delete_unknown_files(store: LocalStore) -> None:
    store.put(KEY, b"12")
    (store.path / "objects/x/.hidden").write_bytes(b"1")
    store.delete(KEY)
    assert store.sweep("objects/x") == store.sweep("objects") == 0
    assert files(store) == ["objects/x/.hidden"]


def test_reading_from_a_local_store_does_not_create_anything(store: LocalStore) -> None:
    assert list(store.list("")) == []
    assert store.size(KEY) is None
    with pytest.raises(NotFound, match=r"objects/x/a is not in /.*store"):
        store.get(KEY, limit=1)
    store.delete(KEY)
    store.settle("objects/x")
    assert store.sweep("objects/x") == 0
    assert not store.path.parent.exists()


ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "folder": Path.mkdir,
    "full folder": lambda path: (path / "x").mkdir(parents=True),
}


@pytest.mark.parametrize("odd", ODD)
def test_anything_other_than_a_file_in_the_place_of_an_object_is_rejected(store: LocalStore, odd: str) -> None:
    """If it were ignored, the object would appear never to have existed, and gc would act accordingly."""
    store.put("commits/a", b"1")
    ODD[odd](store.path / "commits/b")
    acts: list[Callable[[], object]] = [
        lambda: list(store.list("commits/", known=lambda key: key if key == "commits/b" else None)),
        lambda: store.size("commits/b"),
        lambda: store.get("commits/b", limit=1),
        lambda: store.open("commits/b"),
    ]
    for act in acts:
        with pytest.raises(Refused, match=r"/commits/b is (a folder|neither a file nor a folder), where"):
            act()


@pytest.mark.parametrize("odd", ["file", "pipe"])
def test_a_file_or_pipe_in_the_place_of_a_folder_is_rejected(store: LocalStore, odd: str) -> None:
    store.put("casckpt.json", b"1")
    (Path.touch if odd == "file" else os.mkfifo)(store.path / "commits")
    acts: list[Callable[[], object]] = [
        lambda: list(store.list("commits/")),
        lambda: store.list_folder("commits"),
        lambda: store.size("commits/a"),
        lambda: store.get("commits/a", limit=1),
        lambda: store.put("commits/a", b"1"),
        lambda: store.delete("commits/a"),
        lambda: store.sweep("commits"),
    ]
    for act in acts:
        with pytest.raises(Refused, match=r"commits is (a file where a folder|neither a file nor a folder)"):
            act()


def test_a_local_store_leaves_no_file_descriptors_open(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def use() -> None:
        put_aligned(store, KEY, noise(MIB + 1))
        store.replace(KEY, b"1")
        with pytest.raises(AlreadyExists):
            store.put(KEY, b"")
        with pytest.raises(Refused):
            store.get(KEY, limit=0)
        with pytest.raises(Refused):
            store.get("objects/x", limit=0)
        with store.open(KEY) as reader:
            reader.read_into(0, [memoryview(bytearray(1))])
        list(store.list(""))
        store.delete(KEY)
        store.sweep("objects/x")

    use()
    before = sorted(os.listdir("/proc/self/fd"))
    use()
    only(Naming.LINK, monkeypatch)
    use()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_free_room_is_that_of_the_file_system_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, store = os.statvfs(tmp_path), LocalStore(tmp_path / "not" / "yet")
    free = store.bytes_free()
    assert free is not None
    assert 0 <= free <= status.f_blocks * status.f_frsize
    fields = ("f_frsize", "f_blocks", "f_bavail")
    for values, known in [((512, 9, 4), 2048), ((512, 0, 0), None)]:
        found = SimpleNamespace(**dict(zip(fields, values, strict=True)))
        monkeypatch.setattr(os, "statvfs", lambda path, found=found: found)
        assert store.bytes_free() == known
    monkeypatch.setattr(os, "statvfs", failing(os.statvfs, errno.EIO))
    assert store.bytes_free() is None


@pytest.mark.parametrize("shared", [True, False])
def test_a_folder_that_another_user_has_just_made_is_tried_again(tmp_path: Path, shared: bool) -> None:
    """In a shared store, the permissions of a new folder follow a moment later."""
    tmp_path.chmod(0o2775 if shared else 0o775)
    store = LocalStore(tmp_path)
    store._folders.open = failing(store._folders.open, errno.EACCES, times=3)  # type: ignore[method-assign]
    with nullcontext() if shared else pytest.raises(StorageError, match="permission denied"):
        store.put("objects/a", b"1")
    store._folders.open = failing(Folders(tmp_path).open, errno.EACCES, times=999)  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="permission denied"):
        store.put("objects/b", b"1")


class TestFullDisk:
    @pytest.mark.parametrize("free", [lambda store: store.delete("objects/a"), LocalStore.prepare])
    def test_space_that_this_process_or_a_gc_freed_may_become_available_late(
        self, store: LocalStore, free: Callable[[LocalStore], object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put("objects/a", b"")
        free(store)
        synced: list[int] = []
        monkeypatch.setattr(syscalls, "sync_all", synced.append)
        monkeypatch.setattr(os, "pwrite", failing(os.pwrite, errno.ENOSPC, times=3))
        store.put("b", b"1")
        assert store.get("b", limit=1) == b"1"
        assert len(synced) == 3

    def test_a_put_does_not_wait_for_space_that_nobody_frees(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [0.0]
        clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda pause: now.append(now.pop() + pause))
        monkeypatch.setattr(local_store, "time", clock)
        for key in ("a", "objects/a"):
            store.put(key, b"")
        monkeypatch.setattr(os, "pwrite", failing(os.pwrite, errno.EDQUOT, times=999))
        for key, nbytes, seconds in [("a", SIZE + 1, 0), ("objects/a", SIZE, 0.5), ("objects/a", SIZE + 1, 5)]:
            now[0] = 100.0
            store.delete(key)
            for _ in range(2):
                with pytest.raises(StorageError, match="quota"):
                    store.put("b", bytes(nbytes))
                assert now[0] == pytest.approx(100 + seconds, abs=0.11)

    def test_a_sync_that_finds_no_room_is_not_tried_again(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put("a", b"")
        monkeypatch.setattr(syscalls, "sync", failing(syscalls.sync, errno.ENOSPC))
        with pytest.raises(StorageError) as caught:
            store.put("b", b"1")
        assert caught.value.full
        assert files(store) == ["a"]

    def test_the_whole_file_system_can_be_written(self, store: LocalStore) -> None:
        store.put("a", b"")
        with store._folders.open("") as fd:
            syscalls.sync_all(fd)
