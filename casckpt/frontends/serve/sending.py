"""Sends ranges of files under leases. It reads ahead in memory that is bounded across all clients."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Final, NamedTuple, TypeVar

from starlette.types import Receive, Scope, Send

from casckpt.base.parallel import usable_threads
from casckpt.base.units import format_size
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, Damaged, Gone, NotFound
from casckpt.format.extents import ExtentTable
from casckpt.frontends.serve.answers import refusal_of
from casckpt.frontends.serve.folders import File, FileSpan, ServedFolder, ServedFolders
from casckpt.loading.entry_reader import EntryReader
from casckpt.loading.regions import EntrySlice, plan_windows, requests, views
from casckpt.repository.repository import Repository
from casckpt.storage.buffers import BufferPool
from casckpt.store.store import Store

_EXPIRES = "10m"
_MOST_IDLE = 32
"""The maximum number of idle leases, which is limited because each lease has threads."""
LINGER_SECONDS = 30.0
"""How long a lease remains after a file was sent, in case the client requests another file."""


@dataclass
class _CheckpointLease:
    """The lease of one checkpoint. ``lease``: closing it ends the lease; None until the lease is acquired."""

    users: int = 0
    lease: ExitStack | None = None
    timer: threading.Timer | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        """End the lease and stop its timer."""
        if self.timer is not None:
            self.timer.cancel()
        if self.lease is not None:
            self.lease.close()


class Leases:
    """The leases of a server: one for each checkpoint that is being sent, which ends some time after its last file.

    If the store is not writable, the server logs a warning and serves without leases.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[str, _CheckpointLease] = {}
        self._lock = threading.Lock()
        self._has_warned = self._is_closed = False

    @contextmanager
    def hold(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Hold a lease during a block and for a while after it.

        This never raises an error, but reading a purged checkpoint does.
        """
        held = self._enter(checkpoint.id)
        try:
            with held.lock:
                if held.lease is None:
                    held.lease = self._taken(checkpoint)
                    if self._is_closed:  # closed in the meantime
                        held.lease.close()
            yield
        finally:
            self._leave(checkpoint.id, held)

    def _enter(self, id: str) -> _CheckpointLease:
        with self._lock:
            held = self._held.setdefault(id, _CheckpointLease())
            held.users += 1
            if held.timer is not None:
                held.timer.cancel()
                held.timer = None
            return held

    def _taken(self, checkpoint: Checkpoint) -> ExitStack:
        with ExitStack() as taken:
            try:
                taken.enter_context(self._store.lease(checkpoint, expires=_EXPIRES))
            except NotFound as error:
                log.info("%s is sent without a lease: %s", checkpoint, error)
            except CasckptError as error:
                level = logging.DEBUG if self._has_warned else logging.WARNING
                log.log(level, "cannot acquire a lease, so a gc may delete data that is being sent: %s", error)
                self._has_warned = True
            return taken.pop_all()

    def _leave(self, id: str, held: _CheckpointLease) -> None:
        with self._lock:
            held.users -= 1
            if not held.users and self._held.get(id) is held:
                held.timer = threading.Timer(LINGER_SECONDS, self._end, (id, held))
                held.timer.daemon = True
                held.timer.start()
                self._held[id] = self._held.pop(id)
            idle = [item for item in self._held.items() if not item[1].users]
        for item in idle[:-_MOST_IDLE]:
            self._end(*item)

    def _end(self, id: str, held: _CheckpointLease) -> None:
        with self._lock:
            if held.users or self._held.get(id) is not held:
                return
            del self._held[id]
        held.end()

    def close(self) -> None:
        """End all leases."""
        with self._lock:
            self._is_closed = True
            every, self._held = self._held, {}
        for held in every.values():
            held.end()


WINDOW_BYTES: Final = 3 << 20
FIRST_BYTES: Final = 1 << 20
"""The size of a range's first window. It is smaller than the others so that it can be sent sooner."""


class Window(NamedTuple):
    """Bytes [start, stop) of a file: the bytes of ``sources`` without the first ``skip`` bytes."""

    start: int
    stop: int
    sources: list[EntrySlice]
    skip: int


class RangeReader:
    """Reads one range of a file. ``head``: the bytes that are already in memory. Only `read` is thread-safe."""

    def __init__(self, repo: Repository, folder: ServedFolder, file: File, span: FileSpan) -> None:
        self.head, sources, skip = file.wanted(span)
        self._folder = folder
        self._tables: dict[int, ExtentTable] = {}
        # one thread is enough: other threads serve other clients, and a window takes only one or two network requests
        self._reader = EntryReader(repo, folder.manifest, verify=True, threads=1, shared=True)
        self._windows = self._plan(span, sources, skip)

    def next(self) -> Window | None:
        """Return the next window in order; None at the end."""
        return next(self._windows, None)

    def _plan(self, span: FileSpan, wanted: list[EntrySlice], skip: int) -> Iterator[Window]:
        start = span.start + len(self.head)
        cell_bytes = self._folder.manifest.body.cell_bytes
        for sources in plan_windows(wanted, WINDOW_BYTES, cell_bytes, FIRST_BYTES):
            stop = min(start + sum(source.nbytes for source in sources) - skip, span.stop)
            yield Window(start, stop, sources, skip)
            start, skip = stop, 0

    def read(self, window: Window, buffer: memoryview) -> memoryview:
        """Read a window into ``buffer``, and return a view of its bytes. Raises Damaged, Gone and StorageError."""
        self._reader.fill(requests(views(window.sources, buffer), self._extents(window.sources)))
        return buffer[window.skip : window.skip + window.stop - window.start]

    def _extents(self, sources: list[EntrySlice]) -> dict[int, ExtentTable]:
        """Return the extents of these entries.

        They are kept for the next window, which often contains the same tensor.
        """
        manifest, held = self._folder.manifest, self._tables
        wanted = {source.entry.number for source in sources}
        manifest.ready(wanted - held.keys(), ())
        self._tables = {n: held[n] if n in held else manifest.extents(manifest.entries[n]) for n in wanted}
        return self._tables


WINDOWS: Final = 8
"""The maximum number of windows in memory, across all clients."""
_AHEAD = 3  # windows to read ahead over a network
_CHUNK_BYTES = 256 << 10
REMEMBERED_SECONDS: Final = 5.0
"""How long an error is remembered.

A client that requests the rest of the file then gets an error status immediately.
"""
_ASIDE = 4  # threads for quick calls

log = logging.getLogger("casckpt.frontends.serve")
T = TypeVar("T")


class Desk:
    """The threads, memory and leases that all responses share."""

    def __init__(self, store: Store, folders: ServedFolders) -> None:
        self.store, self.folders = store, folders
        self.leases = Leases(store)
        self.slots = asyncio.Semaphore(WINDOWS)
        self.buffers = BufferPool(WINDOWS, WINDOW_BYTES)
        self._wrong: dict[tuple[str, str], tuple[float, int, CasckptError]] = {}
        remote = store.repository.storage.traits.remote  # in that case, threads spend most of their time waiting
        self.ahead = _AHEAD if remote else 1
        self._readers = ThreadPoolExecutor(WINDOWS if remote else 1 + usable_threads(None), "casckpt-read")
        self._others = ThreadPoolExecutor(_ASIDE, "casckpt-serve")

    async def ask(self, call: Callable[[], T]) -> T:
        """Run a short call in a thread. The call may wait for the storage."""
        return await asyncio.get_running_loop().run_in_executor(self._others, call)

    async def read(self, call: Callable[[], T]) -> T:
        """Run a call in a thread of the pool for large reads."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, call)

    def note_wrong(self, folder: ServedFolder, file: File, at: int, error: CasckptError) -> None:
        """Remember that a read of the file failed at the byte ``at``."""
        self.folders.drop(folder)
        self._wrong = {key: wrong for key, wrong in self._wrong.items() if wrong[0] > monotonic()}
        self._wrong[folder.checkpoint.id, file.name] = monotonic() + REMEMBERED_SECONDS, at, error

    def check(self, folder: ServedFolder, file: File, span: FileSpan) -> None:
        """Raise the remembered error if it concerns a byte of this range."""
        until, at, error = self._wrong.get((folder.checkpoint.id, file.name), (0.0, 0, None))
        if error is not None and until > monotonic() and span.start <= at < span.stop:
            raise error

    def close(self) -> None:
        """End all leases and threads."""
        self.leases.close()
        for pool in (self._readers, self._others):
            pool.shutdown(wait=False, cancel_futures=True)


class _Held(NamedTuple):
    """A window in memory. ``taken``: closing it frees the memory."""

    data: memoryview
    taken: ExitStack


class RangeResponse:
    """A response with the bytes ``span`` of a file.

    If the first window cannot be read, the response is an error status.
    """

    def __init__(
        self, desk: Desk, folder: ServedFolder, file: File, span: FileSpan, headers: Mapping[str, str]
    ) -> None:
        self._desk, self._folder, self._file, self._span, self._headers = desk, folder, file, span, headers
        self._begun = False
        self._window: Window | None = None  # the next window whose read has not started
        self._sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        began, desk, held = monotonic(), self._desk, ExitStack()
        gone = asyncio.ensure_future(_gone(receive))
        lease = asyncio.ensure_future(desk.ask(lambda: held.enter_context(desk.leases.hold(self._folder.checkpoint))))
        try:
            await self._send_all(send, gone, lease)
            how = "sent" if self._sent == self._span.stop - self._span.start else "the client disconnected after"
            log.info("%s: %s %s in %.2f s", self._what(scope), how, format_size(self._sent), monotonic() - began)
        except CasckptError as error:
            if isinstance(error, Damaged | Gone):
                desk.note_wrong(self._folder, self._file, self._span.start + self._sent, error)
            if self._begun:
                log.error("%s: failed after %d bytes: %s", self._what(scope), self._sent, error)
                return
            log.error("%s: %s", self._what(scope), error)
            await refusal_of(error).response()(scope, receive, send)
        finally:
            gone.cancel()
            await asyncio.wait([lease])
            await desk.ask(held.close)

    async def _send_all(self, send: Send, gone: asyncio.Future[None], lease: asyncio.Future[None]) -> None:
        """Send the range while the lease is being acquired.

        If the checkpoint has been purged by then, the read fails.
        """
        self._desk.check(self._folder, self._file, self._span)
        reader = RangeReader(self._desk.store.repository, self._folder, self._file, self._span)
        held = await self._read(reader, reader.next())
        self._window = reader.next()
        ahead: deque[asyncio.Future[_Held | None]] = deque()
        try:
            await self._begin(send, gone, reader.head)
            await asyncio.shield(lease)
            while held is not None and not gone.done():
                self._read_ahead(reader, ahead)
                await self._send(send, gone, held.data)
                held.taken.close()
                held = None
                held = await (ahead.popleft() if ahead else self._read_next(reader))
        finally:
            for reading in ahead:
                reading.cancel()
            for each in (held, *await asyncio.gather(*ahead, return_exceptions=True)):
                if isinstance(each, _Held):
                    each.taken.close()
        if not gone.done():
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send, gone: asyncio.Future[None], head: memoryview) -> None:
        self._begun, status = True, 206 if "Content-Range" in self._headers else 200
        headers = [(name.lower().encode(), value.encode()) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send(send, gone, head)

    def _read_ahead(self, reader: RangeReader, ahead: deque[asyncio.Future[_Held | None]]) -> None:
        """Start reading the next windows as far as memory allows."""
        while self._window is not None and len(ahead) < self._desk.ahead and not self._desk.slots.locked():
            ahead.append(asyncio.ensure_future(self._read_next(reader)))

    def _read_next(self, reader: RangeReader) -> Coroutine[object, object, _Held | None]:
        window = self._window
        self._window = None if window is None else reader.next()
        return self._read(reader, window)

    async def _read(self, reader: RangeReader, window: Window | None) -> _Held | None:
        """Read a window as soon as there is memory for it. Return None at the end."""
        if window is None:
            return None
        desk = self._desk
        with ExitStack() as taken:
            await desk.slots.acquire()
            taken.callback(desk.slots.release)
            buffer = taken.enter_context(desk.buffers.borrow())  # never waits: there are as many as `desk.slots`
            reading = asyncio.ensure_future(desk.read(partial(reader.read, window, buffer.view)))
            try:
                data = await asyncio.shield(reading)
            except asyncio.CancelledError:
                await asyncio.wait([reading])  # until then, the thread writes to the buffer
                raise
            return _Held(data, taken.pop_all())

    async def _send(self, send: Send, gone: asyncio.Future[None], data: memoryview) -> None:
        for start in range(0, len(data), _CHUNK_BYTES):
            if gone.done():
                return
            chunk = bytes(data[start : start + _CHUNK_BYTES])  # copied, because the server may keep it
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._sent += len(chunk)
            await asyncio.sleep(0)  # let other responses run, and check whether the client has disconnected

    def _what(self, scope: Scope) -> str:
        host, _ = scope.get("client") or ("?", 0)
        saved = self._folder.checkpoint
        return f"{saved.run}@{saved.step}/{self._file.name} [{self._span.start}-{self._span.stop}) to {host}"


async def _gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
