"""Prepared files, with which a full disk can still store the small records that free its space.

The folder .spare of a store holds `COUNT` files of `SIZE` bytes. If there is no room for a new file, a record is
written over the bytes of a prepared one, which then gets the record's name. This takes no inode and no block, unless
the folder of the record has to grow. File systems that never overwrite blocks, such as btrfs and ZFS, do need a block.
For these cases, and for larger objects, files are given up, whose space another program may take first.

A process takes a file by giving it a name of its own. Only one process can do that, even where locks do not work.
It never writes to a file that has a second name: that name belongs to a record (a process was killed between link and
unlink), or to a copy of the store made of links. Names of killed processes remain until the next `prepare`.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from casckpt.errors import Refused
from casckpt.storage.local import syscalls
from casckpt.storage.local.folders import Folders
from casckpt.storage.local.newfile import is_temporary, temporary_name, write_all

COUNT, SIZE, KEPT = 64, 4096, 8
_NEXT = (
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EISDIR, errno.ENXIO, errno.ELOOP,
)  # fmt: skip
"""The errors of a file that another process took, that another user made, or that needs a block after all; and of
something else in its place."""
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Spares:
    """The prepared files of the store in ``folders``. Thread-safe."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders

    def prepare(self) -> int:
        """Create the files that are missing, as far as there is room, and remove the names of killed processes.

        If a process is still using such a name, it takes the next file. Return how many files there are.
        """
        with suppress(OSError, Refused), self._folders.open_spare(create=True) as folder:
            for name in sorted({f"{number:02}" for number in range(COUNT)} - _tidy(folder)):
                self._make(folder, name)
        with suppress(OSError, Refused), self._folders.open_spare() as folder:
            return len(_names(folder))
        return 0

    def _make(self, folder: int, name: str) -> None:
        """Write a whole file before others can take it. It needs no sync: what a power failure takes is made again."""
        new, bits = temporary_name(name), self._folders.shared_bits
        fd = syscalls.open_named(folder, new)
        try:
            try:
                syscalls.share(fd, bits)
                os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) | stat.S_IWUSR | bits & stat.S_IWGRP)
                write_all(fd, memoryview(os.urandom(SIZE)), 0)
            finally:
                os.close(fd)
            os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with suppress(OSError):
                os.unlink(new, dir_fd=folder)
            raise

    def create(self, folder: int, name: str, data: memoryview) -> None:
        """Create a durable file from a prepared one, as `newfile.FileMaker.create` does from nothing.

        Raises an OSError for a full disk if no file can be used, and FileExistsError.
        """
        with suppress(FileNotFoundError, Refused), self._folders.open_spare() as spare:
            for prepared in _names(spare) if data.nbytes <= SIZE else ():
                try:
                    if _use(spare, prepared, folder, name, data):
                        return
                except syscalls.Lacking:  # perhaps only for this file, which another user made
                    continue
                except OSError as error:
                    if error.errno not in _NEXT:
                        raise
        raise OSError(errno.ENOSPC, "no prepared file can be used")

    def give_up(self, nbytes: int) -> bool:
        """Delete as many files as an object of ``nbytes`` takes, with its inode, and a block for its folder.

        Return False, and delete nothing, if fewer than `KEPT` would be left for the records that follow.
        """
        with suppress(OSError, Refused), self._folders.open_spare() as folder:
            names = _names(folder)
            if (count := nbytes // SIZE + 3) <= len(names) - KEPT:
                for name in names[:count]:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)
                return True
        return False


def _names(folder: int) -> list[str]:
    return sorted(filter(str.isdigit, os.listdir(folder)))


def _tidy(folder: int) -> set[str]:
    """Remove the names of killed processes. Return those of usable files."""
    usable = set[str]()
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if is_temporary(entry.name):
                    os.unlink(entry.name, dir_fd=folder)
                elif stat.S_ISREG(status.st_mode) and status.st_size == SIZE and status.st_nlink == 1:
                    usable.add(entry.name)
    return usable


def _use(spare: int, prepared: str, folder: int, name: str, data: memoryview) -> bool:
    """Take a prepared file, and make it the file ``name``. Return False, and remove it, if it has a second name."""
    own = temporary_name(prepared)
    os.rename(prepared, own, src_dir_fd=spare, dst_dir_fd=spare)
    try:
        fd = os.open(own, _WRITE, dir_fd=spare)
        try:
            is_usable = os.fstat(fd).st_nlink == 1
            os.stat(own, dir_fd=spare)  # if `prepare` has removed it, the name that was counted is that of a record
            if is_usable:
                write_all(fd, data, 0)  # over the old bytes: shortened first, it would need a new block
                os.ftruncate(fd, data.nbytes)
                syscalls.sync(fd)
                syscalls.link_named(spare, own, name, into=folder)
                with suppress(PermissionError):  # another user made it
                    os.fchmod(fd, os.fstat(fd).st_mode & syscalls.FILE_MODE)
        finally:
            os.close(fd)
    except BaseException:
        with suppress(OSError):
            os.rename(own, prepared, src_dir_fd=spare, dst_dir_fd=spare)
        raise
    with suppress(FileNotFoundError):
        os.unlink(own, dir_fd=spare)
    return is_usable
