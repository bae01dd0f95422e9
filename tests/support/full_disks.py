"""Small file systems that are full.

``python -m tests.support.full_disks KIND LACK SCENE JOB FOLDER`` mounts one that only this process sees, runs commands
in a store there, and fails if they free no space or lose something. KIND: tmpfs, ext4 or xfs. LACK: bytes, inodes or
quota. JOB: what another process does with the store: "open" (a save, until gc waits for it), "killed" (in a save),
"saving" (until a save succeeds), or "no job". The exit status is 2 if this cannot be tried here.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from casckpt.cli.main import cli
from casckpt.errors import StorageError
from casckpt.repository.repository import Repository
from casckpt.storage.local import syscalls
from casckpt.storage.local.spare import COUNT, SIZE
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.faulty import Call, FaultyStore, call_first
from tests.support.ranks import outcome_of
from tests.support.repositories import wait_for_clean_up
from tests.support.saves import CELL
from tests.support.scripts import run_script

PATIENCE = 3000.0  # seconds, for long loops; the tests have limits of their own
SAVES, VALUES = 24, 40_000
FULL = (errno.ENOSPC, errno.EDQUOT)
USERS = (20001, 20002)
_NEWNS, _PRIVATE, _REC = 0x20000, 1 << 18, 1 << 14
_SET_ATTRIBUTES, _INHERIT, _PROJECT, _SET_QUOTA, _EXCEED_QUOTAS = 0x401C5820, 0x200, 5, 0x800008, 24
_WAYS = {
    "inodes": (("-N", "1000"), ""),
    "quota": (("-I", "256", "-O", "quota,project"), ",prjquota"),
    "user quota": (("-O", "quota"), ",usrquota"),
    "reserved": (("-m", "50"), f",resuid={USERS[0]}"),
}
"""For each thing that a file system can lack, the options of mkfs.ext4 and mount."""


class Skipped(SystemExit):
    """This cannot be tried here."""

    def __init__(self, why: str) -> None:
        sys.stderr.write(" ".join(why.split()) + "\n")
        super().__init__(2)


def check_scene(module: str, *arguments: str | Path) -> None:
    """Run the main program of a module of these scenes, or skip the test if it cannot be tried here."""
    done = run_script(f"tests.support.{module}", *arguments, cwd=Path(__file__).parents[2], patience=PATIENCE)
    if done.status == 2:
        pytest.skip(done.told.strip().rpartition("\n")[2])
    assert done.status == 0, done.told[-3000:]


def mount(kind: str, lack: str, folder: Path, room: int = 12 << 20) -> Path:
    """Mount a file system with ``room`` bytes that only this process and its children see.

    What it can lack: bytes, inodes, the quota of a folder, or what is left for `USERS` but the first: of their quota,
    or because the rest is reserved.
    """
    libc, at = ctypes.CDLL(None, use_errno=True), folder / "mount"
    if libc.unshare(_NEWNS) or libc.mount(None, b"/", None, ctypes.c_ulong(_PRIVATE | _REC), None):
        raise Skipped("only root can mount")
    at.mkdir()
    if kind == "tmpfs":
        run("mount", "-t", kind, "-o", f"size={room},nr_inodes={1000 if lack == 'inodes' else 0}", kind, at)
        return at
    image, (made, mounted) = folder / "image", _WAYS.get(lack, ((), ""))
    with image.open("wb") as file:
        file.truncate(3 * room + (320 << 20 if kind == "xfs" else 16 << 20))
    made = ("-q",) if kind == "xfs" else ("-q", "-b", "4096", "-m", "0", *made)
    run(f"mkfs.{kind}", *made, image)
    run("mount", "-o", f"loop{mounted}", image, at)
    if "quota" not in lack:
        room_now = os.statvfs(at)
        with (at / "large").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, room_now.f_bavail * room_now.f_frsize - room)
    if lack == "user quota":
        set_quota(at, 0, USERS[1], room)
    if lack == "quota":
        (at / "folder").mkdir()
        with opened_folder(at / "folder") as fd:
            fcntl.ioctl(fd, _SET_ATTRIBUTES, struct.pack("IIIII8x", _INHERIT, 0, 0, _PROJECT, 0))
        set_quota(at, 2, _PROJECT, room)
        drop_capability(_EXCEED_QUOTAS)
        return at / "folder"
    return at


def set_quota(at: Path, kind: int, owner: int, nbytes: int) -> None:
    """Let a user (0) or project (2) have so many bytes."""
    (device,) = (line.split()[0] for line in Path("/proc/self/mounts").read_text().splitlines() if f" {at} " in line)
    block = struct.pack("8QI4x", nbytes >> 10, 0, 0, 0, 0, 0, 0, 0, 1)
    if ctypes.CDLL(None).quotactl(_SET_QUOTA << 8 | kind, device.encode(), owner, block):
        raise Skipped("no quota can be set")


def drop_capability(number: int) -> None:
    """Take from this process what only root may do."""
    libc, of, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert not libc.capget(of, sets)
    sets[0] &= ~(1 << number)
    assert not libc.capset(of, sets)


def run(*command: str | Path) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Skipped(f"{command[0]} does not work here: {error} {getattr(error, 'stderr', '')}") from None


def fill(at: Path, lack: str) -> list[Path]:
    """Take all bytes or inodes that are left, as another program does, and return its files."""
    made: list[Path] = []
    while len(made) < 4 or lack == "inodes":  # some file systems find a few more bytes later
        made.append(at / f"foreign-{len(made)}")
        try:
            with made[-1].open("xb", buffering=0) as file:
                for size in () if lack == "inodes" else (1 << 20, 4096):
                    with suppress_full():
                        while file.write(bytes(size)) == size:
                            pass
        except OSError as error:
            if error.errno not in FULL:
                raise
            made.pop()  # no inode
            break
        if lack != "inodes":
            with opened_folder(at) as fd:
                syscalls.sync_all(fd)
    return made


@contextmanager
def suppress_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise


@contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(VALUES, generator=generator) for name in ("model", "optim")}


def opened(at: Path, cache: Path | None = None) -> Store:
    return Store(Repository(LocalStore(at / "store"), cache or at.parent / "cache"))


class Job:
    """Another process that saves. It holds a save open, was killed in one, or saves again until that succeeds."""

    def __init__(self, at: Path, how: str) -> None:
        self.how, (said, self._says), (self._go, self._goes) = how, os.pipe(), os.pipe()
        self._at = at
        self._child = os.fork()
        if not self._child:
            os._exit(self._run())
        os.close(self._says)
        assert os.read(said, 1), "the job ended before it began to save"

    def _run(self) -> int:
        storage = FaultyStore(LocalStore(self._at / "store"))
        store = Store(Repository(storage, self._at.parent / "job"))
        storage.inject(call_first("put", self._hold, key="objects/*.manifest"))
        for step in count(SAVES):
            error = outcome_of(partial(store.save, state(step), step=step))
            if not isinstance(error, Exception):
                return 0
            assert isinstance(error, StorageError), error
            assert error.full, error
            if self.how == "open":
                return 0
        return 1

    def _hold(self, _: Call) -> None:
        os.write(self._says, b".")
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os.read(self._go, 1)

    def go_on(self) -> None:
        os.write(self._goes, b".")

    def end(self) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        assert status == (-signal.SIGKILL if self.how == "killed" else 0), status


class Commands:
    """Commands in the store, while a job holds a save open until the first gc waits for it."""

    def __init__(self, at: Path, job: Job | None) -> None:
        self.at, self._job = at, job if job and job.how == "open" else None

    def __call__(self, command: str, *options: str) -> Any:
        given = [command, str(self.at / "store"), *options, "--cache-dir", str(self.at.parent / "cache"), "--json"]
        output, (read, write) = self.at.parent / "output", os.pipe()
        child = os.fork()  # an interpreter of its own would first import torch
        if not child:
            os._exit(_command(given, output, write))
        os.close(write)
        told = ""
        with os.fdopen(read) as lines:
            for line in lines:
                told += line
                if self._job and "waiting for" in line:
                    self._job.go_on()
                    self._job = None
        status, printed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output.read_text()
        assert status == 0, (command, told, printed)
        assert self._job is None or command != "gc", told
        return json.loads(printed)


def _command(given: list[str], output: Path, errors: int) -> int:
    """Run a command, whose stdout is a file. Return its exit status."""
    try:
        sys.stdout, sys.stderr = output.open("w"), os.fdopen(errors, "w", buffering=1)
        cli.main(given)
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 1


def gc(run: Commands) -> None:
    found = run("gc", "--keep-last", "1", "--min-age", "0s")
    assert len(found["purged"]) == SAVES - 1, found


def forget(run: Commands) -> None:
    assert len(run("forget", f"default@0..{SAVES - 2}")["forgotten"]) == SAVES - 1
    gc(run)


def thin(run: Commands) -> None:
    assert len(run("thin", "default@0..11", "--drop", "optim")["thinned"]) == 12
    found = run("gc", "--min-age", "0s")
    assert found["deleted_manifests"] == 12, found
    assert found["deleted_blobs"] >= 12, found


def save(run: Commands) -> None:
    """Saves that fail remove what they wrote."""
    store, before = opened(run.at), set(run.at.rglob("objects/*/*"))
    for step in range(SAVES, SAVES + 5):
        error = outcome_of(partial(store.save, state(step), step=step))
        assert isinstance(error, StorageError)
        assert error.full
    wait_for_clean_up()
    assert set(run.at.rglob("objects/*/*")) == before
    gc(run)


SCENES: dict[str, Callable[[Commands], None]] = {"gc": gc, "forget": forget, "thin": thin, "save": save}


def main(kind: str, lack: str, scene: str, job: str, folder: Path) -> None:
    """Fill a file system, run a scene in its store, and check that there is room again, and that nothing is lost."""
    at = mount(kind, lack, folder)
    store = opened(at)
    store.create(cell_bytes=CELL, blob_bytes=64 << 10)
    for step in range(SAVES):
        store.save(state(step), step=step)
    running = None if job == "no job" else Job(at, job)
    fill(at, lack)
    if running and job == "saving":
        running.go_on()
    SCENES[scene](Commands(at, running))
    if running:
        running.end()
    store = opened(at)
    for checkpoint in store.checkpoints():
        names = ["model"] if scene == "thin" and checkpoint.step < 12 else ["model", "optim"]
        read = {name: torch.empty(VALUES) for name in names}
        assert store.load(read, checkpoint, unread="ignore").step == checkpoint.step
        assert all(torch.equal(read[name], state(checkpoint.step)[name]) for name in names)
    assert not store.verify().is_damaged
    if (scene, lack) == ("thin", "inodes"):  # so few thinned checkpoints free only as many files as gc prepares
        return
    store.save(state(99), step=99)
    store.gc(min_age=0)
    sizes = [path.stat().st_size for path in (at / "store" / ".spare").iterdir()]
    assert sizes == [SIZE] * COUNT, sizes


if __name__ == "__main__":
    kind, lack, scene, job, folder = sys.argv[1:]
    main(kind, lack, scene, job, Path(folder))
