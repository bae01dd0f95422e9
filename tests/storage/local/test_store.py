"""The storage in a local folder."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from casckpt.errors import InvalidInput, NotFound, Refused, StorageError
from casckpt.storage.base import AlreadyExists, ListedObject, ObjectStore
from casckpt.storage.local import folders, newfile, syscalls
from casckpt.storage.local.newfile import Naming
from casckpt.storage.local.store import LocalStore
from tests.storage.contract import MIB, Peek, SharedContract, StorageContract, noise
from tests.support.local import KEY, failing, files, only, put_aligned


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
    """As this file system is."""


@pytest.mark.parametrize("way", [Naming.LINK, Naming.RENAME], ids=lambda way: way.name)
class TestContractOfPoorerFileSystems(LocalFixtures, StorageContract):
    @pytest.fixture(autouse=True)
    def poor(self, way: Naming, monkeypatch: pytest.MonkeyPatch) -> None:
        only(way, monkeypatch)
        monkeypatch.setattr(syscalls, "set_direct", lambda fd, on: not on)


def test_counts(store: LocalStore) -> None:
    store.path.mkdir(parents=True)
    fsyncs = [0]

    def since() -> int:
        fsyncs.append(store.counts.fsyncs)
        return fsyncs[-1] - fsyncs[-2]

    store.put("objects/x/a", bytes(10))
    assert since() == 5  # the file, then objects/x, objects, the store and the folder that it lies in
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
    counts = store.counts
    assert (counts.puts, counts.bytes_written, counts.requests) == (5, 50, 7)
    store.get("objects/x/a", limit=10)
    with store.open("objects/x/a") as reader:
        reader.read_into(2, [memoryview(bytearray(3))])
    assert (counts.reads, counts.bytes_read, counts.requests) == (2, 13, 10)


def test_new_folders_above_the_store_are_made_durable(store: LocalStore) -> None:
    store.put("a", b"")
    assert store.counts.fsyncs == 5  # the file, the store; folders that got a new folder: two, and one of them again


def test_a_folder_that_does_not_sync(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object is there, its name perhaps not durable: putting it again makes it so."""
    store.put("commits/0", b"")
    monkeypatch.setattr(syscalls, "sync", failing(syscalls.sync, errno.EIO, after=1))
    with pytest.raises(StorageError):
        store.put("commits/1", b"1")
    before = store.counts.fsyncs
    with pytest.raises(AlreadyExists):
        store.put("commits/1", b"1")
    assert store.counts.fsyncs == before + 1


def test_file_systems_without_fsync_of_folders(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = syscalls.sync

    def refuse(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(fd)

    monkeypatch.setattr(syscalls, "sync", refuse)
    store.put(KEY, b"1")
    assert store.get(KEY, limit=1) == b"1"


def test_leftovers_are_invisible_and_swept(store: LocalStore) -> None:
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


def test_the_folders_of_a_store_go_if_this_object_made_them_and_nobody_needs_them(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "a" / "b" / "c")
    store.put("probes/x", b"1")
    (tmp_path / "a" / "mine").touch()
    assert store.sweep("") == 0  # it is in use
    store.delete("probes/x")
    store.sweep("probes")
    LocalStore(store.path).sweep("")
    assert store.path.is_dir()
    store.sweep("")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mine"]
    store.put("probes/x", b"2")
    assert store.get("probes/x", limit=9) == b"2"


def test_sweep_leaves_what_it_does_not_know(store: LocalStore) -> None:
    store.put(KEY, b"12")
    (store.path / "objects/x/.hidden").write_bytes(b"1")
    store.delete(KEY)
    assert store.sweep("objects/x") == store.sweep("objects") == 0
    assert files(store) == ["objects/x/.hidden"]


def test_reading_makes_nothing(store: LocalStore) -> None:
    assert list(store.list("")) == []
    assert store.size(KEY) is None
    with pytest.raises(NotFound, match=r"objects/x/a is not in /.*store"):
        store.get(KEY, limit=1)
    store.delete(KEY)
    store.settle("objects/x")
    assert store.sweep("objects/x") == 0
    assert not store.path.parent.exists()


@pytest.mark.parametrize("act", ["get", "open", "size", "list"])
@pytest.mark.parametrize("link", ["objects/x/a", "objects/x", "objects"])
def test_symlinks_in_a_store_are_refused(store: LocalStore, tmp_path: Path, act: str, link: str) -> None:
    outside = tmp_path / "outside" / KEY
    outside.parent.mkdir(parents=True)
    outside.write_bytes(b"secret")
    at = store.path / link
    at.parent.mkdir(parents=True)
    at.symlink_to(tmp_path / "outside" / link)
    acts: dict[str, Callable[[], object]] = {
        "get": lambda: store.get(KEY, limit=10),
        "open": lambda: store.open(KEY),
        "size": lambda: store.size(KEY),
        "list": lambda: list(store.list("objects/")),
    }
    with pytest.raises(Refused, match="symlink"):
        acts[act]()


def test_a_put_does_not_follow_symlinks(store: LocalStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    store.put("a", b"")
    (store.path / "commits").symlink_to(outside)
    (store.path / "b").symlink_to(outside / "b")
    with pytest.raises(Refused, match="symlink"):
        store.put("commits/1", b"1")
    with pytest.raises(AlreadyExists):
        store.put("b", b"1")
    with pytest.raises(Refused, match="symlink"):
        list(store.list(""))
    store.replace("b", b"1")
    store.delete("b")
    assert list(outside.iterdir()) == []


def test_the_store_itself_may_be_a_symlink(store: LocalStore, tmp_path: Path) -> None:
    store.put(KEY, b"1")
    (tmp_path / "link").symlink_to(store.path)
    assert [entry.key for entry in LocalStore(tmp_path / "link").list("")] == [KEY]


@pytest.mark.parametrize("below", ["", "store"])
def test_a_link_to_nowhere_is_told_of(tmp_path: Path, below: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    with pytest.raises(InvalidInput, match=r"link is a link to .*unmounted, which does not exist"):
        LocalStore(tmp_path / "link" / below).put(KEY, b"1")


ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "folder": Path.mkdir,
    "full folder": lambda path: (path / "x").mkdir(parents=True),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_file_is_refused_where_one_belongs(store: LocalStore, odd: str) -> None:
    """Passed by, it would look as if the object had never been there, and a gc would act on that."""
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
def test_what_is_no_folder_is_refused_where_one_belongs(store: LocalStore, odd: str) -> None:
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


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in ("file", "file/store", "file/a/b"):
        with pytest.raises(InvalidInput, match="is a file; give the path of a folder"):
            LocalStore(tmp_path / path).put("a", b"")


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ETIMEDOUT, "timed out"),
    ],
)
def test_errors_say_what_to_do(store: LocalStore, code: int, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(KEY, b"1")
    monkeypatch.setattr(os, "open", failing(os.open, code, times=100))
    for act in (
        lambda: store.put("objects/x/b", b"1"),
        lambda: store.get(KEY, limit=1),
        lambda: store.size(KEY),
        lambda: store.delete(KEY),
        lambda: list(store.list("objects/")),
        lambda: store.settle("objects/x"),
        lambda: store.sweep("objects/x"),
    ):
        with pytest.raises(StorageError, match=f"(?i)objects/x.*{advice}|objects.*{advice}") as caught:
            act()
        assert isinstance(caught.value.__cause__, OSError)


def test_no_descriptor_stays_open(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_parent_that_may_not_be_looked_into(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.path.mkdir(parents=True)
    opened = os.open

    def forbid(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == store.path.parent:
            raise PermissionError(errno.EACCES, "no")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", forbid)
    store.put("a", b"1")
    assert store.counts.fsyncs == 2


def test_memory_of_folders_is_bounded(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_REMEMBERED", 3)
    for number in range(20):
        store.put(f"objects/{number}/a", b"")
    assert len(store._folders._anchored) <= 6
