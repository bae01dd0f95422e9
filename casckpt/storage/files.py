"""The protocol for files of other programs in a folder, local or remote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import BinaryIO, Protocol

from casckpt.errors import Refused

MAX_WHOLE_BYTES = 1 << 30


class Files(Protocol):
    """The files of one folder, local or remote. Names are relative, with slashes.

    All methods raise NotFound for a missing file, Refused for a name that leads out of the folder, and StorageError.
    """

    @property
    def url(self) -> str:
        """The name of the folder for people."""

    def names(self) -> Sequence[str]:
        """Return the names of all files in the folder and below, sorted."""

    def size(self, name: str) -> int:
        """Return the size of one file, in bytes."""

    def read(self, name: str) -> bytes:
        """Read a whole file of at most 1 GiB."""

    def part(self, name: str, offset: int, nbytes: int) -> BinaryIO:
        """Open a part of a file as a file. The caller closes it."""

    def below(self, folder: str) -> Files:
        """Return the files of a folder in this one."""


def checked(name: str) -> str:
    """Return ``name``. Raises Refused if it could lead out of its folder."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
        raise Refused(f"{name!r} is not the name of a file in a folder")
    return name


def check_size(name: str, nbytes: int) -> None:
    """Raise Refused for a file that is too large to be read as a whole."""
    if nbytes > MAX_WHOLE_BYTES:
        raise Refused(f"{name} has more than {MAX_WHOLE_BYTES} bytes; no file of this kind is that large")
