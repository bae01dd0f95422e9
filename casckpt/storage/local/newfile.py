"""Creates files: writes them completely, makes them durable, and then gives them a name that does not exist yet.

There are three ways to claim the name exclusively. A store uses the first one that its file system supports:

1. unnamed file (O_TMPFILE), then link: a killed writer leaves nothing behind
2. named temporary file, then link: a killed writer leaves a ``.name.random.tmp`` file, which `list` never shows
3. named temporary file, then renameat2(RENAME_NOREPLACE)

A plain rename could replace a file that another process has created in the meantime. Therefore, if none of the three
works, `Unsupported` is raised, unless the caller promises to be the only writer.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import partial

from casckpt.errors import Unsupported
from casckpt.storage.base import BLOCK
from casckpt.storage.buffers import address
from casckpt.storage.failures import is_full
from casckpt.storage.local import syscalls

PIECE = 32 << 20  # bytes per write: a blob of the default size, because each write has a fixed cost
LARGE = 1 << 20  # bytes: the size from which direct I/O and preallocation pay off


class Naming(IntEnum):
    """How a file claims its exclusive name."""

    UNNAMED = 0
    LINK = 1
    RENAME = 2
    ALONE = 3


_looking = threading.Lock()  # from a look that a name is free until it is taken, for the threads of a single writer


class SyncFailed(OSError):
    """fsync failed. The kernel may have dropped the pages, and the next fsync may report success."""


def temporary_name(name: str) -> str:
    """Return a temporary name for the unfinished file ``name``. It can never be a key."""
    return f".{name}.{secrets.token_hex(8)}.tmp"


def is_temporary(name: str) -> bool:
    """Return whether a file with this name is a leftover of a crashed put."""
    return name.startswith(".") and name.endswith(".tmp")


class FileMaker:
    """Creates files on one file system, and remembers which calls the file system does not support. Thread-safe.

    ``direct``: bypass the page cache for large files where possible. ``single_writer``: the caller promises that no
    other process creates the same names. ``bits``: see `syscalls.share`.
    """

    def __init__(self, *, direct: bool = True, single_writer: bool = False) -> None:
        self.way = Naming.UNNAMED
        self.direct, self._last_way = direct, Naming.ALONE if single_writer else Naming.RENAME
        self.bits = 0

    def create(self, folder: int, name: str, data: memoryview) -> None:
        """Create a durable file in the open ``folder``. Its name becomes durable once the folder is synced.

        Raises FileExistsError, FileNotFoundError if the folder was removed, `Unsupported`, other OSErrors.
        """
        while True:
            way = self.way
            try:
                return self._twice(partial(self._create, folder, name, data, way))
            except syscalls.Lacking as lacking:
                if way is self._last_way:
                    raise Unsupported(
                        "this file system supports neither hard links nor renames that never replace a file, so two "
                        "writers could destroy each other's files: put the store on a different file system, or pass "
                        "single_writer=True (--single-writer) if only one job writes to it at a time"
                    ) from lacking
                self.way = max(self.way, Naming(way + 1))

    def replace(self, folder: int, name: str, data: memoryview) -> None:
        """Create a file as `create` does, but replace an existing one."""
        self._twice(partial(self._replace, folder, name, data))

    def _twice(self, make: Callable[[], None]) -> None:
        try:
            make()
        except SyncFailed as error:
            if is_full(error):
                raise
            make()  # a second fsync of the same file proves nothing, so write a new file

    def _create(self, folder: int, name: str, data: memoryview, way: Naming) -> None:
        if way is Naming.UNNAMED:
            fd = syscalls.open_unnamed(folder)
            try:
                self._fill(fd, data)
                syscalls.link_unnamed(fd, folder, name)
            finally:
                os.close(fd)
            return
        with self._temporary(folder, name, data) as temporary:
            if way is Naming.LINK:
                _link(folder, temporary, name)
            elif way is Naming.RENAME:
                syscalls.rename_new(folder, temporary, name)
            else:
                with _looking:
                    if exists(folder, name):
                        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
                    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)

    def _replace(self, folder: int, name: str, data: memoryview) -> None:
        with self._temporary(folder, name, data) as temporary:
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)

    @contextmanager
    def _temporary(self, folder: int, name: str, data: memoryview) -> Iterator[str]:
        temporary = temporary_name(name)
        fd = syscalls.open_named(folder, temporary)
        try:
            try:
                self._fill(fd, data)
            finally:
                os.close(fd)
            yield temporary
        finally:
            with suppress(FileNotFoundError):  # it was renamed
                os.unlink(temporary, dir_fd=folder)

    def _fill(self, fd: int, data: memoryview) -> None:
        """Write all of ``data`` and make it durable."""
        syscalls.share(fd, self.bits)
        if data.nbytes >= LARGE and address(data) % BLOCK == 0 and self.direct and syscalls.set_direct(fd, True):
            self._write_direct(fd, data)
        else:
            if data.nbytes >= LARGE:
                syscalls.allocate(fd, data.nbytes)
            write_all(fd, data, 0)
        try:
            syscalls.sync(fd)
        except OSError as error:
            raise SyncFailed(error.errno, error.strerror) from error

    def _write_direct(self, fd: int, data: memoryview) -> None:
        """Write whole blocks, bypassing the page cache. Pad the last block, and truncate the file afterwards."""
        whole = data.nbytes - data.nbytes % BLOCK
        padded = data.nbytes if whole == data.nbytes else whole + BLOCK
        syscalls.allocate(fd, padded)
        try:
            write_all(fd, data[:whole], 0)
            if padded > whole:
                _write_padded(fd, data[whole:], whole)
        except OSError as error:
            if error.errno != errno.EINVAL or not syscalls.set_direct(fd, False):
                raise
            self.direct = False  # the file system requires a different alignment, or ignores the flag
            write_all(fd, data, 0)
        if padded > data.nbytes:
            os.ftruncate(fd, data.nbytes)


def exists(folder: int, name: str) -> bool:
    """Return whether the open ``folder`` has the name."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _link(folder: int, temporary: str, name: str) -> None:
    """Link the file. If NFS lost the response and repeated the call, FileExistsError may mean success."""
    try:
        syscalls.link_named(folder, temporary, name)
    except FileExistsError:
        if os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_nlink != 2:
            raise


def _write_padded(fd: int, tail: memoryview, offset: int) -> None:
    room = memoryview(bytearray(2 * BLOCK))  # cheaper than mapping a page for each file
    start = -address(room) % BLOCK
    room[start : start + tail.nbytes] = tail
    write_all(fd, room[start : start + BLOCK], offset)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``, in pieces."""
    position = 0
    while position < data.nbytes:
        written = os.pwrite(fd, data[position : position + PIECE], offset + position)
        if written == 0:
            raise OSError(errno.EIO, "the file system does not accept more bytes")
        position += written
