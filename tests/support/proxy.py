"""A proxy in front of an S3 server that fails as networks do: it loses, truncates, denies and delays responses.

::

with Proxy(server.endpoint) as proxy: proxy.plan(Trouble.LOST, method="PUT", path="commits/*", times=2) # the next two
such puts proxy.chaos(seed=1, share=0.2) # or one of five requests, at random
proxy.allow(lambda request: request.signer == "new", "ExpiredToken") # the keys were rotated
proxy.abandon() # the idle connections are dead, but nobody knows open_storage("s3://...", server.options |
{"endpoint_url": proxy.endpoint})

``proxy.seen`` lists the requests in order. With a certificate (`tests.support.certificates`), the proxy uses https.
With `tests.support.quirks`, it behaves like a server that differs from S3.
"""

from __future__ import annotations

import enum
import http.client
import random
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from tests.support.quirks import Answer, Quirk, Request
from tests.support.tally import tally

_BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_BROKEN = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>We are sorry.</Message></Error>"
_REFUSED = "<?xml version='1.0'?><Error><Code>{}</Code><Message>No.</Message></Error>"
_STATUS = {"SlowDown": 503, "Unauthorized": 401}  # of refusals; 403 for all others
_SIGNER = re.compile(r"Credential=([^/]*)/")
_LATE = 0.05  # seconds
_RESET = struct.pack("ii", 1, 0)  # closing the socket then sends a reset


class Trouble(enum.Enum):
    LOST = "done, but the connection ends without an answer"
    BROKEN = "done, but the answer is 500"
    BUSY = "not done: 503"
    HALF = "the connection is reset while the request is sent: not done"
    CUT = "done, and reset in the middle of the answer"
    LATE = "done a little later"


@dataclass(frozen=True)
class Seen:
    """A request.

    ``path``: the decoded path without the query. ``size``: the size of the body as sent. ``condition``: its
    If-None-Match header. ``signer``: the access key that signed it.
    """

    method: str
    path: str
    query: str
    range: str | None
    size: int
    payload: str | None
    condition: str | None = None
    signer: str | None = None


@dataclass
class _Planned:
    trouble: Trouble
    method: str
    path: str
    times: int


class Proxy:
    """Listens on a free port. ``endpoint`` is its URL."""

    def __init__(self, upstream: str, certificate: Path | None = None, quirks: Sequence[Quirk] = ()) -> None:
        self.seen: list[Seen] = []
        self.quirks = quirks
        self.connections = 0
        self._planned: list[_Planned] = []
        self._random: random.Random | None = None
        self._share = 0.0
        self._refused: tuple[str, frozenset[str], int] | None = None
        self._allowed: Callable[[Seen], bool] = lambda _: True
        self._code = "AccessDenied"
        self._slow: tuple[str, float] | None = None
        self.abandoned = 0
        self._actions: dict[int, Callable[[], None]] = {}
        self._muted: tuple[str, int] | None = None
        self._heard = threading.Event()
        self._lock = threading.Lock()
        self._scheme = "http" if certificate is None else "https"
        self._server = _Server(self, upstream, certificate)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.calm()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def plan(self, trouble: Trouble, *, method: str = "*", path: str = "*", times: int = 1) -> None:
        """Apply a trouble to the next ``times`` requests of this kind. ``path``: the end of their path."""
        with self._lock:
            self._planned.append(_Planned(trouble, method, path, times))

    def chaos(self, seed: int, share: float) -> None:
        """From now on, apply random troubles to this fraction of all requests."""
        with self._lock:
            self._random, self._share = random.Random(seed), share

    def refuse(self, code: str, *methods: str, after: int = 0) -> None:
        """Skip some requests, then answer all requests of these methods (none means all) with this error code."""
        with self._lock:
            self._refused = (code, frozenset(methods), len(self.seen) + after)

    def allow(self, allowed: Callable[[Seen], bool], code: str = "AccessDenied") -> None:
        """From now on, answer every request that is not ``allowed`` with this error code, even after `calm`."""
        self._allowed, self._code = allowed, code

    def slow(self, path: str, seconds: float) -> None:
        """From now on, wait before forwarding each request for this path."""
        with self._lock:
            self._slow = (path, seconds)

    def abandon(self) -> None:
        """Never again answer or close the connections that are open now, as if their server had lost its power.

        New connections work.
        """
        with self._lock:
            self.abandoned = self.connections

    def at(self, number: int, action: Callable[[], None]) -> None:
        """Call a function before the request with this number is forwarded (0: the first one from now on)."""
        with self._lock:
            self._actions[len(self.seen) + number] = action

    def mute(self, path: str = "*", after: int = 0) -> None:
        """Skip some requests. Then neither forward nor answer requests for this path until `calm` is called."""
        with self._lock:
            self._muted = (path, len(self.seen) + after)

    def calm(self) -> None:
        """Stop all troubles. Forward the requests that have been waiting since `mute` was called."""
        self._heard.set()
        with self._lock:
            self._heard = threading.Event()
            self._muted = None
            self._planned.clear()
            self._actions.clear()
            self._refused = self._slow = None
            self._share = 0.0

    def count(self, method: str, path: str = "*") -> int:
        """Count the matching requests."""
        return sum(_fits(one, method, path) for one in self.seen)

    def refusal_of(self, request: Seen) -> str | None:
        """Return the error code to answer the most recent request with."""
        if not self._allowed(request):
            return self._code
        with self._lock:
            if self._refused is None:
                return None
            code, methods, first = self._refused
            return code if len(self.seen) > first and (not methods or request.method in methods) else None

    def delay_of(self, request: Seen) -> float:
        """Return the seconds to wait before a request is forwarded."""
        with self._lock:
            return self._slow[1] if self._slow is not None and _fits(request, "*", self._slow[0]) else 0.0

    def trouble_of(self, request: Seen) -> Trouble | None:
        """Record a request. Return its trouble."""
        with self._lock:
            action = self._actions.pop(len(self.seen), None)
            self.seen.append(request)
            path, first = self._muted or ("*", len(self.seen))
            heard = self._heard if len(self.seen) > first and _fits(request, "*", path) else None
        if heard is not None:
            heard.wait()
        if action is not None:
            action()
        with self._lock:
            for planned in self._planned:
                if planned.times and _fits(request, planned.method, planned.path):
                    planned.times -= 1
                    return planned.trouble
            if self._random is not None and self._random.random() < self._share:
                return self._random.choice(list(Trouble))
        return None


def _fits(request: Seen, method: str, path: str) -> bool:
    return fnmatchcase(request.method, method) and fnmatchcase(request.path, f"*{path}")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, proxy: Proxy, upstream: str, certificate: Path | None) -> None:
        self.proxy = proxy
        self.upstream = urlsplit(upstream)
        super().__init__(("127.0.0.1", 0), _Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            # the handshake runs in the handler's thread, because a slow client would otherwise delay the others
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def get_request(self) -> tuple[Any, Any]:
        self.proxy.connections += 1
        return super().get_request()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: clients may disconnect."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.number = self.server.proxy.connections

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        if self.number <= self.server.proxy.abandoned:
            tally("network: sent on an abandoned connection")
            while self.rfile.read1(1 << 16):  # until the client gives up
                pass
            self.close_connection = True
            return
        split = urlsplit(self.path)
        size = int(self.headers.get("Content-Length") or self.headers.get("X-Amz-Decoded-Content-Length") or 0)
        payload = self.headers.get("X-Amz-Content-SHA256")
        path, only_if = unquote(split.path), self.headers.get("If-None-Match")
        signer = _SIGNER.search(self.headers.get("Authorization") or "")
        request = Seen(
            self.command, path, split.query, self.headers.get("Range"), size, payload, only_if, signer and signer[1]
        )
        trouble = self.server.proxy.trouble_of(request)
        if trouble is not None:
            tally(f"network: {trouble.value}")
        if trouble is Trouble.HALF:
            self.rfile.read(size // 2)
            self._reset()
            return
        body = self._chunks() if self._is_chunked else self.rfile.read(size)
        if trouble is Trouble.BUSY:
            self._answer(503, "Slow Down", [("Content-Type", "application/xml")], _BUSY)
            return
        code = self.server.proxy.refusal_of(request)
        if code is not None:
            status = _STATUS.get(code, 403)
            tally("network: not done: 503" if status == 503 else "network: refused, 403")
            self._answer(status, "Refused", [("Content-Type", "application/xml")], _REFUSED.format(code).encode())
            return
        time.sleep(self.server.proxy.delay_of(request) + _LATE * (trouble is Trouble.LATE))
        self._pass_on(body, trouble)

    @property
    def _is_chunked(self) -> bool:
        return self.headers.get("Transfer-Encoding", "").lower() == "chunked"

    def _chunks(self) -> bytes:
        """Yield a body of unknown length. S3's own chunks inside it are not decoded."""
        body = bytearray()
        while length := int(self.rfile.readline(), 16):
            body += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        return bytes(body)

    def _pass_on(self, body: bytes, trouble: Trouble | None) -> None:
        try:
            answer = self._ask(Request(self.command, self.path, self.headers, body))
        except OSError:
            self._reset()
            return
        if trouble is Trouble.LOST:
            self.close_connection = True
        elif trouble is Trouble.BROKEN:
            self._answer(500, "Internal Error", [("Content-Type", "application/xml")], _BROKEN)
        else:
            self._answer(answer.status, answer.reason, answer.headers, answer.data, cut=trouble is Trouble.CUT)

    def _ask(self, request: Request) -> Answer:
        """Return the answer of the server, or of a quirk."""
        for quirk in self.server.proxy.quirks:
            if (answer := quirk.ask(request)) is not None:
                return answer
        answer = self._forward(request)
        for quirk in self.server.proxy.quirks:
            answer = quirk.tell(request, answer)
        return answer

    def _forward(self, request: Request) -> Answer:
        upstream = http.client.HTTPConnection(self.server.upstream.hostname or "", self.server.upstream.port)
        try:
            upstream.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() not in ("connection", "expect"):
                    upstream.putheader(name, value)
            upstream.endheaders(request.body or None, encode_chunked=self._is_chunked)
            answer = upstream.getresponse()
            return Answer(answer.status, answer.reason, answer.getheaders(), answer.read())
        finally:
            upstream.close()

    def _answer(
        self, status: int, reason: str, headers: list[tuple[str, str]], data: bytes, *, cut: bool = False
    ) -> None:
        lines = [f"HTTP/1.1 {status} {reason}"]
        length = next((value for name, value in headers if name.lower() == "content-length"), str(len(data)))
        kept = [(n, v) for n, v in headers if n.lower() not in ("connection", "content-length", "transfer-encoding")]
        lines += [f"{name}: {value}" for name, value in [*kept, ("Content-Length", length)]]
        head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
        data = b"" if self.command == "HEAD" else data
        if cut:
            whole = head + data
            self.wfile.write(whole[: len(head) + len(data) // 2 if data else len(head) // 2])
            self.wfile.flush()
            self._reset()
        else:
            self.wfile.write(head + data)
            self.wfile.flush()

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
