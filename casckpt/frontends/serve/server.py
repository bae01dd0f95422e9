"""The server, with its limits on the number of connections and on the time that it waits for requests and clients."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from typing import Final

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS: Final = 512
REQUEST_SECONDS: Final = 10.0
"""The time limit for a complete request, counted from the connection or from the first byte of the request."""
STUCK_SECONDS: Final = 30.0
"""A client that receives nothing for this long is disconnected. This may take twice as long."""
_BACKLOG = 512
_KEEP_ALIVE_SECONDS = 30
_LAST_SECONDS = 3


class Connection(H11Protocol):
    """A connection. It is closed if a request takes too long to arrive, or if nothing can be sent for too long.

    A server with too many connections closes new ones. It leaves being fair to many clients to a reverse proxy.
    """

    _timer: asyncio.TimerHandle | None = None
    _is_stuck = False

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._wait()
        self._watching = self.loop.call_later(STUCK_SECONDS, self._watch)
        if len(self.connections) > _most_connections():
            self.transport.abort()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if getattr(self.cycle, "response_complete", True):  # the cycle is None before the first request
            self._wait()
        else:
            self._wait_no_longer()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_stuck = False

    def _watch(self) -> None:
        """Close the connection if it has been unable to send or to close since the last check."""
        if self._is_stuck:
            self.transport.abort()
            return
        self._is_stuck = self.flow.write_paused or self.transport.is_closing()
        self._watching = self.loop.call_later(STUCK_SECONDS, self._watch)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_longer()
        self._watching.cancel()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _wait_no_longer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _most_connections() -> int:
    """Return the maximum number of connections, which leaves most file descriptors to the store."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_CONNECTIONS, max(files // 4, 16))


def listen(host: str, port: int) -> socket.socket:
    """Open a socket for the server. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def endpoint_of(host: str, listening: socket.socket) -> str:
    """Return the URL of the server."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}"


def server_of(app: ASGIApp) -> uvicorn.Server:
    """Return the server for an application.

    ``run(sockets=[...])`` serves until the process receives a termination signal.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # casckpt logs errors itself
    config = uvicorn.Config(
        app, http=Connection, ws="none", loop="asyncio", log_config=None, access_log=False, server_header=False,
        backlog=_BACKLOG, timeout_keep_alive=_KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=_LAST_SECONDS,
        proxy_headers=False, lifespan="on",
    )  # fmt: skip
    return uvicorn.Server(config)
