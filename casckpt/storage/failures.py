"""Turns operating system errors into messages with advice, and decides which errors mean that there is no room."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from casckpt.errors import CasckptError, StorageError

ROOM = (
    "free some space or raise the quota, and try again; `casckpt gc` can free more, and with `--min-age 0` also what "
    "was forgotten or replaced in the last day, unless the settings have a min_age"
)
LIMITED = "a limit forbids files of this size: raise `ulimit -f`, or use a different file system"
log = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_ANSWER = re.compile("QuotaExceeded|StorageFull")  # of MinIO, Ceph and HDFS
_ADVICE = {
    errno.ENOSPC: f"the disk is full: {ROOM}",
    errno.EDQUOT: f"the disk quota is used up: {ROOM}",
    errno.EFBIG: LIMITED,
    errno.EROFS: "the file system is read-only: mount it read-write, or use a different store",
    errno.EACCES: "permission denied: check the owner and mode of the folder and its files",
    errno.EPERM: "operation not permitted: check the owner and attributes of the folder",
    errno.EIO: "the disk reports an I/O error: check the kernel log, then run `casckpt verify`",
    errno.ESTALE: "the network file system lost the file: check the mount and try again",
    errno.ENOMEM: "too little memory, or too many memory maps: raise `sysctl vm.max_map_count`",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
    errno.ENFILE: "too many open files on this machine: close some, and try again",
    errno.ENOTDIR: "part of the path is a file: use the path of a folder",
    errno.ENAMETOOLONG: "the path is too long: use a shorter one",
}


def is_full(error: BaseException, status: int = 0, answer: str = "") -> bool:
    """Return whether space, inodes or a quota are the reason for an error. ``status``, ``answer``: those of a server.

    A limit on the size of a single file is a different reason, because freeing space does not help.
    """
    is_system = isinstance(error, OSError) and error.errno in _FULL
    return is_system or status == 507 or _FULL_ANSWER.search(answer) is not None


@contextmanager
def reporting(verb: str, path: Path) -> Iterator[None]:
    """Turn operating system errors into a `StorageError` with advice."""
    try:
        yield
    except CasckptError:
        raise  # some of these are also OSErrors
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, f"{error.strerror or error}: check the disk and try again")
        refused = isinstance(error, PermissionError) and verb in ("write", "delete", "sweep")
        message = f"cannot {verb} {path}: {advice}"
        raise StorageError(message, path=str(path), refused=refused, full=is_full(error)) from error


@contextmanager
def unless_full() -> Iterator[None]:
    """Leave out a write that can wait for a later gc if there is no room for it."""
    try:
        yield
    except StorageError as error:
        if not error.full:
            raise
        log.info("left for a later gc: %s", error)


@contextmanager
def noting(refused: list[StorageError]) -> Iterator[None]:
    """Add the error of a create or delete that this user may not do to ``refused``, instead of raising it."""
    try:
        yield
    except StorageError as error:
        if not error.refused:
            raise
        refused.append(error)
