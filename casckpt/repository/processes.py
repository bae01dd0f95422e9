"""Identifies processes, checks whether one on this host is dead, and provides a lock for the processes of this host.

Also remembers what this process has saved and loaded.

The identity comes from /proc. On a system without /proc, no process counts as dead.
"""

from __future__ import annotations

import fcntl
import getpass
import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from casckpt.format.records import Process

PROC = Path("/proc")
saved_here: set[str] = set()
"""The ids of the checkpoints that this process has committed."""
loaded_here: set[tuple[str, str]] = set()
"""The runs from which this process has read a checkpoint's tensors, each with the id of its store."""
saving_here: dict[tuple[str, str, int], Future[Any]] = {}
"""The saves that this process runs in the background, by the URL of the store, the run and the step."""
os.register_at_fork(after_in_child=saving_here.clear)  # a forked child has no thread that would finish them
MAX_WHO = 200  # characters
_MAX_PID = 1 << 22  # on Linux
_STATE, _THREADS, _STARTED = 0, 17, 19  # fields 3, 20 and 22 of stat, counted from the field after the name


def this_process() -> Process:
    """Return the identity of this process. Fields that the system does not provide are empty."""
    stat = _stat(os.getpid())
    return Process(
        host=socket.gethostname(),
        boot_id=_boot_id(),
        pid=os.getpid(),
        pid_namespace=_pid_namespace(),
        started=int(stat[_STARTED]) if stat else 0,
    )


def who(user: str | None = None) -> str:
    """Return who runs this process, as user@host. ``user``: instead of the user that the system names."""
    text = f"{user or _user()}@{socket.gethostname()}"
    return "".join(character if character.isprintable() else "?" for character in text)[:MAX_WHO]


@cache  # a lookup may use the network
def _user() -> str:
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):  # in a container, the user may have no name
        return str(os.getuid())


def is_dead(process: Process) -> bool:
    """Return whether ``process`` provably ran on this host, in this boot and PID namespace, and has ended.

    Returns False in case of doubt.
    """
    place = (process.boot_id, process.pid_namespace)
    if not all(place) or place != (_boot_id(), _pid_namespace()):
        return False
    if process.started <= 0 or not 0 < process.pid <= _MAX_PID:
        return False
    stat = _stat(process.pid)
    if stat is None:
        return not _exists(process.pid)  # /proc may hide other users' processes
    if int(stat[_STARTED]) != process.started:
        return True  # a different process has the PID now
    return stat[_STATE] in "ZX" and int(stat[_THREADS]) <= 1  # an ended leader is in state Z while its threads run


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat, starting with the third.

    The second field, the name, may contain any characters, even ")".
    """
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > _STARTED else None


def _boot_id() -> str:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    """Return the PID and time namespaces. A process's time namespace affects the start times that it reads."""
    try:
        pids = os.readlink(PROC / "self/ns/pid")
    except OSError:
        return ""
    try:
        return f"{pids} {os.readlink(PROC / 'self/ns/time')}"
    except OSError:
        return pids  # Linux before 5.6


log = logging.getLogger(__name__)


@contextmanager
def alone_on_this_host(path: Path) -> Iterator[None]:
    """Wait until no other process on this host holds the lock file ``path``, and hold it during the with block.

    If the folder cannot be created, or the file system does not support locks, this does not wait.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        log.debug("processes on this host cannot wait for each other, because locking failed: %s", error)
        yield
        return
    with lock:
        with suppress(OSError):  # the file system does not support locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):  # closing is not enough: a child forked in the meantime also has the file open
                fcntl.flock(lock, fcntl.LOCK_UN)
