"""Servers that never finish a response: silent, slow and endless servers, and servers that send only "100 Continue".

::

with hostile(Hostility.SILENT) as server: open_storage("s3://bucket/store", {"endpoint_url": server.endpoint,
"request_timeout": 0.3, ...})

``server.sent`` is the number of bytes that clients received.
"""

from __future__ import annotations

import enum
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

_DROP = 0.02  # seconds between two bytes of a slow response
_LONG = b"X-Filler: " + b"y" * 4000 + b"\r\n"
_CHUNK = b"10000\r\n" + b"<a href='x'>" * 5461 + b"abcd" + b"\r\n"


class Hostility(enum.Enum):
    """How a server behaves."""

    SILENT = "silent"
    CONTINUE = "100 Continue, then silent"
    HALF = "half of the headers, then silent"
    DRIP = "headers a byte at a time"
    DRIP_BODY = "the body a byte at a time"
    CONTINUES = "endless 100 Continue"
    HEADERS = "endless headers"
    BODY = "an endless body"


@dataclass
class Hostile:
    """A server, as a context manager. ``status``: the beginning of its responses."""

    hostility: Hostility
    status: str = "200 OK"
    sent: int = 0
    _listening: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0), backlog=128))
    _connections: list[socket.socket] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    @property
    def place(self) -> str:
        """The host and port."""
        return f"127.0.0.1:{self._listening.getsockname()[1]}"

    @property
    def endpoint(self) -> str:
        return f"http://{self.place}"

    def accept(self) -> None:
        """Accept connections until the server ends."""
        with suppress(OSError):
            while True:
                self._connections.append(self._listening.accept()[0])
                threading.Thread(target=self._answer, args=(self._connections[-1],), daemon=True).start()

    def end(self) -> None:
        """Close all connections."""
        self._over.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in self._connections:
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError):
            if not connection.recv(1 << 16):
                return
            for piece in self._pieces():
                connection.sendall(piece)
                self.sent += len(piece)
                if len(piece) == 1:
                    self._over.wait(_DROP)
                if self._over.is_set():
                    return
            self._over.wait()

    def _pieces(self) -> Iterator[bytes]:
        head = f"HTTP/1.1 {self.status}\r\nContent-Type: text/html\r\nContent-Range: bytes 0-999/1000\r\n"
        first = head.encode()
        if self.hostility is Hostility.CONTINUE:
            yield b"HTTP/1.1 100 Continue\r\n\r\n"
        elif self.hostility is Hostility.HALF:
            yield first[:-5]
        elif self.hostility is Hostility.DRIP:
            yield from _forever(first + b"X: ", b"y")
        elif self.hostility is Hostility.DRIP_BODY:
            yield from _forever(first + b"Content-Length: 1000\r\n\r\n", b"y")
        elif self.hostility is Hostility.CONTINUES:
            yield from _forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
        elif self.hostility is Hostility.HEADERS:
            yield from _forever(first, _LONG)
        elif self.hostility is Hostility.BODY:
            yield from _forever(first + b"Transfer-Encoding: chunked\r\n\r\n", _CHUNK)


def _forever(first: bytes, then: bytes) -> Iterator[bytes]:
    yield first
    while True:
        yield then


@contextmanager
def hostile(hostility: Hostility, status: str = "200 OK") -> Iterator[Hostile]:
    server = Hostile(hostility, status)
    threading.Thread(target=server.accept, daemon=True).start()
    try:
        yield server
    finally:
        server.end()
