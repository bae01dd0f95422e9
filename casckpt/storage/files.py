"""Other programs' files in a folder: the protocol for local and remote folders, and the local implementation."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from typing_extensions import override

from casckpt.errors import NotFound, Refused

MAX_WHOLE_BYTES = 1 << 30


class Files(Protocol):
    """The files of one folder, local or remote. Names are relative and slash-separated.

    All methods raise NotFound for a missing file, Refused for a name that escapes the folder, and StorageError.
    """

    @property
    def url(self) -> str:
        """The folder's URL, for use in messages."""

    def names(self) -> Sequence[str]:
        """Return the sorted names of all files in the folder and its subfolders."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    def read(self, name: str) -> bytes:
        """Read a whole file of at most 1 GiB."""

    def part(self, name: str, offset: int, nbytes: int) -> BinaryIO:
        """Open part of a file as a file object. The caller must close it."""

    def below(self, folder: str) -> Files:
        """Return the files in a subfolder."""


def checked(name: str) -> str:
    """Return ``name`` unchanged. Raises Refused if it could escape its folder."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
        raise Refused(f"{name!r} is not a valid file name: it must be relative and must not contain ..")
    return name


def check_size(name: str, nbytes: int) -> None:
    """Raise Refused for a file that is too large to read in one piece."""
    if nbytes > MAX_WHOLE_BYTES:
        raise Refused(f"{name} is larger than {MAX_WHOLE_BYTES} bytes, which is too large for this kind of file")


class LocalFiles(Files):
    """`Files` in a local folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()

    @property
    def url(self) -> str:
        """The path."""
        return str(self.path)

    @override
    def names(self) -> Sequence[str]:
        paths = (Path(folder, name) for folder, _, names in os.walk(self.path) for name in names)
        return sorted(path.relative_to(self.path).as_posix() for path in paths)

    def _open(self, name: str) -> BinaryIO:
        path = self.path / checked(name)
        try:
            if not path.is_file():  # opening a pipe would block until a writer appears
                raise FileNotFoundError
            return path.open("rb")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(
                f"file {name} is missing from {self.url}; make sure that you have the whole folder"
            ) from error

    @override
    def size(self, name: str) -> int:
        with self._open(name) as file:
            return os.fstat(file.fileno()).st_size

    @override
    def read(self, name: str) -> bytes:
        check_size(name, self.size(name))
        with self._open(name) as file:
            return file.read()

    @override
    def part(self, name: str, offset: int, nbytes: int) -> BinaryIO:
        file: Any = _Part(self._open(name), offset, nbytes)
        return file  # type: ignore[no-any-return] # behaves like a binary file

    @override
    def below(self, folder: str) -> LocalFiles:
        return LocalFiles(self.path / checked(folder))


class _Part(io.RawIOBase):
    """The bytes [offset, offset + nbytes) of a file, as a file object."""

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
        count: int = self._file.readinto(wanted)  # type: ignore[attr-defined] # binary files have this method
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
