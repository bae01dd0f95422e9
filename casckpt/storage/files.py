"""Files that other programs wrote, by their names in a folder: of a disk, or behind a URL."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol
from urllib.parse import unquote

from casckpt.errors import InvalidInput, NotFound, Refused

MAX_WHOLE_BYTES = 1 << 30
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


class Files(Protocol):
    """The files of one folder, wherever it is. Names are relative, with slashes.

    All methods raise NotFound for a file that is not there, Refused for a name that leads out of the folder,
    StorageError.
    """

    @property
    def url(self) -> str:
        """How to name the folder to a person."""

    def names(self) -> Sequence[str]:
        """All files in it and below, sorted."""

    def size(self, name: str) -> int:
        """Of one file, in bytes."""

    def read(self, name: str) -> bytes:
        """All of a file of at most 1 GiB."""

    def part(self, name: str, offset: int, nbytes: int) -> BinaryIO:
        """A part of a file, as a file to be read and closed."""

    def below(self, folder: str) -> Files:
        """Those of a folder in this one."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Does it name files behind a URL, other than file://?"""
    found = _SCHEME.match(path) if isinstance(path, str) else None
    return found is not None and found[1].lower() != "file"


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path of a local file or folder, also of a file:// URL. Raises InvalidInput for an empty one."""
    text = os.fspath(path)
    if not text:
        raise InvalidInput("'' names no file or folder; give a path or a URL")
    return Path(unquote(text.removeprefix("file://")) if text.startswith("file://") else text).expanduser()


def open_files(path: str | os.PathLike[str]) -> Files:
    """The files of a folder, or below a URL that fsspec knows. Raises Unsupported for another one."""
    if not is_url(path):
        return LocalFiles(local_path(path))
    from casckpt.storage.remotefiles import RemoteFiles  # fsspec takes a while to import

    return RemoteFiles(os.fspath(path))


class LocalFiles:
    """`Files` of a local folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()

    @property
    def url(self) -> str:
        """The path."""
        return str(self.path)

    def names(self) -> Sequence[str]:
        """See `Files`."""
        return sorted(self._all())

    def _all(self) -> Iterator[str]:
        for place, _, names in os.walk(self.path):
            yield from (Path(place, name).relative_to(self.path).as_posix() for name in names)

    def _open(self, name: str) -> BinaryIO:
        path = self.path / checked(name)
        try:
            if not path.is_file():  # to open a pipe is to wait for whoever writes to it
                raise FileNotFoundError
            return path.open("rb")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"there is no file {name} in {self.url}; get the whole folder") from error

    def size(self, name: str) -> int:
        """See `Files`."""
        with self._open(name) as file:
            return os.fstat(file.fileno()).st_size

    def read(self, name: str) -> bytes:
        """See `Files`."""
        check_size(name, self.size(name))
        with self._open(name) as file:
            return file.read()

    def part(self, name: str, offset: int, nbytes: int) -> BinaryIO:
        """See `Files`."""
        file: Any = _Part(self._open(name), offset, nbytes)
        return file  # type: ignore[no-any-return] # it has what a binary file has

    def below(self, folder: str) -> LocalFiles:
        """See `Files`."""
        return LocalFiles(self.path / checked(folder))


class _Part(io.RawIOBase):
    """The bytes [offset, offset + nbytes) of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, nbytes: int) -> None:
        self._file, self._offset, self._nbytes, self._at = file, offset, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + (0, self._at, self._nbytes)[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        wanted = memoryview(buffer).cast("B")[: max(0, self._nbytes - self._at)]
        self._file.seek(self._offset + self._at)
        count: int = self._file.readinto(wanted)  # type: ignore[attr-defined] # of files that are opened for bytes
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def checked(name: str) -> str:
    """``name``, unless it could lead out of its folder."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
        raise Refused(f"{name!r} is no name of a file in a folder")
    return name


def check_size(name: str, nbytes: int) -> None:
    """Raise Refused for a file that is too large to be read as a whole."""
    if nbytes > MAX_WHOLE_BYTES:
        raise Refused(f"{name} is larger than {MAX_WHOLE_BYTES} bytes; that is no file of this kind")
