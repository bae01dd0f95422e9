"""System calls that not every file system has. `Lacking` is raised if one is missing.

All paths are relative to the descriptor of an open folder. So a folder that is removed and created again meanwhile is
noticed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

FILE_MODE = 0o444  # objects never change; the umask of the process applies
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
    """Open a new file for writing that has no name, and that is gone when its descriptor is closed.

    Raises FileNotFoundError if the folder is gone.
    """
    if not _O_TMPFILE:
        raise Lacking
    with _lacking(errno.EISDIR):  # from kernels without O_TMPFILE
        try:
            return os.open(".", _O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE, dir_fd=folder)
        except PermissionError as error:
            if os.fstat(folder).st_nlink == 0:  # ext4 raises EPERM for a removed folder
                raise FileNotFoundError(errno.ENOENT, "the folder was removed") from error
            raise


def open_named(folder: int, name: str) -> int:
    """Open a new file for writing under a name that does not exist."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, FILE_MODE, dir_fd=folder)


def link_unnamed(fd: int, folder: int, name: str) -> None:
    """Give the open file ``fd`` a name. Raises FileExistsError, and FileNotFoundError if the folder is gone."""
    path = f"/proc/self/fd/{fd}"
    with _lacking(errno.EPERM, errno.EXDEV):
        try:
            # Without a src_dir_fd CPython calls link(), which links the symlink itself (EXDEV).
            os.link(path, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
        except FileNotFoundError as error:
            if os.path.lexists(path):
                raise
            raise Lacking from error  # there is no /proc


def link_named(folder: int, old: str, new: str) -> None:
    """Give a file a second name. Raises FileExistsError."""
    with _lacking(errno.EPERM, errno.EXDEV):  # EPERM: from vfat
        os.link(old, new, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)


def rename_new(folder: int, old: str, new: str) -> None:
    """Rename without replacing. Raises FileExistsError."""
    try:
        call = _LIBC.renameat2
    except AttributeError as error:
        raise Lacking from error
    with _lacking():
        if call(folder, os.fsencode(old), folder, os.fsencode(new), _RENAME_NOREPLACE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), new)


def set_direct(fd: int, on: bool) -> bool:
    """Turn direct I/O of an open file on or off. Returns whether that succeeded."""
    if not _O_DIRECT:
        return not on
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
    except OSError:  # this file system refuses it
        return False
    return True


def allocate(fd: int, size: int) -> None:
    """Reserve ``size`` bytes for a file and make it that long, if that is possible without writing them.

    It does not use os.posix_fallocate: if the file system cannot reserve, glibc writes a byte to each block instead.
    Raises OSError if there is not enough space.
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
    """Call fsync, because fdatasync may not write a new size."""
    os.fsync(fd)


def cached_pages(fd: int, start: int, nbytes: int) -> int:
    """Count the pages of a range of a file that are in the page cache (cachestat, Linux 6.5)."""
    if not hasattr(_LIBC, "syscall"):
        raise Lacking
    span, counts = (ctypes.c_uint64 * 2)(start, nbytes), (ctypes.c_uint64 * 5)()  # counts: cached, dirty, and so on
    if _LIBC.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(fd), span, counts, ctypes.c_uint(0)):
        raise Lacking  # an older kernel, missing permission, or a sandbox
    return int(counts[0])
