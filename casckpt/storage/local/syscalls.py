"""System calls that not every file system has, behind the local storage; `Lacking` tells that one has not.

Everything here is relative to the descriptor of an open folder, so that a folder which is removed and made again
meanwhile is noticed, never mixed up.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

FILE_MODE = 0o444  # objects never change; the umask of the process takes away what it wants to keep private
_RENAME_NOREPLACE = 1
_CACHESTAT = 451  # on every architecture
_O_TMPFILE = getattr(os, "O_TMPFILE", 0)
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_LIBC = ctypes.CDLL(None, use_errno=True)


class Lacking(Exception):
    """The kernel or the file system does not have this call."""


@contextmanager
def _lacking(*codes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, *codes):
            raise Lacking from error
        raise


def open_unnamed(folder: int) -> int:
    """Open a new file for writing that has no name yet and vanishes with its descriptor.

    Raises FileNotFoundError if the folder is gone.
    """
    if not _O_TMPFILE:
        raise Lacking
    with _lacking(errno.EISDIR):  # what kernels without O_TMPFILE say
        try:
            return os.open(".", _O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE, dir_fd=folder)
        except PermissionError as error:
            if os.fstat(folder).st_nlink == 0:  # ext4 says EPERM of a folder that was removed
                raise FileNotFoundError(errno.ENOENT, "the folder was removed") from error
            raise


def open_named(folder: int, name: str) -> int:
    """Open a new file for writing under a name that nobody has."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, FILE_MODE, dir_fd=folder)


def link_unnamed(fd: int, folder: int, name: str) -> None:
    """Name the file that ``fd`` has open. Raises FileExistsError; FileNotFoundError if the folder is gone."""
    path = f"/proc/self/fd/{fd}"
    with _lacking(errno.EPERM, errno.EXDEV):
        try:
            # Without a src_dir_fd CPython calls link(), which links the symlink itself (EXDEV).
            os.link(path, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
        except FileNotFoundError as error:
            if os.path.lexists(path):
                raise
            raise Lacking from error  # there is no /proc here


def link_named(folder: int, old: str, new: str) -> None:
    """Give a file a second name. Raises FileExistsError."""
    with _lacking(errno.EPERM, errno.EXDEV):  # EPERM: what vfat says
        os.link(old, new, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)


def rename_new(folder: int, old: str, new: str) -> None:
    """Rename, but never over another file. Raises FileExistsError."""
    try:
        call = _LIBC.renameat2
    except AttributeError as error:
        raise Lacking from error
    with _lacking():
        if call(folder, os.fsencode(old), folder, os.fsencode(new), _RENAME_NOREPLACE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), new)


def set_direct(fd: int, on: bool) -> bool:
    """Turn direct I/O of an open file on or off; tell whether it is as was wanted."""
    if not _O_DIRECT:
        return not on
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
    except OSError:  # this file system refuses it
        return False
    return True


def allocate(fd: int, size: int) -> None:
    """Reserve ``size`` bytes for a file and make it that long, where that can be done without writing them.

    Not os.posix_fallocate: where the file system cannot reserve, glibc writes one byte to each block instead.
    Raises OSError if the space is not there.
    """
    try:
        call = _LIBC.fallocate
    except AttributeError:
        return
    if call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))


def sync(fd: int) -> None:
    """Call fsync: fdatasync may leave a new size behind."""
    os.fsync(fd)


def cached_pages(fd: int, start: int, nbytes: int) -> int:
    """Count how many pages of ``nbytes`` of a file the page cache holds (cachestat, Linux 6.5)."""
    if not hasattr(_LIBC, "syscall"):
        raise Lacking
    span, found = (ctypes.c_uint64 * 2)(start, nbytes), (ctypes.c_uint64 * 5)()  # found: cached, dirty, and so on
    if _LIBC.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(fd), span, found, ctypes.c_uint(0)):
        raise Lacking  # an older kernel, one that does not tell this user, or a sandbox
    return int(found[0])
