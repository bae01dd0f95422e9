"""Opens and syncs the folders of a local store, one path component at a time so that no symlink can lead out of it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from casckpt.base.lazy import cached_property
from casckpt.errors import InvalidInput, Refused
from casckpt.storage.base import split_folder
from casckpt.storage.local import syscalls

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_STAYS = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.EACCES, errno.EPERM)  # the last two: not this user's
_SPARE = ".spare"
_REMEMBERED = 4096  # folders
_PUT_BACK = "restore the original from a copy of the store, or move this out of the store"


class Folders:
    """The folders below ``root``. The path of ``root`` itself may contain symlinks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._anchored: set[str] = set()  # folders whose names this instance has made durable
        self._made: list[Path] = []  # the root and its parent folders, if this instance created them

    @contextmanager
    def open(self, folder: str, *, create: bool = False) -> Iterator[int]:
        """Open a folder. Raises FileNotFoundError, other OSErrors, and `Refused` if the path contains a symlink."""
        fd = self._open_root(create)
        try:
            path = ""
            for part in split_folder(folder):
                path = f"{path}/{part}" if path else part
                deeper = self._open_part(fd, part, path, create)
                os.close(fd)
                fd = deeper
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def open_spare(self, *, create: bool = False) -> Iterator[int]:
        """Open the folder of prepared files, which no key can name. Raises the errors of `open`."""
        with self.open("") as root:
            fd = self._open_part(root, _SPARE, _SPARE, create)
        try:
            yield fd
        finally:
            os.close(fd)

    def settle(self, fd: int, folder: str) -> None:
        """Make the names in the open ``folder`` durable, and the names of the folder itself and its parents."""
        self._sync(fd)
        if len(self._anchored) > _REMEMBERED:
            self._anchored.clear()
        while folder and folder not in self._anchored:
            parent = folder.rpartition("/")[0]
            with self.open(parent) as above:
                self._sync(above)
            self._anchored.add(folder)
            folder = parent
        if "" not in self._anchored:
            self._sync_outside(self.root.parent)
            self._anchored.add("")

    def remove(self, folder: str) -> None:
        """Remove an empty folder. The root and its parents are removed only if this instance created them."""
        parent, _, name = folder.rpartition("/")
        self._anchored.discard(folder)
        try:
            if name:
                with self.open(parent) as above:
                    os.rmdir(name, dir_fd=above)
            while not name and self._made:
                self._made[-1].rmdir()
                self._made.pop()
        except OSError as error:
            if error.errno not in _STAYS:
                raise

    def _open_root(self, create: bool) -> int:
        try:
            return os.open(self.root, _FOLDER)
        except NotADirectoryError as error:
            raise InvalidInput(
                f"{self.root} cannot be a store because it, or part of its path, is a file: use the path of a folder"
            ) from error
        except FileNotFoundError:
            if not create:
                raise
        self._create_root()
        return os.open(self.root, _FOLDER)

    def _create_root(self) -> None:
        missing = [self.root]
        while not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        for path in reversed(missing):
            if path.is_symlink():
                raise InvalidInput(
                    f"{path} is a link to {os.readlink(path)}, which does not exist: create that folder first"
                )
            with suppress(FileExistsError):
                path.mkdir()
                self._made.append(path)
            self._sync_outside(path.parent)
        self._anchored.clear()

    def _open_part(self, above: int, name: str, path: str, create: bool) -> int:
        try:
            return _open_inside(above, name, self.root, path)
        except FileNotFoundError:
            if not create:
                raise
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=above)
            self._anchored.discard(path)
        made = _open_inside(above, name, self.root, path)
        syscalls.share(made, self.shared_bits)
        return made

    @cached_property
    def shared_bits(self) -> int:
        """The permissions that group and others get in this store, or 0 if the umask decides.

        A root that its group may write, with the setgid bit, is shared: one user's umask must not lock others out.
        """
        mode = self.root.stat().st_mode
        return mode & 0o077 if mode & stat.S_ISGID and mode & stat.S_IWGRP else 0

    _sync = staticmethod(syscalls.sync_folder)

    def _sync_outside(self, path: Path) -> None:
        try:
            fd = os.open(path, _FOLDER)
        except PermissionError:  # the folder may be writable but not readable; its owner must sync it
            return
        try:
            self._sync(fd)
        finally:
            os.close(fd)


def _open_inside(above: int, name: str, root: Path, path: str) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
    except NotADirectoryError as error:  # Linux also raises this for a symlink
        raise misplaced(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode, root / path) from error


def misplaced(mode: int, path: Path) -> Refused:
    """Return the error for a path that is not a file, or for a file in place of a folder.

    Skipping such a path could hide a commit from gc, and following a symlink could lead out of the store.
    """
    if stat.S_ISLNK(mode):
        return Refused(
            f"{path} is a symlink, which a store does not follow: copy the store with the files that its links lead to "
            "(`cp -rL STORE NEW`), and use the copy"
        )
    if stat.S_ISREG(mode):
        return Refused(f"{path} is a file where a folder of the store belongs: {_PUT_BACK}")
    what = "a folder" if stat.S_ISDIR(mode) else "neither a file nor a folder"
    return Refused(f"{path} is {what}, where a file of the store belongs: {_PUT_BACK}")
