"""The protocol of a client of remote objects, as `casckpt.storage.remote.store` needs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from casckpt.errors import CasckptError, StorageError
from casckpt.storage.base import Finding, ListedObject
from casckpt.storage.remote.patience import Patience


@dataclass(frozen=True)
class ExplainedFailure:
    """The cause of a failure, for people. ``again``: trying again may help. ``kind``: the error to raise."""

    why: str
    again: bool = False
    kind: type[CasckptError] = StorageError


class Ranged(Protocol):
    """One object, for ranged reads. If the storage has versions, all reads are of one version, or raise."""

    def size(self) -> int:
        """Return the size in bytes."""

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, which are not empty. Raises `ShortObject` if the object is too short."""


class Page(NamedTuple):
    """A part of a listing. ``folders``: their keys. ``after``: the argument for the next page; None: no more pages."""

    objects: list[ListedObject]
    folders: list[str]
    after: str | None = None


class Client(Protocol):
    """Objects of one bucket, by key. A client does not retry.

    Each request ends within the limits of ``patience`` (see `patience.begin_request`). Calls raise
    `casckpt.errors.NotFound`, `AlreadyExists`, `ShortObject`, or one of ``failures``, which `explain` explains.
    """

    patience: Patience
    """The time limits."""
    exclusive: bool | None
    """Whether `create` refuses a taken key, also among concurrent calls; None: unknown, to be probed."""
    read_only: bool
    """Whether it cannot write."""
    failures: tuple[type[Exception], ...]
    """The errors that calls may raise."""

    def explain(self, error: Exception) -> ExplainedFailure:
        """Explain one of ``failures``."""

    def renew(self, error: Exception) -> bool:
        """Look up credentials again if the error says that they expired. True: repeat the call."""

    def create(self, key: str, data: memoryview, put_id: str) -> None:
        """Put. Raises `AlreadyExists` if the key is taken. ``put_id``: stored with the object if possible."""

    def put(self, key: str, data: memoryview, put_id: str) -> None:
        """Put, and replace an existing object."""

    def put_id(self, key: str) -> str | None:
        """Return the id that was stored with an object; None if there is no object or no id."""

    def get(self, key: str, limit: int) -> bytes:
        """Read the object. Raises `casckpt.errors.Refused` if it is longer than ``limit``."""

    def open(self, key: str) -> Ranged:
        """Open an object for ranged reads. Sends no request yet."""

    def size(self, key: str) -> int | None:
        """Return the size in bytes; None if the object does not exist."""

    def page(self, prefix: str, after: str | None, *, deep: bool) -> Page:
        """List some objects whose keys start with ``prefix``.

        Not ``deep``: only objects directly in that folder, and its folders. ``after``: from the previous page; None for
        the first page.
        """

    def delete(self, key: str) -> None:
        """Remove the object. No error if it does not exist."""

    def examine(self) -> Iterator[Finding]:
        """Yield facts about the settings of the bucket, for `casckpt doctor`."""
