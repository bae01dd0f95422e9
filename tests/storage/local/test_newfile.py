"""New files in a local store, created in every way that file systems support."""

from __future__ import annotations

import errno
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from casckpt.errors import StorageError, Unsupported
from casckpt.storage.base import AlreadyExists
from casckpt.storage.buffers import AlignedBuffer
from casckpt.storage.local import newfile, syscalls
from casckpt.storage.local import store as local
from casckpt.storage.local.newfile import Naming
from casckpt.storage.local.store import LocalStore
from tests.storage.contract import MIB, noise
from tests.support.counting import count_io
from tests.support.local import KEY, failing, files, lacking, only, put_aligned, require, without_links


@pytest.mark.parametrize("way", list(Naming), ids=lambda way: way.name)
class TestEachWay:
    @pytest.fixture(autouse=True)
    def fs(self, way: Naming, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        require(way, tmp_path)
        only(way, monkeypatch)

    def test_a_put_leaves_only_the_object_behind(self, store: LocalStore, way: Naming) -> None:
        store.put(KEY, b"1")
        with pytest.raises(AlreadyExists):
            store.put(KEY, b"2")
        store.replace(KEY, b"3")
        assert files(store) == [KEY]
        assert store._files.way is way

    def test_objects_are_read_only_and_respect_the_umask(self, store: LocalStore) -> None:
        store.put("a", b"1")
        store.replace("b", b"1")
        before = os.umask(0o077)
        try:
            store.put("c", b"1")
        finally:
            os.umask(before)
        modes = [stat.S_IMODE((store.path / name).stat().st_mode) for name in "abc"]
        assert modes == [0o444 & ~before, 0o444 & ~before, 0o400]

    def test_after_a_failed_fsync_the_object_is_written_to_a_new_file(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put("a", b"")
        counts = count_io(store)
        monkeypatch.setattr(syscalls, "sync", failing(syscalls.sync, errno.EIO))
        put_aligned(store, KEY, noise(2 * MIB + 1))
        assert (store.path / KEY).read_bytes() == noise(2 * MIB + 1)
        assert files(store) == ["a", KEY]
        assert counts.bytes_written == 2 * (2 * MIB + 1)
        assert counts.puts == 1

    def test_a_put_raises_an_error_after_two_failed_fsyncs(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put("a", b"")
        monkeypatch.setattr(syscalls, "sync", failing(syscalls.sync, errno.EIO, times=2))
        with pytest.raises(StorageError, match=r"objects/x/a.*kernel log"):
            store.put(KEY, b"1")
        assert files(store) == ["a"]
        store.put(KEY, b"2")
        assert store.get(KEY, limit=1) == b"2"

    def test_a_put_that_loses_the_race_after_its_write_raises_conflict(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put(KEY, b"first")
        monkeypatch.setattr(local, "exists", lambda folder, name: False)
        with pytest.raises(AlreadyExists):
            store.put(KEY, b"second")
        assert files(store) == [KEY]
        assert store.get(KEY, limit=9) == b"first"

    def test_a_full_disk_is_reported(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put("a", b"")
        monkeypatch.setattr(os, "pwrite", failing(os.pwrite, errno.ENOSPC))
        with pytest.raises(StorageError, match=r"objects/x/a.*disk is full.*gc"):
            store.put(KEY, noise(100))
        assert files(store) == ["a"]

    def test_a_failed_allocation_is_reported(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(syscalls, "allocate", failing(syscalls.allocate, errno.EDQUOT))
        with pytest.raises(StorageError, match="quota"):
            put_aligned(store, KEY, noise(2 * MIB))
        assert files(store) == []

    def test_a_put_survives_the_removal_of_its_folder(
        self, store: LocalStore, way: Naming, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = "link_unnamed" if way is Naming.UNNAMED else "open_named"
        monkeypatch.setattr(syscalls, name, sweeping(getattr(syscalls, name), store, times=3))
        store.put(KEY, b"1")
        assert store.get(KEY, limit=1) == b"1"
        assert files(store) == [KEY]

    def test_a_put_fails_if_its_folder_is_removed_repeatedly(
        self, store: LocalStore, way: Naming, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = "link_unnamed" if way is Naming.UNNAMED else "open_named"
        monkeypatch.setattr(syscalls, name, sweeping(getattr(syscalls, name), store, times=10**6))
        with pytest.raises(StorageError, match="something keeps removing it"):
            store.put(KEY, b"1")
        assert files(store) == []


def test_a_put_survives_the_removal_of_its_folder_by_another_host(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(Naming.LINK, monkeypatch)
    monkeypatch.setattr(syscalls, "open_named", failing(syscalls.open_named, errno.ESTALE))  # as on NFS
    store.put(KEY, b"1")
    assert store.get(KEY, limit=1) == b"1"


def sweeping(call: Callable[..., Any], store: LocalStore, times: int) -> Callable[..., Any]:
    """Return ``call``, except that a different process sweeps the folder right before it."""
    left = iter(range(times))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is not None:
            LocalStore(store.path).sweep("objects/x")
        return call(*args, **kwargs)

    return wrapped


def test_a_system_call_that_is_missing_is_tried_only_once(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(Naming.RENAME, tmp_path)
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
    assert store._files.way is Naming.RENAME


def test_a_put_works_without_proc(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "link_unnamed", lacking)
    store.put(KEY, b"1")
    assert store._files.way is Naming.LINK
    assert files(store) == [KEY]


def test_a_file_system_without_exclusive_create_is_rejected(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    only(Naming.ALONE, monkeypatch)
    with pytest.raises(Unsupported, match=r"a different file system.*single_writer=True"):
        store.put(KEY, b"1")
    assert files(store) == []
    assert list(store.list("")) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_single_writer_needs_no_links(store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    without_links(monkeypatch, code)
    alone: LocalStore = pickle.loads(pickle.dumps(LocalStore(store.path, single_writer=True)))
    alone.put(KEY, b"1")
    with pytest.raises(AlreadyExists):
        alone.put(KEY, b"2")
    assert (alone.get(KEY, limit=1), files(alone)) == (b"1", [KEY])
    with pytest.raises(Unsupported):
        store.put("a", b"1")


def test_a_single_writer_uses_links_where_there_are_any(tmp_path: Path) -> None:
    require(Naming.UNNAMED, tmp_path)
    store = LocalStore(tmp_path, single_writer=True)
    store.put(KEY, b"1")
    assert store._files.way is Naming.UNNAMED


def test_no_other_thread_of_a_single_writer_looks_before_a_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_links(monkeypatch)
    locked: dict[str, bool] = {}

    def note(where: Any, name: str) -> None:
        call = getattr(where, name)

        def noting(*args: Any, **given: Any) -> Any:
            locked[name] = newfile._looking.locked()
            return call(*args, **given)

        monkeypatch.setattr(where, name, noting)

    note(newfile, "exists")
    note(os, "rename")
    LocalStore(tmp_path, single_writer=True).put(KEY, b"1")
    assert locked == {"exists": True, "rename": True}


def test_a_lost_nfs_response_is_recognized(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    only(Naming.LINK, monkeypatch)
    link = syscalls.link_named

    def twice(folder: int, old: str, new: str) -> None:
        link(folder, old, new)
        link(folder, old, new)

    monkeypatch.setattr(syscalls, "link_named", twice)
    store.put(KEY, b"1")
    assert files(store) == [KEY]


@pytest.mark.parametrize("step", [1000, 4096, 3 * 4096])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_short_write_is_continued(
    store: LocalStore, step: int, aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:step], at))
    data = noise(MIB + 4097)
    if aligned:
        put_aligned(store, KEY, data)
    else:
        store.put(KEY, memoryview(b"-" + data)[1:])
    assert (store.path / KEY).read_bytes() == data


def test_a_write_of_zero_bytes_raises_an_error(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(StorageError, match="cannot write"):
        store.put(KEY, b"1")


def answering(answer: bool, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a set_direct that only records its arguments."""
    asked: list[bool] = []

    def set_direct(fd: int, on: bool) -> bool:
        asked.append(on)
        return answer

    monkeypatch.setattr(syscalls, "set_direct", set_direct)
    return asked


@pytest.mark.parametrize(
    ("size", "shift", "direct"), [(MIB, 0, True), (MIB - 1, 0, False), (MIB + 1, 0, True), (2 * MIB, 1, False)]
)
def test_large_aligned_data_is_written_with_direct_input_and_output(
    store: LocalStore, size: int, shift: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(False, monkeypatch)
    with AlignedBuffer(size + shift) as buffer:
        store.put(KEY, buffer.view[shift:])
    assert asked == ([True] if direct else [])
    assert store.size(KEY) == size


def test_failed_direct_io_falls_back_to_normal_writes(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(True, monkeypatch)
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, errno.EINVAL, after=1))
    for key in ("a", "b"):
        put_aligned(store, key, noise(9 * MIB + 17))
        assert (store.path / key).read_bytes() == noise(9 * MIB + 17)
    assert asked == [True, False]


def test_a_file_gets_its_name_after_its_bytes_are_durable(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
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
    if store._files.way is Naming.UNNAMED:
        store.put(KEY, b"1")
        assert log == ["open_unnamed", "sync", "link_unnamed", "sync folder", "sync folder"]
    log.clear()
    store._files.way = Naming.LINK
    logged("open_named")
    logged("link_named")
    store.put("objects/y/b", b"1")
    assert log == ["open_named", "sync", "link_named", "sync folder"]
