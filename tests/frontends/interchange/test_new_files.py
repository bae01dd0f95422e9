"""An export removes leftovers of a killed export to the same path."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from casckpt.errors import Conflict, StorageError
from casckpt.frontends.interchange.new_files import new_file, new_folder

KILLED = """
import os, signal, sys
from pathlib import Path
from casckpt.frontends.interchange.new_files import new_file, new_folder

kind, path = sys.argv[1], Path(sys.argv[2])
made = new_file(path, force=True) if kind == "file" else new_folder(path, force=True, stale=lambda name: False, last=())
with made as temporary:
    (temporary if kind == "file" else temporary / "a").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def begin(kind: str, path: Path, *, force: bool = True) -> AbstractContextManager[Path]:
    if kind == "file":
        return new_file(path, force=force)
    return new_folder(path, force=force, stale=lambda name: False, last=())


def export(kind: str, path: Path, *, force: bool = True) -> None:
    with begin(kind, path, force=force) as temporary:
        (temporary if kind == "file" else temporary / "a").write_bytes(b"new")


@pytest.mark.parametrize("kind", ["file", "folder", "folder that is there"])
def test_an_export_removes_leftovers_of_a_killed_export(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "folder that is there":
        out.mkdir()
    killed = subprocess.run([sys.executable, "-c", KILLED, kind, out], check=False)
    assert killed.returncode < 0
    assert len(list(tmp_path.rglob(".out.casckpt-*"))) == 1
    export(kind, out)
    assert list(tmp_path.rglob(".*")) == []
    assert (out if kind == "file" else out / "a").read_bytes() == b"new"


def test_a_folder_with_only_leftovers_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / ".out.casckpt-1234").mkdir(parents=True)
    out = tmp_path / "out"
    (out / ".out.casckpt-1234").mkdir(parents=True)
    with new_folder(out, force=False, stale=lambda name: False, last=()) as temporary:
        (temporary / "a").touch()
    assert [path.name for path in out.iterdir()] == ["a"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_folder_of_a_running_export_is_kept(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    with new_file(out, force=True) as temporary:
        temporary.write_bytes(b"of the first")
        export(kind, tmp_path / "out") if kind == "file" else export(kind, tmp_path / "other")
        assert temporary.read_bytes() == b"of the first"
    assert out.read_bytes() == b"of the first"
    with pytest.raises(Conflict), new_file(out, force=False):
        pass


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_second_of_two_exports_to_a_path_raises_conflict(tmp_path: Path, kind: str) -> None:
    """With force, the second export replaces the first."""
    out = tmp_path / "out"
    with pytest.raises(Conflict, match=r"out (already exists|is not empty)"):
        _overtaken(kind, out, force=False)
    assert (out if kind == "file" else out / "a").read_bytes() == b"new"
    _overtaken(kind, tmp_path / "other", force=True)
    assert (tmp_path / "other" if kind == "file" else tmp_path / "other" / "a").read_bytes() == b"second"
    assert list(tmp_path.rglob(".*")) == []


def _overtaken(kind: str, path: Path, *, force: bool) -> None:
    with begin(kind, path, force=force) as second:
        export(kind, path, force=force)
        (second if kind == "file" else second / "a").write_bytes(b"second")


def test_the_error_advises_freeing_space_only_if_the_disk_is_full(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(StorageError, match=r"x cannot be written: [^;]*; choose a different location$"),
        begin("file", tmp_path / "file" / "x"),
    ):
        pass


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize(("code", "is_said"), [(errno.EIO, True), (errno.EDQUOT, True), (errno.EINVAL, False)])
def test_names_that_are_not_durable_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, code: int, is_said: bool
) -> None:
    real = os.fsync

    def sync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    expected = pytest.raises(StorageError, match=f"out cannot be written: {os.strerror(code)}")
    with expected if is_said else nullcontext():
        export(kind, tmp_path / "out")
