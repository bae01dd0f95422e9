"""A disk that loses power. Names may be lost if their folder was not synced.

All processes see immediately that a name was added or removed, but this change remains pending until the folder is
synced. A power loss keeps none, all, or any of the pending changes. If a file was never synced, only its name remains.
POSIX promises no more than this. ext4 and XFS also preserve the order.
"""

from __future__ import annotations

import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from casckpt.storage.local import syscalls

FOLDER, TORN = "folder", "torn"
HOW = ("nothing", "all", "some", "some", "what was taken", "what was given")
"""Which of the pending changes became durable."""


class Killed(BaseException):
    """Ends the simulated process."""


@dataclass(frozen=True)
class Change:
    """A name in a folder. It belongs to a file (kept under ``inode``), `FOLDER`, `TORN`, or None if it was removed."""

    folder: str
    name: str
    inode: str | None


@dataclass(frozen=True)
class Instant:
    """The state that a power loss leaves, and the events that had been reported (``told``) before it."""

    durable: dict[str, str]
    pending: tuple[Change, ...]
    told: Any


class Disk:
    """The changes below ``root`` while `watched` is active. ``told`` returns the events that have been
    reported so far."""

    def __init__(self, root: Path, inodes: Path, told: Callable[[], Any]) -> None:
        self.root, self._inodes, self._told = str(root.resolve()), inodes, told
        inodes.mkdir()
        self._lock = threading.RLock()
        self._durable: dict[str, str] = {}
        self._pending: list[Change] = []
        self._synced: set[int] = set()  # inodes of files
        self.calls = 0
        self.keep: Callable[[int], bool] = lambda call: False
        self.dies_at: int | None = None
        self.kept: list[Instant] = []

    def now(self) -> Instant:
        """Return the current instant."""
        with self._lock:
            return Instant(dict(self._durable), tuple(self._pending), self._told())

    def lose_power(self, instant: Instant, target: Path, dice: random.Random) -> str:
        """Create a folder as a power loss may leave it. Return a description of the pending changes that it
        contains."""
        how, names = dice.choice(HOW), dict(instant.durable)
        happens = {
            "nothing": lambda one: False,
            "all": lambda one: True,
            "some": lambda one: dice.random() < 0.5,
            "what was taken": lambda one: one.inode is None,
            "what was given": lambda one: one.inode is not None,
        }[how]
        for change in filter(happens, instant.pending):
            if change.inode is None:
                names.pop(change.name, None)
            else:
                names[change.name] = change.inode
        target.mkdir()
        for name in sorted(names, key=lambda name: name.count("/")):
            path, inode = target / name, names[name]
            if path.parent.is_dir():  # otherwise, its folder was lost or removed
                path.mkdir() if inode == FOLDER else path.touch() if inode == TORN else os.link(inode, path)
        return how

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record added, removed and synced names. Nothing is actually synced."""
        mkdir, rmdir, unlink, replace = os.mkdir, os.rmdir, os.unlink, os.replace
        link, sync = syscalls.link_unnamed, syscalls.sync

        def making(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            with self._call(dir_fd, path) as name:
                mkdir(path, mode, dir_fd=dir_fd)
                self._change(name, FOLDER)

        def removing(path: Any, *, dir_fd: int | None = None) -> None:
            with self._call(dir_fd, path) as name:
                rmdir(path, dir_fd=dir_fd)
                self._change(name, None)

        def unlinking(path: Any, *, dir_fd: int | None = None) -> None:
            with self._call(dir_fd, path) as name:
                unlink(path, dir_fd=dir_fd)
                self._change(name, None)

        def replacing(old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            with self._call(dst_dir_fd, new) as name:
                replace(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                self._change(name, self._inode(name))

        def linking(fd: int, folder: int, new: str) -> None:
            with self._call(folder, new) as name:
                link(fd, folder, new)
                self._change(name, self._inode(name))

        def syncing(fd: int) -> None:
            with self._call(None, os.readlink(f"/proc/self/fd/{fd}")) as name:
                found = os.fstat(fd)
                if stat.S_ISREG(found.st_mode):
                    self._synced.add(found.st_ino)
                elif name is not None:
                    self._settle(name)

        with (
            patch.object(os, "mkdir", making), patch.object(os, "rmdir", removing),
            patch.object(os, "unlink", unlinking), patch.object(os, "replace", replacing),
            patch.object(syscalls, "link_unnamed", linking), patch.object(syscalls, "sync", syncing),
            patch.object(threading, "excepthook", lambda told: None),  # of threads that are killed
        ):  # fmt: skip
            assert sync is not syscalls.sync
            yield

    @contextmanager
    def _call(self, folder: int | None, path: Any) -> Iterator[str | None]:
        """Return the path below the root that a call refers to, or None if it is outside. The process may die here."""
        above = "" if folder is None else os.readlink(f"/proc/self/fd/{folder}")
        found = os.path.normpath(os.path.join(above, os.fspath(path)))
        if found != self.root and not found.startswith(f"{self.root}/"):
            yield None
            return
        with self._lock:
            self.calls += 1
            if self.dies_at is not None and self.calls >= self.dies_at:
                raise Killed
            if self.keep(self.calls):
                self.kept.append(self.now())
            yield os.path.relpath(found, self.root)

    def _inode(self, name: str | None) -> str | None:
        if name is None:
            return None
        path = os.path.join(self.root, name)
        if os.stat(path).st_ino not in self._synced:
            return TORN
        kept = str(self._inodes / f"{self.calls}")
        os.link(path, kept)
        return kept

    def _change(self, name: str | None, inode: str | None) -> None:
        if name is not None:
            self._pending.append(Change(os.path.dirname(name) or ".", name, inode))

    def _settle(self, folder: str) -> None:
        for change in [one for one in self._pending if one.folder == folder]:
            self._pending.remove(change)
            if change.inode is None:
                self._durable.pop(change.name, None)
            else:
                self._durable[change.name] = change.inode
