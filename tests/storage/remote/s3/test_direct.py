"""Direct ranged reads return the same bytes as the S3 client, or leave the read to the client."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPMessage
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError, ResponseStreamingError

from casckpt.errors import StorageError, Unsupported
from casckpt.storage.remote.patience import Backoff, Call, Patience, PatientRequest
from casckpt.storage.remote.s3.client import S3Client, S3Object
from casckpt.storage.remote.s3.direct import DirectReads, Signed, _wait_for
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation
from tests.storage.contract import noise
from tests.support.certificates import make_certificate
from tests.support.proxy import Proxy
from tests.support.servers import Server

MIB = 1 << 20
RANGE = "Content-Range: bytes 0-9/10\r\n"


def store_of(server: Server, **options: Any) -> RemoteStore:
    """Return a new store without retries, so that each failed attempt is an error."""
    place = RemoteLocation("s3", f"{server.new_place()}/store", {**server.options, **options})
    return RemoteStore(place, backoff=Backoff(attempts=1))


def client_of(storage: RemoteStore) -> S3Client:
    client = storage._clients.get()
    assert isinstance(client, S3Client)
    return client


def read(storage: RemoteStore, key: str, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    with storage.open(key) as reader:
        reader.read_into(offset, [memoryview(buffer)[: nbytes // 3], memoryview(buffer)[nbytes // 3 :]])
    return bytes(buffer)


@pytest.fixture
def only_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise AssertionError("the client was asked")

    monkeypatch.setattr(S3Object, "_read", refuse)


@pytest.mark.usefixtures("only_direct")
@pytest.mark.parametrize("kind", ["moto", "seaweed"])
def test_ranges_are_read_without_the_client(kind: str, request: pytest.FixtureRequest) -> None:
    storage = store_of(request.getfixturevalue(f"{kind}_server"))
    data = noise(3 * MIB + 5)
    storage.put("a", data)
    assert read(storage, "a", 0, len(data)) == data
    ranges = [(7 * number, MIB + number) for number in range(40)]
    with ThreadPoolExecutor(16) as pool:
        for (offset, nbytes), found in zip(ranges, pool.map(lambda one: read(storage, "a", *one), ranges), strict=True):
            assert found == data[offset : offset + nbytes]


@pytest.mark.usefixtures("only_direct")
@pytest.mark.parametrize("known", [True, False])
def test_ranges_are_read_over_https(known: bool, moto_server: Server, tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    with Proxy(moto_server.endpoint, certificate) as proxy:
        client = {"verify": str(certificate) if known else False}
        storage = store_of(moto_server, endpoint_url=proxy.endpoint, client_kwargs=client)
        storage.put("a", b"0123456789")
        assert read(storage, "a", 2, 4) == b"2345"


def test_options_determine_how_the_server_is_verified(
    moto_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = str(make_certificate(tmp_path))

    def verify(**options: Any) -> bool | str:
        direct = client_of(store_of(moto_server, **options)).direct
        assert direct is not None
        return direct._verify

    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    assert verify() is True
    assert verify(client_kwargs={"verify": False}) is False
    assert verify(client_kwargs={"verify": certificate}) == certificate
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", certificate)
    assert verify() == certificate
    assert verify(client_kwargs=None) == certificate
    monkeypatch.setenv("AWS_CA_BUNDLE", "another.pem")
    assert verify() == "another.pem"


def test_an_unknown_certificate_is_rejected(moto_server: Server, tmp_path: Path) -> None:
    with Proxy(moto_server.endpoint, make_certificate(tmp_path)) as proxy:
        storage = store_of(moto_server, endpoint_url=proxy.endpoint)
        with pytest.raises(StorageError, match="its certificate is trusted"):
            read(storage, "a", 0, 3)
        assert proxy.seen == []


def test_requests_through_proxies_are_left_to_the_client(moto_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client_of(store_of(moto_server)).direct is not None
    through = {"http": "http://127.0.0.1:1"}
    assert client_of(store_of(moto_server, config_kwargs={"proxies": through})).direct is None
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", through["http"])
    assert client_of(store_of(moto_server)).direct is None


def test_the_client_reads_if_botocore_hides_its_verification_rule(
    moto_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casckpt.storage.remote.s3.client.EndpointCreator", lambda _: object())
    storage = store_of(moto_server)
    storage.put("a", b"0123456789")
    assert read(storage, "a", 2, 3) == b"234"
    assert client_of(storage).direct is None


def test_requests_that_work_only_through_the_client_keep_using_it(
    moto_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, calls = store_of(moto_server), []

    def fails(*_: object) -> bool:
        calls.append(1)
        return False

    storage.put("a", b"0123456789")
    monkeypatch.setattr(DirectReads, "read", fails)
    assert [read(storage, "a", 2, 3) for _ in range(3)] == [b"234"] * 3
    assert len(calls) == 1


def test_direct_reads_remain_enabled_after_the_client_had_to_help(
    moto_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = store_of(moto_server)
    storage.put("a", b"0123456789")
    assert read(storage, "a", 2, 3) == b"234"
    with monkeypatch.context() as patch:
        patch.setattr(DirectReads, "read", lambda *_: False)
        assert read(storage, "a", 3, 3) == b"345"
    direct = client_of(storage).direct
    assert direct is not None
    assert direct.works


def test_missing_credentials_time_out(moto_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def waits(*_: object, **__: object) -> None:
        await asyncio.sleep(30)

    storage = store_of(moto_server, request_timeout=3)  # a busy server needs a second for the put
    storage.put("a", b"0123456789")
    monkeypatch.setattr("casckpt.storage.remote.s3.client.sign", waits)
    with pytest.raises(StorageError, match="request_timeout"):
        read(storage, "a", 2, 3)


def test_concurrent_first_reads_of_two_versions_are_separate(moto_server: Server) -> None:
    both = threading.Barrier(2)

    class Slow(S3Object):
        @property
        def _size(self) -> int | None:
            found: int | None = self.__dict__.get("known")
            if found is None:
                with suppress(threading.BrokenBarrierError):
                    both.wait(0.2)
            return found

        @_size.setter
        def _size(self, size: int | None) -> None:
            self.__dict__["known"] = size

    def note(etag: str) -> bool:
        try:
            one._check_version(etag, 10)
        except StorageError:
            return False
        return True

    one = Slow(client_of(store_of(moto_server)), "a")
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(note, ["old", "new"])) == [False, True]


@pytest.mark.parametrize("direct", [True, False])
def test_a_response_for_the_wrong_range_is_rejected(
    direct: bool, moto_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache between client and server may respond this way if it identifies objects only by name."""
    storage = store_of(moto_server)
    storage.put("a", b"0123456789")
    client = client_of(storage)
    if not direct:
        client.direct = None
    plain = S3Object._request
    monkeypatch.setattr(S3Object, "_request", lambda self, offset, end: plain(self, offset - 1, end - 1))
    with pytest.raises(Unsupported, match="a read from byte 2 with 'bytes 1-3/10'"):
        read(storage, "a", 2, 3)


def test_response_bodies_of_aiobotocore_2_are_read(moto_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """In that version, entering a body returns the inner response, which has a different ``read``."""

    async def inside(_: object) -> object:
        return object()

    storage = store_of(moto_server)
    storage.put("a", b"0123456789")
    client_of(storage).direct = None
    monkeypatch.setattr("aiobotocore.response.AioStreamingBody.__aenter__", inside)
    assert storage.get("a", limit=10) == b"0123456789"
    assert read(storage, "a", 2, 3) == b"234"


# scripted server responses


@contextmanager
def scripted(answers: Sequence[bytes | None]) -> Iterator[tuple[Signed, list[int]]]:
    """Yield the request to send, and the list of the connections (0, 1, ...) on which requests arrived.

    An answer of None closes the connection. After the last response, the server is silent.
    """
    left, came, ends = iter(answers), [], threading.Event()
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve(connection: socket.socket, number: int) -> None:
            with connection, suppress(ConnectionError):
                while connection.recv(1 << 16):
                    came.append(number)
                    answer = next(left, b"")
                    if answer is None:
                        return
                    connection.sendall(answer)
                    if not answer:
                        ends.wait()

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connections.append(listening.accept()[0])
                    threads.append(threading.Thread(target=serve, args=(connections[-1], len(connections) - 1)))
                    threads[-1].start()

        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield Signed(f"http://127.0.0.1:{listening.getsockname()[1]}/a?b", {"X-Some": "thing"}), came
        finally:
            ends.set()
            listening.shutdown(socket.SHUT_RDWR)
            threads.pop(0).join()
            for connection, thread in zip(connections, threads, strict=True):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                thread.join()


@pytest.fixture
def direct() -> Iterator[DirectReads]:
    reads = DirectReads(5, Patience(request=0.2), verify=True)
    yield reads
    while reads._waiting:
        reads._waiting.pop()[2].close()


def ask(direct: DirectReads, request: Signed, check: Callable[[HTTPMessage], None] = lambda headers: None) -> bytes:
    buffer = bytearray(10)
    return bytes(buffer) if direct.read(request, [memoryview(buffer)], check) else b""


def answer(body: bytes, *, length: int | None = None, more: str = RANGE, status: str = "206 Partial Content") -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\n{more}Content-Length: {size}\r\n\r\n".encode() + body


TEN = b"0123456789"


def test_a_connection_is_reused_for_the_next_request(direct: DirectReads) -> None:
    with scripted([answer(TEN)] * 3) as (request, came):
        assert [ask(direct, request) for _ in range(3)] == [TEN] * 3
        assert came == [0, 0, 0]


def test_an_idle_connection_closed_by_the_server_is_replaced(direct: DirectReads) -> None:
    with scripted([answer(TEN), None, answer(TEN)]) as (request, came):
        assert [ask(direct, request) for _ in range(2)] == [TEN] * 2
        assert came == [0, 0, 1]


def test_a_connection_idle_for_too_long_is_not_used(direct: DirectReads, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted([answer(TEN)] * 2) as (request, came):
        assert ask(direct, request) == TEN
        monkeypatch.setattr("casckpt.storage.remote.s3.direct._REST", 0)
        assert ask(direct, request) == TEN
        assert came == [0, 1]


def test_a_chunked_response_body_is_read(direct: DirectReads) -> None:
    chunked = f"HTTP/1.1 206 Partial Content\r\n{RANGE}Transfer-Encoding: chunked\r\n\r\n".encode()
    with scripted([chunked + b"4\r\n0123\r\n6\r\n456789\r\n0\r\n\r\n", answer(TEN)]) as (request, _):
        assert [ask(direct, request), ask(direct, request)] == [TEN] * 2


def test_surplus_bytes_do_not_end_up_in_the_next_response(direct: DirectReads) -> None:
    with scripted([answer(TEN + b"more"), answer(TEN)]) as (request, came):
        assert [ask(direct, request), ask(direct, request)] == [TEN] * 2
        assert came == [0, 1]


def test_an_unrequested_response_is_not_used_for_the_next_request(direct: DirectReads) -> None:
    ours, theirs = socket.socketpair()
    with scripted([answer(TEN)]) as (request, came), theirs:
        place = urlsplit(request.url).netloc
        rested = HTTPConnection(place)
        rested.sock = ours
        direct._waiting.append((time.monotonic(), place, rested))
        theirs.sendall(answer(b"of another"))
        assert ask(direct, request) == TEN
        assert came == [0]
        assert ours.fileno() == -1


@pytest.mark.parametrize("status", ["200 OK", "301 Moved", "307 There", "400 Bad", "403 No", "404 Gone", "416 Short"])
def test_responses_of_other_kinds_are_left_to_the_client(status: str, direct: DirectReads) -> None:
    with scripted([answer(b"<Error/>", status=status), answer(TEN)]) as (request, _):
        assert ask(direct, request) == b""
        assert not direct.works
        assert ask(direct, request) == TEN
        assert direct.works


@pytest.mark.parametrize("status", ["429 Slow", "500 Broken", "502 Bad", "503 Slow Down", "504 Late"])
def test_a_busy_server_is_retried_after_a_pause(status: str, direct: DirectReads) -> None:
    with scripted([answer(b"", status=status)]) as (request, came):
        with pytest.raises(ClientError, match=status.partition(" ")[2]):
            ask(direct, request)
        assert len(came) == 1


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (answer(b"012", length=10), TimeoutError),  # then silence
        (answer(b"012"), ResponseStreamingError),
        (b"SSH-2.0-OpenSSH_9.6\r\n", ResponseStreamingError),
        (b"HTTP/1.1 100 Continue\r\n\r\n", TimeoutError),
        (b"", TimeoutError),
    ],
)
def test_malformed_responses_are_rejected(said: bytes, error: type[Exception], direct: DirectReads) -> None:
    with scripted([said, b""]) as (request, _), pytest.raises(error):
        ask(direct, request)


def test_a_connection_waits_only_for_the_remaining_time() -> None:
    connection, now, patience = Mock(), [0.0], Patience(request=60, call=180)
    one = PatientRequest(Call(patience), patience.request, clock=lambda: now[0])
    now[0] = 59
    _wait_for(connection, one)
    connection.settimeout.assert_called_once_with(1)
    now[0] = 60
    with pytest.raises(TimeoutError, match="for 60 s"):
        _wait_for(connection, one)


def test_an_unreachable_server_raises_an_error(direct: DirectReads) -> None:
    with scripted([answer(TEN)]) as (request, _):
        assert ask(direct, request) == TEN
    with pytest.raises(ConnectionRefusedError):
        ask(direct, request)
    never = DirectReads(5, Patience(), verify=True)
    assert ask(never, request) == b""  # the client may have a different method


def test_the_headers_are_checked_before_any_byte_is_written(direct: DirectReads) -> None:
    buffer = bytearray(10)

    def check(headers: HTTPMessage) -> None:
        assert headers.get("content-range") == "bytes 0-9/10"
        raise StorageError("not this one")

    with scripted([answer(TEN), answer(TEN)]) as (request, came):
        with pytest.raises(StorageError):
            direct.read(request, [memoryview(buffer)], check)
        assert buffer == bytes(10)
        assert ask(direct, request) == TEN
        assert came == [0, 1]
