"""Small file systems that are full.

``python -m tests.support.full_disks KIND LACK SCENE FOLDER`` mounts one that only this process sees, runs a scene in a
store there, and fails if that frees no space or loses something. KIND: tmpfs or ext4. LACK: bytes or inodes. The exit
status is 2 if nothing can be mounted here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from casckpt.errors import StorageError
from casckpt.repository.repository import Repository
from casckpt.storage.local import syscalls
from casckpt.storage.local.spare import COUNT, SIZE
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store

SAVES, VALUES = 24, 40_000
_NEWNS, _PRIVATE, _REC = 0x20000, 1 << 18, 1 << 14


def mount(kind: str, lack: str, folder: Path) -> Path:
    """Mount a file system that only this process and its children see."""
    libc, at = ctypes.CDLL(None, use_errno=True), folder / "mount"
    if libc.unshare(_NEWNS) or libc.mount(None, b"/", None, ctypes.c_ulong(_PRIVATE | _REC), None):
        raise SystemExit(2)
    at.mkdir()
    if kind == "tmpfs":
        run("mount", "-t", kind, "-o", "size=12m,nr_inodes=400" if lack == "inodes" else "size=12m", kind, at)
        return at
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(24 << 20)
    run(f"mkfs.{kind}", "-q", "-m", "0", "-b", "4096", *(("-N", "400") if lack == "inodes" else ()), image)
    run("mount", "-o", "loop", image, at)
    return at


def run(*command: str | Path) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit(2) from None  # skipped


def fill(at: Path, lack: str) -> list[Path]:
    """Take all bytes or inodes that are left, as another program does, and return its files."""
    made: list[Path] = []
    try:
        while lack == "inodes":
            made.append(at / f"foreign-{len(made)}")
            made[-1].touch()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        made.pop()
    while lack == "bytes":
        made.append(at / f"foreign-{len(made)}")
        try:
            with made[-1].open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            with opened_folder(at) as fd:
                syscalls.sync_all(fd)
            if not os.statvfs(at).f_bavail or len(made) > 3:
                break
    return made


@contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"model": torch.randn(VALUES, generator=generator), "optim": torch.randn(VALUES // 4, generator=generator)}


def opened(at: Path) -> Store:
    return Store(Repository(LocalStore(at / "store"), at.parent / "cache"))


def gc(store: Store) -> None:
    found = store.gc(keep_last=1, min_age=0)
    assert len(found.purged) == SAVES - 1, found


def forget(store: Store) -> None:
    assert len(store.forget(f"default@0..{SAVES - 2}")) == SAVES - 1
    assert [one.step for one in store.checkpoints()] == [SAVES - 1]
    gc(store)


def thin(store: Store) -> None:
    assert len(store.thin("default@0..3", drop="optim").thinned) == 4
    found = store.gc(min_age=0)
    assert found.deleted_manifests == 4, found


def save(store: Store) -> None:
    before = set(Path(store.url).rglob("objects/*/*"))
    for step in range(SAVES, SAVES + 5):
        try:
            store.save(state(step), step=step)
        except StorageError as error:
            if not error.full:
                raise
        else:
            raise AssertionError("there was room")
    after = before
    for _ in range(100):
        after = set(Path(store.url).rglob("objects/*/*"))
        if after == before:
            break
        time.sleep(0.1)
    assert after == before
    gc(store)


SCENES: dict[str, Callable[[Store], None]] = {"gc": gc, "forget": forget, "thin": thin, "save": save}


def main(kind: str, lack: str, scene: str, folder: Path) -> None:
    """Fill a file system, run a scene in its store, and check that there is room again, and that nothing is lost."""
    at = mount(kind, lack, folder)
    store = opened(at)
    for step in range(SAVES):
        store.save(state(step), step=step)
    fill(at, lack)
    SCENES[scene](opened(at))
    store = opened(at)
    for checkpoint in store.checkpoints():
        if scene != "thin":
            read = store.load({name: torch.empty_like(value) for name, value in state(0).items()}, checkpoint)
            assert read.step == checkpoint.step
    if scene == "thin":  # of small tensors, which share blobs with the others, it frees only manifests
        return
    store.save(state(99), step=99)
    assert not store.verify().is_damaged
    store.gc(min_age=0)
    sizes = [path.stat().st_size for path in (at / "store" / ".spare").iterdir()]
    assert sizes == [SIZE] * COUNT, sizes


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
