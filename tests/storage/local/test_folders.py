"""The folders of a local store are durable, contain no symlinks, and are removed when unused."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from casckpt.errors import InvalidInput, Refused, StorageError
from casckpt.storage.base import AlreadyExists
from casckpt.storage.local import folders, syscalls
from casckpt.storage.local.newfile import Naming
from casckpt.storage.local.store import LocalStore
from tests.support.counting import count_io
from tests.support.local import KEY, failing


def test_new_folders_above_the_store_are_made_durable(store: LocalStore) -> None:
    counts = count_io(store)
    store.put("a", b"")
    assert counts.fsyncs == 5  # the file, the store; two folders with a new subfolder, one of them twice


def test_a_failed_sync_of_a_folder_raises_an_error(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object exists, but its name may not be durable. A second put makes the name durable."""
    store.put("commits/0", b"")
    monkeypatch.setattr(syscalls, "sync", failing(syscalls.sync, errno.EIO, after=1))
    with pytest.raises(StorageError):
        store.put("commits/1", b"1")
    counts = count_io(store)
    with pytest.raises(AlreadyExists):
        store.put("commits/1", b"1")
    assert counts.fsyncs == 1


def test_file_systems_that_cannot_sync_folders_are_supported(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = syscalls.sync

    def refuse(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(fd)

    monkeypatch.setattr(syscalls, "sync", refuse)
    store.put(KEY, b"1")
    assert store.get(KEY, limit=1) == b"1"


def test_unused_folders_that_casckpt_created_are_removed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "a" / "b" / "c")
    store.put("probes/x", b"1")
    (tmp_path / "a" / "mine").touch()
    assert store.sweep("") == 0  # the folder is in use
    store.delete("probes/x")
    store.sweep("probes")
    LocalStore(store.path).sweep("")
    assert store.path.is_dir()
    store.sweep("")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mine"]
    store.put("probes/x", b"2")
    assert store.get("probes/x", limit=9) == b"2"


@pytest.mark.parametrize("act", ["get", "open", "size", "list"])
@pytest.mark.parametrize("link", ["objects/x/a", "objects/x", "objects"])
def test_symlinks_in_a_store_are_rejected(store: LocalStore, tmp_path: Path, act: str, link: str) -> None:
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


def test_the_store_itself_can_be_a_symlink(store: LocalStore, tmp_path: Path) -> None:
    store.put(KEY, b"1")
    (tmp_path / "link").symlink_to(store.path)
    assert [entry.key for entry in LocalStore(tmp_path / "link").list("")] == [KEY]


@pytest.mark.parametrize("below", ["", "store"])
def test_a_dangling_link_is_reported(tmp_path: Path, below: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    with pytest.raises(InvalidInput, match=r"link is a link to .*unmounted, which does not exist"):
        LocalStore(tmp_path / "link" / below).put(KEY, b"1")


def test_a_file_in_place_of_a_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in ("file", "file/store", "file/a/b"):
        with pytest.raises(InvalidInput, match="is a file: use the path of a folder"):
            LocalStore(tmp_path / path).put("a", b"")


def test_an_unreadable_parent_folder_is_reported(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.path.mkdir(parents=True)
    opened = os.open

    def forbid(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == store.path.parent:
            raise PermissionError(errno.EACCES, "no")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", forbid)
    counts = count_io(store)
    store.put("a", b"1")
    assert counts.fsyncs == 2


def test_the_set_of_remembered_folders_is_bounded(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_REMEMBERED", 3)
    for number in range(20):
        store.put(f"objects/{number}/a", b"")
    assert len(store._folders._anchored) <= 6


@pytest.mark.parametrize("way", [Naming.UNNAMED, Naming.LINK])
def test_in_a_shared_root_files_and_folders_get_its_permissions_whatever_the_umask(way: Naming, tmp_path: Path) -> None:
    modes = {}
    for root in (0o2775, 0o2770, 0o775, 0o2755):
        path = tmp_path / oct(root)
        path.mkdir()
        path.chmod(root)
        store, before = LocalStore(path), os.umask(0o077)
        store._files.way = way
        try:
            store.put("objects/x/y", b"data")
        finally:
            os.umask(before)
        modes[root] = [stat.S_IMODE((path / key).stat().st_mode) for key in ("objects", "objects/x", "objects/x/y")]
    assert modes == {
        0o2775: [0o2775, 0o2775, 0o444], 0o2770: [0o2770, 0o2770, 0o440],
        0o775: [0o700, 0o700, 0o400], 0o2755: [0o2700, 0o2700, 0o400],
    }  # fmt: skip
