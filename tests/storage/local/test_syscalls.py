"""Tests of system calls that a file system may not support."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from casckpt.storage.local import syscalls
from casckpt.storage.local.newfile import Naming
from tests.support.local import require


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def file(folder: int) -> Iterator[int]:
    fd = syscalls.open_named(folder, "a")
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    ("name", "args"), [("open_unnamed", ()), ("link_named", ("a", "b")), ("rename_new", ("a", "b"))]
)
@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_errors_that_mean_a_missing_feature_are_recognized(
    name: str, args: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(code, "no")

    def fail_in_c(*args: object) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(syscalls, "_LIBC", SimpleNamespace(renameat2=fail_in_c))
    with pytest.raises(syscalls.Lacking):
        getattr(syscalls, name)(3, *args)


def test_other_errors_do_not_mean_a_missing_feature(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        syscalls.link_named(folder, "missing", "b")
    with pytest.raises(FileNotFoundError):
        syscalls.rename_new(folder, "missing", "b")


def test_a_rename_never_replaces_a_file(folder: int, file: int, tmp_path: Path) -> None:
    require(Naming.RENAME, tmp_path)
    (tmp_path / "b").write_bytes(b"b")
    for call in (syscalls.link_named, syscalls.rename_new):
        with pytest.raises(FileExistsError):
            call(folder, "b", "a")
    with pytest.raises(FileExistsError):
        syscalls.open_named(folder, "a")
    assert (tmp_path / "a").read_bytes() == b""


def test_an_unnamed_file_is_created_and_linked(folder: int, tmp_path: Path) -> None:
    require(Naming.UNNAMED, tmp_path)
    fd = syscalls.open_unnamed(folder)
    os.write(fd, b"1")
    assert list(tmp_path.iterdir()) == []
    syscalls.link_unnamed(fd, folder, "a")
    with pytest.raises(FileExistsError):
        syscalls.link_unnamed(fd, folder, "a")
    os.close(fd)
    assert (tmp_path / "a").read_bytes() == b"1"


def test_an_unnamed_file_is_linked_without_proc(folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require(Naming.UNNAMED, tmp_path)
    fd = syscalls.open_unnamed(folder)
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    monkeypatch.setattr(os, "link", _raise(FileNotFoundError(errno.ENOENT, "no /proc")))
    with pytest.raises(syscalls.Lacking):
        syscalls.link_unnamed(fd, folder, "a")
    os.close(fd)


def test_an_unnamed_file_in_a_removed_folder_is_an_error(tmp_path: Path) -> None:
    require(Naming.UNNAMED, tmp_path)
    (tmp_path / "x").mkdir()
    folder = os.open(tmp_path / "x", os.O_RDONLY)
    fd = syscalls.open_unnamed(folder)
    (tmp_path / "x").rmdir()
    with pytest.raises(FileNotFoundError):
        syscalls.link_unnamed(fd, folder, "a")
    os.close(fd)
    with pytest.raises(FileNotFoundError):  # from the first or the second call, depending on the file system
        syscalls.link_unnamed(syscalls.open_unnamed(folder), folder, "a")
    os.close(folder)


def test_other_c_libraries_are_supported(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "_LIBC", SimpleNamespace())
    with pytest.raises(syscalls.Lacking):
        syscalls.rename_new(folder, "a", "b")


def test_a_refusal_of_direct_input_and_output_is_recognized(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "no")
        return os.O_WRONLY

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert not syscalls.set_direct(file, True)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP, errno.EINTR])
def test_space_is_allocated_for_a_new_file(file: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(syscalls, "_LIBC", SimpleNamespace(fallocate=fail))
    if code in {errno.ENOSPC, errno.EDQUOT}:
        with pytest.raises(OSError, match=os.strerror(code)):
            syscalls.allocate(file, 100)
    else:
        syscalls.allocate(file, 100)
    assert os.fstat(file).st_size == 0


def _raise(error: Exception) -> object:
    def call(*args: object, **kwargs: object) -> None:
        raise error

    return call
