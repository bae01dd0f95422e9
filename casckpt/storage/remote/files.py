"""Other programs' files at a URL, read and written through fsspec."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fsspec.core import url_to_fs

from casckpt.errors import CasckptError, Conflict, NotFound, StorageError, Unsupported
from casckpt.storage.files import check_size, checked
from casckpt.storage.remote.calls import calls_of, with_timeouts
from casckpt.storage.remote.patience import Patience


class RemoteFiles:
    """`casckpt.storage.files.Files` under a URL. The fsspec client finds the credentials."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        scheme, patience = self.url.partition("://")[0].lower(), Patience()
        try:
            self._fs, root = url_to_fs(self.url, **with_timeouts(scheme, {}, patience))
        except (ImportError, ValueError) as error:
            raise Unsupported(f"{self.url} cannot be opened: {error}") from error
        self._ask = calls_of(self._fs, scheme, patience)
        self._root = root.rstrip("/")

    @contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        try:
            yield
        except CasckptError:
            raise
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"{name} is missing from {self.url}; make sure that the URL has the whole folder") from error
        except Exception as error:  # each fsspec implementation has its own errors
            raise StorageError(f"{self.url}: {name}: {type(error).__name__}: {error}; try again") from error

    def names(self) -> Sequence[str]:
        """See `casckpt.storage.files.Files`."""
        with self._reporting("folder"):
            return sorted(path.removeprefix(self._root).lstrip("/") for path in self._ask.find(self._root))

    def size(self, name: str) -> int:
        """See `casckpt.storage.files.Files`."""
        with self._reporting(name):
            return self._size(self._path(name))

    def read(self, name: str) -> bytes:
        """See `casckpt.storage.files.Files`."""
        size = self.size(name)
        check_size(name, size)
        with self._reporting(name):
            return bytes(self._ask.read(self._path(name), size))

    def part(self, name: str, offset: int, nbytes: int) -> BinaryIO:
        """See `casckpt.storage.files.Files`."""
        with self._reporting(name):
            return io.BytesIO(self._ask.part(self._path(name), offset, offset + nbytes))

    def below(self, folder: str) -> RemoteFiles:
        """See `casckpt.storage.files.Files`."""
        return RemoteFiles(f"{self.url}/{checked(folder)}")

    def fetch(self, folder: Path) -> Path:
        """Download the file or folder at the URL into ``folder``, and return the path of the copy."""
        target = folder / checked(self._root.rpartition("/")[2])
        with self._reporting(target.name):
            if self._ask("isfile", self._root):
                self._ask.fetch(self._root, target, self._size(self._root))
                return target
        names = self.names()
        if not names:
            raise NotFound(f"there is nothing at {self.url}: pass the URL of a file or folder")
        for name in names:
            path = target / checked(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._reporting(name):
                self._ask.fetch(self._path(name), path, self._size(self._path(name)))
        return target

    def check_free(self, *, force: bool) -> None:
        """Raise Conflict if the URL exists, unless ``force`` is set. `put` then replaces files with the same name."""
        with self._reporting("folder"):
            taken = self._ask("exists", self._root) and bool(self._ask.find(self._root))
        if taken and not force:
            raise Conflict(f"{self.url} already exists: pass a different URL, or --force to overwrite it")

    def put(self, source: Path, *, is_last: Callable[[str], bool] = lambda name: False) -> None:
        """Upload a file, or all files in a folder, to the URL.

        Files for which ``is_last`` returns True are uploaded last.
        """
        if source.is_file():
            self._put_file(source, self._root)
            return
        names = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
        for name in sorted(names, key=lambda name: (is_last(name), name)):
            self._put_file(source / name, self._path(name))

    def remove_others(self, names: Collection[str], is_stale: Callable[[str], bool]) -> None:
        """Delete the files other than ``names`` for which ``is_stale`` returns True."""
        for name in self.names():
            if name not in names and is_stale(name):
                with self._reporting(name):
                    self._ask("rm_file", self._path(name))

    def _put_file(self, source: Path, target: str) -> None:
        with self._reporting(target):
            self._ask("makedirs", target.rpartition("/")[0], exist_ok=True)
            self._ask("put_file", str(source), target, nbytes=source.stat().st_size)

    def _size(self, path: str) -> int:
        return int(self._ask("size", path))

    def _path(self, name: str) -> str:
        return f"{self._root}/{checked(name)}"
