"""Limits how many ranks of a host upload at the same time."""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import IO, Any

from casckpt.errors import StorageError
from casckpt.storage.base import ObjectStore

OBJECTS = "objects/"


class Turn:
    """A context that at most ``count`` processes of this host enter at a time. A process's threads share one turn.

    A turn is a POSIX lock on a file in ``folder``. The lock ends with its process. Forked children, such as data
    loader workers, do not inherit it.
    """

    def __init__(self, count: int, folder: Path | None = None) -> None:
        self._count = count
        self._folder = folder or Path(tempfile.gettempdir(), f"casckpt-{os.getuid()}")
        self._lock = Lock()
        self._inside = 0
        self._held: IO[bytes] | None = None

    def __enter__(self) -> None:
        with self._lock:  # other threads of this process wait here
            if self._inside == 0:
                self._held = self._wait()
            self._inside += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._held is not None:
                self._held.close()
                self._held = None

    def _wait(self) -> IO[bytes] | None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for number in range(self._count):
                free = self._taken(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if free is not None:
                    return free
            return self._taken(os.getpid() % self._count, fcntl.LOCK_EX)
        except OSError as error:
            raise StorageError(
                f"casckpt cannot lock files in {self._folder}: {error.strerror or error}; set work_dir= to a folder on "
                "a local disk"
            ) from error

    def _taken(self, number: int, how: int) -> IO[bytes] | None:
        file = (self._folder / f"upload-{number}.lock").open("wb")
        try:
            fcntl.lockf(file, how)
        except (BlockingIOError, PermissionError):  # another process holds it
            file.close()
            return None
        except OSError:
            file.close()
            raise
        return file


class ThrottledStore:
    """Storage whose puts of blobs and manifests wait for a turn."""

    def __init__(self, inner: ObjectStore, turn: Turn) -> None:
        self.inner, self.turn = inner, turn

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        """See `ObjectStore.put`."""
        with self.turn if key.startswith(OBJECTS) else nullcontext():
            self.inner.put(key, data, settle=settle)

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "turn"):  # not yet set while the object is being unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)
