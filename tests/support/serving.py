"""A store served as a hub: in a thread of this process, or by the command in a separate process."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urljoin

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from casckpt.frontends.serve.app import app_of
from casckpt.frontends.serve.hub import Hub
from casckpt.frontends.serve.server import endpoint_of, listen, server_of
from casckpt.store.store import Store
from tests.support.afresh import afresh
from tests.support.scripts import OUT, play


@dataclass
class Served:
    """A served store. ``sent``: the numbers of file bytes sent, with method, path and status, in order."""

    endpoint: str
    sent: list[tuple[str, str, int, int]] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def get(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> HTTPResponse:
        """Make a request on a new connection, follow redirects, and read the body."""
        answer = self.ask(path, method, body, **headers)
        if answer.status == 307:
            return self.get(urljoin(path, answer.headers["Location"]), method, None, **headers)
        return answer

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> HTTPResponse:
        """Make a single request without following redirects."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            answer.body = answer.read()  # type: ignore[attr-defined]
            return answer

    def body(self, path: str, **headers: str) -> bytes:
        answer = self.get(path, "GET", None, **headers)
        assert answer.status in (200, 206), answer.status
        found: bytes = answer.body  # type: ignore[attr-defined]
        return found

    def json(self, path: str) -> Any:
        return json.loads(self.body(path))

    def weights_sent(self) -> list[str]:
        """Return the paths of weight files from which bytes were sent."""
        return [
            path
            for method, path, _, nbytes in self.sent
            if method == "GET" and nbytes and path.endswith(".safetensors")
        ]


@contextmanager
def serving(store: Store, *, guard: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Served]:
    """Serve while the block runs. ``guard``: options of `app_of`. ``options``: of `Hub`."""
    listening = listen("127.0.0.1", 0)
    served = Served(endpoint_of("127.0.0.1", listening))
    app = app_of(Hub(store, **options), **{"tokens": None, **(guard or {})})
    server = server_of(_counted(app, served))
    thread = Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield served
    finally:
        server.should_exit = True
        thread.join()


def _counted(app: ASGIApp, served: Served) -> ASGIApp:
    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        seen = [0, 0]
        is_noted = False

        def note() -> None:
            nonlocal is_noted
            if scope["type"] == "http" and not is_noted:
                served.sent.append((scope["method"], scope["path"], seen[0], seen[1]))
                is_noted = True

        async def sending(message: Message) -> None:
            seen[0] = message.get("status", seen[0])
            seen[1] += len(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                note()  # before the client receives the end and the test continues
            await send(message)

        await app(scope, receive, sending)
        note()

    return counted


@contextmanager
def serving_process(store: str, *options: str) -> Iterator[tuple[Served, BaseProcess]]:
    """Serve by running the command in a separate process."""
    command = ["serve", store, "--port", "0", "--json", *options]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "serve")
        os.mkfifo(output.with_suffix(OUT))
        process = afresh().Process(target=play, args=("casckpt", command, Path.cwd(), {}, output))
        process.start()
        try:
            with output.with_suffix(OUT).open() as printed:
                yield Served(json.loads(printed.readline())["endpoint"]), process
        finally:
            process.kill()
            process.join()
