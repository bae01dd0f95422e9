"""Reads of files that are made while they are sent: window by window, each cell verified before any of it is given."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from casckpt.format.extents import ExtentTable
from casckpt.frontends.serve.folders import File, Folder
from casckpt.frontends.serve.ranges import Span, Wanted
from casckpt.frontends.views.recut import Source
from casckpt.frontends.views.windows import plan_windows, requests
from casckpt.loading.entry_reader import Download
from casckpt.repository.repository import Repository
from casckpt.storage.buffers import AlignedBuffer

WINDOW_BYTES: Final = 3 << 20
FIRST_BYTES: Final = 1 << 20
"""Of the first window of a range: its bytes are on their way sooner."""


class Buffers:
    """Buffers for a window each, used again and again; the one that came back last goes first, and is warm.

    Whoever takes one counts them.
    """

    def __init__(self) -> None:
        self._free: list[AlignedBuffer] = []
        self._lock = threading.Lock()

    @contextmanager
    def lent(self) -> Iterator[memoryview]:
        """Inside, one of them is in use, a new one if there is none."""
        with self._lock:
            buffer = self._free.pop() if self._free else AlignedBuffer(WINDOW_BYTES)
        try:
            yield buffer.view
        finally:
            with self._lock:
                self._free.append(buffer)


class Window(NamedTuple):
    """Bytes [start, stop) of a file: those of ``sources`` but for the first ``skip``."""

    start: int
    stop: int
    sources: list[Source]
    skip: int


class RangeReader:
    """Reads one range of a file. ``head``: what needs no read. `next` is for one thread, `read` for any."""

    def __init__(self, repo: Repository, folder: Folder, file: File, span: Span) -> None:
        wanted = file.map.wanted(span)
        self.head = wanted.head
        self._folder = folder
        self._tables: dict[int, ExtentTable] = {}
        # one thread: others read for other clients, and over a network a window is one or two requests
        self._download = Download(repo, folder.manifest, verify=True, threads=1, shared=True)
        self._windows = self._plan(span, wanted)

    def next(self) -> Window | None:
        """The next window, in order; None at the end."""
        return next(self._windows, None)

    def _plan(self, span: Span, wanted: Wanted) -> Iterator[Window]:
        start, skip = span.start + len(wanted.head), wanted.skip
        cell_bytes = self._folder.manifest.body.cell_bytes
        for sources in plan_windows(wanted.sources, WINDOW_BYTES, cell_bytes, FIRST_BYTES):
            stop = min(start + sum(one.nbytes for one in sources) - skip, span.stop)
            yield Window(start, stop, sources, skip)
            start, skip = stop, 0

    def read(self, window: Window, buffer: memoryview) -> memoryview:
        """The bytes of a window, in ``buffer`` until that is used again.

        Raises Damaged, Gone, StorageError; then nothing of the window is given.
        """
        self._download.run(requests(window.sources, buffer, self._learn(window.sources)))
        return buffer[window.skip : window.skip + window.stop - window.start]

    def _learn(self, sources: list[Source]) -> dict[int, ExtentTable]:
        """The extents of what is read; those of a large tensor are asked for again and again."""
        manifest, held = self._folder.manifest, self._tables
        wanted = {one.entry.number for one in sources}
        manifest.ready(wanted - held.keys(), ())
        found = {n: held[n] if n in held else manifest.extents(manifest.entries[n]) for n in wanted}
        self._tables = found
        return found
