"""The contract of a storage: bytes by key. All other packages rely only on these promises.

Keys are slash-separated paths. `casckpt.format.keys` makes or checks every key.
"""

from __future__ import annotations

import builtins
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from casckpt.errors import Refused

BLOCK = 4096  # bytes; buffers and blob data that are aligned to it can be read and written around the page cache
Known: TypeAlias = Callable[[str], object]
"""A parser as in `casckpt.format.keys`, which returns None for a text that is not the key of an object."""
_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object of a listing: its key and its size in bytes.

    ``version``: a text that changes with the content of the key, such as an ETag or the modification time of a file. It
    is "" if the storage reports none.
    """

    key: str
    size: int
    version: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a storage, for planning and for safety checks.

    ``remote``: whether a request costs a round trip. ``read_gap``: the number of unwanted bytes worth reading to merge
    two ranges. ``parallel``: the number of requests worth having in flight. ``exclusive``: whether the storage refuses
    a second create of a key (None: unknown, to be probed). ``stale``: the reason why its listings may lag behind the
    writes of others, with advice, or "". gc must not use stale listings. ``uploads``: the number of puts of blobs worth
    having in flight, each with a buffer of its own. ``page_cache``: whether reads go through the page cache of this
    host, for later readers; None: if there is enough memory, because it costs no more.
    """

    remote: bool
    read_gap: int
    parallel: int
    exclusive: bool | None
    stale: str = ""
    uploads: int = 1
    read_only: bool = False
    page_cache: bool | None = False

    @property
    def requests(self) -> int:
        """The number of small requests worth having in flight: 1 if they cost no round trip."""
        return min(self.parallel, _REQUESTS) if self.remote else 1


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about a storage. ``ok``: whether it is safe, None if unknown. ``advice``: for the user.

    ``name``: a stable name for programs. ``found``: the fact as text.
    """

    name: str
    ok: bool | None
    found: str
    advice: str = ""


@runtime_checkable
class Examinable(Protocol):
    """A storage with settings that `casckpt doctor` can check."""

    def examine(self) -> Iterator[Finding]:
        """Yield facts about the settings. Writes nothing. Raises `casckpt.errors.StorageError`."""


class Reader(Protocol):
    """An object opened for ranged reads. Safe for use by several threads at once."""

    @property
    def size(self) -> int:
        """Size of the object in bytes, from the storage."""

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers``, one after the other, with the consecutive bytes that start at ``offset``.

        Buffers are writable, contiguous and of format "B". Fills all or raises: `ShortObject` if the object ends
        before, `casckpt.errors.StorageError` if the storage fails. A failed read leaves the buffers undefined.
        """


@runtime_checkable
class ObjectStore(Protocol):
    """A flat map from keys to immutable bytes.

    - **Atomic**: an object is visible completely or not at all, whichever process is killed at whatever time.
    - **Create-only**: `put` never replaces. Of several concurrent puts of one key exactly one succeeds, the others
      raise `AlreadyExists`. (Only repair uses `replace`.)
    - **Durable**: when `put` returns, the bytes survive a power failure. With ``settle=False`` their name may not,
      until `settle` has returned for its folder.
    - **Read after write, list after write**: every later read and listing sees all completed puts.
    - **Safe to repeat**: every call may be repeated after a `StorageError`. A put whose answer was lost may have
      succeeded: a caller that needs to know reads the object back.
    - **Thread-safe**. Instances can be pickled. The copy opens its own connections and files.
    """

    @property
    def url(self) -> str:
        """The URL of this storage for messages, without credentials."""

    @property
    def traits(self) -> Traits:
        """Hints for planning."""

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        """Create the object. Raises `AlreadyExists`, `casckpt.errors.StorageError`, `casckpt.errors.Unsupported`."""

    def settle(self, folder: str) -> None:
        """Make names durable that were put with ``settle=False`` into ``folder`` ("objects/x", no trailing slash)."""

    def get(self, key: str, *, limit: int) -> bytes:
        """Read an object. Raises `casckpt.errors.NotFound`, and `Refused` for one of more than ``limit`` bytes."""

    def open(self, key: str, *, shared: bool = False) -> AbstractContextManager[Reader]:
        """Open for ranged reads. Raises `casckpt.errors.NotFound` (here or at the first read, for remote ones).

        ``shared``: other processes of this host will read the same bytes soon, so caching them pays.
        """

    def size(self, key: str) -> int | None:
        """Return the size in bytes, or None if the object does not exist."""

    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        """List all objects whose key starts with ``prefix`` ("commits/", with its slash; "" for all), in any order.

        Objects that are put or deleted while the listing runs may or may not be in it; all others are. Leftovers of
        crashed puts are never in it. Raises `casckpt.errors.Refused` with the name of anything that is not an object: a
        pipe, a symlink, a folder whose key is ``known`` as that of an object, a file in place of a folder. If the
        listing skipped it, the object would seem to be missing.
        """

    def list_folder(self, folder: str) -> tuple[builtins.list[ListedObject], builtins.list[str]]:
        """List the objects directly in ``folder`` ("objects", no trailing slash), and its folders ("objects/x").

        In any order. As with `list`, objects put or deleted meanwhile may or may not be there. A folder may be empty.
        """

    def delete(self, key: str) -> None:
        """Remove the object. No error if it does not exist."""

    def replace(self, key: str, data: memoryview | bytes) -> None:
        """Put, and replace an existing object: only for `repair`, with bytes whose hash is in the key."""

    def sweep(self, folder: str, *, below: bool = False) -> int:
        """Remove leftovers of crashed puts from ``folder``, and the folder itself if it is empty. Returns bytes freed.

        A put that is in progress there starts again, so use it for folders with few new puts. ``below``: also in all
        folders in it. The folder of the whole storage ("") is removed only if this instance created it.
        """


class AlreadyExists(Exception):
    """A create-only put found the key taken. The caller handles it."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class ShortObject(Exception):
    """A ranged read went past the end of an object, which was truncated. The caller handles it."""

    def __init__(self, key: str, size: int) -> None:
        super().__init__(key, size)
        self.key = key
        self.size = size


_LOCK = threading.Lock()
if hasattr(os, "register_at_fork"):  # otherwise a child could inherit a lock that another thread holds
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


@dataclass(slots=True)
class IoCounts:
    """Counters of one storage instance. A pickled copy of the instance starts at zero.

    ``puts``: objects created or replaced. ``bytes_written``: bytes of objects that were written, even if the object did
    not get its name. ``fsyncs``: of files and folders. ``reads``: calls of ``get`` and ``read_into``. ``bytes_read``:
    bytes they returned. ``requests``: calls of the storage's methods and of ``read_into``.
    """

    puts: int = 0
    bytes_written: int = 0
    fsyncs: int = 0
    reads: int = 0
    bytes_read: int = 0
    requests: int = 0

    def add(self, **more: int) -> None:
        """Add to counters, by name. Safe for use by several threads."""
        with _LOCK:
            for name, number in more.items():
                setattr(self, name, getattr(self, name) + number)


def split_folder(folder: str) -> list[str]:
    """Return the parts of a folder ("" is the store itself). Raises `Refused` for an unusable name."""
    parts = folder.split("/") if folder else []
    if any(not part or part.startswith(".") or "\0" in part for part in parts):
        raise Refused(f"not a key of a store: {folder[:300]!r}; only names without a leading dot are used")
    return parts


def split_key(key: str) -> tuple[str, str]:
    """Return (folder, name) of an object. Raises `Refused` for an unusable key."""
    parts = split_folder(key)
    if not parts:
        raise Refused("the empty string is not a key of a store")
    return "/".join(parts[:-1]), parts[-1]
