"""Ranged S3 reads that bypass the client's event loop: bytes go from the socket directly to their destination.

The client handles all responses in one thread, and copies each one several times. Here, the client only signs a
request. The thread that needs the bytes sends the request over its own connection and receives them.
"""

from __future__ import annotations

import io
import math
import select
import socket
import ssl
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from botocore.exceptions import ClientError, ResponseStreamingError
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from casckpt.base.lazy import cached_property
from casckpt.storage.remote.patience import Patience, PatientRequest, begin_request

_HOOK = "before-send.s3.GetObject"
_REST = 10.0  # seconds: servers and proxies close connections that have been idle longer
_BUSY = frozenset({429, 500, 502, 503, 504})
_UNKNOWN_WAYS = frozenset({"client_cert", "connector_args", "http_session_cls", "proxies", "proxies_config"})
_signing: ContextVar[bool] = ContextVar("signing", default=False)


class _Ready(Exception):
    """Raised with a request that has just been signed, so that the client does not send it."""


class _Unreached(Exception):
    """The server could not be reached."""


@dataclass(frozen=True)
class Signed:
    """A signed request for a range of an object."""

    url: str
    headers: Mapping[str, str | bytes]


async def sign(client: Any, arguments: Mapping[str, Any]) -> Signed:
    """Return the request that ``client`` (from aiobotocore) would send for ``get_object(**arguments)``."""
    client.meta.events.register(_HOOK, _hand_over, unique_id="casckpt")
    _signing.set(True)  # in the task that runs this
    try:
        await client.get_object(**arguments)
    except _Ready as ready:
        return Signed(ready.args[0].url, dict(ready.args[0].headers.items()))
    raise RuntimeError("the S3 client sent a request that it should only sign")


def _hand_over(request: Any, **_: object) -> None:
    if _signing.get():
        raise _Ready(request)


def can_reach(url: str, config: Mapping[str, Any]) -> bool:
    """Return whether direct connections can reach the server.

    They cannot if ``config``, the client's configuration, has settings that only the client supports, such as proxies.
    """
    return not (_UNKNOWN_WAYS & config.keys() or get_environ_proxies(url))


class DirectReads:
    """Connections to a server. Each read has its own connection, and leaves it open for the next read.

    ``connect``: connection timeout in seconds. ``verify``: whether to verify the server's certificate, or the
    certificate file to use. ``works``: whether a read has succeeded.
    """

    def __init__(self, connect: float, patience: Patience, verify: bool | str) -> None:
        self.works = False
        self._silent = -math.inf  # when a read last timed out; connections that were idle then may be dead
        self._connect, self._patience, self._verify = connect, patience, verify
        self._waiting: deque[tuple[float, str, HTTPConnection]] = deque()
        weakref.finalize(self, _close_all, self._waiting)

    def read(self, request: Signed, buffers: Sequence[memoryview], check: Callable[[HTTPMessage], None]) -> bool:
        """Check the headers with ``check``, and fill the buffers. Returns False if the client must be used.

        The client then also explains the failure. Raises one of `casckpt.storage.remote.s3.errors.FAILURES` if a retry
        may help.
        """
        with begin_request(self._patience) as timer:
            try:
                with self._ask(request, timer) as answer:
                    if answer.status in _BUSY:
                        raise _busy(answer)
                    if answer.status != 206:
                        return False
                    check(answer.headers)
                    for buffer in buffers:
                        _fill(answer, buffer)
            except _Unreached as error:
                if not self.works:
                    return False
                raise error.args[0] from None
            except TimeoutError as error:
                self._silent = time.monotonic()
                raise TimeoutError(timer.why) from error
            except HTTPException as error:
                raise ResponseStreamingError(error=f"{type(error).__name__}: {error}") from error
        self.works = True
        return True

    @contextmanager
    def _ask(self, request: Signed, timer: PatientRequest) -> Iterator[HTTPResponse]:
        """Send the request and yield the response. The connection is kept if the whole response was read."""
        where = urlsplit(request.url)
        connection, answer = self._send(request, timer, where)
        done = False
        try:
            yield answer
            done = answer.isclosed() and not answer.will_close
        finally:
            answer.close()
            if done:
                self._waiting.append((time.monotonic(), where.netloc, connection))
            else:
                connection.close()

    def _send(self, request: Signed, timer: PatientRequest, where: SplitResult) -> tuple[HTTPConnection, HTTPResponse]:
        while (used := self._rested(where.netloc)) is not None:
            with suppress(ConnectionError, HTTPException, ssl.SSLError):  # the server has closed it in the meantime
                return used, _exchange(used, request, timer, where)
        fresh = self._open(where)
        return fresh, _exchange(fresh, request, timer, where)

    def _rested(self, place: str) -> HTTPConnection | None:
        """Return the most recently used connection that is still open."""
        usable = max(self._silent, time.monotonic() - _REST)
        with suppress(IndexError):
            while True:
                since, host, connection = self._waiting.pop()
                if host == place and since > usable and _is_silent(connection.sock):
                    return connection
                connection.close()
        return None

    def _open(self, where: SplitResult) -> HTTPConnection:
        if where.scheme == "https":
            connection: HTTPConnection = HTTPSConnection(where.netloc, timeout=self._connect, context=self._tls)
        else:
            connection = HTTPConnection(where.netloc, timeout=self._connect)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise _Unreached(error) from error
        return connection

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        if not self._verify:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return context
        return ssl.create_default_context(cafile=get_cert_path(self._verify))


def _is_silent(connection: socket.socket) -> bool:
    """Return whether there is nothing to read, neither an end of stream nor an unexpected response."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not (poll.poll(0) or (isinstance(connection, ssl.SSLSocket) and connection.pending()))


class _Answer(HTTPResponse):
    """A response, limited to the time of its request. Only body bytes count as progress."""

    def __init__(
        self, timer: PatientRequest, connection: socket.socket, debuglevel: int = 0, method: str | None = None
    ) -> None:
        super().__init__(connection, debuglevel, method)
        self._arriving = _Arriving(self.fp.detach(), connection, timer)
        self.fp = io.BufferedReader(self._arriving)

    def begin(self) -> None:
        super().begin()
        self._arriving.is_body = True


class _Arriving(io.RawIOBase):
    """The stream of bytes that a connection receives for one request."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket, timer: PatientRequest) -> None:
        self._raw, self._connection, self._timer = raw, connection, timer
        self.is_body = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        _wait_for(self._connection, self._timer)
        received: int | None = self._raw.readinto(buffer)
        if received and self.is_body:
            self._timer.moved(received)
        return received

    def close(self) -> None:
        self._raw.close()
        super().close()


def _wait_for(connection: socket.socket, timer: PatientRequest) -> None:
    """Set the connection's timeout to the remaining time. Raises TimeoutError if no time remains."""
    if (left := timer.left) <= 0:
        raise TimeoutError(timer.why)
    connection.settimeout(left)


def _exchange(connection: HTTPConnection, request: Signed, timer: PatientRequest, where: SplitResult) -> HTTPResponse:
    target = where.path + (f"?{where.query}" if where.query else "")
    connection.response_class = partial(_Answer, timer)  # type: ignore[assignment]  # any callable works
    try:
        _wait_for(connection.sock, timer)
        connection.putrequest("GET", target, skip_accept_encoding=True, skip_host="Host" in request.headers)
        for name, value in request.headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        return connection.getresponse()
    except BaseException:
        connection.close()
        raise


def _fill(answer: HTTPResponse, buffer: memoryview) -> None:
    done = 0
    while done < buffer.nbytes:
        received = answer.readinto(buffer[done:])
        if not received:
            raise ResponseStreamingError(error=f"the response ended {buffer.nbytes - done} bytes early")
        done += received


def _busy(answer: HTTPResponse) -> ClientError:
    error = {"Code": answer.reason, "Message": "to a ranged read"}
    return ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": answer.status}}, "GetObject")


def _close_all(waiting: deque[tuple[float, str, HTTPConnection]]) -> None:
    for _, _, connection in waiting:
        connection.close()
