"""A save raises an error if its file names do not become durable, because a power loss could then remove it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.errors import StorageError
from casckpt.storage.local import syscalls


def failing_in(name: str, times: int) -> Callable[[int], None]:
    """Return an fsync that fails the first ``times`` times for a folder with this name."""
    sync, left = syscalls.sync, [times]

    def fail(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir() and path.name == name and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        sync(fd)

    return fail


@pytest.mark.parametrize("folder", ["commits", "transactions", "objects"])
def test_a_save_whose_names_do_not_become_durable_raises_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"x": torch.arange(5)}, run="run", step=0)
    monkeypatch.setattr(syscalls, "sync", failing_in(folder, 1000))
    with pytest.raises(StorageError, match="the disk reports an I/O error"):
        store.save({"x": torch.arange(6)}, run="run", step=1)
    monkeypatch.undo()
    again = casckpt.open(tmp_path / "store")
    again.save({"x": torch.arange(7)}, run="run", step=2)  # the store still works
    again.gc(keep_last=1, min_age=0, wait=0, revoke_after=0)
    assert [one.step for one in again.checkpoints()] == [2]
    assert not again.verify().is_damaged


def test_a_commit_that_is_durable_on_the_second_attempt_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"x": torch.arange(5)}, run="run", step=0)
    monkeypatch.setattr(syscalls, "sync", failing_in("commits", 1))
    assert store.save({"x": torch.arange(6)}, run="run", step=1).step == 1


def test_setting_a_tag_that_does_not_become_durable_raises_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = casckpt.open(tmp_path / "store")
    for step in (0, 1):
        store.save({"x": torch.arange(5) + step}, run="run", step=step)
    store.tag("best", "run@0")
    monkeypatch.setattr(syscalls, "sync", failing_in("best", 1000))
    with pytest.raises(StorageError, match="the disk reports an I/O error"):
        store.tag("best", "run@1")
