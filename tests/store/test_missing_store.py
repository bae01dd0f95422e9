"""Whether a program may create a store where one was before: on a missing mount, in a deleted folder, or never."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import casckpt
from casckpt import Checkpointer, Store
from casckpt.errors import InvalidInput, NotFound
from casckpt.frontends.dcp import StorageWriter
from casckpt.repository import catalogue, repository
from casckpt.storage.local.store import mount_point
from tests.support import dcp

STATE = {"w": torch.ones(3)}
Program = Callable[[str, bool | None], object]


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of mounts, in which the folder ``disk`` is one."""
    table, disk = tmp_path / "mounts", tmp_path / "disk"
    disk.mkdir()
    table.write_text(f"/dev/a / ext4 rw 0 0\n/srv/disk {disk} none rw,bind 0 0\n")
    for module in (catalogue, repository):
        monkeypatch.setattr(module, "mount_point", partial(mount_point, mounts=table))
    monkeypatch.setenv("CASCKPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CASCKPT_CREATE", raising=False)
    return table


def save(url: str, create: bool | None = None) -> Store:
    store = casckpt.open(url, create=create)
    store.save(STATE, run="r", step=1)
    return store


def save_async(url: str, create: bool | None = None) -> object:
    return casckpt.open(url, create=create).save_async(STATE, run="r", step=1).result()


def resume(url: str, create: bool | None = None) -> object:
    return Checkpointer(url, run="r", create=create).resume(torch.nn.Linear(1, 1))


def resume_healthy(url: str, create: bool | None = None) -> object:
    return Checkpointer(casckpt.open(url), run="r", create=create).resume(torch.nn.Linear(1, 1), healthy=True)


def look(url: str, create: bool | None = None) -> object:
    return Checkpointer(url, run="r", create=create).contains_checkpoint()


def check(url: str, create: bool | None = None) -> object:
    casckpt.open(url, create=create).check(STATE, run="r")
    return None


def save_with_dcp(url: str, create: bool | None = None) -> object:
    try:
        return dcp.save(dict(STATE), StorageWriter(casckpt.open(url, create=create), run="r", step=1))
    except CheckpointException as error:
        raise dcp.causes(error)[0] from error


def init(url: str, create: bool | None = None) -> object:
    return casckpt.open(url, create=create).create()


PROGRAMS: list[Program] = [save, save_async, resume, resume_healthy, look, check, save_with_dcp, init]


def unmount(mounts: Path) -> None:
    """Leave the empty folder below, as an unmounted disk does."""
    shutil.rmtree(mounts.parent / "disk/ckpts")
    mounts.write_text("/dev/a / ext4 rw 0 0\n")


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_takes_a_missing_mount_for_a_new_store(program: Program, mounts: Path) -> None:
    disk = mounts.parent / "disk"
    save(str(disk / "ckpts"))
    unmount(mounts)
    with pytest.raises(NotFound, match=rf"nothing is mounted at {disk} now: mount it.*CASCKPT_CREATE=1"):
        program(str(disk / "ckpts"), None)
    assert [*disk.iterdir()] == []


def test_the_advice_for_a_missing_mount_works(mounts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(mounts.parent / "disk/ckpts")
    first, table = save(url), mounts.read_text()
    unmount(mounts)
    with pytest.raises(NotFound):
        first.save(STATE, run="r", step=2)  # in a job that had the store open
    save(url, create=True)
    shutil.rmtree(url)
    assert resume(url) is None, "the new store was on the disk below, so its mount is not missing"
    save(url)
    mounts.write_text(table)
    assert casckpt.open(url).checkpoints()
    unmount(mounts)
    with pytest.raises(NotFound):
        resume(url)
    monkeypatch.setenv("CASCKPT_CREATE", "1")
    assert resume(url) is None
    assert save(url).exists()


def test_a_link_to_a_store_on_a_missing_mount_is_not_followed_to_the_disk_below(mounts: Path) -> None:
    link = mounts.parent / "link"
    link.symlink_to(mounts.parent / "disk/ckpts")
    (mounts.parent / "disk/ckpts").mkdir()
    save(str(link))
    unmount(mounts)
    with pytest.raises(NotFound, match="nothing is mounted"):
        resume(str(link))


def test_a_deleted_store_is_created_again_with_one_warning(mounts: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = str(mounts.parent / "disk/ckpts")
    with caplog.at_level(logging.INFO, "casckpt"):
        save(url)
    assert f"created a new store at {url}" in caplog.text
    assert "is gone" not in caplog.text
    shutil.rmtree(url)
    caplog.clear()
    checkpointer = Checkpointer(url, run="r")
    assert checkpointer.resume(torch.nn.Linear(1, 1)) is None
    checkpointer.save(1, torch.nn.Linear(1, 1))
    checkpointer.close()
    assert caplog.text.count(f"the store at {url} is gone") == 1


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_job_that_continues_can_require_a_store(
    program: Program, by: str, mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(mounts.parent / "never")
    if by == "environment":
        monkeypatch.setenv("CASCKPT_CREATE", "0")
    with pytest.raises(NotFound, match="requires one: check the path"):
        program(url, False if by == "argument" else None)
    assert not Path(url).exists()


def test_the_first_job_of_all_needs_no_setting(mounts: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = str(mounts.parent / "disk/new")
    assert resume(url) is None
    save(url)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_environment_accepts_only_0_and_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CASCKPT_CREATE", "no")
    with pytest.raises(InvalidInput, match="0 requires a store, and 1 allows a new one"):
        casckpt.open(tmp_path)
    monkeypatch.setenv("CASCKPT_CREATE", "0")
    assert save(str(tmp_path / "x"), create=True).exists(), "an argument wins"


@pytest.mark.parametrize("wrong", [0, 1, "no", "0"])
def test_create_accepts_only_booleans(wrong: Any, tmp_path: Path) -> None:
    for make in (casckpt.open, partial(Checkpointer, run="sft")):
        with pytest.raises(InvalidInput, match="pass True, False or None"):
            make(tmp_path / "x", create=wrong)
    with pytest.raises(InvalidInput, match="pass True, False or None"):
        Checkpointer(casckpt.open(tmp_path / "x"), run="sft", create=wrong)


_REAL = """
import subprocess, sys
from pathlib import Path
from casckpt.errors import NotFound
from casckpt.repository.repository import open_repository
from casckpt.storage import open_storage
disk, other = Path("disk").absolute(), Path("other").absolute()
subprocess.run(["mount", "--bind", other, disk], check=True)
assert open_repository(open_storage(disk / "ckpts"), "cache").create()
subprocess.run(["umount", disk], check=True)
try:
    open_repository(open_storage(disk / "ckpts"), "cache").create()
except NotFound as error:
    assert f"nothing is mounted at {disk} now" in str(error)
else:
    raise SystemExit("it created a store")
subprocess.run(["mount", "--bind", other, disk], check=True)
assert not open_repository(open_storage(disk / "ckpts"), "cache").create()
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="only root can mount, in a namespace of its own",
)
def test_a_real_bind_mount_is_missed(tmp_path: Path) -> None:
    for name in ("disk", "other"):
        (tmp_path / name).mkdir()
    subprocess.run(["unshare", "-m", sys.executable, "-c", _REAL], cwd=tmp_path, check=True)
