"""Files that other programs wrote, by their names in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from casckpt.errors import NotFound, Refused

MAX_WHOLE_BYTES = 1 << 30


class Files(Protocol):
    """The files of one folder, wherever it is. Names are relative, with slashes."""

    @property
    def url(self) -> str:
        """How to name the folder to a person."""

    def names(self) -> Sequence[str]:
        """All files in it and below, sorted."""

    def open(self, name: str) -> BinaryIO:
        """One file, to be read from any place. Raises NotFound, Refused for a name that leads out of the folder."""

    def read(self, name: str) -> bytes:
        """All of a small file."""

    def size(self, name: str) -> int:
        """Of one file, in bytes."""

    def below(self, folder: str) -> Files:
        """Those of a folder in this one."""


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

    def open(self, name: str) -> BinaryIO:
        """See `Files`."""
        check_name(name)
        try:
            return (self.path / name).open("rb")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"there is no file {name} in {self.url}; get the whole folder") from error

    def read(self, name: str) -> bytes:
        """See `Files`."""
        with self.open(name) as file:
            return bounded(file.read(MAX_WHOLE_BYTES + 1), name)

    def size(self, name: str) -> int:
        """See `Files`."""
        with self.open(name) as file:
            return os.fstat(file.fileno()).st_size

    def below(self, folder: str) -> LocalFiles:
        """See `Files`."""
        check_name(folder)
        return LocalFiles(self.path / folder)


def check_name(name: str) -> None:
    """Raise Refused for a name that could lead out of its folder."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
        raise Refused(f"{name!r} is no name of a file in a folder")


def bounded(data: bytes, name: str) -> bytes:
    """``data``, unless there is too much of it."""
    if len(data) > MAX_WHOLE_BYTES:
        raise Refused(f"{name} is larger than {MAX_WHOLE_BYTES} bytes; that is no file of this kind")
    return data
