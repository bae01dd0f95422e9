"""Storage in a local folder, with one read-only file per object, named by its key.

A file is written completely and made durable before it gets its name (`casckpt.storage.local.newfile`). If the process
or the machine dies, the object is therefore either complete or absent.
"""

from __future__ import annotations

import errno
import math
import os
import platform
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

from typing_extensions import override

from casckpt.base.lazy import cached_property
from casckpt.errors import NotFound, Refused, StorageError
from casckpt.storage.base import (
    AlreadyExists,
    Finding,
    FolderListing,
    Known,
    ListedObject,
    ObjectStore,
    Traits,
    split_folder,
    split_key,
)
from casckpt.storage.buffers import plain_bytes
from casckpt.storage.failures import is_full, reporting
from casckpt.storage.local import syscalls
from casckpt.storage.local.folders import Folders, misplaced
from casckpt.storage.local.newfile import FileMaker, exists, is_temporary
from casckpt.storage.local.reader import LocalReader
from casckpt.storage.local.spare import SIZE, Spares

_MOUNTS = Path("/proc/self/mounts")
_SURE = {"noac", "actimeo=0", "acdirmax=0"}
_COPY_ON_WRITE = {"btrfs", "zfs", "bcachefs"}
_LARGE_FOLIOS = {"ext4": (6, 16)}
"""For each file system, the first kernel that fills the page cache in large pieces, which takes far less CPU time."""


def stale_listings(path: Path, mounts: Path = _MOUNTS) -> str:
    """Return why listings of ``path`` may be stale, with advice, or "" if no reason is known."""
    _, kind, options = _mount_of(path, mounts)
    if not re.fullmatch(r"nfs\d?", kind) or _SURE & set(options.split(",")):
        return ""
    return (
        f"{path} is on NFS, mounted with attribute caching, so that a listing may miss what another host has just "
        "written. Mount it with noac (or actimeo=0), or run this on the file server"
    )


def caches_well(path: Path, mounts: Path = _MOUNTS) -> bool:
    """Return whether reads of ``path`` through the page cache are known to be as fast as direct I/O."""
    _, kind, options = _mount_of(path, mounts)
    kernel = re.match(r"(\d+)\.(\d+)", platform.release())
    if kind not in _LARGE_FOLIOS or kernel is None or "data=journal" in options.split(","):
        return False
    return (int(kernel[1]), int(kernel[2])) >= _LARGE_FOLIOS[kind]


def mount_point(path: str, mounts: Path = _MOUNTS) -> str:
    """Return the deepest mount point at or above ``path``, also that of a bind mount. "" if it is / or unknown."""
    return _mount_of(Path(path), mounts)[0].rstrip("/")


def _mount_of(folder: Path, mounts: Path) -> tuple[str, str, str]:
    """Return (mount point, type, options) of the deepest mount that contains ``folder``; empty strings if unknown.

    A trigger of an automounter does not count, because it holds no files.
    """
    path, best = os.path.realpath(folder), ("", "", "")
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return best
    for line in lines:
        _, at, kind, options, *_ = [*line.split(" "), "", "", "", ""]
        at = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), at)  # spaces are escaped as \\040
        inside = path == at or path.startswith(at.rstrip("/") + "/")
        if inside and len(at) >= len(best[0]) and kind != "autofs":
            best = (at, kind, options)
    return best


_Make: TypeAlias = Callable[[int, str, memoryview], None]
_FREEING, _FREEING_SMALL, _PAUSE = 5.0, 0.5, 0.1  # seconds until deleted space is available, and between attempts
_ATTEMPTS = 100  # to put into a folder that gcs in a loop keep removing; if syncs are slow, 16 were not enough
_REMOVED = (errno.ENOENT, errno.ESTALE)  # the second one is from NFS
# Non-blocking because opening a FIFO in the store would otherwise wait forever.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

UPLOADS = 4  # some uploads wait for the disk while others copy and hash


class LocalStore(ObjectStore):
    """`casckpt.storage.base.ObjectStore` in the folder ``path``, which the first put creates.

    ``page_cache``: whether bytes that are read or written remain in the page cache. None: only bytes that are read,
    and only if there is enough memory and the file system reads just as fast through the cache. ``single_writer``: see
    `FileMaker`.

    Every file system failure raises a `StorageError` with the path and advice.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, page_cache: bool | None = None, single_writer: bool = False
    ) -> None:
        self.path = Path(path).absolute()
        self._page_cache, self._single_writer = page_cache, single_writer
        self._files = FileMaker(direct=not page_cache, single_writer=single_writer)
        self._folders = Folders(self.path)
        self._spares = Spares(self._folders)
        self._freed_at = -math.inf  # when this process last deleted an object, or ended a gc

    def __reduce__(self) -> tuple[partial[LocalStore], tuple[str]]:
        again = partial(LocalStore, page_cache=self._page_cache, single_writer=self._single_writer)
        return again, (str(self.path),)

    def __repr__(self) -> str:
        return f"LocalStore({str(self.path)!r})"

    @property
    def url(self) -> str:
        """The absolute path."""
        return str(self.path)

    @cached_property
    def traits(self) -> Traits:
        """The traits of this storage. Reading a gap of 128 KiB takes about as long as one more request."""
        chosen = self._page_cache
        return Traits(
            remote=False, read_gap=128 << 10, parallel=8, exclusive=True, stale=stale_listings(self.path),
            uploads=UPLOADS, page_cache=None if chosen is None and caches_well(self.path) else bool(chosen),
        )  # fmt: skip

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        """See `casckpt.storage.base.ObjectStore`.

        Fastest for page-aligned data of 1 MiB or more (`casckpt.storage.buffers.AlignedBuffer`).
        """
        self._create(key, data, self._files.create, settle=settle)

    @override
    def prepare(self) -> int:
        self._freed_at = time.monotonic()  # a gc ends: on xfs, what others have freed also becomes available late
        return self._spares.prepare()

    @override
    def put_prepared(self, key: str, data: bytes) -> bool:
        try:
            self._create(key, data, self._spares.create)
            return True
        except StorageError as error:
            if not error.full or not self._spares.give_up(len(data)):
                raise
        self._freed_at = time.monotonic()
        self._create(key, data, self._files.create)
        self._freed_at = -math.inf  # this object uses what was given up
        return True

    def _create(self, key: str, data: memoryview | bytes, make: _Make, *, settle: bool = True) -> None:
        folder, name = split_key(key)
        view = plain_bytes(data)

        def create(fd: int) -> None:
            taken = exists(fd, name)  # only avoids a useless write; claiming the exclusive name decides
            if not taken:
                try:
                    make(fd, name, view)
                except FileExistsError:
                    taken = True
            if settle:  # even if the key exists: a failed put of this process may have created it
                self._folders.settle(fd, folder)
            if taken:
                raise AlreadyExists(key)

        self._in_folder(folder, key, create, _FREEING_SMALL if view.nbytes <= SIZE else _FREEING)

    @override
    def replace(self, key: str, data: memoryview | bytes) -> None:
        folder, name = split_key(key)
        view = plain_bytes(data)

        def create(fd: int) -> None:
            self._files.replace(fd, name, view)
            self._folders.settle(fd, folder)

        self._in_folder(folder, key, create)

    def settle(self, folder: str) -> None:
        """See `casckpt.storage.base.ObjectStore`. A missing folder has no names to settle."""
        with (
            reporting("make durable", self.path / folder),
            suppress(FileNotFoundError),
            self._folders.open(folder) as fd,
        ):
            self._folders.settle(fd, folder)

    @override
    def get(self, key: str, *, limit: int) -> bytes:
        with self._open(key) as reader:
            if reader.size > limit:
                raise Refused(f"{self.path / key} has {reader.size} bytes, but at most {limit} are allowed")
            return reader.read_all()

    @override
    def open(self, key: str, *, shared: bool = False) -> LocalReader:
        return self._open(key, shared=shared)

    @override
    def size(self, key: str) -> int | None:
        folder, name = split_key(key)
        path = self.path / key
        with reporting("look at", path):
            try:
                with self._folders.open(folder) as above:
                    status = os.stat(name, dir_fd=above, follow_symlinks=False)
            except FileNotFoundError:
                return None
        if not stat.S_ISREG(status.st_mode):
            raise misplaced(status.st_mode, path)
        return status.st_size

    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        """See `casckpt.storage.base.ObjectStore`. Each folder is read in one go when the listing reaches it."""
        start = prefix.rpartition("/")[0]
        pending = [start]
        while pending:
            folder = pending.pop()
            files, folders = _scan(self._folders, folder)
            if folder == start:
                files = [entry for entry in files if entry.key.startswith(prefix)]
                folders = [key for key in folders if key.startswith(prefix)]
            for key in folders:
                if known is not None and known(key) is not None:
                    raise misplaced(stat.S_IFDIR, self.path / key)
            pending += folders
            yield from files

    @override
    def list_folder(self, folder: str) -> FolderListing:
        split_folder(folder)
        return _scan(self._folders, folder)

    @override
    def delete(self, key: str) -> None:
        folder, name = split_key(key)
        with reporting("delete", self.path / key), suppress(FileNotFoundError), self._folders.open(folder) as above:
            os.unlink(name, dir_fd=above)
            if key.startswith("objects/"):  # other files are small
                self._freed_at = time.monotonic()

    @override
    def sweep(self, folder: str, *, below: bool = False) -> int:
        deeper = _scan(self._folders, folder)[1] if below else []
        freed = sum(self.sweep(inner, below=True) for inner in deeper)
        with reporting("sweep", self.path / folder):
            with suppress(FileNotFoundError), self._folders.open(folder) as fd:
                freed = sum(_remove(fd, name) for name in os.listdir(fd) if is_temporary(name))
            if "/" in folder or not below:
                self._folders.remove(folder)
        return freed

    @override
    def bytes_free(self) -> int | None:
        with suppress(OSError):
            status = os.statvfs(next(path for path in (self.path, *self.path.parents) if path.exists()))
            if status.f_blocks:  # otherwise the file system does not report its size
                return status.f_bavail * status.f_frsize
        return None

    def examine(self) -> Iterator[Finding]:
        """Yield findings on whether listings are reliable on this mount, on full disks, links, and permissions."""
        stale = self.traits.stale
        found = stale or "this mount does not cache file attributes that other hosts may change"
        yield Finding("mount", not stale, found, "casckpt refuses to run gc here until you do" if stale else "")
        if (kind := _mount_of(self.path, _MOUNTS)[1]) in _COPY_ON_WRITE:
            found = (
                f"{kind} needs space even to overwrite a file, so gc may have no room for its records on a full disk"
            )
            yield Finding("full", None, found, "set a quota below the size of the disk, which you can raise")
        with reporting("list", self.path), suppress(FileNotFoundError):
            yield from _outsiders(self.path)

    def _open(self, key: str, *, shared: bool = False) -> LocalReader:
        folder, name = split_key(key)
        path = self.path / key
        with reporting("open", path):
            try:
                with self._folders.open(folder) as above:
                    fd, size = _open_file(above, name, path)
            except FileNotFoundError:
                raise NotFound(f"object {key} is not in {self.url}: it was deleted or never written") from None
        return LocalReader(fd, size, key, path, shared=shared)

    def _in_folder(self, folder: str, key: str, act: Callable[[int], None], freeing: float = _FREEING) -> None:
        """Call ``act`` with the open folder. Retry if another process removes the folder in the meantime.

        Also retry while another user is sharing a folder that it has just made, and, on a full disk, for ``freeing``
        seconds after this process last deleted an object or ended a gc.
        """
        path = self.path / key
        with reporting("write", path):
            for left in reversed(range(_ATTEMPTS)):
                try:
                    with self._folders.open(folder, create=True) as fd:
                        self._files.bits = self._folders.shared_bits
                        return act(fd)
                except OSError as error:
                    is_new = error.errno == errno.EACCES and left and self.path.exists() and self._folders.shared_bits
                    if not (error.errno in _REMOVED or is_new or self._may_free(error, freeing)):
                        raise
        raise StorageError(
            f"cannot write {path}: its folder cannot be created, or something keeps removing it; find the cause, and "
            "try again"
        )

    def _may_free(self, error: OSError, seconds: float) -> bool:
        """Return whether there may be room now: file systems such as xfs and ext4 make deleted space available late."""
        if not is_full(error) or time.monotonic() > self._freed_at + seconds:
            return False
        time.sleep(_PAUSE)
        with self._folders.open("") as fd:
            syscalls.sync_all(fd)
        return True


def _outsiders(root: Path) -> Iterator[Finding]:
    """Yield a finding if there are links below ``root``, or if anything gives group and others less than ``root``."""
    links, closed, rights = list[Path](), list[Path](), root.stat().st_mode
    for above, folders, files in os.walk(root):
        for path in (Path(above, name) for name in (*folders, *files)):
            with suppress(FileNotFoundError):  # a save or a gc has just removed it
                mode = path.lstat().st_mode
                wanted = rights & (0o077 if stat.S_ISDIR(mode) else 0o044)
                (links if stat.S_ISLNK(mode) else closed if wanted & ~mode else []).append(path)
    if links:
        found = f"a store does not follow links, but {len(links)} of its files are links, such as {links[0]}"
        yield Finding("links", False, found, f"make a copy without links: `cp -rL {root} COPY`")
    if closed:
        found = f"{len(closed)} files and folders, such as {closed[0]}, give other users less than {root} does"
        advice = "their owners: use the commands under Permissions in docs/running.md"
        yield Finding("permissions", False if rights & stat.S_IWGRP else None, found, advice)


def _scan(folders: Folders, folder: str) -> FolderListing:
    """List the objects in a folder and the keys of its subfolders. Both are empty if the folder does not exist."""
    files: list[ListedObject] = []
    deeper: list[str] = []
    with (
        reporting("list", folders.root / folder),
        suppress(FileNotFoundError),
        folders.open(folder) as fd,
        os.scandir(fd) as items,
    ):
        for item in items:
            key = f"{folder}/{item.name}" if folder else item.name
            if item.name.startswith("."):
                continue
            if item.is_dir(follow_symlinks=False):
                deeper.append(key)
            elif entry := _entry(item, key, folders.root):
                files.append(entry)
    return files, deeper


def _entry(item: os.DirEntry[str], key: str, root: Path) -> ListedObject | None:
    """Return the listing entry for an object, or None if it was deleted in the meantime."""
    try:
        status = item.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise misplaced(status.st_mode, root / key)
    version = f"{status.st_ino} {status.st_ctime_ns}"
    return ListedObject(key, status.st_size, version, 512 * status.st_blocks, status.st_mtime_ns // 1000)


def _open_file(folder: int, name: str, path: Path) -> tuple[int, int]:
    """Open a regular file. Return its descriptor and its size."""
    try:
        fd = os.open(name, _READ, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise misplaced(stat.S_IFLNK, path) from error
        if error.errno == errno.ENXIO:
            raise misplaced(stat.S_IFSOCK, path) from error
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise misplaced(status.st_mode, path)
    except BaseException:
        os.close(fd)
        raise
    return fd, status.st_size


def _remove(folder: int, name: str) -> int:
    """Remove a leftover file and return the number of bytes freed."""
    with suppress(FileNotFoundError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        os.unlink(name, dir_fd=folder)
        return status.st_size if status.st_nlink == 1 else 0
    return 0
