"""A folder comes back as a whole, and nothing that was in its place is lost."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import casckpt
from casckpt.errors import Conflict, InvalidInput, MissingKey, StorageError
from casckpt.frontends.files import exporting
from casckpt.frontends.interchange import new_files
from casckpt.storage.local import syscalls
from tests.support.dying import Killed
from tests.support.forks import forked
from tests.support.reads import blob_bytes
from tests.support.stored_folder import described


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with small and large files, links, and folders."""
    root = tmp_path / "folder"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "closed").mkdir()
    (root / "closed" / "file").write_bytes(b"in a folder that nobody may change")
    (root / "deep" / "er" / "small").write_text("small")
    torch.save({"w": torch.arange(30_000.0)}, root / "deep" / "w.pt")
    (root / "same.bin").write_bytes(os.urandom(100_000))
    (root / "link").symlink_to("deep/er")
    (root / "empty").touch(0o400)
    (root / "closed").chmod(0o500)
    return root


@pytest.fixture
def stored(store: casckpt.Store, folder: Path) -> casckpt.Checkpoint:
    return store.import_files(folder, run="r", step=1)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "place" / "out"


def beside(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir())


def export(store: casckpt.Store, out: Path, **options: Any) -> casckpt.Exported:
    return store.export("r@1", out, format="files", **options)


# a place where nothing is


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_new_or_empty_folder_is_filled_and_files_of_an_earlier_export_are_left(
    store: casckpt.Store, folder: Path, stored: casckpt.Checkpoint, out: Path, is_empty: bool
) -> None:
    out.parent.mkdir()
    before = out.with_name("out.before")
    before.mkdir()
    (before / "kept").touch()
    if is_empty:
        out.mkdir()
    for options in ({}, {"force": True}):
        shutil.rmtree(out, ignore_errors=True)
        done = export(store, out, **options)
        assert described(out) == described(folder)
        assert (done.format, done.files, done.notes) == ("files", (out,), ()) or done.files
        assert [path.name for path in before.iterdir()] == ["kept"]
    assert beside(out) == ["out", "out.before"]


def test_the_folder_may_be_a_link(store: casckpt.Store, folder: Path, stored: casckpt.Checkpoint, out: Path) -> None:
    real = out.with_name("real")
    real.mkdir(parents=True)
    out.symlink_to("real")
    export(store, out)
    (real / "mine").touch()
    assert "mine" in "".join(export(store, out, force=True).notes)
    assert out.is_symlink()
    assert described(real) == described(folder)
    assert beside(out) == ["out", "real", "real.before"]


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("nothing/there")])
def test_a_file_in_place_of_the_folder_is_refused(
    store: casckpt.Store, stored: casckpt.Checkpoint, out: Path, make: Callable[[Path], None]
) -> None:
    out.parent.mkdir()
    make(out)
    with suppress(Conflict):
        export(store, out, force=True)
    if out.is_symlink():  # it names the folder to create
        assert (out.parent / "nothing" / "there" / "same.bin").exists()
    else:
        assert out.read_bytes() == b""


@pytest.mark.parametrize("where", ["store", "store/objects/new", ".", ".."])
def test_a_folder_in_the_store_or_around_it_is_refused(
    store: casckpt.Store, store_path: Path, stored: casckpt.Checkpoint, where: str
) -> None:
    path = store_path.parent / where
    before = sorted(store_path.rglob("*"))
    for force in (False, True):
        with pytest.raises((InvalidInput, Conflict)):
            export(store, path, force=force)
    assert sorted(store_path.rglob("*")) == before


# a single file


def test_a_single_file_replaces_a_file_or_link_but_no_folder(store: casckpt.Store, folder: Path, out: Path) -> None:
    (folder / "same.bin").chmod(0o640)
    store.import_files(folder / "same.bin", run="r", step=1)
    data = (folder / "same.bin").read_bytes()
    export(store, out)
    assert out.read_bytes() == data
    assert out.stat().st_mode & 0o777 == 0o640
    out.write_bytes(data[:-1] + b"?")
    with pytest.raises(Conflict):
        export(store, out)
    export(store, out, force=True)
    assert out.read_bytes() == data
    out.unlink()
    out.with_name("target").write_bytes(b"not ours")
    out.symlink_to("target")
    export(store, out, force=True)
    assert out.read_bytes() == data
    assert out.with_name("target").read_bytes() == b"not ours"
    out.unlink()
    out.mkdir()
    for force in (False, True):
        with pytest.raises((Conflict, StorageError)):
            export(store, out, force=force)
    assert beside(out) == ["out", "target"]
    assert list(out.iterdir()) == []


# a place that is taken


def change(out: Path) -> None:
    """Do to a folder what a trainer and its user do."""
    (out / "closed").chmod(0o700)
    (out / "closed" / "mine").write_bytes(b"mine")
    with (out / "deep" / "w.pt").open("r+b") as file:
        file.seek(50_000)
        file.write(b"other bytes")
    (out / "deep" / "er" / "small").unlink()
    (out / "deep" / "er" / "small").mkdir()
    (out / "deep" / "er" / "small" / "mine").write_bytes(b"mine")
    (out / "checkpoint-9").mkdir()
    (out / "checkpoint-9" / "weights").write_bytes(b"weights")
    (out / "to a folder").symlink_to("deep")
    (out / "to nothing").symlink_to("/absent")
    (out / "nothing in it").mkdir()
    (out / "link").unlink()
    (out / "link").write_bytes(b"a file of mine")
    os.mkfifo(out / "pipe")


MINE = {
    "closed/mine", "deep/er/small/mine", "checkpoint-9/weights", "to a folder", "to nothing", "nothing in it", "pipe",
}  # fmt: skip


def test_what_the_checkpoint_does_not_have_is_moved_and_listed(
    store: casckpt.Store, folder: Path, stored: casckpt.Checkpoint, out: Path
) -> None:
    export(store, out)
    change(out)
    with pytest.raises(Conflict, match="not empty"):
        export(store, out)
    done = export(store, out, force=True)
    assert described(out) == described(folder)
    before = out.with_name("out.before")
    left = {path.relative_to(before).as_posix() for path in before.rglob("*")}
    assert left >= MINE
    assert not left & {"same.bin", "deep/w.pt", "closed/file", "empty"}
    assert (before / "closed" / "mine").read_bytes() == b"mine"
    assert os.readlink(before / "to a folder") == "deep"
    [note] = done.notes
    assert "now in out.before" in note
    (out / "later").touch()
    assert export(store, out, force=True).notes == ("the checkpoint does not have 'later': now in out.before2",)
    assert described(out) == described(folder)
    assert beside(out) == ["out", "out.before", "out.before2"]


@pytest.mark.parametrize("kind", ["file", "link to a file", "link to a folder", "link to nothing", "folder", "pipe"])
def test_a_note_names_the_only_thing_that_is_left(
    store: casckpt.Store, stored: casckpt.Checkpoint, out: Path, kind: str
) -> None:
    export(store, out)
    place = out / "deep" / "lone"
    if kind.startswith("link"):
        place.symlink_to({"a file": "/etc/passwd", "a folder": "/etc", "nothing": "nothing"}[kind[8:]])
    else:
        makers: dict[str, Callable[[Path], object]] = {"file": Path.touch, "folder": Path.mkdir, "pipe": os.mkfifo}
        makers[kind](place)
    assert export(store, out, force=True).notes == ("the checkpoint does not have 'deep/lone': now in out.before",)
    assert os.path.lexists(out.with_name("out.before") / "deep" / "lone")


def test_an_unchanged_folder_is_not_read_from_the_store_and_leaves_nothing(
    store: casckpt.Store, folder: Path, stored: casckpt.Checkpoint, out: Path
) -> None:
    export(store, out)
    with blob_bytes(store) as reads:
        assert export(store, out, force=True).notes == ()
    assert described(out) == described(folder)
    assert beside(out) == ["out"]
    assert sum(reads) < 2000  # small files, and what is around tensors
    with (out / "same.bin").open("r+b") as file:
        file.write(b"other")
    with blob_bytes(store) as reads:
        export(store, out, force=True)
    assert 100_000 <= sum(reads) < 102_000
    assert described(out) == described(folder)


def test_small_files_are_read_together(
    store: casckpt.Store, folder: Path, stored: casckpt.Checkpoint, out: Path
) -> None:
    """They share the cells of the store."""
    for number in range(50):
        (folder / f"{number}.json").write_bytes(os.urandom(2000))
    store.import_files(folder, run="r", step=1, overwrite=True)
    for force in (False, True):
        with blob_bytes(store) as reads:
            export(store, out, force=force)
        assert sum(reads) < 100_000 * (2 - force) + 150_000
    assert described(out) == described(folder)


def test_nothing_outside_is_touched_through_links_in_the_old_folder(
    store: casckpt.Store, folder: Path, stored: casckpt.Checkpoint, out: Path
) -> None:
    outside = out.parent / "outside"
    shutil.copytree(folder, outside, symlinks=True)
    (outside / "deep" / "er" / "small").write_text("mine!")
    before = described(outside)
    export(store, out)
    shutil.rmtree(out / "deep")
    (out / "deep").symlink_to(outside / "deep")
    (out / "same.bin").unlink()
    (out / "same.bin").symlink_to(outside / "same.bin")
    shutil.rmtree(out / "closed")
    (out / "closed").symlink_to(outside / "closed")
    export(store, out, force=True)
    assert described(outside) == before
    assert described(out) == described(folder)


def test_files_are_copies_and_no_hard_links(store: casckpt.Store, stored: casckpt.Checkpoint, out: Path) -> None:
    export(store, out)
    os.link(out / "same.bin", out.parent / "mine")
    export(store, out, force=True)
    assert (out / "same.bin").stat().st_nlink == 1
    assert (out.parent / "mine").stat().st_nlink == 1


# what goes wrong


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_exchange_is_refused_before_anything_is_written(
    store: casckpt.Store, stored: casckpt.Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    export(store, out)
    (out / "mine").touch()
    before = described(out)

    def refuse(*_: object) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(syscalls, "_LIBC", mock.Mock(renameat2=refuse, syncfs=lambda handle: 0))
    with (
        mock.patch("casckpt.frontends.files.exporting._Job.write") as writes,
        pytest.raises(StorageError, match="cannot exchange folders: export to a folder that does not exist"),
    ):
        export(store, out, force=True)
    assert not writes.called
    assert described(out) == before
    assert beside(out) == ["out"]
    new = out.with_name("new")  # as advised
    export(store, new)
    assert beside(out) == ["new", "out"]


def test_a_folder_that_cannot_move_is_refused_before_anything_is_written(
    store: casckpt.Store, stored: casckpt.Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out.mkdir(parents=True)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == out)
    for force in (False, True):
        with pytest.raises(StorageError, match="mounted, and cannot move: export to a folder in it"):
            export(store, out, force=force)
    assert beside(out) == ["out"]
    export(store, out / "inner")  # as advised
    assert [path.name for path in out.iterdir()] == ["inner"]


def test_everything_is_durable_before_it_appears(store: casckpt.Store, stored: casckpt.Checkpoint, out: Path) -> None:
    export(store, out)
    (out / "mine").touch()
    calls, sync, swap = list[str](), syscalls.sync_file_system, syscalls.exchange

    def syncing(folder: Path) -> None:
        [new] = folder.glob("new")
        calls.append(f"sync {len([*new.rglob('*')])}")
        sync(folder)

    def exchanging(folder: int, one: str, other: str) -> None:
        calls.append(f"exchange {other}")
        swap(folder, one, other)

    with (
        mock.patch.object(exporting, "sync_file_system", syncing),
        mock.patch.object(new_files, "exchange", exchanging),
    ):
        export(store, out, force=True)
    assert calls == ["exchange other", "sync 9", "exchange out.before"]
    error = OSError(errno.EIO, "broken")
    with mock.patch.object(exporting, "sync_file_system", side_effect=error), pytest.raises(StorageError):
        export(store, out.with_name("new"))
    assert beside(out) == ["out", "out.before"]


_CALLS = ("rename", "replace", "mkdir", "unlink", "rmdir", "symlink", "chmod", "fsync", "open")


@contextmanager
def _struck(at: int, *, error: BaseException) -> Iterator[list[int]]:
    """Let an export fail at a point: before or after a call. A dead process makes no more calls."""
    count = [0]

    def pass_point() -> None:
        count[0] += 1
        if count[0] == at or (count[0] > at and isinstance(error, Killed)):
            raise error

    def strike(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            pass_point()
            result = real(*arguments, **options)
            pass_point()
            return result

        return call

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(io, "open", strike(io.open)))  # as pathlib opens files
        for name in _CALLS:
            patches.enter_context(mock.patch.object(os, name, strike(getattr(os, name))))
        patches.enter_context(mock.patch.object(new_files, "exchange", strike(syscalls.exchange)))
        yield count


def everything(folder: Path) -> dict[str, Any]:
    return {item["path"]: {**item, "mode": 0} for item in described(folder)}


@pytest.mark.parametrize("error", [Killed(), OSError(errno.EIO, "broken")], ids=["killed", "error"])
def test_the_old_or_the_new_folder_is_there_wherever_an_export_ends(  # noqa: PLR0917 - fixtures
    store: casckpt.Store, folder: Path, stored: casckpt.Checkpoint, out: Path, error: BaseException, full: bool
) -> None:
    """And no file of somebody else is lost. The mode of the root, and permissions in OUT.before, may differ."""
    before, template = out.with_name("out.before"), out.with_name("template")
    export(store, template)
    for path in (template / "closed", template):
        path.chmod(0o700)
    (template / "mine").write_bytes(b"mine")
    (template / "closed" / "mine").write_bytes(b"mine")
    (template / "same.bin").write_bytes(b"an earlier version")
    old, new = everything(template), everything(folder)
    for at in range(2 - full, 10_000, 2 - full):  # after each call, or before it, too
        shutil.copytree(template, out, symlinks=True)
        with _struck(at, error=error) as count, suppress(Killed, StorageError, OSError):
            export(store, out, force=True)
        now, held = everything(out), everything(before) if before.exists() else {}
        assert now in (old, new), at
        if now == new:
            assert all(held[name] == old[name] for name in ("mine", "closed/mine")), at
        else:
            assert held in ({}, new) if isinstance(error, Killed) else held == {}, at
        shutil.rmtree(before, ignore_errors=True)
        export(store, out, force=True)
        assert everything(out) == new
        assert [name for name in beside(out) if name.startswith(".")] == [], at
        for path in (out, before):
            shutil.rmtree(path, ignore_errors=True)
        if count[0] < at:
            break
    assert 160 < at < 9_000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_user_may_export_again_onto_files_and_folders_that_are_closed_to_all(
    store: casckpt.Store, store_path: Path, folder: Path, disk_path: Path
) -> None:
    (folder / "same.bin").chmod(0)
    (folder / "deep").chmod(0)
    store.import_files(folder, run="r", step=1)
    disk_path.chmod(0o755)
    place = disk_path / "place"
    shutil.copytree(store_path, place / "store")
    for path in (place, *place.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    other = casckpt.open(place / "store", cache_dir=place / "cache")

    def act() -> None:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        for _ in range(2):
            assert export(other, place / "out", force=True).notes == ()

    export(store, disk_path / "warm")  # so that the other user imports nothing
    with forked(act):
        pass
    assert described(place / "out") == described(folder)
    assert sorted(path.name for path in place.iterdir()) == ["cache", "out", "store"]


def test_another_program_may_create_the_folder_meanwhile(
    store: casckpt.Store, stored: casckpt.Checkpoint, out: Path
) -> None:
    write = exporting._Job.write

    def and_create(self: exporting._Job, *given: Any) -> None:
        write(self, *given)
        out.mkdir()
        (out / "mine").touch()

    with mock.patch.object(exporting._Job, "write", and_create), pytest.raises(Conflict, match="not empty"):
        export(store, out, force=True)
    assert [path.name for path in out.iterdir()] == ["mine"]
    assert beside(out) == ["out"]


def test_files_whose_tensors_were_dropped_are_left_out_by_name(
    store: casckpt.Store, folder: Path, stored: casckpt.Checkpoint, out: Path
) -> None:
    store.save({"later": torch.ones(1)}, run="r", step=2)
    store.thin("r@1", drop="*w.pt*data*")
    done = export(store, out)
    assert done.left_out == ("deep/w.pt",)
    expected = [item for item in described(folder) if item["path"] != "deep/w.pt"]
    assert described(out) == expected


def test_a_pattern_drops_a_small_file_only_with_those_that_share_its_entry_and_a_slash(
    store: casckpt.Store, folder: Path, stored: casckpt.Checkpoint, out: Path
) -> None:
    """Regression: a pattern for the first of several small files dropped all of them."""
    store.save({"later": torch.ones(1)}, run="r", step=2)
    (pack,) = [key for key in stored.tensors if key.startswith("/")]
    with pytest.raises(MissingKey, match="no tensor of the chosen checkpoints matches"):
        store.thin("r@1", drop=f"*{pack[1:]}")
    export(store, out)
    assert described(out) == described(folder)
    store.thin("r@1", drop="/*")
    assert {"closed/file", "deep/er/small"} <= {*export(store, out, force=True).left_out}


def test_a_stored_file_is_not_exported_onto_a_folder(store: casckpt.Store, tmp_path: Path, out: Path) -> None:
    (tmp_path / "ckpt.pt").write_bytes(b"weights")
    store.import_files(tmp_path / "ckpt.pt", run="file", step=1)
    out.mkdir(parents=True)
    for force in (False, True):
        with pytest.raises(Conflict, match="choose the name of a file in it"):
            store.export("file@1", out, force=force)
    store.export("file@1", out / "ckpt.pt")
    assert (out / "ckpt.pt").read_bytes() == b"weights"
