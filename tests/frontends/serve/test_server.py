"""Idle, silent, and interrupted connections of a server."""

from __future__ import annotations

import http.client
import resource
import signal
import socket
import threading
from contextlib import ExitStack, closing, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

pytest.importorskip("uvicorn", reason="needs casckpt[serve]")
import casckpt
from casckpt.frontends.serve import server
from casckpt.frontends.serve.hub import Hub, commit_of
from casckpt.store.store import Store
from tests.support.serving import Served, serving, serving_process

WEIGHTS = "/sft/resolve/main/model.safetensors"


def weights_of(store: Store, step: int = 1) -> str:
    """Return the path of the weights."""
    return f"/sft/resolve/{commit_of(store.get(f'sft@{step}').id)}/model.safetensors"


# damage


def cut_short(served: Served, path: str, process: BaseProcess) -> tuple[bytes, str]:
    """Return the part of a file that a client received before the server was killed, and the file's ETag."""
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        found = answer.read(5 << 20)
        process.kill()
        process.join()
        with suppress(http.client.IncompleteRead, OSError):
            while piece := answer.read(1 << 16):
                found += piece
        return found, answer.headers["ETag"]


def test_a_client_resumes_after_the_server_was_killed(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.arange(4 << 20, dtype=torch.int64)}}, run="sft", step=1)
    with serving(store) as served:
        whole = served.body(WEIGHTS)
    with serving_process(store.url) as (killed, process):
        found, etag = cut_short(killed, weights_of(store), process)
    with serving_process(store.url) as (again, process):
        rest = again.get(WEIGHTS, Range=f"bytes={len(found)}-", If_Range=etag)
        assert rest.status == 206
        process.terminate()
        process.join(30)
        assert process.exitcode in (-signal.SIGTERM, 130, 143, 0, 1)
    assert len(found) < len(whole)
    assert found + rest.body == whole  # type: ignore[attr-defined]


# clients that misbehave


@pytest.mark.parametrize(("count", "more"), [(40, b""), (1, b"Connection: close\r\n")])
def test_a_client_that_never_reads_is_disconnected(
    small_store: Store, monkeypatch: pytest.MonkeyPatch, count: int, more: bytes
) -> None:
    ended, lost_of = threading.Event(), server.Connection.connection_lost

    def lost(connection: server.Connection, error: Exception | None) -> None:
        lost_of(connection, error)
        ended.set()

    monkeypatch.setattr(server, "STUCK_SECONDS", 0.3)
    monkeypatch.setattr(server.Connection, "connection_lost", lost)
    monkeypatch.setattr(Hub, "refs", lambda *_: {"x": "y" * ((40 << 20) // count)})
    with serving(small_store) as served, socket.create_connection(("127.0.0.1", served.port)) as raw:
        raw.sendall((b"GET /api/models/sft/refs HTTP/1.1\r\nHost: localhost\r\n" + more + b"\r\n") * count)
        assert ended.wait(30)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", b"\0\0\0"])
def test_an_incomplete_request_times_out(small_store: Store, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.3)
    with serving(small_store) as served, socket.create_connection(("127.0.0.1", served.port)) as raw:
        raw.sendall(sent)
        raw.settimeout(20)
        with suppress(ConnectionResetError):
            assert b"200" not in raw.recv(100)


def test_a_server_with_too_many_connections_closes_new_ones(
    small_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    with serving(small_store) as served:
        with ExitStack() as held:
            for _ in range(3):
                held.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            more = held.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=20))
            with suppress(ConnectionResetError):
                assert more.recv(1) == b""
        while True:
            with suppress(ConnectionResetError, http.client.RemoteDisconnected):
                assert served.get("/api/models").status == 200
                return


def test_connections_leave_file_descriptors_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (400, 400))
    assert server._most_connections() == 100
