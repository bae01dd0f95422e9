"""Counters of the work of a storage, which tests compare with exact numbers."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

_LOCK = threading.Lock()
if hasattr(os, "register_at_fork"):  # else a child that is forked while another thread counts would have a locked lock
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


@dataclass(slots=True)
class IoCounts:
    """Counters of one storage instance; a pickled copy of the instance starts at zero.

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
