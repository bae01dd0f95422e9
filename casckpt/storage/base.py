"""The storage contract: bytes by key. All other packages rely on these guarantees and on nothing else.

Keys are slash-separated paths. `casckpt.format.keys` builds and validates every key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from casckpt.errors import Refused

BLOCK = 4096  # bytes; buffers and blob data with this alignment can bypass the page cache
Known: TypeAlias = Callable[[str], object]
"""A parser such as those in `casckpt.format.keys`. It returns None for a string that is not an object key."""
_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object in a listing: its key and its size in bytes.

    ``version``: a string that changes whenever the object's content changes, such as an ETag or a file's modification
    time. It is "" if the storage does not report one. ``allocated``: the bytes that it takes up on a disk, or None.
    ``time``: when it was created, by the storage's clock, in microseconds since the epoch, or None if the storage does
    not report it.
    """

    key: str
    size: int
    version: str = field(default="", compare=False)
    allocated: int | None = field(default=None, compare=False)
    time: int | None = field(default=None, compare=False)


FolderListing: TypeAlias = tuple[list[ListedObject], list[str]]
"""The objects and the subfolders directly in a folder."""


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of storage that planning and safety checks need.

    ``remote``: whether a request costs a round trip. ``read_gap``: the largest gap of unneeded bytes that is worth
    reading in order to merge two ranges. ``parallel``: how many requests to keep in flight. ``exclusive``: whether the
    storage refuses to create an existing key (None: unknown, so it must be probed). ``stale``: why its listings may lag
    behind other hosts' writes, with advice, or "" if they do not. gc must not use stale listings. ``uploads``: how many
    blob puts to keep in flight, each with its own buffer. ``page_cache``: whether reads go through this host's page
    cache, so that later readers find the bytes there. None: they do if there is enough memory, because cached reads are
    as fast as direct ones.
    """

    remote: bool
    read_gap: int
    parallel: int
    exclusive: bool | None
    stale: str = ""
    uploads: int = 1
    page_cache: bool | None = False

    @property
    def requests(self) -> int:
        """How many small requests to keep in flight. 1 if a request does not cost a round trip."""
        return min(self.parallel, _REQUESTS) if self.remote else 1


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about storage. ``ok``: whether it is safe, or None if unknown. ``advice``: what the user should do.

    ``name``: a stable identifier for programs. ``found``: the fact in words.
    """

    name: str
    ok: bool | None
    found: str
    advice: str = ""


@runtime_checkable
class Examinable(Protocol):
    """Storage whose settings `casckpt doctor` can check."""

    def examine(self) -> Iterator[Finding]:
        """Yield facts about the settings without writing anything. Raises `casckpt.errors.StorageError`.

        The first fact decides whether a store may be created.
        """


class Reader(Protocol):
    """An object opened for ranged reads. Thread-safe."""

    @property
    def size(self) -> int:
        """The size of the object in bytes, as reported by the storage."""

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers`` in order with consecutive bytes, starting at ``offset``.

        Buffers must be writable, contiguous and of format "B". The method either fills all of them or raises:
        `ShortObject` if the object is too short, `casckpt.errors.StorageError` if the storage fails. After a failed
        read, the buffers' contents are undefined.
        """


@runtime_checkable
class ObjectStore(Protocol):
    """A flat map from keys to immutable bytes.

    - **Atomic**: an object is either completely visible or not visible at all, even if a process is killed at any
      point.
    - **Create-only**: `put` never replaces an object. If several puts of the same key run concurrently, exactly one
      succeeds, and the others raise `AlreadyExists`. (Only repair uses `replace`.)
    - **Durable**: when `put` returns, the bytes survive a power failure. With ``settle=False``, the object's name may
      be lost until `settle` has returned for its folder.
    - **Read after write, list after write**: every later read and listing sees all completed puts.
    - **Safe to retry**: every call can be retried after a `StorageError`. A put whose response was lost may have
      succeeded; a caller that needs to know must read the object back.
    - **Thread-safe and picklable**. An unpickled copy opens its own connections and files.
    """

    @property
    def url(self) -> str:
        """The URL of this storage, without credentials, for use in messages."""

    @property
    def traits(self) -> Traits:
        """The properties that planning and safety checks need."""

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        """Create the object. Raises `AlreadyExists`, `casckpt.errors.StorageError`, `casckpt.errors.Unsupported`."""

    def prepare(self) -> int:
        """Set room aside for `put_prepared`, as far as there is some. Return for how many objects. Never fails."""
        return 0

    def put_prepared(self, key: str, data: bytes) -> bool:
        """Do what `put` could not do because the storage is full, with room that was set aside.

        Return False if this kind of storage sets nothing aside. Raises the errors of `put`.
        """
        return False

    def settle(self, folder: str) -> None:
        """Make the names put into ``folder`` ("objects/x", no trailing slash) with ``settle=False`` durable."""

    def get(self, key: str, *, limit: int) -> bytes:
        """Read an object. Raises `casckpt.errors.NotFound`, and `Refused` if it is larger than ``limit`` bytes."""

    def open(self, key: str, *, shared: bool = False) -> AbstractContextManager[Reader]:
        """Open for ranged reads. Raises `casckpt.errors.NotFound`; remote storage may raise it on first read.

        ``shared``: other processes on this host will soon read the same bytes, so they are worth caching.
        """

    def size(self, key: str) -> int | None:
        """Return the size in bytes, or None if the object does not exist."""

    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        """List all objects whose key starts with ``prefix`` ("commits/", with its slash; "" for all).

        A folder is listed before its subfolders, or all keys are in order. Otherwise, the order is arbitrary.

        Objects that are put or deleted during the listing may or may not be included; all others are. Leftovers of
        crashed puts are never included. Raises `casckpt.errors.Refused`, with the name, for anything that is not an
        object: a pipe, a symlink, a folder whose key ``known`` accepts as an object key, or a file in place of a
        folder. If the listing skipped such a thing, the object would appear to be missing.
        """

    def list_folder(self, folder: str) -> FolderListing:
        """List the objects and the subfolders ("objects/x") directly in ``folder`` ("objects", no trailing slash).

        The order is arbitrary. As with `list`, objects put or deleted during the listing may or may not be included. A
        listed subfolder may be empty.
        """

    def delete(self, key: str) -> None:
        """Remove the object. Does nothing if it does not exist."""

    def replace(self, key: str, data: memoryview | bytes) -> None:
        """Put an object, replacing an existing one. Only `repair` uses this, with bytes whose hash is in the key."""

    def sweep(self, folder: str, *, below: bool = False) -> int:
        """Remove leftovers of crashed puts from ``folder``, and the folder itself if empty. Returns the bytes freed.

        A put in progress in that folder has to start over, so call this only for folders with few new puts. ``below``:
        also sweep all subfolders, but keep a folder at the top of the store, because the next user's umask would decide
        who may write to a new one. The storage's root folder ("") is removed only if this instance created it.
        """

    def bytes_free(self) -> int | None:
        """Return how many bytes are free, or None if this is unknown, as in a bucket. A user's quota may allow less."""
        return None


class AlreadyExists(Exception):
    """The key of a create-only put already exists. Callers must catch this."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class ShortObject(Exception):
    """A ranged read went past the end of a truncated object. Callers must catch this."""

    def __init__(self, key: str, size: int) -> None:
        super().__init__(key, size)
        self.key = key
        self.size = size


def split_folder(folder: str) -> list[str]:
    """Return the parts of a folder's path ("" is the store itself). Raises `Refused` for an invalid name."""
    parts = folder.split("/") if folder else []
    if any(not part or part.startswith(".") or "\0" in part for part in parts):
        raise Refused(f"{folder[:300]!r} is not a store key: keys consist of names without a leading dot")
    return parts


def split_key(key: str) -> tuple[str, str]:
    """Split a key into (folder, name). Raises `Refused` for an invalid key."""
    parts = split_folder(key)
    if not parts:
        raise Refused("a store key cannot be an empty string")
    return "/".join(parts[:-1]), parts[-1]
