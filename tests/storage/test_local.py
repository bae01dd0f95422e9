"""The storage in a local folder."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from casckpt.errors import InvalidInput, NotFound, Refused, StorageError, Unsupported
from casckpt.storage import folders, local, localreader, newfile, syscalls
from casckpt.storage.base import AlreadyExists, Entry, ObjectStore, ShortObject
from casckpt.storage.buffers import AlignedBuffer
from casckpt.storage.local import LocalStore
from casckpt.storage.newfile import Way
from casckpt.storage.syscalls import Lacking, cached_pages
from tests.storage.contract import MIB, Peek, SharedContract, StorageContract, noise

KEY = "objects/x/a"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "new" / "store")


def lacking(*args: object) -> Any:
    raise syscalls.Lacking


def only(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has nothing better than ``way``."""
    if way > Way.UNNAMED:
        monkeypatch.setattr(syscalls, "open_unnamed", lacking)
    if way > Way.LINK:
        monkeypatch.setattr(syscalls, "link_named", lacking)


def failing(call: Callable[..., Any], code: int, *, times: int = 1, after: int = 0) -> Callable[..., Any]:
    """``call``, but it fails ``times`` times from the call ``after`` on."""
    calls = iter(range(10**6))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if after <= next(calls) < after + times:
            raise OSError(code, os.strerror(code))
        return call(*args, **kwargs)

    return wrapped


def put_aligned(store: ObjectStore, key: str, data: bytes) -> None:
    with AlignedBuffer(len(data)) as buffer:
        buffer.view[:] = data
        store.put(key, buffer.view)


def files(store: LocalStore) -> list[str]:
    """Everything in the folder that is no folder, hidden or not."""
    return sorted(str(path.relative_to(store.path)) for path in store.path.rglob("*") if not path.is_dir())


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


@pytest.mark.parametrize("way", [Way.LINK, Way.RENAME], ids=lambda way: way.name)
class TestContractOfPoorerFileSystems(LocalFixtures, StorageContract):
    @pytest.fixture(autouse=True)
    def poor(self, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
        only(way, monkeypatch)
        monkeypatch.setattr(syscalls, "set_direct", lambda fd, on: not on)


@pytest.mark.parametrize("way", list(Way), ids=lambda way: way.name)
class TestEachWay:
    @pytest.fixture(autouse=True)
    def fs(self, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
        only(way, monkeypatch)

    def test_nothing_but_the_object_is_left(self, store: LocalStore, way: Way) -> None:
        store.put(KEY, b"1")
        with pytest.raises(AlreadyExists):
            store.put(KEY, b"2")
        store.replace(KEY, b"3")
        assert files(store) == [KEY]
        assert store._files.way is way

    def test_read_only_as_the_umask_allows(self, store: LocalStore) -> None:
        store.put("a", b"1")
        store.replace("b", b"1")
        before = os.umask(0o077)
        try:
            store.put("c", b"1")
        finally:
            os.umask(before)
        modes = [stat.S_IMODE((store.path / name).stat().st_mode) for name in "abc"]
        assert modes == [0o444 & ~before, 0o444 & ~before, 0o400]

    def test_failed_fsync_writes_anew(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put("a", b"")
        before = store.counts.bytes_written
        monkeypatch.setattr(syscalls, "sync", failing(syscalls.sync, errno.EIO))
        put_aligned(store, KEY, noise(2 * MIB + 1))
        assert (store.path / KEY).read_bytes() == noise(2 * MIB + 1)
        assert files(store) == ["a", KEY]
        assert store.counts.bytes_written == before + 2 * (2 * MIB + 1)
        assert store.counts.puts == 2

    def test_fsync_failed_twice(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put("a", b"")
        monkeypatch.setattr(syscalls, "sync", failing(syscalls.sync, errno.EIO, times=2))
        with pytest.raises(StorageError, match=r"objects/x/a.*kernel log"):
            store.put(KEY, b"1")
        assert files(store) == ["a"]
        store.put(KEY, b"2")
        assert store.get(KEY, limit=1) == b"2"

    def test_loses_the_race_after_writing(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put(KEY, b"first")
        monkeypatch.setattr(local, "_exists", lambda folder, name: False)
        with pytest.raises(AlreadyExists):
            store.put(KEY, b"second")
        assert files(store) == [KEY]
        assert store.get(KEY, limit=9) == b"first"

    def test_disk_full(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put("a", b"")
        monkeypatch.setattr(os, "pwrite", failing(os.pwrite, errno.ENOSPC))
        with pytest.raises(StorageError, match=r"objects/x/a.*disk is full.*gc"):
            store.put(KEY, noise(100))
        assert files(store) == ["a"]

    def test_no_room_to_allocate(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(syscalls, "allocate", failing(syscalls.allocate, errno.EDQUOT))
        with pytest.raises(StorageError, match="quota"):
            put_aligned(store, KEY, noise(2 * MIB))
        assert files(store) == []

    def test_the_folder_is_swept_under_the_put(
        self, store: LocalStore, way: Way, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = {Way.UNNAMED: "link_unnamed", Way.LINK: "open_named", Way.RENAME: "open_named"}[way]
        monkeypatch.setattr(syscalls, name, sweeping(getattr(syscalls, name), store, times=3))
        store.put(KEY, b"1")
        assert store.get(KEY, limit=1) == b"1"
        assert files(store) == [KEY]

    def test_the_folder_is_swept_for_ever(self, store: LocalStore, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
        name = {Way.UNNAMED: "link_unnamed", Way.LINK: "open_named", Way.RENAME: "open_named"}[way]
        monkeypatch.setattr(syscalls, name, sweeping(getattr(syscalls, name), store, times=10**6))
        with pytest.raises(StorageError, match="again and again"):
            store.put(KEY, b"1")
        assert files(store) == []


def sweeping(call: Callable[..., Any], store: LocalStore, times: int) -> Callable[..., Any]:
    """``call``, but another process sweeps the folder right before it."""
    left = iter(range(times))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is not None:
            LocalStore(store.path).sweep("objects/x")
        return call(*args, **kwargs)

    return wrapped


def test_what_is_lacking_is_tried_once(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def log(name: str) -> None:
        def call(*args: object) -> None:
            tried.append(name)
            raise syscalls.Lacking

        monkeypatch.setattr(syscalls, name, call)

    log("open_unnamed")
    log("link_named")
    for number in range(3):
        store.put(f"commits/{number}", b"")
    assert tried == ["open_unnamed", "link_named"]
    assert store._files.way is Way.RENAME


def test_no_proc(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "link_unnamed", lacking)
    store.put(KEY, b"1")
    assert store._files.way is Way.LINK
    assert files(store) == [KEY]


def test_no_exclusive_create_at_all(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    only(Way.RENAME, monkeypatch)
    monkeypatch.setattr(syscalls, "rename_new", lacking)
    with pytest.raises(Unsupported, match="another file system"):
        store.put(KEY, b"1")
    assert files(store) == []
    assert list(store.list("")) == []


def test_a_lost_answer_of_nfs(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    only(Way.LINK, monkeypatch)
    link = syscalls.link_named

    def twice(folder: int, old: str, new: str) -> None:
        link(folder, old, new)
        link(folder, old, new)

    monkeypatch.setattr(syscalls, "link_named", twice)
    store.put(KEY, b"1")
    assert files(store) == [KEY]


@pytest.mark.parametrize("step", [1000, 4096, 3 * 4096])
@pytest.mark.parametrize("aligned", [True, False])
def test_short_writes(store: LocalStore, step: int, aligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:step], at))
    data = noise(MIB + 4097)
    if aligned:
        put_aligned(store, KEY, data)
    else:
        store.put(KEY, memoryview(b"-" + data)[1:])
    assert (store.path / KEY).read_bytes() == data


def test_a_write_that_takes_nothing(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(StorageError, match="cannot write"):
        store.put(KEY, b"1")


def test_short_reads(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    data = noise(100)
    store.put(KEY, data)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:7]], at))
    target = bytearray(60)
    with store.open(KEY) as reader:
        reader.read_into(20, [memoryview(target)[:33], memoryview(target)[33:]])
    assert target == data[20:80]
    assert store.get(KEY, limit=100) == data


def test_a_file_truncated_behind_our_back(store: LocalStore) -> None:
    store.put(KEY, bytes(100))
    with store.open(KEY) as reader:
        os.truncate(store.path / KEY, 10)
        with pytest.raises(ShortObject) as caught:
            reader.read_into(0, [memoryview(bytearray(100))])
    assert caught.value.size == 10


def answering(answer: bool, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A set_direct that does nothing; what it was asked."""
    asked: list[bool] = []

    def set_direct(fd: int, on: bool) -> bool:
        asked.append(on)
        return answer

    monkeypatch.setattr(syscalls, "set_direct", set_direct)
    return asked


@pytest.mark.parametrize(
    ("size", "shift", "direct"), [(MIB, 0, True), (MIB - 1, 0, False), (MIB + 1, 0, True), (2 * MIB, 1, False)]
)
def test_direct_for_large_and_aligned_data(
    store: LocalStore, size: int, shift: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(False, monkeypatch)
    with AlignedBuffer(size + shift) as buffer:
        store.put(KEY, buffer.view[shift:])
    assert asked == ([True] if direct else [])
    assert store.size(KEY) == size


def test_a_file_system_that_only_pretends_direct_io(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(True, monkeypatch)
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, errno.EINVAL, after=1))
    for key in ("a", "b"):
        put_aligned(store, key, noise(9 * MIB + 17))
        assert (store.path / key).read_bytes() == noise(9 * MIB + 17)
    assert asked == [True, False]


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


def test_a_name_is_given_after_the_bytes_are_durable(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("objects/y/a", b"")
    log: list[str] = []

    def logged(name: str) -> None:
        call = getattr(syscalls, name)

        def wrapped(fd: int, *args: Any) -> Any:
            log.append("sync folder" if name == "sync" and stat.S_ISDIR(os.fstat(fd).st_mode) else name)
            return call(fd, *args)

        monkeypatch.setattr(syscalls, name, wrapped)

    for name in ("open_unnamed", "sync", "link_unnamed"):
        logged(name)
    if store._files.way is Way.UNNAMED:
        store.put(KEY, b"1")
        assert log == ["open_unnamed", "sync", "link_unnamed", "sync folder", "sync folder"]
    log.clear()
    store._files.way = Way.LINK
    logged("open_named")
    logged("link_named")
    store.put("objects/y/b", b"1")
    assert log == ["open_named", "sync", "link_named", "sync folder"]


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
    assert list(store.list("")) == [Entry(KEY, 2)]
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
    with pytest.raises(InvalidInput, match=r"link is a link to .*unmounted, which is not there"):
        LocalStore(tmp_path / "link" / below).put(KEY, b"1")


def test_what_is_no_file_is_no_object(store: LocalStore) -> None:
    store.put("a", b"1")
    os.mkfifo(store.path / "pipe")
    assert list(store.list("")) == [Entry("a", 1)]
    assert store.size("pipe") is None
    with pytest.raises(NotFound):
        store.get("pipe", limit=1)


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in ("file", "file/store", "file/a/b"):
        with pytest.raises(InvalidInput, match="is a file; give the path of a folder"):
            LocalStore(tmp_path / path).put("a", b"")
    store = LocalStore(tmp_path)
    with pytest.raises(StorageError, match="a part of the path is a file"):
        store.put("file/a", b"")


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


def test_the_disk_fails_while_reading(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(KEY, b"1")
    monkeypatch.setattr(os, "preadv", failing(os.preadv, errno.EIO))
    with store.open(KEY) as reader:
        with pytest.raises(StorageError, match="casckpt verify"):
            reader.read_into(0, [memoryview(bytearray(1))])
        reader.read_into(0, [memoryview(bytearray(1))])


def test_no_descriptor_stays_open(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def use() -> None:
        put_aligned(store, KEY, noise(MIB + 1))
        store.replace(KEY, b"1")
        with pytest.raises(AlreadyExists):
            store.put(KEY, b"")
        with pytest.raises(Refused):
            store.get(KEY, limit=0)
        with pytest.raises(NotFound):
            store.get("objects/x", limit=0)
        with store.open(KEY) as reader:
            reader.read_into(0, [memoryview(bytearray(1))])
        list(store.list(""))
        store.delete(KEY)
        store.sweep("objects/x")

    use()
    before = sorted(os.listdir("/proc/self/fd"))
    use()
    only(Way.LINK, monkeypatch)
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


def test_what_the_cache_lacks_is_read_around_it(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom((9 << 20) + 17)
    store.put("a", data)
    for cached in (False, True):
        monkeypatch.setattr(localreader, "is_cached", lambda fd, size, answer=cached: answer)
        with store.open("a") as reader:
            for offset, nbytes in (
                (0, len(data)),
                (1, len(data) - 1),
                (4097, 8 << 20),
                (len(data) - (1 << 20), 1 << 20),
            ):
                first, second = bytearray(nbytes // 3), bytearray(nbytes - nbytes // 3)
                reader.read_into(offset, [memoryview(first), memoryview(second)])
                assert bytes(first + second) == data[offset : offset + nbytes]
            with pytest.raises(ShortObject):
                reader.read_into(10, [memoryview(bytearray(len(data)))])


def test_what_others_read_too_goes_through_the_cache(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", bytes(2 << 20))
    asked: list[int] = []

    def is_cached(fd: int, size: int) -> bool:
        asked.append(size)
        return False

    monkeypatch.setattr(localreader, "is_cached", is_cached)
    for shared in (True, False):
        with store.open("a", shared=shared) as reader:
            reader.read_into(0, [memoryview(bytearray(2 << 20))])
    assert asked == [2 << 20]


def test_the_two_ways_to_ask_for_what_is_cached_agree(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        for _ in range(2):
            told = localreader._is_resident(file.fileno(), 1 << 20)
            with suppress(Lacking):  # of an older kernel, which is asked the other way
                assert (cached_pages(file.fileno(), 1 << 20) >= 192) == told
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_a_kernel_that_does_not_count_pages_is_asked_by_a_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(fd: int, nbytes: int) -> int:
        raise Lacking

    monkeypatch.setattr(localreader, "cached_pages", lacking)
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file:
        assert localreader.is_cached(file.fileno(), 1 << 20)


def test_what_was_just_written_to_the_cache_is_cached(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file:
        assert localreader.is_cached(file.fileno(), 1 << 20)
        assert localreader.is_cached(file.fileno(), 0)
