"""System calls that not every file system supports. They raise `Lacking` where they are not supported.

All paths are relative to the descriptor of an open folder, so casckpt notices when a folder is removed and recreated
in the meantime.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

FILE_MODE = 0o444  # objects never change; the process's umask applies
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_CACHESTAT = 451  # on every architecture
_LIBC = ctypes.CDLL(None, use_errno=True)


class Lacking(Exception):
    """The kernel or the file system does not support this call."""


@contextmanager
def _lacking(*codes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, *codes):
            raise Lacking from error
        raise


def open_unnamed(folder: int) -> int:
    """Open a new unnamed file for writing. It disappears when its descriptor is closed.

    Raises FileNotFoundError if the folder no longer exists.
    """
    with _lacking(errno.EISDIR):  # from kernels without O_TMPFILE
        try:
            return os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE, dir_fd=folder)
        except PermissionError as error:
            if os.fstat(folder).st_nlink == 0:  # ext4 raises EPERM for a removed folder
                raise FileNotFoundError(errno.ENOENT, "the folder was removed") from error
            raise


def open_named(folder: int, name: str) -> int:
    """Create and open a file for writing, under a name that must not exist yet."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, FILE_MODE, dir_fd=folder)


def share(fd: int, bits: int) -> None:
    """Give group and others the permissions ``bits`` of a new file or folder, whatever the umask. 0 changes nothing.

    A file gets only those to read.
    """
    if bits:
        mode = os.fstat(fd).st_mode
        bits &= 0o077 if stat.S_ISDIR(mode) else FILE_MODE
        if mode & 0o077 != bits:
            with suppress(PermissionError):  # the file system does not let its users change modes
                os.fchmod(fd, stat.S_IMODE(mode) & ~0o077 | bits)


def link_unnamed(fd: int, folder: int, name: str) -> None:
    """Give the open file ``fd`` a name. Raises FileExistsError, and FileNotFoundError if the folder was removed."""
    path = f"/proc/self/fd/{fd}"
    with _lacking(errno.EPERM, errno.EXDEV):
        try:
            # Without a src_dir_fd, CPython calls link(), which links the symlink itself (EXDEV).
            os.link(path, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
        except FileNotFoundError as error:
            if os.path.lexists(path):
                raise
            raise Lacking from error  # /proc is not mounted


def link_named(folder: int, old: str, new: str, *, into: int | None = None) -> None:
    """Give a file a second name. ``into``: the folder of the new name. Raises FileExistsError."""
    with _lacking(errno.EPERM, errno.EXDEV):  # EPERM: from vfat
        os.link(old, new, src_dir_fd=folder, dst_dir_fd=folder if into is None else into, follow_symlinks=False)


def rename_new(folder: int, old: str, new: str) -> None:
    """Rename a file without replacing another. Raises FileExistsError."""
    _rename(folder, old, new, _RENAME_NOREPLACE)


def exchange(folder: int, one: str, other: str) -> None:
    """Exchange the names of two files or folders, in one step. Raises `Lacking`."""
    _rename(folder, one, other, _RENAME_EXCHANGE)


def sync_folder(fd: int) -> None:
    """Make the names in an open folder durable. File systems that refuse this do not need it."""
    with suppress(Lacking), _lacking():
        sync(fd)


def sync_file_system(folder: str | os.PathLike[str]) -> None:
    """Make all files of the file system of ``folder`` durable, which is far faster than one by one."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _LIBC.syncfs(handle):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), os.fspath(folder))
    finally:
        os.close(handle)


def _rename(folder: int, old: str, new: str, flag: int) -> None:
    try:
        call = _LIBC.renameat2
    except AttributeError as error:
        raise Lacking from error
    with _lacking():
        if call(folder, os.fsencode(old), folder, os.fsencode(new), flag):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), new)


def set_direct(fd: int, on: bool) -> bool:
    """Turn direct I/O on or off for an open file, and return whether that succeeded."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:  # the file system does not support it
        return False
    return True


def allocate(fd: int, size: int) -> None:
    """Reserve ``size`` bytes for a file and extend it to that length, if possible without writing them.

    This does not use os.posix_fallocate because glibc writes a byte to each block if the file system cannot reserve
    space. Raises OSError if there is not enough space.
    """
    if _LIBC.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))


def sync(fd: int) -> None:
    """Call fsync. fdatasync is not enough because it may not write a new size."""
    os.fsync(fd)


def sync_all(fd: int) -> None:
    """Write everything of a file system, so that space that was just freed becomes available. Ignores failures."""
    _LIBC.syncfs(ctypes.c_int(fd))


def cached_pages(fd: int, start: int, nbytes: int) -> int:
    """Return how many pages of a file's byte range are in the page cache (cachestat, Linux 6.5)."""
    span, counts = (ctypes.c_uint64 * 2)(start, nbytes), (ctypes.c_uint64 * 5)()  # counts: cached, dirty, and so on
    if _LIBC.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(fd), span, counts, ctypes.c_uint(0)):
        raise Lacking  # an older kernel, missing permission, or a sandbox
    return int(counts[0])
