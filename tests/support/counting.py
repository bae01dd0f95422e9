"""Counts the calls and bytes of one storage, for tests and benchmarks of costs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

METHODS = ("put", "settle", "get", "open", "size", "list", "list_folder", "delete", "replace", "sweep")
_LOCK = threading.Lock()


@dataclass(slots=True)
class IoCounts:
    """The counters of one storage instance.

    ``puts``: objects created or replaced. ``bytes_written``: object bytes that were written; in a folder, also those of
    objects whose creation then failed. ``fsyncs``: fsync calls on files and folders. ``reads``: calls to ``get`` and
    ``read_into``. ``bytes_read``: bytes that these calls returned. ``requests``: calls to the storage's methods and to
    ``read_into``.
    """

    puts: int = 0
    bytes_written: int = 0
    fsyncs: int = 0
    reads: int = 0
    bytes_read: int = 0
    requests: int = 0

    def add(self, **more: int) -> None:
        """Add to the named counters. Thread-safe."""
        with _LOCK:
            for name, number in more.items():
                setattr(self, name, getattr(self, name) + number)


def count_io(storage: Any) -> IoCounts:
    """Return the counters of this instance, which begin with the first call. Unpickled copies are not counted."""
    if "io_counts" in vars(storage):
        return cast("IoCounts", storage.io_counts)
    counts, is_folder = IoCounts(), hasattr(storage, "_folders")
    storage.io_counts = counts
    for name in METHODS:
        _before(storage, name, lambda *_, **__: counts.add(requests=1))

    def wrote(_: None, key: str, data: bytes | memoryview, **__: bool) -> None:
        counts.add(puts=1, bytes_written=0 if is_folder else memoryview(data).nbytes)

    for name in ("put", "replace"):
        _after(storage, name, wrote)
    _before(storage, "get", lambda *_, **__: counts.add(reads=1))
    _after(storage, "get", lambda data, *_, **__: counts.add(bytes_read=len(data)))
    _after(storage, "open", lambda reader, *_, **__: _count_reads(reader, counts))
    if is_folder:
        _before(storage._folders, "_sync", lambda _: counts.add(fsyncs=1))
        _before(storage._files, "_fill", lambda _, data: counts.add(fsyncs=1, bytes_written=data.nbytes))
    return counts


def _count_reads(reader: Any, counts: IoCounts) -> None:
    """Count the reads of an open object. In a folder, ``fill`` makes all of them."""
    name = "fill" if hasattr(reader, "fill") else "read_into"

    def add(offset: int, buffers: Any, *_: Any) -> None:
        counts.add(requests=1, reads=1, bytes_read=sum(buffer.nbytes for buffer in buffers))

    _before(reader, name, add)


def _before(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Call ``note`` with the arguments of each call to a method of one instance."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return call(*args, **kwargs)

    setattr(owner, name, noted)


def _after(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Call ``note`` with the result and the arguments of each call to a method of one instance that succeeds."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        found = call(*args, **kwargs)
        note(found, *args, **kwargs)
        return found

    setattr(owner, name, noted)
