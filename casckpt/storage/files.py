"""Files that other programs wrote, by their names in a folder: what is asked of them, wherever it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import BinaryIO, Protocol

from casckpt.errors import Refused

MAX_WHOLE_BYTES = 1 << 30


class Files(Protocol):
    """The files of one folder, wherever it is. Names are relative, with slashes.

    All methods raise NotFound for a file that is not there, Refused for a name that leads out of the folder,
    StorageError.
    """

    @property
    def url(self) -> str:
        """How to name the folder to a person."""

    def names(self) -> Sequence[str]:
        """Return all files in it and below, sorted."""

    def size(self, name: str) -> int:
        """Return the size of one file, in bytes."""

    def read(self, name: str) -> bytes:
        """Read all of a file of at most 1 GiB."""

    def part(self, name: str, offset: int, nbytes: int) -> BinaryIO:
        """Open a part of a file, as a file to be read and closed."""

    def below(self, folder: str) -> Files:
        """Return the files of a folder in this one."""


def checked(name: str) -> str:
    """Return ``name``, unless it could lead out of its folder."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
        raise Refused(f"{name!r} is no name of a file in a folder")
    return name


def check_size(name: str, nbytes: int) -> None:
    """Raise Refused for a file that is too large to be read as a whole."""
    if nbytes > MAX_WHOLE_BYTES:
        raise Refused(f"{name} is larger than {MAX_WHOLE_BYTES} bytes; that is no file of this kind")
