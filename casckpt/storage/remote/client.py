"""The client protocol for remote objects, as `casckpt.storage.remote.store` needs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol

from casckpt.errors import CasckptError, StorageError
from casckpt.storage.base import Finding, ListedObject
from casckpt.storage.remote.patience import Patience


@dataclass(frozen=True)
class ExplainedFailure:
    """The cause of a failure, in words. ``again``: whether a retry may help. ``kind``: the error to raise.

    ``full``: see `StorageError`. ``unpromised``: another cause, unless the caller promises to be the only writer.
    """

    why: str
    again: bool = False
    kind: type[CasckptError] = StorageError
    full: bool = False
    unpromised: str = ""


class Ranged(Protocol):
    """One object for ranged reads. If the storage has versions, all reads return the same version or raise an error."""

    def size(self) -> int:
        """Return the size in bytes."""

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, none of which is empty. Raises `ShortObject` if the object is too short."""


def microseconds_of(time: object) -> int | None:
    """Return a time that a client reports, in microseconds since the epoch, or None if it is of an unknown type."""
    seconds = time.timestamp() if isinstance(time, datetime) else time
    return round(1e6 * seconds) if isinstance(seconds, int | float) else None


class Page(NamedTuple):
    """Part of a listing. ``folders``: the keys of the listed folders.

    ``after``: the argument for the next page, or None after the last one.
    """

    objects: list[ListedObject]
    folders: list[str]
    after: str | None = None


class Client(Protocol):
    """Objects in one bucket, by key. A client does not retry.

    Each request ends within the limits in ``patience`` (see `patience.begin_request`). Calls raise
    `casckpt.errors.NotFound`, `AlreadyExists`, `ShortObject`, or one of ``failures``, for which `explain` returns the
    cause.
    """

    patience: Patience
    """The time limits."""
    exclusive: bool | None
    """Whether `create` refuses an existing key, even among concurrent calls. None: unknown, so it must be probed."""
    failures: tuple[type[Exception], ...]
    """The errors that calls may raise."""

    def explain(self, error: Exception) -> ExplainedFailure:
        """Return the cause of one of ``failures``."""

    def renew(self, error: Exception, began: float) -> bool:
        """Look up new credentials if the error says that they have expired.

        ``began``: the time (``time.monotonic``) when the failed request began. If another thread has looked them up
        since then, this does nothing. Returns True if the call should be repeated.
        """

    def create(self, key: str, data: memoryview, put_id: str) -> None:
        """Put an object. Raises `AlreadyExists` if the key exists. ``put_id``: stored with the object if possible."""

    def put(self, key: str, data: memoryview, put_id: str) -> None:
        """Put an object, replacing an existing one."""

    def put_id(self, key: str) -> str | None:
        """Return the put id that is stored with an object, or None if there is no object or no id."""

    def get(self, key: str, limit: int) -> bytes:
        """Read the object. Raises `casckpt.errors.Refused` if it is longer than ``limit``."""

    def open(self, key: str) -> Ranged:
        """Open an object for ranged reads. This does not send a request."""

    def size(self, key: str) -> int | None:
        """Return the size in bytes, or None if the object does not exist."""

    def page(self, prefix: str, after: str | None, *, deep: bool) -> Page:
        """List some objects whose keys start with ``prefix``.

        If ``deep`` is False, list only the objects and subfolders directly in that folder. ``after``: the value from
        the previous page, or None for the first page.
        """

    def delete(self, key: str) -> None:
        """Remove the object. Does nothing if it does not exist."""

    def examine(self) -> Iterator[Finding]:
        """Yield facts about the bucket for `casckpt doctor`."""
