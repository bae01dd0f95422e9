"""A lock among the processes of one host. It avoids double work; correctness does not depend on it."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def alone_on_this_host(path: Path) -> Iterator[None]:
    """Wait until no other process of this host holds the lock file ``path``, and hold it during the body.

    Without the folder, or on a file system without locks, this does not wait.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        log.debug("processes of this host do not wait for each other: %s", error)
        yield
        return
    with lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(
                OSError
            ):  # closing is not enough: a child that was forked meanwhile has the file open as well
                fcntl.flock(lock, fcntl.LOCK_UN)
