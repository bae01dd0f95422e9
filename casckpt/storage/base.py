"""Bytes by key: what a storage must promise. Everything above stands on these promises alone.

Keys are slash-separated paths that `casckpt.format.keys` made or checked; a storage never sees another one.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

BLOCK = 4096  # bytes; buffers and blob data that are aligned to it can be read and written around the page cache
Known: TypeAlias = Callable[[str], object]
"""Something else than None for the keys of objects, as the parsers of `casckpt.format.keys` give."""
_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object of a listing: its key and its size in bytes.

    ``version``: what the storage says of the content, so that other content under the same key has another one: an
    ETag, or the time of the last change of a file; "" where it says nothing.
    """

    key: str
    size: int
    version: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Traits:
    """What the layers above may want to know about a storage, to plan well and to refuse what is not safe.

    ``remote`` is True where a request costs a round trip. ``read_gap`` is the number of unwanted bytes worth reading
    to merge two ranges; ``parallel`` the number of requests worth having in flight; ``exclusive`` tells whether the
    storage refuses a second create of a key (None: not known, to be probed). ``stale``: why its listings may lag behind
    what others wrote, and what to do about it; "" where they do not. Then nothing may be deleted on their word.
    ``uploads``: the number of puts of blobs worth having in flight, each with a buffer of its own. ``page_cache``:
    whether what is read goes through the page cache of this host, for whoever reads it next; None: where memory is
    plenty, since that costs no more than to go around it.
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
        """The number of small requests worth having in flight: 1 where none costs a round trip."""
        return min(self.parallel, _REQUESTS) if self.remote else 1


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found out about a storage. ``ok``: None where it says nothing about being safe. ``advice``: what to do.

    ``name``: a stable word for programs; ``found``: for people.
    """

    name: str
    ok: bool | None
    found: str
    advice: str = ""


@runtime_checkable
class Examinable(Protocol):
    """A storage with settings that can be looked at."""

    def examine(self) -> Iterator[Finding]:
        """Yield what they say. Writes nothing. Raises `casckpt.errors.StorageError`."""


class Reader(Protocol):
    """An object opened for ranged reads. Safe for use by several threads at once."""

    @property
    def size(self) -> int:
        """Size of the object in bytes, as the storage reports it."""

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers``, one after the other, with the consecutive bytes that start at ``offset``.

        Buffers are writable, contiguous and of format "B". Fills all or raises: `ShortObject` if the object ends
        before, `casckpt.errors.StorageError` if the storage fails. A failed read leaves the buffers undefined.
        """


@runtime_checkable
class ObjectStore(Protocol):
    """A flat map from keys to immutable bytes.

    - **Atomic**: an object is visible whole or not at all, whatever is killed at whatever instant.
    - **Create-only**: `put` never replaces. Of several concurrent puts of one key exactly one succeeds, the others
      raise `AlreadyExists`. (`replace` is for repair alone.)
    - **Durable**: when `put` returns, the bytes survive a power failure. With ``settle=False`` their name may not,
      until `settle` has returned for its folder.
    - **Read after write, list after write**: what was put by anyone is seen by every later read and listing.
    - **Safe to repeat**: after a `StorageError` every call may be made again. A put whose answer got lost may have
      happened: the caller that must know reads the object back.
    - Thread-safe. Instances pickle, and the copy opens what it needs anew.
    """

    @property
    def url(self) -> str:
        """How to name this storage to a person: never with credentials."""

    @property
    def traits(self) -> Traits:
        """Hints for planning."""

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        """Create the object. Raises `AlreadyExists`, `casckpt.errors.StorageError`, `casckpt.errors.Unsupported`."""

    def settle(self, folder: str) -> None:
        """Make the names durable that were put into ``folder`` ("objects/x", no slash at the end) unsettled."""

    def get(self, key: str, *, limit: int) -> bytes:
        """Read an object. Raises `casckpt.errors.NotFound`, and `Refused` for one of more than ``limit`` bytes."""

    def open(self, key: str, *, shared: bool = False) -> AbstractContextManager[Reader]:
        """Open for ranged reads. Raises `casckpt.errors.NotFound` (here or at the first read, for remote ones).

        ``shared``: others on this host are about to read the same bytes, so that a cache for all of them pays.
        """

    def size(self, key: str) -> int | None:
        """Return the size in bytes, None if there is no such object."""

    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        """List all objects whose key starts with ``prefix`` ("commits/", with its slash; "" for all), in any order.

        Objects put or deleted while the listing runs may or may not be in it; all others are. What a crashed put
        left behind is never in it. What is there and is no object (a pipe, a symlink, a folder under a key that is
        ``known`` to be an object's, a file where a folder belongs) is `casckpt.errors.Refused`, by its name: passed
        by, it would look as if the object had never been.
        """

    def list_folder(self, folder: str) -> tuple[builtins.list[ListedObject], builtins.list[str]]:
        """List the objects right in ``folder`` ("objects", no slash at the end), and the folders in it ("objects/x").

        In any order. As for `list`, what is put or deleted meanwhile may or may not be there. A folder may be empty.
        """

    def delete(self, key: str) -> None:
        """Remove the object. No error if there is none."""

    def replace(self, key: str, data: memoryview | bytes) -> None:
        """Put, over whatever is there: only for `repair`, of bytes whose hash is in the key."""

    def sweep(self, folder: str, *, below: bool = False) -> int:
        """Remove what crashed puts left in ``folder``, and the folder itself if it is empty; bytes freed.

        A put that is under way there begins anew, so this is for folders into which nobody puts much any more.
        ``below``: in all folders in it, too. That of the whole storage ("") goes only if this object made it.
        """


class AlreadyExists(Exception):
    """A create-only put found the key taken. Caught by the layer above, which knows what it means."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class ShortObject(Exception):
    """A ranged read went past the end of an object: it was truncated. Caught by the layer above."""

    def __init__(self, key: str, size: int) -> None:
        super().__init__(key, size)
        self.key = key
        self.size = size
