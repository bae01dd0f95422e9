"""The protocol of a client of remote objects, as `casckpt.storage.remote.store` needs it, and its words of failure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from casckpt.errors import CasckptError, StorageError
from casckpt.storage.base import Finding, ListedObject
from casckpt.storage.remote.patience import Patience


@dataclass(frozen=True)
class ExplainedFailure:
    """What went wrong, for people. ``again``: trying again may help. ``kind``: what to raise if it did not."""

    why: str
    again: bool = False
    kind: type[CasckptError] = StorageError


class Ranged(Protocol):
    """One object, for ranged reads. Where the storage tells versions apart, all answers are of one, or are errors."""

    def size(self) -> int:
        """Return the size in bytes."""

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, which hold a byte at least. Raises `ShortObject` if the object ends before."""


class Page(NamedTuple):
    """A part of a listing. ``folders``: by their keys. ``after``: what to ask the next page with; None: no more."""

    objects: list[ListedObject]
    folders: list[str]
    after: str | None = None


class Client(Protocol):
    """Objects of one bucket, by their keys. Nothing is tried twice here.

    Each request ends when ``patience`` does, whatever the server does (see `patience.begin_request`). Calls raise
    `casckpt.errors.NotFound`, `AlreadyExists` or `ShortObject` where these say all; whatever else they raise is one of
    ``failures``, and `explain` says what it means.
    """

    patience: Patience
    """How long the server is waited for."""
    exclusive: bool | None
    """Whether `create` refuses a key that is taken, also when several come at once; None: to be probed."""
    read_only: bool
    """Whether nothing can be written here."""
    failures: tuple[type[Exception], ...]
    """What calls may raise."""

    def explain(self, error: Exception) -> ExplainedFailure:
        """Say what an error of these means."""

    def renew(self, error: Exception) -> bool:
        """Look for credentials again, if such an error says that they ended. True: the call is worth another try."""

    def create(self, key: str, data: memoryview, put_id: str) -> None:
        """Put, unless the key is taken: `AlreadyExists`. ``put_id``: to be kept beside the object."""

    def put(self, key: str, data: memoryview, put_id: str) -> None:
        """Put, over whatever is there."""

    def put_id(self, key: str) -> str | None:
        """Return the id that was put beside an object; None where there is no such object, or ids are not kept."""

    def get(self, key: str, limit: int) -> bytes:
        """Read the object; `casckpt.errors.Refused` if it is longer than ``limit``."""

    def open(self, key: str) -> Ranged:
        """Open an object for ranged reads; asks nothing yet."""

    def size(self, key: str) -> int | None:
        """Return the size in bytes, None if there is none."""

    def page(self, prefix: str, after: str | None, *, deep: bool) -> Page:
        """List some objects whose keys start so; not ``deep``: only those right in that folder, and the folders in it.

        ``after``: of the page before; None for the first.
        """

    def delete(self, key: str) -> None:
        """Remove it, if it is there."""

    def examine(self) -> Iterator[Finding]:
        """Yield what the settings of the bucket say, for `casckpt doctor`."""
