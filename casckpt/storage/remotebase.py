"""What a client of remote objects must do for `casckpt.storage.remote`, and how it tells what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from casckpt.errors import CasckptError, StorageError
from casckpt.storage.base import Entry, Finding
from casckpt.storage.patience import Patience


@dataclass(frozen=True)
class Failure:
    """What went wrong, for people. ``again``: trying again may help. ``kind``: what to raise if it did not."""

    why: str
    again: bool = False
    kind: type[CasckptError] = StorageError


class Ranged(Protocol):
    """One object, for ranged reads. Where the storage tells versions apart, all answers are of one, or are errors."""

    def size(self) -> int:
        """Size in bytes."""

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, which hold a byte at least. Raises `ShortObject` if the object ends before."""


class Client(Protocol):
    """Objects of one bucket, by their keys. Nothing is tried twice here.

    Each request ends when ``patience`` does, whatever the server does (`casckpt.storage.patience.asking`). Calls raise
    `casckpt.errors.NotFound`, `AlreadyExists` or `ShortObject` where these say all; whatever else they raise is one of
    ``failures``, and `explain` says what it means.
    """

    @property
    def patience(self) -> Patience:
        """How long the server is waited for."""

    @property
    def exclusive(self) -> bool | None:
        """Does `create` refuse a key that is taken, also when several come at once? None: to be probed."""

    @property
    def read_only(self) -> bool:
        """Can nothing be written here?"""

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """What calls may raise."""

    def explain(self, error: Exception) -> Failure:
        """What an error of these means."""

    def create(self, key: str, data: memoryview, mark: str) -> None:
        """Put, unless the key is taken: `AlreadyExists`. ``mark``: to be kept beside the object."""

    def put(self, key: str, data: memoryview, mark: str) -> None:
        """Put, over whatever is there."""

    def mark(self, key: str) -> str | None:
        """The mark beside an object; None where there is no such object, or marks are not kept."""

    def get(self, key: str, limit: int) -> bytes:
        """The object; `casckpt.errors.Refused` if it is longer than ``limit``."""

    def open(self, key: str) -> Ranged:
        """For ranged reads; asks nothing yet."""

    def size(self, key: str) -> int | None:
        """Size in bytes, None if there is none."""

    def page(self, prefix: str, after: str | None) -> tuple[list[Entry], str | None]:
        """Some of the objects whose key starts so, and what to pass as ``after`` for the next ones; None: no more."""

    def folder_page(self, folder: str, after: str | None) -> tuple[list[Entry], list[str], str | None]:
        """Some of the objects right in a folder, and of the folders in it; ``after`` as for `page`."""

    def delete(self, key: str) -> None:
        """Remove it, if it is there."""

    def examine(self) -> Iterator[Finding]:
        """What the settings of the bucket say, for `casckpt doctor`."""
