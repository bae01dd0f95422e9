"""Ranged reads of S3 objects past the client's event loop: bytes go from the socket straight into place.

The client has one thread for the answers to all requests, and copies each several times. So it only signs a request
here; the thread that wants the bytes sends it over a connection of our own, and receives them.
"""

from __future__ import annotations

import io
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
_REST = 10.0  # seconds: servers, and what lies before them, forget connections that rest for longer
_BUSY = frozenset({429, 500, 502, 503, 504})
_UNKNOWN_WAYS = frozenset({"client_cert", "connector_args", "http_session_cls", "proxies", "proxies_config"})
_signing: ContextVar[bool] = ContextVar("signing", default=False)


class _Ready(Exception):
    """A request, the only argument, is signed, and must not be sent by the client."""


class _Unreached(Exception):
    """No connection could be made."""


@dataclass(frozen=True)
class Signed:
    """A request to get a range of an object."""

    url: str
    headers: Mapping[str, str | bytes]


async def sign(client: Any, arguments: Mapping[str, Any]) -> Signed:
    """Return what ``client`` (of aiobotocore) would send as ``get_object(**arguments)``."""
    client.meta.events.register(_HOOK, _hand_over, unique_id="casckpt")
    _signing.set(True)  # in the task that runs this
    try:
        await client.get_object(**arguments)
    except _Ready as ready:
        return Signed(ready.args[0].url, dict(ready.args[0].headers.items()))
    raise RuntimeError("the S3 client has sent a request that it was to sign only")


def _hand_over(request: Any, **_: object) -> None:
    if _signing.get():
        raise _Ready(request)


def can_reach(url: str, config: Mapping[str, Any]) -> bool:
    """Tell whether plain connections reach the server. ``config``: the client's, to which proxies, say, are left."""
    return not (_UNKNOWN_WAYS & config.keys() or get_environ_proxies(url))


class DirectReads:
    """Connections to a server. A thread that reads has one for itself; afterwards it waits for the next.

    ``connect``: seconds to wait for a connection. ``verify``: whether the server must prove who it is, or by which file
    of certificates. ``works``: something was read.
    """

    def __init__(self, connect: float, patience: Patience, verify: bool | str) -> None:
        self.works = False
        self._connect, self._patience, self._verify = connect, patience, verify
        self._waiting: deque[tuple[float, str, HTTPConnection]] = deque()
        weakref.finalize(self, _close_all, self._waiting)

    def read(self, request: Signed, buffers: Sequence[memoryview], check: Callable[[HTTPMessage], None]) -> bool:
        """Fill the buffers; ``check`` sees the headers first. False: the client has to ask, and to explain the answer.

        Raises the errors of `casckpt.storage.remote.s3.errors.FAILURES` for what may go better the next time.
        """
        with begin_request(self._patience) as one:
            return self._read(request, one, buffers, check)

    def _read(
        self, request: Signed, one: PatientRequest, buffers: Sequence[memoryview], check: Callable[[HTTPMessage], None]
    ) -> bool:
        try:
            with self._ask(request, one) as answer:
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
            raise TimeoutError(one.why) from error
        except HTTPException as error:
            raise ResponseStreamingError(error=f"{type(error).__name__}: {error}") from error
        self.works = True
        return True

    @contextmanager
    def _ask(self, request: Signed, one: PatientRequest) -> Iterator[HTTPResponse]:
        """Ask, and return the answer. A connection is kept if all of the answer was read."""
        where = urlsplit(request.url)
        connection, answer = self._send(request, one, where)
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

    def _send(self, request: Signed, one: PatientRequest, where: SplitResult) -> tuple[HTTPConnection, HTTPResponse]:
        while (used := self._rested(where.netloc)) is not None:
            with suppress(ConnectionError, HTTPException, ssl.SSLError):  # the server has ended it meanwhile
                return used, _exchange(used, request, one, where)
        fresh = self._open(where)
        return fresh, _exchange(fresh, request, one, where)

    def _rested(self, place: str) -> HTTPConnection | None:
        """Return the connection that rested for the shortest time, if it may still be used."""
        with suppress(IndexError):
            while True:
                since, whither, connection = self._waiting.pop()
                if whither == place and time.monotonic() - since < _REST and _is_silent(connection.sock):
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
    """Tell whether there is nothing to read: no end, and no answer that nobody asked for, to be taken for the next."""
    look = select.poll()
    look.register(connection, select.POLLIN)
    return not (look.poll(0) or (isinstance(connection, ssl.SSLSocket) and connection.pending()))


class _Answer(HTTPResponse):
    """An answer that is waited for as long as the request may take; only bytes of its body are progress."""

    def __init__(
        self, one: PatientRequest, connection: socket.socket, debuglevel: int = 0, method: str | None = None
    ) -> None:
        super().__init__(connection, debuglevel, method)
        self._arriving = _Arriving(self.fp.detach(), connection, one)
        self.fp = io.BufferedReader(self._arriving)

    def begin(self) -> None:
        super().begin()
        self._arriving.is_body = True


class _Arriving(io.RawIOBase):
    """What a connection receives, read by one request."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket, one: PatientRequest) -> None:
        self._raw, self._connection, self._one = raw, connection, one
        self.is_body = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        _wait_for(self._connection, self._one)
        received: int | None = self._raw.readinto(buffer)
        if received and self.is_body:
            self._one.moved(received)
        return received

    def close(self) -> None:
        self._raw.close()
        super().close()


def _wait_for(connection: socket.socket, one: PatientRequest) -> None:
    """Let the next call of the connection take what is left; TimeoutError if nothing is, though bytes may come."""
    if (left := one.left) <= 0:
        raise TimeoutError(one.why)
    connection.settimeout(left)


def _exchange(connection: HTTPConnection, request: Signed, one: PatientRequest, where: SplitResult) -> HTTPResponse:
    target = where.path + (f"?{where.query}" if where.query else "")
    connection.response_class = partial(_Answer, one)  # type: ignore[assignment]  # all that is wanted of it is a call
    try:
        _wait_for(connection.sock, one)
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
            raise ResponseStreamingError(error=f"the answer ended {buffer.nbytes - done} bytes early")
        done += received


def _busy(answer: HTTPResponse) -> ClientError:
    said = {"Code": answer.reason, "Message": "to a ranged read"}
    return ClientError({"Error": said, "ResponseMetadata": {"HTTPStatusCode": answer.status}}, "GetObject")


def _close_all(waiting: deque[tuple[float, str, HTTPConnection]]) -> None:
    for _, _, connection in waiting:
        connection.close()
